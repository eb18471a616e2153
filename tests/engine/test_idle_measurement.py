"""The thread that measures row thresholds, without models: when it measures, and what it does with results."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from max._runtime.daemon_thread import DaemonThread
from max.engine.tune import idle_measurement
from max.engine.tune.idle_measurement import (
    ATTEMPTS,
    BUSY_OBSERVATIONS,
    RETRY_SECONDS,
    _Idler,
    _Job,
    measure_when_idle,
)
from max.engine.tune.row_thresholds import QUIET, USABLE, Threshold, Unsure
from max.engine.tune.threshold_measurement import PoolIsBusyError

pytestmark = pytest.mark.any_target


class Model:
    """The programs of a model."""

    def __init__(self, runs: int = 1) -> None:
        self.limits: list[tuple[int, dict[str, int]]] = []
        self.run_numbers = [0]
        backend = SimpleNamespace(
            run_number=lambda: (
                self.run_numbers.pop(0) if self.run_numbers[1:] else self.run_numbers[0]
            )
        )
        self.main, *self.later = [
            SimpleNamespace(
                backend=backend,
                executor=SimpleNamespace(runs=runs),
                after_run=None,
                set_limits=lambda rows, number=number: self.limits.append((number, rows)),
            )
            for number in range(3)
        ]


class Store:
    """Thresholds that are known; keeps those of better quality."""

    def __init__(self) -> None:
        self.known: dict[str, Threshold] = {}

    def get(self, key: str) -> Threshold | None:
        return self.known.get(key)

    def keep(self, key: str, threshold: Threshold) -> bool:
        if key in self.known and self.known[key].quality >= threshold.quality:
            return False
        self.known[key] = threshold
        return True


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    known = Store()
    monkeypatch.setattr(idle_measurement, "process_thresholds", known)
    return known


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The time and the CPU time."""
    values = SimpleNamespace(now=1000.0, cpu=[0.0, 0.0])
    fake = SimpleNamespace(
        monotonic=lambda: values.now,
        perf_counter=lambda: values.now,
        process_time=lambda: values.cpu.pop(0),
    )
    monkeypatch.setattr(idle_measurement, "time", fake)
    return values


@pytest.fixture
def idler() -> Iterator[_Idler]:
    made = _Idler()
    yield made
    made.end()


def job(model: Model | None) -> _Job:
    unsure = Unsure("rows", "key", cast("Any", ["launch"]))
    return _Job(cast("Any", lambda: model), cast("Any", "compiled"), cast("Any", "link"), unsure)


def measures(monkeypatch: pytest.MonkeyPatch, result: Callable[[], Threshold | None]) -> list[Any]:
    """Replaces measurements; returns the arguments of each."""
    calls: list[Any] = []

    class Measurement:
        def __init__(self, *arguments: Any) -> None:
            calls.append(arguments)

        def threshold(self) -> Threshold | None:
            return result()

        def turns(self) -> Any:
            yield
            return result()

    module = SimpleNamespace(Measurement=Measurement, PoolIsBusyError=PoolIsBusyError)
    monkeypatch.setattr(idle_measurement, "threshold_measurement", module)
    return calls


