"""Errors of arguments: of each class that a caller may catch them by."""

from __future__ import annotations

__all__ = ["ArgumentError", "AxisError", "ForeignTypeError", "NoAcceleratorError"]


class ArgumentError(ValueError, TypeError):
    """An argument does not fit: its dtype, shape or kind.

    Both a ValueError and a TypeError, as versions of the API differ in which of the two they raise.
    """


class AxisError(ArgumentError, IndexError):
    """An axis or index is out of range: an `ArgumentError` and, as NumPy's, an IndexError."""


class ForeignTypeError(ArgumentError, BufferError):
    """An array has an element type that no `DType` corresponds to; a BufferError as DLPack's own."""


class NoAcceleratorError(ValueError, RuntimeError):
    """No accelerator has the id; programs catch a ValueError or a RuntimeError before they fall back to the CPU."""
