"""Compiled programs in this process: code addresses, fixed memory, and a plan for each set of sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from max._abi import BaseLayout
from max._backends import Backends
from max._backends.program import (
    Jump,
    Launch,
    LaunchGeometry,
    NativeArray,
    Program,
    packed_words,
)
from max._compiler.locations import SourceLocations
from max._compiler.program.code import (
    ALIGNMENT,
    Check,
    Compiled,
    GeometryCode,
    KernelInfo,
    LaunchCode,
    ProgramCode,
)
from max._dataclass import dataclass
from max._host import guard
from max._host.reentry import reentrant_lock
from max._lazy import lazy_module
from max.driver import DLPackArray, Tensor
from max.engine.run.arena import Arena
from max.engine.run.host_steps import HostSteps, slot_address
from max.engine.run.small_work import small_work
from max.mlir.sizes import Size, size_function

if TYPE_CHECKING:
    from max.graph import print_options
else:
    print_options = lazy_module("max.graph.print_options")

__all__ = ["Instance", "Linked", "LinkedProgram", "Linker", "Runner", "run_at"]

_NO_LOCATIONS = SourceLocations()
MAX_INSTANCES = 256
"""The maximum number of sets of sizes whose plans a program keeps."""


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

    offsets: NativeArray
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
        entry_points: For each device its loaded kernels by key, as launches name them.
        fixed_addresses: The addresses of the fixed buffers.
        backends: The devices of the session.
        limits: The row thresholds of launches by name; launches without one keep the compiler's guess.
        locations: The locations of the staged ops, for errors.
        printing: The style of printed tensors.
    """

    def __init__(
        self,
        compiled: Compiled,
        code: ProgramCode,
        entry_points: Sequence[dict[str, int]],
        fixed_addresses: Sequence[int],
        backends: Backends,
        limits: Mapping[str, int] | None = None,
        locations: SourceLocations = _NO_LOCATIONS,
        printing: print_options.PrintOptions | None = None,
    ) -> None:
        self._locations = locations
        kernels, numbers = compiled.kernels[code.device], entry_points[code.device]
        launches = [
            self._link(launch, kernels, numbers, fixed_addresses, limits or {})
            for launch in code.launches
        ]
        used = {launch.kernel for launch in code.launches if not launch.jump}
        scratch = max((kernels[key].scratch_bytes for key in used), default=0)
        self.backend = backends[code.device]
        memories = [backend.device.memory for backend in backends]
        style = printing or print_options.PrintOptions()
        self._host_steps = HostSteps(code.host_steps, fixed_addresses, memories, style)
        self.executor = self.backend.executor(Program(launches, len(code.values), scratch))
        self.code = code
        # between host steps there may be no launches but marks
        self.empty = all(launch.jump == "next" for launch in code.launches)
        self.waits = self.backend.is_asynchronous
        """Whether the device may still be busy after `run` returns; `backend.synchronize` waits for it."""
        self.bases = NativeArray.of(np.array([value.base for value in code.values], np.int64))
        self._num_symbols = len(compiled.symbols)
        self._guarded = compiled.guarded
        self._shapes = [compiled.outputs[index].shape for index in code.outputs]
        # one generated function computes all sizes of a plan, in this order
        sizes = [value.size for value in code.values]
        sizes += [size for _, block in code.blocks for size in block]
        sizes += [dim for shape in self._shapes for dim in shape]
        self._sizes = size_function(sizes, compiled.symbols)
        sides = [side for check in code.checks for side in (check.actual, check.required)]
        self._sides = size_function(sides, compiled.symbols)
        self._small = small_work(code, compiled.symbols, self.backend.sharing)
        self._instances: dict[tuple[int, ...], Instance] = {}
        self._symbols = compiled.symbols
        self.after_run: Callable[[], None] | None = None
        """Called after each run that nothing watches, on its thread."""
        self._watchers = 0
        self._watch_lock = reentrant_lock()
        self._watched_runs: dict[tuple[int, ...], int] = {}
        self._watched_ns = 0

    def _link(
        self,
        launch: LaunchCode,
        kernels: Mapping[str, KernelInfo],
        numbers: Mapping[str, int],
        fixed_addresses: Sequence[int],
        limits: Mapping[str, int],
    ) -> Launch:
        """The launch with the addresses of its kernel and of fixed buffers."""
        slots = [slot_address(slot, fixed_addresses) for slot in launch.slots]
        limit = launch.limit
        if limit is not None and limit.name in limits:
            slots[limit.slot] = (slots[limit.slot][0], limits[limit.name])
        if launch.jump:
            return Jump(
                0, slots, phases=0, name=launch.name, kind=launch.jump, target=launch.target
            )
        kernel = kernels[launch.kernel]
        return Launch(
            kernel=numbers[launch.kernel],
            slots=slots,
            barrier=launch.barrier,
            phases=kernel.phases,
            serial=launch.serial,
            name=launch.name,
            messages=kernel.messages if launch.check is None else (_CheckMessage(launch.check),),
            where=self._where(launch.staged_op),
            geometry=_geometry(launch.geometry),
        )

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Replaces the row thresholds of launches, by name.

        Args:
            limits: The thresholds; launches of other names keep theirs.
        """
        for index, launch in enumerate(self.code.launches):
            if launch.limit is not None and launch.limit.name in limits:
                self.executor.set_addend(index, launch.limit.slot, limits[launch.limit.name])

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
            # each execution may have other sizes
            if len(self._instances) >= MAX_INSTANCES:
                self._instances.clear()
            self._instances[symbols] = instance
        return instance

    def _make_instance(self, symbols: tuple[int, ...]) -> Instance:
        code = self.code
        # sizes that the host has not read yet
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
            NativeArray.of(np.array(offsets, np.int64)),
            ends[code.segment],
            shapes,
            symbols,
            tuple(holes),
            self._small(symbols + unknown),
        )

    def run(self, instance: Instance, bases: bytes) -> None:
        """Runs the program.

        Args:
            instance: The plan for the sizes of this run.
            bases: The addresses as `packed_words`, in the order of `max._abi.BaseLayout`.

        Raises:
            KernelRunError: A kernel raised.
        """
        if not self._watchers:
            self.executor.run_at(bases, self.bases, instance.offsets, instance.alone)
            if self.after_run is not None:
                self.after_run()
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
        return self._sums_over_runs(self.code.flops, runs)

    def bytes_moved(self, runs: dict[tuple[int, ...], int]) -> list[int]:
        """The bytes of each launch's buffers, summed over runs; `runs` has their number for each set of sizes."""
        return self._sums_over_runs(self.code.bytes_moved, runs)

    def _sums_over_runs(
        self, amounts: Sequence[Size], runs: dict[tuple[int, ...], int]
    ) -> list[int]:
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
        """Carries out the host steps at the end of a segment, see `HostSteps.run`.

        Args:
            instance: The plan of the run.
            bases: The addresses of the run.
            sizes_of: Gets the sizes that were read, by symbol.
        """
        values = bases.take(self.bases.array) + instance.offsets.array
        return self._host_steps.run(values, sizes_of)


