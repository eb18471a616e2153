"""Elementary functions: units in the last place against float64, over wide ranges, on several targets."""

from __future__ import annotations

import math

import numpy as np
import pytest

from max import kernel as k
from tests.kernel_language.harness import compiled

ERF = np.vectorize(math.erf, otypes=[np.float64])


def unary_kernel(name: str) -> k.Kernel:
    text = f"""
    def apply(out: k.Output, x: k.Input, ctx: k.Context, *, W):
        for lo, hi in ctx.chunks(out.shape[0], 0, 64):
            for j, m in k.vectors(lo, hi, W):
                out.store(j, value=k.{name}(x.load(j, width=W, mask=m)), mask=m)
    """
    return k.from_source(text, "apply", {"k": k})


def sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1 + e)


# name, float64 reference, bounds of the arguments, tolerated ulp
FUNCTIONS = [
    ("exp", np.exp, (-110.0, 95.0), 1.5),
    ("exp2", np.exp2, (-155.0, 130.0), 1.5),
    ("log", np.log, (0.0, 1e30), 1.5),
    ("log2", np.log2, (0.0, 1e30), 2.0),
    ("log1p", np.log1p, (-1.0, 1e20), 2.0),
    ("tanh", np.tanh, (-12.0, 12.0), 1.5),
    ("sigmoid", sigmoid, (-106.0, 40.0), 2.0),
    ("silu", lambda x: x * sigmoid(x), (-85.0, 40.0), 2.5),
    ("erf", ERF, (-5.0, 5.0), 1.5),
    ("sin", np.sin, (-1e5, 1e5), 1.5),
    ("cos", np.cos, (-1e5, 1e5), 1.5),
    ("acos", np.arccos, (-1.0, 1.0), 2.0),
    ("atanh", np.arctanh, (-1.0, 1.0), 2.5),
    ("rsqrt", lambda x: 1 / np.sqrt(x), (0.0, 1e30), 1.5),
]
TARGETS = [None, ["avx2", "fma"], ["avx2"], ["sse4.1"]]


def restricted(features: list[str] | None) -> k.Target:
    host = k.host_target()
    if features is None:
        return host
    if not all(host.has(f) for f in features):
        pytest.skip(f"this machine lacks {features}")
    return k.CPUTarget(frozenset(features), host.triple, "x86-64")


def arguments(low: float, high: float) -> np.ndarray:
    """Even steps, all orders of magnitude, both ends."""
    rng = np.random.default_rng(7)
    even = rng.uniform(low, high, 20000)
    top = max(abs(low), abs(high))
    magnitudes = 10.0 ** rng.uniform(-40, np.log10(top), 20000) * np.where(
        rng.random(20000) < 0.5, -1, 1
    )
    x = np.concatenate([even, magnitudes, [0.0, low, high, 1.0, 0.5, 0.625, 0.92, 1e-45]]).astype(
        np.float32
    )
    return x[(x >= np.float32(low)) & (x <= np.float32(high))]


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        near = want.astype(np.float32)
    exact = (got == near) | (np.isnan(got) & np.isnan(near))
    unit = np.spacing(np.abs(np.where(np.isfinite(near), near, 0)).astype(np.float32)).astype(
        np.float64
    )
    with np.errstate(invalid="ignore"):
        return np.where(exact, 0.0, np.abs(got.astype(np.float64) - want) / unit)


@pytest.mark.parametrize("features", TARGETS, ids=str)
@pytest.mark.parametrize(
    ("name", "reference", "bounds", "limit"), FUNCTIONS, ids=[f[0] for f in FUNCTIONS]
)
def test_ulp(name, reference, bounds, limit, features):
    target = restricted(features)
    if not target.has_fma:
        limit += 1.5  # every fused step rounds twice
    x = arguments(*bounds)
    out = np.zeros_like(x)
    compiled(unary_kernel(name), [out, x], {"W": target.width(k.f32)}, target=target)
    with np.errstate(all="ignore"):
        want = reference(x.astype(np.float64))
    error = ulps(out, want)
    worst = int(np.argmax(error))
    assert error[worst] <= limit, (
        f"{name}({x[worst]!r}) = {out[worst]!r}, not {want[worst]!r}: {error[worst]:.2f} ulp"
    )


SPECIAL = np.array(
    [
        np.nan,
        np.inf,
        -np.inf,
        0.0,
        -0.0,
        1e-45,
        -1e-45,
        1.1754943508222875e-38,
        3.4e38,
        -3.4e38,
        1.0,
        -1.0,
        2.0,
        -2.0,
        0.5,
        1e10,
    ],
    dtype=np.float32,
)


def test_fmod_is_exact():
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(64) * 10.0 ** rng.integers(0, 30, 64)).astype(np.float32)
    y = np.full_like(x, 0.37)
    x[:4], y[2:4] = (5.5, -5.5, 7, np.inf), (np.inf, 0)
    out = np.zeros_like(x)
    text = """
    def apply(out: k.Output, x: k.Input, y: k.Input, ctx: k.Context, *, W):
        for i in range(0, out.shape[0], W):
            out.store(i, value=k.fmod(x.load(i, width=W), y.load(i, width=W)))
    """
    compiled(k.from_source(text, "apply", {"k": k}), [out, x, y], {"W": 4})
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out, np.fmod(x, y))


