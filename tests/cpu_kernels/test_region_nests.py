"""The kernels of random regions against NumPy: all forms of loop nests, between pages that nothing may touch.

Elements are small integers, so that sums and products of floats are exact in any order. Results take the memory of
arguments where the compiler lets them.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from max import kernel as k
from max._backends.cpu.regions.nest import write_nest, write_region
from max._backends.cpu.runtime import kernel_code
from max._backends.cpu.runtime.executor import Executor
from max._backends.program import Launch, Program
from max._backends.regions import (
    ArgView,
    Leaf,
    Literal,
    Node,
    RegionKernel,
    RegionSpec,
    Result,
    SizeOf,
    Value,
)
from max._compiler.analysis.layout import Layout
from max._compiler.codegen import functions
from max._compiler.lowering.kernel_tables import Argument
from max._compiler.lowering.library_lowering import in_place_pairs
from max._compiler.lowering.lowered_graph import Pointer
from max._compiler.lowering.placing import Place
from max.dtype import DType
from max.mlir import DimExpr
from max.mlir.sizes import Size
from tests.cpu_kernels.harness import pool
from tests.guarded import PATTERN, Margins

F32, F64, F16, I32 = DType.float32, DType.float64, DType.float16, DType.int32
Array = np.ndarray[Any, Any]
BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
}
SUMS = {"reduce_sum": np.sum, "reduce_max": np.max, "reduce_min": np.min}
REDUCED = {**SUMS, "reduce_mul": np.prod}
SYMBOLS = "nmpq"


class Region:
    """A region with memory for its arguments.

    Args:
        spec: The region.
        sizes: The sizes of symbolic dims.
    """

    def __init__(self, spec: RegionSpec, sizes: dict[str, int], seed: int = 0) -> None:
        self.spec, self.sizes = spec, sizes
        self.dims = tuple(self.number(dim) for dim in spec.dims)
        self.rng = np.random.default_rng(seed)
        self.leaves = [value for value in spec.values if isinstance(value, Leaf)]
        self.memory = [self.elements(leaf) for leaf in self.leaves]
        self.in_place: dict[int, int] = {}
        """For some results, the leaf whose memory they take."""

    def number(self, size: Size) -> int:
        return size if isinstance(size, int) else size.evaluate(self.sizes)

    def strides(self, strides: Sequence[Size]) -> tuple[int, ...]:
        return tuple(self.number(stride) for stride in strides)

    def extent(self, strides: Sequence[int]) -> int:
        """The elements from the first to the last that the strides reach."""
        pairs = [(dim, step) for dim, step in zip(self.dims, strides, strict=True) if step]
        if any(dim == 0 for dim, _ in pairs):
            return 0
        return 1 + sum((dim - 1) * step for dim, step in pairs)

    def elements(self, leaf: Leaf) -> Array:
        kind = leaf.dtype.to_numpy()
        low = 0 if leaf.dtype.is_unsigned_integral() or leaf.dtype is DType.bool else -4
        count = self.extent(self.strides(leaf.strides))
        return self.rng.integers(low, 2 if leaf.dtype is DType.bool else 5, count).astype(kind)

    def over_space(self, memory: Array, strides: Sequence[Size]) -> Array:
        """A view of memory over all axes."""
        steps = [step * memory.itemsize for step in self.strides(strides)]
        return np.lib.stride_tricks.as_strided(memory, self.dims, steps)

    def share_memory(self) -> None:
        """Puts each result into the memory of a leaf where it may be there; each leaf's memory holds one result."""
        places = [
            Place(number, Layout.contiguous((self.extent(self.strides(each.strides)),)), each.dtype)
            for number, each in enumerate((*self.leaves, *self.spec.results))
        ]
        count = len(self.leaves)
        sources, results = (
            [(place, 0) for place in part] for part in (places[:count], places[count:])
        )
        for result, leaf in in_place_pairs(self.spec, results, sources):
            if result - count not in self.in_place and leaf not in self.in_place.values():
                self.in_place[result - count] = leaf

    def expected(self) -> list[Array]:
        """The results over the whole space, in f64 or i64."""
        values: list[Array] = []
        leaves = iter(zip(self.leaves, self.memory, strict=True))
        for value in self.spec.values:
            wide = np.float64 if value.dtype.is_float() else np.int64
            match value:
                case Leaf():
                    leaf, memory = next(leaves)
                    values.append(self.over_space(memory, leaf.strides).astype(wide))
                case Literal(value=number):
                    values.append(np.full(self.dims, number, wide))
                case SizeOf(axis=axis):
                    values.append(np.full(self.dims, self.dims[axis], wide))
                case Node(op=op, args=args):
                    values.append(self.node(op, [values[a] for a in args], wide))
        return [values[result.value] for result in self.spec.results]

    def node(self, op: str, args: list[Array], wide: Any) -> Array:
        if op in REDUCED:
            return np.broadcast_to(REDUCED[op](args[0], axis=-1, keepdims=True), self.dims)
        if op in BINARY:
            return BINARY[op](*args)
        if op == "rsqrt":
            return 1 / np.sqrt(args[0])
        if op == "fma":
            return args[0] * args[1] + args[2]
        if op == "select":
            return np.where(args[0] != 0, args[1], args[2])
        if op == "greater":
            return (args[0] > args[1]).astype(wide)
        assert op in ("cast", "round_to"), op
        return args[0].astype(wide)

    def run(self, workers: int, end: bool, native_width: int | None = None) -> list[Array]:
        """The results over the whole space; those of rows are repeated along the last axis."""
        target = k.host_target()
        text = (
            write_region(self.spec, target)
            if native_width is None
            else write_nest(self.spec, native_width)
        )
        ir = kernel_of(text, target)
        margins = Margins()
        written = [
            np.full(self.extent(self.strides(r.strides)), 0, r.dtype.to_numpy())
            for r in self.spec.results
        ]
        for memory in written:
            memory.view(np.uint8)[...] = PATTERN
        memory = [margins.guard(array, end) for array in (*written, *self.memory)]
        count = len(memory)
        for result, leaf in self.in_place.items():
            memory[result] = memory[len(written) + leaf]
        for view in text.args[count:]:
            shape = [self.number(dim) for dim in view.shape]
            memory.append(margins.guard(np.zeros(math.prod(shape), view.dtype.to_numpy()), end))
        arguments: list[Any] = [
            self.argument(array, view) for array, view in zip(memory, text.args, strict=True)
        ]
        arguments += [np.int64(self.number(size)) for size in text.scalars]
        entry = kernel_code.compile_kernels([ir], target)[ir.key]
        slots = [(0, word) for word in ir.words(arguments)]
        launch = Launch(
            entry, slots, phases=ir.phases, serial=text.serial, name=ir.name, messages=ir.messages
        )
        program = Program([launch], 1, ir.scratch_bytes)
        Executor(pool(workers), program).run(np.zeros(1, np.int64))
        margins.check()
        for leaf, before in enumerate(self.memory):
            if leaf not in self.in_place.values():
                np.testing.assert_array_equal(before, memory[len(written) + leaf])
        for number, result in enumerate(self.spec.results):
            if number not in self.in_place:
                self.check_gaps(result, memory[number])
        return [
            self.over_space(array, result.strides)
            for result, array in zip(self.spec.results, memory, strict=False)
        ]

    def argument(self, memory: Array, view: ArgView) -> Array:
        shape = [self.number(dim) for dim in view.shape]
        if view.strides is None:
            assert memory.size == math.prod(shape)
            return memory.reshape(shape)
        steps = [self.number(step) * memory.itemsize for step in view.strides]
        return np.lib.stride_tricks.as_strided(memory, shape, steps)

    def check_gaps(self, result: Result, memory: Array) -> None:
        """Elements between those of a result are as before."""
        touched = np.zeros(memory.size, bool)
        self.over_space(touched, result.strides)[...] = True
        assert np.all(memory[~touched].view(np.uint8) == PATTERN)

    def check(
        self, workers: int, end: bool = True, native_width: int | None = None, atol: float = 0
    ) -> None:
        expected = self.expected()
        for found, wanted in zip(self.run(workers, end, native_width), expected, strict=True):
            np.testing.assert_allclose(found.astype(wanted.dtype), wanted, rtol=0, atol=atol)


