"""Reductions, scans, normalisations and matrix multiplication."""

from __future__ import annotations

import numpy as np

from max._interpreter.elementwise import widen
from max._interpreter.registry import Array, Dims, Result, op
from max.mlir import MoOp

_REDUCE = {
    "reduce_sum": np.sum,
    "reduce_mean": np.mean,
    "reduce_max": np.max,
    "reduce_min": np.min,
}
_ARG = {"argmax": np.argmax, "argmin": np.argmin}


@op(*_REDUCE)
def _reduce(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    name, x, axis = op.spec.mnemonic, widen(args[0]), op.attr("axis")
    if name == "reduce_mean" and x.dtype.kind != "f":
        total = np.sum(x, axis=axis, keepdims=True, dtype=x.dtype)
        return np.floor_divide(total, np.array(x.shape[axis], x.dtype))
    if name in ("reduce_sum", "reduce_mean"):
        return _REDUCE[name](x, axis=axis, keepdims=True, dtype=x.dtype)
    return _REDUCE[name](x, axis=axis, keepdims=True)


@op(*_ARG)
def _arg(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    return _ARG[op.spec.mnemonic](widen(args[0]), axis=op.attr("axis"), keepdims=True)


@op("softmax", "logsoftmax")
def _softmax(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    x, axis = widen(args[0]), op.attr("axis")
    if not x.size:
        return x
    x = x - x.max(axis=axis, keepdims=True)
    total = np.exp(x).sum(axis=axis, keepdims=True)
    return np.exp(x) / total if op.spec.mnemonic == "softmax" else x - np.log(total)


@op("cumsum")
def _cumsum(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    x, axis = widen(args[0]), op.attr("axis")
    if op.attr("reverse"):
        x = np.flip(x, axis)
    out = np.cumsum(x, axis=axis, dtype=x.dtype)
    if op.attr("exclusive"):
        out = out - x
    return np.flip(out, axis) if op.attr("reverse") else out


@op("top_k")
def _top_k(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> list[Array]:
    x, axis, k = args[0], op.attr("axis"), op.attr("k")
    # stable on the negated values: ties take the lowest index, as torch documents for sorted results
    order = np.argsort(-widen(x).astype(np.float64), axis=axis, kind="stable")
    indices = np.take(order, np.arange(k), axis=axis)
    return [np.take_along_axis(x, indices, axis=axis), indices]


@op("layer_norm")
def _layer_norm(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    x, gamma, beta = (widen(a) for a in args)
    mean = x.mean(-1, keepdims=True)
    variance = np.square(x - mean).mean(-1, keepdims=True)
    epsilon = np.array(op.attr("epsilon"), x.dtype)
    return (x - mean) / np.sqrt(variance + epsilon) * gamma + beta


@op("rms_norm")
def _rms_norm(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    x, gamma = (widen(a) for a in args)
    epsilon = np.array(op.attr("epsilon"), x.dtype)
    y = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + epsilon)
    scale = gamma + np.array(op.attr("weight_offset"), x.dtype)
    if not op.attr("multiply_before_cast"):
        y = widen(y.astype(results[0].dtype))
    return y * scale


@op("matmul")
def _matmul(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    return np.matmul(widen(args[0]), widen(args[1]))
