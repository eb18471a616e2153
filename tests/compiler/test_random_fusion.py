"""Random blocks of products, element-wise ops, rows and views: `fuse` keeps what each output is computed from."""

from __future__ import annotations

import random

import numpy as np
import pytest
from xdsl.ir import SSAValue

from max._compiler import mok
from max._compiler.mok import RegionOp
from max._compiler.passes.fuse import fuse
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from max.mlir import GraphOp, MoOp, entry, verify_module
from tests.tolerance import assert_close

X, ROW = "!mo.tensor<[n, 32], f32, cpu:0>", "!mo.tensor<[n, 1], f32, cpu:0>"
PACKED = "!mo.tensor<[2, 1024], f32, cpu:0>"
BOUNDS = "{start = #mo.shape<[0, 0]>, stop = #mo.shape<[n, 32]>, step = #mo.shape<[1, 1]>}"
"""A slice of everything: a view that is not seen through."""


class Block:
    """A random block.

    Args:
        seed: Chooses it.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lines: list[str] = []
        self.values = ["x", "y"]
        for number in range(self.rng.randint(4, 22)):
            self.op(f"v{number}")
        count = self.rng.randint(1, 4)
        outputs = [self.value() for _ in range(count)]
        named, types = ", ".join(f"%{v}" for v in outputs), ", ".join([X] * count)
        body = "\n".join([*self.lines, f"mo.output({named}) : ({types}) -> ()"])
        inputs = f"%x: {X}, %y: {X}, %w: {PACKED}"
        self.text = f"builtin.module {{ mo.graph @g({inputs}) -> ({types}) {{ {body} }} }}"

    def value(self) -> str:
        # mostly recent values, so that chains form
        return self.values[-1 - min(int(self.rng.expovariate(0.4)), len(self.values) - 1)]

    def op(self, name: str) -> None:
        a, b = self.value(), self.value()
        results = [name]
        match self.rng.choice(
            ("unary", "binary", "binary", "products", "view", "rows", "spread", "scan")
        ):
            case "unary":
                line = f"%{name} = mo.{self.rng.choice(('neg', 'tanh'))}(%{a}) : ({X}) -> {X}"
            case "binary":
                line = f"%{name} = mo.{self.rng.choice(('add', 'mul'))}(%{a}, %{b}) : ({X}, {X}) -> {X}"
            case "products":
                results = [f"{name}l", f"{name}r"]
                pairs = "0" if self.rng.random() < 0.3 else ""
                line = (
                    f"%{name}l, %{name}r = mok.packed_products(%{a}, %w) "
                    '{encoding = "rows", columns = array<i64: 32, 32>, pairs = '
                    f"array<i64{': ' * bool(pairs)}{pairs}>, streamed = false}} : ({X}, {PACKED}) -> ({X}, {X})"
                )
            case "view":
                line = f"%{name} = mo.slice(%{a}) {BOUNDS} : ({X}) -> {X}"
            case "rows":
                line = f"%{name} = mo.softmax(%{a}) {{axis = {self.rng.randint(0, 1)} : i64}} : ({X}) -> {X}"
            case "spread":
                line = (
                    f"%{name}s = mo.reduce_sum(%{a}) {{axis = 1 : i64}} : ({X}) -> {ROW} "
                    f"%{name}b = mo.broadcast_to(%{name}s) : ({ROW}) -> {X} "
                    f"%{name} = mo.add(%{b}, %{name}b) : ({X}, {X}) -> {X}"
                )
            case _:
                line = (
                    f"%{name} = mo.cumsum(%{a}) {{axis = 1 : i64, exclusive = false, reverse = false}} "
                    f": ({X}) -> {X}"
                )
        self.lines.append(line)
        self.values += results


class Expressions:
    """Numbers of what values are computed from: equal expressions, through regions, have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def _number(self, key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def outputs(self, graph: GraphOp) -> list[int]:
        known: dict[SSAValue, int] = {
            arg: self._number(("argument", i)) for i, arg in enumerate(graph.args)
        }
        for op in graph.block.ops:
            assert isinstance(op, MoOp)
            if op.name == "mo.output":
                return [known[v] for v in op.operands]
            self._visit(op, known)
        raise AssertionError("no output")

    def _visit(self, op: MoOp, known: dict[SSAValue, int]) -> None:
        operands = [known[v] for v in op.operands]
        if not isinstance(op, RegionOp):
            attributes = sorted((name, str(value)) for name, value in op.attributes.items())
            for index, result in enumerate(op.results):
                known[result] = self._number((op.name, str(attributes), tuple(operands), index))
            return
        inside: dict[SSAValue, int] = {**dict(zip(op.block.args, operands, strict=True))}
        for member in op.block.ops:
            assert isinstance(member, MoOp)
            if member.name == "mok.yield":
                known.update(
                    (r, inside[v]) for r, v in zip(op.results, member.operands, strict=True)
                )
            else:
                self._visit(member, inside)


def names_of(graph: GraphOp) -> list[str]:
    """The names of the ops that compute something, those in regions included."""
    ops = [op.name for op in graph.walk() if op is not graph]
    views = ("mo.slice", "mo.broadcast_to", "mo.output", "mok.region", "mok.yield")
    return sorted(name for name in ops if name not in views)


def check(text: str) -> set[str]:
    """Checks a block before and after fusion; returns the kinds of its regions."""
    module = mok.parse(text)
    verify_module(module)
    graph = entry(module)
    expressions = Expressions()
    before, names = expressions.outputs(graph), names_of(graph)
    try:
        fuse(graph.block)
        verify_module(module)
        # no launch reads what a later one writes, and no op is computed twice
        assert expressions.outputs(graph) == before
        assert names_of(graph) == names
    except Exception as error:
        raise AssertionError(f"{error!r}\n{text}") from error
    return {op.attr("kind") for op in graph.block.ops if isinstance(op, RegionOp)}


@pytest.mark.any_target
@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_fusion_keeps_what_each_output_is_computed_from(first: int) -> None:
    kinds = [check(Block(seed).text) for seed in range(first, first + 250)]
    assert set().union(*kinds) == {"library", "map", "rows"}


@pytest.mark.long
def test_fusion_keeps_what_each_output_is_computed_from_long() -> None:
    for seed in range(1000, 30_000):
        check(Block(seed).text)


PRODUCTS = (
    "%{0}, %{1} = mok.packed_products(%{2}, %w) "
    '{{encoding = "rows", columns = array<i64: 32, 32>, pairs = array<i64>, streamed = false}}'
    f" : ({X}, {PACKED}) -> ({X}, {X})"
)


@pytest.mark.parametrize("products", [1, 2])
def test_siblings_of_which_one_waits_for_the_other_through_an_epilogue(products: int) -> None:
    """`t` and `u` read `y`. The launch of a product waits for `t`, which one of its epilogues reads; `u` waits for the
    launch, as it reads the other one. With two products, `u` waits for the second, whose epilogue waits for the first.
    """
    lines = [
        PRODUCTS.format("l", "r", "x"),
        f"%a = mo.tanh(%l) : ({X}) -> {X}",
        f"%va = mo.slice(%a) {BOUNDS} : ({X}) -> {X}",
        f"%t = mo.neg(%y) : ({X}) -> {X}",
        f"%vt = mo.slice(%t) {BOUNDS} : ({X}) -> {X}",
        f"%b = mo.mul(%r, %vt) : ({X}, {X}) -> {X}",
        f"%u = mo.add(%{'vc' if products == 2 else 'va'}, %y) : ({X}, {X}) -> {X}",
        f"mo.output(%b, %u) : ({X}, {X}) -> ()",
    ]
    if products == 2:
        earlier = [
            PRODUCTS.format("m", "s", "x"),
            f"%c = mo.tanh(%m) : ({X}) -> {X}",
            f"%vc = mo.slice(%c) {BOUNDS} : ({X}) -> {X}",
        ]
        read = f"%d = mo.mul(%s, %va) : ({X}, {X}) -> {X}"
        lines[-1] = f"mo.output(%b, %u, %d) : ({X}, {X}, {X}) -> ()"
        lines = [*earlier, *lines[:3], read, *lines[3:]]
    types = ", ".join([X] * (1 + products))
    inputs = f"%x: {X}, %y: {X}, %w: {PACKED}"
    body = "\n".join(lines)
    check(f"builtin.module {{ mo.graph @g({inputs}) -> ({types}) {{ {body} }} }}")


def test_a_view_of_a_group_that_waits_for_a_later_one() -> None:
    """`f` joins the group of `a`, and waits for `c`: `g`, which reads a view of `a`, cannot join the group of `c`."""
    lines = [
        f"%a = mo.add(%y, %x) : ({X}, {X}) -> {X}",
        f"%b = mo.slice(%a) {BOUNDS} : ({X}) -> {X}",
        f"%c = mo.tanh(%y) : ({X}) -> {X}",
        f"%d = mo.slice(%c) {BOUNDS} : ({X}) -> {X}",
        f"%f = mo.add(%d, %a) : ({X}, {X}) -> {X}",
        f"%g = mo.mul(%b, %c) : ({X}, {X}) -> {X}",
        f"mo.output(%f, %g) : ({X}, {X}) -> ()",
    ]
    body = "\n".join(lines)
    check(f"builtin.module {{ mo.graph @g(%x: {X}, %y: {X}) -> ({X}, {X}) {{ {body} }} }}")


def test_two_pairs_of_siblings_of_which_one_is_merged() -> None:
    """`a` and `b` read `x`, `c` and `d` read `y`; `b` waits for `c`, and `d` for `a`."""
    lines = [
        f"%a = mo.neg(%x) : ({X}) -> {X}",
        f"%va = mo.slice(%a) {BOUNDS} : ({X}) -> {X}",
        f"%c = mo.neg(%y) : ({X}) -> {X}",
        f"%vc = mo.slice(%c) {BOUNDS} : ({X}) -> {X}",
        f"%b = mo.add(%vc, %x) : ({X}, {X}) -> {X}",
        f"%d = mo.add(%va, %y) : ({X}, {X}) -> {X}",
        f"mo.output(%b, %d) : ({X}, {X}) -> ()",
    ]
    body = "\n".join(lines)
    check(f"builtin.module {{ mo.graph @g(%x: {X}, %y: {X}) -> ({X}, {X}) {{ {body} }} }}")


def test_a_program_of_two_products_one_of_which_waits_for_halves_of_an_input() -> None:
    rng = np.random.default_rng(5)
    left, right = rng.standard_normal((2, 64, 64)).astype(np.float32)
    type_ = TensorType(DType.float32, ("n", 64), DeviceRef.CPU())
    with Graph("halves", input_types=[type_, type_]) as graph:
        x, y = (value.tensor for value in graph.inputs)
        one, two = (x @ ops.constant(w, DType.float32, DeviceRef.CPU()) for w in (left, right))
        turned = ops.tanh(one)[:, ::-1]
        t = ops.exp(y)
        halves = ops.concat([t[:, 32:], t[:, :32]], 1)
        graph.output(two * halves, turned + y)
    model = InferenceSession(devices=[CPU()]).load(graph)
    a, b = rng.standard_normal((2, 5, 64)).astype(np.float32)
    first, second = (out.to_numpy() for out in model.execute(a, b))
    assert_close(first, (a @ right) * np.roll(np.exp(b), 32, 1), scale=4)
    assert_close(second, np.tanh(a @ left)[:, ::-1] + b, scale=4)


def test_a_program_whose_sums_and_products_wait_for_each_other() -> None:
    rng = np.random.default_rng(6)
    type_ = TensorType(DType.float32, ("n", 64), DeviceRef.CPU())
    with Graph("waiting", input_types=[type_, type_]) as graph:
        x, y = (value.tensor for value in graph.inputs)
        a, c = x + y, ops.tanh(y)
        graph.output(c[:, ::-1] + a, a[::-1] * c)
    model = InferenceSession(devices=[CPU()]).load(graph)
    first, second = rng.standard_normal((2, 5, 64)).astype(np.float32)
    outputs = [out.to_numpy() for out in model.execute(first, second)]
    assert_close(outputs[0], np.tanh(second)[:, ::-1] + first + second, scale=4)
    assert_close(outputs[1], (first + second)[::-1] * np.tanh(second), scale=4)
