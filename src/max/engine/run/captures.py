"""Captured executions of a model, which replays repeat on the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from max._dataclass import dataclass
from max.driver import Tensor
from max.engine.run.linked_program import Instance, Linked

__all__ = ["Capture", "Captures", "checked_keys"]


@dataclass(slots=True)
class Capture:
    """A captured execution: its programs, sizes and memory."""

    linked: Linked
    instance: Instance
    symbols: tuple[int, ...]
    inputs: list[Tensor]
    outputs: list[Tensor]


def checked_keys(graph_keys: int | Sequence[int], inputs: Sequence[Tensor]) -> tuple[int, ...]:
    """Checks the arguments of a capture or a replay, and returns the keys.

    Raises:
        TypeError: `graph_keys` is neither an int nor a sequence of ints.
        ValueError: A key is out of the range of uint64, or there are no inputs.
    """
    listed: Any = (graph_keys,) if isinstance(graph_keys, int) else graph_keys
    keys = tuple(cast("Sequence[Any]", listed)) if isinstance(listed, Sequence) else None
    # type() instead of isinstance: bools are not keys
    if keys is None or not all(type(key) is int for key in keys):
        raise TypeError(f"graph_keys is {graph_keys!r}, expected an int or a sequence of ints")
    for key in keys:
        if not 0 <= key < 1 << 64:
            raise ValueError(f"graph_keys: {key} does not fit into 64 bits, 0 to 2**64 - 1 do")
    if not inputs:
        raise ValueError("no input buffers were given")
    return keys


class Captures:
    """The captured executions of a model, by key.

    Args:
        model: The name of the model, for messages.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._by_key: dict[int, Capture] = {}

    def add(self, keys: Sequence[int], capture: Capture) -> None:
        """Stores a capture under each of the keys."""
        self._by_key.update(dict.fromkeys(keys, capture))

    def clear(self) -> None:
        """Drops all captures."""
        self._by_key.clear()

    def find(self, graph_keys: int | Sequence[int], inputs: Sequence[Tensor]) -> Capture:
        """The capture that all of the keys have.

        Raises:
            TypeError, ValueError: As for `checked_keys`.
            RuntimeError: A key has no capture, or the keys have different ones.
        """
        captures = [self._by_key.get(key) for key in checked_keys(graph_keys, inputs)]
        first = captures[0] if captures else None
        if first is None or any(capture is not first for capture in captures):
            raise RuntimeError(
                f"{self._model}: no graph has been captured for {graph_keys}; call capture first"
            )
        return first
