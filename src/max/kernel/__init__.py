"""The kernel language: a typed subset of Python that compiles to machine code. See docs/kernel-language.md.

>>> from max import kernel as k

Names are loaded when they are first used: a program from the disk cache runs without the frontend and the lowering.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from max.kernel.errors import (
        Diagnostic,
        KernelError,
        KernelIndexError,
        KernelNameError,
        KernelSyntaxError,
        KernelTypeError,
        KernelValueError,
    )
    from max.kernel.frontend.specialize import specialize
    from max.kernel.interpreter.entry import interpreted_entry, launch_arguments
    from max.kernel.interpreter.interpret import interpret
    from max.kernel.ir.nodes import ArgSlot, KernelIR, Message
    from max.kernel.language import lang, mathlib
    from max.kernel.language.registry import kernel_of_op, register, registered_names
    from max.kernel.language.source import (
        InlineFunction,
        Kernel,
        from_source,
        inline,
        kernel,
        outlined,
    )
    from max.kernel.lowering.module import Modules, emit_llvm, emit_modules
    from max.kernel.targets.cpu import CPUTarget, host_target
    from max.kernel.targets.target import LLVMTarget, Target
    from max.kernel.types import (
        SIMD,
        Context,
        InOut,
        Input,
        Integer,
        Mask,
        Output,
        ScalarType,
        TensorSpec,
        Value,
        View,
        bf16,
        bool_,
        f4e2m1fn,
        f6e2m3fn,
        f6e3m2fn,
        f8e4m3fn,
        f8e4m3fnuz,
        f8e5m2,
        f8e5m2fnuz,
        f16,
        f32,
        f64,
        i8,
        i16,
        i32,
        i64,
        scalar_type,
        u8,
        u16,
        u32,
        u64,
    )

    # names that Python has too are bound here, so that this file itself can still use Python's
    bool = bool_
    abs, all, any, max, min, pow, print, round = (
        lang.abs,
        lang.all,
        lang.any,
        lang.max,
        lang.min,
        mathlib.pow,
        lang.print,
        lang.round,
    )
    assume, brief, opaque, run_time, static_assert, static_range, unroll = (
        lang.assume,
        lang.brief,
        lang.opaque,
        lang.run_time,
        lang.static_assert,
        lang.static_range,
        lang.unroll,
    )
    bitcast, cast, cast_unchecked = lang.bitcast, lang.cast, lang.cast_unchecked
    ceil, floor, trunc, copysign, fma, sqrt = (
        lang.ceil,
        lang.floor,
        lang.trunc,
        lang.copysign,
        lang.fma,
        lang.sqrt,
    )
    ceildiv, isinf, isnan = lang.ceildiv, lang.isinf, lang.isnan
    concat, deinterleave, interleave, iota = (
        lang.concat,
        lang.deinterleave,
        lang.interleave,
        lang.iota,
    )
    select, shuffle, splat = lang.select, lang.shuffle, lang.splat
    popcount = lang.popcount
    count_leading_zeros, count_trailing_zeros = lang.count_leading_zeros, lang.count_trailing_zeros
    reduce_add, reduce_max, reduce_min = lang.reduce_add, lang.reduce_max, lang.reduce_min
    reduce_mul, lookup, permute = lang.reduce_mul, lang.lookup, lang.permute
    dot_bf16, dot_i8, dot_i16 = lang.dot_bf16, lang.dot_i8, lang.dot_i16
    matrix_tiles, target, tile, vectors = lang.matrix_tiles, lang.target, lang.tile, lang.vectors
    acos, atanh, cos, erf, exp, exp2, fmod = (
        mathlib.acos,
        mathlib.atanh,
        mathlib.cos,
        mathlib.erf,
        mathlib.exp,
        mathlib.exp2,
        mathlib.fmod,
    )
    log, log1p, log2, polynomial = mathlib.log, mathlib.log1p, mathlib.log2, mathlib.polynomial
    rsqrt, sigmoid, silu, sin, tanh = (
        mathlib.rsqrt,
        mathlib.sigmoid,
        mathlib.silu,
        mathlib.sin,
        mathlib.tanh,
    )

_NAMES = {
    "max.kernel.errors": (
        "Diagnostic KernelError KernelIndexError KernelNameError KernelSyntaxError KernelTypeError "
        "KernelValueError"
    ),
    "max.kernel.frontend.specialize": "specialize",
    "max.kernel.interpreter.entry": "interpreted_entry launch_arguments",
    "max.kernel.interpreter.interpret": "interpret",
    "max.kernel.ir.nodes": "ArgSlot KernelIR Message",
    "max.kernel.language.registry": "kernel_of_op register registered_names",
    "max.kernel.language.source": "InlineFunction Kernel from_source inline kernel outlined",
    "max.kernel.lowering.module": "Modules emit_llvm emit_modules",
    "max.kernel.targets.cpu": "CPUTarget host_target",
    "max.kernel.targets.target": "LLVMTarget Target",
    "max.kernel.types": (
        "SIMD Context InOut Input Integer Mask Output ScalarType TensorSpec Value View bf16 f4e2m1fn f6e2m3fn f6e3m2fn "
        "f8e4m3fn f8e4m3fnuz f8e5m2 f8e5m2fnuz f16 f32 f64 i8 i16 i32 i64 scalar_type u8 u16 u32 u64"
    ),
    "max.kernel.language.lang": (
        "abs all any max min print round assume brief opaque run_time static_assert static_range unroll bitcast cast "
        "cast_unchecked ceil floor trunc copysign fma sqrt ceildiv isinf isnan concat deinterleave interleave "
        "iota lookup permute select shuffle splat popcount count_leading_zeros count_trailing_zeros reduce_add "
        "reduce_max reduce_min reduce_mul dot_bf16 dot_i8 dot_i16 matrix_tiles target tile vectors"
    ),
    "max.kernel.language.mathlib": (
        "pow acos atanh cos erf exp exp2 fmod log log1p log2 polynomial rsqrt sigmoid silu sin tanh"
    ),
}
"""The names of each module."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "bool":
        value = import_module("max.kernel.types").bool_
    elif name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "bool"})


__all__ = [
    "CPUTarget",
    "SIMD",
    "ArgSlot",
    "Context",
    "Diagnostic",
    "InOut",
    "InlineFunction",
    "Input",
    "Integer",
    "Kernel",
    "KernelError",
    "KernelIR",
    "KernelIndexError",
    "KernelNameError",
    "KernelSyntaxError",
    "KernelTypeError",
    "KernelValueError",
    "Mask",
    "Message",
    "Output",
    "ScalarType",
    "LLVMTarget",
    "Modules",
    "Target",
    "TensorSpec",
    "Value",
    "View",
    "bf16",
    "emit_llvm",
    "emit_modules",
    "f4e2m1fn",
    "f6e2m3fn",
    "f6e3m2fn",
    "f8e4m3fn",
    "f8e4m3fnuz",
    "f8e5m2",
    "f8e5m2fnuz",
    "f16",
    "f32",
    "f64",
    "from_source",
    "host_target",
    "i8",
    "i16",
    "i32",
    "i64",
    "inline",
    "interpret",
    "interpreted_entry",
    "launch_arguments",
    "kernel",
    "outlined",
    "register",
    "kernel_of_op",
    "registered_names",
    "scalar_type",
    "specialize",
    "u8",
    "u16",
    "u32",
    "u64",
]
