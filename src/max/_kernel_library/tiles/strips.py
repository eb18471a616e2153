"""Strips of 32 columns of packed weights: to which results their sums belong, and how those are stored.

One launch multiplies by a buffer that several weights are packed in. They make *parts*, whose strips follow each other. A part is one
product, with 32 of its columns in a strip, or two products of equal sizes, with 16 columns of the first and the same 16 of the second:
an epilogue then sees both sums of an element, as a gated product needs them, and stores one result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max import kernel as k
from max._kernel_library.lowering import Arg, Operand, view

COLUMNS = 32
"""Columns of a strip."""

Parts = tuple[tuple[int, int], ...]
"""For each part how many products it is (1 or 2), and how many results it has; none for one product with one result."""


def strips_of(columns: int, products: int = 1) -> int:
    """How many strips a part takes.

    Args:
        columns: Of each of its products.
        products: How many these are.
    """
    return -(-columns * products // COLUMNS)


def number_of_results(parts: Parts) -> int:
    """How many results a launch has."""
    return sum(results for _, results in parts) if parts else 1


def further_results(results: Sequence[Operand]) -> tuple[Arg, ...]:
    """The views of all results but the first, which come before the epilogue's."""
    return tuple([_rows(index, out) for index, out in enumerate(results) if index])


def _rows(index: int, out: Operand) -> Arg:
    last = len(out.shape) - 1
    return view("result", index, out, (range(last), (last,)), static=False)


@k.inline
def unchanged(part: int, sums: Any, row: Any, col: Any, mask: Any, extra: Any) -> Any:
    """The epilogue of parts that changes nothing."""
    return sums


@k.inline
def store_tile(
    out: Any, c: Any, row: Any, count: Any, column: Any, extra: Any, epilogue: Any, width: int
) -> None:
    """Stores what an epilogue makes of the sums of a tile."""
    here = k.min(COLUMNS, out.shape[1] - column)
    for i in range(count):
        for j, mask in k.vectors(here, width):
            v = c.load(i * COLUMNS + j, width=width)
            result = epilogue(v, row + i, column + j, mask, extra)
            out.store(row + i, column + j, value=result, mask=mask)


@k.inline
def store_strip(
    out: Any, c: Any, row: Any, count: Any, strip: Any, extra: Any, epilogue: Any, parts: Parts,
    width: int,
) -> None:  # fmt: skip
    """Stores what an epilogue makes of the sums of some rows of a strip.

    Args:
        out: The first result `[rows, columns]`.
        c: The sums, `COLUMNS` a row.
        row: The first row.
        count: How many rows.
        strip: Which strip.
        extra: The other results, then the epilogue's views.
        epilogue: ``epilogue(v, row, col, mask, extra)``; of parts ``epilogue(part, sums, row, col, mask, extra)``, which takes and
            gives tuples.
        parts: The parts; none for one product.
        width: Lanes of a vector of sums.
    """
    if not parts:
        store_tile(out, c, row, count, strip * COLUMNS, extra, epilogue, width)
    else:
        further = number_of_results(parts) - 1
        outs = (out, *extra[:further])
        begin = k.i64(0)
        for part in k.static_range(len(parts)):
            products = parts[part][0]
            at = number_of_results(parts[:part]) if part else 0
            targets = outs[at : at + parts[part][1]]
            columns = targets[0].shape[1]
            share = COLUMNS // products
            end = begin + k.ceildiv(columns, share)
            if begin <= strip and strip < end:
                column = (strip - begin) * share
                for i in range(count):
                    for j, mask in k.vectors(k.min(share, columns - column), width):
                        sums = [
                            c.load(i * COLUMNS + n * share + j, width=width)
                            for n in k.static_range(products)
                        ]
                        made = epilogue(
                            part, tuple(sums), row + i, column + j, mask, extra[further:]
                        )
                        for target, value in zip(targets, made, strict=True):
                            target.store(row + i, column + j, value=value, mask=mask)
            begin = end


@k.inline
def ask_for_strip(out: Any, extra: Any, row: Any, strip: Any, height: int, parts: Parts) -> None:
    """Asks for the memory of some rows of a strip's results, and of what an epilogue reads there."""
    if not parts:
        ask_for_tile(out, extra, row, strip * COLUMNS, height)
    else:
        outs = (out, *extra[: number_of_results(parts) - 1])
        begin = k.i64(0)
        for part in k.static_range(len(parts)):
            at = number_of_results(parts[:part]) if part else 0
            share = COLUMNS // parts[part][0]
            end = begin + k.ceildiv(outs[at].shape[1], share)
            if begin <= strip and strip < end:
                for target in outs[at : at + parts[part][1]]:
                    ask_for(target, row, (strip - begin) * share, height, share, True)
            begin = end


@k.inline
def ask_for_tile(out: Any, extra: Any, row: Any, column: Any, height: int) -> None:
    """Asks for the memory of a tile of the result, and of what an epilogue reads there."""
    ask_for(out, row, column, height, COLUMNS, True)
    for other in k.unroll(extra):
        if other.rank == 2:
            ask_for(other, row, column, height, COLUMNS, False)


@k.inline
def ask_for(rows: Any, row: Any, column: Any, height: int, columns: int, write: bool) -> None:
    """Asks for some columns of some rows."""
    for i in k.static_range(height):
        for j in k.static_range(0, columns * rows.dtype.size, 64):
            rows.prefetch(row + i, column + j // rows.dtype.size, write=write)
