"""Where the meanings of ops and of custom ops are entered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from max.mlir import MoOp

__all__ = [
    "CUSTOM",
    "OPS",
    "Array",
    "CustomFunction",
    "Dims",
    "OpFunction",
    "Result",
    "op",
    "register",
]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Result:
    """The shape and the dtype that a result must have."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Dims:
    """The values of the symbolic dims, for an op that reads dims from its attributes."""

    def __init__(self, env: Mapping[str, int]) -> None:
        self.env = env

    def __call__(self, dims: Sequence[Any]) -> tuple[int, ...]:
        return tuple(d if isinstance(d, int) else d.evaluate(self.env) for d in dims)


OpFunction = Callable[["MoOp", list[Array], list[Result], Dims], Array | Sequence[Array]]
CustomFunction = Callable[[list[Array], Mapping[str, Any], list[Result]], Sequence[Array]]

OPS: dict[str, OpFunction] = {}
"""``OPS[name](op, operands, results, dims)``: the op's results. Operands come without chains."""

CUSTOM: dict[str, CustomFunction] = {}
"""``CUSTOM[symbol](operands, parameters, results)``; the array of a buffer operand is written in place."""


def op(*names: str) -> Callable[[OpFunction], OpFunction]:
    """Enters a function as the meaning of ops, named without ``mo.``."""

    def enter(function: OpFunction) -> OpFunction:
        for name in names:
            OPS[f"mo.{name}"] = function
        return function

    return enter


def register(symbol: str) -> Callable[[CustomFunction], CustomFunction]:
    """Enters ``function(operands, parameters, results)`` as the meaning of the custom op ``symbol``.

    Operands are the custom op's tensors and buffers in order, without the chain; buffers are changed in place.
    The function gives one array a tensor result.
    """

    def enter(function: CustomFunction) -> CustomFunction:
        CUSTOM[symbol] = function
        return function

    return enter