@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize(
    ("name", "reference"), [(f[0], f[1]) for f in FUNCTIONS], ids=[f[0] for f in FUNCTIONS]
)
def test_special_values(name, reference, width):
    out = np.zeros_like(SPECIAL)
    compiled(unary_kernel(name), [out, SPECIAL], {"W": width})
    with np.errstate(all="ignore"):
        want = reference(SPECIAL.astype(np.float64))
    assert np.all(ulps(out, want) <= 2.5), [
        (x, g, w) for x, g, w in zip(SPECIAL, out, want, strict=True) if g != w
    ]
    if name == "sin":
        assert np.signbit(out[SPECIAL == 0]).tolist() == [False, True]


@pytest.mark.parametrize("features", TARGETS, ids=str)
def test_tanh_over_all_exponents(features):
    """One of 509 bit patterns of both signs; each pattern was compared once (docs/log/2026-11-23-tanh.md)."""
    target = restricted(features)
    edges = np.arange(
        0x3F1F0000, 0x3F210000, dtype=np.uint32
    )  # where the polynomial ends, at 0.625
    bits = np.concatenate([np.arange(0, 0x7F800001, 509, dtype=np.uint32), edges])
    x = np.concatenate([bits, bits | np.uint32(0x80000000)]).view(np.float32)
    out = np.zeros_like(x)
    compiled(unary_kernel("tanh"), [out, x], {"W": target.width(k.f32)}, target=target)
    error = ulps(out, np.tanh(x.astype(np.float64)))
    assert error.max() <= 1.4, (x[error.argmax()], error.max())
    assert np.array_equal(np.signbit(out), np.signbit(x))
    a = np.abs(x)
    assert np.array_equal(out[a <= 2.0**-12], x[a <= 2.0**-12])
    assert np.all(np.abs(out[a >= 9.02]) == 1)


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_sine_of_huge_arguments(name):
    x = np.array([1e6, 12345678.0, 1e12, 1e20, 3e38, 2.0**100], dtype=np.float32)
    out = np.zeros_like(x)
    compiled(unary_kernel(name), [out, x], {"W": 16})
    assert np.all(ulps(out, getattr(np, name)(x.astype(np.float64))) <= 1.5)


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16", np.float64], ids=str)
def test_other_dtypes(dtype):
    dtype = k.scalar_type(dtype).numpy
    x = np.linspace(-3, 3, 77).astype(dtype)
    for name, reference, _, _ in FUNCTIONS:
        out = np.zeros_like(x)
        compiled(unary_kernel(name), [out, x], {"W": 8})
        with np.errstate(all="ignore"):
            want = reference(x.astype(np.float64)).astype(dtype)
        step = np.finfo(np.float64).eps if dtype == np.float64 else 0.0
        good = (np.isnan(out) & np.isnan(want)) | (out == want)
        wide, right = out.astype(np.float64), want.astype(np.float64)
        with np.errstate(invalid="ignore"):
            # one step of the dtype, where f32 and f64 round to different sides
            near = np.abs(wide - right) <= np.abs(right) * (
                8 * step if step else 2.0**-7 if dtype != np.float16 else 2.0**-10
            )
        assert np.all(good | near), name


def pow_kernel() -> k.Kernel:
    text = """
    def apply(out: k.Output, x: k.Input, y: k.Input, ctx: k.Context, *, W):
        for j, m in k.vectors(out.shape[0], W):
            out.store(j, value=k.pow(x.load(j, width=W, mask=m), y.load(j, width=W, mask=m)), mask=m)
    """
    return k.from_source(text, "apply", {"k": k})


@pytest.mark.parametrize("features", TARGETS, ids=str)
def test_pow(features):
    target = restricted(features)
    rng = np.random.default_rng(3)
    x = np.concatenate(
        [10.0 ** rng.uniform(-38, 38, 5000), rng.uniform(0, 4, 5000), -rng.uniform(0, 4, 2000)]
    ).astype(np.float32)
    y = np.concatenate(
        [rng.uniform(-1, 1, 5000), rng.uniform(-30, 30, 5000), rng.integers(-9, 9, 2000)]
    ).astype(np.float32)
    out = np.zeros_like(x)
    compiled(pow_kernel(), [out, x, y], {"W": target.width(k.f32)}, target=target)
    with np.errstate(all="ignore"):
        want = x.astype(np.float64) ** y.astype(np.float64)
    error = ulps(out, want)
    worst = int(np.argmax(error))
    assert error[worst] <= 1.0, (x[worst], y[worst], out[worst], want[worst])


def test_pow_special_values():
    x, y = (a.ravel().copy() for a in np.meshgrid(SPECIAL, SPECIAL))
    out = np.zeros_like(x)
    compiled(pow_kernel(), [out, x, y], {"W": 16})
    with np.errstate(all="ignore"):
        want = x.astype(np.float64) ** y.astype(np.float64)
    bad = [
        (a, b, g, w)
        for a, b, g, w, e in zip(x, y, out, want, ulps(out, want), strict=True)
        if e > 1.0
    ]
    assert not bad, bad[:5]


def test_scalars_take_the_same_functions():
    text = """
    def apply(out: k.Output, x: k.Input, ctx: k.Context):
        for i in ctx.parallel(x.shape[0]):
            out[i] = k.exp(x[i]) + k.tanh(x[i]) * k.erf(x[i]) + k.sin(x[i]) + x[i] ** 2.5
    """
    x = np.linspace(0.1, 3, 31).astype(np.float32)
    out = np.zeros_like(x)
    compiled(k.from_source(text, "apply", {"k": k}), [out, x])
    w = x.astype(np.float64)
    np.testing.assert_allclose(out, np.exp(w) + np.tanh(w) * ERF(w) + np.sin(w) + w**2.5, rtol=1e-6)
