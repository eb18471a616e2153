"""Element-wise ops."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from max._interpreter.registry import Array, Dims, Result, op
from max.mlir import MoOp

_erf = np.vectorize(math.erf, otypes=[np.float64])


def widen(x: Array) -> Array:
    """The array in the dtype that its ops are computed in: f32 for the floats below it."""
    small = x.dtype.kind in "fV" and x.dtype.itemsize < 4
    return x.astype(np.float32) if small else x


def erf(x: Array) -> Array:
    """The error function, in double precision inside."""
    return _erf(x.astype(np.float64)).astype(x.dtype) if x.size else x


def sigmoid(x: Array) -> Array:
    """``1 / (1 + exp(-x))`` without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e)).astype(x.dtype)


def gelu(x: Array, approximate: str) -> Array:
    """The Gaussian error linear unit, exact or by one of its approximations."""
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return (0.5 * x * (1 + np.tanh(inner))).astype(x.dtype)
    if approximate == "quick":
        return x * sigmoid((1.702 * x).astype(x.dtype))
    return (0.5 * x * (1 + erf(x / math.sqrt(2)))).astype(x.dtype)


UNARY: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs,
    "neg": np.negative,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "acos": np.arccos,
    "atanh": np.arctanh,
    "erf": erf,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    "trunc": np.trunc,
    "relu": lambda x: np.maximum(x, np.zeros((), x.dtype)),
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "not": np.logical_not,
    "is_nan": np.isnan,
    "is_inf": np.isinf,
}


def _divide(x: Array, y: Array) -> Array:
    return np.true_divide(x, y) if x.dtype.kind == "f" else np.floor_divide(x, y)


BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "mod": np.mod,
    "pow": np.power,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
}


@op(*UNARY)
def _unary(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    return UNARY[op.spec.mnemonic](widen(args[0]))


@op(*BINARY)
def _binary(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    return BINARY[op.spec.mnemonic](widen(args[0]), widen(args[1]))


@op("gelu")
def _gelu(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    return gelu(widen(args[0]), op.attr("approximate"))


@op("cast")
def _cast(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    return widen(args[0])


@op("select")
def _select(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    return np.where(*args)
