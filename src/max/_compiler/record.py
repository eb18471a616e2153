"""Records of compilations, for `max explain`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field
from typing import TYPE_CHECKING

from max import kernel as k
from max import mlir
from max._backends.backend import Backends
from max._compiler.program.code import Compiled
from max._dataclass import dataclass
from max._lazy import lazy_module

if TYPE_CHECKING:
    from max._compiler.program import flatten, memory_plan
else:
    # loaded on first use: most compilations are not recorded
    flatten = lazy_module("max._compiler.program.flatten")
    memory_plan = lazy_module("max._compiler.program.memory_plan")

__all__ = ["Compilation", "PassRecord", "is_recording", "record", "new_record"]


@dataclass(frozen=True)
class PassRecord:
    """A module after a pass.

    Attributes:
        name: The pass.
        ops: The number of ops, including those inside regions.
        seconds: The duration of the pass.
        text: The module.
    """

    name: str
    ops: int
    seconds: float
    text: str


@dataclass
class Compilation:
    """The record of one module.

    Attributes:
        passes: The module as staged, then after each pass.
        flat: All launches over one list of buffers.
        plan: Where the main program's buffers are.
        compiled: The result.
        irs: For each device the kernels by key.
        backends: The devices that it was compiled for.
    """

    passes: list[PassRecord] = field(default_factory=list[PassRecord])
    flat: flatten.Flat | None = None
    plan: memory_plan.MemoryPlan | None = None
    compiled: Compiled | None = None
    irs: list[dict[str, k.KernelIR]] = field(default_factory=list)
    backends: Backends | None = None

    def module(self, name: str, module: mlir.ModuleOp, seconds: float) -> None:
        """Records the module after a pass."""
        ops = sum(1 for _ in mlir.walk(module))
        self.passes.append(PassRecord(name, ops, seconds, mlir.print_module(module)))

    def finish(
        self,
        flat: flatten.Flat,
        compiled: Compiled,
        irs: list[dict[str, k.KernelIR]],
        backends: Backends,
    ) -> None:
        """Records the program."""
        # planned again, as `emit` does: the compiled program holds offsets, not buffers
        cuts = [position for position, _ in flat.host_steps]
        host_reads = [
            (at, pointer.buffer) for at, step in flat.host_steps for pointer in step.bounds
        ]
        self.flat, self.compiled, self.irs, self.backends = flat, compiled, irs, backends
        self.plan = memory_plan.plan_memory(
            flat.buffers, flat.launches, cuts, host_reads, flat.labels, flat.loops
        )


_RECORDS: ContextVar[list[Compilation] | None] = ContextVar("max.compilations", default=None)


@contextmanager
def record() -> Generator[list[Compilation]]:
    """Records the compilations in a `with` block; the disk cache of programs is not used in it."""
    compilations: list[Compilation] = []
    token = _RECORDS.set(compilations)
    try:
        yield compilations
    finally:
        _RECORDS.reset(token)


def is_recording() -> bool:
    """Whether compilations are recorded."""
    return _RECORDS.get() is not None


def new_record() -> Compilation | None:
    """A new record for a compilation; None if none is recorded."""
    records = _RECORDS.get()
    if records is None:
        return None
    records.append(Compilation())
    return records[-1]
