"""Elementary functions, written in the kernel language."""

from __future__ import annotations

from typing import Any

from max.kernel import lang as k
from max.kernel import values
from max.kernel.source import inline
from max.kernel.types import f32, f64, i32


@inline
def _scaled(y: Any, n: Any) -> Any:
    """``y * 2**n`` for integral floats ``n``."""
    if k.target().has("avx512f") and y.is_vector and y.width % 16 == 0:
        return k.scale_by_power(y, n)
    m = k.cast_unchecked(n, i32)
    half = m >> 1
    a = k.bitcast((half + 127) << 23, f32)
    b = k.bitcast((m - half + 127) << 23, f32)
    return y * a * b


@inline
def exp(x: Any) -> Any:
    """The exponential."""
    x = k.floating(x)
    if x.dtype is f64:
        return k.libm("exp", x)
    y = k.min(k.max(x, -104.0), 88.72284)
    n = k.round(y * 1.4426950408889634)
    r = k.fma(n, -0.693145751953125, y)
    r = k.fma(n, -1.428606765330187e-06, r)
    p = k.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = k.fma(p, r, 8.3334519073e-3)
    p = k.fma(p, r, 4.1665795894e-2)
    p = k.fma(p, r, 1.6666665459e-1)
    p = k.fma(p, r, 5.0000001201e-1)
    q = k.fma(p, r * r, r) + 1.0
    return _scaled(q, n)


def _through_f64(name: str) -> Any:
    return name


@inline
def log(x: Any) -> Any:
    x = k.floating(x)
    return k.cast(k.libm("log", k.cast(x, f64)), x.dtype)


@inline
def tanh(x: Any) -> Any:
    x = k.floating(x)
    return k.cast(k.libm("tanh", k.cast(x, f64)), x.dtype)


@inline
def erf(x: Any) -> Any:
    x = k.floating(x)
    return k.cast(k.libm("erf", k.cast(x, f64)), x.dtype)


@inline
def sin(x: Any) -> Any:
    x = k.floating(x)
    return k.cast(k.libm("sin", k.cast(x, f64)), x.dtype)


@inline
def cos(x: Any) -> Any:
    x = k.floating(x)
    return k.cast(k.libm("cos", k.cast(x, f64)), x.dtype)


@inline
def pow(x: Any, y: Any) -> Any:
    x = k.floating(x)
    y = k.floating(y)
    return k.cast(k.libm("pow", k.cast(x, f64), k.cast(y, f64)), x.dtype)


@inline
def sigmoid(x: Any) -> Any:
    """``1 / (1 + exp(-x))``."""
    x = k.floating(x)
    return 1.0 / (1.0 + exp(-x))


@inline
def rsqrt(x: Any) -> Any:
    """``1 / sqrt(x)``."""
    x = k.floating(x)
    return 1.0 / k.sqrt(x)


values.float_power = pow
