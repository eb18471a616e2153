"""The table type of handlers, and conversions of their arguments."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from max.kernel.frontend.conversions import coerce, type_of
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.values import describe, is_number
from max.kernel.ir.nodes import Atom, Const, Ref
from max.kernel.types import ScalarType, scalar_type

Handler = Callable[..., Any]


class HandlerTable(dict[Any, Handler]):
    """Handlers by function. A handler takes the frontend, then the arguments of the call, and emits IR."""

    def emits(self, *functions: Any) -> Callable[[Handler], Handler]:
        """Registers a handler for one or more functions."""

        def register(handler: Handler) -> Handler:
            for function in functions:
                self[function] = handler
            return handler

        return register


def as_value(fe: Frontend, x: Any, function: str) -> Atom:
    """Converts an argument to an atom; `function` names the function in errors."""
    if isinstance(x, (Ref, Const)):
        return x
    if is_number(x):
        return coerce(fe, x, type_of(fe, x))
    fe.fail(f"{function} takes a scalar or a vector, got {describe(x)}")


def as_vector(fe: Frontend, x: Any, function: str) -> Atom:
    """Checks that an argument is a vector; `function` names the function in errors."""
    if isinstance(x, (Ref, Const)) and x.type.is_vector:
        return x
    fe.fail(f"{function} takes a vector, got {describe(x)}")


def as_dtype(fe: Frontend, dtype: Any) -> ScalarType:
    """Converts an argument to an element type."""
    try:
        return scalar_type(dtype)
    except TypeError as error:
        fe.fail(str(error))
