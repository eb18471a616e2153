"""Views that move before element-wise ops, and concats that move behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from xdsl.ir import Block

from max._compiler.passes.split import split_concats
from max._compiler.passes.views import push_views
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.mlir import clone_module, entry, verify_module
from tests.compiler.test_attention_pattern import described

Value = TensorValue
Build = Callable[..., Any]
SHAPES = {
    "x": (4, 8),
    "y": (4, 8),
    "v": (8,),
    "u": (4, 1),
    "a": (4, 3),
    "b": (4, 5),
    "c": (4, 8),
    "d": (8, 8),
    "s": (4, "n"),
    "z": (4, 0),
    "e": (4, 4),
}


def moved(step: Callable[[Block], object], build: Build) -> list[str]:
    """The outputs of a graph after a pass; its inputs are those of `SHAPES` that `build` takes."""
    names = list(build.__code__.co_varnames[: build.__code__.co_argcount])
    types = [TensorType(DType.float32, SHAPES[name], DeviceRef.CPU()) for name in names]
    with Graph("g", input_types=types) as graph:
        outputs = build(*[value.tensor for value in graph.inputs])
        graph.output(*(outputs if isinstance(outputs, tuple) else (outputs,)))
    module = clone_module(graph.to_mlir())
    step(entry(module).block)
    verify_module(module)
    last = entry(module).block.last_op
    assert last is not None
    return [described(value, names) for value in last.operands]


def joined(*parts: Value, axis: int = 1) -> Value:
    return ops.concat(parts, axis)


def chain(x: Value, count: int) -> Value:
    for _ in range(count):
        x = ops.tanh(x)
    return x


def turned(x: Value) -> Value:
    return ops.transpose(x, 0, 1)


VIEWS: dict[str, tuple[Build, list[str]]] = {
    "between ops": (
        lambda x, y: ops.tanh(ops.exp(turned(x + y))),
        ["tanh(exp(add(transpose 10(x), transpose 10(y))))"],
    ),
    "before no op": (lambda x, y: turned(x + y), ["transpose 10(add(x, y))"]),
    "before a reduction": (
        lambda x, y: ops.sum(turned(x + y)),
        ["reduce_sum(add(transpose 10(x), transpose 10(y)))"],
    ),
    "before a product": (
        lambda x, y: turned(x + y) @ y,
        ["matmul(transpose 10(add(x, y)), y)"],
    ),
    "two before an op": (
        lambda x, y: ops.exp(ops.reshape(turned(x + y), [4, 8])),
        ["exp(add(reshape 4x8(transpose 10(x)), reshape 4x8(transpose 10(y))))"],
    ),
    "two before no op": (
        lambda x, y: ops.reshape(turned(x + y), [4, 8]),
        ["reshape 4x8(transpose 10(add(x, y)))"],
    ),
    "after two ops": (
        lambda x, y: ops.exp(turned(ops.tanh(x + y))),
        ["exp(tanh(add(transpose 10(x), transpose 10(y))))"],
    ),
    "of a value with another use": (
        lambda x, y: ((s := x + y), ops.exp(turned(s))),
        ["add(x, y)", "exp(transpose 10(add(x, y)))"],
    ),
    "of an input": (lambda x: ops.exp(turned(x)), ["exp(transpose 10(x))"]),
    "of a product": (lambda x, d: ops.exp(turned(x @ d)), ["exp(transpose 10(matmul(x, d)))"]),
    "a slice": (
        lambda x, y: ops.exp((x + y)[1:3]),
        ["exp(add(slice 0:1:3(x), slice 0:1:3(y)))"],
    ),
    "a broadcast of a cheap op": (
        lambda v, x: x * ops.broadcast_to(v + 1.0, [4, 8]),
        ["mul(x, add(broadcast_to 4x8(v), 1.0))"],
    ),
    "a broadcast of another op": (
        lambda v, x: x * ops.broadcast_to(ops.exp(v), [4, 8]),
        ["mul(x, broadcast_to 4x8(exp(v)))"],
    ),
    "before a product and an op": (
        lambda x, y: ((t := turned(x + y)) @ y, ops.exp(t)),
        [
            "matmul(add(transpose 10(x), transpose 10(y)), y)",
            "exp(add(transpose 10(x), transpose 10(y)))",
        ],
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    """A view between element-wise ops, or before a reduction, moves to the operands of the op before it."""
    build, expected = VIEWS[name]
    assert moved(push_views, build) == expected


CONCATS: dict[str, tuple[Build, list[str]]] = {
    "one op": (lambda a, b: ops.tanh(joined(ops.exp(a), b)), ["concat 1(tanh(exp(a)), tanh(b))"]),
    "of an op in the second place": (
        lambda a, b: ops.tanh(joined(a, ops.exp(b))),
        ["concat 1(tanh(a), tanh(exp(b)))"],
    ),
    "of no op": (lambda a, b: ops.tanh(joined(a, b)), ["tanh(concat 1(a, b))"]),
    "with another operand": (
        lambda a, b, c: joined(ops.exp(a), b) + c,
        ["concat 1(add(exp(a), slice 1:0:3(c)), add(b, slice 1:3:8(c)))"],
    ),
    "with another operand first": (
        lambda a, b, c: c - joined(ops.exp(a), b),
        ["concat 1(sub(slice 1:0:3(c), exp(a)), sub(slice 1:3:8(c), b))"],
    ),
    "with a row": (
        lambda a, b, v: joined(ops.exp(a), b) + v,
        [
            "concat 1(add(exp(a), broadcast_to 4x3(slice 0:0:3(v))), add(b, broadcast_to 4x5(slice 0:3:8(v))))"
        ],
    ),
    "with a column": (
        lambda a, b, u: joined(ops.exp(a), b) + u,
        ["concat 1(add(exp(a), broadcast_to 4x3(u)), add(b, broadcast_to 4x5(u)))"],
    ),
    "with a number": (
        lambda a, b: joined(ops.exp(a), b) + 2.0,
        ["concat 1(add(exp(a), 2.0), add(b, 2.0))"],
    ),
    "of rows": (
        lambda x, y: ops.tanh(joined(ops.exp(x), y, axis=0)),
        ["concat 0(tanh(exp(x)), tanh(y))"],
    ),
    "of rows, with a row": (
        lambda x, y, v: joined(ops.exp(x), y, axis=0) + v,
        ["concat 0(add(exp(x), broadcast_to 4x8(v)), add(y, broadcast_to 4x8(v)))"],
    ),
    "of rows, with a column": (
        lambda x, y, d: joined(ops.exp(x), y, axis=0) * d[:, :1],
        [
            "concat 0(mul(exp(x), broadcast_to 4x8(slice 0:0:4(slice 1:0:1(d)))), "
            "mul(y, broadcast_to 4x8(slice 0:4:8(slice 1:0:1(d)))))"
        ],
    ),
    "with ops on another operand": (
        lambda a, b, c: ops.tanh(ops.exp(joined(ops.exp(a), b)) + ops.sin(c)),
        [
            "concat 1(tanh(add(exp(exp(a)), sin(slice 1:0:3(c)))), tanh(add(exp(b), sin(slice 1:3:8(c)))))"
        ],
    ),
    "with an operand that has another use": (
        lambda a, b, c: (joined(ops.exp(a), b) + (e := ops.sin(c)), e),
        ["concat 1(add(exp(a), slice 1:0:3(sin(c))), add(b, slice 1:3:8(sin(c))))", "sin(c)"],
    ),
    "that has another use": (
        lambda a, b: ((k := joined(ops.exp(a), b)), ops.tanh(k)),
        ["concat 1(exp(a), b)", "tanh(concat 1(exp(a), b))"],
    ),
    "that is used twice": (
        lambda a, b: (k := joined(ops.exp(a), b)) * k,
        ["mul(concat 1(exp(a), b), concat 1(exp(a), b))"],
    ),
    "with another concat": (
        lambda a, b: joined(ops.exp(a), b) + joined(b, a),
        ["add(concat 1(exp(a), b), concat 1(b, a))"],
    ),
    "before rows": (
        lambda a, b: ops.softmax(ops.tanh(joined(ops.exp(a), b))),
        ["softmax(tanh(concat 1(exp(a), b)))"],
    ),
    "before a view": (
        lambda a, b: turned(ops.tanh(joined(ops.exp(a), b))),
        ["transpose 10(tanh(concat 1(exp(a), b)))"],
    ),
    "before a product": (
        lambda a, b, d: ops.tanh(joined(ops.exp(a), b)) @ d,
        ["matmul(concat 1(tanh(exp(a)), tanh(b)), d)"],
    ),
    "before a product and an output": (
        lambda a, b, d: ((r := ops.tanh(joined(ops.exp(a), b))) @ d, r),
        ["matmul(concat 1(tanh(exp(a)), tanh(b)), d)", "concat 1(tanh(exp(a)), tanh(b))"],
    ),
    "before an op with another use": (
        lambda a, b: ((r := ops.tanh(joined(ops.exp(a), b))), ops.exp(r)),
        ["tanh(concat 1(exp(a), b))", "exp(tanh(concat 1(exp(a), b)))"],
    ),
    "of three parts, with another operand": (
        lambda a, u, e, c: joined(a, ops.exp(u), e) + c,
        ["concat 1(add(a, slice 1:0:3(c)), add(exp(u), slice 1:3:4(c)), add(e, slice 1:4:8(c)))"],
    ),
    "of four parts": (
        lambda a: ops.tanh(joined(ops.exp(a), a, a, a)),
        ["concat 1(tanh(exp(a)), tanh(a), tanh(a), tanh(a))"],
    ),
    "of five parts": (
        lambda a: ops.tanh(joined(ops.exp(a), a, a, a, a)),
        ["tanh(concat 1(exp(a), a, a, a, a))"],
    ),
    "of a symbolic part": (
        lambda a, s: ops.tanh(joined(ops.exp(a), s)),
        ["tanh(concat 1(exp(a), s))"],
    ),
    "of an empty part": (
        lambda a, z: ops.tanh(joined(ops.exp(a), z)),
        ["tanh(concat 1(exp(a), z))"],
    ),
    "of three parts": (
        lambda a, b: ops.tanh(joined(a, ops.exp(b), a)),
        ["concat 1(tanh(a), tanh(exp(b)), tanh(a))"],
    ),
    "twice": (
        lambda a, b: (ops.tanh(joined(ops.exp(a), b)), ops.tanh(joined(ops.exp(b), a))),
        ["concat 1(tanh(exp(a)), tanh(b))", "concat 1(tanh(exp(b)), tanh(a))"],
    ),
}


@pytest.mark.parametrize("name", CONCATS)
def test_concats(name: str) -> None:
    """A concat of a few parts moves behind the ops that use it, up to the last that could be in their region."""
    build, expected = CONCATS[name]
    assert moved(split_concats, build) == expected


@pytest.mark.parametrize(("count", "whole"), [(32, False), (33, True)])
def test_at_most_32_ops_are_repeated(count: int, whole: bool) -> None:
    (after,) = moved(split_concats, lambda a, b: chain(joined(ops.exp(a), b), count))
    assert after.startswith("tanh") == whole
    (after,) = moved(
        split_concats, lambda a, b, c: chain(c, count - 2) * ops.sin(joined(ops.exp(a), b))
    )
    assert after.startswith("mul") == whole
