"""Inlining: parameters, early returns, and closures."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any: what they are is what these functions find out

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from max.kernel.frontend.arithmetic import Suppressed, describe, is_number, is_runtime, tuple_like
from max.kernel.frontend.builder import Scope
from max.kernel.frontend.expressions import Closure, Frame
from max.kernel.frontend.statements import FALLS, Statements
from max.kernel.ir.nodes import Block, Const, Ref
from max.kernel.language import mathlib
from max.kernel.language.source import FunctionSource, InlineFunction, returns_early

_MAX_INLINE_DEPTH = 48


class Inlining(Statements):
    """Calls of functions that are part of the kernel."""

    # ***** inlining *****
    def call_inline(
        self, function: InlineFunction | Closure, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        source = function.source
        if len(self.calls) >= _MAX_INLINE_DEPTH:
            self.fail(
                f"{source.name} is inlined {_MAX_INLINE_DEPTH} deep; a recursion needs an end known at compile time"
            )
        env = self._bind_parameters(source, args, kwargs)
        outer = function.env if isinstance(function, Closure) else None
        frame = Frame(source, env, self.depth, outer_env=outer)
        caller, loops = self.frame, self.loops
        location = self.location(self.node)
        self.calls.append(location)
        self.frame, self.loops = frame, []
        node = source.node
        try:
            if isinstance(node, ast.Lambda):
                return self.expr(node.body)
            return self._inline_body(node, frame)
        finally:
            self.frame, self.loops = caller, loops
            self.calls.pop()

    def _inline_body(self, node: ast.FunctionDef, frame: Frame) -> Any:
        errors = len(self.diagnostics)
        scope = None
        if returns_early(node):
            frame.label = self.b.label()
            scope = self.b.open("branch")
        signal = self.body(node.body)
        if signal == FALLS:
            if scope is not None:
                end = Scope("branch")
                self.b.emit(Block(self.b.label(), end.body))  # type: ignore[arg-type]
                frame.results.append((None, end))
            else:
                frame.results.append((None, self.b.scopes[-1]))
        if scope is not None:
            self.b.close()
        if len(self.diagnostics) > errors:
            raise Suppressed
        if scope is None:
            return frame.results[0][0]
        if not frame.leaves:
            self.b.splice(scope)
            return frame.results[0][0] if frame.results else None
        assert frame.label is not None
        finish = self._result_slots(
            frame, [value for value, _ in frame.results], [where for _, where in frame.results]
        )
        self.b.emit(Block(frame.label, tuple(scope.body)))
        return finish()

    def _result_slots(
        self, frame: Frame, values: list[Any], scopes: list[Scope]
    ) -> Callable[[], Any]:
        """Joins the values of several returns through slots, written before each one leaves."""
        first = values[0]
        if not any(is_runtime(v) for v in values) and all(
            type(v) is type(first) and v == first for v in values
        ):
            return lambda: first
        if isinstance(first, tuple) and all(
            type(v) is type(first) and len(v) == len(first) for v in values
        ):
            parts = [
                self._result_slots(frame, [v[k] for v in values], scopes) for k in range(len(first))
            ]
            return lambda: tuple_like(first, (part() for part in parts))
        if not all(isinstance(v, (Ref, Const)) or is_number(v) for v in values):
            shown = ", ".join(describe(v) for v in values)
            self.fail(
                f"{frame.source.name} returns {shown}, of which one cannot be chosen at run time"
            )
        common, weak = self.loose_type(first)
        for v in values[1:]:
            other, other_weak = self.loose_type(v)
            unified = self.unify(common, weak, other, other_weak)
            if unified is None:
                self.fail(
                    f"{frame.source.name} returns {describe(first)} and {describe(v)}, which have no common type"
                )
            common, weak = unified, weak and other_weak
        slot = self.b.alloc(common)
        for v, where in zip(values, scopes, strict=True):
            with self.b.reopened(where):
                self.b.assign(slot, self.coerce(v, common))
        return lambda: self.b.read(slot, common)

    def _bind_parameters(
        self, source: FunctionSource, args: list[Any], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        a = source.node.args
        names = [p.arg for p in (*a.posonlyargs, *a.args)]
        env: dict[str, Any] = {}
        if len(args) > len(names) and a.vararg is None:
            self.fail(f"{source.name} takes {len(names)} arguments, got {len(args)}")
        env.update(zip(names, args, strict=False))
        if a.vararg is not None:
            env[a.vararg.arg] = tuple(args[len(names) :])
        keyword_names = {p.arg for p in a.kwonlyargs} | set(names)
        for name, value in kwargs.items():
            if name not in keyword_names:
                self.fail(
                    f"{source.name} has no parameter {name!r}; it has {', '.join(sorted(keyword_names))}"
                )
            if name in env:
                self.fail(f"{source.name} got {name!r} twice")
            env[name] = value
        defaults = dict(zip(reversed(names), reversed(a.defaults), strict=False))
        defaults.update(
            {p.arg: d for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None}
        )
        for name in (*names, *(p.arg for p in a.kwonlyargs)):
            if name not in env:
                if name not in defaults:
                    self.fail(f"{source.name} needs a value for {name!r}")
                env[name] = self.evaluate_in(source, defaults[name])
        for p in (*a.posonlyargs, *a.args, *a.kwonlyargs):
            if p.annotation is not None and (
                isinstance(env[p.arg], (Ref, Const)) or is_number(env[p.arg])
            ):
                env[p.arg] = self.annotated(
                    env[p.arg], self.evaluate_in(source, p.annotation), p.arg
                )
        return env

    def evaluate_in(self, source: FunctionSource, node: ast.expr) -> Any:
        """A default or an annotation, in the scope of its function's definition."""
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                return (
                    self.evaluate_in(source, ast.parse(node.value, mode="eval").body)
                    if node.value
                    else None
                )
            return node.value
        caller, at = self.frame, self.node
        self.frame = Frame(source, {}, self.depth)
        try:
            return self.expr(node)
        finally:
            self.frame, self.node = caller, at

    def float_power(self, a: Any, b: Any) -> Any:
        return self.call_inline(mathlib.pow, [a, b], {})
