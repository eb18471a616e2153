"""Errors of arguments; see `max._errors`."""

from __future__ import annotations

from max._errors import ArgumentError, AxisError

__all__ = ["ArgumentError", "AxisError"]
