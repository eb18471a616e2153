"""Small executions run on the calling thread alone; both ways give the same elements as NumPy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from max import kernel as k
from max._abi import PoolState
from max._backends.backend import Rate, Sharing
from max._backends.cpu.runtime.pool import shared_pool
from max._compiler.program.code import LaunchCode, ProgramCode, WorkCode
from max._config import flags
from max.driver import CPU
from max.dtype import DType
from max.engine import ExecutionInterrupted, InferenceSession, Model, interrupt_on
from max.engine.run.small_work import small_work
from max.graph import Graph, TensorType, TensorValue, Weight, ops
from max.mlir import DimExpr
from tests.engine.conftest import DEVICE, tensor

pytestmark = pytest.mark.timeout(120, method="thread")
WORKERS = 3


@k.register("test_small_work_mean")
def mean(y: k.Output[k.f32, 1], x: k.Input[k.f32, 1], ctx: k.Context):
    """Leaves its work to the first worker that is there; its time is unknown to the engine."""
    for i in ctx.parallel(y.shape[0]):
        y[i] = x[i] * 0.5


def load(
    build: Callable[..., Any], *types: TensorType, weights: Mapping[str, Any] | None = None
) -> Model:
    with Graph("small", input_types=types) as graph:
        result = build(*[value.tensor for value in graph.inputs])
        graph.output(*(result if isinstance(result, list | tuple) else (result,)))
    session = InferenceSession(devices=[CPU()], num_threads=WORKERS)
    return session.load(graph, weights_registry=dict(weights or {}))


def runs_shared(model: Model, *arrays: Any) -> tuple[list[np.ndarray], int]:
    """The results of an execution, and how many runs woke the other workers."""
    epoch = shared_pool(WORKERS)._words(PoolState.EPOCH)  # pyright: ignore[reportPrivateUsage]
    before = int(epoch[0])
    results = [tensor.to_numpy().copy() for tensor in model.execute(*arrays)]
    return results, int(epoch[0]) - before


def chain(x: TensorValue) -> TensorValue:
    for _ in range(10):
        x = ops.softmax(ops.transpose(x, 0, 1)) * 3.0
    return x


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def numpy_chain(x: np.ndarray) -> np.ndarray:
    for _ in range(10):
        x = softmax(x.T) * 3.0
    return x


def layer(x: TensorValue) -> TensorValue:
    weight = Weight("w", DType.float32, (24, 8), DEVICE)
    return ops.relu(x @ ops.transpose(weight, 0, 1)) + 1.0


W = np.linspace(-1, 1, 24 * 8, dtype=np.float32).reshape(24, 8)
CASES: dict[str, tuple[Any, tuple[Any, ...], Any, list[tuple[tuple[int, ...], bool]]]] = {
    # the graph, its shape, NumPy's results, and shapes with whether the caller runs them alone
    "region": (lambda x: ops.tanh(x) + 1, ("n",), lambda x: np.tanh(x) + 1,
        [((1,), True), ((0,), True), ((16,), True), ((2049,), True), ((16384,), True), ((65537,), False)]),
    "bytes do not count": (lambda x: ops.cast(ops.cast(x, DType.float64) * 2, DType.float32), ("n",), lambda x: x * 2,
        [((16384,), True), ((32769,), False)]),
    "many regions": (chain, ("n", "n"), numpy_chain, [((3, 3), True), ((128, 128), True), ((181, 181), False)]),
    "product": (lambda x: x @ x, ("n", "n"), lambda x: x @ x,
        [((1, 1), True), ((7, 7), True), ((33, 33), True), ((65, 65), False)]),
    "two products": (lambda x: x @ x @ x, ("n", "n"), lambda x: x @ x @ x, [((25, 25), True), ((33, 33), False)]),
    "weight and epilogue": (layer, ("n", 8), lambda x: np.maximum(x @ W.T, 0) + 1, [((5, 8), True), ((999, 8), False)]),
    "other kernels": (lambda x: ops.cumsum(x), ("n", 9), lambda x: np.cumsum(x, -1),
        [((5, 9), True), ((999, 9), False)]),
    "static sizes": (lambda x: ops.cumsum(x), (5, 9), lambda x: np.cumsum(x, -1), [((5, 9), True)]),
    "large static sizes": (lambda x: ops.cumsum(x), (999, 9), lambda x: np.cumsum(x, -1), [((999, 9), False)]),
    "attention": (lambda x: ops.softmax(x @ ops.transpose(x, -1, -2)) @ x, (2, 3, "n", 8),
        lambda x: softmax(x @ x.swapaxes(-1, -2)) @ x, [((2, 3, 5, 8), False)]),
    "unknown work": (
        lambda x: ops.custom("test_small_work_mean", DEVICE, [x], [TensorType(DType.float32, ["n"], DEVICE)])[0],
        ("n",), lambda x: x * 0.5, [((4,), False)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_small_executions_wake_nobody(name: str, rng: np.random.Generator) -> None:
    build, shape, expected, sizes = CASES[name]
    weights = {"w": W} if build is layer else None
    models: list[Model] = []
    for alone in (True, False):
        with flags.override(MAX_RUN_ALONE=alone):
            models.append(load(build, tensor(*shape), weights=weights))
    for given, alone in sizes:
        x = rng.standard_normal(given, np.float32)
        (result,), shared = runs_shared(models[0], x)
        assert shared == (not alone), given
        (other,), shared = runs_shared(models[1], x)
        assert shared == 1
        np.testing.assert_array_equal(result, other)
        np.testing.assert_allclose(result, expected(x), rtol=1e-4, atol=1e-5)


def test_each_size_decides_for_itself(rng: np.random.Generator) -> None:
    with flags.override(MAX_RUN_ALONE=True):
        model = load(lambda x, y: [x + 1, ops.cumsum(y)], tensor("n"), tensor("m", 16))
    for n, m, alone in [(7, 3, 1), (70_001, 3, 0), (7, 501, 0), (7, 3, 1), (16_384, 0, 1)]:
        x, y = rng.standard_normal(n, np.float32), rng.standard_normal((m, 16), np.float32)
        (first, second), shared = runs_shared(model, x, y)
        assert shared == 1 - alone, (n, m)
        np.testing.assert_array_equal(first, x + 1)
        np.testing.assert_allclose(second, np.cumsum(y, -1), rtol=1e-4, atol=1e-5)


def counted(limit: int) -> Callable[[TensorValue], list[TensorValue]]:
    """A loop that counts to a limit, beside a running sum over x."""

    def build(x: TensorValue) -> list[TensorValue]:
        zero = ops.constant(0, DType.int32, device=DEVICE)
        return ops.while_loop(
            [zero, x], lambda i, y: i < limit, lambda i, y: [i + 1, ops.cumsum(y * 0.5)]
        )

    return build


@pytest.mark.parametrize(("columns", "alone"), [(4, True), (300, False)])
def test_a_loop_runs_alone_where_its_turns_are_tiny(columns: int, alone: bool) -> None:
    """A turn of 300 columns would be small work, but the number of turns is unknown."""
    with flags.override(MAX_RUN_ALONE=True):
        model = load(counted(3), tensor("n"))
    x = np.ones(columns, np.float32)
    (turns, result), shared = runs_shared(model, x)
    assert shared == (not alone) and turns == 3
    for _ in range(3):
        x = np.cumsum(x * np.float32(0.5))
    np.testing.assert_allclose(result, x, rtol=1e-5)


def test_errors_of_a_run_alone_name_their_op() -> None:
    with flags.override(MAX_RUN_ALONE=True):
        model = load(
            lambda x, i: ops.gather(x, i, 0) * 2.0, tensor("n"), tensor("m", dtype=DType.int64)
        )
    x = np.float32([1, 2, 3])
    for _ in range(2):
        with pytest.raises(IndexError, match="gather"):
            model.execute(x, np.array([5]))
        (result,), shared = runs_shared(model, x, np.array([2, 0]))
        assert not shared
        np.testing.assert_array_equal(result, [6, 2])


def test_an_event_ends_a_run_alone() -> None:
    with flags.override(MAX_RUN_ALONE=True):
        model = load(counted(2**31 - 1), tensor("n"))
    stop = threading.Event()
    timer = threading.Timer(0.05, stop.set)
    timer.start()
    with interrupt_on(stop), pytest.raises(ExecutionInterrupted):
        model.execute(np.ones(2, np.float32))
    timer.join()


def test_a_run_alone_starts_no_threads() -> None:
    workers = 6  # a pool that no other test uses
    with flags.override(MAX_RUN_ALONE=True), Graph("idle", input_types=[tensor("n")]) as graph:
        graph.output(graph.inputs[0].tensor + 1.0)
        model = InferenceSession(devices=[CPU()], num_threads=workers).load(graph)
    pool = shared_pool(workers)
    np.testing.assert_array_equal(model.execute(np.float32([1, 2]))[0].to_numpy(), [2, 3])
    assert not pool._threads  # pyright: ignore[reportPrivateUsage]
    model.execute(np.zeros(70_001, np.float32))
    assert len(pool._threads) == workers - 1  # pyright: ignore[reportPrivateUsage]


# ***** the estimate *****
SHARING = Sharing({"region": Rate(10, 3), "product": Rate(0, 2), "other": Rate(5, 1)}, 60)
N = DimExpr.symbol("n")


def estimate(*works: tuple[str, DimExpr | int] | None, **changes: Any) -> Callable[[int], bool]:
    """Whether launches of these kinds and amounts are small, as a function of n."""
    launches = [
        LaunchCode("k", (), True, False, "k", work=work and WorkCode(*work))  # pyright: ignore[reportArgumentType]
        for work in works
    ]
    launches += changes.get("more", [])
    with flags.override(MAX_RUN_ALONE=True):
        small = small_work(ProgramCode(launches=launches), ["n"], changes.get("sharing", SHARING))
    return lambda n: small([n])


def test_the_work_that_is_shared_counts() -> None:
    """Of each launch what exceeds `unshared_amount`, times `weight`; the limit itself is small."""
    region = estimate(("region", N))
    assert [region(n) for n in (0, 10, 30, 31)] == [True, True, True, False]
    two = estimate(("region", N), ("region", N), ("other", N * 2))
    # 6 (n - 10) + 2 n - 5
    assert [two(n) for n in (10, 15, 16)] == [True, True, False]
    assert estimate(("product", 30))(1) and not estimate(("product", 31))(1)
    assert estimate()(1)


def test_loops_are_small_where_no_launch_is_worth_sharing() -> None:
    back = [LaunchCode("", (), True, False, "", jump="back")]
    looped = estimate(("other", N), more=back)
    assert [looped(n) for n in (5, 6)] == [True, False]


def test_launches_that_are_never_shared_do_not_count() -> None:
    serial = [LaunchCode("k", (), True, True, "k")]
    assert estimate(("region", N), more=serial)(1)
    assert not estimate(("region", N), None)(1)
    assert not estimate(("region", N), sharing=None)(1)
    with flags.override(MAX_RUN_ALONE=False):
        assert not small_work(ProgramCode(), [], SHARING)([])


@pytest.mark.parametrize(
    ("works", "decided"),
    [
        ([("product", 30 * N)], False),
        ([("product", 31 * N)], True),
        ([("other", 66 * N)], True),
        ([("other", 65 * N)], False),
        ([("product", 20 * N), ("product", 11 * N)], True),
        ([("product", 31 * N - 31)], False),
    ],
)
def test_programs_that_are_large_with_any_sizes_compute_nothing(
    works: list[tuple[str, DimExpr]], decided: bool
) -> None:
    """The sizes are at least 1, or the result is empty."""
    launches = [
        LaunchCode("k", (), True, False, "k", work=WorkCode(*work))  # pyright: ignore[reportArgumentType]
        for work in works
    ]
    with flags.override(MAX_RUN_ALONE=True):
        small = small_work(ProgramCode(launches=launches), ["n"], SHARING)
    if decided:
        assert not small([])
    else:
        with pytest.raises((ValueError, IndexError, TypeError)):
            small([])
