"""Strips of 32 columns of packed weights: the results that their sums belong to, and the stores of these results.

One launch multiplies by a buffer of several packed weights, its *parts*, whose strips follow each other. A part is one
product, with 32 of its columns in a strip, or two products of equal sizes, with 16 columns of each in a strip, so that
the epilogue of a gated product gets both sums of an element and stores one result::

    strip      0          1          2          3          4
           ┌──────────┬──────────┬──────────┬────┬─────┬────┬─────┐
           │ Q 0…31   │ K 0…31   │ V 0…31   │gate│ up  │gate│ up  │      parts ((1, 1), (1, 1), (1, 1), (2, 1))
           └──────────┴──────────┴──────────┴────┴─────┴────┴─────┘
                                             0…15 0…15  16…31 16…31
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.tiles.adapter_terms import (
    Share,
    add_terms,
    prefetch_next,
    prefetch_terms,
)
from max._backends.kernel_call import Arg, Operand, view

COLUMNS = 32
"""Columns of a strip."""
CACHE_LINE = 64
"""Bytes of a cache line."""
SET_PERIOD = 4096
"""Distance in bytes of addresses that share a set of the L1 cache: 64 sets of one line."""
L1, L2 = 3, 2
"""Localities of prefetches into all caches, and into the L2 and L3 caches only."""

Parts = tuple[tuple[int, int], ...]
"""For each part its number of products (1 or 2) and of results; empty for one product with one result."""


class Results(NamedTuple):
    """The results of a launch and the epilogue that computes them from the sums.

    Args:
        out: The first result `[rows, columns]`.
        extra: The other results, then the epilogue's views.
        epilogue: ``epilogue(v, row, col, mask, extra)``; of parts ``epilogue(part, sums, row, col, mask, extra)``,
            which takes and returns tuples.
        width: Lanes of a vector of sums.
        parts: The parts; empty for one product.
        terms: The terms of adapters that are added to the sums of parts; None: there are none.
        after: Of terms: the sites of the next launch; None: unknown.
    """

    out: Any
    extra: Any
    epilogue: Any
    width: int
    parts: Parts = ()
    terms: Any = None
    after: Any = None


def strips_of(columns: int, products: int = 1) -> int:
    """The number of strips of a part.

    Args:
        columns: Columns of each of its products.
        products: The number of products.
    """
    return -(-columns * products // COLUMNS)


def number_of_results(parts: Parts) -> int:
    """The number of results of a launch."""
    return sum(results for _, results in parts) if parts else 1


def number_of_products(parts: Parts) -> int:
    """The number of products of parts."""
    return sum(products for products, _ in parts)


def share_of(parts: Parts, part: int, product: int, width: int) -> Share:
    """The columns of a product in the strips of its part.

    Args:
        parts: The parts of the launch.
        part: The number of the part.
        product: The number of the product in the part.
        width: The elements of a vector.
    """
    size = COLUMNS // parts[part][0]
    number = number_of_products(parts[:part]) + product
    return Share(number, number_of_products(parts), product * size, size, COLUMNS, width)


def further_results(results: Sequence[Operand]) -> tuple[Arg, ...]:
    """The views of all results but the first, which precede the epilogue's."""
    # the first result is an argument of its own
    return tuple([_rows(index, out) for index, out in enumerate(results) if index])


def _rows(index: int, out: Operand) -> Arg:
    last = len(out.shape) - 1
    return view("result", index, out, (range(last), (last,)), static=False)


@k.inline
def identity(v: Any, row: Any, col: Any, mask: Any, extra: Any) -> Any:
    """The epilogue that returns the sums."""
    return v


@k.inline
def identity_of_parts(part: int, sums: Any, row: Any, col: Any, mask: Any, extra: Any) -> Any:
    """The epilogue of parts that returns the sums."""
    return sums


@k.inline
def store_tile(
    results: Results, c: k.View, row: k.Value, count: k.Integer, column: k.Value
) -> None:
    """Stores the results of a tile of sums of one product.

    Args:
        results: The results.
        c: The sums, `COLUMNS` a row.
        row: The first row.
        count: The number of rows.
        column: The first column.
    """
    out, extra, epilogue, width = results.out, results.extra, results.epilogue, results.width
    # the last strip may have fewer columns
    columns = k.min(COLUMNS, out.shape[1] - column)
    for i in range(count):
        for j, mask in k.vectors(columns, width):
            v = c.load(i * COLUMNS + j, width=width)
            result = epilogue(v, row + i, column + j, mask, extra)
            out.store(row + i, column + j, value=result, mask=mask)


