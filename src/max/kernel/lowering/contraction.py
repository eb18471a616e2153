"""Contraction: which float products are added without being rounded first.

``x * y + z`` becomes one fused multiply-add if the sum is the product's only use and stands in the same body. The choice
is made here, on the IR, and not by LLVM: what a kernel computes then depends neither on LLVM's optimisations nor on the
checks between the two ops (``MAX_KERNEL_CHECK``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from max.kernel.ir.nodes import (
    Assign,
    Atom,
    Block,
    Effect,
    For,
    If,
    Let,
    Parallel,
    Raise,
    Ref,
    Stmt,
    Store,
    While,
)


class Contraction(NamedTuple):
    """The products that a kernel fuses, by the numbers of their values."""

    products: dict[int, Let]
    """Products that are not computed by themselves."""
    sums: dict[int, int]
    """For each sum or difference that is fused, which of its operands is the product."""


def contraction(body: Iterable[Stmt]) -> Contraction:
    """The products of a body that are fused into sums; each has one use.

    Of two products in a sum the first is fused, the second is rounded.
    """
    survey = _Survey()
    survey.visit(body)
    products: dict[int, Let] = {}
    sums: dict[int, int] = {}
    for s in survey.sums:
        for position, operand in enumerate(s.args):
            if isinstance(operand, Ref) and survey.uses.get(operand.id) == 1:
                product = survey.products[operand.id]
                if product.ref.level == s.ref.level:
                    products[operand.id] = product
                    sums[s.ref.id] = position
                    break
    return Contraction(products, sums)


class _Survey:
    """Float products with the number of their uses, and the sums that use one, in order."""

    def __init__(self) -> None:
        self.products: dict[int, Let] = {}
        self.uses: dict[int, int] = {}
        self.sums: list[Let] = []

    def visit(self, body: Iterable[Stmt]) -> None:
        uses = self.uses
        for s in body:
            kind = s.__class__
            if kind is Let:
                op: str = s.op  # type: ignore[union-attr]
                used = False
                for a in s.args:  # type: ignore[union-attr]
                    if a.__class__ is Ref and a.id in uses:  # type: ignore[union-attr]
                        uses[a.id] += 1  # type: ignore[union-attr]
                        used = True
                if op == "mul":
                    if s.ref.type.dtype.is_float:  # type: ignore[union-attr]
                        self.products[s.ref.id] = s  # type: ignore[union-attr,assignment]
                        uses[s.ref.id] = 0  # type: ignore[union-attr]
                elif used and (op == "add" or op == "sub"):
                    self.sums.append(s)  # type: ignore[arg-type]
            else:
                self._other(s)

    def _other(self, s: Stmt) -> None:
        match s:
            case Store():
                self._use(s.value)
            case Assign():
                self._use(s.value)
            case Effect():
                self._use(*s.args)
            case Raise():
                self._use(*s.values)
            case If():
                self.visit(s.then)
                self.visit(s.orelse)
            case While():
                self.visit(s.head)
                self.visit(s.body)
            case For() | Parallel() | Block():
                self.visit(s.body)
            case _:
                pass

    def _use(self, *atoms: Atom) -> None:
        for a in atoms:
            if isinstance(a, Ref) and a.id in self.uses:
                self.uses[a.id] += 1
