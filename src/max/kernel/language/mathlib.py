"""Elementary functions, written in the kernel language: scalars and vectors, f32 to 1–2 ulp.

bf16 and f16 arguments are widened to f32; f64 goes to the C library, lane by lane. NaN, infinities and subnormals are
as in IEEE 754. Polynomials were fitted by Lawson's iteration or are those of Cephes (exp, log, sin, cos, asin).
"""

from __future__ import annotations

from typing import Any

from max.kernel.language import lang as k
from max.kernel.language import values
from max.kernel.language.source import inline
from max.kernel.types import Value, f32, f64, i32, i64

_INF = float("inf")
_NAN = float("nan")


@inline
def polynomial(x: Value, *coefficients: float) -> Any:
    """``c[0] * x**n + … + c[n]`` by Horner's rule."""
    result = k.fma(x, coefficients[0], coefficients[1])
    for c in coefficients[2:]:
        result = k.fma(result, x, c)
    return result


@inline
def _scale_by_power(y: Any, n: Value) -> Any:
    """``y * 2**n`` for integral f32 ``n``, rounded once."""
    if k.target().has("avx512f") and y.is_vector and y.width % 16 == 0:
        return k.scale_by_power(y, n)
    m = k.cast_unchecked(n, i32)
    half = m >> 1
    a = k.bitcast((half + 127) << 23, f32)
    b = k.bitcast((m - half + 127) << 23, f32)
    return y * a * b


