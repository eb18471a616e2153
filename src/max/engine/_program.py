"""Compiled programs in this process: code addresses, fixed memory, and what each set of sizes needs to run."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from max._compiler.emit import Compiled, ProgramCode
from max._compiler.memory import ALIGNMENT
from max._compiler.sizes import size_function
from max._runtime import platform
from max._runtime.pool import Pool
from max._runtime.program import Executor, Launch, Program

__all__ = ["Arena", "Instance", "LinkedProgram", "arena_of"]

MAX_INSTANCES = 256
"""Sets of sizes whose plans are kept."""


class Arena:
    """Memory for what lives during one run only; shared by all programs of a pool, as a pool runs one at a time."""

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.uint8] = platform.allocate(ALIGNMENT)

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """Memory of at least `size` bytes; the caller holds it until its run is over."""
        memory = self._memory
        if memory.size < size:
            # others may still run on the old memory, which they hold
            memory = self._memory = platform.allocate(max(size, memory.size + memory.size // 2))
        return memory


_arenas: weakref.WeakKeyDictionary[Pool, Arena] = weakref.WeakKeyDictionary()
_arenas_lock = threading.Lock()


def arena_of(pool: Pool) -> Arena:
    """The arena of a pool."""
    with _arenas_lock:
        if pool not in _arenas:
            _arenas[pool] = Arena()
        return _arenas[pool]


@dataclass(slots=True)
class Instance:
    """A program for one set of sizes.

    Args:
        offsets: What is added to the bases to get the values.
        arena_bytes: The size of the arena.
        output_shapes: The shapes of the outputs.
    """

    offsets: npt.NDArray[np.int64]
    arena_bytes: int
    output_shapes: tuple[tuple[int, ...], ...]


class LinkedProgram:
    """A program with addresses.

    Args:
        compiled: What it is part of.
        code: The program itself: the main one or the one that runs once.
        addresses: The addresses of the kernels by key.
        fixed: The addresses of the fixed buffers.
        pool: Who runs it.
    """

    def __init__(
        self,
        compiled: Compiled,
        code: ProgramCode,
        addresses: dict[str, int],
        fixed: Sequence[int],
        pool: Pool,
    ) -> None:
        kernels = compiled.kernels
        launches = [
            Launch(
                entry=addresses[launch.kernel],
                slots=[
                    (s.value, s.addend if s.fixed < 0 else s.addend + fixed[s.fixed])
                    for s in launch.slots
                ],
                barrier=launch.barrier,
                phases=kernels[launch.kernel].phases,
                serial=launch.serial,
                name=launch.name,
                messages=kernels[launch.kernel].messages,
            )
            for launch in code.launches
        ]
        scratch = max((kernels[launch.kernel].scratch_bytes for launch in code.launches), default=0)
        self.executor = Executor(pool, Program(launches, len(code.values), scratch))
        self.empty = not launches
        self.bases = np.array([value.base for value in code.values], np.intp)
        self._values = code.values
        self._blocks = code.blocks
        self._static_bytes = code.static_bytes
        self._shapes = [info.shape for info in compiled.outputs] if code is compiled.main else []
        self._checks = compiled.checks if code is compiled.main else []
        sizes = [value.size for value in code.values]
        sizes += [size for block in code.blocks for size in block]
        sizes += [dim for shape in self._shapes for dim in shape]
        sizes += [side for check in self._checks for side in (check.have, check.want)]
        self._sizes = size_function(sizes, compiled.symbols)
        self._instances: dict[tuple[int, ...], Instance] = {}

    def instance(self, symbols: tuple[int, ...]) -> Instance:
        """What the program needs to run with these sizes.

        Raises:
            ValueError: Sizes that a `rebind` says are equal are not.
        """
        found = self._instances.get(symbols)
        if found is None:
            found = self._make_instance(symbols)
            if len(self._instances) >= MAX_INSTANCES:
                self._instances.clear()
            self._instances[symbols] = found
        return found

    def _make_instance(self, symbols: tuple[int, ...]) -> Instance:
        numbers = iter(self._sizes(symbols))
        offsets = [next(numbers) for _ in self._values]
        end = self._static_bytes
        starts: list[int] = []
        for block in self._blocks:
            starts.append(end)
            longest = max([next(numbers) for _ in block])
            end += -(-longest // ALIGNMENT) * ALIGNMENT
        shapes = tuple(tuple([next(numbers) for _ in shape]) for shape in self._shapes)
        for check in self._checks:
            have, want = next(numbers), next(numbers)
            if have != want:
                note = f": {check.message}" if check.message else ""
                raise ValueError(
                    f"rebind: {check.have} is {have}, but {check.want} is {want}{note}"
                )
        for index, value in enumerate(self._values):
            if value.block >= 0:
                offsets[index] += starts[value.block]
        return Instance(np.array(offsets, np.int64), end, shapes)

    def run(self, instance: Instance, bases: npt.NDArray[np.int64]) -> None:
        """Runs the program.

        Args:
            instance: For which sizes.
            bases: Nothing, the arena, the inputs, the outputs.

        Raises:
            KernelError: A kernel raised.
        """
        values = bases.take(self.bases)
        values += instance.offsets
        self.executor.run(values)
