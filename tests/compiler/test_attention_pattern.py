"""The operands, scale, masks and roundings of the attention that `fuse_attention` finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from xdsl.ir import SSAValue

from max._compiler.analysis.shapes import shape_of
from max._compiler.passes.attention import fuse_attention
from max._compiler.passes.base import constant_of, ops_of
from max._compiler.passes.canonicalize import canonicalize
from max._compiler.passes.redundant_ops import drop_dead_ops
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.mlir import MoOp, clone_module, entry, verify_module

pytestmark = pytest.mark.any_target

DEVICE = DeviceRef.CPU()
F32, BF16, F16, INDEX = DType.float32, DType.bfloat16, DType.float16, DType.int64
SHAPES: dict[str, tuple[int | str, ...]] = {
    "q": (2, 3, 5, 8), "k": (2, 3, 7, 8), "v": (2, 3, 7, 4), "m": (2, 1, 5, 7), "n": (5, 7),
    "b": (2, 3, 5, 7), "c": (2, 1, 5, 7),
}  # fmt: skip
Value = TensorValue
Build = Callable[..., Any]


def by_dims(shape: Any) -> str:
    return "x".join(map(str, shape))


def described(value: SSAValue, names: list[str]) -> str:
    """A value as an expression; views with the axes or the dims of their results."""
    op = value.owner
    if not isinstance(op, MoOp):
        return names[value.index]  # type: ignore[attr-defined]
    array = constant_of(op)
    if array is not None:
        return str(array.reshape(-1)[0]) if array.size == 1 else "weight"
    operands = [described(operand, names) for operand in op.operands]
    name = op.name.split(".")[1]
    if name == "broadcast_to" and operands[0].replace(".", "").replace("-", "").isdigit():
        return operands[0]
    if name == "transpose":
        name += " " + "".join(map(str, op.attr("perm")))
    elif name == "slice":
        bounds = zip(op.attr("start"), op.attr("stop"), shape_of(op.operands[0]), strict=True)
        parts = [
            f"{axis}:{a}:{b}" for axis, (a, b, size) in enumerate(bounds) if (a, b) != (0, size)
        ]
        name += " " + " ".join(parts)
    elif name == "concat":
        name += f" {op.attr('axis')}"
    elif name in ("reshape", "broadcast_to"):
        name += " " + by_dims(shape_of(value))
    elif name == "attention":
        shown: list[str] = []
        for key, unremarkable in (("scale", 1.0), ("axis", len(shape_of(op.operands[0])) - 2)):
            if op.attr(key) != unremarkable:
                shown.append(f"{key} {op.attr(key):g}")
        if op.attr("fills"):
            shown.append(f"fills {list(op.attr('fills'))}")
        roundings = [dtype and dtype.name for dtype in op.attr("roundings")]
        if any(roundings):
            shown.append(f"roundings {roundings}")
        if op.attr("dtype") is not F32:
            shown.append(op.attr("dtype").name)
        operands += shown
    return f"{name}({', '.join(operands)})"


def found(
    build: Build, dtype: DType = F32, canonical: bool = False, **shapes: tuple[int | str, ...]
) -> tuple[str, str]:
    """The first output of a graph before and after the pass; its inputs are those of `SHAPES` that `build` takes.

    Args:
        build: Stages the graph.
        dtype: The dtype of the inputs, except `c`, which is bool.
        canonical: Whether the graph is canonicalized before.
        shapes: The shapes of inputs that differ from `SHAPES`.
    """
    names = list(build.__code__.co_varnames[: build.__code__.co_argcount])
    types = [
        TensorType(DType.bool if name == "c" else dtype, (SHAPES | shapes)[name], DEVICE)
        for name in names
    ]
    with Graph("g", input_types=types) as graph:
        outputs = build(*[value.tensor for value in graph.inputs])
        graph.output(*(outputs if isinstance(outputs, tuple) else (outputs,)))
    module = clone_module(graph.to_mlir())
    block = entry(module).block
    assert block.last_op is not None
    if canonical:
        canonicalize(block)
        drop_dead_ops(block)
    before = described(block.last_op.operands[0], names)
    fuse_attention(block)
    verify_module(module)
    after = described(block.last_op.operands[0], names)
    if after != before:
        assert not [
            op for op in ops_of(block) if op.is_pure and not any(r.first_use for r in op.results)
        ]
    return before, after


def transposed(x: Value) -> Value:
    return ops.transpose(x, -1, -2)


def cast(x: Value, dtype: DType = F32) -> Value:
    return ops.cast(x, dtype)


def number(value: float, dtype: DType = F32) -> Value:
    return ops.constant(value, dtype, DEVICE)


def weight(*shape: int) -> Value:
    return ops.constant(np.ones(shape, np.float32), F32, DEVICE)


def wide(x: Value) -> Value:
    """A number of bfloat16 that is spread to the shape of a value, then cast."""
    return cast(ops.broadcast_to(number(0.1, BF16), x.shape))


def repeated(x: Value, axis: int, times: int, before: bool = False) -> Value:
    """A value whose axis is repeated, each of its elements or (`before`) as a whole."""
    dims = list(x.shape)
    at = axis if before else axis + 1
    apart = ops.reshape(x, [*dims[:at], 1, *dims[at:]])
    spread = ops.broadcast_to(apart, [*dims[:at], times, *dims[at:]])
    return ops.reshape(spread, [*dims[:axis], int(dims[axis]) * times, *dims[axis + 1 :]])


def spread(x: Value, times: int = 2) -> Value:
    return repeated(x, 1, times)


def spread_first(x: Value) -> Value:
    return repeated(x, 1, 2, before=True)


def spread_tokens(x: Value) -> Value:
    """The same of `[batch, tokens, heads, size]`."""
    return ops.permute(repeated(x, 2, 2), [0, 2, 1, 3])


def second_of_three(x: Value) -> Value:
    """The second of three times the second axis."""
    return ops.gather(ops.broadcast_to(x, [x.shape[0], 3, *x.shape[2:]]), number(1, INDEX), 1)


def att(q: Value, k: Value, v: Value) -> Value:
    return ops.softmax(q @ transposed(k)) @ v


GROUPED: dict[str, Any] = {"q": (2, 6, 5, 8)}
K, V = (
    f"broadcast_to 2x3x2x7x{n}(reshape 2x3x1x7x{n}({name}))" for n, name in ((8, "k"), (4, "v"))
)
"""Keys and values of grouped heads, spread to the queries of each."""
TINY, MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
CASES: dict[str, tuple[Build, dict[str, Any], str | None]] = {
    "plain": (lambda q, k, v: ops.softmax(q @ transposed(k)) @ v, {}, "attention(q, k, v)"),
    "scaled scores": (
        lambda q, k, v: ops.softmax(q @ transposed(k) * 0.5) @ v,
        {},
        "attention(q, k, v, scale 0.5)",
    ),
    "scaled scores, the number first": (
        lambda q, k, v: ops.softmax(0.5 * (q @ transposed(k))) @ v,
        {},
        "attention(q, k, v, scale 0.5)",
    ),
    "a quotient": (
        lambda q, k, v: ops.softmax(q @ transposed(k) / 4) @ v,
        {},
        "attention(q, k, v, scale 0.25)",
    ),
    "scaled q": (
        lambda q, k, v: ops.softmax(q * 0.5 @ transposed(k)) @ v,
        {},
        "attention(q, k, v, scale 0.5)",
    ),
    "a quotient of q": (
        lambda q, k, v: ops.softmax(q / 4 @ transposed(k)) @ v,
        {},
        "attention(q, k, v, scale 0.25)",
    ),
    "scaled keys": (
        lambda q, k, v: ops.softmax(q @ transposed(k * 0.5)) @ v,
        {},
        "attention(q, k, v, scale 0.5)",
    ),
    "a quotient by zero": (lambda q, k, v: ops.softmax(q @ transposed(k) / 0.0) @ v, {}, None),
    "an infinite scale": (
        lambda q, k, v: ops.softmax(q * 3e38 @ transposed(k) * 1e38) @ v,
        {},
        None,
    ),
    "a scale too small": (
        lambda q, k, v: ops.softmax(q * 1e-30 @ transposed(k) * 1e-30) @ v,
        {},
        None,
    ),
    "the greatest scale": (
        lambda q, k, v: ops.softmax(q @ transposed(k) * MAX) @ v,
        {},
        "attention(q, k, v, scale 3.40282e+38)",
    ),
    "the smallest scale": (
        lambda q, k, v: ops.softmax(q @ transposed(k) * TINY) @ v,
        {},
        "attention(q, k, v, scale 1.17549e-38)",
    ),
    "the scale 0": (
        lambda q, k, v: ops.softmax(q @ transposed(k) * 0.0) @ v,
        {},
        "attention(q, k, v, scale 0)",
    ),
    "a scale that is no number": (
        lambda q, k, v: ops.softmax(q @ transposed(k) * float("nan")) @ v,
        {},
        None,
    ),
    "added": (
        lambda q, k, v, m: ops.softmax(q @ transposed(k) + m) @ v,
        {},
        "attention(q, k, v, m, fills [None])",
    ),
    "two masks": (
        lambda q, k, v, m, n: ops.softmax(n + (m + q @ transposed(k))) @ v,
        {},
        "attention(q, k, v, m, n, fills [None, None])",
    ),
    "selected": (
        lambda q, k, v, c: ops.softmax(ops.where(c, q @ transposed(k), -10000.0)) @ v,
        {},
        "attention(q, k, v, c, fills [-10000.0])",
    ),
    "scaled transposed keys": (
        lambda q, k, v: ops.softmax(q @ (transposed(k) * 0.5)) @ v,
        {},
        "attention(q, k, v, scale 0.5)",
    ),
    "four factors": (
        lambda q, k, v: ops.softmax(q * 0.5 @ (transposed(k / 4) * 3) * 2) @ v,
        {},
        "attention(q, k, v, scale 0.75)",
    ),
    "keys that are not transposed": (
        lambda q, k, v: ops.softmax(q @ k) @ v,
        {"k": (2, 3, 8, 7)},
        "attention(q, transpose 0132(k), v)",
    ),
    "scaled q with another use": (
        lambda q, k, v: (ops.softmax((s := (q * 0.5)) @ transposed(k)) @ v, s),
        {},
        "attention(mul(q, 0.5), k, v)",
    ),
    "scaled keys that are transposed, with another use": (
        lambda q, k, v: (ops.softmax(q @ (t := transposed(k * 0.5))) @ v, t),
        {},
        "attention(q, mul(k, 0.5), v)",
    ),
    "a scale by row": (
        lambda q, k, v: ops.softmax(q @ transposed(k) * q[:, :, :, :1]) @ v,
        {},
        None,
    ),
    "four masks": (
        lambda q, k, v, m, n: ops.softmax(q @ transposed(k) + m + n + m + n) @ v,
        {},
        "attention(q, k, v, m, n, m, n, fills [None, None, None, None])",
    ),
    "five masks": (
        lambda q, k, v, m, n: ops.softmax(q @ transposed(k) + m + n + m + n + m) @ v,
        {},
        None,
    ),
    "scaled after the mask": (
        lambda q, k, v, m: ops.softmax((q @ transposed(k) + m) * 0.5) @ v,
        {},
        None,
    ),
    "scaled before the mask": (
        lambda q, k, v, m: ops.softmax(q @ transposed(k) * 0.5 + m) @ v,
        {},
        "attention(q, k, v, m, scale 0.5, fills [None])",
    ),
    "two scales": (
        lambda q, k, v, m: ops.softmax(q @ transposed(k) * 0.5 * 3 + m) @ v,
        {},
        "attention(q, k, v, m, scale 1.5, fills [None])",
    ),
    "a select between scores and a tensor": (
        lambda q, k, v, c, b: ops.softmax(ops.where(c, q @ transposed(k), b)) @ v,
        {},
        None,
    ),
    "a mask less the scores": (lambda q, k, v, m: ops.softmax(m - q @ transposed(k)) @ v, {}, None),
    "another axis": (lambda q, k, v: ops.softmax(q @ transposed(k), axis=2) @ v, {}, None),
    "scores with another use": (
        lambda q, k, v: (ops.softmax(s := (q @ transposed(k))) @ v, s),
        {},
        None,
    ),
    "keys that are a weight": (
        lambda q, v: ops.softmax(q @ ops.constant(np.ones((8, 7), np.float32), F32, DEVICE)) @ v,
        {},
        None,
    ),
    "values that are a weight": (
        lambda q, k: (
            ops.softmax(q @ transposed(k)) @ ops.constant(np.ones((7, 4), np.float32), F32, DEVICE)
        ),
        {},
        None,
    ),
    "queries that are a weight": (
        lambda k, v: (
            ops.softmax(
                ops.constant(np.ones((2, 3, 5, 8), np.float32), F32, DEVICE) @ transposed(k)
            )
            @ v
        ),
        {},
        "attention(weight, k, v)",
    ),
    "scores of weights": (
        lambda v: (
            ops.softmax(
                ops.constant(np.ones((2, 3, 5, 8), np.float32), F32, DEVICE)
                @ ops.constant(np.ones((2, 3, 8, 7), np.float32), F32, DEVICE)
            )
            @ v
        ),
        {},
        None,
    ),
    "float64": (lambda q, k, v: ops.softmax(q @ transposed(k)) @ v, {"dtype": DType.float64}, None),
    "two, of which one is not found": (
        lambda q, k, v, b: (
            ops.softmax(q @ transposed(k)) @ v,
            ops.softmax(ops.tanh(q @ transposed(k))) @ v,
        ),
        {},
        "attention(q, k, v)",
    ),
    "beside an op of two results": (
        lambda q, k, v: (ops.softmax(q @ transposed(k)) @ v, ops.top_k(q, 2)[0]),
        {},
        "attention(q, k, v)",
    ),
    "a canonical graph": (
        lambda q, k, v: ops.softmax(q @ transposed(k)) @ transposed(v),
        {"v": (2, 3, 4, 7), "canonical": True},
        "attention(q, k, transpose 0132(v))",
    ),
    "scores regrouped without rows": (
        lambda q, k, v: ops.softmax(ops.reshape(q @ transposed(k), (3, 0, 7))) @ v,
        {"q": (2, 0, 8), "k": (2, 7, 8), "v": (3, 7, 4)},
        None,
    ),
    "a mask that is a product of weights": (
        lambda q, k, v: (
            ops.softmax(weight(2, 3, 5, 2) @ weight(2, 3, 2, 7) + q @ transposed(k)) @ v
        ),
        {},
        "attention(q, k, v, matmul(weight, weight), fills [None])",
    ),
    "the softmax of an input": (lambda b, v: ops.softmax(b) @ v, {}, None),
    "the softmax of a sum of inputs": (lambda b, v, n: ops.softmax(b + n) @ v, {}, None),
    "a function of the scores, scaled": (
        lambda q, k, v: ops.softmax(ops.tanh(q @ transposed(k)) * 0.5) @ v,
        {},
        None,
    ),
    "a select between a function of the scores and a number": (
        lambda q, k, v, c: ops.softmax(ops.where(c, ops.tanh(q @ transposed(k)), -5.0)) @ v,
        {},
        None,
    ),
    "bfloat16 scores that are scaled and regrouped": (
        lambda q, k, v: (
            ops.softmax(ops.reshape(q @ transposed(k) * 0.5, (2, 3, 5, 7)))
            @ ops.reshape(v, (2, 3, 7, 4))
        ),
        {"q": (6, 5, 8), "k": (6, 7, 8), "v": (6, 7, 4), "dtype": BF16},
        "attention(reshape 2x3x5x8(q), reshape 2x3x7x8(k), reshape 2x3x7x4(v), scale 0.5, bfloat16)",
    ),
    "a bfloat16 mask, softmax in float32": (
        lambda q, k, v, m: ops.softmax(cast(q @ transposed(k) + m)) @ cast(v),
        {"dtype": BF16},
        "attention(q, k, v, m, fills [None], roundings [None, 'bfloat16', None])",
    ),
    "keys and values that are gathered": (
        lambda q, k, v: att(q, second_of_three(k), second_of_three(v)),
        {"q": (2, 6, 5, 8), "k": (2, 1, 6, 7, 8), "v": (2, 1, 6, 7, 4)},
        "attention(q, reshape 2x6x7x8(slice 1:1:2(broadcast_to 2x3x6x7x8(k))), "
        "reshape 2x6x7x4(slice 1:1:2(broadcast_to 2x3x6x7x4(v))))",
    ),
    "keys with a last axis of size 1": (
        lambda q, k, v: att(q, ops.reshape(ops.broadcast_to(k, [2, 3, 7]), [2, 3, 7, 1]), v),
        {"q": (2, 3, 5, 1), "k": (2, 1, 7)},
        "attention(q, reshape 2x3x7x1(broadcast_to 2x3x7(k)), v)",
    ),
    "keys whose last axis of size 1 is merged": (
        lambda q, k, v: (
            ops.softmax(q @ ops.reshape(ops.broadcast_to(k, [2, 3, 8, 7, 1]), [2, 3, 8, 7])) @ v
        ),
        {"k": (2, 3, 1, 7, 1)},
        "attention(q, transpose 0132(reshape 2x3x8x7(broadcast_to 2x3x8x7x1(k))), v)",
    ),
    "scores rounded to two dtypes, around a mask": (
        lambda q, k, v, m: (
            ops.softmax(cast(cast(cast(cast(q @ transposed(k), F16)) + m, BF16))) @ v
        ),
        {},
        "attention(q, k, v, m, fills [None], roundings ['float16', 'bfloat16', None])",
    ),
    "regrouped scores and a result that is regrouped and transposed": (
        lambda q, k, v: ops.permute(
            ops.reshape(
                ops.reshape(ops.softmax(ops.reshape(q @ transposed(k), (2, 3, 5, 7))), (6, 5, 7))
                @ v,
                (2, 3, 5, 4),
            ),
            [0, 2, 1, 3],
        ),
        {"q": (6, 5, 8), "k": (6, 7, 8), "v": (6, 7, 4)},
        "attention(reshape 2x3x5x8(q), reshape 2x3x7x8(k), reshape 2x3x7x4(v), axis 1)",
    ),
    "a result whose rows are regrouped, and transposed": (
        lambda q, k, v: ops.permute(ops.reshape(att(q, k, v), (2, 3, 20)), [1, 0, 2]),
        {},
        "transpose 102(reshape 2x3x20(attention(q, k, v)))",
    ),
    "a result that is cast and transposed": (
        lambda q, k, v: ops.permute(cast(att(q, k, v), BF16), [0, 2, 1, 3]),
        {},
        "transpose 0213(cast(attention(q, k, v)))",
    ),
    "matrices": (
        lambda q, k, v: ops.softmax(q @ transposed(k)) @ v,
        {"q": (5, 8), "k": (7, 8), "v": (7, 4)},
        "attention(q, k, v)",
    ),
    "keys and values that are matrices": (
        lambda q, k, v: ops.softmax(q @ transposed(k)) @ v,
        {"k": (7, 8), "v": (7, 4)},
        "attention(q, broadcast_to 2x3x7x8(k), broadcast_to 2x3x7x4(v))",
    ),
    "keys and values of one head": (
        lambda q, k, v: ops.softmax(q @ transposed(k)) @ v,
        {"k": (2, 1, 7, 8), "v": (2, 1, 7, 4)},
        "attention(q, transpose 0132(broadcast_to 2x3x8x7(transpose 0132(k))), broadcast_to 2x3x7x4(v))",
    ),
    "a size that is no number": (
        lambda q, k, v: ops.softmax(q @ transposed(k)) @ v,
        {"q": (2, 3, 5, "s"), "k": (2, 3, 7, "s")},
        None,
    ),
    "a width that is no number": (
        lambda q, k, v: ops.softmax(q @ transposed(k)) @ v,
        {"v": (2, 3, 7, "w")},
        None,
    ),
    "the size 0": (
        lambda q, k, v: ops.softmax(q @ transposed(k)) @ v,
        {"q": (2, 3, 5, 0), "k": (2, 3, 7, 0)},
        None,
    ),
    "size 1": (
        lambda q, k, v: ops.softmax(q @ transposed(k)) @ v,
        {"q": (2, 3, 5, 1), "k": (2, 3, 7, 1), "v": (2, 3, 7, 1)},
        "attention(q, k, v)",
    ),
    "symbolic batch and rows": (
        lambda q, k, v: ops.softmax(q @ transposed(k)) @ v,
        {"q": ("b", 3, "r", 8), "k": ("b", 3, "t", 8), "v": ("b", 3, "t", 4)},
        "attention(q, k, v)",
    ),
    "regrouped scores": (
        lambda q, k, v, n: (
            ops.reshape(ops.softmax(ops.reshape(q @ transposed(k), (2, 3, 5, 7)) + n), (6, 5, 7))
            @ v
        ),
        {"q": (6, 5, 8), "k": (6, 7, 8), "v": (6, 7, 4)},
        "reshape 6x5x4(attention(reshape 2x3x5x8(q), reshape 2x3x7x8(k), reshape 2x3x7x4(v), n, fills [None]))",
    ),
    "regrouped queries and keys": (
        lambda q, k, v, m: (
            ops.softmax(
                ops.reshape(
                    ops.reshape(q, (6, 5, 8)) @ transposed(ops.reshape(k, (6, 7, 8))), (2, 3, 5, 7)
                )
                + m
            )
            @ v
        ),
        {},
        "attention(q, k, v, m, fills [None])",
    ),
    "regrouped scores without rows": (
        lambda q, k, v: (
            ops.reshape(ops.softmax(ops.reshape(q @ transposed(k), (3, 0, 7))), (2, 0, 7)) @ v
        ),
        {"q": (2, 0, 8), "k": (2, 7, 8), "v": (2, 7, 4)},
        None,
    ),
    "a result that is transposed: rows, heads": (
        lambda q, k, v: ops.permute(ops.softmax(q @ transposed(k)) @ v, [0, 2, 1, 3]),
        {},
        "attention(q, k, v, axis 1)",
    ),
    "a result that is transposed: rows first": (
        lambda q, k, v: ops.permute(ops.softmax(q @ transposed(k)) @ v, [2, 0, 1, 3]),
        {},
        "attention(q, k, v, axis 0)",
    ),
    "a result that is transposed: heads last": (
        lambda q, k, v: ops.permute(ops.softmax(q @ transposed(k)) @ v, [0, 2, 3, 1]),
        {},
        "transpose 0231(attention(q, k, v))",
    ),
    "a result that is transposed: heads before the batch": (
        lambda q, k, v: ops.permute(ops.softmax(q @ transposed(k)) @ v, [1, 2, 0, 3]),
        {},
        "transpose 1203(attention(q, k, v))",
    ),
    "a result that is regrouped and transposed": (
        lambda q, k, v: ops.permute(
            ops.reshape(ops.softmax(q @ transposed(k)) @ v, (2, 3, 5, 4)), [0, 2, 1, 3]
        ),
        {"q": (6, 5, 8), "k": (6, 7, 8), "v": (6, 7, 4)},
        "transpose 0213(reshape 2x3x5x4(attention(q, k, v)))",
    ),
    "regrouped scores and a result that is transposed": (
        lambda q, k, v: ops.permute(
            ops.reshape(ops.softmax(ops.reshape(q @ transposed(k), (2, 3, 5, 7))), (6, 5, 7)) @ v,
            [1, 0, 2],
        ),
        {"q": (6, 5, 8), "k": (6, 7, 8), "v": (6, 7, 4)},
        "transpose 102(reshape 6x5x4(transpose 1203(attention("
        "reshape 2x3x5x8(q), reshape 2x3x7x8(k), reshape 2x3x7x4(v), axis 0))))",
    ),
    "no keys": (
        lambda q, k, v: ops.softmax(q @ transposed(k)) @ v,
        {"k": (2, 3, 0, 8), "v": (2, 3, 0, 4)},
        "attention(q, k, v)",
    ),
    "bfloat16": (att, {"dtype": BF16}, "attention(q, k, v, bfloat16)"),
    "softmax in float32": (
        lambda q, k, v: cast(ops.softmax(cast(q @ transposed(k))), BF16) @ v,
        {"dtype": BF16},
        "attention(q, k, v, roundings [None, 'bfloat16'], bfloat16)",
    ),
    "scaled in bfloat16, softmax in float32": (
        lambda q, k, v: cast(ops.softmax(cast(q @ transposed(k) * 0.5)), BF16) @ v,
        {"dtype": BF16},
        "attention(q, k, v, scale 0.5, roundings ['bfloat16', 'bfloat16'], bfloat16)",
    ),
    "scaled in float32": (
        lambda q, k, v: cast(ops.softmax(cast(q @ transposed(k)) * 0.5), BF16) @ v,
        {"dtype": BF16},
        "attention(q, k, v, scale 0.5, roundings [None, 'bfloat16'], bfloat16)",
    ),
    "widened q": (
        lambda q, k, v: ops.softmax(cast(q) @ transposed(cast(k))) @ cast(v),
        {"dtype": BF16},
        "attention(q, k, v)",
    ),
    "widened and transposed": (
        lambda q, k, v: ops.softmax(cast(q) @ cast(transposed(k))) @ cast(v),
        {"dtype": F16},
        "attention(q, k, v)",
    ),
    "scaled then widened": (
        lambda q, k, v: ops.softmax(cast(q * 0.1) @ transposed(cast(k))) @ cast(v),
        {"dtype": BF16},
        "attention(mul(q, 0.100098), k, v)",
    ),
    "widened then scaled": (
        lambda q, k, v: ops.softmax(cast(q) * 0.1 @ transposed(cast(k) * 3)) @ cast(v),
        {"dtype": BF16},
        "attention(q, k, v, scale 0.3)",
    ),
    "widened scaled widened": (
        lambda q, k, v: ops.softmax(cast(q * 0.5) * 0.1 @ transposed(cast(k))) @ cast(v),
        {"dtype": BF16},
        "attention(mul(q, 0.5), k, v, scale 0.1)",
    ),
    "v scaled": (
        lambda q, k, v: ops.softmax(q @ transposed(k)) @ (v * 0.5),
        {},
        "attention(q, k, mul(v, 0.5))",
    ),
    "narrowed q": (
        lambda q, k, v: ops.softmax(cast(q, BF16) @ transposed(cast(k, BF16))) @ cast(v, BF16),
        {},
        "attention(cast(q), cast(k), cast(v), bfloat16)",
    ),
    "f16 to bf16": (
        lambda q, k, v: ops.softmax(cast(q, BF16) @ transposed(cast(k, BF16))) @ cast(v, BF16),
        {"dtype": F16},
        "attention(cast(q), cast(k), cast(v), bfloat16)",
    ),
    "scores cast to integers": (
        lambda q, k, v: ops.softmax(cast(cast(q @ transposed(k), DType.int32))) @ v,
        {},
        None,
    ),
    "f64 softmax": (
        lambda q, k, v: cast(ops.softmax(cast(q @ transposed(k), DType.float64))) @ v,
        {},
        None,
    ),
    "operands cast from int8": (
        lambda q, k, v: ops.softmax(cast(q) @ transposed(cast(k))) @ cast(v),
        {"dtype": DType.int8},
        "attention(cast(q), cast(k), cast(v))",
    ),
    "rounded probabilities": (
        lambda q, k, v: cast(cast(ops.softmax(q @ transposed(k)), BF16)) @ v,
        {},
        "attention(q, k, v, roundings [None, 'bfloat16'])",
    ),
    "probabilities rounded twice": (
        lambda q, k, v: cast(cast(cast(ops.softmax(q @ transposed(k)), BF16), F16)) @ v,
        {},
        None,
    ),
    "probabilities that are rounded and regrouped": (
        lambda q, k, v: (
            cast(
                ops.reshape(
                    cast(ops.softmax(ops.reshape(q @ transposed(k), (6, 5, 7))), F16), (2, 3, 5, 7)
                )
            )
            @ v
        ),
        {},
        "reshape 2x3x5x4(attention(reshape 6x5x8(q), reshape 6x7x8(k), reshape 6x7x4(v), roundings [None, 'float16']))",
    ),
    "scaled probabilities": (lambda q, k, v: ops.softmax(q @ transposed(k)) * 0.5 @ v, {}, None),
    "probabilities whose rows are regrouped": (
        lambda q, k, v: ops.reshape(ops.softmax(q @ transposed(k)), (2, 3, 7, 5)) @ q,
        {},
        None,
    ),
    "scores f16 f32": (
        lambda q, k, v: ops.softmax(cast(cast(q @ transposed(k), F16))) @ v,
        {},
        "attention(q, k, v, roundings ['float16', None])",
    ),
    "scores f16 then mask": (
        lambda q, k, v, m: ops.softmax(cast(cast(q @ transposed(k), F16)) + m) @ v,
        {},
        "attention(q, k, v, m, fills [None], roundings ['float16', None, None])",
    ),
    "scores f16 then scale": (
        lambda q, k, v: ops.softmax(cast(cast(q @ transposed(k), F16)) * 0.5) @ v,
        {},
        None,
    ),
    "scores f16 bf16": (
        lambda q, k, v: ops.softmax(cast(cast(cast(q @ transposed(k), F16), BF16))) @ v,
        {},
        None,
    ),
    "mask then f16": (
        lambda q, k, v, m: ops.softmax(cast(cast(q @ transposed(k) + m, F16))) @ v,
        {},
        "attention(q, k, v, m, fills [None], roundings [None, 'float16', None])",
    ),
    "a number that is cast": (
        lambda q, k, v: ops.softmax(q @ transposed(k) * wide(q @ transposed(k))) @ v,
        {},
        "attention(q, k, v, scale 0.100098)",
    ),
    "a number that is cast twice": (
        lambda q, k, v: (
            ops.softmax(
                q
                @ transposed(k)
                * cast(cast(ops.broadcast_to(number(3.3), (2, 3, 5, 7)), DType.int32))
            )
            @ v
        ),
        {},
        "attention(q, k, v, scale 3)",
    ),
    "a fill that is cast": (
        lambda q, k, v, c: (
            ops.softmax(ops.where(c, q @ transposed(k), wide(q @ transposed(k)))) @ v
        ),
        {},
        "attention(q, k, v, c, fills [0.10009765625])",
    ),
    "a number with axes": (
        lambda q, k, v: (
            ops.softmax(
                q
                @ transposed(k)
                * ops.reshape(ops.constant(np.full((1,), 2, np.float32), F32, DEVICE), (1, 1, 1, 1))
            )
            @ v
        ),
        {},
        "attention(q, k, v, scale 2)",
    ),
    "vector scale": (
        lambda q, k, v: (
            ops.softmax(q @ transposed(k) * ops.constant(np.full((7,), 2, np.float32), F32, DEVICE))
            @ v
        ),
        {},
        None,
    ),
    "a number by the scores": (
        lambda q, k, v: ops.softmax(2.0 / (q @ transposed(k))) @ v,
        {},
        None,
    ),
    "a number by q": (
        lambda q, k, v: ops.softmax(2.0 / q @ transposed(k)) @ v,
        {},
        "attention(div(2.0, q), k, v)",
    ),
    "mask of column": (
        lambda q, k, v, n: ops.softmax(q @ transposed(k) + n) @ v,
        {"n": (7,)},
        "attention(q, k, v, n, fills [None])",
    ),
    "mask full": (
        lambda q, k, v, b: ops.softmax(q @ transposed(k) + b) @ v,
        {},
        "attention(q, k, v, b, fills [None])",
    ),
    "mask broadcast twice": (
        lambda q, k, v, n: (
            ops.softmax(
                q @ transposed(k) + ops.broadcast_to(ops.broadcast_to(n, (3, 5, 7)), (2, 3, 5, 7))
            )
            @ v
        ),
        {},
        "attention(q, k, v, n, fills [None])",
    ),
    "mask not neg": (
        lambda q, k, v, c: ops.softmax(ops.where(c, -5.0, q @ transposed(k))) @ v,
        {},
        "attention(q, k, v, not(c), fills [-5.0])",
    ),
    "grouped": (
        lambda q, k, v: att(q, spread(k), spread(v)),
        GROUPED,
        f"reshape 2x6x5x4(attention(reshape 2x3x2x5x8(q), {K}, {V}))",
    ),
    "grouped first": (
        lambda q, k, v: att(q, spread_first(k), spread_first(v)),
        GROUPED,
        "reshape 2x6x5x4(attention(reshape 2x2x3x5x8(q), "
        "broadcast_to 2x2x3x7x8(reshape 2x1x3x7x8(k)), broadcast_to 2x2x3x7x4(reshape 2x1x3x7x4(v))))",
    ),
    "grouped mixed": (
        lambda q, k, v: att(q, spread(k), spread_first(v)),
        GROUPED,
        f"attention(q, reshape 2x6x7x8({K}), reshape 2x6x7x4(broadcast_to 2x2x3x7x4(reshape 2x1x3x7x4(v))))",
    ),
    "grouped k only": (
        lambda q, k, v: att(q, spread(k), v),
        {"q": (2, 6, 5, 8), "v": (2, 6, 7, 4)},
        f"attention(q, reshape 2x6x7x8({K}), v)",
    ),
    "grouped v only": (
        lambda q, k, v: att(q, k, spread(v)),
        {"q": (2, 6, 5, 8), "k": (2, 6, 7, 8)},
        f"attention(q, k, reshape 2x6x7x4({V}))",
    ),
    "grouped other": (
        lambda q, k, v: att(q, spread(k), spread(v, 3)),
        {"q": (2, 6, 5, 8), "v": (2, 2, 7, 4)},
        f"attention(q, reshape 2x6x7x8({K}), reshape 2x6x7x4(broadcast_to 2x2x3x7x4(reshape 2x2x1x7x4(v))))",
    ),
    "grouped tokens": (
        lambda q, k, v: att(q, spread_tokens(k), spread_tokens(v)),
        {"q": (2, 6, 5, 8), "k": (2, 7, 3, 8), "v": (2, 7, 3, 4)},
        "reshape 2x6x5x4(attention(reshape 2x3x2x5x8(q), "
        "transpose 02314(broadcast_to 2x7x3x2x8(reshape 2x7x3x1x8(k))), "
        "transpose 02314(broadcast_to 2x7x3x2x4(reshape 2x7x3x1x4(v)))))",
    ),
    "grouped mask": (
        lambda q, k, v, m, n, b: ops.softmax(q @ transposed(spread(k)) + m + n + b) @ spread(v),
        {"q": (2, 6, 5, 8), "b": (2, 6, 5, 7)},
        f"reshape 2x6x5x4(attention(reshape 2x3x2x5x8(q), {K}, {V}, reshape 2x1x1x5x7(m), n, "
        "reshape 2x3x2x5x7(b), fills [None, None, None]))",
    ),
    "grouped mask3": (
        lambda q, k, v, m: ops.softmax(q @ transposed(spread(k)) + m) @ spread(v),
        {"q": (2, 6, 5, 8), "m": (6, 5, 7)},
        f"reshape 2x6x5x4(attention(reshape 2x3x2x5x8(q), {K}, {V}, reshape 3x2x5x7(m), fills [None]))",
    ),
    "grouped axis": (
        lambda q, k, v: ops.permute(att(q, spread(k), spread(v)), [0, 2, 1, 3]),
        GROUPED,
        f"transpose 0213(reshape 2x6x5x4(transpose 02314(attention(reshape 2x3x2x5x8(q), {K}, {V}, axis 1))))",
    ),
    "grouped keys": (
        lambda q, k, v: att(
            q,
            *[
                ops.reshape(
                    ops.broadcast_to(
                        ops.reshape(x, [2, 3, 7, 1, x.shape[3]]), [2, 3, 7, 2, x.shape[3]]
                    ),
                    [2, 3, 14, x.shape[3]],
                )
                for x in (k, v)
            ],
        ),
        {},
        "attention(q, reshape 2x3x14x8(broadcast_to 2x3x7x2x8(reshape 2x3x7x1x8(k))), "
        "reshape 2x3x14x4(broadcast_to 2x3x7x2x4(reshape 2x3x7x1x4(v))))",
    ),
    "grouped one": (
        lambda q, k, v: att(q, spread(k, 6), spread(v, 6)),
        {"q": (2, 6, 5, 8), "k": (2, 1, 7, 8), "v": (2, 1, 7, 4)},
        "reshape 2x6x5x4(attention(reshape 2x1x6x5x8(q), broadcast_to 2x1x6x7x8(reshape 2x1x1x7x8(k)), "
        "broadcast_to 2x1x6x7x4(reshape 2x1x1x7x4(v))))",
    ),
    "merge without broadcast": (
        lambda q, k, v: att(q, *[ops.reshape(x, [2, 6, 7, x.shape[4]]) for x in (k, v)]),
        {"q": (2, 6, 5, 8), "k": (2, 3, 2, 7, 8), "v": (2, 3, 2, 7, 4)},
        "attention(q, reshape 2x6x7x8(k), reshape 2x6x7x4(v))",
    ),
}
"""Graphs, the shapes and the dtype of their inputs, and their results after the pass; None: without attention."""


@pytest.mark.parametrize("name", CASES)
def test_attention_that_is_found(name: str) -> None:
    build, given, expected = CASES[name]
    before, after = found(build, **given)
    assert after == (before if expected is None else expected)