@k.inline
def store_part(
    results: Results,
    part: int,
    outs: Any,
    c: k.View,
    row: k.Value,
    count: k.Integer,
    column: k.Value,
) -> None:
    """Stores the results of a part; see `store_tile`.

    Args:
        results: The results of the launch.
        part: The number of the part.
        outs: The results of the part.
        c: The sums, `COLUMNS` a row.
        row: The first row.
        count: The number of rows.
        column: The first column of each product.
    """
    products = results.parts[part][0]
    share = COLUMNS // products
    # the other results come first in `extra`
    views = results.extra[number_of_results(results.parts) - 1 :]
    if results.terms is not None:
        for n in k.static_range(products):
            own = share_of(results.parts, part, n, results.width)
            add_terms(results.terms, c, row, count, column, own)
    for i in range(count):
        for j, mask in k.vectors(k.min(share, outs[0].shape[1] - column), results.width):
            # [share] columns of each product, side by side in the strip
            sums = [
                c.load(i * COLUMNS + n * share + j, width=results.width)
                for n in k.static_range(products)
            ]
            values = results.epilogue(part, tuple(sums), row + i, column + j, mask, views)
            for out, value in zip(outs, values, strict=True):
                out.store(row + i, column + j, value=value, mask=mask)


@k.inline
def store_strip(
    results: Results, c: k.View, row: k.Value, count: k.Integer, strip: k.Value
) -> None:
    """Stores the results of some rows of a strip.

    Args:
        results: The results.
        c: The sums, `COLUMNS` a row.
        row: The first row.
        count: The number of rows.
        strip: The number of the strip.
    """
    parts = results.parts
    if not parts:
        store_tile(results, c, row, count, strip * COLUMNS)
    else:
        all_outs = (results.out, *results.extra[: number_of_results(parts) - 1])
        begin = k.i64(0)
        for part in k.static_range(len(parts)):
            first_result = number_of_results(parts[:part]) if part else 0
            outs = all_outs[first_result : first_result + parts[part][1]]
            share = COLUMNS // parts[part][0]
            # strips of the parts follow each other
            end = begin + k.ceildiv(outs[0].shape[1], share)
            if begin <= strip and strip < end:
                store_part(results, part, outs, c, row, count, (strip - begin) * share)
            begin = end


@k.inline
def prefetch_strip(results: Results, row: k.Value, strip: k.Value, height: int) -> None:
    """Prefetches some rows of a strip's results for writing, and the operands that the epilogue reads for them."""
    parts = results.parts
    if not parts:
        prefetch_tile(results, row, strip * COLUMNS, height)
    else:
        all_outs = (results.out, *results.extra[: number_of_results(parts) - 1])
        begin = k.i64(0)
        for part in k.static_range(len(parts)):
            first_result = number_of_results(parts[:part]) if part else 0
            share = COLUMNS // parts[part][0]
            end = begin + k.ceildiv(all_outs[first_result].shape[1], share)
            if begin <= strip and strip < end:
                for out in all_outs[first_result : first_result + parts[part][1]]:
                    prefetch_rows(out, row, (strip - begin) * share, height, share, True)
            begin = end


@k.inline
def prefetch_adapters(results: Results, row: k.Value, count: k.Value, strip: k.Value) -> None:
    """Prefetches what the adapters of some rows add to a strip; nothing without adapters."""
    if results.terms is not None:
        parts = results.parts
        all_outs = (results.out, *results.extra[: number_of_results(parts) - 1])
        begin = k.i64(0)
        for part in k.static_range(len(parts)):
            first_result = number_of_results(parts[:part]) if part else 0
            size = COLUMNS // parts[part][0]
            end = begin + k.ceildiv(all_outs[first_result].shape[1], size)
            if begin <= strip and strip < end:
                for n in k.static_range(parts[part][0]):
                    own = share_of(parts, part, n, results.width)
                    prefetch_terms(results.terms, row, count, (strip - begin) * size, own)
            begin = end
        if results.after is not None:
            prefetch_next(results.terms, row, count, strip, begin, results.after)


@k.inline
def prefetch_tile(results: Results, row: k.Value, column: k.Value, height: int) -> None:
    """Prefetches a tile of the result for writing, and the operands that the epilogue reads for it."""
    prefetch_rows(results.out, row, column, height, COLUMNS, True)
    for other in k.unroll(results.extra):
        # a view of rank 2 has other elements for each row
        if other.rank == 2:
            prefetch_rows(other, row, column, height, COLUMNS, False)


@k.inline
def prefetch_rows(
    x: k.View, row: k.Value, column: k.Value, height: int, columns: int, write: bool
) -> None:
    """Prefetches some columns of some rows, a cache line at a time."""
    for i in range(height):
        # j counts bytes
        for j in k.static_range(0, columns * x.dtype.size, CACHE_LINE):
            x.prefetch(row + i, column + j // x.dtype.size, write=write)
