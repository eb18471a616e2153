"""What the machine's devices report about themselves."""

from max.diagnostics import gpu

__all__ = ["gpu"]