@inline
def exp(x: Value) -> Any:
    """The exponential."""
    x = k.floating(x)
    if x.dtype is f64:
        return k.libm("exp", x)
    # e**-104 rounds to 0, and 88.7228 is the last argument without overflow
    y = k.min(k.max(x, -104.0), 88.72284)
    n = k.round(y * 1.4426950408889634)
    # ln 2 in two parts (Cody and Waite): the first has 16 bits, so its product with n is exact
    r = k.fma(n, -0.693145751953125, y)
    r = k.fma(n, -1.428606765330187e-06, r)
    p = polynomial(
        r,
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
    return _scale_by_power(k.fma(p, r * r, r) + 1.0, n)


@inline
def exp2(x: Value) -> Any:
    """``2**x``."""
    x = k.floating(x)
    if x.dtype is f64:
        return k.libm("exp2", x)
    # 2**-150 rounds to 0, and 2**128 overflows
    y = k.min(k.max(x, -150.0), 128.0)
    n = k.round(y)
    r = y - n
    p = polynomial(
        r,
        1.5353361959569156e-4,
        1.3398875016719103e-3,
        9.61843691766262e-3,
        5.5503323674201965e-2,
        2.4022647738456726e-1,
        6.931471824645996e-1,
    )
    return _scale_by_power(k.fma(p, r, 1.0), n)


@inline
def _log_parts(x: Value) -> tuple[Any, Any, Any]:
    """``x`` as ``(1 + f) * 2**e`` with ``1 + f`` in ``[√½, √2)``, and ``log(1 + f) - f``."""
    tiny = x < 1.1754943508222875e-38
    # subnormals are scaled by 2**23; the bits of the root of 1/2 center the mantissa around 1
    bits = k.bitcast(k.select(tiny, x * 8388608.0, x), i32)
    exponent = (bits - 0x3F3504F3) >> 23
    f = k.bitcast(bits - (exponent << 23), f32) - 1.0
    e = f32(exponent) - k.select(tiny, 23.0, 0.0)
    p = polynomial(
        f,
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    )
    return f, e, f * f * (f * p)


@inline
def _log_edges(x: Value, result: Any) -> Any:
    result = k.select(x < _INF, result, x)  # inf and NaN
    result = k.select(x == 0.0, -_INF, result)
    return k.select(x < 0.0, _NAN, result)


@inline
def log(x: Value) -> Any:
    """The natural logarithm."""
    x = k.floating(x)
    if x.dtype is f64:
        return k.libm("log", x)
    f, e, y = _log_parts(x)
    # ln 2 = 0.693359375 - 2.12194440e-4: the product of the first part with e is exact
    y = k.fma(f * f, -0.5, k.fma(e, -2.12194440e-4, y))
    return _log_edges(x, k.fma(e, 0.693359375, f + y))


@inline
def log2(x: Value) -> Any:
    """The logarithm to base 2."""
    x = k.floating(x)
    if x.dtype is f64:
        return k.libm("log2", x)
    f, e, y = _log_parts(x)
    y = k.fma(f * f, -0.5, y)
    # log2(e) = 1 + 0.4427: the large terms, multiplied by 1, are added without another rounding
    small = k.fma(f, 0.44269504088896340736, y * 0.44269504088896340736)
    return _log_edges(x, ((small + y) + f) + e)


@inline
def log1p(x: Value) -> Any:
    """``log(1 + x)``, exact near 0."""
    x = k.floating(x)
    if x.dtype is f64:
        return k.libm("log1p", x)
    u = 1.0 + x
    lost = (x - (u - 1.0)) / u  # the rounding error of 1 + x
    inside = (u > 0.0) & (u < _INF)
    result = log(u) + k.select(inside, lost, 0.0)
    return k.select(k.abs(x) < 1e-4, k.fma(x * x, k.fma(x, 0.33333333, -0.5), x), result)


@inline
def tanh(x: Value) -> Any:
    """The hyperbolic tangent."""
    x = k.floating(x)
    if x.dtype is f64:
        return k.libm("tanh", x)
    a = k.abs(x)
    s = x * x
    p = polynomial(
        s,
        -5.704984001313179e-3,
        2.063908464510314e-2,
        -5.373971431323494e-2,
        1.333144222164463e-1,
        -3.333328194169026e-1,
    )
    small = k.fma(a * s, p, a)
    # e**(2a) is 2**n * e**(2r); adding 1.5 * 2**23 + 126 leaves n + 126, the exponent of 2**(n - 1), in the low bits.
    # From 9.02 on tanh rounds to 1. The comparison keeps NaN.
    y = k.select(a > 10.0, 10.0, a)
    shifted = k.fma(y, 2.8853900817779268, 12583038.0)
    half_power = k.bitcast(k.bitcast(shifted, i32) << 23, f32)
    r = k.fma(shifted - 12583038.0, -0.34657359027997264, y)
    # pairs of terms shorten the chain of dependent steps; the last two, whose rounding counts, stay in Horner's order
    r2 = r * r
    high = k.fma(r2, 8.859932434282562e-2, k.fma(r, 2.679732334148384e-1, 6.666880412475727e-1))
    e = k.fma(r2, high, k.fma(r, 1.3333144934582286, 1.9999997682207067))
    e = k.fma(r, k.fma(r, e, 2.0), 1.0)
    large = 1.0 - 1.0 / k.fma(half_power, e, 0.5)
    return k.copysign(k.select(a < 0.625, small, large), x)


@inline
def sigmoid(x: Value) -> Any:
    """``1 / (1 + exp(-x))``."""
    x = k.floating(x)
    # the exponential of a negative number does not overflow
    e = exp(-k.abs(x))
    return k.select(x < 0.0, e, 1.0) / (1.0 + e)


@inline
def erf(x: Value) -> Any:
    """The error function."""
    x = k.floating(x)
    if x.dtype is f64:
        return k.libm("erf", x)
    a = k.abs(x)
    s = x * x
    p = polynomial(
        s,
        8.316817547893152e-5,
        -8.130024652928114e-4,
        5.199907813221216e-3,
        -2.6858942583203316e-2,
        1.1283687502145767e-1,
        -3.7612631916999817e-1,
        1.2837916612625122e-1,
    )
    small = k.fma(p, x, x)
    t = k.min(a, 4.0)
    q = polynomial(
        t,
        -1.1231275493628345e-5,
        3.228035639040172e-4,
        -3.642458003014326e-3,
        2.3762060329318047e-2,
        -1.0623687505722046e-1,
        -6.351513266563416e-1,
        -1.2864848971366882e-1,
    )
    large = 1.0 - exp(k.fma(q, t, -t))
    return k.select(a < 0.92, small, k.copysign(large, x))


@inline
def _quadrant(x: Value) -> tuple[Any, Any]:
    """``x`` less its multiple ``n`` of π/2, and ``n`` modulo 4; through f64, for ``|x|`` up to 2**20 or more."""
    wide = k.cast(x, f64)
    n = k.round(wide * 0.6366197723675814)
    # the parts of π/2 are short enough for exact products where there is no fused multiply-add
    r = k.fma(n, -1.5707963267341256, wide)
    r = k.fma(n, -6.0771005063039660e-11, r)
    r = k.fma(n, -2.0222662487959506e-21, r)
    return k.cast(r, f32), k.cast(n - 4.0 * k.floor(n * 0.25), f32)


@inline
def _sine(x: Value, shift: float, name: str) -> Any:
    """The sine of ``x + shift * π/2``."""
    x = k.floating(x)
    if x.dtype is f64:
        return k.libm(name, x)
    r, n = _quadrant(x)
    if shift != 0.0:
        n = n + shift
        n = k.select(n >= 4.0, n - 4.0, n)
    s = r * r
    sine = k.fma(polynomial(s, -1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1), s * r, r)
    cosine = k.fma(
        polynomial(s, 2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2),
        s * s,
        k.fma(s, -0.5, 1.0),
    )
    odd = (n == 1.0) | (n == 3.0)
    result = k.select(odd, cosine, sine)
    result = k.select(n >= 2.0, -result, result)
    if shift == 0.0:  # the products above lose the sign of -0.0
        result = k.select(x == 0.0, x, result)
    far = ~(k.abs(x) <= (1099511627776.0 if k.target().has_fma else 1048576.0))
    if k.any(far):  # as good as never
        result = k.select(far, k.cast(k.libm(name, k.cast(x, f64)), f32), result)
    return result


@inline
def sin(x: Value) -> Any:
    """The sine."""
    return _sine(x, 0.0, "sin")


@inline
def cos(x: Value) -> Any:
    """The cosine."""
    return _sine(x, 1.0, "cos")


@inline
def acos(x: Value) -> Any:
    """The arc cosine."""
    x = k.floating(x)
    if x.dtype is f64:
        return k.libm("acos", x)
    a = k.abs(x)
    outer = a > 0.5
    # acos(a) = 2 asin(sqrt((1 - a) / 2)) for a near 1
    s = k.select(outer, 0.5 * (1.0 - a), x * x)
    root = k.select(outer, k.sqrt(s), x)
    p = polynomial(
        s, 4.2163199048e-2, 2.4181311049e-2, 4.5470025998e-2, 7.4953002686e-2, 1.6666752422e-1
    )
    asin = k.fma(p, s * root, root)
    twice = asin + asin
    # pi and pi / 2 in two parts: the nearest f32, and what it is too large by
    far = k.select(x < 0.0, 3.1415927410125732 - (twice + 8.742277657347586e-08), twice)
    return k.select(outer | k.isnan(x), far, 1.5707963705062866 - (asin + 4.371138828673793e-08))


@inline
def atanh(x: Value) -> Any:
    """The inverse hyperbolic tangent."""
    x = k.floating(x)
    if x.dtype is f64:
        return k.libm("atanh", x)
    a = k.abs(x)
    s = x * x
    small = k.fma(x * s, polynomial(s, 0.14285714, 0.2, 0.33333333), x)
    large = 0.5 * log1p((a + a) / (1.0 - a))
    return k.select(a < 0.1, small, k.copysign(large, x))


@inline
def rsqrt(x: Value) -> Any:
    """``1 / sqrt(x)``."""
    x = k.floating(x)
    return 1.0 / k.sqrt(x)


@inline
def silu(x: Value) -> Any:
    """``x * sigmoid(x)``."""
    x = k.floating(x)
    return x * sigmoid(x)


@inline
def _log2_wide(x: Any) -> Any:
    """The logarithm to base 2 of f64 values that came from f32, to about 45 bits."""
    bits = k.bitcast(x, i64)
    # the bits of the root of 1/2, as in _log_parts
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    m = k.bitcast(bits - (exponent << 52), f64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    # log(m) = 2 atanh(s), by its series
    p = polynomial(z, 2 / 19, 2 / 17, 2 / 15, 2 / 13, 2 / 11, 2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0)
    # exponents of f32 fit into 32 bits, from which all targets convert
    return k.fma(p * s, 1.4426950408889634, f64(k.cast(exponent, i32)))


@inline
def _exp2_wide(x: Value) -> Any:
    """``2**x`` on f64 to about 45 bits, for results in the range of f32."""
    y = k.min(k.max(x, -160.0), 130.0)
    n = k.round(y)
    # Taylor's series of the exponential: |r| is at most ln(2) / 2
    r = (y - n) * 0.6931471805599453
    p = polynomial(
        r,
        1 / 39916800,
        1 / 3628800,
        1 / 362880,
        1 / 40320,
        1 / 5040,
        1 / 720,
        1 / 120,
        1 / 24,
        1 / 6,
        0.5,
        1.0,
        1.0,
    )
    power = k.bitcast((i64(k.cast_unchecked(n, i32)) + 1023) << 52, f64)
    return p * power


@inline
def fmod(x: Value, y: Value) -> Any:
    """The exact remainder of ``x / y`` with the sign of `x`, by the C library; NaN where `y` is 0 or `x` infinite."""
    x = k.floating(x)
    y = k.floating(y)
    if x.dtype is f64 or y.dtype is f64:
        return k.libm("fmod", f64(x), f64(y))
    return k.cast(k.libm("fmod", k.cast(x, f64), k.cast(y, f64)), f32)


@inline
def pow(x: Value, y: Value) -> Any:
    """``x ** y``, with the special cases of C's ``pow``; f32 is computed in f64."""
    x = k.floating(x)
    y = k.floating(y)
    if x.dtype is f64 or y.dtype is f64:
        return k.libm("pow", f64(x), f64(y))
    a = k.abs(x)
    base = k.cast(a, f64)
    exponent = k.cast(y, f64)
    ordinary = (a > 0.0) & (a < _INF)
    lg = _log2_wide(k.select(ordinary, base, 1.0))
    lg = k.select(a == 0.0, -_INF, k.select(ordinary, lg, base))
    result = k.cast(_exp2_wide(exponent * lg), f32)
    integral = (k.trunc(y) == y) & (k.abs(y) < _INF) | (k.abs(y) == _INF)
    # f32 numbers from 2**24 on are even
    odd = integral & (k.trunc(y * 0.5) != y * 0.5) & (k.abs(y) < 16777216.0)
    negative = k.copysign(1.0, x) < 0.0
    result = k.select((x < 0.0) & (x > -_INF) & ~integral, _NAN, result)
    result = k.select(negative & odd, -result, result)
    # 0 * inf in the exponent; |x| = 1 with infinite y
    result = k.select((y == 0.0) | (x == 1.0) | ((a == 1.0) & (k.abs(y) == _INF)), 1.0, result)
    return k.select((k.isnan(x) & (y != 0.0)) | (k.isnan(y) & (x != 1.0)), _NAN, result)


values.set_float_power(pow)
