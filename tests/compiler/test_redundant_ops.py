"""Equal ops are merged, and ops without uses are dropped: which ones are, and which are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest
from xdsl.ir import Block

from max._compiler import mok
from max._compiler.passes.redundant_ops import drop_dead_ops, merge_equal_ops
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.mlir import ModuleOp, clone_module, entry, verify_module

X = "!mo.tensor<[n, 8], f32, cpu:0>"
I64 = "!mo.tensor<[n, 2], si64, cpu:0>"
TOP = "!mo.tensor<[n, 2], f32, cpu:0>"
BUFFER = "!mo.buffer<[n, 8], f32, cpu:0>"
K = "{k = 2 : i64, axis = 1 : i64}"


def parsed(inputs: str, outputs: str, body: str) -> ModuleOp:
    module = mok.parse(f"builtin.module {{ mo.graph @g({inputs}) -> ({outputs}) {{ {body} }} }}")
    verify_module(module)
    return module


def names(module: ModuleOp) -> list[str]:
    verify_module(module)
    return [op.name.partition(".")[2] for op in block_of(module).ops]


def block_of(module: ModuleOp) -> Block:
    return cast(Block, entry(module).block)


def region(name: str, op: str) -> str:
    return (
        f'%{name} = mok.region(%x) {{kind = "map"}} : ({X}) -> {X} {{\n^bb0(%i{name}: {X}):\n'
        f"%o{name} = mo.{op}(%i{name}) : ({X}) -> {X}\nmok.yield(%o{name}) : ({X}) -> ()\n}}\n"
    )


def test_all_results_of_equal_ops_are_merged() -> None:
    """Each use reads the result with the same number."""
    module = parsed(
        f"%x: {X}",
        f"{TOP}, {I64}, {TOP}, {I64}",
        f"%a, %i = mo.top_k(%x) {K} : ({X}) -> ({TOP}, {I64})\n"
        f"%b, %j = mo.top_k(%x) {K} : ({X}) -> ({TOP}, {I64})\n"
        f"mo.output(%a, %i, %b, %j) : ({TOP}, {I64}, {TOP}, {I64}) -> ()",
    )
    merge_equal_ops(block_of(module))
    assert names(module) == ["top_k", "output"]
    top, output = block_of(module).ops
    assert list(output.operands) == [*top.results, *top.results]
    (x,) = block_of(module).args
    assert len([*x.uses]) == 1, "the op that was merged still uses its operand"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("%a = mo.exp(%x) : ({X}) -> {X}", "%b = mo.exp(%y) : ({X}) -> {X}"),
        ("%a = mo.exp(%x) : ({X}) -> {X}", "%b = mo.sin(%x) : ({X}) -> {X}"),
        (
            "%a = mo.softmax(%x) {{axis = 0 : i64}} : ({X}) -> {X}",
            "%b = mo.softmax(%x) {{axis = 1 : i64}} : ({X}) -> {X}",
        ),
    ],
)
def test_ops_that_differ_stay(first: str, second: str) -> None:
    body = f"{first}\n{second}\nmo.output(%a, %b) : ({{X}}, {{X}}) -> ()".format(X=X)
    module = parsed(f"%x: {X}, %y: {X}", f"{X}, {X}", body)
    before = names(module)
    merge_equal_ops(block_of(module))
    assert names(module) == before


def test_regions_with_other_bodies_stay() -> None:
    """Bodies are not compared: equal operands and attributes do not make regions equal."""
    module = parsed(
        f"%x: {X}",
        f"{X}, {X}",
        region("a", "exp") + region("b", "sin") + f"mo.output(%a, %b) : ({X}, {X}) -> ()",
    )
    merge_equal_ops(block_of(module))
    assert names(module) == ["region", "region", "output"]


def test_reads_of_a_buffer_stay() -> None:
    """The buffer may be written in between."""
    load = f"mo.buffer_load(%m, %x) : ({BUFFER}, !mo.chain) -> ({X}, !mo.chain)"
    module = parsed(
        f"%m: {BUFFER}, %x: !mo.chain",
        f"{X}, {X}, !mo.chain",
        f"%a, %c = {load}\n%b, %d = {load}\nmo.output(%a, %b, %d) : ({X}, {X}, !mo.chain) -> ()",
    )
    merge_equal_ops(block_of(module))
    assert names(module) == ["buffer_load", "buffer_load", "output"]


def test_ops_with_a_used_result_stay() -> None:
    module = parsed(
        f"%x: {X}",
        I64,
        f"%a, %i = mo.top_k(%x) {K} : ({X}) -> ({TOP}, {I64})\nmo.output(%i) : ({I64}) -> ()",
    )
    drop_dead_ops(block_of(module))
    assert names(module) == ["top_k", "output"]


def test_regions_without_uses_are_dropped_with_what_they_read() -> None:
    module = parsed(
        f"%v: {X}",
        X,
        f"%x = mo.exp(%v) : ({X}) -> {X}\n" + region("a", "exp") + f"mo.output(%v) : ({X}) -> ()",
    )
    drop_dead_ops(block_of(module))
    assert names(module) == ["output"]


def test_a_new_buffer_that_nothing_uses_is_dropped() -> None:
    """`mo.buffer_create` is not pure, as two of them are two buffers; unused ones have no effect."""
    module = parsed(
        f"%x: {X}",
        X,
        f"%m = mo.buffer_create() : () -> {BUFFER}\nmo.output(%x) : ({X}) -> ()",
    )
    drop_dead_ops(block_of(module))
    assert names(module) == ["output"]


@pytest.mark.parametrize("uses_tensor", [False, True])
def test_a_read_of_a_buffer_is_dropped_if_its_tensor_is_unused(uses_tensor: bool) -> None:
    """Its chain is replaced by the one before it; a read whose tensor is used stays."""
    used, types = ("%t, ", f"{X}, ") if uses_tensor else ("", "")
    module = parsed(
        f"%m: {BUFFER}, %v: {X}, %c: !mo.chain",
        f"{types}!mo.chain",
        f"%s = mo.buffer_store(%v, %m, %c) : ({X}, {BUFFER}, !mo.chain) -> !mo.chain\n"
        f"%t, %d = mo.buffer_load(%m, %s) : ({BUFFER}, !mo.chain) -> ({X}, !mo.chain)\n"
        f"mo.output({used}%d) : ({types}!mo.chain) -> ()",
    )
    drop_dead_ops(block_of(module))
    left = ["buffer_store", "buffer_load", "output"]
    assert names(module) == (left if uses_tensor else ["buffer_store", "output"])
    store, *_, output = block_of(module).ops
    if not uses_tensor:
        assert list(output.operands) == list(store.results)


def test_a_write_whose_chain_is_unused_stays() -> None:
    module = parsed(
        f"%m: {BUFFER}, %v: {X}, %c: !mo.chain",
        X,
        f"%s = mo.buffer_store(%v, %m, %c) : ({X}, {BUFFER}, !mo.chain) -> !mo.chain\n"
        f"mo.output(%v) : ({X}) -> ()",
    )
    drop_dead_ops(block_of(module))
    assert names(module) == ["buffer_store", "output"]


def test_an_op_of_the_user_without_results_stays() -> None:
    """Nothing can use it, so it is there for an effect; there may be two."""
    op = f'mo.custom(%x) {{symbol = "f", parameters = {{}}}} : ({X}) -> ()\n'
    module = parsed(f"%x: {X}", X, op + op + f"mo.output(%x) : ({X}) -> ()")
    merge_equal_ops(block_of(module))
    drop_dead_ops(block_of(module))
    assert names(module) == ["custom", "custom", "output"]


def staged(build: Callable[[TensorValue], Sequence[TensorValue]]) -> Graph:
    types = [TensorType(DType.float32, ["n"], DeviceRef.CPU())]
    with Graph("g", input_types=types) as graph:
        graph.output(*build(graph.inputs[0].tensor))
    return graph


def ones(size: str) -> TensorValue:
    return ops.broadcast_to(ops.constant(1.0, DType.float32, DeviceRef.CPU()), [size])


def test_an_op_that_gives_a_size_stays() -> None:
    """Of an op whose elements nothing reads the size may be read; of two that give it the first stays."""

    def build(x: TensorValue) -> list[TensorValue]:
        for name in ("some", "some", "unread"):
            ops.nonzero(x, name)
        ops.abs(ops.nonzero(x, "unread"))
        return [ones("some")]

    graph = staged(build)
    module = clone_module(graph.to_mlir())
    drop_dead_ops(block_of(module))
    assert names(module).count("nonzero") == 1
    model = InferenceSession().load(graph)
    for x in ([0.0, 2.0, 0.0, 3.0], [0.0], []):
        array = np.array(x, np.float32)
        assert model.execute(array)[0].shape == (np.count_nonzero(array),)


def test_a_named_slice_gives_a_size() -> None:
    def build(x: TensorValue) -> list[TensorValue]:
        x[(slice(1, None), "rest")]
        return [ones("rest")]

    model = InferenceSession().load(staged(build))
    assert model.execute(np.zeros(4, np.float32))[0].shape == (3,)
