"""Linking of a compiled model: weights, results computed once, row thresholds, and programs with addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from max._backends import Backends
from max._compiler.program.code import Compiled, ProgramCode
from max._config import dump_log, flags
from max._host import host_memory
from max._host.claims import Claim
from max._lazy import lazy_module
from max._load_steps import STEPS
from max.driver import DLPackArray
from max.engine.load.fixed_memory import FixedMemory
from max.engine.load.load_time_results import inputs_of, needed_later, run_once
from max.engine.load.program_store import Loaded
from max.engine.load.weight_casts import Caster
from max.engine.load.weights import bind_weights
from max.engine.run.linked_program import Linked, LinkedProgram

if TYPE_CHECKING:
    from max.engine.load import packed_weights
    from max.engine.run import profile as profiles
    from max.engine.tune import idle_measurement, row_thresholds
    from max.graph import print_options
else:
    # for programs with packed weights, with row thresholds, and for profiles
    packed_weights = lazy_module("max.engine.load.packed_weights")
    profiles = lazy_module("max.engine.run.profile")
    idle_measurement = lazy_module("max.engine.tune.idle_measurement")
    row_thresholds = lazy_module("max.engine.tune.row_thresholds")
    # the graph layer is imported by callers that stage graphs
    print_options = lazy_module("max.graph.print_options")

__all__ = ["ModelLinker"]

Array = np.ndarray[Any, np.dtype[Any]]


class ModelLinker:
    """Links a compiled model with weights. The model keeps it for reloads.

    Args:
        backends: The devices of the session.
        program: The program, and the declarations of its weights.
        printing: The style of printed tensors.
        caster: Casts weights to the dtypes that the graph declares.
    """

    def __init__(
        self,
        backends: Backends,
        program: Loaded,
        printing: print_options.PrintOptions,
        caster: Caster,
    ) -> None:
        self.backends = backends
        self.caster = caster
        self.printing = printing
        self.program = program

    def link(
        self,
        compiled: Compiled,
        registry: Mapping[str, DLPackArray] | None,
        allocate: Callable[[int], Array] = host_memory.allocate,
    ) -> Linked:
        """Links the programs with the weights of a registry, and computes the results that are computed once.

        Args:
            compiled: The model.
            registry: The values of the weights by name.
            allocate: Allocates the memory of results that are computed once.

        Raises:
            ValueError: Weights are missing, or of a wrong shape or dtype.
            TypeError: A value of the registry is not an array.
            MemoryError: A device is out of memory.
        """
        weights = bind_weights(compiled.name, self.program.weights, registry, self.caster.takes)
        constants, key = self.program.constants, self.program.key
        copy, claim = None, Claim(None)

        def map_packed(num_bytes: int) -> Array | None:
            nonlocal copy, claim
            copy = packed_weights.PackedCopy.of(key, compiled, num_bytes, weights, constants)
            if copy is None:
                return None
            if (packed := copy.map_file()) is None:
                claim = claims.enter_context(copy.claim())
                packed = copy.map_file() if claim.is_made else None
            return packed

        with ExitStack() as claims:
            memory = FixedMemory(compiled, self.backends, weights, constants, map_packed, allocate)
            addresses = memory.addresses  # a later measurement must not hold the memory

            def link_part(
                part: ProgramCode, limits: Mapping[str, int] | None = None
            ) -> LinkedProgram:
                return LinkedProgram(
                    compiled, part, self.program.kernels, addresses, self.backends, limits,
                    self.program.locations, self.printing,
                )  # fmt: skip

            if memory.casts or memory.copies or any(part.launches for part in compiled.once):
                with STEPS.handed_to(claim.heartbeat):
                    self._compute_once(compiled, link_part, memory)
            if copy is not None and not memory.is_computed:
                copy.keep(memory.kept_results, claim)
        rows: dict[str, int] = {}
        unsure: Sequence[row_thresholds.Unsure] = ()
        if any(launch.limit is not None for launch in compiled.main.launches):
            limits = row_thresholds.find_thresholds(compiled, self.backends[compiled.main.device])
            rows, unsure = limits.rows, limits.unsure
        main = link_part(compiled.main, rows)
        if log := dump_log("program"):
            log.info("// ----- %s -----\n%s", compiled.name, main.executor.program)
        later = [link_part(part, rows) for part in compiled.later]
        if flags.MAX_PROFILE:
            profiles.keep_for_exit([main, *later])
        programs = Linked(main, later, memory.owners)
        if unsure:
            idle_measurement.measure_when_idle(programs, compiled, link_part, unsure)
        return programs

    def _compute_once(
        self, compiled: Compiled, link: Callable[[ProgramCode], LinkedProgram], memory: FixedMemory
    ) -> None:
        """Casts weights, and runs the program that computes results from weights once."""
        mapped = host_memory.MappedFiles()

        def convert(read: Iterable[int]) -> None:
            for index in memory.casts.keys() & read:
                self.caster.convert(memory.casts.pop(index), memory.addresses[index], mapped)
            for index in memory.copies.keys() & read:
                memory.copy_constant(index, mapped)

        def drop(indices: Iterable[int]) -> None:
            # buffers that only these programs read must not be kept
            for index in indices:
                memory.release(index)

        if memory.is_computed:
            for index in inputs_of(compiled) - needed_later(compiled):
                memory.casts.pop(index, None)
                memory.copies.pop(index, None)
                memory.release(index)
        elif any(part.launches for part in compiled.once):
            run_once(compiled, link, memory.addresses, self.backends, mapped, convert, drop)
        convert([*memory.casts, *memory.copies])
