"""Statements: assignments, conditions, returns and errors. What loops over and what is inlined is built on this."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from max.kernel.errors import (
    Diagnostic,
    KernelError,
    KernelSyntaxError,
    KernelTypeError,
    KernelValueError,
    Location,
)
from max.kernel.frontend import division, handlers
from max.kernel.frontend.arithmetic import (
    Failure,
    SlotVar,
    Suppressed,
    describe,
    is_number,
    is_runtime,
)
from max.kernel.frontend.builder import Scope
from max.kernel.frontend.expressions import POISON, Closure, Expressions, Unbound
from max.kernel.frontend.views import Tile, View, assign, tile_set
from max.kernel.ir.nodes import Atom, Block, Const, If, Leave, Message, Raise, Ref
from max.kernel.language import mathlib
from max.kernel.language.source import FunctionSource, assigned_names
from max.kernel.targets.target import Target
from max.kernel.types import ScalarType, SIMDAnnotation, Type, scalar, vector

# how a statement ends
FALLS, DEAD, BREAK, CONTINUE, RETURN = range(5)


class Retype(Exception):
    """A variable's slot needs another type (None: no slot), so its loop is compiled again."""

    def __init__(self, var: SlotVar, type: Type | None, weak: bool) -> None:
        super().__init__(var.name)
        self.var, self.type, self.weak = var, type, weak


