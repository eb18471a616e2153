"""Merging of values at the end of branches."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from max.kernel.frontend.builder import Scope
from max.kernel.frontend.conversions import coerce, loose_type, unify
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.values import (
    POISON,
    Poison,
    SlotVar,
    Unbound,
    describe,
    is_number,
    is_runtime,
    tuple_like,
)
from max.kernel.ir.nodes import Const, Let, Ref


def join(
    fe: Frontend, a: Any, then: Scope, b: Any, orelse: Scope, branches: str
) -> tuple[Any, Callable[[], Any] | None]:
    """Merges two values at the end of two bodies that are not emitted yet.

    Returns:
        The merged value and None, or, if it needs a slot, None and a function that reads it after the `If` is emitted.
    """
    if a is b or (not is_runtime(a) and not is_runtime(b) and type(a) is type(b) and _same(a, b)):
        return a, None
    if isinstance(a, tuple) and type(a) is type(b) and len(a) == len(b):
        parts = [join(fe, x, then, y, orelse, branches) for x, y in zip(a, b, strict=True)]
        return None, lambda: tuple_like(a, (v if read is None else read() for v, read in parts))
    numeric = (Ref, Const, SlotVar)
    if not all(isinstance(v, numeric) or is_number(v) for v in (a, b)):
        if isinstance(a, Poison) or isinstance(b, Poison):
            return POISON, None
        return Unbound(
            f"{branches} give {describe(a)} and {describe(b)}, which cannot be chosen at run time"
        ), None
    (ta, wa), (tb, wb) = (loose_type(fe, v) for v in (a, b))
    common = unify(fe, ta, wa, tb, wb)
    if common is None:
        return Unbound(
            f"{branches} give {describe(a)} and {describe(b)}, which have no common type"
        ), None
    # both bodies write the slot; the value after the `If` is a read of it
    slot = fe.b.alloc(common)
    for value, scope in ((a, then), (b, orelse)):
        with fe.b.reopen(scope):
            fe.b.assign(slot, coerce(fe, value, common))
    return None, lambda: fe.b.read(slot, common)


def is_pure(statements: list[Any]) -> bool:
    """Whether statements may be executed speculatively: none traps or has an effect."""
    # a branch may guard the address of a load, or the divisor
    traps = ("load", "masked_load", "gather", "masked_gather", "atomic_add", "floordiv", "mod")
    return all(isinstance(s, Let) and s.op not in traps for s in statements)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a is b
    return bool(a == b)
