"""Assignments to names, tuples, views and tiles."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

import ast
from typing import Any

from max.kernel.errors import KernelSyntaxError, KernelValueError
from max.kernel.frontend.conversions import coerce, loose_type, sequence, unify
from max.kernel.frontend.state import Frontend, Retype
from max.kernel.frontend.values import SlotVar, describe, is_number
from max.kernel.frontend.views.methods import assign
from max.kernel.frontend.views.tiles import Tile, tile_set
from max.kernel.frontend.views.views import View
from max.kernel.ir.nodes import Const, Ref


def bind_target(fe: Frontend, target: ast.expr, value: Any) -> None:
    """Assigns to a target: a name, a tuple of targets, an element of a view or of a tile."""
    if target.__class__ is ast.Name:
        bind(fe, target.id, value)  # type: ignore[attr-defined]
    elif isinstance(target, (ast.Tuple, ast.List)):
        _unpack(fe, target, value)
    elif isinstance(target, ast.Subscript):
        owner = fe.expr(target.value)
        index = fe.expr(target.slice)
        fe.node = target
        if isinstance(owner, View):
            assign(fe, owner, index, value)
        elif isinstance(owner, Tile):
            tile_set(fe, owner, index, value)
        elif isinstance(owner, (Ref, Const)):
            fe.fail("lanes cannot be assigned one by one; use k.select or k.shuffle")
        else:
            fe.fail(f"{describe(owner)} cannot be changed; use a tile or a view")
    else:
        fe.fail(f"cannot assign to {type(target).__name__}", KernelSyntaxError)


def _unpack(fe: Frontend, target: ast.Tuple | ast.List, value: Any) -> None:
    """Binds the items of a value to the targets of a tuple; a starred target takes the rest."""
    items = sequence(fe, value, target)
    stars = [k for k, t in enumerate(target.elts) if isinstance(t, ast.Starred)]
    if stars:
        star, starred_count = stars[0], len(items) - len(target.elts) + 1
        if starred_count < 0:
            fe.fail(
                f"cannot unpack {len(items)} values into {len(target.elts)} names",
                KernelValueError,
            )
        after = star + starred_count
        items = (*items[:star], tuple(items[star:after]), *items[after:])
    if len(items) != len(target.elts):
        fe.fail(
            f"cannot unpack {len(items)} values into {len(target.elts)} names", KernelValueError
        )
    for t, v in zip(target.elts, items, strict=True):
        bind_target(fe, t.value if isinstance(t, ast.Starred) else t, v)


def bind(fe: Frontend, name: str, value: Any) -> None:
    """Assigns a local variable; a variable that a run-time loop carries is stored to its slot.

    Raises:
        Retype: The slot cannot hold the value: the loop is compiled again with another type.
    """
    env = fe.frame.env
    current = env.get(name)
    if not isinstance(current, SlotVar):
        env[name] = value
        return
    if isinstance(value, (Ref, Const)) or is_number(value):
        type, weak = loose_type(fe, value)
        unified = unify(fe, current.type, current.weak, type, weak)
        # a slot of a literal's type takes a stronger type only by compiling the loop again
        if unified is not None and unified is current.type and not (current.weak and not weak):
            fe.b.assign(current.slot, coerce(fe, value, unified))
            return
        raise Retype(current, unified, current.weak and weak)
    raise Retype(current, None, False)
