"""The Python array API standard (2024.12) on eager tensors, as far as the ops express it.

``x.__array_namespace__()`` is this module. Functions take and return `Tensor`; names and arguments are those of the
standard, which also says what each computes. What is absent is listed in docs/eager.md.

`linalg` is the extension of that name. There is no `fft`, whose results are complex.
"""

from __future__ import annotations

import math
from typing import Any

from max.dtype import DType
from max.experimental.array_api import linalg
from max.experimental.array_api.bits import (
    bitwise_and,
    bitwise_invert,
    bitwise_left_shift,
    bitwise_or,
    bitwise_right_shift,
    bitwise_xor,
    copysign,
    nextafter,
    signbit,
)
from max.experimental.array_api.creation import (
    arange,
    asarray,
    empty,
    empty_like,
    eye,
    from_dlpack,
    full,
    full_like,
    linspace,
    meshgrid,
    ones,
    ones_like,
    tril,
    triu,
    zeros,
    zeros_like,
)
from max.experimental.array_api.data_types import (
    astype,
    can_cast,
    finfo,
    iinfo,
    isdtype,
    result_type,
)
from max.experimental.array_api.elementwise import (
    abs,
    acos,
    add,
    atanh,
    ceil,
    clip,
    conj,
    cos,
    divide,
    equal,
    exp,
    floor,
    floor_divide,
    greater,
    greater_equal,
    imag,
    isfinite,
    isinf,
    isnan,
    less,
    less_equal,
    log,
    log1p,
    log2,
    log10,
    logaddexp,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    multiply,
    negative,
    not_equal,
    positive,
    pow,
    real,
    reciprocal,
    remainder,
    round,
    sign,
    sin,
    sqrt,
    square,
    subtract,
    tan,
    tanh,
    trunc,
    where,
)
from max.experimental.array_api.inspection import NamespaceInfo as __array_namespace_info__
from max.experimental.array_api.inverse import (
    acosh,
    asin,
    asinh,
    atan,
    atan2,
    cosh,
    expm1,
    hypot,
    sinh,
)
from max.experimental.array_api.linear_algebra import matmul, matrix_transpose, tensordot, vecdot
from max.experimental.array_api.manipulation import (
    broadcast_arrays,
    broadcast_shapes,
    broadcast_to,
    concat,
    expand_dims,
    flip,
    moveaxis,
    permute_dims,
    repeat,
    reshape,
    roll,
    squeeze,
    stack,
    tile,
    unstack,
)
from max.experimental.array_api.reductions import (
    all,
    any,
    count_nonzero,
    cumulative_prod,
    cumulative_sum,
    diff,
    max,
    mean,
    min,
    prod,
    std,
    sum,
    var,
)
from max.experimental.array_api.searching import (
    argmax,
    argmin,
    argsort,
    nonzero,
    searchsorted,
    sort,
    take,
    take_along_axis,
)
from max.experimental.array_api.sets import (
    isin,
    unique_all,
    unique_counts,
    unique_inverse,
    unique_values,
)

__all__ = [
    "__array_namespace_info__", "abs", "acos", "acosh", "add", "all", "any", "arange", "argmax",
    "argmin", "argsort", "asarray", "asin", "asinh", "astype", "atan", "atan2", "atanh", "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "bool",
    "broadcast_arrays", "broadcast_shapes", "broadcast_to", "can_cast", "ceil", "clip", "concat", "conj",
    "copysign", "cos", "cosh", "count_nonzero", "cumulative_prod", "cumulative_sum", "diff",
    "divide", "e", "empty", "empty_like", "equal", "exp", "expand_dims", "expm1", "eye", "finfo",
    "flip", "float32", "float64", "floor", "floor_divide", "from_dlpack", "full", "full_like",
    "greater", "greater_equal", "hypot", "iinfo", "imag", "inf", "int16", "int32", "int64", "int8",
    "isdtype", "isfinite", "isin", "isinf", "isnan", "less", "less_equal", "linalg", "linspace", "log",
    "log10", "log1p", "log2", "logaddexp", "logical_and", "logical_not", "logical_or",
    "logical_xor", "matmul", "matrix_transpose", "max", "maximum", "mean", "meshgrid", "min",
    "minimum", "moveaxis", "multiply", "nan", "negative", "newaxis", "nextafter", "nonzero",
    "not_equal", "ones", "ones_like", "permute_dims", "pi", "positive", "pow", "prod", "real", "reciprocal",
    "remainder", "repeat", "reshape", "result_type", "roll", "round", "searchsorted", "sign",
    "signbit", "sin", "sinh", "sort", "sqrt", "square", "squeeze", "stack", "std", "subtract",
    "sum", "take", "take_along_axis", "tan", "tanh", "tensordot", "tile", "tril", "triu", "trunc",
    "uint16", "uint32", "uint64", "uint8", "unique_all", "unique_counts", "unique_inverse",
    "unique_values", "unstack", "var", "vecdot", "where", "zeros", "zeros_like",
]  # fmt: skip

__array_api_version__ = "2024.12"

e, inf, nan, pi, newaxis = math.e, math.inf, math.nan, math.pi, None
bool = DType.bool
int8, int16, int32, int64 = DType.int8, DType.int16, DType.int32, DType.int64
uint8, uint16, uint32, uint64 = DType.uint8, DType.uint16, DType.uint32, DType.uint64
float32, float64 = DType.float32, DType.float64

_COMPLEX = frozenset({"complex64", "complex128", "fft"})


def __getattr__(name: str) -> Any:
    if name in _COMPLEX:
        advice = "; `functional.irfft` takes pairs of numbers" if name == "fft" else ""
        raise AttributeError(f"{__name__} has no {name!r}, as no dtype is complex{advice}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
