"""The kernel language: a typed subset of Python that compiles to machine code. See docs/kernel-language.md.

>>> from max import kernel as k
"""

from max.kernel.errors import (
    Diagnostic,
    KernelError,
    KernelIndexError,
    KernelNameError,
    KernelSyntaxError,
    KernelTypeError,
    KernelValueError,
)
from max.kernel.interpret import interpret
from max.kernel.ir import ArgSlot, KernelIR, Message
from max.kernel.lang import abs as abs
from max.kernel.lang import all as all
from max.kernel.lang import any as any
from max.kernel.lang import (
    assume,
    bitcast,
    cast,
    cast_unchecked,
    ceil,
    ceildiv,
    concat,
    copysign,
    count_leading_zeros,
    count_trailing_zeros,
    deinterleave,
    dot_bf16,
    floor,
    fma,
    interleave,
    iota,
    isinf,
    isnan,
    popcount,
    reduce_add,
    reduce_max,
    reduce_min,
    reduce_mul,
    select,
    shuffle,
    splat,
    sqrt,
    static_assert,
    static_range,
    target,
    tile,
    trunc,
    unroll,
    vectors,
)
from max.kernel.lang import max as max
from max.kernel.lang import min as min
from max.kernel.lang import print as print
from max.kernel.lang import round as round
from max.kernel.lower_llvm import emit_llvm
from max.kernel.mathlib import (
    acos,
    atanh,
    cos,
    erf,
    exp,
    exp2,
    log,
    log1p,
    log2,
    polynomial,
    rsqrt,
    sigmoid,
    silu,
    sin,
    tanh,
)
from max.kernel.mathlib import pow as pow
from max.kernel.registry import register, registered, registered_names
from max.kernel.source import InlineFunction, Kernel, from_source, inline, kernel
from max.kernel.specialize import specialize
from max.kernel.target import Target, host_target
from max.kernel.types import (
    SIMD,
    Context,
    InOut,
    Input,
    Output,
    ScalarType,
    TensorSpec,
    bf16,
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
from max.kernel.types import bool_ as bool
