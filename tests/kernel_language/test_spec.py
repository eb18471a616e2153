"""The verifier finds broken IR."""

from __future__ import annotations

from dataclasses import replace

import pytest

from max import kernel as k
from max.kernel.ir.nodes import (
    Barrier,
    Const,
    For,
    If,
    Leave,
    Let,
    Parallel,
    Raise,
    Ref,
    Stmt,
    Store,
)
from max.kernel.ir.spec import IRError, verify
from max.kernel.types import BOOL, INDEX, POINTER, f32, scalar, vector
from tests.kernel_language.test_language import saxpy

X, Y = Ref(1, INDEX, 0), Ref(2, INDEX, 0)
FLOAT = Ref(3, scalar(f32), 0)
ONE = Const(1, INDEX)
POINT = Ref(4, POINTER, 0)


def let(ref: Ref, op: str, *args: object, attr: object = None) -> Let:
    return Let(ref, op, args, attr, 1)  # type: ignore[arg-type]


X_IS = let(X, "arg", attr=0)
BROKEN: list[tuple[str, tuple[Stmt, ...]]] = [
    ("not visible", (let(X, "add", Y, ONE),)),
    ("bound twice", (X_IS, X_IS)),
    ("unknown op", (let(X, "frobnicate", ONE),)),
    ("takes 2 operands", (let(X, "add", ONE),)),
    ("does not take", (let(FLOAT, "add", ONE, ONE),)),
    ("does not take", (X_IS, let(Ref(5, vector(f32, 4), 0), "splat", X))),
    ("a constant of 2 lanes", (let(Ref(5, vector(f32, 4), 0), "neg", Const((1.0, 2.0), vector(f32, 4))),)),
    ("no address", (X_IS, Store(X, ONE, None, 1))),
    ("a mask that does not fit", (let(POINT, "arg", attr=0), Store(POINT, ONE, Const(True, vector(BOOL.dtype, 4)), 1))),
    ("no such block", (Leave(7),)),
    ("no such message", (Raise(3, (), 1),)),
    ("after the end", (If(Const(True, BOOL), (Raise(0, (), 1), X_IS), (), 1),)),
    ("not visible", (If(Const(True, BOOL), (X_IS,), (), 1), let(Y, "neg", X))),
    ("no indices", (For(X, Const(1.0, scalar(f32)), ONE, 1, (), 1),)),
    ("no bool", (If(ONE, (), (), 1),)),
    ("does not fit", (Parallel(X, Y, ONE, ONE, 1, 9, (), 1),)),
    ("a barrier in a parallel loop", (Parallel(X, Y, ONE, ONE, 1, 0, (Barrier(1),), 1),)),
    ("a slot of another type", (let(X, "read", ONE, attr=77),)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "body"), BROKEN, ids=[f"{n}-{m}" for n, (m, _) in enumerate(BROKEN)]
)
def test_broken_ir(message, body):
    spec = k.TensorSpec(k.f32, ("n",))
    good = k.specialize(saxpy, [spec, spec, spec, k.f32], {"W": 8})
    verify(good)
    messages = (k.Message("ValueError", "", (), "", 1),)
    with pytest.raises(IRError, match=message):
        verify(replace(good, body=body, messages=messages))
