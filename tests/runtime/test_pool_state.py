"""What a pool writes into its native memory, and what happens between two lines of Python."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref

import numpy as np
import pytest

from max._abi import LINE_PAIR_BYTES, WORD_BYTES, Context, ErrorRecord, ErrorState, PoolState
from max._backends.cpu.runtime import platform
from max._backends.cpu.runtime import pool as pool_module
from max._backends.cpu.runtime.executor import Executor
from max._backends.cpu.runtime.pool import IDLE_SPINS, POOLS, RUN_SPINS, YIELD_EVERY, Pool
from max._backends.program import Launch, Program
from max._host import host_memory, interrupts
from max._host.interrupts import InterruptWatch
from max._host.machine import usable_cpus
from max._host.reentry import ReentryError
from max._host.threads import DaemonThread
from tests.runtime.ir_kernels import entry

ZERO = np.zeros(1, np.int64)


def contexts(pool: Pool) -> np.ndarray:
    """The contexts that the native code finds, a row for each worker."""
    assert pool._words(PoolState.CONTEXTS).item() == pool._buffers[0].ctypes.data
    return pool._buffers[0].view(np.int64).reshape(pool.num_threads, -1)


def adding(pool: Pool, out: np.ndarray) -> Executor:
    """Adds 1 to `out` in each run, by all workers."""
    launch = Launch(entry("count"), [(0, out.ctypes.data), (0, out.size)])
    return Executor(pool, Program([launch], 1))


def test_workers_have_the_memory_that_was_reserved(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their own, on lines of their own; it is placed anew only where more is needed."""
    allocate = host_memory.allocate

    def used(*sizes: int) -> np.ndarray:
        memory = allocate(*sizes)
        memory.view(np.uint8)[:] = 255  # as freed memory may be
        return memory

    monkeypatch.setattr(host_memory, "allocate", used)
    pool, scratch_bytes, num_slots = Pool(3), 0, 0
    pool.prepare()
    assert not contexts(pool)[:, Context.SCRATCH_BYTES].any()
    assert (
        not contexts(pool)[:, Context.ALERT].any() and not contexts(pool)[:, Context.LAUNCH].any()
    )
    sizes = [(0, 0), *rng.integers(0, 900, (12, 2)).tolist()]
    sizes += [(scratch, 0) for scratch in (1024, 1025)] + [(0, slots) for slots in (1024, 1025)]
    for scratch, slots in sizes:
        before = pool._buffers[0]
        grows = scratch > scratch_bytes or slots > num_slots
        scratch_bytes, num_slots = max(scratch_bytes, scratch), max(num_slots, slots)
        pool.reserve(scratch, slots)
        rows = contexts(pool)
        assert (pool._buffers[0] is not before) == grows
        assert rows[:, Context.WORKER].tolist() == [0, 1, 2]
        assert (rows[:, Context.WORKERS] == 3).all()
        assert (rows[:, Context.POOL] == pool._address).all()
        assert (rows[:, Context.ERROR] == pool._address + PoolState.ERROR.offset).all()
        assert (rows[:, Context.SCRATCH_BYTES] == scratch_bytes).all()
        assert (rows[:, Context.BARRIER] == pool.prepare().barrier).all()
        assert (rows[:, Context.POLL] == pool.prepare().poll).all()
        own = [
            (buffer.ctypes.data, buffer.ctypes.data + buffer.nbytes) for buffer in pool._buffers[1:]
        ]
        for field, (first, last), needed in zip(
            (Context.ARGS, Context.SCRATCH), own, (num_slots * WORD_BYTES, scratch_bytes), strict=True
        ):  # fmt: skip
            starts = rows[:, field]
            assert (starts % LINE_PAIR_BYTES == 0).all()
            assert starts[0] == first and starts[-1] + needed <= last
            gaps = np.diff(starts) - needed
            assert (gaps >= LINE_PAIR_BYTES).all() and (gaps < 2 * LINE_PAIR_BYTES).all()
    pool.close()


