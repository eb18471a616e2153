"""The machine-checked rules of the kernel IR."""

from __future__ import annotations

from max.kernel.ir import KernelIR


def verify(ir: KernelIR) -> None:
    """Checks a kernel."""
