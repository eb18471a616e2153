"""MLIR contexts and locations, as programs for MAX pass them. The dialect here needs neither: it has one context."""

from __future__ import annotations

from typing import Self

__all__ = ["Context", "Location"]


class _Scope:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        return None


class Context(_Scope):
    """What `KernelLibrary` and `Graph` take as ``context``; it has no effect."""


class Location(_Scope):
    """A source location, which ops get from the call that stages them; it has no effect."""

    @classmethod
    def unknown(cls, context: Context | None = None) -> Self:
        """A location without a file.

        Args:
            context: Has no effect.
        """
        return cls()
