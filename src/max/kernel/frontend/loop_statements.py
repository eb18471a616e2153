"""Loops: run-time loops with slots for the variables they change, unrolled loops, parallel and vector loops."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from max.kernel.errors import KernelSyntaxError
from max.kernel.frontend.arithmetic import Runtime, SlotVar, describe, is_number
from max.kernel.frontend.division import MAX_SIZE, interval, note_chunk, note_loop, note_positive
from max.kernel.frontend.expressions import POISON, RangeValue, Unbound
from max.kernel.frontend.inlining import Inlining
from max.kernel.frontend.loops import ChunksValue, ParallelValue, VectorsValue
from max.kernel.frontend.statements import (
    BREAK,
    CONTINUE,
    DEAD,
    FALLS,
    RETURN,
    Loop,
    NeedsSlots,
    Retype,
)
from max.kernel.ir.nodes import Atom, Block, Const, For, If, Leave, Parallel, Ref, While
from max.kernel.language.source import assigned_names
from max.kernel.targets.target import Target
from max.kernel.types import INDEX, Type, scalar, scalar_type, vector

_MAX_RETRIES = 64


class Loops(Inlining):
    """``for`` and ``while``."""

    def __init__(self, target: Target, check: int) -> None:
        super().__init__(target, check)
        self.statements.update(
            {
                ast.For: self._for,
                ast.While: self._while,
                ast.Break: self._break,
                ast.Continue: self._continue,
            }
        )

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
            except Retype as change:
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
            len(self.tail_masks),
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
            self.tail_masks[state[11] :],
        )
        self.depth, self.loop_depth, self.phases, self.scratch_bytes = (
            state[0],
            state[1],
            state[4],
            state[5],
        )
        self.parallel_depth, self.frame = state[7], state[9]

    def loop_body(self, node: ast.For | ast.While, loop: Loop) -> None:
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

    def emit_loop(self, loop: Loop, stmt: Any) -> None:
        """Emits a loop, in a block where it is left by ``break``."""
        self.b.emit(stmt if loop.break_label is None else Block(loop.break_label, (stmt,)))

    def _for_range(self, node: ast.For, domain: RangeValue) -> int:
        start, stop = self.b.index(domain.start), self.b.index(domain.stop)

        def build() -> None:
            loop = Loop(self.depth, False, True)
            var = self.b.ref(INDEX)
            scope = self.b.open("loop")
            note_loop(self.b, scope, var, start, stop, domain.step)
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
            loop = Loop(self.depth, False, True)
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
        loop = Loop(self.depth, True, False)
        try:
            return self._unrolled_once(node, items, loop)
        except NeedsSlots as wanted:
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
            slotted = Loop(self.depth, True, True)
            scope = self.b.open("branch")
            self._unrolled_once(node, items, slotted)
            self.b.close()
            if slotted.break_label is None:
                self.b.splice(scope)
            else:
                self.b.emit(Block(slotted.break_label, tuple(scope.body)))

        self.run_time_loop(assigned_names(node.body), assigned_names([_target(node)]), build)
        return FALLS

    def _unrolled_once(self, node: ast.For, items: tuple[Any, ...], loop: Loop) -> int:
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
        if not self.loops:
            self.fail(f"{kind!r} outside of a loop", KernelSyntaxError, node)
        loop = self.loops[-1]
        if loop.unrolled and loop.depth == self.depth:
            return BREAK if kind == "break" else CONTINUE
        if not loop.slots:
            raise NeedsSlots(loop)
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
            note_chunk(self.b, scope, begin, end, total)
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
            loop = Loop(self.depth, False, True)
            if len(domain.shape) <= 1:
                self._index_loop(node, loop, begin, end, lambda i: i if domain.scalar else (i,))
            else:
                self._grid_loop(node, loop, domain.shape, begin, end)

        return self._parallel(self.b.index(total), self.b.index(domain.grain), 1, node, fill)

    def _no_break(self, loop: Loop) -> None:
        if loop.break_label is not None:
            self.fail("'break' cannot leave a parallel loop; use 'continue'", KernelSyntaxError)

    def _index_loop(
        self, node: ast.For, loop: Loop, begin: Any, end: Any, indices: Callable[[Ref], Any]
    ) -> None:
        var = self.b.ref(INDEX)
        scope = self.b.open("loop")
        note_loop(self.b, scope, var, self.b.index(begin), self.b.index(end), 1)
        self.node = node.target
        self.bind_target(node.target, indices(var))
        self.loop_body(node, loop)
        self._no_break(loop)
        self.b.close()
        self.b.emit(
            For(var, self.b.index(begin), self.b.index(end), 1, tuple(scope.body), node.lineno)
        )

    def _grid_loop(
        self, node: ast.For, loop: Loop, shape: tuple[Any, ...], begin: Ref, end: Ref
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
        b.intervals[position.id] = 0, MAX_SIZE
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
            loop = Loop(self.depth, False, True)
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
        from_zero = interval(b, b.index(start))[0] >= 0

        def build() -> None:
            loop = Loop(self.depth, False, True)
            whole = b.open("branch")
            if full != 0:
                var = b.ref(INDEX)
                scope = b.open("loop")
                note_loop(b, scope, var, b.index(start), b.index(full_stop), width)
                if from_zero:
                    note_positive(b, scope, domain.stop)
                self.node = node.target
                self.bind_target(node.target, (var, None))
                self.tail_masks.append(None)
                self.loop_body(node, loop)
                self.tail_masks.pop()
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
                if from_zero:
                    note_positive(b, tail, domain.stop)
                self.node = node.target
                self.bind_target(node.target, (b.index(full_stop), mask))
                self.tail_masks.append(mask)
                self.loop_body(node, loop)
                self.tail_masks.pop()
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


def _target(node: ast.For | ast.While) -> Any:
    return node.target if isinstance(node, ast.For) else node.test
