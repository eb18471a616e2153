"""The CPU as a backend: kernels compiled by LLVM, run by a pool of worker threads on the memory of the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from max import kernel as k
from max._backends.backend import (
    Backend,
    BackendOptions,
    BackendPass,
    Backends,
    MemoryBlock,
    PassPlace,
)
from max._backends.cpu.packing import packing_of
from max._backends.cpu.runtime import amx, kernel_code
from max._backends.cpu.runtime.executor import Executor
from max._backends.cpu.runtime.pool import Pool, shared_pool
from max._backends.cpu.tuning import SHARING, TUNING
from max._backends.program import Program
from max._backends.regions import RegionKernel, RegionSpec
from max._host import guard, host_memory
from max._lazy import lazy_module
from max.driver import CPU, Device

if TYPE_CHECKING:
    from max._backends.cpu.kernels import library as cpu_kernels
    from max._backends.cpu.passes import (
        adapted_products,
        code_weights,
        merge_products,
        pack,
        pack_experts,
    )
    from max._backends.cpu.regions import nest
else:
    # not needed where a program comes from the disk
    nest = lazy_module("max._backends.cpu.regions.nest")
    adapted_products = lazy_module("max._backends.cpu.passes.adapted_products")
    code_weights = lazy_module("max._backends.cpu.passes.code_weights")
    merge_products = lazy_module("max._backends.cpu.passes.merge_products")
    pack = lazy_module("max._backends.cpu.passes.pack")
    pack_experts = lazy_module("max._backends.cpu.passes.pack_experts")
    cpu_kernels = lazy_module("max._backends.cpu.kernels.library")

__all__ = ["CPUBackend", "cpu_backends", "make_backend"]


class CPUBackend(Backend):
    """The CPU.

    Args:
        pool: The workers.
        target: The processor; this machine, with AMX where it may be used, if not given.
    """

    target: k.CPUTarget
    shares_host_memory = True
    is_asynchronous = False
    runs_jumps = True
    sharing = SHARING
    tuning = TUNING

    def __init__(self, pool: Pool, target: k.CPUTarget | None = None) -> None:
        target = amx.native_target() if target is None else target
        super().__init__(CPU(), target, cpu_kernels.CPU_KERNELS)
        self.packing = packing_of(target)
        """Which weights are laid out anew when a model is loaded."""
        self.pool = pool

    def holds(self, device: Device) -> bool:
        return device.is_host

    def allocate(
        self, num_bytes: int, holes: Sequence[int] = (), zero: bool = False
    ) -> MemoryBlock:
        memory = guard.with_holes(num_bytes, holes) if holes else host_memory.allocate(num_bytes)
        if zero:
            memory[:] = 0
        return MemoryBlock(memory.ctypes.data, memory)

    def run_number(self) -> int:
        return self.pool.run_number()

    @property
    def queue(self) -> Pool:
        return self.pool

    @property
    def workers(self) -> int:
        return self.pool.num_threads

    @property
    def cache_key(self) -> str:
        return self.target.cache_key

    def load(self, kernels: Iterable[k.KernelIR]) -> dict[str, int]:
        # while other threads compile the kernels that were started
        self.pool.prepare()
        return kernel_code.compile_kernels(kernels, self.target)

    def start(self, kernel: k.KernelIR) -> None:
        kernel_code.start_kernel(kernel, self.target)

    def cancel_started(self) -> None:
        kernel_code.cancel_started(self.target)

    def load_cached(self, keys: Sequence[str]) -> dict[str, int] | None:
        return kernel_code.load_kernels(keys, self.target)

    def passes(self, place: PassPlace) -> Sequence[BackendPass]:
        if place != "weights":
            return ()
        return (
            BackendPass("pack-weights", partial(pack.pack_weights, packing=self.packing)),
            BackendPass("pack-experts", partial(pack_experts.pack_experts, packing=self.packing)),
            BackendPass("attach-adapters", adapted_products.attach_adapters),
            BackendPass("merge-products", merge_products.merge_products),
            BackendPass("project-adapters", adapted_products.project_adapters),
            BackendPass("code-weights", partial(code_weights.code_weights, packing=self.packing)),
        )

    def write_region(self, spec: RegionSpec) -> RegionKernel:
        return nest.write_region(spec, self.target)

    def executor(self, program: Program) -> Executor:
        return Executor(self.pool, program)


def make_backend(device: Device, options: BackendOptions) -> CPUBackend:
    """The backend of the CPU for a session; virtual CPU devices share one.

    Args:
        device: The CPU.
        options: The options of the session.
    """
    target = amx.native_target()
    if options.batch_invariant:
        target = target.batch_invariantly()
    return CPUBackend(shared_pool(options.num_threads), target)


def cpu_backends(target: k.CPUTarget | None = None, num_threads: int | None = None) -> Backends:
    """The backends of a session on the CPU only, for compiling and for tests.

    Args:
        target: As for `CPUBackend`.
        num_threads: The number of workers; as many as there are cores if not given.
    """
    return Backends(CPUBackend(shared_pool(num_threads), target))
