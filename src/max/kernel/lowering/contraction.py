"""Contraction: the choice of float products that are fused into sums, without an intermediate rounding.

``x * y + z`` becomes one fused multiply-add if the sum is the product's only use and in the same body. The choice is
made on the IR instead of by LLVM, so that results depend neither on LLVM's optimizations nor on checks between the two
ops (``MAX_KERNEL_CHECK``).
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
    """The products that a kernel fuses, by value id."""

    products: dict[int, Let]
    """The fused products."""
    sums: dict[int, int]
    """The position of the product among the operands of each fused sum or difference."""


def contraction(body: Iterable[Stmt]) -> Contraction:
    """Chooses the products of a body to fuse; each has exactly one use.

    In a sum of two products, the first is fused and the second is rounded.
    """
    survey = _Survey()
    survey.visit(body)
    products: dict[int, Let] = {}
    sums: dict[int, int] = {}
    for s in survey.sums:
        for position, operand in enumerate(s.args):
            if isinstance(operand, Ref) and survey.uses.get(operand.id) == 1:
                product = survey.products[operand.id]
                # a product of an outer body is computed once, outside of the loop that has the sum
                if product.ref.level == s.ref.level:
                    products[operand.id] = product
                    sums[s.ref.id] = position
                    break
    return Contraction(products, sums)


class _Survey:
    """Collects float products with the number of their uses, and the sums that use one, in order."""

    def __init__(self) -> None:
        self.products: dict[int, Let] = {}
        self.uses: dict[int, int] = {}
        self.sums: list[Let] = []

    def visit(self, body: Iterable[Stmt]) -> None:
        """Records the products and sums of floats in statements, and counts the uses of products."""
        uses = self.uses
        for s in body:
            kind = s.__class__
            if kind is Let:
                op: str = s.op  # type: ignore[union-attr]
                used = False
                for a in s.args:  # type: ignore[union-attr]
                    if a.__class__ is Ref and a.id in uses:  # type: ignore[union-attr]
                        # once per operand: `p + p` uses a product twice
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
        """Counts the uses of products in a statement that is not a definition, and in its body."""
        match s:
            # addresses, masks and indices are no floats
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
