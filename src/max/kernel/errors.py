"""Errors of the kernel language, with source locations."""

from __future__ import annotations

from max._dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a kernel's source; ``column`` counts from 1."""

    file: str
    line: int
    column: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One error: its message, its location, and the inlined calls that lead to it."""

    message: str
    location: Location
    calls: tuple[Location, ...] = ()

    def __str__(self) -> str:
        place = self.location
        lines = [f"{place}: {self.message}"]
        if place.text:
            stripped = place.text.lstrip()
            column = place.column - 1 - (len(place.text) - len(stripped))
            lines += [f"    {stripped.rstrip()}", " " * (4 + max(column, 0)) + "^"]
        lines += [f"  called from {call}" for call in self.calls]
        return "\n".join(lines)


class KernelError(Exception):
    """A kernel that cannot be compiled. ``diagnostics`` has all errors, in source order."""

    def __init__(self, diagnostics: list[Diagnostic] | tuple[Diagnostic, ...] | str) -> None:
        if isinstance(diagnostics, str):
            self.diagnostics: tuple[Diagnostic, ...] = ()
            super().__init__(diagnostics)
            return
        self.diagnostics = tuple(diagnostics)
        text = "\n".join(str(d) for d in self.diagnostics)
        if len(self.diagnostics) > 1:
            text = f"{len(self.diagnostics)} errors in the kernel\n{text}"
        super().__init__(text)


class KernelTypeError(KernelError, TypeError):
    """A value of a type that does not fit."""


class KernelNameError(KernelError, NameError, ValueError):
    """A name that has no value; programs for MAX catch a ValueError for an op without a kernel."""


class KernelSyntaxError(KernelError, SyntaxError):
    """Python that is not part of the kernel language."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class KernelValueError(KernelError, ValueError):
    """A value that does not fit."""


class KernelIndexError(KernelError, IndexError):
    """An index that is out of range at compile time."""