def _geometry(code: GeometryCode | None) -> LaunchGeometry | None:
    """The workers of a launch in a linked program."""
    if code is None:
        return None
    grid = tuple([(slot.value, slot.addend) for slot in code.grid])
    return LaunchGeometry(grid, code.block, code.shared_bytes)


@dataclass(slots=True, weakref_slot=True)
class Linked:
    """A model's programs with all addresses, and the owners of that memory; a reload replaces it as a whole."""

    main: LinkedProgram
    later: list[LinkedProgram]
    owners: list[object]


class Linker(Protocol):
    """The session's interface to link a model; a model calls it again for a reload."""

    def link(self, compiled: Compiled, registry: Mapping[str, DLPackArray] | None) -> Linked:
        """Programs with the weights of a registry."""
        ...


class Runner(Protocol):
    """Another executor of a model: the interpreter."""

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]: ...


def run_at(
    arena: Arena, linked: Linked, instance: Instance, inputs: list[int], outputs: list[int]
) -> None:
    """Runs a program of one segment: takes the arena, adds the addresses, waits for the device's queue.

    Args:
        arena: The memory for temporary buffers.
        linked: The program.
        instance: The plan for its sizes.
        inputs: The addresses of the inputs.
        outputs: The addresses of the outputs.
    """
    main = linked.main
    if main.empty:
        return
    # this frame keeps the memory alive until the run is over
    address, _memory = arena.take(instance.arena_bytes, instance.holes)
    main.run(instance, packed_words(BaseLayout.addresses(address, inputs, outputs)))
    if main.waits:
        main.backend.synchronize()
