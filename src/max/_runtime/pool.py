"""The worker pool: threads that run a program together, and sleep in native code between runs.

Worker 0 is the calling thread. The others are daemon threads that enter native code once and stay there without
Python's lock. A pool's native memory is allocated when it first runs, and again in a forked child.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from max._abi import (
    CONTEXT_BYTES,
    LINE_PAIR_BYTES,
    POOL_BYTES,
    WORD_BYTES,
    Context,
    ErrorRecord,
    ErrorState,
    PoolState,
)
from max._host import usable_cpus
from max._runtime import interrupts, jit, native, platform
from max._runtime.cache import content_key

logger = logging.getLogger("max.runtime")

# pauses (about 10 ns each) before a waiting worker sleeps. Between runs the caller works in Python; within a
# run the others arrive soon, and a wake-up costs more than the wait
IDLE_SPINS, RUN_SPINS = 2000, 20_000
YIELD_EVERY = 64  # pauses, a power of two: a waiting worker must not keep another off its core
_JOIN_SECONDS = 5.0  # how long `close` waits for a run, and for each thread

_RUN = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
)
_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
_STOP = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_RESTORE = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
    ("PyErr_Restore", ctypes.pythonapi)
)
_NESTED = (
    "a signal handler cannot run a model while the thread that it interrupts is running one; "
    "note what came, and run it later"
)


class _Functions:
    """The native functions for one way of parking."""

    def __init__(self, parking: str) -> None:
        machine = jit.Machine.host()
        primitives = platform.primitives(PoolState.PARKING.offset, parking)
        text = native.native_ir(primitives, machine.triple)
        unit = jit.Unit(f"pool-{content_key(text)}", native.EXPORTS, lambda: text, optimize=False)
        symbols = primitives.symbols | _python_functions()
        addresses = jit.jit_for(machine).load([unit], symbols)[unit.key]
        self.run = _RUN(addresses["max_run"])
        self.worker = _WORKER(addresses["max_worker"])
        self.stop = _STOP(addresses["max_stop"])
        self.nudge = _STOP(addresses["max_nudge"])
        self.barrier = addresses["max_barrier"]
        self.poll = addresses["max_poll"]
        self.clock_hz = primitives.clock_hz


def _python_functions() -> dict[str, int]:
    """Addresses of the Python functions that the native part calls."""
    functions = {name: getattr(ctypes.pythonapi, name) for name in native.PYTHON_FUNCTIONS}
    return {name: ctypes.cast(f, ctypes.c_void_p).value or 0 for name, f in functions.items()}


_functions: dict[str, _Functions] = {}


class Pool:
    """A team of workers.

    Args:
        num_threads: The number of workers, the calling thread included; may exceed the number of cores.
        parking: How idle workers sleep, as in ``MAX_PARKING``; default: that flag.

    Raises:
        ValueError: ``num_threads`` is below 1, or the parking does not exist here.
    """

    def __init__(self, num_threads: int, parking: str | None = None) -> None:
        if num_threads < 1:
            raise ValueError(f"a pool of {num_threads} threads; 1 or more would fit")
        self.num_threads = num_threads
        self.parking = platform.parking_mode(parking)
        self._native: _Functions | None = None
        # `_native.run`, without the look-up of an attribute in each run
        self._enter: Callable[[int, int, int, bool], int] = _not_prepared
        self._scratch_bytes = 0
        self._num_slots = 0
        # reentrant: a signal handler that starts a run inside a run gets an error instead of a deadlock
        self._lock = threading.RLock()
        self._buffers_lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._finalizer: weakref.finalize[..., Any] | None = None
        _pools.add(self)
        interrupts.watch(self)

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held while a program runs: a pool runs one at a time."""
        return self._lock

    @property
    def clock_hz(self) -> int:
        """Ticks per second of the times in a profile."""
        return self.prepare().clock_hz

    def prepare(self) -> _Functions:
        """Loads the native code and allocates the native memory, once; `reserve` calls it.

        A new pool has neither. If the code is not on the disk, LLVM takes 10 ms to compile it; a cold start spends them
        while other threads compile its kernels.
        """
        if self._native is None:
            with self._lock:
                if self.parking not in _functions:
                    _functions[self.parking] = _Functions(self.parking)
                if self._native is None:
                    self._new_memory()
                    self._native = _functions[self.parking]
                    self._enter = self._native.run
        return self._native

    def reserve(self, scratch_bytes: int, num_slots: int) -> None:
        """Grows the workers' scratch memory and argument slots if needed; pools never shrink.

        Args:
            scratch_bytes: Scratch memory of one worker.
            num_slots: Slots of the longest launch.
        """
        with self._lock:
            self.prepare()
            if scratch_bytes > self._scratch_bytes or num_slots > self._num_slots:
                if self.run_number() % 2:
                    raise RuntimeError(_NESTED)
                self._scratch_bytes = max(self._scratch_bytes, scratch_bytes)
                self._num_slots = max(self._num_slots, num_slots)
                with self._buffers_lock:
                    self._place_buffers()

    def run(self, program: int, values: int, alone: bool = False) -> int:
        """Runs a program with all workers; the caller is worker 0.

        Args:
            program: Address of a program as :mod:`max._runtime.program` lays it out.
            values: Address of its values.
            alone: Whether the caller is the only worker: the others are not woken.

        Returns:
            The error state. The caller holds :attr:`lock`, which also guards the error record.

        Raises:
            RuntimeError: A signal handler called it inside a run.
        """
        if not alone and len(self._threads) != self.num_threads - 1:
            self._start()
        if not interrupts.awake:
            interrupts.wake()
        state = self._enter(self._address, program, values, alone)
        if state == ErrorState.NESTED:
            raise RuntimeError(_NESTED)
        return state

    def error_record(self) -> np.ndarray:
        """A copy of the error record of the last run: the ``int64`` words of `ErrorRecord`."""
        return self._words(PoolState.ERROR, ErrorRecord.END).copy()

    def raise_interruption(self) -> None:
        """Raises the error that ended the last run early: a signal handler's, or the one for an event."""
        raised = self._words(PoolState.RAISED_TYPE, 3)
        type_, value, trace = (int(word) for word in raised)
        raised[:] = 0
        if type_:
            # Python takes the references back, and raises
            _RESTORE(type_, value or None, trace or None)
        if held_error := int(self.error_record()[ErrorRecord.VALUES]):
            error: Any = ctypes.cast(held_error, ctypes.py_object).value
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(error))
            raise error
        raise interrupts.ExecutionInterrupted("the execution was interrupted: its event was set")

    def run_number(self) -> int:
        """Twice the runs begun, less 1 during a run."""
        return 0 if self._native is None else int(self._words(PoolState.RUN)[0])

    def caller(self) -> int:
        """The thread that began the last run, as `threading.get_ident` has it."""
        return int(self._words(PoolState.CALLER).view(np.uint64)[0])

    def nudge(self, run: int, check_signals: bool, interrupt: bool) -> None:
        """Makes the workers of a run call ``max_poll``.

        Args:
            run: Its number; other runs ignore the call.
            check_signals: Whether the calling thread lets Python handle signals.
            interrupt: Whether the run ends.
        """
        if (
            not check_signals
            and not interrupt
            and not self._words(PoolState.ERROR + ErrorRecord.STATE)[0]
        ):
            return
        native = self.prepare()
        with self._buffers_lock:
            if check_signals:
                self._words(PoolState.CHECK)[0] = run
            if interrupt:
                self._words(PoolState.INTERRUPT)[0] = run
            native.nudge(self._address)

    def close(self) -> None:
        """Ends the worker threads; later runs use the calling thread only."""
        # a run that never returns must not keep the process from exiting
        locked = self._lock.acquire(timeout=_JOIN_SECONDS)
        try:
            if locked:
                self._closed = True
                self._dismiss()
                if self._native is not None:
                    self._words(PoolState.ACTIVE)[0] = 1
        finally:
            if locked:
                self._lock.release()

    # Native memory -----------------------------------------------------------------------------

    def _new_memory(self) -> None:
        with self._buffers_lock:
            self._make_memory()

    def _make_memory(self) -> None:
        """Allocates the native state of the pool and initialises its words, parking and buffers."""
        self._memory = memory = platform.allocate(POOL_BYTES, LINE_PAIR_BYTES)
        memory[:] = 0
        self._address = memory.ctypes.data
        platform.init_parking(self._address + PoolState.PARKING.offset, self.parking)
        crowded = self.num_threads > usable_cpus()
        self._words(PoolState.IDLE_SPINS)[0] = IDLE_SPINS
        self._words(PoolState.RUN_SPINS)[0] = IDLE_SPINS if crowded else RUN_SPINS
        self._words(PoolState.YIELD_MASK)[0] = YIELD_EVERY - 1
        self._words(PoolState.ACTIVE)[0] = 1 if self._closed else self.num_threads
        self._place_buffers()
        if self._finalizer is not None:
            self._finalizer.detach()
        # a garbage-collected pool stops its workers, which keep the memory alive until then
        finalizer = weakref.finalize(self, _stop, _functions[self.parking].stop, memory)
        finalizer.atexit = False
        self._finalizer = finalizer

    def _words(self, field: int, count: int = 1) -> np.ndarray:
        """Words of the pool's struct, from a field of `PoolState` on."""
        return self._memory.view(np.int64)[field : field + count]

    def _place_buffers(self) -> None:
        """Allocates contexts, argument slots and scratch memory, on separate cache lines for each worker."""
        line, workers = LINE_PAIR_BYTES, self.num_threads
        stride = -(-self._num_slots * WORD_BYTES // line) * line + line
        # one extra line pair: equal offsets of two workers are then no power of two apart (cache sets)
        scratch_stride = -(-self._scratch_bytes // line) * line + line
        self._contexts = platform.allocate(workers * CONTEXT_BYTES, line)
        self._contexts[:] = 0
        native = _functions[self.parking]
        self._args = platform.allocate(workers * stride, line)
        self._scratch = platform.allocate(workers * scratch_stride, line)
        fields = self._contexts.view(np.int64).reshape(workers, -1)
        for worker in range(workers):
            row = fields[worker]
            row[Context.WORKER] = worker
            row[Context.WORKERS] = workers
            row[Context.BARRIER] = native.barrier
            row[Context.POOL] = self._address
            row[Context.ERROR] = self._address + PoolState.ERROR.offset
            row[Context.SCRATCH] = self._scratch.ctypes.data + worker * scratch_stride
            row[Context.SCRATCH_BYTES] = self._scratch_bytes
            row[Context.POLL] = native.poll
            row[Context.ARGS] = self._args.ctypes.data + worker * stride
        self._words(PoolState.CONTEXTS)[0] = self._contexts.ctypes.data

    # Threads -----------------------------------------------------------------------------------

    def _start(self) -> None:
        """Starts the missing worker threads; a closed pool starts none."""
        if self._closed:
            return
        native = self.prepare()
        try:
            for worker in range(len(self._threads) + 1, self.num_threads):
                thread = threading.Thread(
                    target=_work,
                    args=(native.worker, self._memory, worker),
                    name=f"max-worker-{worker}",
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)
        except BaseException:
            # the system refused a thread, or Ctrl-C: the next run starts them again
            self._dismiss()
            raise

    def _dismiss(self) -> None:
        """Ends the worker threads and allocates new memory for the next ones."""
        threads, self._threads = self._threads, []
        if threads:
            self.prepare().stop(self._address)
            for thread in threads:
                thread.join(_JOIN_SECONDS)
            self._new_memory()

    def _reset_after_fork(self) -> None:
        """Gives the pool of a child process new locks and memory, and no threads."""
        # the threads exist only in the parent; its memory and lock may be in the middle of a run
        self._lock = threading.RLock()
        self._buffers_lock = threading.Lock()
        self._threads = []
        self._closed = False
        if self._native is not None:
            self._new_memory()


def _not_prepared(*_: object) -> int:
    raise RuntimeError("a pool runs programs once `reserve` or `prepare` was called")


def _work(worker: Callable[[int, int], None], memory: np.ndarray, index: int) -> None:
    """A worker thread: enters native code and returns when the pool stops."""
    worker(memory.ctypes.data, index)


def _stop(stop: Callable[[int], None], memory: np.ndarray) -> None:
    stop(memory.ctypes.data)


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_shared: dict[tuple[int, str], Pool] = {}


def shared_pool(num_threads: int | None = None) -> Pool:
    """The process-wide pool with a number of workers.

    Args:
        num_threads: The number of workers; default: ``MAX_NUM_THREADS``, or one per core that the process may use.
    """
    count = platform.default_num_threads() if num_threads is None else num_threads
    key = (count, platform.parking_mode())
    if (pool := _shared.get(key)) is not None:
        return pool
    return _shared.setdefault(key, Pool(count))


def _close_all() -> None:
    for pool in list(_pools):
        pool.close()


def _reset_all() -> None:
    for pool in list(_pools):
        pool._reset_after_fork()  # pyright: ignore[reportPrivateUsage]


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
