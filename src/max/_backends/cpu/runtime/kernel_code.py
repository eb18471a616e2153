"""Machine code of kernels: from kernel IR, or by key from this process or the disk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from max import kernel
from max._backends.cpu.runtime.jit import AbsentError, Unit, absent_text, jit_for
from max._backends.cpu.runtime.llvm_compiler import Machine
from max._config import flags
from max._host.disk_cache import source_fingerprint

__all__ = ["cancel_started", "compile_kernels", "load_kernels", "start_kernel"]


def _optimizes() -> bool:
    """Whether LLVM optimizes kernels; not if every access is checked, as that takes five times as long."""
    return flags.MAX_KERNEL_CHECK < 2


def compile_kernels(irs: Iterable[kernel.KernelIR], target: kernel.LLVMTarget) -> dict[str, int]:
    """Addresses of kernels by their key; only those absent from the cache become LLVM IR.

    Raises:
        CompileError: LLVM rejects the IR of a kernel.
    """
    if flags.MAX_KERNEL_INTERPRET:
        return {ir.key: kernel.interpreted_entry(ir, target) for ir in irs}
    units = {ir.key: _unit_of(ir, target) for ir in irs}
    return jit_for(Machine.of(target)).addresses(units)


def start_kernel(ir: kernel.KernelIR, target: kernel.LLVMTarget) -> None:
    """Starts to compile a kernel ahead of `compile_kernels`, while more kernels are specialized.

    Args:
        ir: The kernel.
        target: The machine to compile for.
    """
    if not flags.MAX_KERNEL_INTERPRET:
        jit_for(Machine.of(target)).start(_unit_of(ir, target))


def cancel_started(target: kernel.LLVMTarget) -> None:
    """Cancels the kernels of `start_kernel` that no thread compiles yet.

    Args:
        target: The machine.
    """
    jit_for(Machine.of(target)).cancel_started()


def _unit_of(ir: kernel.KernelIR, target: kernel.LLVMTarget) -> Unit:
    return _unit(ir.key, functools.partial(kernel.emit_modules, ir, target))


def _unit(key: str, text: Callable[[], str | kernel.Modules]) -> Unit:
    optimize = _optimizes()
    # the emitter is part of the key: its changes give other code for equal IR
    unit_key = f"{key}.{source_fingerprint('kernel')}"
    # code of both levels may be on the disk
    return Unit(unit_key if optimize else f"{unit_key}.plain", (f"k_{key}",), text, optimize)


def load_kernels(keys: Iterable[str], target: kernel.LLVMTarget) -> dict[str, int] | None:
    """Addresses of kernels by their keys only, from this process or from the disk.

    A program loaded from the disk cache takes this path: it needs no kernel's IR.

    Returns:
        The addresses by key, or None if the code of a kernel is missing; :func:`compile_kernels` then compiles it.
    """
    units = {key: _unit(key, absent_text) for key in keys}
    try:
        return jit_for(Machine.of(target)).addresses(units)
    except AbsentError:
        return None
