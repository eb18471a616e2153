"""The memory layouts that native code and Python share, and the only place that has their numbers.

A struct is a :class:`Words`: 64-bit fields, each member the index of its field. A kernel sees :class:`Context` and
:class:`ErrorRecord` (docs/contracts.md); the rest is between the native part of the pool
(`max._backends.cpu.runtime.native`) and the Python that lays programs out, or between
`max._backends.cpu.runtime.native_compiler` and Python (:class:`CompileJob`). :class:`BaseLayout` orders the addresses
that an execution adds to a program's values.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import ClassVar

from max._dataclass import dataclass

__all__ = [
    "CONTEXT_BYTES",
    "COUNTER_BYTES",
    "LINE_PAIR_BYTES",
    "PARKING_BYTES",
    "POOL_BYTES",
    "RAISED_WORDS",
    "SCRATCH_ALIGNMENT",
    "WORD_BYTES",
    "BaseLayout",
    "CompileJob",
    "Context",
    "ErrorRecord",
    "ErrorState",
    "Event",
    "EventLog",
    "Flag",
    "Instruction",
    "Opcode",
    "PoolState",
    "ProfileRecord",
    "ProgramHeader",
    "SlotPair",
    "Words",
    "poll_convention",
]

WORD_BYTES = 8
COUNTER_BYTES = 64
"""A launch has one counter per phase, each on a cache line of its own."""
SCRATCH_ALIGNMENT = 64
LINE_PAIR_BYTES = 128
"""Processors fetch cache lines in pairs: two words in one pair make a barrier take four times as long."""
PARKING_BYTES = 256
"""Room in the pool for the mutex and the condition variable of portable parking."""

_PAIR = LINE_PAIR_BYTES // WORD_BYTES
RAISED_WORDS = 3
"""Type, value and traceback of an exception."""


class Words(IntEnum):
    """A native struct of 64-bit words: a member is the index of the word where its field begins."""

    @property
    def offset(self) -> int:
        """The offset of the field in bytes."""
        return WORD_BYTES * self.value


# ***** kernels *****
class Context(Words):
    """What a kernel finds at ``ctx``: one per worker. All fields are i64 or ptr."""

    WORKER = 0
    WORKERS = 1  # that run the launch: 1 for a serial one
    COUNTERS = 2  # ptr: the launch's counters, zero when it starts
    BARRIER = 3  # ptr: void(ptr ctx)
    POOL = 4  # ptr: PoolState; not for kernels
    ERROR = 5  # ptr: ErrorRecord
    SCRATCH = 6  # ptr: memory of this worker
    SCRATCH_BYTES = 7
    LAUNCH = 8  # the launch's index in the program
    ARGS = 9  # ptr: where the worker computes argument slots; not for kernels
    ALERT = 10  # not 0: the worker calls POLL soon
    POLL = 11  # ptr: i64(ptr ctx): the error state


CONTEXT_BYTES = LINE_PAIR_BYTES


class ErrorRecord(Words):
    """The first error of a run. Whoever swaps STATE from 0 writes the rest."""

    STATE = 0  # an ErrorState
    LAUNCH = 1
    RAISE = 2  # the number of the `raise` statement in the kernel
    VALUES = 3  # up to five words for the message
    END = 8


class ErrorState(IntEnum):
    """Values of :attr:`ErrorRecord.STATE`, and the result of a run."""

    NONE = 0
    FAILED = 1  # a kernel raised
    INTERRUPTED = 2
    NESTED = -1  # only as a result: a signal handler started a run inside a run


# ***** programs *****
class ProgramHeader(Words):
    """The start of a program; its instructions follow at END."""

    COUNTERS = 0  # ptr: the counters of all launches
    COUNTER_BYTES = 1
    PROFILE = 2  # ptr: a ProfileRecord per launch, or null
    EVENTS = 3  # ptr: EventLog, or null
    VALUES = 4  # ptr: where a run puts the values that it computes from bases and offsets
    NUM_VALUES = 5
    ERROR = 8  # an ErrorRecord: that of the last run that failed
    RAISED = (
        ERROR + ErrorRecord.END
    )  # what a signal handler raised in it: type, value and traceback
    END = RAISED + 8


class Instruction(Words):
    """One instruction. Jumps use SLOTS for the address of the predicate, KERNEL for the target."""

    OPCODE = 0
    FLAGS = 1
    KERNEL = 2  # ptr: the kernel, or the instruction to go on with
    SLOTS = 3  # ptr: SlotPairs
    NUM_SLOTS = 4  # of a jump back: bytes of COUNTERS to zero
    COUNTERS = 5  # ptr
    LAUNCH = 6  # the launch's index
    END = 8


class Opcode(IntEnum):
    """Values of :attr:`Instruction.OPCODE`."""

    END = 0
    LAUNCH = 1
    IF_ZERO = 2
    JUMP = 3


class Flag(IntEnum):
    """Bits of :attr:`Instruction.FLAGS`."""

    BARRIER = 1
    SERIAL = 2


class SlotPair(Words):
    """An argument slot: ``values[VALUE] + ADDEND``."""

    VALUE = 0
    ADDEND = 1
    END = 2


class ProfileRecord(Words):
    """What worker 0 measured of a launch, in ticks, summed over runs."""

    WAIT = 0  # at the barrier before it
    RUN = 1
    COUNT = 2  # runs
    END = 3


class EventLog(Words):
    """The start of a log of single launches; Events follow at END."""

    COUNT = 0
    CAPACITY = 1
    END = 2


class Event(Words):
    """One launch in the log: its index, and the ticks when worker 0 arrived at its barrier, started and ended it."""

    LAUNCH = 0
    ARRIVAL = 1
    START = 2
    FINISH = 3
    END = 4


# ***** the pool *****
class PoolState(Words):
    """A pool's struct. What is written while workers spin has a pair of cache lines to itself."""

    EPOCH = 0 * _PAIR  # i32: runs begun; idle workers wait for it to change
    EPOCH_SLEEPERS = 1 * _PAIR  # i32
    ARRIVED = 2 * _PAIR  # i32: workers at the barrier
    GENERATION = 3 * _PAIR  # i32: barriers passed
    GENERATION_SLEEPERS = 4 * _PAIR  # i32
    REMAINING = 5 * _PAIR  # i32: workers that still walk the program
    FINISHED = 6 * _PAIR  # i32: runs finished; the caller waits for it to change
    FINISHED_SLEEPERS = 7 * _PAIR  # i32
    # constant during a run
    PROGRAM = 8 * _PAIR  # ptr
    VALUES = PROGRAM + 1  # ptr
    ACTIVE = PROGRAM + 2  # workers of this run
    STOP = PROGRAM + 3  # not 0: workers leave
    IDLE_SPINS = PROGRAM + 4  # pauses before a worker sleeps between runs
    YIELD_MASK = PROGRAM + 5  # a worker yields its core when (pauses & mask) == 0
    RUN_SPINS = PROGRAM + 6  # pauses before a worker sleeps in a run
    CONTEXTS = PROGRAM + 7  # ptr: one Context per worker
    ERROR = 9 * _PAIR  # an ErrorRecord
    PARKING = 10 * _PAIR
    RUN = PARKING + PARKING_BYTES // WORD_BYTES  # twice the runs begun, less 1 during a run
    INTERRUPT = RUN + 1  # the run to end early
    CHECK = RUN + 2  # the run whose caller handles Python's signals
    CALLER = RUN + 3  # the thread that began the last run
    RAISED_TYPE = RUN + 4  # ptr: what a signal handler raised
    RAISED_VALUE = RUN + 5  # ptr
    RAISED_TRACE = RUN + 6  # ptr