def test_a_device_is_idle_if_nothing_runs_and_the_process_waits(
    clock: Any, idler: _Idler, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    ended = SimpleNamespace(wait=lambda seconds: waits.append(seconds), set=lambda: None)
    idler._ended = cast("Any", ended)
    most = idle_measurement.IDLE_CPU * idle_measurement.IDLE_SECONDS
    for numbers, cpu, expected in (
        ([6, 6], 0.0, True), ([6, 6], most * 0.99, True), ([6, 6], most, False), ([6, 6], 9.0, False),
        ([6, 7], 0.0, False), ([7, 6], 0.0, False),
    ):  # fmt: skip
        model = Model()
        model.run_numbers, clock.cpu = numbers, [0.0, cpu]
        assert idler._is_idle(job(model)) is expected
    assert waits == [idle_measurement.IDLE_SECONDS] * 6
    ended.wait = lambda seconds: True
    clock.cpu = [0.0, 0.0]
    assert not idler._is_idle(job(Model())) and not idler._is_idle(job(None))


@pytest.mark.parametrize(
    ("before", "made", "is_repeated", "used"),
    [
        (None, (5, 1.0), False, 5), (None, (5, QUIET), False, 5), (None, (5, 0.7), True, 5),
        (None, (5, USABLE), True, 5), (None, (5, 0.4), True, None), (None, None, False, None),
        (None, PoolIsBusyError, True, None),
        # another process or model measured meanwhile
        ((7, 1.0), None, False, 7), ((7, QUIET), None, False, 7), ((7, 0.8), (5, 0.7), True, 7),
        ((7, 0.8), (5, 0.95), False, 5), ((7, 0.3), (5, 0.2), True, None),
    ],
)  # fmt: skip
def test_a_usable_result_is_used_and_one_of_a_busy_machine_measured_again(
    monkeypatch: pytest.MonkeyPatch, store: Store, clock: Any, idler: _Idler, before: Any, made: Any, is_repeated: bool,
    used: int | None,
) -> None:  # fmt: skip
    def result() -> Threshold | None:
        if made is PoolIsBusyError:
            raise PoolIsBusyError
        return None if made is None else Threshold(*made)

    calls = measures(monkeypatch, result)
    if before is not None:
        store.known["key"] = Threshold(*before)
    model, task = Model(), None
    task = job(model)
    assert idler._measure(task) is is_repeated
    is_known = before is not None and before[1] >= QUIET
    assert len(calls) == (0 if is_known else 1)
    if calls:
        assert calls[0][:4] == ("compiled", "link", ["launch"], model.main.backend)
        assert calls[0][4]() is False
        idler._ended.set()
        assert calls[0][4]() is True
    assert model.limits == (
        [] if used is None else [(number, {"rows": used}) for number in range(3)]
    )
    # one that was disturbed is no attempt
    gave_way = made is PoolIsBusyError or (made is None and not is_known)
    assert (task.attempts, task.due) == ((0, 0.0) if gave_way else (1, clock.now + RETRY_SECONDS))


def test_the_delay_doubles_and_the_attempts_end(
    monkeypatch: pytest.MonkeyPatch, store: Store, clock: Any, idler: _Idler
) -> None:
    measures(monkeypatch, lambda: Threshold(5, 0.6))
    task = job(Model())
    delays: list[float] = []
    while idler._measure(task):
        delays.append(task.due - clock.now)
        assert len(delays) < 20
    delays.append(task.due - clock.now)
    assert delays == [RETRY_SECONDS * 2**n for n in range(ATTEMPTS)] and task.attempts == ATTEMPTS
    # a model that is gone needs none
    assert not idler._measure(job(None))


def test_a_busy_device_is_measured_between_executions_after_some_observations(
    monkeypatch: pytest.MonkeyPatch, store: Store, clock: Any, idler: _Idler
) -> None:
    begun: list[Any] = []

    class Busy:
        def __init__(self, *arguments: Any) -> None:
            begun.append(arguments)

        def take_turn(self) -> None: ...

    module = SimpleNamespace(BusyMeasurement=Busy)
    monkeypatch.setattr(idle_measurement, "busy_measurement", module)
    calls = measures(monkeypatch, lambda: None)
    model = Model()
    task = job(model)
    alive: list[Model | None] = [model]
    task.linked = cast("Any", lambda: alive[0])
    for count in range(1, BUSY_OBSERVATIONS + 2):
        idler._measure_between(task)
        assert len(begun) == (count >= BUSY_OBSERVATIONS), "one at a time"
        assert (model.main.after_run is None) == (count < BUSY_OBSERVATIONS)
    begin, backend, keep = begun[0]
    assert backend is model.main.backend
    next(begin())
    assert calls == [("compiled", "link", ["launch"], backend)]
    for known, result, used in (
        (None, None, None), (None, (4, 0.4), None), (None, (4, USABLE), 4), ((6, 0.8), (4, 0.7), 6),
        ((6, 0.6), None, 6),
    ):  # fmt: skip
        store.known = {} if known is None else {"key": Threshold(*known)}
        model.limits.clear()
        model.main.after_run, task.due = "a turn", 0.0
        keep(None if result is None else Threshold(*result))
        assert model.limits == (
            [] if used is None else [(number, {"rows": used}) for number in range(3)]
        )
        assert model.main.after_run is None and task.due == clock.now + RETRY_SECONDS
    # nothing is begun for what is known, nor for a model that is gone
    for quality, is_begun in ((USABLE, False), (1.0, False), (USABLE - 0.1, True)):
        store.known = {"key": Threshold(3, quality)}
        begun.clear()
        model.main.after_run = None
        idler._measure_between(task)
        assert bool(begun) is is_begun
    begun.clear()
    store.known = {}
    gone = job(None)
    gone.busy = BUSY_OBSERVATIONS
    idler._measure_between(gone)
    assert not begun
    alive[0], task.due = None, 0.0
    keep(Threshold(9, 1.0))
    assert store.known["key"] == (9, 1.0) and task.due == 0.0


def test_the_thread_takes_one_due_job_of_a_model_that_ran(
    monkeypatch: pytest.MonkeyPatch, clock: Any
) -> None:
    """It ends when no job is left."""
    idler = _Idler()
    new, gone, later, first, second = (
        job(Model(runs=0)),
        job(None),
        job(Model()),
        job(Model()),
        job(Model()),
    )
    later.due = clock.now + 3.5
    idler._jobs = [new, gone, later, first, second]
    names = {id(new): "new", id(later): "later", id(first): "first", id(second): "second"}
    events: list[str] = []
    idle = iter([False, True, True, True, False, True, True])
    again = iter([True, False, False, True, False])

    def is_idle(task: _Job) -> bool:
        return next(idle)

    def measure(task: _Job) -> bool:
        events.append(f"measure {names[id(task)]}")
        return next(again)

    def wait(seconds: float) -> bool:
        assert seconds == idle_measurement.IDLE_SECONDS / 4
        clock.now += 1.0
        if clock.now == 1007.0:
            new.linked = cast("Any", lambda: None)
        assert clock.now < 1020
        return False

    monkeypatch.setattr(idler, "_is_idle", is_idle)
    monkeypatch.setattr(idler, "_measure", measure)
    monkeypatch.setattr(
        idler, "_measure_between", lambda task: events.append(f"between {names[id(task)]}")
    )
    idler._ended = cast("Any", SimpleNamespace(wait=wait))
    idler._thread = cast("Any", "running")
    idler._work()
    assert events == [
        "between first", "measure first", "measure first", "measure later", "between second", "measure second",
        "measure second",
    ]  # fmt: skip
    assert idler._jobs == [] and idler._thread is None
    # an end of the process ends the thread whatever is left
    idler._jobs = [first]
    idler._ended = cast("Any", SimpleNamespace(wait=lambda seconds: True))
    idler._work()
    assert idler._jobs == [first] and len(events) == 7


class Thread:
    """A thread that a test starts."""

    made: list[Thread] = []
    refused = False

    def __init__(self, target: Callable[[], None], name: str) -> None:
        self.target, self.name = target, name
        self.joined: list[float] = []

    def start(self) -> None:
        if Thread.refused:
            raise RuntimeError("no thread")
        Thread.made.append(self)

    def join(self, timeout: float) -> bool:
        self.joined.append(timeout)
        return True


def test_one_thread_for_all_jobs_until_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Thread, "made", [])
    monkeypatch.setattr(idle_measurement, "DaemonThread", Thread)
    idler = _Idler()
    monkeypatch.setattr(Thread, "refused", True)
    idler.add([job(Model())])
    assert idler._thread is None and len(idler._jobs) == 1
    monkeypatch.setattr(Thread, "refused", False)
    for count in (2, 3):
        idler.add([job(Model())])
        assert len(idler._jobs) == count and Thread.made == [idler._thread]
    assert Thread.made[0].target == idler._work
    idler.end()
    # a measurement ends after its current run
    assert idler._ended.is_set() and Thread.made[0].joined == [1.0]
    idler.reset()
    assert not idler._jobs and idler._thread is None and not idler._ended.is_set()
    idler.end()
    idler.add([job(Model())])
    assert len(Thread.made) == 1, "none after the end"


