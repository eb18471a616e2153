"""What a case of an op of torch is, and how it draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.importers.draws import Draws


@dataclass
class Case:
    """A call of an op.

    Attributes:
        args: The arguments; tensors among them are inputs of the graph.
        kwargs: The arguments by name.
        rtol: The tolerance.
        constant: Whether the tensors are constants of the graph.
        only: The results that are compared; None: all of them.
    """

    args: list[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    rtol: float = 1e-4
    constant: bool = False
    only: tuple[int, ...] | None = None


class Draw(Draws):
    """A source of random arguments."""

    def shape(self, low: int = 0, high: int = 4, empty: bool = True) -> tuple[int, ...]:
        """A shape of small, odd and sometimes empty axes."""
        return self.sizes(low, high, empty)

    def floats(
        self, *shape: int, low: float = -3, high: float = 3, dtype: Any = torch.float32
    ) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self.rng.uniform(low, high, shape))).to(dtype)

    def ints(
        self, *shape: int, low: int = -9, high: int = 9, dtype: Any = torch.int64
    ) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self.rng.integers(low, high + 1, shape))).to(dtype)

    def bools(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self.rng.integers(0, 2, shape))).to(torch.bool)

    def any(self, *shape: int) -> torch.Tensor:
        """A tensor of one of the common types."""
        kind = self.int(0, 4)
        if kind == 0:
            return self.ints(*shape, dtype=self.choice([torch.int32, torch.int64, torch.int8]))
        if kind == 1:
            return self.bools(*shape)
        return self.floats(*shape, dtype=self.choice([torch.float32, torch.float64]))

    def broadcast(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts to another."""
        sizes = [1 if self.int(0, 2) == 0 else size for size in shape]
        return tuple(sizes[self.int(0, len(sizes)) :]) if sizes else ()

    def axis(self, rank: int) -> int:
        return self.int(-rank, rank - 1) if rank else self.int(-1, 0)

    def axes(self, rank: int) -> list[int]:
        chosen = self.rng.permutation(rank)[: self.int(1, max(rank, 1))]
        return [int(axis) - (rank if self.bool() else 0) for axis in chosen]


Function = Callable[[Draw], Case]
CASES: dict[str, Function] = {}
"""Cases by the names of ops."""


def case(*names: str) -> Callable[[Any], Any]:
    """Registers the case of ops; with several names it takes the name too."""

    def register(function: Any) -> Any:
        for name in names:
            assert name not in CASES, name
            if len(names) == 1:
                CASES[name] = function
            else:
                CASES[name] = lambda draw, name=name: function(draw, name)
        return function

    return register