@functools.cache
def _compiled(source: str, specs: tuple[Any, ...], names: tuple[Any, ...]) -> k.KernelIR:
    scope = {"k": k, "fn": functions, "nan": math.nan, "inf": math.inf, **dict(names)}
    return k.specialize(k.from_source(source, "region", scope), list(specs), {}, k.host_target())


def kernel_of(text: RegionKernel, target: k.Target) -> k.KernelIR:
    specs = tuple(Argument(Pointer(0, 0), view).spec() for view in text.args)
    specs += (k.i64,) * len(text.scalars)
    return _compiled(text.source, specs, tuple(text.functions.items()))


def strided(rng: random.Random, dims: Sequence[Size], axes: Sequence[int], gaps: float) -> Any:
    """Strides of an argument that varies along some axes: in any order of these in memory, perhaps with gaps.

    Args:
        rng: What is drawn from.
        dims: The dims of the space.
        axes: The axes, the one that varies fastest last.
        gaps: How likely elements lie between those of the argument.
    """
    steps: list[Size] = [0] * len(dims)
    step: Size = 2 if rng.random() < gaps else 1
    for axis in reversed(axes):
        steps[axis] = step
        step = step * dims[axis] + (3 if rng.random() < gaps else 0)
    return tuple(steps)


class Drawn:
    """A random region.

    Args:
        seed: Chooses it.
    """

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        rank = rng.choice((0, 1, 2, 2, 2, 3, 3))
        self.reduces = rank > 0 and rng.random() < 0.6
        self.sizes: dict[str, int] = {}
        self.dims = tuple(self.dim(axis, rank) for axis in range(rank))
        self.fast = rng.choice((rank - 1, rank - 1, 0)) if rank else 0
        self.values: list[Value] = []
        self.bounds: list[int] = []
        """Of the absolute value of each value: sums that are not exact in f32 are not drawn."""
        self.dtype = rng.choice((F32, F32, F32, F64, I32, F16))
        self.other = rng.choice((self.dtype, F64, I32)) if self.dtype is F32 else self.dtype
        for _ in range(rng.randint(1, 3)):
            self.leaf()
        for _ in range(rng.randint(1, 5)):
            self.node()
        plain = RegionSpec(self.dims, self.reduces, tuple(self.values), ())
        count = rng.randint(1, 2)
        results = tuple(self.result(plain) for _ in range(count))
        self.spec = RegionSpec(self.dims, self.reduces, tuple(self.values), results)

    def dim(self, axis: int, rank: int) -> Size:
        rng = self.rng
        most = {1: 70_000, 2: 300, 3: 40}[rank]
        drawn = (2, 3, 5, 8, 15, 16, 17, 32, 33, 64, 70, 129, 300, 4097, 9000, 32769, 70_000)
        size = rng.choice([n for n in drawn if n <= most])
        if rng.random() < 0.5:
            return size
        name = SYMBOLS[axis]
        # whole vectors, whose loops have no masked tail
        if rng.random() < 0.3:
            self.sizes[name] = max(size // 128, 1)
            return DimExpr.symbol(name) * 128
        self.sizes[name] = rng.choice((size, size, size, 1, 0 if axis < rank - 1 else 1))
        return DimExpr.symbol(name)

    def leaf(self) -> None:
        rng, rank = self.rng, len(self.dims)
        axes = [axis for axis in range(rank) if rng.random() < 0.85]
        if rng.random() < 0.5:
            # the axis that is contiguous in most leaves
            axes.sort(key=lambda axis: axis == self.fast)
        elif rng.random() < 0.4:
            rng.shuffle(axes)
        self.add(Leaf(self.dtype, strided(rng, self.dims, axes, 0.1)), 4)

    def add(self, value: Value, bound: int) -> int:
        self.values.append(value)
        self.bounds.append(bound)
        return len(self.values) - 1

    def node(self) -> None:
        rng = self.rng
        dtype = rng.choice([v.dtype for v in self.values if v.dtype is not DType.bool])
        # mostly recent values, so that chains form
        like = [i for i, value in enumerate(self.values) if value.dtype is dtype]
        a, b, c = (like[-1 - min(int(rng.expovariate(0.7)), len(like) - 1)] for _ in range(3))
        last = self.dims[-1] if self.dims else 1
        size = last if isinstance(last, int) else last.evaluate(self.sizes)
        most = max(self.bounds[i] for i in (a, b, c))
        drawn = rng.random()
        if self.reduces and drawn < 0.4:
            sums = ["reduce_sum"] * 3 if most * size < 1 << 24 else []
            self.add(
                Node(rng.choice([*sums, "reduce_max", "reduce_min"]), (a,), dtype), most * size
            )
        elif drawn < 0.5:
            self.add(SizeOf(dtype, len(self.dims) - 1) if self.dims else Literal(dtype, 3), size)
        elif drawn < 0.6:
            greater = self.add(Node("greater", (a, b), DType.bool), 1)
            self.add(Node("select", (greater, b, c), dtype), most)
        elif drawn < 0.7:
            self.add(Node("cast", (a,), self.other if dtype is self.dtype else self.dtype), most)
        elif 2 * most < 1 << 24:
            self.add(Node(rng.choice(("add", "sub", "max", "min")), (a, b), dtype), 2 * most)

    def result(self, plain: RegionSpec) -> Result:
        rng = self.rng
        value = rng.choice([i for i, v in enumerate(self.values) if v.dtype is not DType.bool])
        axes = list(range(len(self.dims)))
        if self.reduces and not plain.inner[value] and rng.random() < 0.8:
            axes.pop()
        dtype = self.values[value].dtype
        dtype = F32 if dtype is F16 else dtype
        return Result(value, dtype, strided(rng, self.dims, axes, 0.1))


def check(seed: int) -> None:
    drawn = Drawn(seed)
    rng = drawn.rng
    region = Region(drawn.spec, drawn.sizes, seed)
    native_width = rng.choice((None, None, 4, 16))
    if rng.random() < 0.5:
        region.share_memory()
    try:
        region.check(rng.choice((1, 2, 3)), rng.random() < 0.7, native_width)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {drawn.spec} with {drawn.sizes}") from error


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_regions(first: int) -> None:
    for seed in range(first, first + 20):
        check(seed)


@pytest.mark.long
def test_random_regions_long() -> None:
    for seed in range(1000, 4000):
        check(seed)


def normalized(
    dims: tuple[Size, ...], strides: tuple[Size, ...], extra: tuple[str, ...]
) -> RegionSpec:
    """Deviations from the mean by the root of the variance, with further results."""
    values: list[Value] = [Leaf(F32, strides), SizeOf(F32, len(dims) - 1)]
    values += [
        Node("reduce_sum", (0,), F32), Node("div", (2, 1), F32), Node("sub", (0, 3), F32),
        Node("mul", (4, 4), F32), Node("reduce_sum", (5,), F32), Node("div", (6, 1), F32),
        Literal(F32, 1e-8), Node("add", (7, 8), F32), Node("rsqrt", (9,), F32), Node("mul", (4, 10), F32),
        Node("reduce_max", (4,), F32), Node("sub", (0, 12), F32), Node("add", (0, 1), F32),
    ]  # fmt: skip
    rows = (*strides[:-1], 0)
    # early: of the first walk; late: of the walk after the squares, beside the norm in f64, which is not in place
    results = {
        "early": Result(14, F32, strides), "late": Result(13, F32, strides), "mean": Result(3, F32, rows),
        "variance": Result(7, F32, rows), "norm": Result(11, F32, strides), "wide": Result(11, F64, strides),
    }  # fmt: skip
    return RegionSpec(dims, True, tuple(values), tuple(results[name] for name in extra))


@pytest.mark.parametrize(
    "names",
    [("norm",), ("wide", "late"), ("late", "norm"), ("norm", "late", "variance"), ("mean", "early", "norm"),
     ("early", "late", "wide")],
)  # fmt: skip
@pytest.mark.parametrize("form", ["rows", "columns", "long rows", "shared row"])
def test_exact_means(form: str, names: tuple[str, ...]) -> None:
    """Deviations of rows that are nearly constant, and of others, from exact means; results lie in the argument."""
    n, m = DimExpr.symbol("n"), DimExpr.symbol("m")
    dims: dict[str, tuple[Any, Any, dict[str, int]]] = {
        "rows": ((n, 70), (70, 1), {"n": 5}),
        "columns": ((n, 70), (1, n), {"n": 5}),
        "long rows": ((n, m), (m, 1), {"n": 3, "m": 5000}),
        "shared row": ((n,), (1,), {"n": 9000}),
    }
    shape, strides, sizes = dims[form]
    if form == "shared row":
        names = tuple(name for name in names if name != "variance")
    region = Region(normalized(shape, strides, names), sizes)
    rng = np.random.default_rng(3)
    (x,) = region.memory
    x[...] = rng.standard_normal(x.size) * 2
    # rows of a large mean, whose deviations are as small as the error of a mean in f32
    rows = region.over_space(x, region.spec.results[0].strides)
    rows[..., :] = rows * np.float32(2e-4) + 1000 if form == "shared row" else rows
    rows[:1] = rows[:1] * np.float32(2e-4) + 1000 if form != "shared row" else rows[:1]
    region.share_memory()
    region.check(2, atol=1e-3)
