"""Straight-line statements, ``if``, ``return`` and ``raise``."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from max.kernel.errors import KernelSyntaxError
from max.kernel.frontend.arithmetic import truth
from max.kernel.frontend.builder import Scope
from max.kernel.frontend.conversions import convert_annotated
from max.kernel.frontend.division import note_condition
from max.kernel.frontend.merging import join
from max.kernel.frontend.raising import fail_statically, raise_at_run_time
from max.kernel.frontend.state import DEAD, FALLS, RETURN, Frontend, StatementVisitor
from max.kernel.frontend.syntax.assignment import bind_target
from max.kernel.frontend.syntax.formatting import format_parts, run_time_format
from max.kernel.frontend.values import Closure, Unbound, describe
from max.kernel.ir.nodes import Block, If, Leave, Ref
from max.kernel.language.source import FunctionSource, assigned_names


def _expr_stmt(fe: Frontend, node: ast.Expr) -> int:
    if node.value.__class__ is not ast.Constant:
        fe.expr(node.value)
    return FALLS


def _assign(fe: Frontend, node: ast.Assign) -> int:
    value = fe.expr(node.value)
    for target in node.targets:
        fe.node = target
        bind_target(fe, target, value)
    return FALLS


def _aug_assign(fe: Frontend, node: ast.AugAssign) -> int:
    load = _as_load(node)
    value = fe.expr(load)
    fe.node = node
    bind_target(fe, node.target, value)
    return FALLS


def _ann_assign(fe: Frontend, node: ast.AnnAssign) -> int:
    """An assignment with an annotation, to which the value is converted."""
    if node.value is None:
        return FALLS
    value = fe.expr(node.value)
    annotation = fe.expr(node.annotation)
    fe.node = node
    bind_target(
        fe,
        node.target,
        convert_annotated(fe, value, annotation, getattr(node.target, "id", "value")),
    )
    return FALLS


def _function_def(fe: Frontend, node: ast.FunctionDef) -> int:
    frame = fe.frame
    source = FunctionSource(node, frame.source.file, frame.source.globals, frame.source.closure)
    frame.env[node.name] = Closure(source, frame.env)
    return FALLS


def _assert(fe: Frontend, node: ast.Assert) -> int:
    fe.fail(
        "assert is not part of the kernel language; use raise, k.static_assert or k.assume",
        KernelSyntaxError,
    )


# ***** if *****
def _if(fe: Frontend, node: ast.If) -> int:
    """An `if`: the taken branch of a compile-time condition, else both branches with their variables joined."""
    cond = fe.expr(node.test)
    fe.node = node.test
    cond = truth(fe, cond)
    if not isinstance(cond, Ref):
        return fe.body(node.body if cond else node.orelse)
    before = fe.frame.env
    ends: list[tuple[int, dict[str, Any], Any]] = []
    fe.depth += 1
    for branch in (node.body, node.orelse):
        fe.frame.env = dict(before)
        scope = fe.b.open("branch")
        note_condition(fe.b, scope, cond, branch is node.body)
        signal = fe.body(branch)
        fe.b.close()
        ends.append((signal, fe.frame.env, scope))
    fe.depth -= 1
    (s1, env1, then), (s2, env2, orelse) = ends
    reads: list[tuple[str, Callable[[], Any]]] = []
    merged = before
    if s1 == DEAD and s2 == DEAD:
        pass
    elif s1 == DEAD or s2 == DEAD:
        # one branch has left: what follows runs only if the condition selects the other one
        note_condition(fe.b, fe.b.scopes[-1], cond, s2 == DEAD)
        survivor = env2 if s1 == DEAD else env1
        # in place, as closures hold this dictionary
        before.clear()
        before.update(survivor)
    else:
        fe.node = node
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
            value, finish = join(fe, a, then, b, orelse, "the branches")
            if finish is None:
                merged[name] = value
            else:
                reads.append((name, finish))
    fe.b.emit(
        If(
            cond,
            tuple(then.body),
            tuple(orelse.body),
            node.lineno if not fe.calls else fe.b.line,
        )
    )
    fe.frame.env = merged
    for name, finish in reads:
        merged[name] = finish()
    return DEAD if s1 == DEAD and s2 == DEAD else FALLS


# ***** return and raise *****
def _return(fe: Frontend, node: ast.Return) -> int:
    """A `return`: records the result and leaves the inlined function; returns the signal."""
    value = None if node.value is None else fe.expr(node.value)
    fe.node = node
    frame = fe.frame
    if value is not None and not fe.calls:
        fe.fail("a kernel returns nothing; it writes its results")
    if frame.label is None:  # no early return is possible
        frame.results.append((value, Scope("branch")))
        return RETURN
    scope = Scope("branch")
    # receives the assignment of the result once the types of all returns are known
    fe.b.emit(Block(fe.b.label(), scope.body))  # type: ignore[arg-type]
    frame.results.append((value, scope))
    if fe.depth == frame.depth and not (fe.loops and fe.loops[-1].slots):
        return RETURN
    frame.leaves = fe.may_have_left = True
    fe.b.emit(Leave(frame.label))
    return DEAD


def _raise(fe: Frontend, node: ast.Raise) -> int:
    """A `raise`; fails at compile time if an inlined function raises it unconditionally."""
    call = node.exc
    if call is None:
        fe.fail("raise names an exception", KernelSyntaxError)
    text, values = "", list[Any]()
    if isinstance(call, ast.Call):
        kind = fe.expr(call.func)
        if call.args and isinstance(call.args[0], ast.JoinedStr):
            text, values = format_parts(fe, call.args[0])
        elif call.args:
            text = fe.expr(call.args[0])
            values = [fe.expr(a) for a in call.args[1:]]
    else:
        kind = fe.expr(call)
    fe.node = node
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        fe.fail(f"raise takes an exception class, got {describe(kind)}")
    if not isinstance(text, str):
        fe.fail(f"the message of raise is a string, got {describe(text)}")
    if fe.calls and not fe.is_conditional:
        # a check of compile-time values failed in an inlined function: the caller learns it now
        fail_statically(fe, kind, text, values)
    text, atoms = run_time_format(fe, text, values, "raise")
    raise_at_run_time(fe, kind.__name__, text, tuple(atoms))
    return DEAD


def _as_load(node: ast.AugAssign) -> ast.BinOp:
    """The binary operation of an augmented assignment, with the target as its left operand."""
    # kept at the node: a body may be compiled many times
    cached = getattr(node, "_as_load", None)
    if cached is None:
        target = node.target
        fields: dict[str, Any] = {**dict(ast.iter_fields(target)), "ctx": ast.Load()}
        left = ast.copy_location(type(target)(**fields), target)
        cached = ast.copy_location(ast.BinOp(left, node.op, node.value), node)
        node._as_load = cached  # type: ignore[attr-defined]
    return cached


STATEMENTS: dict[type[ast.AST], StatementVisitor] = {
    ast.Expr: _expr_stmt,
    ast.Assign: _assign,
    ast.AugAssign: _aug_assign,
    ast.AnnAssign: _ann_assign,
    ast.If: _if,
    ast.Return: _return,
    ast.Pass: lambda fe, node: FALLS,
    ast.Raise: _raise,
    ast.FunctionDef: _function_def,
    ast.Assert: _assert,
}
