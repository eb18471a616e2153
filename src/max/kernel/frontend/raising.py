"""Errors that a kernel raises at run time."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from max.kernel.errors import KernelError, KernelIndexError, KernelTypeError, KernelValueError
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.syntax.formatting import run_time_format
from max.kernel.frontend.values import describe
from max.kernel.ir.nodes import Atom, If, Message, Raise

_STATIC_ERRORS = (KernelTypeError, KernelValueError, KernelIndexError)
"""The errors of compilation whose second base is an exception of Python."""


def raise_at_run_time(fe: Frontend, exception: str, text: str, values: tuple[Atom, ...]) -> None:
    """Emits a ``raise`` with the source location."""
    if len(values) > 5:
        fe.fail(f"raise takes at most five run-time values, got {len(values)}", KernelValueError)
    location = fe.location(fe.node)
    dtypes = tuple(v.type.dtype for v in values)
    fe.messages.append(Message(exception, text, dtypes, location.file, location.line))
    fe.b.emit(Raise(len(fe.messages) - 1, values, fe.b.line))


def fail_statically(
    fe: Frontend, exception: type[BaseException], text: str, values: Sequence[Any]
) -> NoReturn:
    """Reports a ``raise`` that every run would reach as an error of compilation.

    Args:
        fe: The compilation.
        exception: The class that the function raises.
        text: Its message, with ``{}`` for each value.
        values: The values; those known at run time only are shown by their types.
    """
    text, atoms = run_time_format(fe, text, values, "raise")
    kind = next((c for c in _STATIC_ERRORS if issubclass(exception, c.__bases__[1])), KernelError)
    message = text.format(*(describe(atom) for atom in atoms))
    fe.fail(f"{exception.__name__}: {message}" if message else exception.__name__, kind)


def guard(fe: Frontend, cond: Atom, exception: str, text: str, values: tuple[Atom, ...]) -> None:
    """Emits ``if not cond: raise``."""
    refuse(fe, fe.b.op("not", (cond,), cond.type), exception, text, values)


def refuse(fe: Frontend, bad: Atom, exception: str, text: str, values: tuple[Atom, ...]) -> None:
    """Emits ``if bad: raise``, unless the same condition was already tested."""
    # where an outer test has raised, this place is not reached
    if any(bad in scope.checked for scope in fe.b.scopes):
        return
    fe.b.scopes[-1].checked.add(bad)
    location = fe.location(fe.node)
    kernel = f" in kernel {fe.name}" if fe.name else ""
    # the location becomes part of a format text
    source_line = f"{location.file}:{location.line}{kernel}".replace("{", "{{").replace("}", "}}")
    scope = fe.b.open("branch")
    raise_at_run_time(fe, exception, f"{text} ({source_line})", values)
    fe.b.close()
    fe.b.emit(If(bad, tuple(scope.body), (), fe.b.line))
