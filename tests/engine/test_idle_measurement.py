"""The thread that measures row thresholds, without models: when it measures, and what it does with results."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from max._host import reentry
from max._host.threads import DaemonThread
from max.engine.tune import busy_measurement, idle_measurement
from max.engine.tune.busy_measurement import BUSY_SHARE, BusyMeasurement
from max.engine.tune.idle_measurement import (
    ATTEMPTS,
    BUSY_OBSERVATIONS,
    RETRY_SECONDS,
    _Idler,
    _Job,
    measure_when_idle,
)
from max.engine.tune.row_thresholds import QUIET, USABLE, Threshold, Unsure
from max.engine.tune.threshold_measurement import TURN_RUNS, MeasureStats, PoolIsBusyError, stats

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
    # what the process used before does not count
    model.run_numbers, clock.cpu = [6, 6], [7.0, 7.0]
    assert idler._is_idle(job(model))
    ended.wait = lambda seconds: True
    clock.cpu = [0.0, 0.0]
    assert not idler._is_idle(job(Model())) and not idler._is_idle(job(None))


def test_a_model_that_is_observed_may_be_freed(clock: Any, idler: _Idler) -> None:
    class Held:
        main = Model().main

    models = [Held()]
    ref = weakref.ref(models[0])

    def wait(seconds: float) -> bool:
        models.clear()
        assert ref() is None
        return False

    idler._ended = cast("Any", SimpleNamespace(wait=wait, set=lambda: None))
    task = job(None)
    task.linked = cast("Any", ref)
    assert idler._is_idle(task) and not models


def test_a_result_of_another_thread_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch, store: Store, clock: Any, idler: _Idler
) -> None:
    """It was stored between the look at what is known and the end of the measurement."""
    measures(monkeypatch, lambda: Threshold(5, 0.6))
    monkeypatch.setattr(store, "keep", lambda *_: False)
    model = Model()
    assert idler._measure(job(model)) is False and not model.limits


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
    later.due = clock.now + 4.0
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
        if clock.now == 1009.0:
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
    # it may be freed while the thread looks for a model that ran
    assert not idle_measurement._was_run(None)


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


def test_turns_between_executions(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time, a share of the time, from the start again when something else ran."""
    now, number, begun, kept = [1000.0], [4], list[int](), list[Threshold | None]()
    monkeypatch.setattr(busy_measurement.time, "perf_counter", lambda: now[0])
    runs = [TURN_RUNS, TURN_RUNS + 2, TURN_RUNS, TURN_RUNS]

    def begin() -> Generator[None, None, Threshold | None]:
        begun.append(0)
        for _ in range(2):
            now[0] += 3.0
            begun[-1] += 1
            number[0] += runs.pop(0)
            yield
        number[0] += 2
        return Threshold(9, 0.5)

    made = BusyMeasurement(
        begin, cast("Any", SimpleNamespace(run_number=lambda: number[0])), kept.append
    )
    asked: list[bool] = []
    is_free = [True]

    def acquire(blocking: bool) -> bool:
        asked.append(blocking)
        return is_free[0]

    released: list[int] = []
    made._lock = cast("Any", SimpleNamespace(acquire=acquire, release=lambda: released.append(1)))
    before = given_up = stats.given_up
    is_free[0] = False
    made.take_turn()
    assert asked == [False] and not begun and not released, "another thread takes a turn"
    is_free[0] = True
    number[0] += 1
    made.take_turn()
    assert not begun and len(released) == 1, "something runs"
    number[0] += 1
    for turns, is_given_up in (([1], 0), ([2], 1), ([2, 1], 1), ([2, 2], 1)):
        made.take_turn()
        given_up = before + is_given_up
        assert (begun, stats.given_up, made.ended) == (turns, given_up, False)
        made.take_turn()
        assert begun == turns, "its share of the time is used up"
        # three seconds of a turn are this share of a hundred
        now[0] += 3.0 / BUSY_SHARE
    made.take_turn()
    assert made.ended and kept == [Threshold(9, 0.5)] and stats.given_up == given_up
    now[0] += 1000.0
    made.take_turn()
    # nothing is begun again, and the lock is free
    assert begun == [2, 2] and len(kept) == 1 and len(released) == asked.count(False) - 1


def test_counts_begin_at_zero() -> None:
    assert MeasureStats() == MeasureStats(num_measured=0, given_up=0)


def test_the_thread_ends_with_the_process_and_is_not_in_its_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_exit: list[Any] = []
    in_children: list[Any] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(reentry, "in_child", in_children.append)
    spec = importlib.util.spec_from_file_location("another_idler", idle_measurement.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert at_exit == [module._idler.end] and in_children == [module._idler.reset]
