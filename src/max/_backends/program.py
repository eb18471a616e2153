"""Programs: flat lists of launches, which the executor of a device runs, and the errors of their kernels."""

from __future__ import annotations

import builtins
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max._host.process_caches import cached_results

NO_VALUE = 0  # values[0] is 0: a slot (NO_VALUE, c) is the constant c


@dataclass(frozen=True)
class LaunchGeometry:
    """The workers of a launch on a device with a grid of blocks.

    Args:
        grid: For each axis the number of blocks, as a slot: ``values[grid[a][0]] + grid[a][1]``.
        block: For each axis the number of workers of a block; only they meet at a barrier.
        shared_bytes: The memory that the workers of a block share.
    """

    grid: tuple[tuple[int, int], ...]
    block: tuple[int, ...]
    shared_bytes: int = 0


@dataclass(frozen=True)
class Launch:
    """One kernel call.

    Args:
        kernel: The kernel, as `Backend.load` names it: on the CPU its address.
        slots: Its argument slots: slot ``s`` is ``values[slots[s][0]] + slots[s][1]``.
        barrier: Whether all workers finish the earlier launches first.
        phases: The number of counters, one cache line each, that are 0 when the kernel begins.
        serial: Whether only worker 0 runs it.
        name: For errors and profiles.
        messages: The messages of the kernel's ``raise`` statements, by number; a text has ``{}`` for each word of the
            error record.
        where: The source location that ends an error's message.
        geometry: The workers, for a device with a grid of blocks; None leaves them to the device.
    """

    kernel: int
    slots: Sequence[tuple[int, int]]
    barrier: bool = True
    phases: int = 1
    serial: bool = False
    name: str = "kernel"
    messages: tuple[KernelMessage | str, ...] = ()
    where: str = ""
    geometry: LaunchGeometry | None = None


@dataclass(frozen=True)
class Jump(Launch):
    """A jump to another launch; it has no kernel.

    Args:
        kind: ``if_zero``: taken if the byte at the address in the only slot is 0 (after a barrier); ``always``; or
            ``back``: to the head of a loop, whose first launch has a barrier. After a barrier, the counters of the
            loop's launches are zeroed.
        target: The index of the next launch; the number of launches is the end.
    """

    kind: str = "always"
    target: int = 0


@dataclass(frozen=True)
class Program:
    """Launches in order, over a number of 64-bit values.

    ``scratch_bytes`` is the maximum scratch memory of a launch per worker.
    """

    launches: Sequence[Launch]
    num_values: int
    scratch_bytes: int = 0

    def __str__(self) -> str:
        lines = [
            f"program: {self.num_values} values, {self.scratch_bytes} bytes of scratch a worker"
        ]
        for index, launch in enumerate(self.launches):
            marks = "|" * launch.barrier + "1" * launch.serial
            slots = ", ".join(
                str(addend)
                if value == NO_VALUE
                else f"v{value}{addend:+d}"
                if addend
                else f"v{value}"
                for value, addend in launch.slots
            )
            lines.append(f"{index:4} {marks:2} {launch.name}({slots})")
        return "\n".join(lines)


class PartJump(NamedTuple):
    """A jump from the end of a part of a joined program to the start of another part.

    Args:
        after: The part that it follows; -1: none, as it comes first.
        to: The part where the program continues; the number of parts is the end.
        flag: The number of the byte that must be 0 for the jump; None: it is always taken.
    """

    after: int
    to: int
    flag: int | None = None


class KernelRunError(RuntimeError):
    """A kernel raised at run time. The error is also an instance of the built-in exception class that the kernel names.

    A kernel that does not compile is a `max.kernel.KernelError`.

    Attributes:
        launch: The name of the launch.
        exception: The name of the exception class.
        values: The words of the error record.
    """

    def __init__(
        self,
        message: str,
        launch: str,
        exception: str = "RuntimeError",
        values: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.launch, self.exception, self.values = launch, exception, values


@functools.cache
def run_error_class(exception: str) -> type[KernelRunError]:
    """The class of errors of kernels that raise a built-in exception of that name; an IndexError is a ValueError."""
    base = getattr(builtins, exception, None)
    if not (isinstance(base, type) and issubclass(base, Exception)) or issubclass(
        KernelRunError, base
    ):
        return KernelRunError
    # programs for MAX catch a ValueError for an index out of range
    bases = (KernelRunError, base, ValueError) if base is IndexError else (KernelRunError, base)
    try:
        return type(f"KernelRun{exception}", bases, {"__module__": __name__})
    except TypeError:  # a class with another instance layout, such as OSError
        return KernelRunError


class KernelMessage(Protocol):
    """A message of a kernel's ``raise``, as the kernel language keeps it."""

    @property
    def exception(self) -> str: ...
    def format(self, values: Sequence[int]) -> str: ...


class NativeArray(NamedTuple):
    """A contiguous int64 array and its address, which takes longer to read than an addition."""

    array: npt.NDArray[np.int64]
    address: int

    @staticmethod
    def of(array: npt.NDArray[Any]) -> NativeArray:
        """An array of integers, copied if it is not a contiguous int64 array."""
        words = np.ascontiguousarray(array, np.int64)
        return NativeArray(words, words.ctypes.data)


@cached_results()
def _packer(count: int) -> Callable[..., bytes]:
    return struct.Struct(f"{count}q").pack


def packed_words(words: Sequence[int]) -> bytes:
    """Integers as the 64-bit words of an executor's `run_at`."""
    return _packer(len(words))(*words)


def check_program(program: Program) -> None:
    """Checks that kernels, phases, slots and jump targets are in range.

    Raises:
        ValueError: A launch has no kernel, a negative number of phases, or a slot or a target beyond the end.
    """
    for index, launch in enumerate(program.launches):
        if isinstance(launch, Jump):
            if not 0 <= launch.target <= len(program.launches):
                raise ValueError(
                    f"launch {index} ({launch.name}): jumps to {launch.target}, the program has "
                    f"{len(program.launches)} launches"
                )
        elif launch.kernel == 0 or launch.phases < 0:
            raise ValueError(
                f"launch {index} ({launch.name}): kernel {launch.kernel}, phases {launch.phases}; "
                "an address and a count of 0 or more would fit"
            )
        # sizes of a grid are values too
        grid = () if launch.geometry is None else launch.geometry.grid
        for value, _ in (*launch.slots, *grid):
            if not 0 <= value < program.num_values:
                raise ValueError(
                    f"launch {index} ({launch.name}): slot of value {value}, "
                    f"the program has {program.num_values}"
                )
