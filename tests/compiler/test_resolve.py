"""Sizes that ops name, in terms of the sizes of inputs; no other pass runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from max._compiler import mok
from max._compiler.lowering.lowered_graph import UnsupportedOpError
from max._compiler.passes.resolve import resolve_sizes
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.mlir import DimAttr, ModuleOp, MoOp, clone_module, graphs, verify_module
from max.mlir.types import ShapedType

CPU = DeviceRef.CPU()
F32, BOOL = DType.float32, DType.bool
Value = TensorValue


def rows(*shape: int | str, dtype: DType = F32) -> TensorType:
    return TensorType(dtype, shape, CPU)


def resolved(graph: Graph) -> ModuleOp:
    module = clone_module(graph.to_mlir())
    resolve_sizes(module)
    verify_module(module)
    return module


def symbols(module: ModuleOp) -> set[str]:
    """The symbols in the results of all ops."""
    types = [r.type for op in module.walk() if isinstance(op, MoOp) for r in op.results]
    return {
        name
        for type_ in types
        if isinstance(type_, ShapedType)
        for dim in type_.shape
        for name in dim.symbols
    }


def shapes(module: ModuleOp, name: str) -> list[str]:
    """The shapes of the results of all ops of a name."""
    return [
        str([str(dim) for dim in r.type.shape])
        for op in module.walk()
        if isinstance(op, MoOp) and op.name == name
        for r in op.results
        if isinstance(r.type, ShapedType)
    ]


def test_a_name_given_twice_is_the_first_size() -> None:
    with Graph("g", input_types=[rows("n", "m")]) as graph:
        x = graph.inputs[0].tensor
        graph.output(x[(slice(2, None), "k"), (slice(1, None), "k")])
    assert shapes(resolved(graph), "mo.slice") == ["['n - 2', 'n - 2']"]


def test_a_dim_as_an_attribute_is_resolved() -> None:
    """The parameters of custom ops may be dims."""
    with Graph("g", input_types=[rows("n")]) as graph:
        y = ops.exp(graph.inputs[0].tensor[(slice(1, None), "k")])
        graph.output(y)
    module = graph.to_mlir()
    (op,) = (op for op in module.walk() if isinstance(op, MoOp) and op.name == "mo.exp")
    type_ = op.results[0].type
    assert isinstance(type_, ShapedType)
    (dim,) = type_.shape
    op.attributes["size"] = DimAttr(dim)
    resolve_sizes(module)
    assert str(dim) == "k" and str(op.attr("size")) == "n - 1"


def test_sizes_of_inputs_keep_their_names() -> None:
    """A slice said to be as long as an input is compared with it; a rebind is a new name."""
    with Graph("g", input_types=[rows("n", 8), rows("m", 8)]) as graph:
        x = graph.inputs[0].tensor
        graph.output(x[(slice(2, None), "m")], x.rebind(["other", 8]) * 2)
    module = resolved(graph)
    assert shapes(module, "mo.slice") == ["['m', '8']"]
    assert symbols(module) == {"m", "n"}


def test_branches_use_sizes_that_the_graph_around_them_named() -> None:
    """Not as a size of their inputs."""
    with Graph("g", input_types=[rows("n", 8), TensorType(BOOL, (), CPU)]) as graph:
        x, condition = (value.tensor for value in graph.inputs)
        rest = x[(slice(2, None), "rest")]
        one = ops.constant(np.float32(1), F32, CPU)

        def wide(value: Value) -> Callable[[], Value]:
            return lambda: ops.broadcast_to(value, ["rest", 8])

        (result,) = ops.cond(condition, [rest.type], wide(one), wide(x[0, 0]))
        graph.output(result + rest)
    module = resolved(graph)
    assert symbols(module) == {"n"}
    assert shapes(module, "mo.broadcast_to") == ["['n - 2', '8']"] * 2


def test_branches_name_sizes_of_their_own() -> None:
    with Graph("g", input_types=[rows("n", 8), TensorType(BOOL, (), CPU)]) as graph:
        x, condition = (value.tensor for value in graph.inputs)

        def total(start: int) -> Callable[[], Value]:
            return lambda: ops.sum(x[(slice(start, None), "part")], 0)

        (result,) = ops.cond(condition, [rows(1, 8)], total(2), total(3))
        graph.output(result)
    assert sorted(shapes(resolved(graph), "mo.slice")) == ["['n - 2', '8']", "['n - 3', '8']"]


def test_subgraphs_without_callers_are_resolved() -> None:
    with Graph("g", input_types=[rows("n", 8)]) as graph:
        inner = graph.add_subgraph("inner", input_types=[rows("m", 8)])
        with inner:
            inner.output(inner.inputs[0].tensor[(slice(2, None), "rest")] * 2)
        graph.output(graph.inputs[0].tensor)
    module = resolved(graph)
    assert shapes(module, "mo.slice") == ["['m - 2', '8']"] and len(list(graphs(module))) == 2


def test_sizes_that_ops_compute_have_names() -> None:
    """Ops after the one that computes a size may use it."""
    with Graph("g", input_types=[rows("n", 8)]) as graph:
        found = ops.nonzero(graph.inputs[0].tensor, "found")
        graph.output(-found + 1)
    assert symbols(resolved(graph)) == {"n", "found"}


@pytest.mark.parametrize(
    "body",
    [
        # a product of sizes has no name that the op could give it a value by
        "%a = mo.nonzero(%x) : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[2 * k, 2], si64, cpu:0>",
        # an op whose kernel computes no size
        '%a = mo.custom(%x) {symbol = "s", parameters = {}, device = #mo.device<cpu:0>} '
        ": (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[k, 2], si64, cpu:0>",
    ],
)
def test_sizes_that_nothing_determines(body: str) -> None:
    module = mok.parse(
        "builtin.module { mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>) -> () {"
        f"{body}\n mo.output() : () -> ()"
        "}}"
    )
    with pytest.raises(UnsupportedOpError, match="k.* of its result does not follow from .* of g"):
        resolve_sizes(module)


def called(body: str, inner: str, outer: str) -> ModuleOp:
    """A graph that returns the result of a call, whose type is `inner` in the subgraph and `outer` outside."""
    return mok.parse(
        f"""builtin.module {{
        mo.subgraph @inner(%x: !mo.tensor<[m, 8], f32, cpu:0>) -> ({inner}) {{
            {body}
            mo.output(%a) : ({inner}) -> () }}
        mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>) -> ({outer}) {{
            %a = mo.call(%x) {{callee = @inner, prefix = ""}} : (!mo.tensor<[n, 8], f32, cpu:0>) -> {outer}
            mo.output(%a) : ({outer}) -> () }} }}"""
    )


def test_results_of_calls_have_the_sizes_of_subgraphs() -> None:
    """Also those that the subgraph names itself, and those that an op in it computes."""
    kind = "!mo.tensor<[{}, 8], f32, cpu:0>"
    body = (
        "%a = mo.slice(%x) {start = #mo.shape<[2, 0]>, stop = #mo.shape<[m, 8]>, step = #mo.shape<[1, 1]>} : "
        f"({kind.format('m')}) -> {kind.format('rest')}"
    )
    module = called(body, kind.format("rest"), kind.format("part"))
    resolve_sizes(module)
    assert shapes(module, "mo.call") == ["['n - 2', '8']"]
    pairs = "!mo.tensor<[{}, 2], si64, cpu:0>"
    body = f"%a = mo.nonzero(%x) : ({kind.format('m')}) -> {pairs.format('found')}"
    module = called(body, pairs.format("found"), pairs.format("count"))
    resolve_sizes(module)
    assert shapes(module, "mo.call") == ["['count', '2']"]
