"""Cells: the values behind eager tensors, computed or not, and the calls that compute them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from max import driver
from max.experimental._signatures import Signature
from max.experimental._types import CellType

__all__ = ["Call", "Cell", "Unsettled"]


class Cell:
    """A value: in memory, or the result of a call that was recorded.

    Args:
        type: Its type.
        storage: Its memory; None where it is not computed yet.
        call: The call that computes it, or the replay that the call is part of; None where it is in memory.
        index: Which of the results of the call it is. Not set in a replay.

    Attributes:
        holder: Refers to the tensor on a cell that is not computed; a value that no tensor holds is not kept. Not set in
            a replay.
    """

    __slots__ = ("__weakref__", "call", "holder", "index", "storage", "type")

    def __init__(
        self,
        type: CellType,
        storage: driver.Tensor | None = None,
        call: Call | Unsettled | None = None,
        index: int = 0,
    ) -> None:
        self.type, self.storage, self.call, self.index = type, storage, call, index
        self.holder: weakref.ref[Any] | None = None

    def keep(self, storage: driver.Tensor) -> None:
        """Takes the elements, which are computed now.

        Raises:
            RuntimeError: They have another shape than was recorded.
        """
        if self.type.shape != storage.shape:
            raise RuntimeError(
                f"an eager tensor of shape {list(self.type.shape)} was computed with shape {list(storage.shape)}; "
                "please report this"
            )
        self.storage, self.call, self.holder = storage, None, None


class Call:
    """A call of an op that was recorded and not run.

    Args:
        signature: What is called, see `Signature`.
        inputs: The tensors that it reads.
        place: The file and line of the user's program that made the call.
    """

    __slots__ = ("inputs", "place", "results", "signature")

    def __init__(
        self, signature: Signature, inputs: Sequence[Cell], place: tuple[str, int]
    ) -> None:
        self.signature, self.inputs, self.place = signature, inputs, place
        self.results: tuple[weakref.ref[Cell], ...] = ()


class Unsettled:
    """Stands for the calls of cells that have none yet, see `max.experimental._replays`."""

    __slots__ = ()

    def settle(self) -> None:
        """Gives the cells their calls."""
        raise NotImplementedError
