"""Runs within runs, and runs that a signal ended: the order in which they wait, and the errors that they raise."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import traceback

import numpy as np
import pytest

from max._abi import RAISED_WORDS, ErrorRecord, ErrorState, ProgramHeader
from max._backends.cpu.runtime import pool as pools
from max._backends.cpu.runtime.executor import Executor
from max._backends.cpu.runtime.pool import Pool
from max._backends.program import KernelRunError, Launch, Program
from max._host.interrupts import ExecutionInterrupted
from max._host.reentry import ReentryError
from tests.runtime.ir_kernels import entry

ZERO = np.zeros(1, np.int64)


def counting(pool: Pool, out: np.ndarray) -> Executor:
    """Adds 1 to each element."""
    return Executor(
        pool, Program([Launch(entry("count"), [(0, out.ctypes.data), (0, out.size)])], 1)
    )


def is_free(pool: Pool) -> bool:
    """Whether another thread can take the lock."""
    found: list[bool] = []

    def take() -> None:
        found.append(pool.lock.acquire(blocking=False))
        if found[-1]:
            pool.lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(60)
    return found == [True]


def test_a_run_inside_a_run_of_another_pool() -> None:
    outer, inner, out = Pool(2), Pool(2), np.zeros(3, np.int64)
    run = counting(inner, out)
    with outer.lock:
        for count in (1, 2):
            run.run(ZERO)
            assert out.tolist() == [count] * 3 and run.runs == count and is_free(inner)
        assert not is_free(outer)
    assert is_free(outer)


def test_a_run_inside_a_run_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool stays that of its thread, which may wait for the pool of this one."""
    monkeypatch.setattr(pools, "NESTED_SECONDS", 0.05)
    outer, inner, out = Pool(1), Pool(1), np.zeros(3, np.int64)
    run = counting(inner, out)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with inner.lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    with outer.lock:
        begin = time.monotonic()
        with pytest.raises(ReentryError, match="workers that are busy"):
            run.run(ZERO)
        assert time.monotonic() - begin > 0.04
    assert not is_free(inner) and not out.any()
    # without another pool it waits
    thread_of_run = threading.Thread(target=run.run, args=(ZERO,))
    thread_of_run.start()
    time.sleep(0.1)
    assert not out.any()
    done.set()
    thread.join(60)
    thread_of_run.join(60)
    assert out.tolist() == [1] * 3 and is_free(inner)


def interrupted(pool: Pool, raised: list[object], held: object = None) -> Executor:
    """An executor whose native function says that the run was interrupted, by what a handler or a kernel raised."""
    executor = counting(pool, np.zeros(1, np.int64))

    def enter(*_: object) -> int:
        words = executor._code[ProgramHeader.RAISED :][:RAISED_WORDS]
        for place, part in enumerate(raised):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
            words[place] = id(part)
        record = executor._code[ProgramHeader.ERROR :][: ErrorRecord.END]
        record[ErrorRecord.STATE] = ErrorState.INTERRUPTED
        record[ErrorRecord.VALUES] = 0
        if held is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
            record[ErrorRecord.VALUES] = id(held)
        return ErrorState.INTERRUPTED

    pool._enter = enter
    return executor


def test_what_a_signal_handler_raises_is_raised_once() -> None:
    pool, error = Pool(1), LookupError("of the handler")
    executor = interrupted(pool, [LookupError, error])
    with pytest.raises(LookupError) as caught:
        executor.run(ZERO)
    assert caught.value is error and executor.runs == 1 and is_free(pool)
    assert not executor._code[ProgramHeader.RAISED :][:RAISED_WORDS].any()
    executor = interrupted(pool, [])
    with pytest.raises(ExecutionInterrupted, match="its event was set"):
        executor.run(ZERO)
    executor, counts = interrupted(pool, [], held=error), list[int]()
    for _ in range(3):
        with pytest.raises(LookupError) as caught:
            executor.run(ZERO)
        assert caught.value is error and is_free(pool)
        error.__traceback__ = None
        counts.append(sys.getrefcount(error))
    assert counts[1] == counts[2], "the reference of the native code is given back"

    def raise_error() -> None:
        raise error

    try:
        raise_error()
    except LookupError as again:
        trace = again.__traceback__
    executor = interrupted(pool, [LookupError, error, trace])
    with pytest.raises(LookupError) as caught:
        executor.run(ZERO)
    assert caught.value is error
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "raise_error" in frames, "where the handler raised it"
    executor = interrupted(pool, [LookupError])
    with pytest.raises(LookupError):
        executor.run(ZERO)


def test_the_error_of_a_run_outlives_the_next_run() -> None:
    pool = Pool(1)
    executor = counting(pool, out := np.zeros(1, np.int64))
    enter = pool.prepare().run

    def fails(*words: object) -> int:
        record = executor._code[ProgramHeader.ERROR :][: ErrorRecord.END]
        record[ErrorRecord.RAISE], record[ErrorRecord.VALUES] = 5, 9
        return ErrorState.FAILED

    pool._enter = fails
    copied = executor._run_locked(ZERO.ctypes.data, None, None, False)
    assert copied is not None and copied[ErrorRecord.RAISE] == 5 and copied[ErrorRecord.VALUES] == 9
    with pytest.raises(KernelRunError, match="number 5"):
        executor.run(ZERO)
    pool._enter = enter
    executor._code[ProgramHeader.ERROR :][: ErrorRecord.END] = 0
    executor.run(ZERO)
    assert copied[ErrorRecord.RAISE] == 5 and out[0] == 1 and executor.runs == 3