POOL_BYTES = PoolState.RUN.offset + LINE_PAIR_BYTES


# ***** the compiler *****
class CompileJob(Words):
    """A module that `max._backends.cpu.runtime.native_compiler` compiles. Texts are C strings."""

    TEXT = 0  # ptr: the module
    TRIPLE = 1  # ptr
    LAYOUT = 2  # ptr: the data layout
    MACHINE = 3  # ptr: the target machine
    BUILDER = 4  # ptr: the pass builder
    LOOPS = 5  # 1 if loops are optimized, else 0
    BUFFER = 6  # ptr, result: the memory buffer, to be disposed of
    START = 7  # ptr, result: the object code
    SIZE = 8  # result: its bytes


# ***** executions *****
_FIRST_INPUT = 2


@dataclass(frozen=True, slots=True)
class BaseLayout:
    """The base addresses that an execution hands to a program: ``[0, arena, inputs…, outputs…, arenas of later
    segments…]``.

    Args:
        num_inputs: Inputs of the program.
        num_outputs: Outputs of the program.
    """

    num_inputs: int
    num_outputs: int

    NOTHING: ClassVar[int] = 0
    """The base that is 0, for values that are not addresses."""
    ARENA: ClassVar[int] = 1
    """The arena of the first segment."""

    @property
    def inputs(self) -> slice:
        """The positions of the inputs."""
        return slice(_FIRST_INPUT, _FIRST_INPUT + self.num_inputs)

    @property
    def outputs(self) -> slice:
        """The positions of the outputs."""
        return slice(self.inputs.stop, self.inputs.stop + self.num_outputs)

    def input(self, position: int) -> int:
        """The position of an input."""
        return self.inputs.start + position

    def output(self, position: int) -> int:
        """The position of an output."""
        return self.outputs.start + position

    def arena(self, segment: int = 0) -> int:
        """The position of the arena of a segment."""
        return self.ARENA if segment == 0 else self.outputs.stop + segment - 1

    @staticmethod
    def addresses(arena: int, inputs: Iterable[int], outputs: Iterable[int]) -> list[int]:
        """The bases of a program of one segment."""
        return [0, arena, *inputs, *outputs]

    def count(self, num_segments: int = 1) -> int:
        """The number of bases of a program with a number of segments."""
        return self.outputs.stop + num_segments - 1


FUNCTION_PREFIX, FUNCTION_DIGITS = "max_function_", 40
"""The name of an outlined function is the prefix and this many hexadecimal digits of the hash of its text."""


def poll_convention(triple: str) -> str:
    """LLVM's calling convention of the poll function that ``Context.POLL`` points to.

    Kernels keep their registers across the call. On arm64 ``preserve_mostcc`` would not keep vector registers.

    Args:
        triple: LLVM's target triple.
    """
    return "preserve_allcc" if triple.startswith(("aarch64", "arm64")) else "preserve_mostcc"
