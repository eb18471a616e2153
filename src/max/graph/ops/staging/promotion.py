"""Type promotion: the dtype of mixed operands.

- Operands of equal dtype keep it.
- Numbers and arrays are weak: they take the dtype of the tensor operand. A float with an integer tensor is an error, so
  is an int that the dtype may not hold exactly: up to 256 in bfloat16, 2048 in float16, 2**24 in float32, 2**53 in
  float64, else up to the dtype's limits. Floats are rounded; beyond the dtype's range they are infinite.
- Dimensions are int64, but take the dtype of a float tensor.
- Two tensors promote to the higher category (bool, unsigned, signed, float) and the greater width. A signed integer
  with an unsigned one of equal or greater width is widened so that all values fit; ``float16`` with ``bfloat16`` gives
  ``float32``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from max.dtype import DType, finfo
from max.dtype.rounding import convert_rounding_once
from max.graph.dim import Dim
from max.graph.ops.creation.constant import constant
from max.graph.ops.staging.stage import as_tensor, stage
from max.graph.shape import Shape
from max.graph.type import DeviceRef
from max.graph.value import TensorValue, TensorValueLike, Value

__all__ = ["promote_types", "promote_operands"]

_SIGNED = {8: DType.int8, 16: DType.int16, 32: DType.int32, 64: DType.int64}
_FLOAT = {16: DType.float16, 32: DType.float32, 64: DType.float64}


def _category(dtype: DType) -> int:
    if dtype is DType.bool:
        return 0
    if dtype.is_float():
        return 3
    return 2 if dtype.is_signed_integral() else 1


def promote_types(op: str, x: DType, y: DType) -> DType:
    """The promoted dtype of two tensors.

    Raises:
        TypeError: No dtype holds both.
    """
    if x is y:
        return x
    if _category(x) > _category(y):
        x, y = y, x
    low, high = _category(x), _category(y)
    if low == 0:
        return y
    if low == high:
        if x.size_in_bits != y.size_in_bits:
            return x if x.size_in_bits > y.size_in_bits else y
        # two float formats of one width, neither of which holds the other
        return _FLOAT[max(16, 2 * x.size_in_bits)]
    if high == 3:
        # an integer wider than the float takes the float of its own width
        return y if x.size_in_bits <= y.size_in_bits else _FLOAT[x.size_in_bits]
    # unsigned with a wider signed type, which holds all of its values
    if x.size_in_bits < y.size_in_bits:
        return y
    if x.size_in_bits == 64:
        raise TypeError(
            f"{op}: no integer type holds both {x.name} and {y.name}; cast one of the operands"
        )
    return _SIGNED[2 * x.size_in_bits]


def is_weak(value: object) -> bool:
    """Whether an operand takes the dtype of the tensor operand: it is a number, an array, a dimension or a shape."""
    return not isinstance(value, Value) and not hasattr(value, "__tensorvalue__")


def promote_weak(op: str, value: Any, dtype: DType, device: DeviceRef) -> TensorValue:
    """Converts a number, array or dimension to a tensor of `dtype` on `device`.

    Raises:
        TypeError: The value is a float, but `dtype` is not.
        ValueError: The value is out of the range of `dtype`.
    """
    if isinstance(value, Dim | Shape):
        if isinstance(value, Dim) and value.expr.is_static:
            value = value.expr.value
        else:
            return as_tensor(value).cast(dtype).to(device)
    kind = np.asarray(value).dtype.kind if not isinstance(value, bool | int | float) else ""
    if (isinstance(value, float) or kind in ("f", "V")) and not dtype.is_float():
        raise TypeError(
            f"{op}: {value!r} is a float, the other operand is {dtype.name}; cast the tensor first"
        )
    if isinstance(value, int) and dtype.is_integral() and value.bit_length() > 64:
        raise ValueError(f"{op}: the integer {_short(value)} is out of range for {dtype.name}")
    if dtype.is_float():
        value = _rounded_number(op, value, kind, dtype)
    return constant(value, dtype, device)


def _rounded_number(op: str, value: Any, kind: str, dtype: DType) -> Any:
    """A number or array for a float tensor, whose integers are exact in `dtype`, and whose floats are rounded to it.

    Raises:
        ValueError: `dtype` may not hold an integer exactly.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int) or kind in ("i", "u"):
        greatest = greatest_integer(dtype)
        for extreme in _extremes(value):
            if abs(extreme) > greatest:
                raise ValueError(
                    f"{op}: the integer {_short(extreme)} may lose precision in {dtype.name}, which holds integers up "
                    f"to {greatest}; pass a float to have it rounded, or cast the tensor first"
                )
        return value
    if isinstance(value, float) or kind in ("f", "V"):
        with np.errstate(over="ignore"):
            return convert_rounding_once(np.asarray(value), dtype.to_numpy())
    return value


def greatest_integer(dtype: DType) -> int:
    """The magnitude up to which a float dtype takes integers: all of them are exact, or 8 bits and in range."""
    limits = finfo(dtype)
    return int(limits.max) if dtype.size_in_bits <= 8 else int(2 / limits.eps)


def _extremes(value: Any) -> tuple[int, ...]:
    """The least and the greatest of some integers."""
    if isinstance(value, int):
        return (value,)
    array = np.asarray(value)
    return (int(array.min()), int(array.max())) if array.size else ()


def _short(number: int) -> str:
    """A number of any length as text: Python refuses to print the longest."""
    return str(number) if number.bit_length() < 200 else f"of {number.bit_length()} bits"


def _dims_as_tensor(value: TensorValueLike, other: TensorValueLike) -> TensorValueLike:
    """Converts dimensions to an int64 tensor if the other operand is a tensor of integers; else returns `value`."""
    if not isinstance(value, Dim | Shape) or is_weak(other):
        return value
    tensor = as_tensor(other)
    return value if tensor.dtype.is_float() else as_tensor(value).to(tensor.device)


def promote_operands(
    op: str, x: TensorValueLike, y: TensorValueLike
) -> tuple[TensorValue, TensorValue]:
    """Converts two operands to tensors of their promoted dtype.

    Raises:
        TypeError: No dtype fits both.
        ValueError: A number is out of the dtype's range.
    """
    x, y = _dims_as_tensor(x, y), _dims_as_tensor(y, x)
    x_weak, y_weak = is_weak(x), is_weak(y)
    if x_weak and not y_weak:
        tensor = as_tensor(y)
        return promote_weak(op, x, tensor.dtype, tensor.device), tensor
    if y_weak and not x_weak:
        tensor = as_tensor(x)
        return tensor, promote_weak(op, y, tensor.dtype, tensor.device)
    a, b = as_tensor(x), as_tensor(y)
    a_type, b_type = a.mlir_type, b.mlir_type
    if a_type.dtype is b_type.dtype:
        return a, b
    dtype = promote_types(op, a_type.dtype, b_type.dtype)
    return cast_to(a, dtype), cast_to(b, dtype)


def cast_to(x: TensorValue, dtype: DType) -> TensorValue:
    """Casts `x` to `dtype`; returns `x` itself if it has the dtype."""
    type_ = x.mlir_type
    return x if type_.dtype is dtype else stage("cast", (x,), None, type_.with_dtype(dtype))
