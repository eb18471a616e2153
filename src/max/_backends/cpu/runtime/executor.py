"""The executor: lays a program out as `max._abi` says, for the workers of a pool.

The workers execute it by native code (:mod:`max._backends.cpu.runtime.native`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from max._abi import (
    COUNTER_BYTES,
    RAISED_WORDS,
    ErrorRecord,
    ErrorState,
    Event,
    EventLog,
    Flag,
    Instruction,
    Opcode,
    ProfileRecord,
    ProgramHeader,
    SlotPair,
)
from max._backends.cpu.runtime import pool as pools
from max._backends.cpu.runtime.pool import Pool
from max._backends.program import (
    Jump,
    KernelRunError,
    NativeArray,
    Program,
    check_program,
    run_error_class,
)
from max._config import flags
from max._host import host_memory
from max._host.reentry import ReentryError

__all__ = ["Executor"]


class Executor:
    """A program laid out for the workers of a pool.

    Args:
        pool: The workers.
        program: The program.
        profile: Whether to measure each launch; default: ``MAX_PROFILE``.

    Raises:
        ValueError: A launch has no kernel, a negative number of phases, or a slot beyond the values.
    """

    def __init__(self, pool: Pool, program: Program, profile: bool | None = None) -> None:
        self.pool = pool
        self.program = program
        self.runs = 0
        check_program(program)
        launches = program.launches
        # nothing to share: such a program runs without waking the other workers
        self._serial = all(isinstance(launch, Jump) or launch.serial for launch in launches)
        # a counter for each phase of a launch
        self._counters = host_memory.allocate(
            sum(launch.phases for launch in launches) * COUNTER_BYTES
        )
        pairs = [pair for launch in launches for pair in launch.slots]
        self._slots = np.zeros((len(pairs), SlotPair.END), np.int64)
        self._slots[:, SlotPair.VALUE] = [value for value, _ in pairs]
        self._slots[:, SlotPair.ADDEND] = [addend for _, addend in pairs]
        profiled = flags.MAX_PROFILE if profile is None else profile
        self._profile = np.zeros((len(launches), ProfileRecord.END), np.int64) if profiled else None
        self._events: np.ndarray | None = None
        # native code writes it in a run
        self._values = np.zeros(max(program.num_values, 1), np.int64)
        self._code = self._lay_out()
        self._address = self._code.ctypes.data
        pool.reserve(
            program.scratch_bytes, max((len(launch.slots) for launch in launches), default=0)
        )

    def _lay_out(self) -> np.ndarray:
        """The program as native memory: a header, one `Instruction` per launch, and an end."""
        launches = self.program.launches
        size = ProgramHeader.END.offset + (len(launches) + 1) * Instruction.END.offset
        code = host_memory.allocate(size).view(np.int64)
        code[:] = 0
        code[ProgramHeader.COUNTERS] = self._counters.ctypes.data
        code[ProgramHeader.COUNTER_BYTES] = self._counters.size
        code[ProgramHeader.PROFILE] = 0 if self._profile is None else self._profile.ctypes.data
        code[ProgramHeader.VALUES] = self._values.ctypes.data
        code[ProgramHeader.NUM_VALUES] = self.program.num_values
        rows = code[ProgramHeader.END :].reshape(-1, Instruction.END)
        slots, counters = self._slots.ctypes.data, self._counters.ctypes.data
        # the last row has no launch: it ends the program
        for index, (row, launch) in enumerate(zip(rows, launches, strict=False)):
            row[Instruction.LAUNCH] = index
            if isinstance(launch, Jump):
                self._lay_out_jump(row, launch, index, rows, slots)
                slots += SlotPair.END.offset * len(launch.slots)
                continue
            row[Instruction.OPCODE] = Opcode.LAUNCH
            row[Instruction.FLAGS] = launch.barrier * Flag.BARRIER | launch.serial * Flag.SERIAL
            row[Instruction.KERNEL] = launch.kernel
            row[Instruction.SLOTS] = slots
            row[Instruction.NUM_SLOTS] = len(launch.slots)
            row[Instruction.COUNTERS] = counters
            slots += SlotPair.END.offset * len(launch.slots)
            counters += COUNTER_BYTES * launch.phases
        rows[-1, Instruction.OPCODE] = Opcode.END
        return code

    def _lay_out_jump(
        self, row: np.ndarray, jump: Jump, index: int, rows: np.ndarray, slots: int
    ) -> None:
        """Fills the instruction of a jump: target, predicate, and for `back` the range of counters to zero."""
        choice = jump.kind == "if_zero"
        row[Instruction.OPCODE] = Opcode.IF_ZERO if choice else Opcode.JUMP
        # a jump has no kernel: the field holds the address of its target
        row[Instruction.KERNEL] = rows.ctypes.data + jump.target * Instruction.END.offset
        row[Instruction.SLOTS] = slots
        if jump.kind == "back":
            phases = [launch.phases for launch in self.program.launches]
            before, inside = sum(phases[: jump.target]), sum(phases[jump.target : index])
            row[Instruction.FLAGS] = Flag.BARRIER
            row[Instruction.COUNTERS] = self._counters.ctypes.data + before * COUNTER_BYTES
            # the field of the number of slots holds the bytes of counters to zero
            row[Instruction.NUM_SLOTS] = inside * COUNTER_BYTES

    @property
    def clock_hz(self) -> int:
        """Ticks per second of the times in `ticks` and `events`."""
        return self.pool.clock_hz

    def run(self, values: np.ndarray, alone: bool = False) -> None:
        """Runs the program once.

        Args:
            values: int64 ``[program.num_values]``; the first element is 0. Kernels may write to it if the program
                passes its address.
            alone: Whether the calling thread is the only worker, as always where all launches are serial.

        Raises:
            KernelRunError: A kernel raised. The contents of what the program writes are then undefined; the pool can
                run other programs.
            ValueError: The values do not fit.
        """
        if (
            values.dtype != np.int64
            or values.shape != (self.program.num_values,)
            or not values.flags.c_contiguous
        ):
            raise ValueError(
                f"run: values of {values.dtype}{list(values.shape)}; "
                f"a contiguous int64[{self.program.num_values}] would fit"
            )
        if self.program.num_values and values[0] != 0:
            raise ValueError(f"run: values[0] is {values[0]}; it stands for the constant 0")
        self._run(values.ctypes.data, None, None, alone)

    def run_at(
        self, bases: bytes, index: NativeArray, offsets: NativeArray, alone: bool = False
    ) -> None:
        """Runs the program once with the values ``bases[index] + offsets``, of which the first is 0.

        Args:
            bases: Addresses, as `packed_words` packs them.
            index: The index of each value's base; not checked.
            offsets: The offset that is added to each base.
            alone: As for `run`.

        Raises:
            KernelRunError: See `run`.
        """
        # `_run`, without the time of two calls
        pool = self.pool
        if pools.POOLS.several:
            self._run(bases, index.address, offsets.address, alone)
            return
        with pool.lock:
            state = pool.run(
                self._address, bases, index.address, offsets.address, alone or self._serial
            )
            self.runs += 1
            record = self._error_record(state) if state else None
        if record is not None:
            raise self._error(record)

    def _run(self, bases: int | bytes, index: int | None, offsets: int | None, alone: bool) -> None:
        """Runs with the arguments of the native function `max_run`.

        Signal handlers and finalizers of this thread may run other programs, and this one, before and after the
        native function. They share nothing with it: it computes the values, and copies the error.
        """
        pool = self.pool
        if pools.POOLS.several and pools.POOLS.holds_another(pool):
            record = self._run_inside(bases, index, offsets, alone)
        else:
            with pool.lock:
                record = self._run_locked(bases, index, offsets, alone)
        if record is not None:
            raise self._error(record)

    def _run_locked(
        self, bases: int | bytes, index: int | None, offsets: int | None, alone: bool
    ) -> npt.NDArray[np.int64] | None:
        """Runs, the pool's lock held; returns the error record of a run that failed."""
        state = self.pool.run(self._address, bases, index, offsets, alone or self._serial)
        self.runs += 1
        return self._error_record(state) if state else None

    def _error_record(self, state: int) -> npt.NDArray[np.int64]:
        """The error record of a run that ended in a state other than 0, the pool's lock held."""
        # copied: a later run may overwrite it
        record = self._code[ProgramHeader.ERROR :][: ErrorRecord.END].copy()
        if state == ErrorState.INTERRUPTED:
            raised = self._code[ProgramHeader.RAISED :][:RAISED_WORDS]
            words, raised[:] = [int(word) for word in raised], 0
            pools.raise_interruption(words, int(record[ErrorRecord.VALUES]))
        return record

    def _run_inside(
        self, bases: int | bytes, index: int | None, offsets: int | None, alone: bool
    ) -> npt.NDArray[np.int64] | None:
        """Runs inside a run on another pool: two threads that wait for each other's pools would wait for ever."""
        lock = self.pool.lock
        try:
            if not lock.acquire(timeout=pools.NESTED_SECONDS):
                raise ReentryError(pools.BUSY)
            return self._run_locked(bases, index, offsets, alone)
        finally:
            try:
                lock.release()
            except RuntimeError:
                pass  # not acquired

    def set_addend(self, launch: int, slot: int, addend: int) -> None:
        """Replaces the addend of a slot, from the next run on.

        Args:
            launch: The number of the launch.
            slot: The number of its slot.
            addend: The constant that is added to the slot's value.
        """
        before = sum(len(other.slots) for other in self.program.launches[:launch])
        changed = self.program.launches[launch]
        slots = [*changed.slots]
        slots[slot] = (slots[slot][0], addend)
        launches = [*self.program.launches]
        launches[launch] = replace(changed, slots=slots)
        with self.pool.lock:
            self._slots[before + slot, 1] = addend
            self.program = replace(self.program, launches=launches)

    def set_profiling(self, on: bool) -> None:
        """Turns the measurement of launches on or off; earlier measurements stay."""
        with self.pool.lock:
            if on and self._profile is None:
                shape = (len(self.program.launches), ProfileRecord.END)
                self._profile = np.zeros(shape, np.int64)
            address = 0 if self._profile is None or not on else self._profile.ctypes.data
            self._code[ProgramHeader.PROFILE] = address

    def log_events(self, room: int) -> None:
        """Begins a log of single launches, while profiling is on; 0 ends it.

        Args:
            room: The capacity; later launches are not logged.
        """
        with self.pool.lock:
            self._events = np.zeros(EventLog.END + room * Event.END, np.int64) if room else None
            if self._events is not None:
                self._events[EventLog.CAPACITY] = room
            address = 0 if self._events is None else self._events.ctypes.data
            self._code[ProgramHeader.EVENTS] = address

    def events(self) -> np.ndarray:
        """The logged launches: a row of `max._abi.Event` each."""
        with self.pool.lock:
            if self._events is None:
                return np.zeros((0, Event.END), np.int64)
            rows = self._events[EventLog.END :].reshape(-1, Event.END)
            return rows[: self._events[EventLog.COUNT]].copy()

    def ticks(self) -> np.ndarray:
        """One row of `max._abi.ProfileRecord` per launch; zeros without measurements."""
        with self.pool.lock:
            if self._profile is None:
                shape = (len(self.program.launches), ProfileRecord.END)
                return np.zeros(shape, np.int64)
            return self._profile.copy()

    def _error(self, record: np.ndarray) -> KernelRunError:
        """The exception of an error record, with the kernel's message and the launch's name."""
        launch = self.program.launches[int(record[ErrorRecord.LAUNCH])]
        number = int(record[ErrorRecord.RAISE])
        values = tuple(int(word) for word in record[ErrorRecord.VALUES :])
        if not 0 <= number < len(launch.messages):
            return KernelRunError(f"{launch.name}: a kernel raised (number {number})", launch.name)
        message = launch.messages[number]
        exception = "RuntimeError" if isinstance(message, str) else message.exception
        text = message.format(*values) if isinstance(message, str) else message.format(values)
        return run_error_class(exception)(
            f"{launch.name}: {text}{launch.where}", launch.name, exception, values
        )
