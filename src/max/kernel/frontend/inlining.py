"""Inlining of functions and closures: parameters and early returns."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from max.kernel.frontend.builder import Scope
from max.kernel.frontend.conversions import coerce, convert_annotated, loose_type, unify
from max.kernel.frontend.outlining import outlined_body
from max.kernel.frontend.state import FALLS, Frame, Frontend, NeverReturns, Suppressed
from max.kernel.frontend.values import Closure, describe, is_number, is_runtime, tuple_like
from max.kernel.ir.nodes import Block, Const, Ref
from max.kernel.language.source import FunctionSource, InlineFunction, returns_early

_MAX_INLINE_DEPTH = 48


# ***** inlining *****
def call_inline(
    fe: Frontend, function: InlineFunction | Closure, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """Compiles the body of a function at its call, in a new frame, and returns its result."""
    source = function.source
    if len(fe.calls) >= _MAX_INLINE_DEPTH:
        fe.fail(
            f"{source.name} is inlined {_MAX_INLINE_DEPTH} deep; a recursion must end at compile time"
        )
    env = _bind_parameters(fe, source, args, kwargs)
    outer = function.env if isinstance(function, Closure) else None
    # a branch of an expression may not run: a `raise` there must not fail at compile time
    in_branch = fe.frame.in_branch or len(fe.b.scopes) != fe.statement_scopes
    frame = Frame(source, env, fe.depth, in_branch=in_branch, outer_env=outer)
    caller, loops, scopes = fe.frame, fe.loops, fe.statement_scopes
    call = fe.node
    fe.calls.append(fe.location(call))
    fe.frame, fe.loops = frame, []
    node = source.node
    try:
        if isinstance(node, ast.Lambda):
            return fe.expr(node.body)
        if isinstance(function, InlineFunction) and function.outlined:
            outlined_body(fe, function, frame, lambda: _inline_body(fe, node, frame))
            return None
        return _inline_body(fe, node, frame)
    except NeverReturns:
        pass  # checked below, in the caller's frame
    finally:
        fe.frame, fe.loops, fe.statement_scopes = caller, loops, scopes
        fe.calls.pop()
    fe.node = call
    if len(fe.b.scopes) != scopes:
        # a branch of an expression needs a value, to merge with that of the other branch
        fe.fail(f"{source.name} raises on every path and has no value for this expression")
    raise NeverReturns


def _inline_body(fe: Frontend, node: ast.FunctionDef, frame: Frame) -> Any:
    """Emits the body of an inlined function in its frame and returns its result."""
    errors = len(fe.diagnostics)
    scope = None
    if returns_early(node):
        frame.label = fe.b.label()
        scope = fe.b.open("branch")
    signal = fe.body(node.body)
    if signal == FALLS:
        if scope is not None:
            # falling off the end returns None, and like each return needs a place for its result
            end = Scope("branch")
            fe.b.emit(Block(fe.b.label(), end.body))  # type: ignore[arg-type]
            frame.results.append((None, end))
        else:
            frame.results.append((None, fe.b.scopes[-1]))
    if scope is not None:
        fe.b.close()
    if len(fe.diagnostics) > errors:
        raise Suppressed
    if not frame.leaves:
        if scope is not None:
            fe.b.splice(scope)
        if not frame.results:
            raise NeverReturns
        return frame.results[0][0]
    assert scope is not None and frame.label is not None
    finish = _result_slots(
        fe, frame, [value for value, _ in frame.results], [where for _, where in frame.results]
    )
    fe.b.emit(Block(frame.label, tuple(scope.body)))
    return finish()


def _result_slots(
    fe: Frontend, frame: Frame, values: list[Any], scopes: list[Scope]
) -> Callable[[], Any]:
    """Merges the values of several returns through slots, which are stored before each return."""
    first = values[0]
    if not any(is_runtime(v) for v in values) and all(
        type(v) is type(first) and v == first for v in values
    ):
        return lambda: first
    if isinstance(first, tuple) and all(
        type(v) is type(first) and len(v) == len(first) for v in values
    ):
        parts = [
            _result_slots(fe, frame, [v[k] for v in values], scopes) for k in range(len(first))
        ]
        return lambda: tuple_like(first, (part() for part in parts))
    if not all(isinstance(v, (Ref, Const)) or is_number(v) for v in values):
        results = ", ".join(describe(v) for v in values)
        fe.fail(f"{frame.source.name} returns {results}, which cannot be selected from at run time")
    common, weak = loose_type(fe, first)
    for v in values[1:]:
        other, other_weak = loose_type(fe, v)
        unified = unify(fe, common, weak, other, other_weak)
        if unified is None:
            fe.fail(
                f"{frame.source.name} returns {describe(first)} and {describe(v)}, which have no common type"
            )
        common, weak = unified, weak and other_weak
    slot = fe.b.alloc(common)
    for v, where in zip(values, scopes, strict=True):
        with fe.b.reopen(where):
            fe.b.assign(slot, coerce(fe, v, common))
    return lambda: fe.b.read(slot, common)


def _bind_parameters(
    fe: Frontend, source: FunctionSource, args: list[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The names and values of a function's parameters in a call, converted to their annotations."""
    a = source.node.args
    names = [p.arg for p in (*a.posonlyargs, *a.args)]
    env: dict[str, Any] = {}
    if len(args) > len(names) and a.vararg is None:
        fe.fail(f"{source.name} takes {len(names)} arguments, got {len(args)}")
    env.update(zip(names, args, strict=False))
    if a.vararg is not None:
        env[a.vararg.arg] = tuple(args[len(names) :])
    keyword_names = {p.arg for p in a.kwonlyargs} | set(names)
    for name, value in kwargs.items():
        if name not in keyword_names:
            fe.fail(
                f"{source.name} has no parameter {name!r}; it has {', '.join(sorted(keyword_names))}"
            )
        if name in env:
            fe.fail(f"{source.name} got {name!r} twice")
        env[name] = value
    # defaults belong to the last parameters
    defaults = dict(zip(reversed(names), reversed(a.defaults), strict=False))
    defaults.update(
        {p.arg: d for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None}
    )
    for name in (*names, *(p.arg for p in a.kwonlyargs)):
        if name not in env:
            if name not in defaults:
                fe.fail(f"{source.name} needs a value for {name!r}")
            env[name] = evaluate_in(fe, source, defaults[name])
    for p in (*a.posonlyargs, *a.args, *a.kwonlyargs):
        if p.annotation is not None and (
            isinstance(env[p.arg], (Ref, Const)) or is_number(env[p.arg])
        ):
            env[p.arg] = convert_annotated(
                fe, env[p.arg], annotation_in(fe, source, p.annotation), p.arg
            )
    return env


def evaluate_in(fe: Frontend, source: FunctionSource, node: ast.expr) -> Any:
    """Evaluates a default or an annotation in the scope of its function's definition."""
    if isinstance(node, ast.Constant):
        return node.value
    caller, at = fe.frame, fe.node
    fe.frame = Frame(source, {}, fe.depth)
    try:
        return fe.expr(node)
    finally:
        fe.frame, fe.node = caller, at


def annotation_in(fe: Frontend, source: FunctionSource, node: ast.expr) -> Any:
    """The value of an annotation, which may be a text; see `evaluate_in`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    return evaluate_in(fe, source, node)
