"""Sums of products, as `einsum` has them."""

from __future__ import annotations

import math
import string
from typing import Any

from max.dtype import DType
from max.graph import Dim, TensorValue, ops
from max.importers.errors import Unsupported
from max.importers.functions.reductions import drop_axes, over

__all__ = ["contract"]


def contract(equation: str, tensors: list[TensorValue]) -> TensorValue:
    """NumPy's `einsum` of an equation with letters and ellipses."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(tensors):
        raise Unsupported(
            f"the equation {equation!r} has {len(terms)} terms for {len(tensors)} operands"
        )
    free = [letter for letter in string.ascii_letters if letter not in text]
    widest = max(
        (
            x.rank - len(term.replace("...", ""))
            for term, x in zip(terms, tensors, strict=True)
            if "..." in term
        ),
        default=0,
    )
    # letters for the axes of an ellipsis, the same in all terms from the right
    extra = "".join(free[:widest])
    named = [_letters(term, x.rank, extra) for term, x in zip(terms, tensors, strict=True)]
    if arrow:
        result = right.replace("...", extra)
    else:
        joined = "".join(named)
        # without an arrow: the letters that occur once, in alphabetical order
        result = extra + "".join(
            sorted({c for c in joined if joined.count(c) == 1 and c not in extra})
        )
    current, letters = _diagonal(tensors[0], named[0])
    for index in range(1, len(tensors)):
        other, names = _diagonal(tensors[index], named[index])
        # the others are summed in this product
        needed = set(result).union(*named[index + 1 :])
        current, letters = _product(current, letters, other, names, needed)
    gone = [axis for axis, letter in enumerate(letters) if letter not in result]
    if gone:
        current = drop_axes(over(current, gone, ops.sum), gone)
        letters = "".join(letter for letter in letters if letter in result)
    if len(set(result)) != len(result) or set(result) != set(letters):
        raise Unsupported(f"the equation {equation!r} has no such result")
    order = [letters.index(letter) for letter in result]
    return ops.permute(current, order) if order != sorted(order) else current


def _letters(term: str, rank: int, extra: str) -> str:
    count = rank - len(term.replace("...", ""))
    if "..." in term:
        term = term.replace("...", extra[len(extra) - count :] if count else "")
    if len(term) != rank:
        raise Unsupported(f"the term {term!r} does not fit an operand of rank {rank}")
    return term


def _diagonal(x: TensorValue, letters: str) -> tuple[TensorValue, str]:
    """A tensor whose axes have different letters: of equal ones the diagonal is left."""
    for letter in dict.fromkeys(letters):
        while letters.count(letter) > 1:
            first = letters.index(letter)
            second = letters.index(letter, first + 1)
            size = x.shape[first]
            order = [axis for axis in range(x.rank) if axis not in (first, second)]
            x = ops.permute(x, [*order, first, second])
            lead = x.shape[:-2]
            # elements of the diagonal are size + 1 apart
            x = ops.reshape(x, [*lead, size * size])
            places = ops.range(0, size, 1, dtype=DType.int64, device=x.device) * (
                TensorValue(size) + 1
            )
            x = ops.gather(x, places, x.rank - 1)
            letters = "".join(letters[axis] for axis in order) + letter
    return x, letters


def _product(
    x: TensorValue, a: str, y: TensorValue, b: str, needed_letters: set[str]
) -> tuple[TensorValue, str]:
    """The product of two tensors, summed over letters that nothing else needs: a batched matrix product."""
    only_x = [c for c in a if c not in b and c not in needed_letters]
    only_y = [c for c in b if c not in a and c not in needed_letters]
    # summed before the product, which then has fewer elements
    x, a = _sum_letters(x, a, only_x)
    y, b = _sum_letters(y, b, only_y)
    batch = [c for c in a if c in b and c in needed_letters]
    inner = [c for c in a if c in b and c not in needed_letters]
    rows, columns = [c for c in a if c not in b], [c for c in b if c not in a]
    sizes: dict[str, Dim] = {}
    for letters, tensor in ((a, x), (b, y)):
        for letter, dim in zip(letters, tensor.shape, strict=True):
            # an axis of size 1 broadcasts
            if letter not in sizes or sizes[letter] == 1:
                sizes[letter] = dim
    x = _arrange_axes(x, a, [*batch, *rows, *inner], sizes)
    y = _arrange_axes(y, b, [*batch, *inner, *columns], sizes)
    # a batched product [batch, rows, inner] @ [batch, inner, columns]
    total = [
        math.prod((sizes[c] for c in group), start=Dim(1))
        for group in (batch, rows, inner, columns)
    ]
    product = ops.matmul(
        ops.reshape(x, [total[0], total[1], total[2]]),
        ops.reshape(y, [total[0], total[2], total[3]]),
    )
    letters = "".join([*batch, *rows, *columns])
    return ops.reshape(product, [sizes[c] for c in letters]), letters


def _sum_letters(
    x: TensorValue, letters: str, summed_letters: list[str]
) -> tuple[TensorValue, str]:
    if not summed_letters:
        return x, letters
    axes = [letters.index(c) for c in summed_letters]
    return drop_axes(over(x, axes, ops.sum), axes), "".join(
        c for c in letters if c not in summed_letters
    )


def _arrange_axes(
    x: TensorValue, letters: str, order: list[str], sizes: dict[str, Any]
) -> TensorValue:
    """The tensor with its axes in an order, those of size 1 broadcast."""
    x = ops.permute(x, [letters.index(c) for c in order]) if len(order) > 1 else x
    return ops.broadcast_to(x, [sizes[c] for c in order])
