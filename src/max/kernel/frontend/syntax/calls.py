"""Calls of functions of the language, of inlined functions, and of Python functions at compile time."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from max.kernel.errors import KernelError, KernelTypeError, KernelValueError
from max.kernel.frontend.conversions import cast, sequence
from max.kernel.frontend.functions import control, dots, elementary, matrix_tiles, python, vectors
from max.kernel.frontend.functions.table import Handler
from max.kernel.frontend.inlining import call_inline
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.syntax.formatting import format_parts
from max.kernel.frontend.values import Closure, Method, Runtime, describe, is_record, is_runtime
from max.kernel.ir.nodes import Const, Ref
from max.kernel.language import lang
from max.kernel.language.source import InlineFunction
from max.kernel.types import ScalarType

HANDLERS: Mapping[Any, Handler] = {
    **vectors.FUNCTIONS,
    **elementary.FUNCTIONS,
    **dots.FUNCTIONS,
    **control.FUNCTIONS,
    **python.FUNCTIONS,
    **matrix_tiles.FUNCTIONS,
}
"""The IR that functions of the language emit, by family. `max.kernel.language.lang` documents the functions."""


def call_node(fe: Frontend, node: ast.Call) -> Any:
    """Evaluates the function and the arguments of a call, then calls it."""
    function = fe.expr(node.func)
    args: list[Any] = []
    for arg in node.args:
        if arg.__class__ is ast.Starred:
            args.extend(sequence(fe, fe.expr(arg.value), arg))  # type: ignore[attr-defined]
        # only `print` shows run-time values in an f-string: other strings are compile-time values
        elif arg.__class__ is ast.JoinedStr and function in (builtins.print, lang.print):
            text, values = format_parts(fe, arg)  # type: ignore[arg-type]
            args += [text, *values]
        else:
            args.append(fe.expr(arg))
    kwargs: dict[str, Any] = {}
    for keyword in node.keywords:
        value = fe.expr(keyword.value)
        if keyword.arg is None:
            kwargs.update(value)
        else:
            kwargs[keyword.arg] = value
    fe.node = node
    return call(fe, function, args, kwargs)


def call(fe: Frontend, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Calls a function, method or type that is known at compile time."""
    kind = function.__class__
    if kind is Method:
        return _call_handler(fe, function.fn, (function.owner, *args), kwargs)
    if kind is InlineFunction or kind is Closure:
        return call_inline(fe, function, args, kwargs)
    if kind is ScalarType:
        if len(args) != 1 or kwargs:
            fe.fail(f"k.{function.name}(x) takes one value")
        if isinstance(args[0], Runtime):
            fe.fail(f"cannot convert {describe(args[0])} to {function.name}")
        return cast(fe, args[0], function)
    handler = HANDLERS.get(function) if _hashable(function) else None
    if handler is not None:
        return _call_handler(fe, handler, args, kwargs)
    if isinstance(function, (Ref, Const, Runtime)):
        fe.fail(f"{describe(function)} cannot be called")
    # records are the only Python objects that may hold run-time values
    owner = getattr(function, "__self__", None)
    makes_record = is_record(function) or (is_record(owner) and function.__name__ == "_replace")
    runtime = [v for v in (*args, *kwargs.values()) if is_runtime(v)]
    if runtime and not makes_record:
        name = getattr(function, "__qualname__", repr(function))
        fe.fail(
            f"{name} is a Python function and cannot take {describe(runtime[0])}; mark it @k.inline"
        )
    try:
        return function(*args, **kwargs)
    except KernelError:
        raise
    except Exception as error:  # any error of the user's function is reported at this call
        fe.fail(
            f"{getattr(function, '__qualname__', function)}: {type(error).__name__}: {error}",
            KernelValueError,
        )


def _call_handler(
    fe: Frontend, handler: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Calls the handler of a function; a TypeError of the call becomes an error of the kernel."""
    try:
        return handler(fe, *args, **kwargs)
    except TypeError as error:
        if isinstance(error, KernelError):
            raise
        # either the call does not fit the signature, or the handler itself failed
        try:
            inspect.signature(handler).bind(fe, *args, **kwargs)
        except TypeError as signature_error:
            fe.fail(f"{handler.__name__.removeprefix('emit_')}: {signature_error}")
        fe.fail(f"{handler.__name__.removeprefix('emit_')}: {error}", KernelTypeError)


def _hashable(v: Any) -> bool:
    try:
        hash(v)
    except TypeError:
        return False
    return True
