"""Loops of one worker: run-time loops, whose variables are in slots, and unrolled loops."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

import ast
from typing import Any

from max.kernel.errors import KernelSyntaxError, KernelValueError
from max.kernel.frontend.arithmetic import truth
from max.kernel.frontend.conversions import literal, sequence, type_of
from max.kernel.frontend.division import most_iterations, note_loop
from max.kernel.frontend.state import (
    BREAK,
    CONTINUE,
    DEAD,
    FALLS,
    RETURN,
    Frontend,
    Loop,
    NeedsSlots,
    StatementVisitor,
)
from max.kernel.frontend.syntax.assignment import bind_target
from max.kernel.frontend.syntax.parallel_loops import for_chunks, for_parallel, for_vectors
from max.kernel.frontend.syntax.run_time_loops import (
    emit_loop,
    loop_body,
    loop_target,
    run_time_loop,
)
from max.kernel.frontend.values import (
    ChunksValue,
    ParallelValue,
    RangeValue,
    Runtime,
    VectorsValue,
    describe,
)
from max.kernel.ir.nodes import Block, Const, For, Leave, Ref, While
from max.kernel.language.limits import MAX_UNROLLED
from max.kernel.language.source import assigned_names
from max.kernel.types import INDEX


def _for(fe: Frontend, node: ast.For) -> int:
    """A `for` loop, by the kind of its domain; returns its signal."""
    if node.orelse:
        fe.fail(
            "'else' of a loop is not part of the kernel language",
            KernelSyntaxError,
            node.orelse[0],
        )
    domain = fe.expr(node.iter)
    fe.node = node.iter
    if isinstance(domain, RangeValue):
        return _for_range(fe, node, domain)
    if isinstance(domain, ParallelValue):
        return for_parallel(fe, node, domain)
    if isinstance(domain, ChunksValue):
        return for_chunks(fe, node, domain)
    if isinstance(domain, VectorsValue):
        return for_vectors(fe, node, domain)
    if isinstance(domain, (Ref, Const, Runtime)):
        fe.fail(f"cannot loop over {describe(domain)}; loop over range(…) and index")
    return _unroll(fe, node, sequence(fe, domain, node.iter))


def _for_range(fe: Frontend, node: ast.For, domain: RangeValue) -> int:
    """A `for` loop over a run-time range; returns its signal."""
    start, stop = fe.b.index(domain.start), fe.b.index(domain.stop)

    def build() -> None:
        loop = Loop(fe.depth, False, True)
        var = fe.b.ref(INDEX)
        max_iterations = most_iterations(fe.b, start, stop, domain.step)
        scope = fe.b.open("loop")
        note_loop(fe.b, scope, var, start, stop, domain.step)
        fe.node = node.target
        bind_target(fe, node.target, var)
        loop_body(fe, node, loop)
        fe.b.close()
        body = tuple(scope.body)
        emit_loop(fe, loop, For(var, start, stop, domain.step, body, node.lineno, max_iterations))

    run_time_loop(fe, assigned_names(node.body), assigned_names([loop_target(node)]), build)
    return FALLS


def _while(fe: Frontend, node: ast.While) -> int:
    """A `while` loop; returns its signal."""
    if node.orelse:
        fe.fail(
            "'else' of a loop is not part of the kernel language",
            KernelSyntaxError,
            node.orelse[0],
        )

    def build() -> None:
        loop = Loop(fe.depth, False, True)
        # the head computes the condition anew in each iteration
        head = fe.b.open("head")
        cond = fe.expr(node.test)
        fe.node = node.test
        cond = truth(fe, cond)
        fe.b.close()
        scope = fe.b.open("branch")
        loop_body(fe, node, loop)
        fe.b.close()
        test = cond if isinstance(cond, Ref) else literal(fe, cond, type_of(fe, True))
        emit_loop(fe, loop, While(tuple(head.body), test, tuple(scope.body), node.lineno))

    # an assignment in the condition binds names too
    names = assigned_names(node.body) | assigned_names([loop_target(node)])
    run_time_loop(fe, names, frozenset(), build)
    return FALLS


def _unroll(fe: Frontend, node: ast.For, items: tuple[Any, ...]) -> int:
    """Unrolls a loop over a Python sequence; with slots if ``break`` or ``continue`` depend on run-time values."""
    env, saved, state = fe.frame.env, dict(fe.frame.env), fe.checkpoint()
    loop = Loop(fe.depth, True, False)
    try:
        return _unroll_iteration(fe, node, items, loop)
    except NeedsSlots as needed:
        if needed.loop is not loop:
            raise
    fe.frame.env = env
    env.clear()
    env.update(saved)
    fe.rollback(state)
    fe.b.scopes[-1].forget(state.lengths[-1])

    def build() -> None:
        # run_time_loop has counted a run-time loop, which an unrolled one is not
        fe.depth -= 1
        fe.loop_depth -= 1
        slotted = Loop(fe.depth, True, True)
        scope = fe.b.open("branch")
        _unroll_iteration(fe, node, items, slotted)
        fe.b.close()
        # without a `break` nothing leaves the block
        if slotted.break_label is None:
            fe.b.splice(scope)
        else:
            fe.b.emit(Block(slotted.break_label, tuple(scope.body)))

    run_time_loop(fe, assigned_names(node.body), assigned_names([loop_target(node)]), build)
    return FALLS


def _unroll_iteration(fe: Frontend, node: ast.For, items: tuple[Any, ...], loop: Loop) -> int:
    """Emits the body once per item and returns the signal; `loop` tells whether jumps need labels."""
    for item in items:
        fe.node = node.target
        fe.b.unrolled += 1
        if fe.b.unrolled > MAX_UNROLLED:
            fe.fail(
                f"the kernel has more than {MAX_UNROLLED} unrolled iterations; use a run-time loop",
                KernelValueError,
            )
        bind_target(fe, node.target, item)
        fe.loops.append(loop)
        scope = fe.b.open("branch") if loop.slots else None
        signal = fe.body(node.body)
        fe.loops.pop()
        if scope is not None:
            fe.b.close()
            if loop.continue_label is None:
                fe.b.splice(scope)
            else:
                fe.b.emit(Block(loop.continue_label, tuple(scope.body)))
                loop.continue_label = None
                # a `continue` ends the iteration only: the next one is reached
                signal = FALLS if signal == DEAD else signal
        if signal == BREAK:
            break
        if signal in (DEAD, RETURN):
            return signal
    return FALLS


def _break(fe: Frontend, node: ast.Break) -> int:
    return _jump(fe, "break", node)


def _continue(fe: Frontend, node: ast.Continue) -> int:
    return _jump(fe, "continue", node)


def _jump(fe: Frontend, kind: str, node: ast.AST) -> int:
    """A `break` or `continue`: the signal in an unrolled loop, else a jump to a label."""
    if not fe.loops:
        fe.fail(f"{kind!r} outside of a loop", KernelSyntaxError, node)
    loop = fe.loops[-1]
    # not under a run-time condition: every path takes the jump, which needs no code
    if loop.unrolled and loop.depth == fe.depth:
        return BREAK if kind == "break" else CONTINUE
    # `_unroll` starts again, with labels
    if not loop.slots:
        raise NeedsSlots(loop)
    if kind == "break":
        if loop.break_label is None:
            loop.break_label = fe.b.label()
        label = loop.break_label
    else:
        if loop.continue_label is None:
            loop.continue_label = fe.b.label()
        label = loop.continue_label
    fe.may_have_left = True
    fe.b.emit(Leave(label))
    return DEAD


LOOPS: dict[type[ast.AST], StatementVisitor] = {
    ast.For: _for,
    ast.While: _while,
    ast.Break: _break,
    ast.Continue: _continue,
}
