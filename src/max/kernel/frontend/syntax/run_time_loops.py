"""The common part of run-time loops: slots for carried variables, and the body."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from max.kernel.frontend.conversions import coerce, loose_type
from max.kernel.frontend.state import Frontend, Loop, Retype
from max.kernel.frontend.values import POISON, SlotVar, Unbound, describe, is_number
from max.kernel.ir.nodes import Block, Const, Ref
from max.kernel.types import Type

_MAX_RETRIES = 64


def run_time_loop(
    fe: Frontend, names: frozenset[str], targets: frozenset[str], build: Callable[[], None]
) -> None:
    """Compiles a loop. Variables that it assigns are carried in slots.

    A first compilation assumes that variables keep their types. If one does not (`Retype`), the loop is compiled again
    with a common type, until types are stable.

    Args:
        fe: The frontend.
        names: The variables that the body assigns.
        targets: The loop variables.
        build: Compiles the loop.
    """
    env = fe.frame.env
    types: dict[str, tuple[Type | None, bool]] = {}
    for _ in range(_MAX_RETRIES):
        saved = dict(env)
        state = fe.checkpoint()
        owner = object()
        promoted = _promote(fe, names - targets, types, owner)
        for name in targets:
            if isinstance(env.get(name), SlotVar):
                env[name] = Unbound("it is the variable of a loop")
        fe.depth += 1
        fe.loop_depth += 1
        try:
            build()
            break
        except Retype as change:
            if change.var.owner is not owner:
                raise
            types[change.var.name] = (change.type, change.weak)
            env.clear()
            env.update(saved)
            fe.frame.env = env
            fe.rollback(state)
        finally:
            fe.depth = state.depth
            fe.loop_depth = state.loop_depth
    else:
        fe.fail("the types of the loop's variables are not stable; convert them before the loop")
    # sorted: the kernel's text, whose hash is its cache key, must not depend on the order of a set
    for name in sorted(names | targets):
        before = saved.get(name)
        if isinstance(before, SlotVar) and name in promoted and promoted[name] is before:
            continue  # carried by an outer loop
        if name in promoted:
            var = promoted[name]
            env[name] = fe.b.read(var.slot, var.type)
        elif name in env:
            env[name] = (
                env[name]
                if env[name] is POISON
                else Unbound("it is assigned in a loop that may not run; assign it before the loop")
            )


def _promote(
    fe: Frontend, names: frozenset[str], types: dict[str, tuple[Type | None, bool]], owner: object
) -> dict[str, SlotVar]:
    """Moves variables that a loop assigns to slots; returns the slots by name."""
    env = fe.frame.env
    promoted: dict[str, SlotVar] = {}
    for name in sorted(names):
        if name not in env:
            continue
        value = env[name]
        # an outer loop's slot serves, unless the type must change
        if isinstance(value, SlotVar) and name not in types:
            promoted[name] = value
            continue
        if not (isinstance(value, (Ref, Const, SlotVar)) or is_number(value)):
            if value is not POISON and not isinstance(value, Unbound):
                env[name] = Unbound(
                    f"it was {describe(value)} before the loop, and the loop assigns it"
                )
            continue
        type, weak = types.get(name) or loose_type(fe, value)
        if type is None:
            env[name] = Unbound("its type changes in the loop")
            continue
        initial = coerce(fe, value, type)
        var = SlotVar(fe.b.alloc(type), type, weak, owner, name)
        fe.b.assign(var.slot, initial)
        promoted[name] = env[name] = var
    return promoted


def loop_body(fe: Frontend, node: ast.For | ast.While, loop: Loop) -> None:
    """Compiles a loop's body into the open scope."""
    fe.loops.append(loop)
    scope = fe.b.open("branch")
    fe.body(node.body)
    fe.b.close()
    fe.loops.pop()
    if loop.continue_label is None:
        fe.b.splice(scope)
    else:
        fe.b.emit(Block(loop.continue_label, tuple(scope.body)))
        loop.continue_label = None


def emit_loop(fe: Frontend, loop: Loop, stmt: Any) -> None:
    """Emits a loop, inside a block if the loop has a ``break``."""
    fe.b.emit(stmt if loop.break_label is None else Block(loop.break_label, (stmt,)))


def loop_target(node: ast.For | ast.While) -> Any:
    """The expression that binds names in a loop's header: the target of ``for``, the condition of ``while``."""
    return node.target if isinstance(node, ast.For) else node.test
