"""Regions and the order of the ops around them."""

from __future__ import annotations

from typing import cast

import pytest

from max._compiler import mok
from max._compiler.mok import RegionOp
from max._compiler.passes.base import ops_of
from max._compiler.passes.outline import Unit, rebuild
from max.mlir import GraphOp, MoOp, verify_module

F = "f32, cpu:0"
X, EIGHT, ONE = (f"!mo.tensor<[{dims}], {F}>" for dims in ("n", "8", ""))
COUNTED = f"!mo.tensor<[m], {F}>"


def rebuilt(body: str, result: str, *units: str) -> list[MoOp]:
    """The ops of a graph of `%x`, `%e` and the scalar `%o` with one result `%r`, after units become regions.

    Args:
        body: Its ops.
        result: The type of the result.
        units: The names of the ops of each unit, without dialects, separated by spaces.
    """
    text = f"mo.graph @g(%x: {X}, %e: {EIGHT}, %o: {ONE}) -> ({result}) {{ {body} mo.output(%r) : ({result}) -> () }}"
    module = mok.parse(f"builtin.module {{ {text} }}")
    verify_module(module)
    (graph,) = [op for op in module.walk() if isinstance(op, GraphOp)]
    ops = {op.name.removeprefix("mo."): op for op in ops_of(graph.block)}
    rebuild(graph.block, [Unit([ops[name] for name in unit.split()], "map") for unit in units])
    verify_module(module)
    return ops_of(graph.block)


def names(ops: list[MoOp]) -> list[str]:
    """The names of ops without dialects; a region is the names of its ops."""
    return [
        "+".join(names(cast(list[MoOp], list(op.block.ops)))) if isinstance(op, RegionOp)
        else op.name.split(".")[1]
        for op in ops
    ]  # fmt: skip


def op(result: str, name: str, *operands: str, of: str = X) -> str:
    types = ", ".join([of] * len(operands))
    return f"%{result} = mo.{name}({', '.join('%' + o for o in operands)}) : ({types}) -> {of}\n"


def test_constants_of_one_element_are_copied_into_regions() -> None:
    body = (
        f"%c = mo.constant() {{value = #mo.dense<f32, [], [2.0]>}} : () -> {ONE}\n"
        f"%s = mo.broadcast_to(%c) : ({ONE}) -> {EIGHT}\n" + op("r", "add", "e", "s", of=EIGHT)
    )
    (*_, region, _) = ops = rebuilt(body, EIGHT, "add")
    assert names(ops)[-2:] == ["constant+broadcast_to+add+yield", "output"]
    assert len(region.operands) == 1
    values = ", ".join(["1.0", "2.0"] * 4)
    body = f"%c = mo.constant() {{value = #mo.dense<f32, [8], [{values}]>}} : () -> {EIGHT}\n"
    (*_, region, _) = ops = rebuilt(body + op("r", "add", "e", "c", of=EIGHT), EIGHT, "add")
    assert names(ops) == ["constant", "add+yield", "output"]
    assert len(region.operands) == 2


def test_a_region_stands_where_its_last_op_stood() -> None:
    body = op("a", "tanh", "x") + op("k", "exp", "x") + op("b", "neg", "a")
    body += op("l", "abs", "k") + op("r", "add", "b", "l")
    assert names(rebuilt(body, X, "tanh neg")) == ["exp", "tanh+neg+yield", "abs", "add", "output"]
    assert names(rebuilt(body, X, "exp abs", "tanh")) == [
        "tanh+yield", "neg", "exp+abs+yield", "add", "output",
    ]  # fmt: skip


def test_views_between_the_ops_of_a_region_exist_in_it_only() -> None:
    column, row = f"!mo.tensor<[8, 1], {F}>", f"!mo.tensor<[1, 8], {F}>"
    body = op("a", "tanh", "e", of=EIGHT)
    body += f"%b = mo.reshape(%a) : ({EIGHT}) -> {column}\n"
    body += f"%c = mo.transpose(%b) {{perm = array<i64: 1, 0>}} : ({column}) -> {row}\n"
    (region, output) = rebuilt(body + op("r", "neg", "c", of=row), row, "tanh neg")
    assert names([region]) == ["tanh+reshape+transpose+neg+yield"]
    assert list(output.operands) == list(region.results)


def test_a_view_outside_reads_the_result_of_a_region() -> None:
    column = f"!mo.tensor<[8, 1], {F}>"
    body = op("a", "tanh", "e", of=EIGHT) + f"%r = mo.reshape(%a) : ({EIGHT}) -> {column}\n"
    (region, view, _) = ops = rebuilt(body, column, "tanh")
    assert names(ops) == ["tanh+yield", "reshape", "output"]
    assert list(view.operands) == list(region.results)


def counted(result: str, stop: str, size: str) -> str:
    """A range whose size the program computes."""
    type_ = f"!mo.tensor<[{size}], {F}>"
    return f"%{result} = mo.range(%o, %{stop}, %o) : ({ONE}, {ONE}, {ONE}) -> {type_}\n"


SIZED = {
    "broadcast_to": f"%k = mo.broadcast_to(%o) : ({ONE}) -> {COUNTED}\n",
    "shape_to_tensor": (
        "%k = mo.shape_to_tensor() {shape = #mo.shape<[2, m]>} : () -> "
        "!mo.tensor<[2], si64, cpu:0>\n"
    ),
}


@pytest.mark.parametrize("sized", SIZED)
def test_an_op_waits_for_the_size_that_it_needs(sized: str) -> None:
    """The range moves behind a region; an op of its size moves with it."""
    body = op("a", "tanh", "o", of=ONE) + counted("z", "a", "m") + SIZED[sized]
    body += op("h", "exp", "x") + op("p", "neg", "a", of=ONE) + op("r", "abs", "h")
    ops = names(rebuilt(body, X, "tanh neg"))
    assert ops == ["exp", "tanh+neg+yield", "range", sized, "abs", "output"]


def test_the_first_op_that_computes_a_size_is_waited_for() -> None:
    body = op("a", "tanh", "o", of=ONE) + counted("y", "o", "m") + counted("z", "a", "m")
    body += SIZED["broadcast_to"] + op("p", "neg", "a", of=ONE) + op("r", "exp", "x")
    ops = names(rebuilt(body, X, "tanh neg"))
    assert ops == ["range", "broadcast_to", "tanh+neg+yield", "range", "exp", "output"]


def test_no_op_waits_for_the_size_of_an_input() -> None:
    body = op("a", "tanh", "o", of=ONE) + counted("z", "a", "n") + op("h", "exp", "x")
    body += op("p", "neg", "a", of=ONE) + op("r", "abs", "h")
    ops = names(rebuilt(body, X, "tanh neg"))
    assert ops == ["exp", "tanh+neg+yield", "range", "abs", "output"]


def test_a_size_that_no_symbol_names_is_not_waited_for() -> None:
    body = op("a", "tanh", "o", of=ONE) + counted("z", "a", "8") + op("h", "exp", "e", of=EIGHT)
    body += op("p", "neg", "a", of=ONE) + op("r", "abs", "h", of=EIGHT)
    ops = names(rebuilt(body, EIGHT, "tanh neg"))
    assert ops == ["exp", "tanh+neg+yield", "range", "abs", "output"]
