"""Powers and elementary functions of zeros, infinities, NaN, the least and the greatest numbers: as C and IEEE 754.

Compared on every pair: graphs on the CPU, the interpreter, constants that the compiler folds, constant exponents,
eager tensors, kernels of scalars and vectors, and kernels in plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from max import _interpreter
from max import kernel as k
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.experimental import functional as F
from max.experimental.tensor import Tensor
from max.graph import DeviceRef, Graph, TensorType, ops
from max.graph.ops.elementwise import inverse
from max.nn import activation
from tests.kernel_language.harness import compiled, interpreted

SESSION = InferenceSession(devices=[CPU()])
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
NUMBERS = (0.0, 1.0, 2.0, 3.0, 0.5, 0.25, 1.5, 7.0, 100.0, 2.0**24, 2.0**31, math.inf, math.nan)


def specials(dtype: type) -> np.ndarray:
    limits = ml_dtypes.finfo(dtype)
    least, smallest, most = limits.smallest_subnormal, limits.tiny, limits.max
    near_one = (1 - float(limits.epsneg), 1 + float(limits.eps))
    numbers = [*NUMBERS, float(least), float(smallest), float(most), float(limits.eps), *near_one]
    with np.errstate(over="ignore"):
        return np.array([sign * n for n in numbers for sign in (1, -1)]).astype(dtype)


def pairs(dtype: type) -> tuple[np.ndarray, np.ndarray]:
    x = specials(dtype)
    return np.repeat(x, x.size), np.tile(x, x.size)


def c_pow(x: float, y: float) -> float:
    """Python's power, with the values of C where Python raises."""
    try:
        return math.pow(x, y)
    except OverflowError:
        return -math.inf if x < 0 and y % 2 == 1 else math.inf
    except ValueError:
        if x == 0:
            return math.copysign(math.inf, x) if y == int(y) and y % 2 == 1 else math.inf
        return math.nan


