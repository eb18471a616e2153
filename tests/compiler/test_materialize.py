"""The copies that views, library ops and outputs need; no other pass runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from xdsl.ir import SSAValue

from max._compiler.mok import AttentionOp, RegionOp
from max._compiler.passes.attention import fuse_attention
from max._compiler.passes.materialize import copy_region, materialize, needs_contiguous
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType, TensorValue, ops
from max.mlir import MoOp, clone_module, entry, verify_module

Value = TensorValue
CPU = DeviceRef.CPU()
Y = TensorType(DType.float32, [4, 6], CPU)


def source(value: SSAValue) -> str:
    """Where a value comes from: its ops from the last on, with the copies among them."""
    owner = value.owner
    if not isinstance(owner, MoOp):
        return "input"
    name = "copy" if isinstance(owner, RegionOp) else owner.name.removeprefix("mo.")
    return " ".join([name, *(source(operand) for operand in owner.operands)])


def outputs(build: Callable[..., Any], *types: TensorType) -> list[str]:
    """The origins of the outputs of a graph after the pass."""
    with Graph("g", input_types=types) as graph:
        results = build(*[value.tensor for value in graph.inputs])
        graph.output(*(results if isinstance(results, tuple) else (results,)))
    module = clone_module(graph.to_mlir())
    materialize(entry(module).block)
    verify_module(module)
    last = entry(module).block.last_op
    assert last is not None
    return [source(value) for value in last.operands]


def flipped(x: Value) -> Value:
    return ops.transpose(x, 0, 1)


TRANSPOSED = {
    "library op": (lambda y: ops.argsort(flipped(y)[0]), "argsort copy input"),
    "library op, contiguous": (lambda y: ops.argsort(y[1]), "argsort reshape slice input"),
    "left operand": (lambda y: flipped(y) @ y, "matmul copy input input"),
    "right operand": (lambda y: ops.tanh(y) @ flipped(y), "matmul tanh input copy input"),
    "rows": (lambda y: ops.softmax(flipped(y)), "softmax transpose input"),
    "reduction": (lambda y: ops.sum(flipped(y)), "reduce_sum transpose input"),
    "elements": (lambda y: ops.tanh(flipped(y)), "tanh transpose input"),
    "strided reader": (
        lambda y: ops.concat([flipped(y), flipped(ops.exp(y))]),
        "concat transpose input transpose exp input",
    ),
    "view without strides": (
        lambda y: ops.tanh(ops.reshape(flipped(y), [24])),
        "tanh reshape copy input",
    ),
    "view of such a view": (
        lambda y: ops.argsort(ops.reshape(flipped(y), [24])[3:]),
        "argsort slice reshape copy input",
    ),
}
"""What reads a transposed value, and where its operands come from after the pass."""


@pytest.mark.parametrize("name", TRANSPOSED)
def test_readers_of_a_transposed_value(name: str) -> None:
    build, expected = TRANSPOSED[name]
    assert outputs(build, Y) == [expected]


def test_outputs_belong_to_the_caller() -> None:
    def build(y: Value) -> tuple[Value, ...]:
        t, u = ops.tanh(y), ops.exp(y)
        reshaped = ops.sin(y)
        return (
            y, t, t, flipped(ops.cos(y)), u[1:], u[:2], ops.reshape(reshaped, [24]),
            ops.constant(1.0, DType.float32, CPU), ops.broadcast_to(ops.sqrt(y)[:1], [4, 6]),
            ops.reshape(reshaped, [3, 8]), ops.argsort(y[0]),
        )  # fmt: skip

    assert outputs(build, Y) == [
        "copy input", "tanh input", "copy tanh input", "copy cos input", "copy exp input",
        "copy exp input", "reshape sin input", "copy constant", "copy sqrt input",
        "copy sin input", "argsort reshape slice input",
    ]  # fmt: skip


def test_views_of_all_elements_are_whole_buffers() -> None:
    row = TensorType(DType.float32, [1, 6], CPU)
    assert outputs(lambda x: flipped(ops.tanh(x)), row) == ["transpose tanh input"]
    assert outputs(lambda x: ops.reshape(flipped(ops.tanh(x)), [6]), row) == [
        "reshape transpose tanh input"
    ]


def test_buffers_and_chains_are_not_copied() -> None:
    """A store reads strides; a print needs them contiguous, after the chain that is its first operand."""
    types = [Y, BufferType(DType.float32, [6, 4], CPU)]
    with Graph("g", input_types=types) as graph:
        y, buffer = graph.inputs[0].tensor, graph.inputs[1].buffer
        ops.buffer_store(buffer, flipped(y))
        ops.print(flipped(y), "y")
        graph.output(ops.buffer_load(buffer), ops.tanh(ops.buffer_load(buffer)))
    module = clone_module(graph.to_mlir())
    materialize(entry(module).block)
    verify_module(module)
    found = {op.name: [source(v).split()[0] for v in op.operands] for op in entry(module).block.ops}
    assert "copy" not in found["mo.buffer_store"] and "transpose" in found["mo.buffer_store"]
    assert found["mo.print"].count("copy") == 1 and "transpose" not in found["mo.print"]
    # what was loaded is the caller's buffer
    assert found["mo.output"][:2] == ["copy", "tanh"]


def test_what_branches_yield_is_copied_and_chains_are_not() -> None:
    types = [Y, TensorType(DType.bool, [], CPU)]
    with Graph("g", input_types=types) as graph:
        y, condition = graph.inputs[0].tensor, graph.inputs[1].tensor

        def then() -> Value:
            ops.print(y, "y")
            return flipped(ops.tanh(y))

        graph.output(
            *ops.cond(condition, [TensorType(DType.float32, [6, 4], CPU)], then, lambda: flipped(y))
        )
    module = clone_module(graph.to_mlir())
    found = []
    for branch in list(module.body.block.ops)[:2]:
        block = branch.regions[0].block
        materialize(block)
        assert block.last_op is not None
        found.append([source(value).split()[0] for value in block.last_op.operands])
    verify_module(module)
    assert found == [["copy", "print"], ["copy", "input"]]


def test_views_and_regions_read_strides() -> None:
    with Graph("g", input_types=[Y]) as graph:
        graph.output(flipped(graph.inputs[0].tensor))
    module = clone_module(graph.to_mlir())
    (view, _) = entry(module).block.ops
    assert isinstance(view, MoOp) and not needs_contiguous(view)
    copy = copy_region(view.results[0])
    entry(module).block.insert_op_after(copy, view)
    assert not needs_contiguous(copy)


@pytest.mark.parametrize("strided", ["", "q", "k", "v", "m"])
def test_attention_reads_vectors(strided: str) -> None:
    """Rows of each operand are contiguous, those of the keys along either axis."""
    heads = TensorType(DType.float32, [2, 4, 4], CPU)

    def build(q: Value, keys: Value, v: Value, m: Value) -> Value:
        q, keys, v, m = (
            ops.transpose(x, 1, 2) if name == strided else x
            for name, x in zip("qkvm", (q, keys, v, m), strict=True)
        )
        scores = q @ ops.transpose(keys, 1, 2) * 0.5 + m
        return ops.softmax(scores) @ v

    with Graph("g", input_types=[heads] * 4) as graph:
        graph.output(build(*[value.tensor for value in graph.inputs]))
    module = clone_module(graph.to_mlir())
    block = entry(module).block
    fuse_attention(block)
    materialize(block)
    verify_module(module)
    (attention,) = [op for op in block.ops if isinstance(op, AttentionOp)]
    copied = ["copy" in source(value) for value in attention.operands]
    assert copied == [name == strided != "k" for name in "qkvm"]
