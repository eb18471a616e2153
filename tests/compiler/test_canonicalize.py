"""Ops in canonical form: what each rule makes of a small graph, with equal results; no other pass runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from max import _interpreter
from max._compiler.passes.canonicalize import canonicalize
from max._compiler.passes.redundant_ops import drop_dead_ops
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.graph.ops.staging.stage import stage
from max.mlir import DimExpr, MoOp, clone_module, entry, verify_module
from max.mlir.builtin import UNKNOWN_LOC

Value = TensorValue
CPU = DeviceRef.CPU()
F32, F16, I32 = DType.float32, DType.float16, DType.int32
X = np.array([[1.5, -2.0, 0.25, -0.0], [4.0, 0.0, -np.inf, 9.0], [2.0, 8.0, -1.0, 0.5]], np.float32)


def canonical(
    build: Callable[[Value], Any], x: np.ndarray = X, dims: tuple[int | str, ...] = ("n", 4)
) -> list[str]:
    """The ops of a graph in canonical form, without constants and their broadcasts."""
    type_ = TensorType(DType.from_numpy(x.dtype), dims, CPU)
    with Graph("g", input_types=[type_]) as graph:
        graph.output(build(graph.inputs[0].tensor))
    with np.errstate(all="ignore"):
        (expected,) = _interpreter.run(graph, [x])
        module = clone_module(graph.to_mlir())
        block = entry(module).block
        canonicalize(block)
        verify_module(module)
        # each op is at a line of the user's program
        assert all(op.location != UNKNOWN_LOC for op in block.ops)
        drop_dead_ops(block)
        found = [op for op in block.ops if isinstance(op, MoOp) and op.name != "mo.output"]
        if all(op.name.startswith("mo.") for op in found):
            (result,) = _interpreter.run(module, [x])
            # NumPy's powers differ from its roots in the last bit on some processors
            error = 2.0**-22 if any(op.name == "mo.rsqrt" for op in found) else 0.0
            np.testing.assert_allclose(result, expected, error)
            assert result.dtype == expected.dtype
            np.testing.assert_array_equal(np.signbit(result), np.signbit(expected))
    names = [op.name.partition(".")[2] for op in found]
    return [name for name in names if name not in ("constant", "broadcast_to")]


def power(exponent: float) -> Callable[[Value], Value]:
    return lambda x: x ** ops.constant(np.full((), exponent, np.float32), F32, CPU)


def index(numbers: Any) -> Value:
    return ops.constant(np.array(numbers), DType.int64, CPU)


def image(x: Value, channels: int = 1) -> Value:
    return abs(ops.reshape(x, ["n", 2, 2 // channels, channels]))


def convolved(x: Value, channels: int = 1) -> Value:
    """With a filter of two by two taps, one and a half for each."""
    taps = np.full((2, 2, channels, 1), 1.5, np.float32)
    return ops.conv2d(x, ops.constant(taps, F32, CPU), padding=(0, 0, 1, 0))


CASES: dict[str, tuple[Callable[[Value], Any], list[str]]] = {
    "a cast to the same dtype": (lambda x: stage("cast", (x,), {}, x.type.to_mlir()) + 1, ["add"]),
    "two reshapes": (lambda x: ops.reshape(ops.reshape(x, ["n", 2, 2]), ["n", 1, 4]), ["reshape"]),
    "a reshape and back": (lambda x: ops.reshape(ops.reshape(x, ["n", 2, 2]), x.shape) + 1, ["add"]),
    "two transposes": (
        lambda x: ops.permute(ops.permute(ops.reshape(x, ["n", 2, 2]), [1, 2, 0]), [0, 2, 1]),
        ["reshape", "transpose"],
    ),
    "transposes that cancel": (lambda x: ops.transpose(ops.transpose(x, 0, 1), 0, 1) + 1, ["add"]),
    "a transpose of an axis of size 1": (
        lambda x: ops.permute(ops.tanh(ops.reshape(x, ["n", 1, 4])), [1, 0, 2]),
        ["reshape", "tanh", "reshape"],
    ),
    "a full slice": (lambda x: ops.tanh(x[:, :]), ["tanh"]),
    "a slice": (lambda x: ops.tanh(x[:, 0:4:2]), ["slice", "tanh"]),
    "reversed": (lambda x: ops.tanh(x[:, ::-1]), ["slice", "tanh"]),
    "a concat of one": (lambda x: ops.concat([x, x[:, :0]], 1) + 1, ["add"]),
    "a concat with nothing": (
        lambda x: ops.concat([x, x[:, :0], ops.tanh(x)], 1), ["tanh", "concat"],
    ),
    "a concat of nothing": (lambda x: ops.concat([x[:, :0], x[:, 4:]], 1), ["slice", "slice", "concat"]),
    "a concat": (lambda x: ops.concat([x, ops.tanh(x)], 1), ["tanh", "concat"]),
    "a sum of one": (lambda x: ops.sum(ops.reshape(abs(x), ["n", 4, 1]), 2) + 1, ["abs", "reshape", "add"]),
    "a sum of two": (
        lambda x: ops.sum(ops.reshape(x, ["n", 2, 2]), 2), ["reshape", "reduce_sum"],
    ),
    "a gather of a wider table": (
        lambda x: ops.gather(ops.tanh(x).cast(F16).cast(F32), ops.constant(np.array([2, 0]), DType.int64, CPU), 0),
        ["tanh", "cast", "gather", "cast"],
    ),
    "a gather of a narrower table": (
        lambda x: ops.gather(ops.tanh(x).cast(F16), ops.constant(np.array([2, 0]), DType.int64, CPU), 0),
        ["tanh", "cast", "gather"],
    ),
    "a gather of one row": (lambda x: ops.gather(ops.tanh(x), index(1), 1), ["tanh", "slice", "reshape"]),
    "a gather of the last row": (
        lambda x: ops.gather(ops.tanh(x), index([-1]), 1), ["tanh", "slice"],
    ),
    "a gather of one row again and again": (
        lambda x: ops.gather(ops.tanh(x), ops.broadcast_to(index(1), [2, 3]), 1), ["tanh", "slice", "reshape"],
    ),
    "a gather of one row for each row": (
        lambda x: ops.gather(ops.tanh(x), ops.broadcast_to(index([-1]), [x.shape[0]]), 1), ["tanh", "slice"],
    ),
    "a gather of an unknown number of rows": (lambda x: ops.gather(x, index(1), 0), ["gather"]),
    "a gather of two rows": (lambda x: ops.gather(x, index([1, 3]), 1), ["gather"]),
    "a padded image": (
        lambda x: convolved(ops.pad(image(x), [0, 0, 1, 0, 0, 1, 0, 0])), ["reshape", "abs", "conv"],
    ),
    "a padded image with channels first": (
        lambda x: convolved(
            ops.permute(ops.pad(ops.permute(image(x, 2), [0, 3, 1, 2]), [0, 0, 0, 0, 1, 1, 0, 1]), [0, 2, 3, 1]), 2
        ),
        ["reshape", "abs", "transpose", "transpose", "conv"],
    ),
    "an image padded by more than the filter reads": (
        lambda x: convolved(ops.pad(image(x), [0, 0, 2, 2, 0, 0, 0, 0])), ["reshape", "abs", "pad", "conv"],
    ),
    "an image padded by ones": (
        lambda x: convolved(ops.pad(image(x), [0, 0, 1, 1, 0, 0, 0, 0], value=1)), ["reshape", "abs", "pad", "conv"],
    ),
    "a padded batch": (
        lambda x: convolved(ops.pad(image(x), [1, 0, 0, 0, 0, 0, 0, 0])), ["reshape", "abs", "pad", "conv"],
    ),
    "an image with more channels": (
        lambda x: convolved(ops.pad(image(x), [0, 0, 0, 0, 0, 0, 0, 1]), 2), ["reshape", "abs", "pad", "conv"],
    ),
    "the first power": (lambda x: power(1)(x) + 1, ["add"]),
    "a square": (power(2), ["mul"]),
    "a cube": (power(3), ["mul", "mul"]),
    "a root": (power(0.5), ["equal", "add", "select", "sqrt"]),
    "one by a root": (power(-0.5), ["equal", "add", "select", "rsqrt"]),
    "another power": (power(1.5), ["pow"]),
    "powers of each element": (
        lambda x: x ** ops.constant(np.array([2, 2, 2, 2], np.float32), F32, CPU), ["pow"],
    ),
}  # fmt: skip


OTHER = DeviceRef.CPU(1)


def placed(x: Value, device: DeviceRef) -> Value:
    return stage("transfer", (x,), {}, TensorType(x.dtype, x.shape, device).to_mlir())


def cut(x: Value, start: int, step: int) -> Value:
    """The first axis as a whole, from an element of the second one on."""
    bounds = {
        name: [DimExpr.of(dim) for dim in dims]
        for name, dims in {"start": (0, start), "stop": ("n", 4), "step": (1, step)}.items()
    }
    kind = TensorType(x.dtype, ("n", -(-(4 - start) // step)), x.device)
    return stage("slice", (x,), bounds, kind.to_mlir())


def wide(x: Value, *dims: int | str) -> Value:
    return stage("broadcast_to", (x,), {}, TensorType(x.dtype, dims, x.device).to_mlir())


# what functions of `ops` do not stage
CASES |= {
    "a slice of all": (lambda x: ops.tanh(cut(x, 0, 1)), ["tanh"]),
    "a slice from the second on": (lambda x: ops.tanh(cut(x, 1, 1)), ["slice", "tanh"]),
    "a slice of each second": (lambda x: ops.tanh(cut(x, 0, 2)), ["slice", "tanh"]),
    "a copy and back": (lambda x: placed(placed(x, OTHER), CPU) + 1, ["add"]),
    "a copy of a copy": (
        lambda x: placed(placed(placed(ops.tanh(x), OTHER), DeviceRef.CPU(2)), OTHER),
        ["tanh", "transfer"],
    ),
    "a copy that stays": (lambda x: ops.tanh(placed(x, CPU)), ["tanh"]),
    "padding without axes": (
        lambda x: stage("pad", (x[0, 0],), {"low": (), "high": (), "mode": "constant", "value": 0}) + 1,
        ["slice", "reshape", "add"],
    ),
    "a gather of a table of equal size": (
        lambda x: ops.gather(
            ops.tanh(x).cast(F16).cast(DType.bfloat16), ops.constant(np.array([2, 0]), DType.int64, CPU), 0
        ),
        ["tanh", "cast", "cast", "gather"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (lambda x: wide(wide(x[0], 1, 4), 3, 4), 1),
        (lambda x: ops.tanh(wide(x, "n", 4)), 0),
        (lambda x: wide(ops.tanh(wide(x[0], 1, 4)), 3, 4), 2),
    ],
)
def test_broadcasts(build: Callable[[Value], Value], count: int) -> None:
    """One to the same shape goes, and of two that follow one another stays one."""
    with Graph("g", input_types=[TensorType(F32, ["n", 4], CPU)]) as graph:
        graph.output(build(graph.inputs[0].tensor))
    module = clone_module(graph.to_mlir())
    canonicalize(entry(module).block)
    verify_module(module)
    drop_dead_ops(entry(module).block)
    found = [op.name for op in entry(module).block.ops if isinstance(op, MoOp)]
    assert found.count("mo.broadcast_to") == count
    np.testing.assert_array_equal(_interpreter.run(module, [X])[0], _interpreter.run(graph, [X])[0])


@pytest.mark.parametrize("name", CASES)
def test_rules(name: str) -> None:
    build, expected = CASES[name]
    assert canonical(build) == expected


def test_products_with_transposed_weights() -> None:
    """The last two axes; those of a batch stay."""
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

    joined = canonical(lambda x: x @ ops.permute(ops.tanh(x), [0, 2, 1]), x, ("b", 3, 4))
    assert joined == ["tanh", "matmul"]
    square = np.arange(27, dtype=np.float32).reshape(3, 3, 3)
    moved = canonical(lambda x: x @ ops.permute(ops.tanh(x), [2, 1, 0]), square, (3, 3, 3))
    assert moved == ["tanh", "transpose", "matmul"]


def test_integers_have_no_roots() -> None:
    x = np.array([[3, -2]], np.int32)
    square = canonical(lambda x: x ** ops.constant(np.array(2, np.int32), I32, CPU), x, ("n", 2))
    assert square == ["pow"]


@pytest.mark.parametrize(
    ("paddings", "expected"),
    [
        (["k", 0, 0, 0], ["concat"]),
        ([0, "k", 0, 0], ["concat"]),
        (["k", 1, 2, "k"], ["concat", "concat"]),
    ],
)
def test_padding_by_symbolic_amounts(paddings: list[int | str], expected: list[str]) -> None:
    """A concat along each padded axis, as NumPy pads."""
    types = [TensorType(F32, ["n", 4], CPU), TensorType(F32, ["k"], CPU)]
    with Graph("g", input_types=types) as graph:
        x = graph.inputs[0].tensor
        low = [DimExpr.of(amount) for amount in paddings[::2]]
        high = [DimExpr.of(amount) for amount in paddings[1::2]]
        graph.output(
            stage("pad", (x,), {"low": low, "high": high, "mode": "constant", "value": 7.0})
        )
    module = clone_module(graph.to_mlir())
    canonicalize(entry(module).block)
    verify_module(module)
    found = [op.name for op in entry(module).block.ops if isinstance(op, MoOp)]
    assert [name for name in found if name == "mo.concat"] == [f"mo.{name}" for name in expected]
    assert "mo.pad" not in found
    (result,) = _interpreter.run(module, [X, np.zeros(3, np.float32)])
    amounts = [3 if amount == "k" else amount for amount in paddings]
    pairs = [(amounts[0], amounts[1]), (amounts[2], amounts[3])]
    np.testing.assert_array_equal(result, np.pad(X, pairs, constant_values=7.0))
