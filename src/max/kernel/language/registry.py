"""Named kernels: how ``ops.custom`` finds an op by its symbol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from max._spelling import did_you_mean
from max.kernel.errors import KernelNameError
from max.kernel.language.source import Kernel

_kernels: dict[str, Kernel] = {}


def register(name: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Marks a function as the kernel of the op ``name``; a later registration of the name replaces it.

    Args:
        name: the op's symbol.
    """

    def mark(fn: Callable[..., Any]) -> Kernel:
        kernel = fn if isinstance(fn, Kernel) else Kernel(fn)
        kernel.symbol = name
        _kernels[name] = kernel
        return kernel

    return mark


def kernel_of_op(name: str) -> Kernel:
    """The kernel of an op.

    Raises:
        KernelNameError: there is none; the message has the nearest name.
    """
    if name not in _kernels:
        hint = did_you_mean(name, _kernels) or "; mark one with @k.register"
        raise KernelNameError(f"no kernel is registered as {name!r}{hint}")
    return _kernels[name]


def registered_names() -> list[str]:
    """The symbols of all registered kernels."""
    return sorted(_kernels)
