"""An operand of an op as its specification declares it: name, kind, dtype, rank, device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from max._dataclass import dataclass
from max.dtype import DType
from max.mlir.types import BufferType, ShapedType, TensorType, short_types

__all__ = ["FLOATS", "INTEGERS", "Operand"]

FLOATS = tuple([dtype for dtype in DType if dtype.is_float()])
"""The dtypes of operands that kernels convert to float32 or float64."""
INTEGERS = tuple([dtype for dtype in DType if dtype.is_integral()])
"""The dtypes of integers."""

_SETS = {FLOATS: "a floating-point type", INTEGERS: "integers"}


@dataclass(frozen=True, slots=True)
class Operand:
    """A declared operand.

    Args:
        name: The name, for messages.
        dtypes: The dtypes that fit.
        rank: The number of dimensions.
        is_buffer: Whether the operand is a buffer that the op reads or changes; else it is a tensor.
        on_any_device: Whether it may be on another device than the other operands: numbers that the host reads.
        present: Whether an op with these attributes has the operand; None: always.
        optional: Whether it may be absent; an op has all of its optional operands, or none.
    """

    name: str
    dtypes: tuple[DType, ...]
    rank: int
    is_buffer: bool = False
    on_any_device: bool = False
    present: Callable[[Mapping[str, Any]], bool] | None = None
    optional: bool = False

    def check(self, op: str, type_: object) -> ShapedType:
        """Checks the type of a value for this operand, and returns it.

        Raises:
            TypeError: The kind or the dtype does not fit.
            ValueError: The rank does not fit.
        """
        expected = BufferType if self.is_buffer else TensorType
        if not isinstance(type_, ShapedType) or not isinstance(type_, expected):
            kind = "buffer" if self.is_buffer else "tensor"
            raise TypeError(f"{op}: {self.name} is {_text(type_)}, expected a {kind}")
        if type_.dtype not in self.dtypes:
            names = _SETS.get(self.dtypes) or " or ".join(dtype.name for dtype in self.dtypes)
            raise TypeError(f"{op}: {self.name} is {type_.short}, expected {names}")
        if type_.rank != self.rank:
            raise ValueError(f"{op}: {self.name} is {type_.short}, expected rank {self.rank}")
        return type_


def _text(type_: object) -> str:
    return short_types([type_])  # pyright: ignore[reportArgumentType]
