"""Random graphs with sizes drawn to violate what their ops need: engine and interpreter answer alike, or both raise.

Each graph has symbolic axes; its slices, windows, paddings, stores and so on are drawn without regard to what the
symbols will be. It is loaded once and executed for several sets of sizes, 0 and 1 among them. Inputs, buffers and what
the interpreter is given lie between inaccessible pages, so that an access outside of them ends the process, or changes
bytes that are compared; with ``MAX_GUARD=1`` outputs and temporaries do too, and begin as a pattern.

``python -m tests.ops.violating --first SEED --count N`` runs graphs one by one and prints each seed before it runs, so
that the last line names the graph that ended the process. ``--show SEED`` prints a graph and its sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from max import _interpreter
from max._backends.cpu.runtime import kernel_code
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import (
    BufferType,
    BufferValue,
    DeviceRef,
    Dim,
    Graph,
    StaticDim,
    TensorType,
    TensorValue,
    ops,
)
from tests.fuzzing import count_failures, seed_parser, seeds_of
from tests.guarded import Margins
from tests.tolerance import assert_close

DEVICE = DeviceRef.CPU()
SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 17)
"""What symbols are drawn from."""
DRAWS = 6
"""Sets of sizes for each graph."""
MAX_DEPTH = 2
REFUSED = (ValueError, TypeError, IndexError, NotImplementedError)
"""What staging raises for a step that does not fit; another one is drawn then."""

Array = np.ndarray[Any, Any]
Step = Callable[["Builder", TensorValue], TensorValue | None]
STEPS: dict[str, Step] = {}


def step(function: Step) -> Step:
    """Registers a kind of step."""
    STEPS[function.__name__] = function
    return function


class Builder:
    """Stages one random graph."""

    def __init__(
        self,
        rng: np.random.Generator,
        values: list[TensorValue],
        buffers: list[BufferValue],
        chooser: TensorValue,
        depth: int = 0,
    ) -> None:
        self.rng = rng
        self.values = values
        self.buffers = buffers
        self.chooser = chooser
        self.depth = depth

    def below(self, end: int) -> int:
        """Draws a number in ``[0, end)``."""
        return int(self.rng.integers(end))

    def one_of(self, choices: Any) -> Any:
        """Draws an element of a sequence."""
        return choices[self.below(len(choices))]

    def number(self, low: int, high: int) -> int:
        """Draws a number in ``[low, high]``."""
        return int(self.rng.integers(low, high + 1))

    def pick(self) -> TensorValue:
        """Draws a value of the graph, recent ones more often."""
        return self.values[-1 - min(self.below(len(self.values)), self.below(len(self.values)))]

    def axis(self, x: TensorValue) -> int:
        """Draws one of its axes."""
        return self.below(x.rank)

    def dim(self, x: TensorValue) -> Dim:
        """Draws a size near one of the graph's sizes."""
        dim = self.one_of(x.shape) if x.rank else Dim(3)
        return self.one_of(
            (dim, dim - self.number(0, 5), dim + 1, dim // 2, Dim(self.number(0, 9)))
        )

    def bound(self, dim: Dim) -> Any:
        """Draws a bound of a slice."""
        number = self.number(-9, 9)
        return self.one_of((None, number, number, number, dim - self.number(0, 4), dim // 2))

    def index(self, dim: Dim) -> Any:
        """Draws an index of one axis."""
        if self.below(5) == 0:
            return self.number(-6, 8)
        steps = (None, None, 1, 2, 3, -1, -1, -2)
        return slice(self.bound(dim), self.bound(dim), self.one_of(steps))

    def weight(self, *shape: int) -> TensorValue:
        """Draws a constant of floats."""
        array = self.rng.uniform(-1, 1, shape).astype(np.float32)
        return ops.constant(array, DType.float32, DEVICE)

    def add_step(self) -> None:
        """Stages one more value or effect; nothing if the drawn arguments are invalid."""
        kind = self.one_of(tuple(STEPS))
        x = self.pick()
        try:
            made = STEPS[kind](self, x)
        except REFUSED:
            return
        if made is not None and made.rank <= 4:
            self.values.append(made)


def _indices(builder: Builder, shape: Any) -> Any:
    count = builder.number(1, max(len(shape), 1))
    return tuple(builder.index(dim) for dim in list(shape)[:count])


@step
def slices(b: Builder, x: TensorValue) -> TensorValue:
    return x[_indices(b, x.shape)]


@step
def slices_again(b: Builder, x: TensorValue) -> TensorValue:
    return slices(b, x * 0.5)


@step
def elements(b: Builder, x: TensorValue) -> TensorValue:
    return ops.tanh(x) * 0.5


@step
def combined(b: Builder, x: TensorValue) -> TensorValue:
    y = b.pick()
    if y.rank != x.rank:
        return x + 1
    return x + y.rebind(x.shape)


@step
def broadcast(b: Builder, x: TensorValue) -> TensorValue:
    return x[:1].rebind([1, *x.shape[1:]]).broadcast_to([b.dim(x), *x.shape[1:]])


@step
def transposed(b: Builder, x: TensorValue) -> TensorValue:
    return ops.transpose(x, b.axis(x), b.axis(x))


@step
def merged(b: Builder, x: TensorValue) -> TensorValue:
    return x.reshape([-1, x.shape[-1]])


@step
def split(b: Builder, x: TensorValue) -> TensorValue:
    parts = b.number(2, 3)
    return x.rebind([x.shape[0] // parts * parts, *x.shape[1:]]).reshape(
        [x.shape[0] // parts, parts, *x.shape[1:]]
    )


@step
def joined(b: Builder, x: TensorValue) -> TensorValue:
    return ops.concat([x, b.pick(), x * 2], b.axis(x))


@step
def padded(b: Builder, x: TensorValue) -> TensorValue:
    amounts: list[Any] = []
    for _ in range(2 * x.rank):
        amounts.append(b.one_of((0, 0, 1, 2, b.dim(x))))
    return ops.pad(x, amounts)


@step
def extreme(b: Builder, x: TensorValue) -> TensorValue:
    return b.one_of((ops.max, ops.min))(x, axis=b.axis(x))


@step
def summed(b: Builder, x: TensorValue) -> TensorValue:
    return b.one_of((ops.sum, ops.mean))(x, axis=b.axis(x))


@step
def place_of_extreme(b: Builder, x: TensorValue) -> TensorValue:
    # a difference in the last bit must not change a decision
    coarse = ops.round(x * 3)
    return b.one_of((ops.argmax, ops.argmin))(coarse, axis=b.axis(x)).cast(DType.float32)


@step
def softmax(b: Builder, x: TensorValue) -> TensorValue:
    return ops.softmax(x, b.axis(x))


@step
def summed_up(b: Builder, x: TensorValue) -> TensorValue:
    return ops.cumsum(x, axis=b.axis(x)) * 0.25


@step
def best(b: Builder, x: TensorValue) -> TensorValue:
    return b.one_of((ops.top_k, ops.bottom_k))(x, b.number(1, 9), b.axis(x))[0]


@step
def multiplied(b: Builder, x: TensorValue) -> TensorValue:
    return ops.prod(ops.tanh(x), b.axis(x))


@step
def gathered(b: Builder, x: TensorValue) -> TensorValue:
    indices = b.rng.integers(-3, 6, 3)
    return ops.gather(x, ops.constant(indices, DType.int64, DEVICE), b.axis(x))


@step
def scattered(b: Builder, x: TensorValue) -> TensorValue:
    axis = b.axis(x)
    shape = [b.number(1, 4) for _ in range(x.rank)]
    indices = ops.constant(b.rng.integers(-3, 6, shape), DType.int64, DEVICE)
    return ops.scatter(x, b.weight(*shape), indices, axis)


REDUCTIONS = (ops.scatter_add, ops.scatter_max, ops.scatter_min, ops.scatter_mul)
OF_SLICES = (ops.scatter_nd_add, ops.scatter_nd_max, ops.scatter_nd_min, ops.scatter_nd_mul)


@step
def combined_at(b: Builder, x: TensorValue) -> TensorValue:
    shape = [b.number(1, 4) for _ in range(x.rank)]
    indices = ops.constant(b.rng.integers(-3, 6, shape), DType.int64, DEVICE)
    return b.one_of(REDUCTIONS)(x, b.weight(*shape), indices, b.axis(x))


@step
def slices_combined_at(b: Builder, x: TensorValue) -> TensorValue:
    y = b.pick()
    count, depth = b.number(1, 4), b.number(1, x.rank)
    indices = ops.constant(b.rng.integers(-3, 6, (count, depth)), DType.int64, DEVICE)
    updates = y.rebind([count, *x.shape[depth:]]) if y.rank == 1 + x.rank - depth else None
    if updates is None:
        raise ValueError("another rank")
    return b.one_of(OF_SLICES)(x, updates, indices)


@step
def scattered_like(b: Builder, x: TensorValue) -> TensorValue:
    y = b.pick()
    if y.rank != x.rank:
        raise ValueError("another rank")
    return ops.scatter(x, y, (y > 9).cast(DType.int64), b.axis(x))


@step
def repeated(b: Builder, x: TensorValue) -> TensorValue:
    return ops.repeat_interleave(x, b.number(0, 3), b.axis(x))


@step
def tiled(b: Builder, x: TensorValue) -> TensorValue:
    return ops.tile(x, [b.number(1, 3) for _ in range(x.rank)])


@step
def product(b: Builder, x: TensorValue) -> TensorValue:
    inner = b.number(1, 9)
    return (x.rebind([*x.shape[:-1], inner]) @ b.weight(inner, b.number(1, 17))) * 0.25


@step
def product_of_slices(b: Builder, x: TensorValue) -> TensorValue:
    inner = b.number(1, 9)
    return (x[..., :inner] @ b.weight(inner, b.number(1, 5))) * 0.25


@step
def product_of_two(b: Builder, x: TensorValue) -> TensorValue:
    y = b.pick()
    if x.rank != 2 or y.rank != 2:
        raise ValueError("not matrices")
    return (x @ y.rebind([x.shape[1], y.shape[1]])) * 0.1


@step
def pooled(b: Builder, x: TensorValue) -> TensorValue:
    image = x.reshape([1, x.shape[0], x.shape[-1], 1]) if x.rank == 2 else x
    kernel, stride = (b.number(1, 4), b.number(1, 4)), b.number(1, 3)
    return b.one_of((ops.max_pool2d, ops.avg_pool2d))(image, kernel, stride, padding=b.number(0, 1))


@step
def convolved(b: Builder, x: TensorValue) -> TensorValue:
    image = x.reshape([1, x.shape[0], x.shape[-1], 1]) if x.rank == 2 else x
    weight = b.weight(b.number(1, 4), b.number(1, 4), 1, b.number(1, 3))
    return ops.conv2d(image, weight, (b.number(1, 3), b.number(1, 2)), (1, 1), (b.below(3),) * 4)


@step
def resized(b: Builder, x: TensorValue) -> TensorValue:
    image = x.reshape([1, 1, x.shape[0], x.shape[-1]]) if x.rank == 2 else x
    size = [*image.shape[:2], b.dim(x), b.number(1, 7)]
    return ops.resize(image, size, ops.InterpolationMode.BILINEAR)


@step
def resized_in_other_modes(b: Builder, x: TensorValue) -> TensorValue:
    size = [b.dim(x) for _ in range(x.rank)]
    match b.below(3):
        case 0:
            return ops.resize_nearest(x, size, b.below(4), b.below(4))
        case 1:
            return ops.resize_linear(x, size, b.below(4))
        case _:
            image = x.reshape([1, 1, x.shape[0], x.shape[-1]]) if x.rank == 2 else x
            return ops.resize_bicubic(image, [*image.shape[:2], b.dim(x), b.number(1, 7)])


@step
def regions(b: Builder, x: TensorValue) -> TensorValue:
    image = x.reshape([1, x.shape[0], x.shape[-1], 1]) if x.rank == 2 else x
    # quarters: no rounding decides whether a sample is inside
    rois = b.rng.integers(-20, 40, (b.number(0, 3), 5)) / 4
    rois[:, 0] = b.rng.choice([0, 0, 0, 0, 1, -1], len(rois))
    odd = b.below(9)
    if len(rois) and odd < 3:
        rois[0, b.number(1, 4)] = (np.nan, np.inf, 1e30)[odd]
    return ops.roi_align(
        image, ops.constant(rois.astype(np.float32), DType.float32, DEVICE), b.number(1, 3), b.number(1, 3),
        0.5, b.number(0, 2), bool(b.below(2)), b.one_of(("AVG", "MAX")),
    )  # fmt: skip


@step
def kept_boxes(b: Builder, x: TensorValue) -> TensorValue:
    boxes = b.rng.integers(0, 6, (1, 5, 4)).astype(np.float32)
    rows = x.reshape([-1, x.shape[-1]])
    # equal scores: the first box comes first
    scores = ops.unsqueeze(ops.round(rows * 2).rebind([rows.shape[0], 5]), 0)
    kept = ops.non_maximum_suppression(
        ops.constant(boxes, DType.float32, DEVICE), scores, b.number(-1, 4), 0.3, b.number(-3, 2),
        b.one_of((Dim(b.number(0, 6)), x.shape[0], Dim(f"kept_{len(b.values)}_{b.depth}"))),
    )  # fmt: skip
    return kept.cast(DType.float32) * 0.25


@step
def folded(b: Builder, x: TensorValue) -> TensorValue:
    blocks = x.rebind([4, x.shape[-1]]) if x.rank == 2 else x
    return ops.fold(ops.unsqueeze(blocks, 0), (b.number(2, 5), b.number(2, 5)), (2, 2))


@step
def chosen(b: Builder, x: TensorValue) -> TensorValue:
    type_ = TensorType(x.dtype, x.shape, DEVICE)
    if b.depth >= MAX_DEPTH:
        raise ValueError("deep enough")
    return ops.cond(
        ops.equal(b.chooser % b.number(1, 3), 0),
        [type_],
        lambda: _inside(b, x),
        lambda: _inside(b, x * 0.5),
    )[0]


@step
def looped(b: Builder, x: TensorValue) -> TensorValue:
    if b.depth >= MAX_DEPTH:
        raise ValueError("deep enough")
    turns = b.chooser % b.number(1, 3)
    zero = ops.constant(0, DType.int32, DEVICE)
    return ops.while_loop(
        [zero, x], lambda i, _: i < turns, lambda i, state: [i + 1, _inside(b, state)]
    )[1]


def _inside(b: Builder, x: TensorValue) -> TensorValue:
    """Stages steps in a branch, and returns a value of x's shape that depends on them."""
    inner = Builder(b.rng, [*b.values, x], b.buffers, b.chooser, b.depth + 1)
    for _ in range(b.number(1, 3)):
        inner.add_step()
    last = inner.values[-1]
    whole = ops.sum(last.reshape([-1]), axis=0) * 0.01
    return ops.tanh(x + whole.reshape([]))


@step
def stored(b: Builder, x: TensorValue) -> TensorValue | None:
    buffer = b.one_of(b.buffers)
    count = b.number(1, buffer.rank)
    index = tuple(b.index(dim) for dim in list(buffer.shape)[:count])
    value = ops.tanh(b.pick() if b.below(2) else x)
    try:
        part = ops.buffer_load(buffer)[index]
        ops.buffer_store_slice(buffer, value.rebind(part.shape), index)
    except REFUSED:
        buffer[index] = b.weight()
    return None


@step
def loaded(b: Builder, x: TensorValue) -> TensorValue:
    return b.one_of(b.buffers)[...] * 0.5


@step
def called(b: Builder, x: TensorValue) -> TensorValue:
    name = f"sub_{len(b.values)}_{b.number(0, 1 << 30)}"
    if b.depth:
        raise ValueError("called from the outermost graph only")
    with Graph.current.add_subgraph(name, input_types=[x.type]) as sub:
        inner = Builder(b.rng, [sub.inputs[0].tensor], [], b.chooser, MAX_DEPTH)
        for _ in range(3):
            kind = b.one_of(("slices", "extreme", "padded", "elements", "best"))
            try:
                inner.values.append(STEPS[kind](inner, inner.pick()))
            except REFUSED:
                continue
        sub.output(inner.values[-1])
    return ops.call(sub, x)[0].tensor


def draw(seed: int) -> tuple[Graph, list[dict[str, int]]]:
    """Returns the graph of a seed, and the sizes to run it with."""
    rng = np.random.default_rng(seed)
    with Graph("violating", input_types=_types(rng)) as graph:
        a, c, flat, buffer, chooser = graph.inputs
        values = [a.tensor, c.tensor, flat.tensor]
        builder = Builder(rng, values, [buffer.buffer], chooser.tensor)
        for _ in range(int(rng.integers(1, 9))):
            builder.add_step()
        made = builder.values[3:]
        graph.output(*(made[-3:] or values[:1]))
    names = ("m", "n", "p")
    sizes = [dict(zip(names, map(int, rng.choice(SIZES, 3)), strict=True)) for _ in range(DRAWS)]
    return graph, sizes


def _types(rng: np.random.Generator) -> list[TensorType | BufferType]:
    last = int(rng.integers(1, 10))
    return [
        TensorType(DType.float32, ("n", last), DEVICE),
        TensorType(DType.float32, ("n", "m"), DEVICE),
        TensorType(DType.float32, ("p",), DEVICE),
        BufferType(DType.float32, ("n", last), DEVICE),
        TensorType(DType.int32, (), DEVICE),
    ]


def inputs(graph: Graph, sizes: dict[str, int], seed: int) -> list[Array]:
    """Returns random inputs of a graph for given sizes."""
    rng = np.random.default_rng(seed)
    arrays: list[Array] = []
    for value in graph.inputs:
        shape = [int(dim) if isinstance(dim, StaticDim) else sizes[str(dim)] for dim in value.shape]
        if value.dtype is DType.int32:
            arrays.append(np.array(rng.integers(6), np.int32))
        else:
            arrays.append(rng.uniform(-2, 2, shape).astype(np.float32))
    return arrays


def _attempt(run: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return run(), None
    except Exception as error:
        return None, error


def check(seed: int, session: InferenceSession) -> tuple[int, int]:
    """Runs one graph on engine and interpreter.

    Returns:
        The numbers of sets of sizes that gave results and that were refused.

    Raises:
        AssertionError: They differ, or memory beside a tensor was written.
    """
    graph, draws = draw(seed)
    model, unloadable = _attempt(lambda: session.load(graph))
    answered = refused = 0
    for number, sizes in enumerate(draws):
        arrays = inputs(graph, sizes, seed + number)
        margins = Margins()
        given = [margins.guard(array, end=bool(number % 2)) for array in arrays]
        if unloadable is not None:
            raise AssertionError(f"seed {seed}: {unloadable!r}\n{graph}") from unloadable
        expected, wrong = _attempt(lambda arrays=arrays: _interpreter.run(graph, arrays))
        found, error = _attempt(lambda given=given: model.execute(*given))
        what = f"seed {seed}, sizes {sizes}"
        margins.check()
        if wrong is not None or error is not None:
            assert wrong is not None, f"{what}: the engine raised {error!r}\n{graph}"
            assert error is not None, f"{what}: the interpreter raised {wrong!r}\n{graph}"
            assert isinstance(error, ValueError | IndexError), f"{what}: {error!r}\n{graph}"
            refused += 1
            continue
        answered += 1
        pairs = [(out.to_numpy(), want) for out, want in zip(found, expected, strict=True)]
        pairs.append((given[3], arrays[3]))
        for got, want in pairs:
            try:
                assert_close(got, want, scale=50.0)
            except AssertionError as difference:
                raise AssertionError(f"{what}: {difference}\n{graph}") from None
    return answered, refused


def main() -> None:
    """Runs graphs; see the module's docstring."""
    parser = seed_parser()
    parser.add_argument("--show", type=int)
    arguments = parser.parse_args()
    if arguments.show is not None:
        print(*draw(arguments.show), sep="\n")
        return
    session = InferenceSession(devices=[CPU()])
    totals = np.zeros(2, int)

    def example(seed: int) -> None:
        nonlocal totals
        totals += check(seed, session)

    # as in composed tests, LLVM's optimizer would take half of the time
    with patch.object(kernel_code, "_optimizes", lambda: False):
        failures = count_failures(
            (str(seed), partial(example, seed)) for seed in seeds_of(arguments)
        )
    print(f"{arguments.count} graphs: {totals[0]} executions answered, {totals[1]} refused")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
