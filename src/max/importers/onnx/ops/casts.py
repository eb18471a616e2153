"""Casts between element types."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.graph import TensorValue, ops
from max.importers.errors import HostNode, Unsupported
from max.importers.node import Node
from max.importers.onnx.element_types import STORAGE, TEXT, code_of, dtype_of, numpy_of, storage_of
from max.importers.onnx.table import host, op
from max.importers.values import Imported

Array = npt.NDArray[Any]

_SMALL = {17, 18, 19, 20, 23, 24}
"""Floats of 8 bits or fewer."""


def wrap_bits(x: TensorValue, code: int) -> TensorValue:
    """Integers of less than 8 bits, as their wider type holds them: the low bits, with the sign."""
    name, dtype = STORAGE[code]
    bits = int(name[-1])
    wide = ops.cast(x, DType.int32)
    low = ops.mod(wide, 1 << bits)  # in [0, 2**bits): the remainder has the sign of the divisor
    if not name.startswith("u"):
        low = ops.where(low >= 1 << (bits - 1), low - (1 << bits), low)
    return ops.cast(low, dtype)


def _cast(node: Node, code: int) -> Any:
    value = node.value(0)
    if value.is_text or code == TEXT or code in _SMALL:
        raise HostNode("casts strings and small floats between graphs")
    x = value.tensor
    if code in STORAGE:
        narrow = wrap_bits(x if x.dtype.is_integral() else ops.cast(x, DType.int32), code)
        return Imported(narrow, stored_as=storage_of(code))
    dtype = dtype_of(code)
    if x.dtype is DType.float8_e8m0fnu:
        raise HostNode("casts small floats between graphs")
    return ops.cast(x, dtype)


@op("Cast")
def cast(node: Node) -> Any:
    return _cast(node, node.attr("to"))


@op("CastLike")
def cast_like(node: Node) -> Any:
    return _cast(node, code_of(node.value(1).dtype, node.value(1).stored_as))


@host("Cast")
def cast_on_host(node: Node, x: Array) -> Array:
    return convert_array(
        x, node.attr("to"), bool(node.attr("saturate", 1)), node.attr("round_mode", "up")
    )


@host("CastLike")
def cast_like_on_host(node: Node, x: Array, like: Array) -> Array:
    code = TEXT if like.dtype == object else code_of(DType.from_numpy(like.dtype))
    return convert_array(x, code, bool(node.attr("saturate", 1)), node.attr("round_mode", "up"))


def convert_array(x: Array, code: int, saturates: bool = True, rounding: str = "up") -> Array:
    """An array in another ONNX type, with strings and small floats."""
    if code == TEXT:
        return _as_text(x)
    if x.dtype == object:
        return _from_text(x, code)
    if code in STORAGE:
        return x.astype(numpy_of(STORAGE[code][0])).astype(STORAGE[code][1].to_numpy())
    dtype = dtype_of(code).to_numpy()
    if code not in _SMALL:
        return x.astype(np.float32).astype(dtype) if x.dtype.kind not in "biuf" else x.astype(dtype)
    wide = x.astype(np.float32) if x.dtype != np.float64 else x
    if code == 24:
        return _powers(wide, rounding, saturates)
    return _small(wide, dtype, code, saturates)


def _small(x: Array, dtype: np.dtype[Any], code: int, saturates: bool) -> Array:
    """Floats of 8 bits or fewer: too large ones become the largest, or what the type has for them."""
    info = ml_dtypes.finfo(dtype)
    largest = float(info.max)
    rounded = x.astype(dtype)
    # float4_e2m1fn has neither infinity nor NaN, so it saturates in any case
    if saturates or code == 23:
        return np.where(np.isnan(x), x, np.clip(x, -largest, largest)).astype(dtype)
    return rounded


def _powers(x: Array, rounding: str, saturates: bool) -> Array:
    """Powers of two: the exponents of the magnitudes, rounded."""
    with np.errstate(all="ignore"):
        # float32 has 8 bits of exponent above 23 of mantissa; float8_e8m0fnu is such an exponent
        bits = np.abs(x.astype(np.float32)).view(np.uint32)
    exponent = (bits >> 23).astype(np.int64)
    mantissa = bits & 0x7FFFFF
    if rounding == "up":
        # a subnormal float32 of at most 2**-127, mantissa 0x400000, keeps exponent 0
        up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= 0x400000))
    elif rounding == "nearest":
        up = mantissa >= 0x400000  # half or more
        up &= ~((exponent == 0) & (mantissa <= 0x400000))
    elif rounding == "down":
        up = np.zeros(mantissa.shape, bool)
    else:
        raise Unsupported(f"round_mode is {rounding!r}, expected up, down or nearest")
    special = exponent == 0xFF
    result = exponent + up
    # 0xFF is NaN, 0xFE is 2**127
    result = np.where(result >= 0xFF, 0xFE if saturates else 0xFF, result)
    if saturates:
        infinite = special & (mantissa == 0)
        result = np.where(infinite, 0xFE, result)
    result = np.where(np.isnan(x), 0xFF, result)
    return result.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)


def _as_text(x: Array) -> Array:
    if x.dtype == object:
        return x
    texts = np.empty(x.shape, object)
    flat = x.reshape(-1)
    if x.dtype.kind not in "biu":
        values = [_float_text(number) for number in flat]
    else:
        values = [str(number) for number in flat]
    texts[...] = np.array(values, object).reshape(x.shape)
    return texts


def _float_text(number: Any) -> str:
    if np.isnan(number):
        return "NaN"
    if np.isinf(number):
        return "INF" if number > 0 else "-INF"
    return str(number)


def _from_text(x: Array, code: int) -> Array:
    dtype = dtype_of(code).to_numpy()
    numbers = [_number(str(text), dtype) for text in x.reshape(-1)]
    if dtype.kind in "iu":
        return np.array([int(n) for n in numbers], dtype).reshape(x.shape)
    return np.array(numbers, np.float64).astype(dtype).reshape(x.shape)


def _number(text: str, dtype: np.dtype[Any]) -> float | int:
    try:
        return int(text) if dtype.kind in "iu" and text.lstrip("+-").isdigit() else float(text)
    except ValueError as error:
        raise ValueError(f"Cast: {text!r} is no number") from error


@op("BitCast")
def bit_cast(node: Node) -> Any:
    raise HostNode("reinterprets bits between graphs")


@host("BitCast")
def bit_cast_on_host(node: Node, x: Array) -> Array:
    code = node.attr("to")
    target = dtype_of(code).to_numpy() if code not in STORAGE else STORAGE[code][1].to_numpy()
    return np.ascontiguousarray(x).reshape(-1).view(target).reshape(x.shape)
