"""The frontend: walks a kernel's syntax tree and builds its IR.

It runs the function as Python would, but with values of two kinds: Python values, known at compile time, and atoms, known at
run time. An ``if`` on a Python value compiles one branch; loops over Python sequences unroll; helpers are inlined.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from max.kernel import handlers, mathlib
from max.kernel.arithmetic import (
    Failure,
    Runtime,
    SlotVar,
    Suppressed,
    describe,
    is_number,
    is_runtime,
)
from max.kernel.builder import Scope
from max.kernel.errors import (
    Diagnostic,
    KernelError,
    KernelNameError,
    KernelSyntaxError,
    KernelTypeError,
    KernelValueError,
    Location,
)
from max.kernel.expressions import POISON, Closure, Expressions, Frame, RangeValue, Unbound
from max.kernel.ir import Atom, Block, Const, For, If, Leave, Message, Parallel, Raise, Ref, While
from max.kernel.loops import ChunksValue, ParallelValue, VectorsValue
from max.kernel.source import FunctionSource, InlineFunction, assigned_names, returns_early
from max.kernel.target import Target
from max.kernel.types import INDEX, ScalarType, SIMDAnnotation, Type, scalar, scalar_type, vector
from max.kernel.views import Tile, View, assign, tile_set

# how a statement ends
FALLS, DEAD, BREAK, CONTINUE, RETURN = range(5)
_MAX_INLINE_DEPTH = 48
_MAX_RETRIES = 64


class _Retype(Exception):
    """A variable's slot needs another type (None: no slot), so its loop is compiled again."""

    def __init__(self, var: SlotVar, type: Type | None, weak: bool) -> None:
        super().__init__(var.name)
        self.var, self.type, self.weak = var, type, weak


class _NeedsSlots(Exception):
    """An unrolled loop is left at run time, so its variables need slots."""

    def __init__(self, loop: _Loop) -> None:
        super().__init__()
        self.loop = loop


class _Loop:
    """A loop that is being compiled, for ``break`` and ``continue``."""

    def __init__(self, depth: int, unrolled: bool, slots: bool) -> None:
        self.depth, self.unrolled, self.slots = depth, unrolled, slots
        self.break_label: int | None = None
        self.continue_label: int | None = None


