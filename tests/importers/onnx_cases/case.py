"""What a case of an op is, and how it draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.importers.draws import Draws

F32 = np.dtype(np.float32)


@dataclass
class Case:
    """One node with operands.

    Attributes:
        inputs: The operands; None for an absent one.
        attrs: The attributes.
        outputs: The number of results.
        version: The version of the op set.
        constant: Positions of operands that are constants of the model.
        expected: The results, where the reference evaluator is not the judge.
        rtol: The tolerance.
    """

    inputs: list[Any]
    attrs: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    version: int = 21
    constant: tuple[int, ...] = ()
    expected: Any = None
    rtol: float = 1e-4


class Draw(Draws):
    """A source of random operands."""

    def shape(self, low: int = 1, high: int = 4, empty: bool = True) -> tuple[int, ...]:
        """A shape of small, odd and sometimes empty axes."""
        return self.sizes(low, high, empty)

    def floats(self, *shape: int, dtype: Any = np.float32, low: float = -3, high: float = 3) -> Any:
        return self.rng.uniform(low, high, shape).astype(dtype)

    def ints(self, *shape: int, low: int = -9, high: int = 9, dtype: Any = np.int64) -> Any:
        return self.rng.integers(low, high + 1, shape).astype(dtype)

    def bools(self, *shape: int) -> Any:
        return self.rng.integers(0, 2, shape).astype(bool)

    def float_type(self) -> Any:
        return self.choice([np.float32, np.float32, np.float64])

    def int_type(self) -> Any:
        return self.choice([np.int32, np.int64, np.int8, np.uint8])

    def pair(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Two shapes that broadcast."""
        shape = self.shape()
        other = tuple(
            1 if self.int(0, 2) == 0 else size for size in shape[self.int(0, len(shape)) :]
        )
        return (shape, other) if self.bool() else (other, shape)

    def axis(self, rank: int) -> int:
        return self.int(-rank, rank - 1)


CASES: dict[str, Callable[[Draw], Case]] = {}
"""The cases by the full name of the op."""


def case(*names: str) -> Callable[[Any], Any]:
    """Registers a case for ops; a function with two parameters gets the name of the op too."""

    def register(function: Any) -> Any:
        takes_name = function.__code__.co_argcount > 1
        for name in names:
            CASES[name] = (lambda draw, name=name: function(draw, name)) if takes_name else function
        return function

    return register