@pytest.mark.parametrize("parking", ["auto", "portable"])
def test_where_workers_park(parking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    initialized, init = list[tuple[int, str]](), platform.init_parking
    monkeypatch.setattr(
        platform, "init_parking", lambda *place: initialized.append(place) or init(*place)
    )
    pool = Pool(1, parking)
    pool.prepare()
    assert initialized == [(pool._address + PoolState.PARKING.offset, pool.parking)]


def test_workers_without_a_core_of_their_own_sleep_early() -> None:
    for more, spins in ((0, RUN_SPINS), (1, IDLE_SPINS)):
        pool = Pool(usable_cpus() + more)
        pool.prepare()
        assert pool._words(PoolState.RUN_SPINS).item() == spins
        assert pool._words(PoolState.IDLE_SPINS).item() == IDLE_SPINS
        assert pool._words(PoolState.YIELD_MASK).item() == YIELD_EVERY - 1
        assert pool._words(PoolState.ACTIVE).item() == 1  # nobody has started the others


def test_who_holds_a_pool() -> None:
    pool, other = Pool(1), Pool(1)
    assert not pool.is_held and not POOLS.holds_another(pool)
    with pool.lock:
        assert pool.is_held and not other.is_held
        assert POOLS.holds_another(other) and not POOLS.holds_another(pool)
        found: list[bool] = []
        thread = threading.Thread(
            target=lambda: found.extend((pool.is_held, POOLS.holds_another(other)))
        )
        thread.start()
        thread.join(60)
        assert found == [False, False]


def test_the_caller_of_the_last_run() -> None:
    pool, out = Pool(1), np.zeros(1, np.int64)
    run = adding(pool, out)
    callers: list[tuple[int, int]] = []

    def call() -> None:
        run.run(ZERO)
        callers.append((pool.caller(), threading.get_ident()))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    call()
    assert [found for found, _ in callers] == [own for _, own in callers]
    assert len(set(callers)) == 2 and pool.run_number() == 4 and out[0] == 2


def test_a_nudge_tells_the_workers_of_a_run_what_to_do() -> None:
    pool = Pool(2)
    pool.prepare()
    words = (PoolState.CHECK, PoolState.INTERRUPT)

    def nudge(run: int, check: bool, interrupt: bool) -> tuple[list[int], int]:
        for word in words:
            pool._words(word)[:] = 0
        alert = contexts(pool)[:, Context.ALERT]
        alert[:] = 0
        pool.nudge(run, check, interrupt)
        return [pool._words(word).item() for word in words], int(alert[0])

    assert nudge(7, False, False) == ([0, 0], 0)
    assert nudge(7, True, False) == ([7, 0], 1)
    assert nudge(9, False, True) == ([0, 9], 1)
    assert nudge(11, True, True) == ([11, 11], 1)
    # another worker has raised an error, which those at a barrier have to learn
    pool._words(PoolState.ERROR + ErrorRecord.STATE)[:] = ErrorState.INTERRUPTED
    assert nudge(13, False, False) == ([0, 0], 1)


def test_the_watch_sees_the_runs_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, woken = InterruptWatch(), list[bool]()
    monkeypatch.setattr(watch, "wake", lambda: woken.append(True))
    monkeypatch.setattr(interrupts, "WATCH", watch)
    pool, out = Pool(1), np.zeros(1, np.int64)
    run, seen = adding(pool, out), weakref.WeakKeyDictionary[interrupts.Interruptible, int]()
    assert not watch._look(seen)
    run.run(ZERO)
    assert watch._look(seen) and not watch._look(seen) and len(woken) == 1
    watch.awake = True
    run.run(ZERO)
    assert watch._look(seen) and len(woken) == 1 and out[0] == 2


def test_a_run_that_is_running_keeps_its_memory() -> None:
    """A signal handler that needs more gets an error."""
    pool = Pool(1)
    pool.reserve(100, 10)
    before = contexts(pool).ctypes.data
    pool._words(PoolState.RUN)[:] = 5
    for more in ((101, 10), (100, 11)):
        with pytest.raises(ReentryError, match="a signal handler cannot run a model"):
            pool.reserve(*more)
    pool.reserve(100, 10)
    assert contexts(pool).ctypes.data == before
    pool._words(PoolState.RUN)[:] = 6
    pool.reserve(101, 10)
    assert contexts(pool)[0, Context.SCRATCH_BYTES] == 101


def test_a_nested_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(1)
    pool.prepare()
    monkeypatch.setattr(pool, "_enter", lambda *_: ErrorState.NESTED)
    with pytest.raises(ReentryError, match="a signal handler cannot run a model"):
        pool.run(0, 0)


class RecordedPool(Pool):
    """Notes how it is started and entered, and runs nothing."""

    def __init__(self, count: int) -> None:
        self.calls, self.starts = list[bool](), 0
        super().__init__(count)

    @property
    def _enter(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        return lambda *words: self.calls.append(bool(words[-1])) or 0

    @_enter.setter
    def _enter(self, _: object) -> None: ...

    def _start(self) -> bool:
        self.starts += 1
        return super()._start()


@pytest.mark.parametrize("count", [1, 3])
def test_who_takes_part_in_a_run(count: int) -> None:
    """The others are started once, and not in a signal handler that comes while they are."""
    pool = RecordedPool(count)
    pool.prepare()
    calls = pool.calls
    pool.run(0, 0, alone=True)
    assert calls.pop() and not pool._threads and not pool.starts
    pool._is_starting = True
    pool.run(0, 0)
    assert calls.pop() and not pool._threads
    pool._is_starting = False
    pool.starts = 0
    for _ in range(2):
        pool.run(0, 0)
        assert not calls.pop() and len(pool._threads) == count - 1
    assert pool.starts == (count > 1)
    pool._is_starting = True
    pool.run(0, 0)
    assert calls.pop(), "the number of workers is not set yet"
    pool._is_starting = False
    assert pool._words(PoolState.ACTIVE).item() == count
    pool.close()
    pool.run(0, 0)
    assert calls.pop() == (count > 1) and not pool._threads


def test_workers_that_are_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that comes meanwhile runs alone."""
    pool, start = RecordedPool(3), DaemonThread.start
    pool.prepare()

    def interrupted(thread: DaemonThread) -> None:
        pool.run(0, 0)
        start(thread)

    monkeypatch.setattr(DaemonThread, "start", interrupted)
    pool.run(0, 0)
    assert pool.calls == [True, True, False]
    pool.close()


class MovedPool(RecordedPool):
    """Gets other memory when its threads are read: a child is forked then."""

    reads = 0

    @property
    def _threads(self) -> list[DaemonThread]:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.reads -= 1
        if not self.reads:
            self._new_memory()
        return self._list

    @_threads.setter
    def _threads(self, threads: list[DaemonThread]) -> None:
        self._list = threads


def test_a_child_that_is_forked_while_workers_are_started_runs_alone() -> None:
    pool = MovedPool(3)
    pool.prepare()
    pool.reads = 2  # the second one is in `_start`
    pool.run(0, 0)
    assert pool.calls == [True] and not pool._list
    pool.run(0, 0)
    assert pool.calls == [True, False] and len(pool._list) == 2
    pool.close()


def test_workers_that_were_ended_half_are_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, out = Pool(3), np.zeros(5, np.int64)
    run = adding(pool, out)
    run.run(ZERO)
    stop = pool.prepare().stop

    def interrupted(address: int) -> None:
        stop(address)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool._native, "stop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool._dismiss()
    monkeypatch.undo()
    run.run(ZERO)
    assert out.tolist() == [2] * 5 and len(pool._threads) == 2
    pool.close()


def test_a_close_that_is_interrupted_leaves_no_run_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, out = Pool(3), np.zeros(1, np.int64)
    run = adding(pool, out)
    run.run(ZERO)
    threads, stop = list(pool._threads), pool.prepare().stop

    def interrupted(address: int) -> None:
        stop(address)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool._native, "stop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    monkeypatch.undo()
    assert all(thread.join(60) for thread in threads)
    run.run(ZERO)
    pool.close()
    run.run(ZERO)
    assert out[0] == 3


def test_a_close_ends_the_threads_and_gives_the_lock_and_the_memory_back() -> None:
    pool, out = Pool(3), np.zeros(1, np.int64)
    adding(pool, out).run(ZERO)
    pool._start()
    threads, memory = list(pool._threads), weakref.ref(pool._memory)
    assert len(threads) == 2
    pool.close()
    assert not pool._threads and not any(thread.is_alive() for thread in threads)
    del threads
    gc.collect()
    assert memory() is None
    free: list[bool] = []

    def take() -> None:
        free.append(pool.lock.acquire(timeout=60))
        pool.lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(60)
    assert free == [True]


def test_a_pool_that_is_busy_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that never returns does not keep the process."""
    monkeypatch.setattr(pool_module, "_JOIN_SECONDS", 0.01)
    pool = Pool(2)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with pool.lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    pool.close()
    assert not pool._closed
    done.set()
    thread.join(60)
    pool.close()
    assert pool._closed


def test_a_handler_that_comes_while_memory_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may prepare the pool, reserve more, or both: what it was given stays, and is not less."""
    made, before = Pool._made_memory, Pool._new_buffers
    pool, addresses = Pool(2), list[int]()

    def prepares(self: Pool, *sizes: int):
        monkeypatch.setattr(Pool, "_made_memory", made)
        found = made(self, *sizes)
        self.prepare()
        addresses.append(self._address)
        return found

    monkeypatch.setattr(Pool, "_made_memory", prepares)
    pool.prepare()
    assert addresses == [pool._address]

    def reserves(self: Pool, *sizes: int):
        monkeypatch.setattr(Pool, "_made_memory", made)
        found = made(self, *sizes)
        self._scratch_bytes = 500
        return found

    pool.reserve(100, 0)
    monkeypatch.setattr(Pool, "_made_memory", reserves)
    pool._new_memory()
    assert contexts(pool)[0, Context.SCRATCH_BYTES] == 500

    def reserves_more(self: Pool, *sizes: int):
        monkeypatch.setattr(Pool, "_new_buffers", before)
        found = before(self, *sizes)
        self.reserve(2000, 0)
        return found

    monkeypatch.setattr(Pool, "_new_buffers", reserves_more)
    pool.reserve(1000, 0)
    assert contexts(pool)[0, Context.SCRATCH_BYTES] == 2000

    def moves(self: Pool, *sizes: int):
        monkeypatch.setattr(Pool, "_new_buffers", before)
        found = before(self, *sizes)
        self._new_memory()
        return found

    monkeypatch.setattr(Pool, "_new_buffers", moves)
    pool.reserve(3000, 0)
    rows = contexts(pool)
    assert rows[0, Context.SCRATCH_BYTES] == 3000
    assert (rows[:, Context.POOL] == pool._address).all()


def neighbors(pool: Pool, word: PoolState) -> np.ndarray:
    """The two halves of a word, of which the native code counts in the first."""
    return pool._words(word).view(np.uint32)


def test_a_child_has_new_memory_and_no_threads() -> None:
    pool = Pool(3)
    pool._reset_after_fork()
    assert pool._native is None, "one without memory gets none"
    pool.prepare()
    before, abandoned = pool._memory, len(POOLS.abandoned)
    pool._threads, pool._is_starting, pool._closed = [threading.Thread()], True, True  # type: ignore[list-item]
    pool._reset_after_fork()
    assert pool._threads == [] and not pool._is_starting and not pool._closed
    assert pool._memory is not before and len(POOLS.abandoned) == abandoned
    assert pool._words(PoolState.ACTIVE).item() == 1


@pytest.mark.parametrize(("run", "state"), [(4, 0), (5, 0), (5, ErrorState.FAILED)])
def test_a_child_that_is_forked_in_a_run(run: int, state: int) -> None:
    """It returns to the old memory, where it is alone, and its run is ended by an error."""
    pool = Pool(3)
    pool.prepare()
    pool._words(PoolState.ACTIVE)[:] = 3
    pool._words(PoolState.RUN)[:] = run
    pool._words(PoolState.ERROR + ErrorRecord.STATE)[:] = state
    counters = (PoolState.GENERATION, PoolState.FINISHED)
    for word in counters:
        neighbors(pool, word)[:] = 41, 9
    old, rows = (pool._memory, pool._buffers), contexts(pool)
    words = pool._memory.view(np.int64)
    with pool.lock:
        pool._reset_after_fork()
    kept = POOLS.abandoned.pop()
    assert kept[0] is old[0] and kept[1] is old[1]  # type: ignore[index]
    assert pool._memory is not old[0] and words[PoolState.ACTIVE] == 1
    ends = run == 5 and not state
    assert words[PoolState.ERROR + ErrorRecord.STATE] == (ErrorState.INTERRUPTED if ends else state)
    assert rows[:, Context.ALERT].tolist() == [int(ends), 0, 0]
    for word in counters:
        assert words[word : word + 1].view(np.uint32).tolist() == [41 + ends, 9]
    if ends:
        assert words[PoolState.RAISED_TYPE] == id(RuntimeError)
        address = int(words[PoolState.RAISED_VALUE])
        error = ctypes.cast(address, ctypes.py_object).value
        assert isinstance(error, RuntimeError) and "forked by a signal handler" in str(error)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(error))
    else:
        assert not words[PoolState.RAISED_TYPE] and not words[PoolState.RAISED_VALUE]


def test_a_pool_without_native_code() -> None:
    with pytest.raises(RuntimeError, match="once `reserve` or `prepare` was called"):
        Pool(1)._enter(0)


def test_a_worker_enters_the_native_code() -> None:
    memory, calls = np.zeros(8, np.int64), list[tuple[int, int]]()
    pool_module._work(lambda *words: calls.append(words), memory, 3)
    assert calls == [(memory.ctypes.data, 3)]


@pytest.mark.parametrize("count", [1, 3])
def test_a_pool_that_was_not_prepared_says_so(count: int) -> None:
    pool = Pool(count)
    assert pool._address == 0
    with pool.lock, pytest.raises(RuntimeError, match="`reserve` or `prepare`"):
        pool.run(0, 0, alone=True)
