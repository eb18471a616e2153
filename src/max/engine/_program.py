"""Compiled programs in this process: code addresses, fixed memory, and a plan for each set of sizes."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from max._backends import Backend, Backends
from max._compiler.code import (
    ALIGNMENT,
    Check,
    Compiled,
    HostStepCode,
    KernelInfo,
    LaunchCode,
    ProgramCode,
    SlotCode,
)
from max._compiler.locations import SourceLocations
from max._compiler.sizes import Size, size_function
from max._dataclass import dataclass
from max._lazy import lazy_module
from max._runtime import guard, platform
from max._runtime.program import Executor, Jump, Launch, Program
from max.driver._memory import copy_between
from max.dtype import DType
from max.engine._outputs import trim_all
from max.engine._small_work import small_work

if TYPE_CHECKING:
    from max._interpreter import printing
    from max.graph import print_options
else:
    print_options = lazy_module("max.graph.print_options")
    printing = lazy_module("max._interpreter.printing")  # few programs print

__all__ = ["Arena", "Instance", "Linked", "LinkedProgram", "arena_of"]

_NO_LOCATIONS = SourceLocations()
MAX_INSTANCES = 256
"""The maximum number of sets of sizes whose plans a program keeps."""


class Arena:
    """Memory for temporary buffers. All programs of a queue share it, since they run one at a time.

    Args:
        backend: The device of the memory.
    """

    def __init__(self, backend: Backend) -> None:
        self._device = None if backend.is_host else backend.device
        self._memory = self._make(ALIGNMENT)

    def _make(self, size: int) -> tuple[int, object, int]:
        """Allocates a block; returns its address, its owner and its size."""
        if self._device is not None:
            block = self._device.memory.allocate("arena", DType.uint8, (size,), False)
            return block.ptr, block.owner, size
        memory = platform.allocate(size)
        return memory.ctypes.data, memory, size

    def take(self, size: int, holes: tuple[int, ...] = ()) -> tuple[int, object]:
        """The address of at least `size` bytes, and their owner, which the caller holds until the end of its run.

        Args:
            size: The number of bytes.
            holes: The offsets of guard pages; with them the memory is new. Only the host has guard pages.
        """
        if holes and self._device is None:
            memory = guard.with_holes(size, holes)
            return memory.ctypes.data, memory
        block = self._memory
        if block[2] < size:
            # other runs may still use the old memory: they hold its owner
            try:
                block = self._memory = self._make(max(size, block[2] + block[2] // 2))
            except MemoryError:
                self.trim()
                trim_all()
                block = self._memory = self._make(size)
        return block[0], block[1]

    def fresh(self, size: int, holes: tuple[int, ...] = ()) -> tuple[int, object]:
        """New memory, for a program with several segments: other programs may run between them.

        Args:
            size: The number of bytes.
            holes: As for `take`.
        """
        if holes and self._device is None:
            return self.take(size, holes)
        return self._make(max(size, 1))[:2]

    def trim(self) -> None:
        """Frees the memory; a run in progress holds the owner of its memory."""
        self._memory = self._make(ALIGNMENT)


_arenas: weakref.WeakKeyDictionary[object, Arena] = weakref.WeakKeyDictionary()
_arenas_lock = threading.Lock()


def arena_of(backend: Backend) -> Arena:
    """The arena of a device; sessions on the same queue share it."""
    with _arenas_lock:
        if backend.queue not in _arenas:
            _arenas[backend.queue] = Arena(backend)
        return _arenas[backend.queue]


@dataclass(slots=True)
class Instance:
    """The plan of a program for one set of sizes.

    Args:
        offsets: The numbers that are added to the bases to get the values.
        arena_bytes: The size of the arena.
        output_shapes: The shapes of the outputs in `ProgramCode.outputs`, in their order.
        symbols: The sizes.
        holes: The offsets of the arena's guard pages.
        alone: Whether there is too little work to share: the calling thread runs the program alone.
    """

    offsets: npt.NDArray[np.int64]
    arena_bytes: int
    output_shapes: tuple[tuple[int, ...], ...]
    symbols: tuple[int, ...] = ()
    holes: tuple[int, ...] = ()
    alone: bool = False


@dataclass(frozen=True, slots=True)
class _CheckMessage:
    """The message of a launch that checks a condition; the launch has the name of the op."""

    check: Check
    exception: str = "ValueError"

    def format(self, values: Sequence[int]) -> str:
        actual, required = int(values[0]), int(values[1])
        return (self.check.failure(actual, required) or "").partition(": ")[2]


class LinkedProgram:
    """A program, or a segment of one, with addresses.

    Args:
        compiled: The compiled model.
        code: The program or segment.
        addresses: For each device the entry addresses of its kernels by key.
        fixed: The addresses of the fixed buffers.
        backends: The devices of the session.
        limits: The row thresholds of launches by name; launches without one keep the compiler's guess.
        locations: The locations of the staged ops, for errors.
        printing: The style of printed tensors.
    """

    def __init__(
        self,
        compiled: Compiled,
        code: ProgramCode,
        addresses: Sequence[dict[str, int]],
        fixed: Sequence[int],
        backends: Backends,
        limits: Mapping[str, int] | None = None,
        locations: SourceLocations = _NO_LOCATIONS,
        printing: print_options.PrintOptions | None = None,
    ) -> None:
        self._locations = locations
        self._printing = printing or print_options.PrintOptions()
        self._fixed = fixed
        kernels, entries = compiled.kernels[code.device], addresses[code.device]
        launches = [self._link(launch, kernels, entries, limits or {}) for launch in code.launches]
        used = {launch.kernel for launch in code.launches if not launch.jump}
        scratch = max((kernels[key].scratch_bytes for key in used), default=0)
        self.backend = backends[code.device]
        self._memories = [backend.device.memory for backend in backends]
        self.executor = self.backend.executor(Program(launches, len(code.values), scratch))
        self.code = code
        self.empty = all(launch.jump == "next" for launch in code.launches)
        self.waits = not self.backend.is_host
        """Whether the device may still be busy after `run` returns; `backend.synchronize` waits for it."""
        self.bases = np.array([value.base for value in code.values], np.intp)
        self._num_symbols = len(compiled.symbols)
        self._guarded = compiled.guarded
        self._shapes = [compiled.outputs[index].shape for index in code.outputs]
        sizes = [value.size for value in code.values]
        sizes += [size for _, block in code.blocks for size in block]
        sizes += [dim for shape in self._shapes for dim in shape]
        self._sizes = size_function(sizes, compiled.symbols)
        sides = [side for check in code.checks for side in (check.actual, check.required)]
        self._sides = size_function(sides, compiled.symbols)
        self._small = small_work(code, compiled.symbols)
        self._instances: dict[tuple[int, ...], Instance] = {}
        self._symbols = compiled.symbols
        self._watchers = 0
        self._watch_lock = threading.Lock()
        self._watched_runs: dict[tuple[int, ...], int] = {}
        self._watched_ns = 0

    def _link(
        self,
        launch: LaunchCode,
        kernels: Mapping[str, KernelInfo],
        entries: Mapping[str, int],
        limits: Mapping[str, int],
    ) -> Launch:
        """The launch with the addresses of its kernel and of fixed buffers."""
        slots = [self._slot(slot, self._fixed) for slot in launch.slots]
        limit = launch.limit
        if limit is not None and limit.name in limits:
            slots[limit.slot] = (slots[limit.slot][0], limits[limit.name])
        if launch.jump:
            return Jump(
                0, slots, phases=0, name=launch.name, kind=launch.jump, target=launch.target
            )
        kernel = kernels[launch.kernel]
        return Launch(
            entry=entries[launch.kernel],
            slots=slots,
            barrier=launch.barrier,
            phases=kernel.phases,
            serial=launch.serial,
            name=launch.name,
            messages=kernel.messages if launch.check is None else (_CheckMessage(launch.check),),
            where=self._where(launch.staged_op),
        )

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Replaces the row thresholds of launches on the worker pool, by name.

        Args:
            limits: The thresholds; launches of other names keep theirs.
        """
        if not isinstance(self.executor, Executor):
            return
        for index, launch in enumerate(self.code.launches):
            if launch.limit is not None and launch.limit.name in limits:
                self.executor.set_addend(index, launch.limit.slot, limits[launch.limit.name])

    @staticmethod
    def _slot(slot: SlotCode, fixed: Sequence[int]) -> tuple[int, int]:
        return slot.value, slot.addend if slot.fixed < 0 else slot.addend + fixed[slot.fixed]

    def _where(self, staged_op: int) -> str:
        """The source location of a launch or a check, as the end of an error message; empty if unknown."""
        place = self._locations.describe(staged_op)
        return f" (staged at {place})" if place else ""

    def scope_of(self, launch: LaunchCode) -> str:
        """The scopes of `Graph.profile_scope` that a launch is in, as the end of its name; empty if it is in none."""
        scope = self._locations.scope(launch.staged_op)
        return f" [{scope}]" if scope else ""

    def instance(self, symbols: tuple[int, ...]) -> Instance:
        """The plan for a set of sizes: from the cache, or a new one.

        Args:
            symbols: The sizes known so far, in the order of the model's symbols.

        Raises:
            ValueError: The sizes do not meet a condition of an op.
        """
        instance = self._instances.get(symbols)
        if instance is None:
            instance = self._make_instance(symbols)
            if len(self._instances) >= MAX_INSTANCES:
                self._instances.clear()
            self._instances[symbols] = instance
        return instance

    def _make_instance(self, symbols: tuple[int, ...]) -> Instance:
        code = self.code
        unknown = (0,) * (self._num_symbols - len(symbols))
        sides = iter(self._sides(symbols + unknown))
        for check in code.checks:
            if failure := check.failure(next(sides), next(sides)):
                raise ValueError(failure + self._where(check.staged_op))
        numbers = iter(self._sizes(symbols + unknown))
        offsets = [next(numbers) for _ in code.values]
        # the symbolic blocks follow the static part of their arena
        ends = list(code.static_bytes)
        starts: list[int] = []
        holes: list[int] = []
        for segment, block in code.blocks:
            # sizes of a branch that is not taken may be negative
            longest = max(0, *[next(numbers) for _ in block])
            if self._guarded:
                # the block ends at a guard page
                before = [] if ends[segment] else [0]
                end = (ends[segment] or guard.PAGE) + -(-longest // guard.PAGE) * guard.PAGE
                starts.append(end - longest)
                ends[segment] = end + guard.PAGE
                if segment == code.segment:
                    holes += [*before, end]
                continue
            starts.append(ends[segment])
            ends[segment] += -(-longest // ALIGNMENT) * ALIGNMENT
        shapes = tuple(tuple([next(numbers) for _ in shape]) for shape in self._shapes)
        for index, value in enumerate(code.values):
            if value.block >= 0:
                offsets[index] += starts[value.block]
        return Instance(
            np.array(offsets, np.int64),
            ends[code.segment],
            shapes,
            symbols,
            tuple(holes),
            self._small(symbols + unknown),
        )

    def run(self, instance: Instance, bases: npt.NDArray[np.int64]) -> None:
        """Runs the program.

        Args:
            instance: The plan for the sizes of this run.
            bases: The addresses, in the order of `max._abi.BaseLayout`.

        Raises:
            KernelRunError: A kernel raised.
        """
        if not self._watchers:
            self.executor.run_at(bases, self.bases, instance.offsets, instance.alone)
            return
        start = time.perf_counter_ns()
        self.executor.run_at(bases, self.bases, instance.offsets, instance.alone)
        spent = time.perf_counter_ns() - start
        with self._watch_lock:
            self._watched_ns += spent
            runs = self._watched_runs
            runs[instance.symbols] = runs.get(instance.symbols, 0) + 1

    # profiles ----------------------------------------------------------------------------------

    def watch(self, on: bool) -> None:
        """Adds or removes an observer of the time of each launch."""
        with self._watch_lock:
            self._watchers += 1 if on else -1
            self.executor.set_profiling(self._watchers > 0)

    def reading(self) -> tuple[npt.NDArray[np.int64], dict[tuple[int, ...], int], int]:
        """The profile so far: ticks of each launch, number of runs for each set of sizes, nanoseconds of all runs."""
        with self._watch_lock:
            return self.executor.ticks(), dict(self._watched_runs), self._watched_ns

    def flops(self, runs: dict[tuple[int, ...], int]) -> list[int]:
        """The arithmetic operations of each launch, summed over runs; `runs` has their number for each set of sizes."""
        return self._summed(self.code.flops, runs)

    def bytes_moved(self, runs: dict[tuple[int, ...], int]) -> list[int]:
        """The bytes of each launch's buffers, summed over runs; `runs` has their number for each set of sizes."""
        return self._summed(self.code.bytes_moved, runs)

    def _summed(self, amounts: Sequence[Size], runs: dict[tuple[int, ...], int]) -> list[int]:
        sizes = size_function(amounts, self._symbols)
        total = [0] * len(amounts)
        for symbols, count in runs.items():
            unknown = (0,) * (self._num_symbols - len(symbols))
            for index, size in enumerate(sizes(symbols + unknown)):
                total[index] += count * size
        return total

    def run_host_steps(
        self, instance: Instance, bases: npt.NDArray[np.int64], sizes_of: dict[str, int]
    ) -> int:
        """Carries out the host steps at the end of a segment: reads sizes, prints, copies between devices, branches.

        Args:
            instance: The plan of the run.
            bases: The addresses of the run.
            sizes_of: Gets the sizes that were read, by symbol.

        Returns:
            The number of the segment to run next; -1: the following one.

        Raises:
            ValueError: A range or slice has a step of 0, or a range has bounds without a size.
        """
        values = bases.take(self.bases) + instance.offsets
        for code in self.code.host_steps:
            if code.rule == "cut":
                continue
            if code.rule == "jump":
                return code.target
            if code.rule == "if_zero":
                if not self._read(code, 0, values, 1, DType.uint8)[0]:
                    return code.target
                continue
            shape = [self._value(slot, values) for slot in code.shape]
            if code.rule == "copy":
                self._copy(code, values, shape[0])
                continue
            if code.rule == "print":
                self._print(code, shape, values)
                continue
            count = len(shape) if code.rule == "slice" else 1
            bounds = [self._read(code, n, values, count) for n in range(len(code.bounds))]
            if code.rule == "slice":
                sizes = slice_sizes(shape, *bounds)
            elif code.rule == "range":
                sizes = [range_size(*bounds)]
            else:
                sizes = [bounds[0].item()] * len(code.symbols)
            sizes_of.update({n: s for n, s in zip(code.symbols, sizes, strict=True) if n})
        return -1

    def _print(
        self, code: HostStepCode, shape: Sequence[int], values: npt.NDArray[np.int64]
    ) -> None:
        if not code.bounds:
            printing.write(code.label)
            return
        elements = math.prod(shape)
        array = self._read(code, 0, values, max(elements, 1))
        printing.show(code.label, array[:elements].reshape(shape), self._printing)

    def _value(self, slot: SlotCode, values: npt.NDArray[np.int64]) -> int:
        value, addend = self._slot(slot, self._fixed)
        return int(values[value]) + addend

    def _read(
        self,
        code: HostStepCode,
        number: int,
        values: npt.NDArray[np.int64],
        count: int,
        dtype: DType | None = None,
    ) -> npt.NDArray[Any]:
        """The first `count` elements at a bound of a host step, read from the memory of its device."""
        dtype = code.dtype if dtype is None else dtype
        memory = self._memories[code.devices[number]]
        data = memory.read(self._value(code.bounds[number], values), count * dtype.size_in_bytes)
        return data.view(dtype.to_numpy())

    def _copy(self, code: HostStepCode, values: npt.NDArray[np.int64], nbytes: int) -> None:
        """Copies `nbytes` bytes from one device's memory to another's."""
        source, target = [self._value(slot, values) for slot in code.bounds]
        from_memory, to_memory = [self._memories[device] for device in code.devices]
        copy_between(to_memory, target, from_memory, source, nbytes)


MOST_ELEMENTS = 1 << 47
"""The most elements of a tensor: addresses have 47 bits."""


@dataclass(slots=True, weakref_slot=True)
class Linked:
    """A model's programs with all addresses, and the owners of that memory; a reload replaces it as a whole."""

    main: LinkedProgram
    later: list[LinkedProgram]
    kept: list[object]


def range_size(start: npt.NDArray[Any], stop: npt.NDArray[Any], step: npt.NDArray[Any]) -> int:
    """The number of elements of a range.

    Raises:
        ValueError: The step is 0, a bound is NaN, or the number of elements is infinite or over `MOST_ELEMENTS`.
    """
    first, last, by = start[0].item(), stop[0].item(), step[0].item()
    if by == 0:
        raise ValueError("range: the step is 0")
    if isinstance(first, float):
        exact = (last - first) / by
        if math.isnan(exact) or exact == math.inf:
            raise ValueError(f"range: from {first} to {last} in steps of {by} is not a range")
        size = math.ceil(max(exact, 0))
    else:
        size = -((first - last) // by)
    if size > MOST_ELEMENTS:
        raise ValueError(
            f"range: from {first} to {last} in steps of {by} has {size} elements; no memory holds them"
        )
    return max(size, 0)


def slice_sizes(
    shape: Sequence[int],
    start: npt.NDArray[Any],
    stop: npt.NDArray[Any],
    step: npt.NDArray[Any],
) -> list[int]:
    """The size of each axis of a slice, by Python's rules.

    Raises:
        ValueError: A step is 0.
    """
    if not step.all():
        raise ValueError("slice: a step is 0")
    bounds = zip(shape, start.tolist(), stop.tolist(), step.tolist(), strict=True)
    # bounds beyond the ends are clamped to the size, as in Python
    return [len(range(*slice(first, last, by).indices(size))) for size, first, last, by in bounds]