class NeedsSlots(Exception):
    """An unrolled loop is left at run time, so its variables need slots."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop = loop


class Loop:
    """A loop that is being compiled, for ``break`` and ``continue``."""

    def __init__(self, depth: int, unrolled: bool, slots: bool) -> None:
        self.depth, self.unrolled, self.slots = depth, unrolled, slots
        self.break_label: int | None = None
        self.continue_label: int | None = None


class Statements(Expressions):
    """Straight-line statements, ``if``, ``return`` and ``raise``."""

    def __init__(self, target: Target, check: int) -> None:
        super().__init__()
        self.target = target
        self.check = check
        self.handlers = handlers.HANDLERS
        self.name = ""
        """The kernel's, for errors of checks."""
        self.depth = 0  # nesting of run-time control flow
        self.parallel_depth = 0
        self.loop_depth = 0
        self.loops: list[Loop] = []
        # of the vector loops around; None for one that is not in its tail
        self.tail_masks: list[Atom | None] = []
        self.calls: list[Location] = []
        self.diagnostics: list[Diagnostic] = []
        self.error_kind: type[KernelError] = KernelError
        self.messages: list[Message] = []
        self.phases = 0
        self.scratch_bytes = 0
        self.statements: dict[type[ast.AST], Callable[[Any], int]] = {
            ast.Expr: self._expr_stmt,
            ast.Assign: self._assign,
            ast.AugAssign: self._aug_assign,
            ast.AnnAssign: self._ann_assign,
            ast.If: self._if,
            ast.Return: self._return,
            ast.Pass: lambda n: FALLS,
            ast.Raise: self._raise,
            ast.FunctionDef: self._function_def,
            ast.Assert: self._assert,
        }

    # ***** errors *****
    def location(self, node: ast.AST) -> Location:
        """Where a node is in the source."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        file = self.frame.source.file
        return Location(file, line, column + 1, linecache.getline(file, line).rstrip("\n"))

    def fail(
        self, message: str, kind: type[KernelError] = KernelTypeError, node: ast.AST | None = None
    ) -> NoReturn:
        places = [self.location(node or self.node), *reversed(self.calls)]
        while len(places) > 1 and places[0].file == mathlib.__file__:  # the mistake is the caller's
            places.pop(0)
        raise Failure(Diagnostic(message, places[0], tuple(places[1:])), kind)

    def report(self, failure: Failure) -> None:
        """Keeps an error, once."""
        if not self.diagnostics:
            self.error_kind = failure.kind
        if failure.diagnostic not in self.diagnostics:
            self.diagnostics.append(failure.diagnostic)

    # ***** statements *****
    def body(self, nodes: Sequence[ast.stmt]) -> int:
        """Compiles statements up to the one that does not fall through."""
        for node in nodes:
            self.node = node
            if not self.calls:
                self.b.line = node.lineno
            visit = self.statements.get(node.__class__)
            scopes, depth = len(self.b.scopes), self.depth
            loops, parallel, tails = len(self.loops), self.parallel_depth, len(self.tail_masks)
            frame, env, calls = self.frame, self.frame.env, len(self.calls)
            try:
                if visit is None:
                    self.fail(
                        f"{_statement_name(node)} is not part of the kernel language",
                        KernelSyntaxError,
                    )
                signal = visit(node)
            except (Failure, Suppressed) as error:
                if isinstance(error, Failure):
                    self.report(error)
                self.b.unwind(scopes)
                del self.loops[loops:], self.calls[calls:], self.tail_masks[tails:]
                self.depth, self.parallel_depth, self.frame, frame.env = depth, parallel, frame, env
                for name in assigned_names([node]):
                    self.frame.env[name] = POISON
                signal = FALLS
            if signal != FALLS:
                return signal
        return FALLS

    def _expr_stmt(self, node: ast.Expr) -> int:
        if node.value.__class__ is not ast.Constant:
            self.expr(node.value)
        return FALLS

    def _assign(self, node: ast.Assign) -> int:
        value = self.expr(node.value)
        for target in node.targets:
            self.node = target
            self.bind_target(target, value)
        return FALLS

    def bind_target(self, target: ast.expr, value: Any) -> None:
        if target.__class__ is ast.Name:
            self.bind(target.id, value)  # type: ignore[attr-defined]
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target, value)
        elif isinstance(target, ast.Subscript):
            owner = self.expr(target.value)
            index = self.expr(target.slice)
            self.node = target
            if isinstance(owner, View):
                assign(self, owner, index, value)
            elif isinstance(owner, Tile):
                tile_set(self, owner, index, value)
            elif isinstance(owner, (Ref, Const)):
                self.fail("lanes cannot be assigned one by one; use k.select or k.shuffle")
            else:
                self.fail(f"{describe(owner)} cannot be changed; use a tile or a view")
        else:
            self.fail(f"cannot assign to {type(target).__name__}", KernelSyntaxError)

    def _unpack(self, target: ast.Tuple | ast.List, value: Any) -> None:
        items = self.sequence(value, target)
        stars = [k for k, t in enumerate(target.elts) if isinstance(t, ast.Starred)]
        if stars:
            at, rest = stars[0], len(items) - len(target.elts) + 1
            if rest < 0:
                self.fail(
                    f"cannot unpack {len(items)} values into {len(target.elts)} names",
                    KernelValueError,
                )
            items = (*items[:at], tuple(items[at : at + rest]), *items[at + rest :])
        if len(items) != len(target.elts):
            self.fail(
                f"cannot unpack {len(items)} values into {len(target.elts)} names", KernelValueError
            )
        for t, v in zip(target.elts, items, strict=True):
            self.bind_target(t.value if isinstance(t, ast.Starred) else t, v)

    def bind(self, name: str, value: Any) -> None:
        env = self.frame.env
        current = env.get(name)
        if not isinstance(current, SlotVar):
            env[name] = value
            return
        if isinstance(value, (Ref, Const)) or is_number(value):
            type, weak = self.loose_type(value)
            unified = self.unify(current.type, current.weak, type, weak)
            if unified is not None and unified is current.type and not (current.weak and not weak):
                self.b.assign(current.slot, self.coerce(value, unified))
                return
            raise Retype(current, unified, current.weak and weak)
        raise Retype(current, None, False)

    def _aug_assign(self, node: ast.AugAssign) -> int:
        load = _as_load(node)
        value = self.expr(load)
        self.node = node
        self.bind_target(node.target, value)
        return FALLS

    def _ann_assign(self, node: ast.AnnAssign) -> int:
        if node.value is None:
            return FALLS
        value = self.expr(node.value)
        annotation = self.expr(node.annotation)
        self.node = node
        self.bind_target(
            node.target, self.annotated(value, annotation, getattr(node.target, "id", "value"))
        )
        return FALLS

    def annotated(self, value: Any, annotation: Any, name: str) -> Any:
        """Converts literals to an annotated type, and checks other values."""
        if isinstance(annotation, ScalarType):
            type: Type = scalar(annotation)
        elif isinstance(annotation, SIMDAnnotation):
            type = vector(annotation.dtype, annotation.width)
        else:
            return value
        if isinstance(value, (Ref, Const)) and value.type is not type:
            if value.type.dtype is not type.dtype or value.type.width:
                self.fail(f"{name} is {type.describe()}, got {describe(value)}")
        return self.coerce(value, type)

    def _function_def(self, node: ast.FunctionDef) -> int:
        frame = self.frame
        source = FunctionSource(node, frame.source.file, frame.source.globals, frame.source.closure)
        frame.env[node.name] = Closure(source, frame.env)
        return FALLS

    def _assert(self, node: ast.Assert) -> int:
        self.fail(
            "assert is not part of the kernel language; use raise, k.static_assert or k.assume",
            KernelSyntaxError,
        )

    # ***** if *****
    def _if(self, node: ast.If) -> int:
        cond = self.expr(node.test)
        self.node = node.test
        cond = self.truth(cond)
        if not isinstance(cond, Ref):
            return self.body(node.body if cond else node.orelse)
        before = self.frame.env
        ends: list[tuple[int, dict[str, Any], Any]] = []
        self.depth += 1
        for branch in (node.body, node.orelse):
            self.frame.env = dict(before)
            scope = self.b.open("branch")
            division.note_condition(self.b, scope, cond, branch is node.body)
            signal = self.body(branch)
            self.b.close()
            ends.append((signal, self.frame.env, scope))
        self.depth -= 1
        (s1, env1, then), (s2, env2, orelse) = ends
        reads: list[tuple[str, Callable[[], Any]]] = []
        merged = before
        if s1 == DEAD and s2 == DEAD:
            pass
        elif s1 == DEAD or s2 == DEAD:
            division.note_condition(self.b, self.b.scopes[-1], cond, s2 == DEAD)
            survivor = env2 if s1 == DEAD else env1
            before.clear()
            before.update(survivor)
        else:
            self.node = node
            for name in sorted(assigned_names(node.body) | assigned_names(node.orelse)):
                if name not in env1 and name not in env2:
                    continue
                a, b = env1.get(name), env2.get(name)
                if a is b and name in env1 and name in env2:
                    merged[name] = a
                    continue
                if (
                    name not in env1
                    or name not in env2
                    or isinstance(a, Unbound)
                    or isinstance(b, Unbound)
                ):
                    merged[name] = Unbound("only one branch of the 'if' assigns it")
                    continue
                value, finish = self.join(a, then, b, orelse, "the branches")
                if finish is None:
                    merged[name] = value
                else:
                    reads.append((name, finish))
        self.b.emit(
            If(
                cond,
                tuple(then.body),
                tuple(orelse.body),
                node.lineno if not self.calls else self.b.line,
            )
        )
        self.frame.env = merged
        for name, finish in reads:
            merged[name] = finish()
        return DEAD if s1 == DEAD and s2 == DEAD else FALLS

    # ***** return and raise *****
    def _return(self, node: ast.Return) -> int:
        value = None if node.value is None else self.expr(node.value)
        self.node = node
        frame = self.frame
        if value is not None and not self.calls:
            self.fail("a kernel returns nothing; it writes its results")
        if frame.label is None:  # nothing can leave this function early
            frame.results.append((value, Scope("branch")))
            return RETURN
        scope = Scope("branch")
        # filled with the assignment of the result when the types of all returns are known
        self.b.emit(Block(self.b.label(), scope.body))  # type: ignore[arg-type]
        frame.results.append((value, scope))
        if self.depth == frame.depth and not (self.loops and self.loops[-1].slots):
            return RETURN
        frame.leaves = True
        self.b.emit(Leave(frame.label))
        return DEAD

    def _raise(self, node: ast.Raise) -> int:
        call = node.exc
        if call is None:
            self.fail("raise names an exception", KernelSyntaxError)
        text, values = "", list[Any]()
        if isinstance(call, ast.Call):
            kind = self.expr(call.func)
            if call.args and isinstance(call.args[0], ast.JoinedStr):
                text, values = self.format_parts(call.args[0])
            elif call.args:
                text = self.expr(call.args[0])
                values = [self.expr(a) for a in call.args[1:]]
        else:
            kind = self.expr(call)
        self.node = node
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            self.fail(f"raise takes an exception class, got {describe(kind)}")
        if not isinstance(text, str):
            self.fail(f"the message of raise is a string, got {describe(text)}")
        text, atoms = self.run_time_format(text, values, "raise")
        self.raise_at_run_time(kind.__name__, text, tuple(atoms))
        return DEAD

    def run_time_format(
        self, text: str, values: Sequence[Any], what: str
    ) -> tuple[str, list[Atom]]:
        """Puts values that are known into a format text; gives what is left of it and the run-time values."""
        parts = text.split("{}")
        if len(parts) - 1 != len(values):
            self.fail(
                f"{what}: {len(parts) - 1} placeholders '{{}}' for {len(values)} values",
                KernelValueError,
            )
        atoms: list[Atom] = []
        out = parts[0]
        for value, rest in zip(values, parts[1:], strict=True):
            if isinstance(value, (Ref, Const)):
                if value.type.width:
                    self.fail(f"{what} takes scalars, got {describe(value)}")
                atoms.append(self.widened(value))
                out += "{}" + rest
            elif is_runtime(value):
                self.fail(f"{what} takes scalars, got {describe(value)}")
            else:
                out += str(value).replace("{", "{{").replace("}", "}}") + rest
        return out, atoms

    def raise_at_run_time(self, exception: str, text: str, values: tuple[Atom, ...]) -> None:
        if len(values) > 5:
            self.fail(
                f"raise takes at most five run-time values, got {len(values)}", KernelValueError
            )
        at = self.location(self.node)
        self.messages.append(
            Message(exception, text, tuple(v.type.dtype for v in values), at.file, at.line)
        )
        self.b.emit(Raise(len(self.messages) - 1, values, self.b.line))

    def guard(self, cond: Atom, exception: str, text: str, values: tuple[Atom, ...]) -> None:
        self.refuse(self.b.op("not", (cond,), cond.type), exception, text, values)

    def refuse(self, bad: Atom, exception: str, text: str, values: tuple[Atom, ...]) -> None:
        if any(bad in scope.checked for scope in self.b.scopes):
            return
        self.b.scopes[-1].checked.add(bad)
        at = self.location(self.node)
        kernel = f" in kernel {self.name}" if self.name else ""
        place = f"{at.file}:{at.line}{kernel}".replace("{", "{{").replace("}", "}}")
        scope = self.b.open("branch")
        self.raise_at_run_time(exception, f"{text} ({place})", values)
        self.b.close()
        self.b.emit(If(bad, tuple(scope.body), (), self.b.line))

    def active_lanes(self, width: int) -> Atom | None:
        mask = self.tail_masks[-1] if self.tail_masks else None
        return mask if mask is not None and mask.type.width == width else None

    def integer_division(self, op: str, x: Atom, y: Atom) -> Atom:
        return division.divide(self, op, x, y)

    def context_attribute(self, value: Any, name: str) -> Any:
        return handlers.context_attribute(self, value, name)


def _as_load(node: ast.AugAssign) -> ast.BinOp:
    cached = getattr(node, "_as_load", None)
    if cached is None:
        target = node.target
        fields: dict[str, Any] = {**dict(ast.iter_fields(target)), "ctx": ast.Load()}
        left = ast.copy_location(type(target)(**fields), target)
        cached = ast.copy_location(ast.BinOp(left, node.op, node.value), node)
        node._as_load = cached  # type: ignore[attr-defined]
    return cached


def _statement_name(node: ast.AST) -> str:
    return f"'{type(node).__name__.lower()}'"