def powers(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    values = zip(x.astype(np.float64), y.astype(np.float64), strict=True)
    return np.array([c_pow(float(a), float(b)) for a, b in values])


def check(got: np.ndarray, want: np.ndarray, units: float, *operands: np.ndarray) -> None:
    """Compares infinities, NaN, zeros and signs exactly, other values to some units in the last place."""
    with np.errstate(all="ignore"):
        near = want.astype(got.dtype)
        got64, near64 = got.astype(np.float64), near.astype(np.float64)
        equal = (got64 == near64) & (np.signbit(got64) == np.signbit(near64))
        equal |= np.isnan(got64) & np.isnan(near64)
        limits = ml_dtypes.finfo(got.dtype)
        unit = np.maximum(np.abs(want) * float(limits.eps), float(limits.smallest_subnormal))
        both = np.isfinite(got64) & np.isfinite(near64) & (np.signbit(got64) == np.signbit(near64))
        good = equal | (both & (near64 != 0) & (np.abs(got64 - want) <= units * unit))
    bad = np.flatnonzero(~good)
    assert not bad.size, [
        (*(float(o[i]) for o in operands), float(got64[i]), float(near64[i])) for i in bad[:5]
    ]


def graph_of(build: Callable[..., Any], *operands: np.ndarray) -> Graph:
    types = [TensorType(DType.from_numpy(x.dtype), x.shape, DeviceRef.CPU()) for x in operands]
    return Graph("special", lambda *values: build(*[v.tensor for v in values]), types)


def on_graph(build: Callable[..., Any], *operands: np.ndarray) -> list[np.ndarray]:
    """The results of the engine and of the interpreter."""
    graph = graph_of(build, *operands)
    inputs = [from_array(x) for x in operands]
    (result,) = SESSION.load(graph).execute(*inputs)
    with np.errstate(all="ignore"):
        (reference,) = _interpreter.run(graph, list(operands))
    dtype = operands[0].dtype
    return [as_array(result).view(dtype), np.asarray(reference)]


def from_array(x: np.ndarray) -> Any:
    from max.driver import Tensor as Buffer

    if x.dtype == ml_dtypes.bfloat16:
        return Buffer.from_numpy(x.view(np.uint16)).view(DType.bfloat16)
    return Buffer.from_numpy(x)


def as_array(result: Any) -> np.ndarray:
    return (
        result.view(DType.uint16).to_numpy()
        if result.dtype is DType.bfloat16
        else result.to_numpy()
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_powers_of_pairs(dtype):
    x, y = pairs(dtype)
    want = powers(x, y)
    for got in on_graph(lambda a, b: ops.pow(a, b), x, y):
        check(got, want, 2, x, y)
    eager = F.pow(Tensor.from_dlpack(from_array(x)), Tensor.from_dlpack(from_array(y)))
    check(as_array(eager.realize.driver_tensor).view(dtype), want, 2, x, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_powers_of_constants(dtype):
    """Small constants are folded by the compiler; constant exponents may become products and roots."""
    x = specials(dtype)
    element = DType.from_numpy(np.dtype(dtype))
    for start in range(0, x.size, 12):
        part = x[start : start + 12]
        a, b = np.repeat(part, x.size), np.tile(x, part.size)

        def folded(anchor: Any, part: np.ndarray = part) -> Any:
            parts = [
                ops.pow(
                    ops.constant(np.repeat(v, x.size), element, DeviceRef.CPU()),
                    ops.constant(x, element, DeviceRef.CPU()),
                )
                for v in part
            ]
            return ops.concat([anchor[:0], *parts])

        for got in on_graph(folded, x[:1]):
            check(got, powers(a, b), 2, a, b)
    for exponent in (0.5, -0.5, 0.0, 1.0, -1.0, 2.0, 3.0, -2.0, 1.5, 4.0, 0.25, math.inf, math.nan):
        y = np.full_like(x, exponent)
        for got in on_graph(lambda a, e=exponent: a**e, x):
            check(got, powers(x, y), 2, x, y)


POW = """
def apply(out: k.Output, x: k.Input, y: k.Input, ctx: k.Context, *, W):
    for i, m in k.vectors(out.shape[0], W):
        out.store(i, value=k.cast(k.pow(x.load(i, width=W, mask=m), y.load(i, width=W, mask=m)), out.dtype), mask=m)
"""
SCALAR_POW = """
def apply(out: k.Output, x: k.Input, y: k.Input, ctx: k.Context):
    for i in range(out.shape[0]):
        out[i] = k.cast(k.pow(x[i], y[i]), out.dtype)
"""


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda d: d.__name__)
def test_powers_in_kernels(dtype):
    x, y = pairs(dtype)
    want = powers(x, y)
    for text, params in [(POW, {"W": 1}), (POW, {"W": 16}), (SCALAR_POW, {})]:
        out = np.zeros_like(x)
        compiled(k.from_source(text, "apply", {"k": k}), [out, x, y], params)
        check(out, want, 2, x, y)
    # in plain Python: NumPy takes other paths for one value than for many
    few = np.flatnonzero(~np.isfinite(x) | (np.abs(x) <= 1))[::3]
    for text, params in [(POW, {"W": 16}), (SCALAR_POW, {})]:
        out = np.zeros_like(x[few])
        interpreted(k.from_source(text, "apply", {"k": k}), [out, x[few], y[few]], params)
        check(out, want[few], 2, x[few], y[few])


FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "tanh": np.tanh,
    "atanh": np.arctanh,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "sin": np.sin,
    "cos": np.cos,
    "abs": np.abs,
    "floor": np.floor,
    "round": np.rint,
    "trunc": np.trunc,
    "negate": np.negative,
    "sigmoid": lambda x: np.where(x < 0, np.exp(x) / (1 + np.exp(x)), 1 / (1 + np.exp(-x))),
    # the reference documents that arguments outside of [-1, 1] are clamped
    "acos": lambda x: np.arccos(np.clip(x, -1, 1)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_functions_of_specials(dtype):
    x = specials(dtype)
    with np.errstate(all="ignore"):
        wants = [function(x.astype(np.float64)) for function in FUNCTIONS.values()]

    def build(v: Any) -> Any:
        return ops.concat([getattr(ops, name)(v) for name in FUNCTIONS])

    operands = np.tile(x, len(FUNCTIONS))
    for got in on_graph(build, x):
        check(got, np.concatenate(wants), 4, operands)


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda d: d.__name__)
def test_functions_of_pairs(dtype):
    x, y = pairs(dtype)
    with np.errstate(all="ignore"):
        wide = (x.astype(np.float64), y.astype(np.float64))
        references = {
            ops.div: np.divide(*wide),
            ops.max: np.maximum(*wide),
            ops.min: np.minimum(*wide),
            ops.mod: np.mod(x, y),
        }
    for function, want in references.items():
        for got in on_graph(lambda a, b, f=function: f(a, b), x, y):
            # zeros of both signs compare equal, either may be the greater one
            check(np.abs(got), np.abs(want), 1, x, y)


def torch_array(x: np.ndarray) -> torch.Tensor:
    """An array in float64: what torch computes of it is exact beside results of narrower types."""
    return torch.from_numpy(x.astype(np.float64))


TORCH: dict[str, tuple[Callable[..., Any], Callable[[torch.Tensor], torch.Tensor], float]] = {
    # with the error in units in the last place where results are not near 0
    "gelu": (ops.gelu, torch.nn.functional.gelu, 16),
    "gelu_tanh": (lambda x: ops.gelu(x, "tanh"), lambda x: torch.nn.functional.gelu(x, approximate="tanh"), 64),
    "silu": (ops.silu, torch.nn.functional.silu, 64),
    "softplus": (activation.softplus, lambda x: torch.logaddexp(x, torch.zeros_like(x)), 4),
    "relu": (ops.relu, torch.relu, 0),
    "expm1": (inverse.expm1, torch.expm1, 8),
    "sinh": (inverse.sinh, torch.sinh, 8),
    "cosh": (inverse.cosh, torch.cosh, 8),
    "asinh": (inverse.asinh, torch.asinh, 8),
    "acosh": (inverse.acosh, torch.acosh, 8),
    "atan": (inverse.atan, torch.atan, 8),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_functions_as_torch_has_them(dtype):
    """Also of numbers near which an exponential overflows; in vectors and in the lanes after the last one."""
    limits = ml_dtypes.finfo(dtype)
    last = math.log(float(limits.max))
    near = np.array([last - 0.02, last - 0.5, 0.9 * last, 40.0, 20.5, 14.0, -14.0, -40.0, -last])
    x = np.concatenate([specials(dtype), near.astype(dtype)])
    # apart from where results are near 0
    x = x[~((x.astype(np.float64) < -2) & (x.astype(np.float64) > -13))]
    wants = [function(torch_array(x)).numpy() for _, function, _ in TORCH.values()]
    for order in (slice(None), slice(None, None, -1)):
        given = np.ascontiguousarray(x[order])

        def build(v: Any) -> Any:
            return ops.concat([function(v) for function, _, _ in TORCH.values()])

        tensor = Tensor.from_dlpack(from_array(given))
        eager = as_array(F.functional(build)(tensor).realize.driver_tensor).view(dtype)
        for got in [*on_graph(build, given), eager]:
            for part, want, (_, _, units) in zip(
                got.reshape(len(TORCH), -1), wants, TORCH.values(), strict=True
            ):
                check(part, want[order], units, given)
