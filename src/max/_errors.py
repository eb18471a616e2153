"""Errors of arguments. Each is an instance of all classes that callers catch it by."""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "AxisError",
    "ForeignTypeError",
    "NoAcceleratorError",
    "UnboundDimError",
]


class ArgumentError(ValueError, TypeError):
    """An argument does not fit: its dtype, shape or kind.

    It is a ValueError and a TypeError: versions of the API differ in which of the two they raise.
    """


class AxisError(ArgumentError, IndexError):
    """An axis or index is out of range: an `ArgumentError` and, as NumPy's, an IndexError."""


class ForeignTypeError(ArgumentError, BufferError):
    """An array has an element type that no `DType` corresponds to; a BufferError as DLPack's own."""


class NoAcceleratorError(ValueError, RuntimeError):
    """No accelerator has the id; programs catch a ValueError or a RuntimeError before they fall back to the CPU."""


class UnboundDimError(ValueError, RuntimeError):
    """Nothing gives a dimension of a graph its size; programs for MAX catch a RuntimeError of the compilation."""
