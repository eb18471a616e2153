"""Random graphs of element-wise ops, views, reductions and matmuls: compiled equals interpreted.

Graphs of floats are compared within bounds measured for each element (`tests.sensitivity`). Graphs of small integers in
float32, whose ops are exact, are compared to the last bit, so that no tolerance hides a wrong index.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max._config import flags
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from tests.sensitivity import assert_within, interpret

SESSION = InferenceSession(devices=[CPU()])
UNARY = ("tanh", "sigmoid", "abs", "neg", "relu", "silu", "sin", "cos")
BINARY = ("add", "sub", "mul", "max", "min", "where")
ROWWISE = ("sum", "mean", "max", "min", "softmax", "rms_norm", "layer_norm")
VIEWS = ("transpose", "merge", "slice", "step", "unsqueeze", "broadcast", "flip")
OTHER = ("concat", "matmul", "gather", "cumsum")
CONTROL = ("cond", "while")
MAX_DEPTH = 2


class Builder:
    """Stages one random graph."""

    KINDS: tuple[str, ...] = UNARY + BINARY * 2 + ROWWISE * 2 + VIEWS * 2 + OTHER
    DEVICE = DeviceRef.CPU()

    def __init__(
        self,
        data: st.DataObject,
        values: list[TensorValue],
        rng: np.random.Generator,
        chooser: TensorValue | None = None,
        depth: int = 0,
    ) -> None:
        self.data = data
        self.values = values
        self.rng = rng
        self.chooser = chooser
        """The integer that branches and trip counts depend on; None: no branches and loops."""
        self.depth = depth

    def draw(self, strategy):
        return self.data.draw(strategy)

    def pick(self) -> TensorValue:
        # mostly recent values, so that chains form
        index = self.draw(st.integers(0, min(len(self.values), 6) - 1))
        return self.values[-1 - index]

    def axis(self, x: TensorValue) -> int | None:
        return self.draw(st.integers(0, x.rank - 1)) if x.rank else None

    def weight(self, *shape: int) -> TensorValue:
        array = self.rng.uniform(-1, 1, shape).astype(np.float32)
        return ops.constant(array, DType.float32, self.DEVICE)

    def step(self) -> None:
        kinds = self.KINDS
        if self.chooser is not None and self.depth < MAX_DEPTH:
            kinds += CONTROL * 3
        kind = self.draw(st.sampled_from(kinds))
        x = self.pick()
        made = self.controlled(kind, x) if kind in CONTROL else self.make(kind, x)
        if made is not None:
            self.values.append(made)

    def inside(self, x: TensorValue, type_: TensorType) -> TensorValue:
        """Random steps over outer values and `x`, to a bounded value of a type."""
        inner = type(self)(self.data, [*self.values, x], self.rng, self.chooser, self.depth + 1)
        for _ in range(self.draw(st.integers(0, 4))):
            inner.step()
        return self.bounded(next(v for v in reversed(inner.values) if v.type == type_))

    def bounded(self, x: TensorValue) -> TensorValue:
        """The value, bounded so that it does not grow with each iteration of a loop."""
        return ops.tanh(x)

    def controlled(self, kind: str, x: TensorValue) -> TensorValue:
        """A branch or a loop around random steps."""
        assert self.chooser is not None
        divisor = self.draw(st.integers(1, 3))
        if kind == "cond":
            choice = ops.equal(self.chooser % divisor, 0)
            branches = [lambda: self.inside(x, x.type), lambda: self.inside(-x, x.type)]
            return ops.cond(choice, [x.type], *branches)[0]
        turns = self.chooser % (divisor + 1)
        zero = ops.constant(0, DType.int32, self.DEVICE)
        return ops.while_loop(
            [zero, x],
            lambda i, _: i < turns,
            lambda i, state: [i + 1, self.inside(state, x.type)],
        )[1]

    def make(self, kind: str, x: TensorValue) -> TensorValue | None:
        if kind in UNARY:
            return -x if kind == "neg" else getattr(ops, kind)(x)
        if kind in BINARY:
            y = next((v for v in reversed(self.values[:-1]) if v.shape == x.shape), None)
            if y is None:
                y = x * 0.5
            if kind == "where":
                return ops.where(x > y, x, y)
            return getattr(ops, kind)(x, y) * (0.5 if kind == "mul" else 1.0)
        axis = self.axis(x)
        if axis is None:
            return None
        if kind in ("sum", "mean", "max", "min"):
            made = getattr(ops, kind)(x, axis=axis)
            spread = self.draw(st.booleans())
            return x - made * 0.25 if spread else made
        if kind == "softmax":
            return ops.softmax(x, axis)
        if kind in ("rms_norm", "layer_norm"):
            if not isinstance(last := x.shape[-1], int) and not _static(last):
                return None
            gamma = self.weight(int(x.shape[-1]))
            if kind == "rms_norm":
                return ops.rms_norm(x, gamma, 1e-2)
            return ops.layer_norm(x, gamma, self.weight(int(x.shape[-1])), 1e-2)
        return self.moved(kind, x, axis)

    def moved(self, kind: str, x: TensorValue, axis: int) -> TensorValue | None:
        match kind:
            case "transpose":
                return ops.transpose(x, axis, self.axis(x) or 0)
            case "merge":
                if x.rank < 2:
                    return None
                axis = min(axis, x.rank - 2)
                return x.reshape(
                    [*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :]]
                )
            case "slice" if _static(x.shape[axis]) and int(x.shape[axis]) > 2:
                return x[(*[slice(None)] * axis, slice(1, int(x.shape[axis]) - 1))]
            case "step" if _static(x.shape[axis]) and int(x.shape[axis]) > 2:
                return x[(*[slice(None)] * axis, slice(0, None, 2))]
            case "flip" if _static(x.shape[axis]):
                return x[(*[slice(None)] * axis, slice(None, None, -1))]
            case "unsqueeze" if x.rank < 4:
                return ops.unsqueeze(x, axis)
            case "broadcast" if x.shape[axis] == 1:
                return ops.broadcast_to(x, [*x.shape[:axis], 3, *x.shape[axis + 1 :]])
            case "concat":
                return ops.concat([x, x * 0.5], axis) if _small(x) else None
            case "matmul" if x.rank >= 2 and _static(x.shape[-1]):
                return (x @ self.weight(int(x.shape[-1]), 5)) * 0.3
            case "gather" if _static(x.shape[axis]):
                indices = (
                    self.rng.integers(0, int(x.shape[axis]), 3)
                    if int(x.shape[axis])
                    else np.zeros(0, np.int64)
                )
                return ops.gather(x, ops.constant(indices, DType.int64, self.DEVICE), axis)
            case "cumsum":
                return ops.cumsum(x, axis=axis) * 0.1
            case _:
                return None


LIMIT = 64
"""Magnitude of the integers of an exact graph: sums of 2^17 products of them are exact in float32."""


class ExactBuilder(Builder):
    """Stages a graph of integers in float32 and bfloat16 without ops that round."""

    KINDS = (
        ("abs", "neg", "relu")
        + BINARY * 2
        + ("sum", "max", "min") * 2
        + VIEWS * 2
        + OTHER
        + ("bfloat16",)
    )

    def weight(self, *shape: int) -> TensorValue:
        array = self.rng.integers(-2, 3, shape).astype(np.float32)
        return ops.constant(array, DType.float32, self.DEVICE)

    def bounded(self, x: TensorValue) -> TensorValue:
        return ops.max(ops.min(x, float(LIMIT)), float(-LIMIT))

    def make(self, kind: str, x: TensorValue) -> TensorValue | None:
        if kind == "bfloat16":
            # bfloat16 represents the integers up to 256
            return x.cast(DType.bfloat16).cast(DType.float32)
        if kind in BINARY:
            y = next((v for v in reversed(self.values[:-1]) if v.shape == x.shape), None)
            y = self.bounded(x * 2.0) if y is None else y
            if kind == "where":
                return ops.where(x > y, x, y - 1.0) if self.draw(st.booleans()) else ops.max(x, y)
            made = getattr(ops, kind)(x, y)
            return made if kind in ("max", "min") else self.bounded(made)
        if kind in ("sum", "max", "min"):
            axis = self.axis(x)
            if axis is None:
                return None
            made = getattr(ops, kind)(x, axis=axis)
            return self.bounded(x - made if self.draw(st.booleans()) else made)
        if kind in ("abs", "neg", "relu"):
            return super().make(kind, x)
        axis = self.axis(x)
        if axis is None:
            return None
        match kind:
            case "concat":
                return ops.concat([x, -x], axis) if _small(x) else None
            case "cumsum":
                return self.bounded(ops.cumsum(x, axis=axis))
            case "matmul" if x.rank >= 2 and _static(x.shape[-1]):
                return self.bounded(x @ self.weight(int(x.shape[-1]), 5))
            case "matmul":
                return None
            case _:
                return self.moved(kind, x, axis)


def _static(dim: object) -> bool:
    try:
        int(dim)
    except TypeError:
        return False
    return True


def _small(x: TensorValue) -> bool:
    return all(not _static(dim) or int(dim) < 64 for dim in x.shape)


SHAPES = (
    (("a", 7), ("a", 7)),
    ((5, "b"), (1, "b")),
    (("a", 3, "c"), (3, 1)),
    ((4, 33), (33,)),
    ((2, 3, 17), (2, 3, 1)),
)


def draw_case(
    data: st.DataObject, steps: int, kind: type[Builder] = Builder
) -> tuple[Graph, list[np.ndarray], str]:
    """A graph, its inputs, and a description of the case."""
    shapes = data.draw(st.sampled_from(SHAPES))
    sizes = {name: data.draw(st.sampled_from((1, 2, 5, 16, 40))) for name in "abc"}
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    types = [TensorType(DType.float32, shape, kind.DEVICE) for shape in shapes]
    types.append(TensorType(DType.int32, (), kind.DEVICE))
    with Graph("random", input_types=types) as graph:
        *values, chooser = [value.tensor for value in graph.inputs]
        builder = kind(data, values, rng, chooser if data.draw(st.booleans()) else None)
        for _ in range(steps):
            builder.step()
        count = data.draw(st.integers(1, 3))
        graph.output(*builder.values[-count:])
    arrays: list[np.ndarray] = []
    for shape in shapes:
        size = [sizes[d] if isinstance(d, str) else d for d in shape]
        values = (
            rng.integers(-9, 10, size)
            if issubclass(kind, ExactBuilder)
            else rng.uniform(-2, 2, size)
        )
        arrays.append(values.astype(np.float32))
    arrays.append(np.array(data.draw(st.integers(0, 5)), np.int32))
    return graph, arrays, f"sizes {sizes}, seed {seed}"


def run_case(data: st.DataObject, steps: int, kind: type[Builder] = Builder) -> None:
    graph, arrays, drawn = draw_case(data, steps, kind)
    expected = interpret(graph, arrays)
    model = SESSION.load(graph)
    for _ in range(2):
        outputs = model.execute(*arrays)
        try:
            for output, (value, bound) in zip(outputs, expected, strict=True):
                if kind is ExactBuilder:
                    np.testing.assert_array_equal(output.to_numpy(), value)
                else:
                    assert_within(output.to_numpy(), value, bound)
        except AssertionError as error:
            kernels = ", ".join(model.kernel_summaries)
            raise AssertionError(f"{error}\n{drawn}, kernels {kernels}\n{graph}") from None


@given(st.data())
@settings(max_examples=15)
def test_the_printed_text_compiles_to_the_same(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Text and constants are saved and loaded: results are equal to the last bit."""
    graph, arrays, _ = draw_case(data, data.draw(st.integers(2, 10)))
    path = tmp_path_factory.mktemp("graph") / "random.mo"
    graph.save(path)
    again = Graph(path=path)
    assert str(again) == str(graph)
    results = [SESSION.load(g).execute(*arrays) for g in (graph, again)]
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one.to_numpy(), other.to_numpy())


@given(st.data())
@settings(max_examples=15)
def test_compiled_equals_interpreted(data: st.DataObject) -> None:
    with flags.override(MAX_CHECK=2):
        run_case(data, data.draw(st.integers(2, 14)))


@given(st.data())
@settings(max_examples=15)
def test_graphs_of_integers_are_equal_to_the_last_bit(data: st.DataObject) -> None:
    run_case(data, data.draw(st.integers(2, 20)), ExactBuilder)


@pytest.mark.long
@given(st.data())
@settings(max_examples=1000)
def test_compiled_equals_interpreted_long(data: st.DataObject) -> None:
    run_case(data, data.draw(st.integers(5, 60)))


@pytest.mark.long
@given(st.data())
@settings(max_examples=1000)
def test_graphs_of_integers_are_equal_to_the_last_bit_long(data: st.DataObject) -> None:
    run_case(data, data.draw(st.integers(5, 60)), ExactBuilder)