class Frontend(Expressions):
    """Compiles one kernel."""

    def __init__(self, target: Target, check: bool) -> None:
        super().__init__()
        self.target = target
        self.check = check
        self.handlers = handlers.HANDLERS
        self.print_function = handlers.PRINT
        self.depth = 0  # nesting of run-time control flow
        self.parallel_depth = 0
        self.loop_depth = 0
        self.loops: list[_Loop] = []
        self.calls: list[Location] = []
        self.diagnostics: list[Diagnostic] = []
        self.error_kind: type[KernelError] = KernelError
        self.messages: list[Message] = []
        self.phases = 0
        self.scratch_bytes = 0
        self._statements: dict[type[ast.AST], Callable[[Any], int]] = {
            ast.Expr: self._expr_stmt,
            ast.Assign: self._assign,
            ast.AugAssign: self._aug_assign,
            ast.AnnAssign: self._ann_assign,
            ast.For: self._for,
            ast.While: self._while,
            ast.If: self._if,
            ast.Return: self._return,
            ast.Break: self._break,
            ast.Continue: self._continue,
            ast.Pass: lambda n: FALLS,
            ast.Raise: self._raise,
            ast.FunctionDef: self._function_def,
            ast.Assert: self._assert,
        }

    def run(self, node: ast.FunctionDef) -> None:
        """Compiles the kernel's body; its parameters are bound.

        Raises:
            KernelError: with all errors that were found.
        """
        label = self.b.label() if returns_early(node) else None
        scope = self.b.open("branch") if label is not None else None
        self.frame.label = label
        self.body(node.body)
        if scope is not None and label is not None:
            self.b.close()
            self.b.emit(Block(label, tuple(scope.body)))
        if self.diagnostics:
            raise (self.error_kind if len(self.diagnostics) == 1 else KernelError)(self.diagnostics)

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
            visit = self._statements.get(node.__class__)
            scopes, depth = len(self.b.scopes), self.depth
            loops, parallel = len(self.loops), self.parallel_depth
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
                del self.loops[loops:], self.calls[calls:]
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
        if current.__class__ is not SlotVar:
            env[name] = value
            return
        if isinstance(value, (Ref, Const)) or is_number(value):
            type, weak = self.loose_type(value)
            unified = self.unify(current.type, current.weak, type, weak)
            if unified is current.type and not (current.weak and not weak):
                self.b.assign(current.slot, self.coerce(value, unified))
                return
            raise _Retype(current, unified, current.weak and weak)
        raise _Retype(current, None, False)

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

    # ***** loops *****
    def _for(self, node: ast.For) -> int:
        if node.orelse:
            self.fail(
                "'else' of a loop is not part of the kernel language",
                KernelSyntaxError,
                node.orelse[0],
            )
        domain = self.expr(node.iter)
        self.node = node.iter
        if isinstance(domain, RangeValue):
            return self._for_range(node, domain)
        if isinstance(domain, ParallelValue):
            return self._for_parallel(node, domain)
        if isinstance(domain, ChunksValue):
            return self._for_chunks(node, domain)
        if isinstance(domain, VectorsValue):
            return self._for_vectors(node, domain)
        if isinstance(domain, (Ref, Const, Runtime)):
            self.fail(f"cannot loop over {describe(domain)}; loop over range(…) and index")
        return self._unrolled(node, self.sequence(domain, node.iter))

    def run_time_loop(
        self, names: frozenset[str], targets: frozenset[str], build: Callable[[], None]
    ) -> None:
        """Compiles a loop, giving slots to the variables that it changes, until their types are stable."""
        env = self.frame.env
        types: dict[str, tuple[Type | None, bool]] = {}
        for _ in range(_MAX_RETRIES):
            saved = dict(env)
            state = self._checkpoint()
            owner = object()
            promoted = self._promote(names - targets, types, owner)
            for name in targets:
                if isinstance(env.get(name), SlotVar):
                    env[name] = Unbound("it is the variable of a loop")
            self.depth += 1
            self.loop_depth += 1
            try:
                build()
                break
            except _Retype as change:
                if change.var.owner is not owner:
                    raise
                types[change.var.name] = (change.type, change.weak)
                env.clear()
                env.update(saved)
                self.frame.env = env
                self._rollback(state)
            finally:
                self.depth = state[0]
                self.loop_depth = state[1]
        else:
            self.fail(
                "the types of the loop's variables do not settle; convert them before the loop"
            )
        for name in names | targets:
            before = saved.get(name)
            if isinstance(before, SlotVar) and name in promoted and promoted[name] is before:
                continue  # it belongs to an outer loop
            if name in promoted:
                var = promoted[name]
                env[name] = self.b.read(var.slot, var.type)
            elif name in env:
                env[name] = (
                    env[name]
                    if env[name] is POISON
                    else Unbound(
                        "it is assigned in a loop that may not run; assign it before the loop"
                    )
                )

    def _promote(
        self, names: frozenset[str], types: dict[str, tuple[Type | None, bool]], owner: object
    ) -> dict[str, SlotVar]:
        env = self.frame.env
        promoted: dict[str, SlotVar] = {}
        for name in sorted(names):
            if name not in env:
                continue
            value = env[name]
            if isinstance(value, SlotVar) and name not in types:
                promoted[name] = value
                continue
            if not (isinstance(value, (Ref, Const, SlotVar)) or is_number(value)):
                if value is not POISON and not isinstance(value, Unbound):
                    env[name] = Unbound(
                        f"it was {describe(value)} before the loop, and the loop assigns it"
                    )
                continue
            type, weak = types.get(name) or self.loose_type(value)
            if type is None:
                env[name] = Unbound("its type changes in the loop")
                continue
            initial = self.coerce(value, type)
            var = SlotVar(self.b.alloc(type), type, weak, owner, name)
            self.b.assign(var.slot, initial)
            promoted[name] = env[name] = var
        return promoted

    def _checkpoint(self) -> tuple[Any, ...]:
        b = self.b
        lengths = [len(scope.body) for scope in b.scopes]
        counts = (len(self.messages), self.phases, self.scratch_bytes)
        nesting = (
            len(self.loops),
            self.parallel_depth,
            len(self.calls),
            self.frame,
            len(self.diagnostics),
        )
        return (self.depth, self.loop_depth, lengths, *counts, *nesting)

    def _rollback(self, state: tuple[Any, ...]) -> None:
        b = self.b
        b.unwind(len(state[2]))
        del (
            self.messages[state[3] :],
            self.loops[state[6] :],
            self.calls[state[8] :],
            self.diagnostics[state[10] :],
        )
        self.depth, self.loop_depth, self.phases, self.scratch_bytes = (
            state[0],
            state[1],
            state[4],
            state[5],
        )
        self.parallel_depth, self.frame = state[7], state[9]

    def loop_body(self, node: ast.For | ast.While, loop: _Loop) -> None:
        """Compiles a loop's body into the scope at hand."""
        self.loops.append(loop)
        scope = self.b.open("branch")
        self.body(node.body)
        self.b.close()
        self.loops.pop()
        if loop.continue_label is None:
            self.b.splice(scope)
        else:
            self.b.emit(Block(loop.continue_label, tuple(scope.body)))
            loop.continue_label = None

    def emit_loop(self, loop: _Loop, stmt: Any) -> None:
        """Emits a loop, in a block where it is left by ``break``."""
        self.b.emit(stmt if loop.break_label is None else Block(loop.break_label, (stmt,)))

    def _for_range(self, node: ast.For, domain: RangeValue) -> int:
        start, stop = self.b.index(domain.start), self.b.index(domain.stop)

        def build() -> None:
            loop = _Loop(self.depth, False, True)
            var = self.b.ref(INDEX)
            scope = self.b.open("loop")
            self.node = node.target
            self.bind_target(node.target, var)
            self.loop_body(node, loop)
            self.b.close()
            self.emit_loop(loop, For(var, start, stop, domain.step, tuple(scope.body), node.lineno))

        self.run_time_loop(assigned_names(node.body), assigned_names([_target(node)]), build)
        return FALLS

    def _while(self, node: ast.While) -> int:
        if node.orelse:
            self.fail(
                "'else' of a loop is not part of the kernel language",
                KernelSyntaxError,
                node.orelse[0],
            )

        def build() -> None:
            loop = _Loop(self.depth, False, True)
            head = self.b.open("head")
            cond = self.expr(node.test)
            self.node = node.test
            cond = self.truth(cond)
            self.b.close()
            scope = self.b.open("branch")
            self.loop_body(node, loop)
            self.b.close()
            test = cond if isinstance(cond, Ref) else self.literal(cond, self.type_of(True))
            self.emit_loop(loop, While(tuple(head.body), test, tuple(scope.body), node.lineno))

        names = assigned_names(node.body) | assigned_names([_target(node)])
        self.run_time_loop(names, frozenset(), build)
        return FALLS

    def _unrolled(self, node: ast.For, items: tuple[Any, ...]) -> int:
        """A loop over a Python sequence."""
        env, saved, state = self.frame.env, dict(self.frame.env), self._checkpoint()
        loop = _Loop(self.depth, True, False)
        try:
            return self._unrolled_once(node, items, loop)
        except _NeedsSlots as wanted:
            if wanted.loop is not loop:
                raise
        self.frame.env = env
        env.clear()
        env.update(saved)
        self._rollback(state)
        self.b.scopes[-1].forget(state[2][-1])

        def build() -> None:
            self.depth -= 1
            self.loop_depth -= 1
            slotted = _Loop(self.depth, True, True)
            scope = self.b.open("branch")
            self._unrolled_once(node, items, slotted)
            self.b.close()
            if slotted.break_label is None:
                self.b.splice(scope)
            else:
                self.b.emit(Block(slotted.break_label, tuple(scope.body)))

        self.run_time_loop(assigned_names(node.body), assigned_names([_target(node)]), build)
        return FALLS

    def _unrolled_once(self, node: ast.For, items: tuple[Any, ...], loop: _Loop) -> int:
        for item in items:
            self.node = node.target
            self.bind_target(node.target, item)
            self.loops.append(loop)
            scope = self.b.open("branch") if loop.slots else None
            signal = self.body(node.body)
            self.loops.pop()
            if scope is not None:
                self.b.close()
                if loop.continue_label is None:
                    self.b.splice(scope)
                else:
                    self.b.emit(Block(loop.continue_label, tuple(scope.body)))
                    loop.continue_label = None
                    signal = FALLS if signal == DEAD else signal
            if signal == BREAK:
                break
            if signal in (DEAD, RETURN):
                return signal
        return FALLS

    def _break(self, node: ast.Break) -> int:
        return self._jump("break", node)

    def _continue(self, node: ast.Continue) -> int:
        return self._jump("continue", node)

    def _jump(self, kind: str, node: ast.AST) -> int:
        loop = self.loops[-1]
        if loop.unrolled and loop.depth == self.depth:
            return BREAK if kind == "break" else CONTINUE
        if not loop.slots:
            raise _NeedsSlots(loop)
        if kind == "break":
            if loop.break_label is None:
                loop.break_label = self.b.label()
            label = loop.break_label
        else:
            if loop.continue_label is None:
                loop.continue_label = self.b.label()
            label = loop.continue_label
        self.b.emit(Leave(label))
        return DEAD

    # ***** parallel loops *****
    def _parallel(
        self,
        total: Atom,
        grain: Atom,
        multiple: int,
        node: ast.For,
        fill: Callable[[Ref, Ref], None],
    ) -> int:
        if self.parallel_depth:
            self.fail("a parallel loop cannot stand inside of another one")
        if self.loop_depth:
            self.fail(
                "a parallel loop cannot stand inside of a run-time loop: its counter is used once a launch"
            )
        phase = self.phases

        def build() -> None:
            self.phases = phase + 1
            begin, end = self.b.ref(INDEX), self.b.ref(INDEX)
            scope = self.b.open("loop")
            self.parallel_depth += 1
            fill(begin, end)
            self.parallel_depth -= 1
            self.b.close()
            self.b.emit(
                Parallel(begin, end, total, grain, multiple, phase, tuple(scope.body), node.lineno)
            )

        self.run_time_loop(assigned_names(node.body), assigned_names([_target(node)]), build)
        return FALLS

    def _for_parallel(self, node: ast.For, domain: ParallelValue) -> int:
        total: Any = 1
        for size in domain.shape:
            total = self.b.mul(total, size)

        def fill(begin: Ref, end: Ref) -> None:
            loop = _Loop(self.depth, False, True)
            if len(domain.shape) <= 1:
                self._index_loop(node, loop, begin, end, lambda i: i if domain.scalar else (i,))
            else:
                self._grid_loop(node, loop, domain.shape, begin, end)

        return self._parallel(self.b.index(total), self.b.index(domain.grain), 1, node, fill)

    def _no_break(self, loop: _Loop) -> None:
        if loop.break_label is not None:
            self.fail("'break' cannot leave a parallel loop; use 'continue'", KernelSyntaxError)

    def _index_loop(
        self, node: ast.For, loop: _Loop, begin: Any, end: Any, indices: Callable[[Ref], Any]
    ) -> None:
        var = self.b.ref(INDEX)
        scope = self.b.open("loop")
        self.node = node.target
        self.bind_target(node.target, indices(var))
        self.loop_body(node, loop)
        self._no_break(loop)
        self.b.close()
        self.b.emit(
            For(var, self.b.index(begin), self.b.index(end), 1, tuple(scope.body), node.lineno)
        )

    def _grid_loop(
        self, node: ast.For, loop: _Loop, shape: tuple[Any, ...], begin: Ref, end: Ref
    ) -> None:
        """Walks flat indices row by row: the divisions are done once a row."""
        b = self.b
        slot = b.alloc(INDEX)
        b.assign(slot, begin)
        head = b.open("head")
        position = b.read(slot, INDEX)
        running = b.op("lt", (position, end), self.type_of(True))
        b.close()
        body = b.open("loop")
        position = b.read(slot, INDEX)
        rest: Any = position
        outer: list[Any] = []
        for size in reversed(shape[1:]):
            outer.append(b.op("umod", (rest, b.index(size)), INDEX))
            rest = b.op("udiv", (rest, b.index(size)), INDEX)
        outer = [rest, *reversed(outer)]
        first = outer.pop()
        last = b.index(shape[-1])
        count = b.op(
            "min",
            (b.op("sub", (last, first), INDEX, "nsw"), b.op("sub", (end, position), INDEX, "nsw")),
            INDEX,
        )
        stop = b.op("add", (first, count), INDEX, "nsw")
        b.assign(slot, b.op("add", (position, count), INDEX, "nsw"))
        self._index_loop(node, loop, first, stop, lambda i: (*outer, i))
        b.close()
        b.emit(While(tuple(head.body), running, tuple(body.body), node.lineno))

    def _for_chunks(self, node: ast.For, domain: ChunksValue) -> int:
        def fill(begin: Ref, end: Ref) -> None:
            loop = _Loop(self.depth, False, True)
            self.node = node.target
            self.bind_target(node.target, (begin, end))
            self.loop_body(node, loop)
            self._no_break(loop)

        return self._parallel(
            self.b.index(domain.total), self.b.index(domain.grain), domain.multiple, node, fill
        )

    # ***** vector loops *****
    def _for_vectors(self, node: ast.For, domain: VectorsValue) -> int:
        b, width = self.b, domain.width
        start = domain.start
        count = b.sub(domain.stop, start)
        full: Any
        rest: Any
        if isinstance(count, int):
            full, rest = max(count, 0) // width * width, max(count, 0) % width
        else:
            count = b.op("max", (count, b.const(0, INDEX)), INDEX)
            rest = self.binary("mod", count, width)
            full = b.op("sub", (count, rest), INDEX, "nsw")
        full_stop = b.add(start, full)

        def build() -> None:
            loop = _Loop(self.depth, False, True)
            whole = b.open("branch")
            if full != 0:
                var = b.ref(INDEX)
                scope = b.open("loop")
                self.node = node.target
                self.bind_target(node.target, (var, None))
                self.loop_body(node, loop)
                b.close()
                b.emit(
                    For(
                        var,
                        b.index(start),
                        b.index(full_stop),
                        width,
                        tuple(scope.body),
                        node.lineno,
                    )
                )
            if rest != 0:
                mask = self.tail_mask(rest, width)
                tail = b.open("branch")
                self.node = node.target
                self.bind_target(node.target, (b.index(full_stop), mask))
                self.loop_body(node, loop)
                b.close()
                some = (
                    True
                    if isinstance(rest, int)
                    else b.op("gt", (rest, b.const(0, INDEX)), self.type_of(True))
                )
                if some is True:
                    b.splice(tail)
                else:
                    b.emit(If(some, tuple(tail.body), (), node.lineno))
            b.close()
            if loop.break_label is None:
                b.splice(whole)
            else:
                b.emit(Block(loop.break_label, tuple(whole.body)))

        self.run_time_loop(assigned_names(node.body), assigned_names([_target(node)]), build)
        return FALLS

    def tail_mask(self, rest: Any, width: int) -> Atom:
        """The first ``rest`` of ``width`` lanes."""
        b = self.b
        lanes = vector(scalar_type("i32"), width)
        if isinstance(rest, int):
            return b.const(
                tuple(k < rest for k in range(width)), lanes.with_dtype(scalar_type("bool"))
            )
        narrow = self.splat(b.op("cast", (rest,), scalar(lanes.dtype)), width)
        return b.op(
            "lt",
            (b.const(tuple(range(width)), lanes), narrow),
            lanes.with_dtype(scalar_type("bool")),
        )

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
        scope = self.b.open("branch")
        self.raise_at_run_time(exception, text, values)
        self.b.close()
        self.b.emit(If(self.b.op("not", (cond,), cond.type), tuple(scope.body), (), self.b.line))

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
            isinstance(v, tuple) and len(v) == len(first) for v in values
        ):
            parts = [
                self._result_slots(frame, [v[k] for v in values], scopes) for k in range(len(first))
            ]
            return lambda: tuple(part() for part in parts)
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

    def context_attribute(self, value: Any, name: str) -> Any:
        return handlers.context_attribute(self, value, name)


def _as_load(node: ast.AugAssign) -> ast.BinOp:
    cached = getattr(node, "_as_load", None)
    if cached is None:
        target = node.target
        fields = {**dict(ast.iter_fields(target)), "ctx": ast.Load()}
        left = ast.copy_location(type(target)(**fields), target)
        cached = ast.copy_location(ast.BinOp(left, node.op, node.value), node)
        node._as_load = cached  # type: ignore[attr-defined]
    return cached


def _target(node: ast.For | ast.While) -> Any:
    return node.target if isinstance(node, ast.For) else node.test


def _statement_name(node: ast.AST) -> str:
    return f"'{type(node).__name__.lower()}'"


__all__ = ["Frontend", "KernelNameError", "Mapping"]
