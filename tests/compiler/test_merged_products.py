"""Products of one value with several weights: random graphs against the interpreter, and the merged groups."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xdsl.ir import SSAValue

from max import _interpreter
from max._backends.cpu.passes.merge_products import merge_products
from max._compiler import mok
from max._compiler.passes.base import ops_of
from max._compiler.passes.fuse import fuse
from max._config import flags
from max._host import host_memory, machine
from max.driver import CPU
from max.dtype import DType
from max.dtype.blocks import BLOCK_FORMATS, ENCODED_FORMATS, encode
from max.engine import InferenceSession
from max.engine.load import load_time_results
from max.graph import DeviceRef, Graph, TensorType, TensorValue, Weight, ops
from max.graph.quantization import QuantizationEncoding
from max.mlir import MoOp, entry, verify_module
from tests.engine.test_packed_weights import resident
from tests.quantized import random_weight
from tests.tolerance import assert_close

DEVICE = DeviceRef.CPU()
ENCODINGS = tuple(BLOCK_FORMATS)
DENSE = {"float32": DType.float32, "bfloat16": DType.bfloat16, "float16": DType.float16}
AVX2 = "avx2,fma"
GATES: tuple[Callable[[TensorValue], TensorValue], ...] = (
    ops.silu,
    ops.gelu,
    ops.sigmoid,
    ops.relu,
)


class Products:
    """Products of x with constants, dense or in blocks."""

    def __init__(self, kind: str, inner: int, rng: np.random.Generator, by_rows: bool) -> None:
        self.kind, self.inner, self.rng, self.by_rows = kind, inner, rng, by_rows
        self.dtype = DENSE.get(kind, DType.float32)

    def __call__(self, x: TensorValue, columns: int) -> TensorValue:
        w = (self.rng.standard_normal((columns, self.inner)) / self.inner).astype(np.float32)
        if self.kind in DENSE:
            w = w.astype(self.dtype.to_numpy())
            w = w if self.by_rows else np.ascontiguousarray(w.T)
            value = ops.constant(w, self.dtype, DEVICE)
            return x @ (ops.transpose(value, 0, 1) if self.by_rows else value)
        scaled = random_weight(self.rng, columns, self.inner, self.kind)
        encoded = encode(w, self.kind) if self.kind in ENCODED_FORMATS else scaled
        blocks = ops.constant(encoded, DType.uint8, DEVICE)
        return ops.qmatmul(QuantizationEncoding[self.kind], None, x, blocks)

    def x(self, *shape: int) -> np.ndarray:
        """Integers in blocks with a greatest magnitude of 127, which rounding to 8 bits does not change."""
        x = self.rng.integers(-127, 128, shape).astype(np.float32)
        x[..., ::32] = 127
        return x.astype(self.dtype.to_numpy())


def compare(graph: Graph, arrays: list[np.ndarray], scale: float = 16.0) -> list[str]:
    """Compares engine and interpreter, with a tolerance relative to the first input; returns the launches."""
    expected = _interpreter.run(graph, arrays)
    model = InferenceSession(devices=[CPU()]).load(graph)
    for _ in range(2):
        outputs = model.execute(*arrays)
        for out, want in zip(outputs, expected, strict=True):
            assert_close(out.to_numpy(), want, arrays[0].dtype, scale=scale)
    return model.kernel_summaries


@given(st.data())
@settings(max_examples=8, deadline=None)
def test_random_graphs(data: st.DataObject) -> None:
    """Products in any order, ops after them on one or several products, and any values as outputs."""
    kind = data.draw(st.sampled_from((*DENSE, *ENCODINGS)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    inner = BLOCK_FORMATS[kind].elements if kind in ENCODINGS else data.draw(st.integers(32, 70))
    products = Products(kind, inner, rng, data.draw(st.booleans()))
    sizes = data.draw(st.lists(st.sampled_from((32, 40, 64, 65)), min_size=2, max_size=6))
    types = [TensorType(products.dtype, ("b", "m", inner), DEVICE)]
    types += [TensorType(products.dtype, ("b", "m", size), DEVICE) for size in sorted(set(sizes))]
    with Graph("g", input_types=types) as graph:
        x, *residuals = [value.tensor for value in graph.inputs]
        values = list(residuals)
        todo = list(sizes)
        for _ in range(len(sizes) + data.draw(st.integers(2, 12))):
            kind_of_step = data.draw(st.sampled_from(("product", "unary", "binary", "sum", "bias")))
            if todo and kind_of_step == "product":
                values.append(products(x, todo.pop()))
                continue
            value = values[-1 - data.draw(st.integers(0, min(len(values), 4) - 1))]
            if kind_of_step == "unary":
                values.append(ops.tanh(value))
            elif kind_of_step == "bias":
                bias = rng.standard_normal(int(value.shape[-1])).astype(value.dtype.to_numpy())
                values.append(value + ops.constant(bias, value.dtype, DEVICE))
            elif kind_of_step == "sum":
                values.append(ops.tanh(ops.cumsum(value, axis=-1)))
            else:
                others = [v for v in values if v.shape == value.shape and v is not value]
                if others:
                    values.append(
                        ops.tanh(value - others[data.draw(st.integers(0, len(others) - 1))])
                    )
        values += [products(x, size) for size in todo]
        graph.output(*values[-data.draw(st.integers(1, 5)) :])
    batch, rows = data.draw(st.sampled_from(((1, 1), (2, 2), (1, 5), (3, 7), (1, 41))))
    arrays = [products.x(batch, rows, inner)]
    arrays += [
        rng.standard_normal((batch, rows, size)).astype(products.dtype.to_numpy())
        for size in sorted(set(sizes))
    ]
    with flags.override(MAX_CHECK=2):
        compare(graph, arrays, scale=32.0)


@pytest.mark.parametrize(
    ("kind", "machine"),
    [
        *((kind, "") for kind in (*DENSE, "Q4_0", "Q6_K")),
        *((kind, AVX2) for kind in ("float32", "bfloat16", "Q8_0")),
    ],
)
def test_a_layer(kind: str, machine: str) -> None:
    """Two launches: queries, keys and values with biases; a gated product."""
    rng = np.random.default_rng(0)
    inner = 256
    products = Products(kind, inner, rng, True)
    dtype = products.dtype
    with Graph("g", input_types=[TensorType(dtype, ("m", inner), DEVICE)] * 2) as graph:
        x, y = (value.tensor for value in graph.inputs)
        q, key, v = (products(x, size) for size in (70, 33, 33))
        bias = ops.constant(rng.standard_normal(33).astype(dtype.to_numpy()), dtype, DEVICE)
        gated = ops.silu(products(y, 77)) * products(y, 77)
        graph.output(q, ops.cast(key + bias, DType.float32), ops.tanh(v), gated)
    with flags.override(MAX_CPU_FEATURES=machine) if machine else flags.override():
        model = InferenceSession(devices=[CPU()]).load(graph)
    launches = model.kernel_summaries
    assert len(launches) == 2 and all("packed_products" in name for name in launches)
    for rows in (0, 1, 3, 4, 9, 26, 40, 150):
        arrays = [products.x(rows, inner), products.x(rows, inner)]
        for out, want in zip(model.execute(*arrays), _interpreter.run(graph, arrays), strict=True):
            assert_close(out.to_numpy(), want, dtype.to_numpy(), scale=16)


@pytest.mark.parametrize(("gate", "columns"), list(zip(GATES, (32, 47, 100, 33), strict=True)))
def test_gated_products(gate: Callable[..., TensorValue], columns: int) -> None:
    """One epilogue reads both sums, and possibly other values."""
    products = Products("float32", 64, np.random.default_rng(columns), False)
    types = [
        TensorType(DType.float32, ("m", 64), DEVICE),
        TensorType(DType.float32, ("m", columns), DEVICE),
    ]
    with Graph("g", input_types=types) as graph:
        x, residual = (value.tensor for value in graph.inputs)
        graph.output(residual + products(x, columns) * gate(products(x, columns)))
    rng = np.random.default_rng(0)
    for rows in (1, 5, 30):
        other = rng.standard_normal((rows, columns)).astype(np.float32)
        assert len(compare(graph, [products.x(rows, 64), other])) == 1


def graph_of(build: Callable[[TensorValue, Products], Any], kind: str = "float32") -> Graph:
    products = Products(kind, 64, np.random.default_rng(0), True)
    with Graph("g", input_types=[TensorType(products.dtype, ("m", 64), DEVICE)]) as graph:
        made = build(graph.inputs[0].tensor, products)
        graph.output(*(made if isinstance(made, tuple) else (made,)))
    return graph


def launches_of(build: Callable[[TensorValue, Products], Any], kind: str = "float32") -> list[str]:
    x = Products(kind, 64, np.random.default_rng(1), True).x(3, 64)
    return compare(graph_of(build, kind), [x])


N64, N40, W40 = (f"!mo.tensor<[{dims}], f32, cpu:0>" for dims in ("n, 64", "n, 40", "64, 40"))
P40 = "!mo.tensor<[2, 2048], f32, cpu:0>"


def merged(body: str, outputs: str) -> list[str]:
    """The products of a graph after `merge_products`: the weights of each, those of a pair in parentheses.

    Args:
        body: Its ops, separated by `; `: `NAME = X * WEIGHT`, a product of `x` or `y`, or `NAME = OP VALUES`. A weight
            is defined before its first product: one of a lower-case letter is external, that of an upper-case letter
            is computed from the external one.
        outputs: The names of its outputs.
    """
    lines: list[str] = []
    defined: set[str] = set()

    def define(weight: str) -> None:
        if weight in defined:
            return
        defined.add(weight)
        if weight.isupper():
            define(weight.lower())
            lines.append(f"%w{weight} = mo.neg(%w{weight.lower()}) : ({W40}) -> {W40}")
        else:
            lines.append(f'%w{weight} = mo.constant.external() {{name = "{weight}"}} : () -> {W40}')
        pack = f'%p{weight} = mok.pack(%w{weight}) {{encoding = "columns"}} : ({W40}) -> {P40}'
        lines.append(pack)

    for line in body.split("; "):
        name, _, right = line.split(maxsplit=2)
        if " * " in right:
            x, weight = right.split(" * ")
            define(weight)
            lines.append(
                f"%{name} = mok.packed_matmul(%{x}, %p{weight}) "
                f'{{encoding = "columns", columns = 40 : i64, streamed = false}} : ({N64}, {P40}) -> {N40}'
            )
        else:
            op, *operands = right.split()
            scan = "{axis = 1 : i64, exclusive = false, reverse = false}"
            values, types = ", ".join(f"%{v}" for v in operands), ", ".join([N40] * len(operands))
            lines.append(
                f"%{name} = mo.{op}({values}) {scan if op == 'cumsum' else ''} : ({types}) -> {N40}"
            )
    names = outputs.split()
    types = ", ".join([N40] * len(names))
    lines.append(f"mo.output({', '.join('%' + name for name in names)}) : ({types}) -> ()")
    inputs, text = f"%x: {N64}, %y: {N64}", "\n".join(lines)
    module = mok.parse(f"builtin.module {{ mo.graph @g({inputs}) -> ({types}) {{ {text} }} }}")
    verify_module(module)
    merge_products(entry(module).block, lambda op: True)
    verify_module(module)
    found: list[str] = []
    for op in ops_of(entry(module).block):
        assert op.name != "mok.pack" or op.results[0].first_use is not None
        if op.name in ("mok.packed_matmul", "mok.packed_products"):
            pack = op.operands[1].owner
            assert isinstance(pack, MoOp)
            weights = "".join(
                base.upper() if computed else base for base, computed in map(_named, pack.operands)
            )
            parts = mok.parts_of(len(weights), pack.attr_or("pairs", ()))
            letters = ["".join(weights[i] for i in part) for part in parts]
            found.append("".join(p if len(p) == 1 else f"({p})" for p in letters))
    return found


def _named(weight: SSAValue) -> tuple[str, bool]:
    """The name of an external weight, and whether the value is computed from it."""
    owner = weight.owner
    assert isinstance(owner, MoOp)
    if owner.name == "mo.neg":
        return _named(owner.operands[0])[0], True
    return owner.attr("name"), False


def test_a_weight_is_packed_once() -> None:
    """Merged products need equal weights in each layer, and pairs of equal weights."""
    layers = "a = x * a; b = x * b; c = y * a; d = y * b"
    assert merged(layers, "a b c d") == ["ab", "ab"]
    # of one weight twice
    assert merged("e = x * a; f = x * b; g = x * b; h = x * c", "e f g h") == ["ac", "b", "b"]
    # a weight that one layer lacks; the other layer shares no weight
    assert merged(layers + "; e = x * c; f = x * d; g = y * a", "a b c d e f g") == [
        "a", "b", "a", "b", "cd", "a",
    ]  # fmt: skip
    # a pair in one layer and not in the other
    assert merged(layers + "; e = mul a b; f = mul c d", "e f") == ["(ab)", "(ab)"]
    assert merged(layers + "; e = mul a b", "e c d") == ["a", "b", "a", "b"]
    # one of three weights is not merged in one of the layers
    three = "a = x * a; b = x * b; c = x * c; d = y * a; e = y * b; f = y * c"
    assert merged(three, "a b c d e f") == ["abc", "abc"]
    waits = three + "; g = cumsum d; h = mul f g"
    assert merged(waits, "a b c e h") == ["a", "b", "c", "a", "b", "c"]


def test_weights_are_computed_before_the_first_product() -> None:
    assert merged("e = x * a; f = x * b; g = x * C", "e f g") == ["abC"]
    # two weights that are computed from one
    assert merged("e = x * a; f = x * B; g = x * b", "e f g") == ["aBb"]
    # of two launches: the pair of the first one has a product after the first of the second launch
    late = (
        "p = x * a; q = x * b; r = x * c; s = x * d; t = x * e; u = x * f; v = x * F; w = mul p v"
    )
    assert merged(late, "w q r s t u") == ["(aF)bcd", "ef"]


def test_products_that_are_not_merged() -> None:
    """Products with another product or a cache op between them, and products whose sums meet and have other uses."""

    def apart(x: TensorValue, p: Products) -> tuple[TensorValue, ...]:
        a = p(x, 64)
        return p(a, 40), p(x, 40)

    def met(x: TensorValue, p: Products) -> tuple[TensorValue, ...]:
        a, b = p(x, 40), p(x, 40)
        return a, a - b

    def three(x: TensorValue, p: Products) -> TensorValue:
        return p(x, 40) * p(x, 40) - p(x, 40)

    def waits(x: TensorValue, p: Products) -> tuple[TensorValue, ...]:
        a, b = p(x, 40), p(x, 40)
        return b * ops.cumsum(ops.tanh(a), axis=-1), p(x, 64)

    def twice(x: TensorValue, p: Products) -> tuple[TensorValue, ...]:
        a = p(x, 40)
        return a, a, p(x, 40)

    assert launches_of(apart) == ["packed_matmul"] * 3
    assert launches_of(met) == ["packed_matmul", "packed_matmul+sub"]
    assert launches_of(three) == ["packed_matmul", "packed_matmul", "packed_matmul+mul+sub"]
    assert launches_of(waits) == ["packed_products+tanh", "cumsum", "packed_matmul+mul"]
    assert launches_of(twice) == ["packed_products", "copy"]


def test_int8_products_are_not_merged() -> None:
    """Their kernel has one weight."""
    rng = np.random.default_rng(0)
    with Graph("g", input_types=[TensorType(DType.int8, ("m", 64), DEVICE)]) as graph:
        x = ops.cast(graph.inputs[0].tensor, DType.int32)
        ws = rng.integers(-128, 128, (2, 64, 64)).astype(np.int8)
        graph.output(*[x @ ops.cast(ops.constant(w, DType.int8, DEVICE), DType.int32) for w in ws])
    x = rng.integers(-128, 128, (3, 64)).astype(np.int8)
    assert compare(graph, [x]) == ["packed_matmul"] * 2


def test_a_product_that_meets_two_others_is_in_no_pair() -> None:
    def build(x: TensorValue, p: Products) -> tuple[TensorValue, ...]:
        a, b, c = p(x, 40), p(x, 40), p(x, 40)
        return a * b, a - c

    assert launches_of(build) == ["packed_matmul", "packed_matmul+mul", "packed_matmul+sub"]


def test_a_product_of_two_inputs_separates_products() -> None:
    def build(x: TensorValue, p: Products) -> tuple[TensorValue, ...]:
        return p(x, 40), x @ ops.transpose(x, 0, 1), p(x, 41)

    launches = launches_of(build)
    assert launches.count("packed_matmul") == 2 and len(launches) == 3


def test_a_launch_has_at_most_four_parts() -> None:
    """A pair is one part; a part that is left over is a launch of one product."""

    def singles(x: TensorValue, p: Products) -> tuple[TensorValue, ...]:
        return tuple(p(x, size) for size in range(32, 41))

    def pairs(x: TensorValue, p: Products) -> tuple[TensorValue, ...]:
        return tuple(p(x, size) * p(x, size) for size in range(32, 37))

    assert launches_of(singles) == ["packed_products"] * 2 + ["packed_matmul"]
    first, second = launches_of(pairs)
    assert first.count("mul") == 4 and second.count("mul") == 1


@pytest.mark.parametrize(("between", "launches"), [(31, 1), (32, 2)])
def test_products_that_meet_after_many_ops_are_no_pair(between: int, launches: int) -> None:
    """A search visits 32 ops after a product: `between` and the one where the results meet."""

    def build(x: TensorValue, p: Products) -> TensorValue:
        a, b = p(x, 40), p(x, 40)
        for _ in range(between):
            a = ops.tanh(a)
        return a * b

    assert len(launches_of(build)) == launches


def test_a_pair_whose_epilogue_depends_on_a_product_is_not_merged_with_it() -> None:
    def build(x: TensorValue, p: Products) -> TensorValue:
        a, b, c = p(x, 40), p(x, 40), p(x, 1)
        return a * b + ops.broadcast_to(c, a.shape)

    assert len(launches_of(build)) == 2


def test_an_epilogue_that_cannot_be_written() -> None:
    """An operand without a single stride over the rows: the sums are stored, and another kernel reads them."""
    products = Products("float32", 64, np.random.default_rng(0), True)
    types = [TensorType(DType.float32, shape, DEVICE) for shape in (("a", "b", 64), ("b", 40))]
    with Graph("g", input_types=types) as graph:
        x, other = (value.tensor for value in graph.inputs)
        gated = ops.silu(products(x, 40)) * products(x, 40)
        graph.output(gated + other, products(x, 64), products(x, 33) + 1.0)
    rng = np.random.default_rng(1)
    arrays = [products.x(3, 5, 64), rng.standard_normal((5, 40)).astype(np.float32)]
    launches = compare(graph, arrays)
    assert len(launches) == 2 and launches[0] == launches[1]


def test_weights_of_several_layers(rng: np.random.Generator) -> None:
    """Layers with equal weights share a packed copy; a weight with another use is packed once, on its own."""
    names = {"a": 40, "b": 72, "c": 40}
    arrays = {
        name: rng.standard_normal((size, 40)).astype(np.float32) / 8 for name, size in names.items()
    }
    weights = {name: Weight(name, DType.float32, arrays[name].shape, DEVICE) for name in names}
    with Graph("g", input_types=[TensorType(DType.float32, ("m", 40), DEVICE)]) as graph:
        x = graph.inputs[0].tensor

        def layer(x: TensorValue) -> tuple[TensorValue, ...]:
            return tuple(x @ ops.transpose(weights[name], 0, 1) for name in names)

        a, b, c = layer(x)
        d, e, f = layer(ops.tanh(a))
        graph.output(b, c, d, e, f, ops.relu(x) @ ops.transpose(weights["c"], 0, 1))
    model = InferenceSession().load(graph, weights_registry=arrays)
    launches = model.kernel_summaries
    assert sum("packed_products" in name for name in launches) == 2
    assert sum("packed_matmul" in name for name in launches) == 3
    x = rng.standard_normal((4, 40)).astype(np.float32)
    t = np.tanh(x @ arrays["a"].T)
    expected = [x @ arrays["b"].T, x @ arrays["c"].T, *[t @ arrays[n].T for n in names]]
    expected.append(np.maximum(x, 0) @ arrays["c"].T)
    for out, want in zip(model.execute(x), expected, strict=True):
        assert_close(out.to_numpy(), want, scale=8)
    others = {name: array[::-1].copy() for name, array in arrays.items()}
    model.reload(others)
    assert_close(model.execute(x)[0].to_numpy(), x @ others["b"].T, scale=8)


@pytest.mark.skipif(not machine.LINUX, reason="reads /proc")
def test_memory_of_loading(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, rng: Any) -> None:
    """Each weight is packed into its part of the common buffer; its pages are released before the next is read."""
    monkeypatch.setattr(load_time_results, "PART_BYTES", 1)
    size, count = 1 << 10, 4
    arrays: dict[str, np.ndarray] = {}
    peaks: list[int] = []
    for i in range(count):
        path = tmp_path / f"weight{i}.bin"
        rng.standard_normal((size, size)).astype(np.float32).tofile(path)
        arrays[f"w{i}"] = np.memmap(path, np.float32, "r", shape=(size, size))
    given_back = host_memory.MappedFiles.give_back

    def watched(self: host_memory.MappedFiles, address: int, length: int) -> bool:
        peaks.append(resident_of_all())
        return given_back(self, address, length)

    def resident_of_all() -> int:
        return sum(resident(f"weight{i}.bin") for i in range(count))

    monkeypatch.setattr(host_memory.MappedFiles, "give_back", watched)
    with Graph("g", input_types=[TensorType(DType.float32, ("m", size), DEVICE)]) as graph:
        x = graph.inputs[0].tensor
        ws = [Weight(name, DType.float32, (size, size), DEVICE) for name in arrays]
        graph.output(
            *[x @ ops.transpose(w, 0, 1) for w in ws[:2]], ops.silu(x @ ws[2]) * (x @ ws[3])
        )
    model = InferenceSession().load(graph, weights_registry=arrays)
    assert [re.sub(r"\+.*", "", name) for name in model.kernel_summaries] == ["packed_products"] * 2
    assert len(peaks) == count and max(peaks) < 1.5 * size * size * 4
    assert resident_of_all() < 1 << 16


def test_epilogues_that_depend_on_each_other() -> None:
    """Two products, each with an epilogue that reads the other product: one epilogue is not fused."""
    x, y = "!mo.tensor<[n, 32], f32, cpu:0>", "!mo.tensor<[n, 40], f32, cpu:0>"
    packed = "!mo.tensor<[4, 1024], f32, cpu:0>"
    lines: list[str] = []
    for name, other in (("a", "b"), ("b", "a")):
        lines.insert(
            0,
            f"%{name}1, %{name}2 = mok.packed_products(%{name}x, %{name}w) "
            '{encoding = "rows", columns = array<i64: 40, 40>, pairs = array<i64>, streamed = false} '
            f": ({x}, {packed}) -> ({y}, {y}) %{name}n = mo.neg(%{name}1) : ({y}) -> {y} "
            f"%{name}c = mo.cumsum(%{name}n) {{axis = 1 : i64, exclusive = false, reverse = false}} : ({y}) -> {y}",
        )
        lines.append(f"%{name}r = mo.mul(%{name}2, %{other}c) : ({y}, {y}) -> {y}")
    inputs = ", ".join(f"%{name}x: {x}, %{name}w: {packed}" for name in "ab")
    body = " ".join([*lines, f"mo.output(%ar, %br) : ({y}, {y}) -> ()"])
    module = mok.parse(f"builtin.module {{ mo.graph @g({inputs}) -> ({y}, {y}) {{ {body} }} }}")
    verify_module(module)
    fuse(entry(module).block)
    verify_module(module)
    regions = [op for op in entry(module).block.ops if isinstance(op, mok.RegionOp)]
    assert sorted(region.kind for region in regions) == ["library", "library", "map"]
    assert sorted(len(region.results) for region in regions) == [1, 2, 2]
