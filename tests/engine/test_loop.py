"""Two models that alternate in a loop against the same executions one by one."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from max._backends.program import KernelRunError
from max._config import flags
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.engine.joined_models import JoinedModels, PartJump
from max.engine.loop import ModelLoop
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops

DEVICE = DeviceRef.CPU()


@pytest.fixture(scope="module")
def session() -> InferenceSession:
    return InferenceSession(devices=[CPU()])


@pytest.fixture(scope="module")
def step(session: InferenceSession) -> Model:
    """Updates a state of any length by products and reductions, with temporary memory."""
    type_ = TensorType(DType.float32, ["n", 24], DEVICE)
    with Graph("step", input_types=[type_]) as graph:
        x = graph.inputs[0].tensor
        weight = np.random.default_rng(1).standard_normal((24, 24)).astype(np.float32) / 5
        y = ops.softmax(x @ ops.constant(weight, DType.float32, DEVICE) + ops.cumsum(x, axis=0))
        graph.output(y - ops.mean(y, axis=0), ops.sum(y, axis=1))
    return session.load(graph)


def feed(session: InferenceSession) -> Model:
    """Copies the state, increments the counter, and computes whether to continue."""
    types = [
        TensorType(DType.float32, ["n", 24], DEVICE),
        TensorType(DType.int64, [1], DEVICE),
        BufferType(DType.float32, ["n", 24], DEVICE),
        BufferType(DType.int64, [1], DEVICE),
        BufferType(DType.bool, [1], DEVICE),
    ]
    with Graph("feed", input_types=types) as graph:
        made, wanted, state, count, again = graph.inputs
        ops.buffer_store(state, made.tensor * 3)
        counted = ops.buffer_load(count) + 1
        ops.buffer_store(count, counted)
        ops.buffer_store(again, counted < wanted.tensor)
        graph.output()
    return session.load(graph)


def feed_inputs(turns: int, given: list[Tensor], made: list[Tensor]) -> list[Any]:
    return [made[0], np.array([turns]), *given]


@pytest.mark.parametrize("turns", [1, 2, 7, 300])
@pytest.mark.parametrize("rows", [1, 5, 700])
def test_a_loop_equals_executions_one_by_one(session, step, turns: int, rows: int) -> None:
    if turns * rows > 10_000:
        turns = 20
    start = np.random.default_rng(rows).standard_normal((rows, 24)).astype(np.float32)
    wanted = start.copy()
    for _ in range(turns):
        out, sums = (t.to_numpy().copy() for t in step.execute(wanted))
        wanted = out * np.float32(3)
    loop = ModelLoop(step, feed(session))
    for _ in range(2):
        state, count, again = start.copy(), np.zeros(1, np.int64), np.zeros(1, np.bool_)
        flag = Tensor.from_numpy(again.view(np.uint8))
        given = [Tensor.from_numpy(array) for array in (state, count, again)]
        outputs = loop.run([given[0]], partial(feed_inputs, turns, given), flag)
        assert count[0] == turns and not again[0]
        np.testing.assert_array_equal(state, wanted)
        np.testing.assert_array_equal(outputs[0].to_numpy(), out)
        np.testing.assert_array_equal(outputs[1].to_numpy(), sums)


def test_what_follows_a_run_follows_a_loop(session, step, monkeypatch) -> None:
    """Once, whatever the number of turns: thresholds are measured there on a device that is never idle."""
    calls, other = [], feed(session)
    for model in (step, other):
        monkeypatch.setattr(model._linked.main, "after_run", partial(calls.append, model))
    given = [
        Tensor.from_numpy(np.zeros((2, 24), np.float32)),
        Tensor.from_numpy(np.zeros(1, np.int64)),
    ]
    given.append(Tensor.from_numpy(np.zeros(1, np.bool_)))
    again = Tensor.from_numpy(given[-1].to_numpy().view(np.uint8))
    ModelLoop(step, other).run([given[0]], partial(feed_inputs, 5, given), again)
    assert calls == [step, other]


def test_a_body_with_a_loop_of_its_own(session) -> None:
    with Graph("inner", input_types=[TensorType(DType.int64, [1], DEVICE)]) as graph:
        n = graph.inputs[0].tensor
        # triangular numbers: 0 + 1 + … + n
        total, _ = ops.while_loop(
            [n * 0, n],
            lambda s, i: (i > 0)[0],
            lambda s, i: [s + i, i - 1],
        )
        graph.output(total)
    body = session.load(graph)
    types = [
        TensorType(DType.int64, [1], DEVICE),
        BufferType(DType.int64, [1], DEVICE),
        BufferType(DType.bool, [1], DEVICE),
    ]
    with Graph("outer", input_types=types) as graph:
        total, state, again = graph.inputs
        ops.buffer_store(state, total.tensor)
        ops.buffer_store(again, total.tensor < 1000)
        graph.output()
    state, again = np.array([3]), np.zeros(1, np.bool_)
    given = [Tensor.from_numpy(state), Tensor.from_numpy(again)]
    ModelLoop(body, session.load(graph)).run(
        [given[0]], lambda made: [made[0], *given], Tensor.from_numpy(again.view(np.uint8))
    )
    expected = 3
    while expected < 1000:
        expected = expected * (expected + 1) // 2
    assert state[0] == expected


def test_a_reloaded_body(session) -> None:
    from max.graph import Weight

    with Graph("scale", input_types=[TensorType(DType.float32, [3], DEVICE)]) as graph:
        graph.output(graph.inputs[0].tensor * Weight("w", DType.float32, [3], DEVICE))
    body = session.load(graph, weights_registry={"w": np.full(3, 2, np.float32)})
    types = [
        TensorType(DType.float32, [3], DEVICE),
        BufferType(DType.float32, [3], DEVICE),
        BufferType(DType.uint8, [1], DEVICE),
    ]
    with Graph("keep", input_types=types) as graph:
        made, state, again = graph.inputs
        ops.buffer_store(state, made.tensor)
        ops.buffer_store(again, ops.cast(ops.max(made.tensor, axis=0) < 100, DType.uint8))
        graph.output()
    loop = ModelLoop(body, session.load(graph))

    def result() -> list[float]:
        state, flag = (
            Tensor.from_numpy(np.ones(3, np.float32)),
            Tensor.from_numpy(np.zeros(1, np.uint8)),
        )
        loop.run([state], lambda made: [made[0], state, flag], flag)
        return state.to_numpy().tolist()

    assert result() == [128.0] * 3
    body.reload({"w": np.full(3, 5, np.float32)})
    assert result() == [125.0] * 3


def test_what_cannot_be_repeated(session, step) -> None:
    types = [TensorType(DType.float32, [4], DEVICE)]
    with Graph("unknown", input_types=types) as graph:
        x = graph.inputs[0].tensor
        graph.output(ops.nonzero(x, "found"))
    with pytest.raises(ValueError, match="unknown cannot run in a loop"):
        ModelLoop(session.load(graph), step)
    after = feed(session)
    loop = ModelLoop(step, after)
    flag = Tensor.from_numpy(np.zeros(1, np.uint8))
    nothing: Any = lambda made: []  # noqa: E731
    with pytest.raises(TypeError, match=r"again is .*expected uint8\[1\]"):
        loop.run([np.zeros((1, 24), np.float32)], nothing, Tensor.from_numpy(np.zeros(1)))
    with pytest.raises(TypeError, match="feed takes 5 inputs"):
        loop.run([np.zeros((1, 24), np.float32)], nothing, flag)
    with pytest.raises(ValueError, match="input0"):
        loop.run([np.zeros((1, 23), np.float32)], nothing, flag)
    state, count, again = (
        np.zeros((1, 24), np.float32),
        np.zeros(1, np.int64),
        np.zeros(1, np.bool_),
    )
    given = [Tensor.from_numpy(array) for array in (state, count, again)]
    # a copy of the state would keep what it was before the first turn
    with pytest.raises(ValueError, match="share memory: repeated executions"):
        loop.run([given[0]], lambda made: [given[0], np.array([2]), *given], flag)
    other = InferenceSession(devices=[CPU()], num_threads=1)
    assert other._backends.of(CPU()).queue is not session._backends.of(CPU()).queue
    with pytest.raises(ValueError, match="step and feed run on different devices"):
        ModelLoop(step, feed(other))
    with step.profile(), pytest.raises(RuntimeError, match="step is being profiled"):
        loop.run([np.zeros((1, 24), np.float32)], nothing, flag)


def test_an_error_ends_the_loop(session) -> None:
    with Graph("look", input_types=[
        TensorType(DType.float32, [4], DEVICE), TensorType(DType.int64, [1], DEVICE),
    ]) as graph:  # fmt: skip
        table, index = (value.tensor for value in graph.inputs)
        graph.output(ops.gather(table, index, axis=0))
    body = session.load(graph)
    types = [BufferType(DType.int64, [1], DEVICE), BufferType(DType.uint8, [1], DEVICE)]
    with Graph("count", input_types=types) as graph:
        index, again = graph.inputs
        ops.buffer_store(index, ops.buffer_load(index) + 1)
        ops.buffer_store(again, ops.cast(ops.buffer_load(index) >= 0, DType.uint8))
        graph.output()
    loop = ModelLoop(body, session.load(graph))
    index, flag = np.zeros(1, np.int64), Tensor.from_numpy(np.zeros(1, np.uint8))
    where = Tensor.from_numpy(index)
    for _ in range(2):
        index[0] = 0
        with pytest.raises(KernelRunError, match="4"):
            loop.run([np.ones(4, np.float32), where], lambda made: [where, flag], flag)
        assert index[0] == 4


def test_sizes_are_checked_before_a_loop_writes(session) -> None:
    types = [TensorType(DType.float32, ["n", 24], DEVICE)]
    with Graph("short", input_types=types) as graph:
        x = graph.inputs[0].tensor
        graph.output(x * 2 + x[4], ops.sum(x, axis=1))
    loop = ModelLoop(session.load(graph), feed(session))
    state, count, again = np.ones((3, 24), np.float32), np.zeros(1, np.int64), np.zeros(1, np.bool_)
    given = [Tensor.from_numpy(array) for array in (state, count, again)]
    with pytest.raises(ValueError, match="slice: .*: n is 3, expected at least 5"):
        loop.run(
            [given[0]], partial(feed_inputs, 2, given), Tensor.from_numpy(again.view(np.uint8))
        )
    assert count[0] == 0 and state.sum() == 72


def test_a_model_after_itself(session) -> None:
    """It is used once at a time, so the loop takes it once."""
    types = [BufferType(DType.int64, [1], DEVICE), BufferType(DType.bool, [1], DEVICE)]
    with Graph("count", input_types=types) as graph:
        count, again = graph.inputs
        counted = ops.buffer_load(count) + 1
        ops.buffer_store(count, counted)
        ops.buffer_store(again, counted < 7)
        graph.output()
    model = session.load(graph)
    count, again = np.zeros(1, np.int64), np.zeros(1, np.bool_)
    inputs = [Tensor.from_numpy(count), Tensor.from_numpy(again)]
    flag = Tensor.from_numpy(again.view(np.uint8))
    loop = ModelLoop(model, model)
    joined = loop._joined
    assert loop.run(inputs, lambda outputs: inputs, flag) == []
    assert count[0] == 8
    # programs that did not change are not joined again
    assert loop._joined is joined


def test_programs_that_changed_are_joined_again(session, step) -> None:
    """As after a measurement of row thresholds; the arena is that of the program that needs more."""
    after = feed(session)
    loop = ModelLoop(step, after)
    first = loop._joined
    loop._joined = first._replace(programs=(first.programs[0], first.programs[0]))
    taken = list[tuple[int, tuple[int, ...]]]()
    take = step._arena.take

    def recorded(num_bytes: int, holes: tuple[int, ...] = ()) -> Any:
        taken.append((num_bytes, holes))
        return take(num_bytes, holes)

    state, count, again = np.ones((5, 24), np.float32), np.zeros(1, np.int64), np.zeros(1, np.bool_)
    given = [Tensor.from_numpy(array) for array in (state, count, again)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step._arena, "take", recorded)
        loop.run([given[0]], partial(feed_inputs, 1, given), Tensor.from_numpy(again.view("u1")))
    assert loop._joined.programs == first.programs and loop._joined.executor is not first.executor
    sizes = [model._linked.main.instance((5,)).arena_bytes for model in (step, after)]
    assert taken == [(max(sizes), ())] and sizes[0] > sizes[1]


def test_an_arena_has_the_guard_pages_of_both_models(session, step, monkeypatch) -> None:
    """A page that one of them uses is no guard page."""
    after, taken = feed(session), list[tuple[int, ...]]()
    for model, holes in ((step, (0, 4096, 8192)), (after, (4096, 8192, 12288))):
        monkeypatch.setattr(model._linked.main.instance((5,)), "holes", holes)
    take = step._arena.take

    def recorded(num_bytes: int, holes: tuple[int, ...]) -> Any:
        taken.append(holes)
        return take(num_bytes, ())

    monkeypatch.setattr(step._arena, "take", recorded)
    state, count, again = np.ones((5, 24), np.float32), np.zeros(1, np.int64), np.zeros(1, np.bool_)
    given = [Tensor.from_numpy(array) for array in (state, count, again)]
    flag = Tensor.from_numpy(again.view("u1"))
    ModelLoop(step, after).run([given[0]], partial(feed_inputs, 1, given), flag)
    assert [sorted(holes) for holes in taken] == [[4096, 8192]]


def test_memory_that_host_and_loop_share(session, step) -> None:
    loop = ModelLoop(step, feed(session))
    shared = loop.share(DType.int32, (2, 3))
    assert shared is not None
    tensor, array = shared
    assert (tensor.shape, array.shape, array.dtype) == ((2, 3), (2, 3), np.int32)
    assert not array.any()
    array[1, 2] = 7
    assert tensor.to_numpy()[1, 2] == 7 and tensor.device is CPU()
    backend = session._backends.of(CPU())
    assert ModelLoop.runs_on(session, CPU()) and ModelLoop.runs_on(session, CPU(), True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "share", lambda num_bytes: None)
        assert ModelLoop.runs_on(session, CPU()) and not ModelLoop.runs_on(session, CPU(), True)
        assert loop.share(DType.int32, (1,)) is None


def test_an_interpreted_model_runs_in_no_loop(session, step) -> None:
    with flags.override(MAX_INTERPRET=True):
        model = feed(session)
    assert not ModelLoop.supports(model)
    with pytest.raises(ValueError, match="feed cannot run in a loop: it is interpreted"):
        ModelLoop(step, model)


def test_models_with_an_inner_loop(session) -> None:
    """The second of three models runs several times in each turn, and the first turn begins with the third one."""
    types = [BufferType(DType.int64, [4], DEVICE), BufferType(DType.bool, [1], DEVICE)]

    def counting(name: str, place: int, period: int) -> Model:
        """Counts in a place of the state; its flag is false at each multiple of the period."""
        with Graph(name, input_types=types) as graph:
            state, flag = graph.inputs
            one = ops.constant(np.eye(4, dtype=np.int64)[place], DType.int64, DEVICE)
            counted = ops.buffer_load(state) + one
            ops.buffer_store(state, counted)
            ops.buffer_store(flag, counted[place : place + 1] % period > 0)
            graph.output(counted[place : place + 1] * 10)
        return session.load(graph)

    first, inner, last = (counting(*own) for own in (("a", 0, 9), ("b", 1, 3), ("c", 2, 5)))
    jumps = [
        PartJump(-1, 2), PartJump(1, 2, 0), PartJump(1, 1), PartJump(3, 4, 1), PartJump(3, 0),
    ]  # fmt: skip
    joined = JoinedModels([first, inner, last, inner], jumps, 2)
    assert JoinedModels.run_together([first, inner, last])
    state = np.zeros(4, np.int64)
    flags = [np.ones(1, np.bool_) for _ in range(3)]
    tensor = Tensor.from_numpy(state)
    given = [[tensor, Tensor.from_numpy(flags[n])] for n in (2, 0, 1, 2)]
    bytes_ = [Tensor.from_numpy(flag.view(np.uint8)) for flag in flags[:2]]
    parts: list[Any] = [lambda made, own=own: own for own in given]
    outputs = joined.run_parts(parts, bytes_)
    # c, b; then four turns of a, b up to a multiple of three, c, b
    wanted, inside = [0, 0, 0, 0], 0
    while True:
        wanted[2] += 1
        wanted[1] += 1
        if wanted[2] % 5 == 0:
            break
        wanted[0] += 1
        while True:
            wanted[1] += 1
            inside = wanted[1]
            if wanted[1] % 3 == 0:
                break
    assert state.tolist() == wanted and wanted[0] == 4
    assert [own[0].to_numpy().tolist() for own in outputs] == [
        [10 * wanted[0]], [10 * inside], [10 * wanted[2]], [10 * wanted[1]],
    ]  # fmt: skip
    with pytest.raises(ValueError, match="3 inputs and 2 flags for 4 parts"):
        joined.run_parts(parts[:3], bytes_)
    with pytest.raises(ValueError, match="4 inputs and 1 flags for 4 parts"):
        joined.run_parts(parts, bytes_[:1])
    other = InferenceSession(devices=[CPU()], num_threads=1)
    with Graph("d", input_types=[TensorType(DType.int64, [1], DEVICE)]) as graph:
        graph.output(graph.inputs[0].tensor + 1)
    assert not JoinedModels.run_together([first, other.load(graph)])
    with first.profile():
        assert not JoinedModels.run_together([inner, first])
