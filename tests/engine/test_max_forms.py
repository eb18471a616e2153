"""Forms that programs written for MAX use, on the engine and the interpreter, against NumPy."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from max import _interpreter
from max._errors import UnboundDimError
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Dim, Graph, TensorType, ops

CPU_REF = DeviceRef.CPU()
F, INT, B = DType.float32, DType.int64, DType.bool


def tensor(dtype: DType, *shape: int | str) -> TensorType:
    return TensorType(dtype, shape, CPU_REF)


def run(build: Callable[..., Any], types: list[TensorType], *inputs: np.ndarray) -> list[Any]:
    """The outputs of the engine, which are those of the interpreter."""
    graph = Graph("forms", build, input_types=types)
    outputs = InferenceSession(devices=[CPU()]).load(graph).execute(*inputs)
    for output, expected in zip(outputs, _interpreter.run(graph, inputs), strict=True):
        np.testing.assert_array_equal(output.to_numpy(), expected)
    return [output.to_numpy() for output in outputs]


def drawn(seed: str) -> tuple[random.Random, np.random.Generator]:
    draw = random.Random(seed)
    return draw, np.random.default_rng(draw.randrange(1 << 30))


@pytest.mark.parametrize("seed", range(4))
def test_bools_are_ordered(seed: int) -> None:
    """False is less than True, and ties keep their order: for every op that picks or sorts."""
    draw, numbers = drawn(f"bools {seed}")
    shape = [draw.randint(1, 5) for _ in range(draw.randint(1, 3))]
    axis, k = draw.randrange(len(shape)), 1
    x = numbers.random(shape) < draw.random()
    k = draw.randint(1, shape[axis])

    def build(x: Any) -> Any:
        return (
            ops.argmax(x, axis), ops.argmin(x, axis), ops.argsort(x), ops.argsort(x, ascending=False),
            *ops.top_k(x, k, axis), *ops.bottom_k(x, k, axis), ops.max(x, axis=axis), ops.min(x, axis=axis),
        )  # fmt: skip

    results = run(build, [tensor(B, *shape)], x)
    down = np.argsort(~x, axis=axis, kind="stable").take(range(k), axis)
    up = np.argsort(x, axis=axis, kind="stable").take(range(k), axis)
    expected = [
        np.argmax(x, axis, keepdims=True), np.argmin(x, axis, keepdims=True),
        np.argsort(x, 0, kind="stable"), np.argsort(~x, 0, kind="stable"),
        np.take_along_axis(x, down, axis), down, np.take_along_axis(x, up, axis), up,
        x.max(axis, keepdims=True), x.min(axis, keepdims=True),
    ]  # fmt: skip
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, value, strict=True)


INTEGERS = [getattr(DType, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_random_integers(dtype: DType) -> None:
    """Uniform: all integers from low to below high, each as often; normal: their mean and deviation."""
    draw, _ = drawn(f"random {dtype}")
    signed = dtype.is_signed_integral()
    low = draw.randint(-60 if signed else 0, 40)
    length = draw.randint(3, 60)

    def build() -> Any:
        ops.random.set_seed(draw.randrange(1 << 40))
        return (
            ops.random.uniform(tensor(dtype, 20_000), (low, low + length)),
            ops.random.gaussian(tensor(dtype, 20_000), 60, 10),
        )

    uniform, normal = run(build, [])
    assert uniform.dtype == normal.dtype == dtype.to_numpy()
    counts = np.bincount((uniform.astype(np.int64) - low), minlength=length)
    assert len(counts) == length and counts.min() > 0
    # six standard deviations of a binomial count
    assert np.abs(counts - 20_000 / length).max() < 6 * (20_000 / length) ** 0.5
    assert abs(normal.mean() - 59.5) < 0.5 and abs(normal.std() - 10) < 0.5


def test_bounds_of_random_integers() -> None:
    for low, high in ((-1, 5), (0, 300)):
        with pytest.raises(ValueError, match="out of the range"):
            Graph("g", lambda b=(low, high): ops.random.uniform(tensor(DType.uint8, 4), b))
    full = run(lambda: ops.random.uniform(tensor(DType.uint8, 20_000), (0, 256)), [])[0]
    assert full.min() == 0 and full.max() == 255
    ends = run(lambda: ops.random.uniform(tensor(INT, 64), (2**40, 2**40 + 1)), [])[0]
    assert (ends == 2**40).all()
    with pytest.raises(TypeError, match="compare floats"):
        Graph("g", lambda: ops.random.uniform(tensor(B, 4)))


BAND: list[int | None] = [None, -1, 0, 1, 2]


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (2, 5, 3)])
def test_bands_of_all_diagonals(shape: tuple[int, ...]) -> None:
    draw, numbers = drawn(f"bands {shape}")
    x = numbers.random(shape).astype(np.float32)
    rows, columns = np.indices(shape)[-2:]
    for _ in range(3):
        lower = draw.choice([n for n in BAND if n is None or n < shape[-2]])
        upper = draw.choice([n for n in BAND if n is None or n < shape[-1]])
        exclude = draw.random() < 0.5
        names = ["a", "b", "c"][: len(shape)]
        band = functools.partial(ops.band_part, num_lower=lower, num_upper=upper, exclude=exclude)
        result = run(band, [tensor(F, *names)], x)[0]
        inside = np.ones(shape, bool)
        if lower not in (None, -1):
            inside &= rows - columns <= lower
        if upper not in (None, -1):
            inside &= columns - rows <= upper
        np.testing.assert_array_equal(result, np.where(inside != exclude, x, 0))


def test_an_index_out_of_range_is_an_error_of_each_class() -> None:
    graph = Graph("g", lambda x, i: ops.gather(x, i, 0), [tensor(F, "n"), tensor(INT, "m")])
    model = InferenceSession(devices=[CPU()]).load(graph)
    for index in (4, -5):
        for kind in (ValueError, IndexError, RuntimeError):
            with pytest.raises(kind, match=f"index {index} is out of range"):
                model.execute(np.ones(4, np.float32), np.array([0, index]))


@pytest.mark.parametrize("updates", [0, 1, 2])
def test_too_few_updates(updates: int) -> None:
    types = [tensor(F, 4), tensor(B, 4), tensor(F, "u")]
    graph = Graph("g", lambda x, m, u: ops.masked_scatter(x, m, u, "k"), types)
    model = InferenceSession(devices=[CPU()]).load(graph)
    x, mask = np.zeros(4, np.float32), np.array([True, False, True, True])
    with pytest.raises(ValueError, match="masked_scatter: fewer updates than elements"):
        model.execute(x, mask, np.ones(updates, np.float32))
    result = model.execute(x, mask, np.arange(1, 9, dtype=np.float32))[0].to_numpy()
    assert result.tolist() == [1, 0, 2, 3]


# -- symbols that a later op binds ----------------------------------------------------------------

USES: dict[str, Callable[[], Any]] = {
    "broadcast_to": lambda: ops.broadcast_to(ops.constant(2.0, F, CPU_REF), ["n", 3]),
    "tile": lambda: ops.tile(ops.constant(np.ones((1, 3), np.float32)), [Dim("n"), 1]) * 2,
    "uniform": lambda: ops.random.uniform(tensor(F, "n", 3), (2, 2)),
    "gaussian": lambda: ops.random.gaussian(tensor(INT, "n", 3), 2, 0).cast(F),
    "range": lambda: ops.broadcast_to(
        ops.range(0, Dim("n"), dtype=INT, device=CPU_REF).cast(F).reshape(["n", 1]) * 0 + 2,
        ["n", 3],
    ),
    "shape_to_tensor": lambda: ops.broadcast_to(
        (ops.shape_to_tensor(["n"]) * 0 + 2).cast(F).reshape([1, 1]), ["n", 3]
    ),
    "buffer_create": lambda: ops.buffer_load(
        ops.buffer_create(tensor(F, "n", 3).as_buffer(), init_value=2.0)
    ),
}
BINDERS: dict[str, Callable[..., Any]] = {
    "rebind": lambda x: ops.rebind(x, ["n"]),
    "nonzero": lambda x: ops.nonzero(x, "n").cast(F)[:, 0],
    "slice": lambda x: x[(slice(1, None), "n"),],
    "masked_scatter": lambda x: ops.masked_scatter(x, x > 0, x, "n"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("binder", BINDERS)
def test_a_later_op_binds_a_symbol(use: str, binder: str) -> None:
    x = np.array([3, 1, 4, 1, 5], np.float32)

    def build(x: Any) -> Any:
        first = USES[use]() + 1
        second = first * 2
        return second, BINDERS[binder](x), first

    count = 4 if binder == "slice" else 5
    results = run(build, [tensor(F, "m")], x)
    np.testing.assert_array_equal(results[0], np.full((count, 3), 6, np.float32))
    np.testing.assert_array_equal(results[2], np.full((count, 3), 3, np.float32))


@pytest.mark.parametrize("use", USES)
def test_a_symbol_that_nothing_binds(use: str) -> None:
    graph = Graph("g", lambda x: (USES[use](), x), [tensor(F, "m")])
    assert [str(d) for d in graph.output_types[0].shape] == ["n", "3"]
    for kind in (UnboundDimError, ValueError, RuntimeError):
        with pytest.raises(
            kind, match=r"test_max_forms.py:\d+\): nothing in the graph g gives.*'n'.*known: m"
        ):
            InferenceSession(devices=[CPU()]).load(graph)
    with pytest.raises(UnboundDimError):
        _interpreter.run(graph, [np.ones(2, np.float32)])


def test_branches_and_effects_with_a_later_symbol() -> None:
    """Ops of branches wait for their symbols; buffers are stored in the staged order."""

    def build(x: Any, flag: Any) -> Any:
        buffer = ops.buffer_create(tensor(F, 2).as_buffer(), init_value=1.0)
        ones = ops.broadcast_to(ops.constant(1.0, F, CPU_REF), ["n"])
        chosen = ops.cond(
            flag,
            [tensor(F, 1)],
            lambda: ops.sum(ops.broadcast_to(ops.constant(2.0, F, CPU_REF), ["n"])),
            lambda: ops.sum(ones),
        )[0]
        ops.buffer_store(buffer, ops.buffer_load(buffer) + chosen)
        places = ops.nonzero(x, "n")
        ops.buffer_store(buffer, ops.buffer_load(buffer) * 10)
        return ops.buffer_load(buffer), places

    for flag, total in ((True, 6), (False, 3)):
        x = np.array([1, 0, 2, 3], np.float32)
        result, places = run(build, [tensor(F, "m"), tensor(B)], x, np.array(flag))
        assert result.tolist() == [(1 + total) * 10] * 2 and places[:, 0].tolist() == [0, 2, 3]


def test_a_symbol_does_not_bind_itself() -> None:
    def circle(x: Any) -> Any:
        return ops.rebind(ops.broadcast_to(x, ["n", 4]), ["k", 4]), ops.rebind(x, [4])

    with pytest.raises(UnboundDimError, match="'n'"):
        InferenceSession(devices=[CPU()]).load(Graph("g", circle, [tensor(F, 4)]))


# -- predicates of loops --------------------------------------------------------------------------

PREDICATES = [
    "(i < p) and (i < q)", "(i < p) or (i < q)", "not (i >= p)", "p <= i < q or i < 1",
    "i < 3 and (table[i] < q or not i < p)", "(i < p and i < q) or (i < 2 and not i >= q)", "True if i < p else i < q",
]  # fmt: skip


@pytest.mark.parametrize("text", PREDICATES)
def test_conditions_of_loops(text: str) -> None:
    """`and`, `or`, `not` and comparisons in a chain mean what they mean in Python, and short-circuit."""
    draw, _ = drawn(text)
    code = compile(text, "predicate", "eval")
    table = np.array([1, 2, 3])

    def build(p: Any, q: Any, table: Any) -> Any:
        return ops.while_loop(
            [ops.constant(0, INT, CPU_REF), ops.constant(0, INT, CPU_REF)],
            lambda i, total: eval(code, {"i": i, "p": p, "q": q, "table": table}),
            lambda i, total: [i + 1, total + i],
        )

    types = [tensor(INT), tensor(INT), tensor(INT, 3)]
    graph = Graph("loop", build, types)
    model = InferenceSession(devices=[CPU()]).load(graph)
    for _ in range(4):
        p, q = draw.randint(0, 4), draw.randint(0, 4)
        i = total = 0
        while eval(code, {"i": i, "p": p, "q": q, "table": table}):
            i, total = i + 1, total + i
        inputs = (np.array(p), np.array(q), table)
        outputs = [int(o.to_numpy()) for o in model.execute(*inputs)]
        assert outputs == [i, total] == [int(o) for o in _interpreter.run(graph, inputs)]


def test_predicates_that_cannot_be_staged() -> None:
    def loop(predicate: Callable[[Any], Any]) -> None:
        Graph("g", lambda x: ops.while_loop([x], predicate, lambda x: x + 1), [tensor(INT)])

    def prints(x: Any) -> Any:
        x.print()
        return x < 3 and x < 5

    with pytest.raises(TypeError, match="prints or uses buffers"):
        loop(prints)
    with pytest.raises(ValueError, match="more than 16 conditions"):
        loop(lambda x: all([x < n for n in range(17)]))
    with pytest.raises(TypeError, match="no truth value"):
        Graph(
            "g",
            lambda x: ops.cond(x < 3 and x < 5, None, lambda: None, lambda: None),
            [tensor(INT)],
        )
    with pytest.raises(TypeError, match="predicate is.*expected a tensor of bool"):
        loop(lambda x: x < 3 and x + 1)


def test_tensors_of_read_only_memory_are_shared_by_executions() -> None:
    """A model that only reads takes the memory of a read-only array as it is."""
    array = np.arange(4, dtype=np.float32)
    array.flags.writeable = False
    value = Tensor.from_numpy(array)
    model = InferenceSession(devices=[CPU()]).load(Graph("g", lambda x: x + 1, [tensor(F, "n")]))
    assert model.execute(value)[0].to_numpy().tolist() == [1, 2, 3, 4]
    value[0] = 9
    assert model.execute(value)[0].to_numpy().tolist() == [10, 2, 3, 4]
    assert array.tolist() == [0, 1, 2, 3]
