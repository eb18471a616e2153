"""LLVM types and constants. 8- and 16-bit floats are integers, as not all targets support them."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any: these functions check their types

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from max._host.process_caches import process_cache
from max.dtype.rounding import convert_rounding_once
from max.kernel.ir.nodes import Const
from max.kernel.types import ScalarType, Type, f16, f32

SCALAR = {
    "i8": "i8",
    "i16": "i16",
    "i32": "i32",
    "i64": "i64",
    "u8": "i8",
    "u16": "i16",
    "u32": "i32",
    "u64": "i64",
    "f8e4m3fn": "i8",
    "f8e4m3fnuz": "i8",
    "f8e5m2": "i8",
    "f8e5m2fnuz": "i8",
    "f4e2m1fn": "i8",
    "f6e2m3fn": "i8",
    "f6e3m2fn": "i8",
    "f16": "i16",
    "bf16": "i16",
    "f32": "float",
    "f64": "double",
    "bool": "i1",
}
#: The LLVM type of an element in memory.
MEMORY = {**SCALAR, "bool": "i8"}
_names: dict[Type, str] = process_cache({})


def llvm_type(type: Type) -> str:
    """The LLVM type of a value."""
    name = _names.get(type)
    if name is None:
        if type.width < 0:
            name = "ptr"
        elif type.width == 0:
            name = SCALAR[type.dtype.name]
        else:
            name = f"<{type.width} x {SCALAR[type.dtype.name]}>"
        _names[type] = name
    return name


def vector_name(element: str, width: int) -> str:
    """An LLVM type with as many lanes as a value type (0: scalar)."""
    return f"<{width} x {element}>" if width > 0 else element


def number_text(value: Any, dtype: ScalarType) -> str:
    """One literal."""
    if dtype.kind == "b":
        return "true" if value else "false"
    if not dtype.is_float:
        return str(int(value))
    if dtype.bits == 8:
        return str(
            int(convert_rounding_once(np.asarray(value, np.float64), dtype.numpy).view(np.uint8))
        )
    if dtype.bits == 16:
        if dtype is f16:
            with np.errstate(over="ignore"):
                return str(int(np.float16(value).view(np.uint16)))
        return str(
            int(convert_rounding_once(np.asarray(value, np.float64), dtype.numpy).view(np.uint16))
        )
    if dtype is f32:
        with np.errstate(over="ignore"):
            value = float(np.float32(value))
    # LLVM writes literals of f32, too, as the bits of a double
    return "0x" + struct.pack(">d", value).hex().upper()


def const_text(c: Const) -> str:
    """A constant without its type."""
    dtype, width = c.type.dtype, c.type.width
    if width <= 0:
        return number_text(c.value, dtype)
    element = SCALAR[dtype.name]
    if isinstance(c.value, tuple):
        return "<" + ", ".join(f"{element} {number_text(x, dtype)}" for x in c.value) + ">"
    return f"splat ({element} {number_text(c.value, dtype)})"


def constants(width: int) -> Callable[[str, Any], str]:
    """A function that formats literals, broadcast to all lanes of vectors."""

    def make(element: str, value: Any) -> str:
        text = number_text(value, f32) if element == "float" else str(value)
        return f"splat ({element} {text})" if width else text

    return make


def lane_list(first: int, count: int) -> str:
    """The shuffle mask of consecutive lanes."""
    return ", ".join(f"i32 {first + i}" for i in range(count))


def mangled_suffix(type: Type) -> str:
    """The suffix of a type in intrinsic names."""
    dtype = type.dtype
    element = f"f{dtype.bits}" if dtype.is_float else f"i{dtype.bits}"
    return f"v{type.width}{element}" if type.width > 0 else element
