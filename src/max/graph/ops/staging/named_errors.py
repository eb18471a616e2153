"""A wrapper of ops that adds the op's name and arguments to errors that lack them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from max._errors import ArgumentError, AxisError
from max.graph.staging.current import CURRENT, OUTSIDE

__all__ = ["name_errors"]

_F = TypeVar("_F", bound=Callable[..., Any])
_PACKAGE = str(Path(__file__).parents[3])
_NAMED = re.compile(r"(\w+)[: ]")
_LONGEST = 60
_PLAIN = (TypeError, AttributeError, ValueError, IndexError)


def name_errors(function: _F) -> _F:
    """Wraps an op so that errors of its arguments name the op and can be caught as ValueError or TypeError.

    A TypeError, ValueError or AttributeError becomes an `ArgumentError`, an IndexError an `AxisError`. Messages that do
    not name the op, such as Python's own, get its name and arguments. Errors raised in the user's functions (branches,
    loop bodies) pass unchanged.

    Args:
        function: The op.
    """
    name = function.__name__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        outside = OUTSIDE.get()
        if outside is not None and not CURRENT.get():
            return outside(call, args, kwargs)
        try:
            return function(*args, **kwargs)
        except _PLAIN as error:
            if type(error) not in _PLAIN or _of_user(error.__traceback__):
                raise
            text = str(error)
            first = _NAMED.match(text)
            # the message of an op that this one calls; "constant: ..." would hide which operand it was
            names_op = (
                first is not None and first[1] != "constant" and text.startswith(f"{first[1]}:")
            )
            kind = AxisError if isinstance(error, IndexError) else ArgumentError
            if names_op or name in text[: len(name) + 12]:
                raise kind(text).with_traceback(error.__traceback__) from error.__cause__
            arguments = [_short(v) for v in args] + [f"{k}={_short(v)}" for k, v in kwargs.items()]
            raise kind(
                f"{name}: {text}; the op was called with ({', '.join(arguments)})"
            ) from error

    return cast(_F, call)


def _of_user(trace: TracebackType | None) -> bool:
    """Whether the traceback passes through the user's code, such as the body of a loop."""
    trace = trace.tb_next if trace is not None else None
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            # third-party libraries called by the package are not the user's code
            return "site-packages" not in trace.tb_frame.f_code.co_filename
        trace = trace.tb_next
    return False


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
