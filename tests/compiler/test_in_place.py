"""Results in the memory of operands: only where no element is overwritten before it is read."""

from __future__ import annotations

import random

import numpy as np
import pytest

from max._backends.regions import Leaf, Literal, Node, RegionSpec, Result, Value
from max._compiler.analysis.layout import Layout
from max._compiler.lowering.library_lowering import in_place_pairs
from max._compiler.lowering.placing import Place, pairs_read_once
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.explain import explain_graph
from max.graph import DeviceRef, Graph, TensorType, ops

ROWS, COLUMNS = 3, 4
STRIDES = [(4, 1), (1, 3), (0, 1), (1, 0), (0, 0)]
DTYPES = {4: DType.float32, 8: DType.float64}


class Program:
    """A random region over rows of 4, its operands and results in buffers of 24 elements."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.sources: list[tuple[Place, int]] = []
        self.results: list[tuple[Place, int]] = []
        values: list[Value] = []
        for _ in range(rng.randint(1, 3)):
            dtype = DTYPES[rng.choice((4,) * 8 + (8,))]
            strides = rng.choice(STRIDES[:1] * 12 + STRIDES)
            values.append(Leaf(dtype, strides))
            self.sources.append((self.place(rng.randint(0, 3), dtype), self.offset(2)))
        for _ in range(rng.randint(1, 5)):
            op = rng.choice(("add", "add", "reduce_sum"))
            args = [rng.randrange(len(values)) for _ in range(1 if op == "reduce_sum" else 2)]
            values.append(Node(op, tuple(args), DType.float64))
        plain = RegionSpec((ROWS, COLUMNS), True, tuple(values), ())
        results: list[Result] = []
        for number in range(rng.randint(1, 3)):
            value = rng.randrange(len(values))
            dtype = DTYPES[rng.choice((4,) * 8 + (8,))]
            strides = rng.choice(STRIDES[:1] * 3 + STRIDES[:2]) if plain.inner[value] else (1, 0)
            results.append(Result(value, dtype, strides))
            self.results.append((self.place(10 + number, dtype), self.offset(3)))
        self.spec = RegionSpec((ROWS, COLUMNS), True, tuple(values), tuple(results))
        # read in any order, so also after the last row
        self.others = [self.place(rng.randint(0, 2), DType.float32)] if rng.random() < 0.3 else []

    def offset(self, elements: int) -> int:
        return elements if self.rng.random() < 0.05 else 0

    def place(self, buffer: int, dtype: DType) -> Place:
        strides = self.rng.choice([(4, 1)] * 9 + [(1, 3)])
        layout = Layout((ROWS, COLUMNS), strides, self.offset(5))
        return Place(buffer, layout, dtype)

    def run(self, shared: tuple[int, int] | None, backwards: bool) -> list[np.ndarray]:
        """The results, and what the other operands hold at the end; `shared` are buffers with one memory."""
        memory = {
            b: np.random.default_rng(b).integers(0, 9, 48).astype(np.float32) for b in range(4)
        }
        memory = {b: values.view(np.uint8) for b, values in memory.items()}
        for number in range(len(self.results)):
            memory[10 + number] = np.zeros(192, np.uint8)
        if shared is not None:
            memory[shared[0]] = memory[shared[1]]

        def at(place: Place, offset: int, strides, row: int, column: int) -> np.ndarray:
            element = place.layout.offset + offset + row * strides[0] + column * strides[1]
            return memory[place.buffer].view(place.dtype.to_numpy())[element : element + 1]

        rows = range(ROWS)[:: -1 if backwards else 1]
        for row in rows:
            sums: dict[int, float] = {}
            for level in range(max(self.spec.level) + 1):
                for column in range(COLUMNS):
                    point = self.values_at(at, row, column, level, sums)
                    for result, (place, offset) in zip(
                        self.spec.results, self.results, strict=True
                    ):
                        if self.spec.level[result.value] == level and (
                            result.strides[1] or column == COLUMNS - 1
                        ):
                            at(place, offset, result.strides, row, column)[0] = point[result.value]
                for number, value in enumerate(self.spec.values):
                    if isinstance(value, Node) and value.op == "reduce_sum":
                        if self.spec.level[number] == level + 1:
                            sums[number] = sums.pop(-1 - number)
        ends = [
            at(place, offset, result.strides, row, column).copy()
            for result, (place, offset) in zip(self.spec.results, self.results, strict=True)
            for row in range(ROWS)
            for column in range(COLUMNS)
        ]
        return [*ends, *(memory[place.buffer].copy() for place in self.others)]

    def values_at(
        self, at, row: int, column: int, level: int, sums: dict[int, float]
    ) -> list[float]:
        """The values of a point that a level computes; sums of the next level go on."""
        point: list[float] = []
        leaves = iter(self.sources)
        for number, (value, own) in enumerate(zip(self.spec.values, self.spec.level, strict=True)):
            match value:
                case Leaf():
                    place, offset = next(leaves)
                    point.append(float(at(place, offset, value.strides, row, column)[0]))
                case Node(op="reduce_sum"):
                    if own == level + 1:
                        partial = sums.get(-1 - number, 0.0)
                        sums[-1 - number] = partial + point[value.args[0]]
                    point.append(sums.get(number, 0.0))
                case Node(args=(x, y)):
                    point.append(point[x] + point[y])
                case _:
                    raise AssertionError(value)
        return point


def test_pairs_of_random_regions_may_share_memory() -> None:
    """Each pair is run with one memory and with two."""
    pairs = 0
    for seed in range(600):
        program = Program(seed)
        read = [*(place for place, _ in program.sources), *program.others]
        found = in_place_pairs(program.spec, program.results, program.sources)
        for pair in pairs_read_once(found, [place.buffer for place in read]):
            pairs += 1
            for backwards in (False, True):
                expected = program.run(None, backwards)
                for one, two in zip(program.run(pair, backwards), expected, strict=True):
                    np.testing.assert_array_equal(one, two, err_msg=f"seed {seed}, {pair}")
    assert pairs > 200


def element_wise(*strides: tuple[int, int]) -> RegionSpec:
    leaves = [Leaf(DType.float32, each) for each in strides]
    node = Node("add", (0, len(leaves) - 1), DType.float32)
    return RegionSpec((3, 4), False, (*leaves, node), (Result(len(leaves), DType.float32, (4, 1)),))


def test_element_wise_results_take_the_memory_of_their_operands() -> None:
    whole = Layout.contiguous((3, 4))
    x, y, out = (Place(buffer, whole, DType.float32) for buffer in (0, 1, 9))
    spec = element_wise((4, 1), (4, 1))
    assert in_place_pairs(spec, [(out, 0)], [(x, 0), (y, 0)]) == ((9, 0), (9, 1))
    # an operand that is read twice keeps its memory
    twice = in_place_pairs(spec, [(out, 0)], [(x, 0), (x, 0)])
    assert pairs_read_once(twice, [0, 0]) == ()
    assert pairs_read_once(((9, 0), (9, 1)), [0, 1, 0]) == ((9, 1),)
    assert in_place_pairs(spec, [(out, 0)], [(x, 4), (y, 0)]) == ((9, 1),)
    assert in_place_pairs(spec, [(out, 2)], [(x, 0), (y, 0)]) == ()
    # the first leaf of an epilogue is the kernel's own result
    assert in_place_pairs(spec, [(out, 0)], [(y, 0)]) == ((9, 1),)
    broadcast = element_wise((4, 1), (0, 1))
    assert in_place_pairs(broadcast, [(out, 0)], [(x, 0), (y, 0)]) == ((9, 0),)
    rows = RegionSpec(
        (3, 4), True, (Leaf(DType.float32, (4, 1)), Literal(DType.float32, 2)), (Result(0, DType.float32, (4, 1)),)
    )  # fmt: skip
    assert in_place_pairs(rows, [(out, 0)], [(x, 0)]) == ((9, 0),)


def test_an_early_row_result_leaves_the_operands_of_later_ones_alone() -> None:
    x, out = (Place(buffer, Layout.contiguous((3, 4)), DType.float32) for buffer in (0, 11))
    sums = Place(10, Layout.contiguous((3, 1)), DType.float32)
    f32 = DType.float32
    values = (
        Leaf(f32, (4, 1)), Node("reduce_sum", (0,), f32), Node("add", (0, 1), f32),
        Node("reduce_sum", (2,), f32), Node("add", (2, 3), f32),
    )  # fmt: skip
    row, last, early = (Result(v, f32, s) for v, s in ((1, (1, 0)), (4, (4, 1)), (2, (4, 1))))
    spec = RegionSpec((3, 4), True, values, (row, last))
    assert in_place_pairs(spec, [(sums, 0), (out, 0)], [(x, 0)]) == ((11, 0),)
    spec = RegionSpec((3, 4), True, values, (early, last))
    other = Place(12, Layout.contiguous((3, 4)), DType.float32)
    assert in_place_pairs(spec, [(other, 0), (out, 0)], [(x, 0)]) == ()


def test_a_result_before_the_mean_is_corrected_leaves_the_operand_alone(rng) -> None:
    """A norm walks its rows once more than its graph says; `shares` of that graph's last walk may overwrite them."""
    type_ = TensorType(DType.float32, (64, 300), DeviceRef.CPU())
    with Graph("norm", input_types=[type_]) as graph:
        # temporaries: of the region's results only `shares` fits into the memory of its operand
        x = ops.cumsum(graph.inputs[0].tensor, axis=0)
        mean = ops.mean(x, axis=-1)
        centered = x - mean
        normal = centered * ops.rsqrt(ops.mean(centered * centered, axis=-1) + 1e-5)
        shares = x / ops.sum(x * mean, axis=-1)
        graph.output(normal.cast(DType.float64), ops.cumsum(shares, axis=0))
    a = rng.standard_normal((64, 300), np.float32) + 3
    found, sums = InferenceSession(devices=[CPU()]).load(graph).execute(a)
    wide = np.cumsum(a.astype(np.float64), axis=0)
    mean = wide.mean(axis=-1, keepdims=True)
    expected = (wide - mean) / np.sqrt(wide.var(axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(found.to_numpy(), expected, atol=1e-4)
    expected = np.cumsum(wide / (wide * mean).sum(axis=-1, keepdims=True), axis=0)
    np.testing.assert_allclose(sums.to_numpy(), expected, rtol=1e-4)


def test_a_product_with_its_epilogue_takes_the_memory_of_its_residual() -> None:
    """Temporaries of 64 rows: one for the sum before and the product added to it, unless the product reads that sum."""
    cpu = DeviceRef.CPU()
    types = [TensorType(DType.float32, shape, cpu) for shape in ((64, 64), (64, 64))]

    def blocks(reads_residual: bool) -> int:
        with Graph("residual", input_types=types) as graph:
            x, w = (value.tensor for value in graph.inputs)
            residual = ops.cumsum(x, axis=0)
            y = residual + (residual if reads_residual else x) @ w
            graph.output(ops.cumsum(y, axis=1))
        described = explain_graph(graph)
        names = [launch["name"] for launch in described["launches"]]
        assert [name.partition("+")[0] for name in names] == ["cumsum", "matmul", "cumsum"], names
        sums = [m for m in described["memory"] if m["bytes"] == 64 * 64 * 4]
        return len({m["offset"] for m in sums if (m["first"], m["last"]) in ((0, 1), (1, 2))})

    assert blocks(reads_residual=False) == 1 and blocks(reads_residual=True) == 2


def test_launches_of_one_operand_run_side_by_side() -> None:
    """A kernel of the library reads its operands: no launch waits for another that reads the same."""
    cpu = DeviceRef.CPU()
    with Graph("side", input_types=[TensorType(DType.float32, (64, 64), cpu)]) as graph:
        x = graph.inputs[0].tensor
        one, other = ops.cumsum(x, axis=0), ops.cumsum(x, axis=1)
        graph.output(one, other, ops.cumsum(one, axis=1))
    first, second, third = explain_graph(graph)["launches"]
    assert first["reads"] == second["reads"] and len(first["reads"]) == 1
    assert not {*first["reads"]} & {*first["writes"], *second["writes"]}
    assert [launch["barrier"] for launch in (first, second, third)] == [False, False, True]


@pytest.mark.parametrize("first", [0, 100, 300])
def test_a_part_of_a_concatenation_is_not_written_over_its_operand(first: int, rng) -> None:
    """The part and its operand have buffers of the same size, but the part lies `first` elements later."""
    count, size = 1000, 600
    cpu = DeviceRef.CPU()
    types = [TensorType(DType.float32, [n], cpu) for n in (count, first, count - size - first)]
    with Graph("parts", input_types=types) as graph:
        x, before, after = (value.tensor for value in graph.inputs)
        # sums are launches of their own, whose results are temporaries
        part = ops.tanh(ops.cumsum(x, axis=0)[:size])
        whole = ops.concat([ops.tanh(before), part, ops.tanh(after)], axis=0)
        graph.output(ops.cumsum(whole, axis=0))
    a, b, c = (rng.standard_normal(type_.shape[0].dim).astype(np.float32) for type_ in types)
    (result,) = InferenceSession(devices=[CPU()]).load(graph).execute(a, b, c)
    parts = [np.tanh(b), np.tanh(np.cumsum(a, dtype=np.float64)[:size]), np.tanh(c)]
    np.testing.assert_allclose(result.to_numpy(), np.cumsum(np.concatenate(parts)), atol=1e-2)


@pytest.mark.parametrize("op", ["scatter", "scatter_nd", "scatter_add"])
@pytest.mark.parametrize("form", ["value", "transposed", "other"])
def test_an_operand_that_a_kernel_reads_elsewhere_too_keeps_its_memory(
    op: str, form: str, rng: np.random.Generator
) -> None:
    """The rows of a value are written over it in another order: it must be whole until the last row is read."""
    cpu, size = DeviceRef.CPU(), 6
    kind = TensorType(DType.float32, (size, size), cpu)
    rows = TensorType(DType.int64, (size, 1 if op == "scatter_nd" else size), cpu)
    with Graph("own", input_types=[kind, rows]) as graph:
        x, index = (value.tensor for value in graph.inputs)
        # sums are launches of their own, whose results are temporaries
        y = ops.cumsum(x, axis=0)
        updates = {
            "value": lambda: y,
            "transposed": lambda: ops.transpose(y, 0, 1),
            "other": lambda: ops.cumsum(x, axis=1),
        }[form]()
        call = {
            "scatter": lambda: ops.scatter(y, updates, index, axis=0),
            "scatter_nd": lambda: ops.scatter_nd(y, updates, index),
            "scatter_add": lambda: ops.scatter_add(y, updates, index, axis=0),
        }[op]
        graph.output(ops.cumsum(call(), axis=0))
    a = rng.integers(-9, 9, (size, size)).astype(np.float32)
    order = rng.permutation(size)
    own = np.cumsum(a, axis=0)
    read = {"value": own, "transposed": own.T, "other": np.cumsum(a, axis=1)}[form]
    expected = np.zeros_like(own)
    expected[order] = read
    if op == "scatter_add":
        expected += own
    given = order[:, None] if op == "scatter_nd" else np.repeat(order[:, None], size, axis=1)
    model = InferenceSession(devices=[CPU()]).load(graph)
    (result,) = model.execute(a, np.ascontiguousarray(given.astype(np.int64)))
    np.testing.assert_array_equal(result.to_numpy(), np.cumsum(expected, axis=0))