def test_jobs_do_not_keep_the_programs_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    idler = _Idler()
    added: list[Sequence[_Job]] = []
    monkeypatch.setattr(idler, "add", added.append)
    monkeypatch.setattr(idle_measurement, "_idler", idler)
    linked: Any = Model()
    measure_when_idle(linked, cast("Any", "compiled"), cast("Any", "link"), [])
    assert not added
    items = [Unsure(name, name, []) for name in "ab"]
    measure_when_idle(linked, cast("Any", "compiled"), cast("Any", "link"), items)
    (jobs,) = added
    assert [task.unsure for task in jobs] == items and all(task.linked() is linked for task in jobs)
    assert [(task.attempts, task.due, task.busy) for task in jobs] == [(0, 0.0, 0)] * 2
    del linked
    gc.collect()
    assert all(task.linked() is None for task in jobs)


def test_the_thread_is_a_daemon_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_measurement, "IDLE_SECONDS", 0.01)
    idler, ended = _Idler(), threading.Event()
    monkeypatch.setattr(idler, "_measure", lambda task: ended.set())
    monkeypatch.setattr(idler, "_is_idle", lambda task: True)
    model = Model()
    idler.add([job(model)])
    thread = idler._thread
    assert isinstance(thread, DaemonThread) and ended.wait(60)
    assert thread.join(60) and idler._thread is None and not idler._jobs
