"""The worker pool: threads that run a program together, and sleep in native code between runs.

Worker 0 is the calling thread. The others are daemon threads that enter native code once and stay there without
Python's lock. A pool's native memory is allocated when it first runs, and again in a forked child.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
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
from max._backends.cpu.runtime import jit, native, platform
from max._host import host_memory, interrupts
from max._host.disk_cache import content_key
from max._host.machine import usable_cpus
from max._host.reentry import ReentryError, in_child, reentrant_lock
from max._host.threads import DaemonThread

logger = logging.getLogger("max.runtime")

# pauses (about 10 ns each) before a waiting worker sleeps. Between runs the caller works in Python; within a
# run the others arrive soon, and a wake-up costs more than the wait
IDLE_SPINS, RUN_SPINS = 2000, 20_000
YIELD_EVERY = 64  # pauses, a power of two: a waiting worker must not keep another off its core
_JOIN_SECONDS = 5.0  # how long `close` waits for a run, and for each thread

_RUN = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 5, ctypes.c_int64)
_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
_STOP = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_RESTORE = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
    ("PyErr_Restore", ctypes.pythonapi)
)
_NESTED = (
    "a signal handler cannot run a model while the thread that it interrupts is running one; "
    "note what came, and run it later"
)
NESTED_SECONDS = 0.2
"""How long a run waits for its pool inside a run on another pool."""
BUSY = (
    "a signal handler or finalizer cannot run a model on workers that are busy while the thread that it interrupts "
    "uses others; note what came, and run it later"
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
        self._address = 0
        # `_native.run`, without the look-up of an attribute in each run
        self._enter: Callable[..., int] = _not_prepared
        self._scratch_bytes = 0
        self._num_slots = 0
        # reentrant: a signal handler that starts a run inside a run gets an error instead of a deadlock
        self._lock = reentrant_lock()
        self._buffers_lock = reentrant_lock()
        self._threads: list[DaemonThread] = []
        self._is_starting = False
        self._closed = False
        self._finalizer: weakref.finalize[..., Any] | None = None
        POOLS.add(self)
        interrupts.WATCH.watch(self)

    @property
    def lock(self) -> threading.RLock:
        """Held while a program runs: a pool runs one at a time."""
        return self._lock

    @property
    def is_held(self) -> bool:
        """Whether this thread holds the lock."""
        return self._lock._is_owned()  # type: ignore[attr-defined]

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
            # before the lock, under which nothing is compiled: a second load finds the code of the first
            if self.parking not in _functions:
                _functions[self.parking] = _Functions(self.parking)
            with self._lock:
                if self._native is None:
                    self._new_memory(first=True)
        assert self._native is not None
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
                    raise ReentryError(_NESTED)
                self._scratch_bytes = max(self._scratch_bytes, scratch_bytes)
                self._num_slots = max(self._num_slots, num_slots)
                with self._buffers_lock:
                    self._place_buffers()

    def run(
        self,
        program: int,
        bases: int | bytes,
        index: int | None = None,
        offsets: int | None = None,
        alone: bool = False,
    ) -> int:
        """Runs a program with all workers; the caller is worker 0.

        Args:
            program: Address of a program as :mod:`max._backends.program` lays it out.
            bases: Its values, or the bases of its values if there is an index: an address, or the words themselves.
            index: Address of the number of each value's base.
            offsets: Address of what is added to each base.
            alone: Whether the caller is the only worker: the others are not woken.

        Returns:
            The error state; the program has the error record. The caller holds :attr:`lock`.

        Raises:
            RuntimeError: A signal handler called it inside a run.
        """
        if not alone and (self._is_starting or len(self._threads) != self.num_threads - 1):
            alone = not self._start()
        if not interrupts.WATCH.awake:
            interrupts.WATCH.wake()
        state = self._enter(self._address, program, bases, index, offsets, alone)
        if state == ErrorState.NESTED:
            raise ReentryError(_NESTED)
        return state

    def run_number(self) -> int:
        """Twice the runs begun, less 1 during a run."""
        return 0 if self._native is None else self._words(PoolState.RUN).item()

    def caller(self) -> int:
        """The thread that began the last run, as `threading.get_ident` has it."""
        return self._words(PoolState.CALLER).view(np.uint64).item()

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
            and not self._words(PoolState.ERROR + ErrorRecord.STATE).item()
        ):
            return
        native = self.prepare()
        with self._buffers_lock:
            if check_signals:
                self._words(PoolState.CHECK)[:] = run
            if interrupt:
                self._words(PoolState.INTERRUPT)[:] = run
            native.nudge(self._address)

    def close(self) -> None:
        """Ends the worker threads; later runs use the calling thread only."""
        # a run that never returns must not keep the process from exiting
        locked = self._lock.acquire(timeout=_JOIN_SECONDS)
        try:
            if locked:
                self._closed = True
                self._dismiss()
        finally:
            if locked:
                self._lock.release()

    # Native memory -----------------------------------------------------------------------------

    def _new_memory(self, first: bool = False) -> None:
        """Gives the pool new native memory.

        Args:
            first: Only if it has none; a signal handler may have given it some since the last check.
        """
        with self._buffers_lock:
            while True:
                sizes = self._scratch_bytes, self._num_slots
                memory, address, buffers = self._made_memory(*sizes)
                native = _functions[self.parking]
                # a signal handler may run a model before and after these lines, but not between them
                if first and self._native is not None:
                    return
                if sizes == (self._scratch_bytes, self._num_slots):
                    self._memory, self._address, self._buffers = memory, address, buffers
                    self._native, self._enter = native, native.run
                    break
            if self._finalizer is not None:
                self._finalizer.detach()
            # a garbage-collected pool stops its workers, which keep the memory alive until then
            finalizer = weakref.finalize(self, _stop, native.stop, memory)
            finalizer.atexit = False
            self._finalizer = finalizer

    def _made_memory(
        self, scratch_bytes: int, num_slots: int
    ) -> tuple[np.ndarray, int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The native state of a pool, with its address and buffers."""
        memory = host_memory.allocate(POOL_BYTES, LINE_PAIR_BYTES)
        memory[:] = 0
        address = memory.ctypes.data
        platform.init_parking(address + PoolState.PARKING.offset, self.parking)
        crowded = self.num_threads > usable_cpus()
        words = memory.view(np.int64)
        words[PoolState.IDLE_SPINS] = IDLE_SPINS
        words[PoolState.RUN_SPINS] = IDLE_SPINS if crowded else RUN_SPINS
        words[PoolState.YIELD_MASK] = YIELD_EVERY - 1
        # `_start` adds the other workers: a child that is forked in `run` finds none
        words[PoolState.ACTIVE] = 1
        buffers = self._new_buffers(address, scratch_bytes, num_slots)
        words[PoolState.CONTEXTS] = buffers[0].ctypes.data
        return memory, address, buffers

    def _words(self, field: int, count: int = 1) -> np.ndarray:
        """Words of the pool's struct, from a field of `PoolState` on."""
        return self._memory.view(np.int64)[field : field + count]

    def _place_buffers(self) -> None:
        """Allocates contexts, argument slots and scratch memory; again if a signal handler enlarges them meanwhile."""
        while True:
            sizes = self._scratch_bytes, self._num_slots
            pool = self._address
            buffers = self._new_buffers(pool, *sizes)
            contexts, words = buffers[0].ctypes.data, self._words(PoolState.CONTEXTS)
            if pool == self._address and sizes == (self._scratch_bytes, self._num_slots):
                break
        words[:] = contexts
        self._buffers = buffers

    def _new_buffers(
        self, pool: int, scratch_bytes: int, num_slots: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Contexts, argument slots and scratch memory, on separate cache lines for each worker."""
        line, workers = LINE_PAIR_BYTES, self.num_threads
        stride = -(-num_slots * WORD_BYTES // line) * line + line
        # one extra line pair: equal offsets of two workers are then no power of two apart (cache sets)
        scratch_stride = -(-scratch_bytes // line) * line + line
        contexts = host_memory.allocate(workers * CONTEXT_BYTES, line)
        contexts[:] = 0
        native = _functions[self.parking]
        args = host_memory.allocate(workers * stride, line)
        scratch = host_memory.allocate(workers * scratch_stride, line)
        fields = contexts.view(np.int64).reshape(workers, -1)
        for worker in range(workers):
            row = fields[worker]
            row[Context.WORKER] = worker
            row[Context.WORKERS] = workers
            row[Context.BARRIER] = native.barrier
            row[Context.POOL] = pool
            row[Context.ERROR] = pool + PoolState.ERROR.offset
            row[Context.SCRATCH] = scratch.ctypes.data + worker * scratch_stride
            row[Context.SCRATCH_BYTES] = scratch_bytes
            row[Context.POLL] = native.poll
            row[Context.ARGS] = args.ctypes.data + worker * stride
        return contexts, args, scratch

    # Threads -----------------------------------------------------------------------------------

    def _start(self) -> bool:
        """Starts the missing worker threads; a closed pool starts none.

        Returns:
            Whether they run; not in a closed pool, a signal handler, or a forked child that interrupted this method.
        """
        if self._closed or self._is_starting:
            return False
        native = self.prepare()
        try:
            self._is_starting = True
            if self._words(PoolState.STOP).item():
                self._new_memory()  # an interrupted `_dismiss` made none
            # a child that is forked from here on has other memory, and another list
            memory = self._memory
            threads = self._threads
            if memory is not self._memory:
                return False
            for worker in range(len(threads) + 1, self.num_threads):
                thread = DaemonThread(
                    _work, native.worker, memory, worker, name=f"max worker {worker}"
                )
                # first in the list: an interrupt after its start must not leave it on the memory
                threads.append(thread)
                thread.start()
            memory.view(np.int64)[PoolState.ACTIVE] = self.num_threads
        except BaseException:
            # the system refused a thread, or Ctrl-C: the next run starts them again
            self._dismiss()
            raise
        finally:
            self._is_starting = False
        return memory is self._memory

    def _dismiss(self) -> None:
        """Ends the worker threads and allocates new memory for the next ones."""
        threads, self._threads = self._threads, []
        if threads:
            self.prepare().stop(self._address)
            self._new_memory()
            for thread in threads:
                thread.join(_JOIN_SECONDS)

    def _reset_after_fork(self) -> None:
        """Gives the pool of a child process new memory, and no threads."""
        # the threads exist only in the parent; its memory may be in the middle of a run
        self._threads = []
        self._is_starting = self._closed = False
        if self._native is not None:
            if self.is_held:
                # the thread may return to a run, or begin one on the memory that it has in hand
                POOLS.abandoned.append((self._memory, self._buffers))
                self._words(PoolState.ACTIVE)[:] = 1
                if self.run_number() % 2:
                    self._abandon_run()
            self._new_memory()

    def _abandon_run(self) -> None:
        """In a child that a signal handler forked in a run of this thread: ends the run with an error.

        The child returns to the run, on the memory of before. The other workers exist only in the parent.
        """
        error_words = self._words(PoolState.ERROR, ErrorRecord.END)
        if error_words[ErrorRecord.STATE]:
            return
        error = RuntimeError(
            "the process was forked by a signal handler while the model ran; run it again"
        )
        for place, part in ((PoolState.RAISED_TYPE, RuntimeError), (PoolState.RAISED_VALUE, error)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
            self._words(place)[:] = id(part)
        error_words[ErrorRecord.STATE] = ErrorState.INTERRUPTED
        for place in (PoolState.GENERATION, PoolState.FINISHED):
            self._words(place).view(np.uint32)[:1] += 1
        self._buffers[0].view(np.int64)[Context.ALERT] = 1


def raise_interruption(error_addresses: Sequence[int], held_error: int) -> None:
    """Raises the error that ended a run early: a signal handler's, or the one for an event.

    Args:
        error_addresses: The addresses of type, value and traceback of the handler's, 0 if absent.
        held_error: The address of the error of a kernel in plain Python, or 0.
    """
    type_, value, trace = error_addresses
    if type_:
        # Python takes the references back, and raises
        _RESTORE(type_, value, trace)
    if held_error:
        error: Any = ctypes.cast(held_error, ctypes.py_object).value
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(error))
        raise error
    raise interrupts.ExecutionInterrupted("the execution was interrupted: its event was set")


def _not_prepared(*_: object) -> int:
    raise RuntimeError("a pool runs programs once `reserve` or `prepare` was called")


def _work(worker: Callable[[int, int], None], memory: np.ndarray, index: int) -> None:
    """A worker thread: enters native code and returns when the pool stops."""
    worker(memory.ctypes.data, index)


def _stop(stop: Callable[[int], None], memory: np.ndarray) -> None:
    stop(memory.ctypes.data)


class Pools:
    """The pools of a process: those that sessions share, and all that exist."""

    def __init__(self) -> None:
        self._pools: weakref.WeakSet[Pool] = weakref.WeakSet()
        self._shared: dict[tuple[int, str], Pool] = {}
        self.several = False
        """Whether more than one pool was made."""
        self.abandoned: list[object] = []
        """The memory of pools whose workers did not stop: they may still read it."""

    def add(self, pool: Pool) -> None:
        """Registers a new pool."""
        self.several = self.several or len(self._pools) > 0
        self._pools.add(pool)

    def holds_another(self, pool: Pool) -> bool:
        """Whether this thread holds the lock of another pool: a signal handler or finalizer runs a model in a run."""
        return any([other is not pool and other.is_held for other in list(self._pools)])

    def shared_pool(self, num_threads: int | None = None) -> Pool:
        """See `shared_pool`."""
        count = platform.default_num_threads() if num_threads is None else num_threads
        key = (count, platform.parking_mode())
        if (pool := self._shared.get(key)) is not None:
            return pool
        return self._shared.setdefault(key, Pool(count))

    def close(self) -> None:
        """Stops the workers of all pools."""
        for pool in list(self._pools):
            pool.close()

    def reset_after_fork(self) -> None:
        """In a forked child: no pool has workers."""
        for pool in list(self._pools):
            pool._reset_after_fork()  # pyright: ignore[reportPrivateUsage]


POOLS = Pools()
"""The pools of this process."""


def shared_pool(num_threads: int | None = None) -> Pool:
    """The process-wide pool with a number of workers.

    Args:
        num_threads: The number of workers; default: ``MAX_NUM_THREADS``, or one per core that the process may use.
    """
    return POOLS.shared_pool(num_threads)


atexit.register(POOLS.close)
in_child(POOLS.reset_after_fork)
