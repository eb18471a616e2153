"""Terms of adapters (LoRA), added to the sums of a strip before its epilogue: `sum + B narrow + gain * sum + shift`.

`kernels.products.adapter_projections` computes `narrow`, the products with A, and the *heads*: where the rest of a
row's adapter lies. A strip multiplies by its columns of B itself: these products would be many more numbers to pass
from one processor to the other. Neighboring rows of one adapter share what is loaded of B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.kernel_call import Arg, Operand, view
from max.mlir.ops.models.adapters import LORA_PANEL

NEAR = 2
"""The locality of prefetches into the L2 cache."""
CACHE_LINE = 64
"""Bytes of a cache line."""
PREFETCHED_ROWS = 32
"""The most rows whose panels are prefetched: of more rows, most share an adapter."""
HEAD = 4
"""The numbers of a head: the element at which B begins (-1: the row has no terms here), the rank, and the elements at
which gain and shift begin (-1: there are none)."""
CHAINS = 4
"""The sums of a column that are independent of each other: one would wait for the sum before."""
RANKS = 4
"""The products with A are padded to a multiple of this."""


class Terms(NamedTuple):
    """What is added to the sums of a launch.

    Args:
        narrow: The products of each row with A, times the row's scale, `[rows, products * padded rank]`.
        heads: Where the adapter of each row lies, `[rows, products * HEAD]`.
        memory: The adapters, `[slots, elements]`.
        scales: The scale of each row, `[rows]`.
    """

    narrow: k.Input
    heads: k.Input
    memory: k.Input
    scales: k.Input


class Share(NamedTuple):
    """The columns of a product in a strip; all known at compile time.

    Args:
        product: The number of the product in its launch.
        products: The number of products of the launch.
        first: The first of its columns in the sums.
        size: The number of its columns.
        row: The elements from one row of sums to the next.
        width: The elements of a vector.
    """

    product: int
    products: int
    first: int
    size: int
    row: int
    width: int


@k.outlined
def add_adapter_products(
    sums: k.View,
    narrow: k.View,
    b: k.View,
    rank: k.Integer,
    size: k.Value,
    rows: int,
    panels: int,
    row: int,
    width: int,
) -> None:
    """Adds `B narrow` of `rows` neighboring rows of one adapter to their sums.

    Args:
        sums: The sums of the first row, from the first column on.
        narrow: The products of the first row with A.
        b: B, from the first panel on.
        rank: The rank.
        size: The elements from one row of `narrow` to the next.
        rows: The number of rows.
        panels: The number of panels.
        row: The elements from one row of sums to the next.
        width: The elements of a vector.
    """
    for panel in k.static_range(panels):
        own, columns = sums[panel * LORA_PANEL :], b[panel * rank * LORA_PANEL :]
        _add_panel(own, narrow, columns, rank, size, rows, row, width)


@k.inline
def _add_panel(
    sums: k.View,
    narrow: k.View,
    b: k.View,
    rank: k.Integer,
    size: k.Value,
    rows: int,
    row: int,
    width: int,
) -> None:
    """`add_adapter_products` for one panel."""
    vectors = LORA_PANEL // width
    chains = CHAINS if k.target().registers >= 32 else 2
    # several sums of each element, as a multiply-add waits for the one before it
    added = k.tile(k.f32, (rows * chains, vectors), width=width, fill=0.0)
    whole = rank // chains * chains
    for first in range(0, whole, chains):
        for chain in k.static_range(chains):
            _add_rank(added, narrow, b, first + chain, chain, size, rows, chains, width)
    # the ranks left over, in the first chain
    for r in range(whole, rank):
        _add_rank(added, narrow, b, r, 0, size, rows, chains, width)
    for i in k.static_range(rows):
        for n in k.static_range(vectors):
            at = i * row + n * width
            own = [added[i * chains + chain, n] for chain in k.static_range(chains)]
            total = own[0] + own[1] if chains == 2 else (own[0] + own[1]) + (own[2] + own[3])
            sums.store(at, value=sums.load(at, width=width) + total)


@k.inline
def _add_rank(
    sums: k.View,
    narrow: k.View,
    b: k.View,
    r: k.Value,
    chain: int,
    size: k.Value,
    rows: int,
    chains: int,
    width: int,
) -> None:
    """Adds the products with one column of B to the sums of a chain."""
    vectors = LORA_PANEL // width
    columns = [
        k.cast(b.load(r * LORA_PANEL + n * width, width=width), k.f32)
        for n in k.static_range(vectors)
    ]
    for i in k.static_range(rows):
        factor = k.splat(narrow[i * size + r], width)
        for n in k.static_range(vectors):
            own = i * chains + chain
            sums[own, n] = k.fma(factor, columns[n], sums[own, n])


@k.inline
def check_elements(memory: k.View, first: k.Value, count: k.Value) -> None:
    """Raises if elements are outside of the memory: rows that are in the order twice leave others without a head."""
    if first < 0 or first > memory.size or count > memory.size - first:
        raise IndexError("{} elements of an adapter from {} on, of {}", count, first, memory.size)


@k.inline
def add_terms(
    terms: Terms, c: k.View, row: k.Value, count: k.Integer, column: k.Value, share: Share
) -> None:
    """Adds the terms of some rows to their sums.

    Args:
        terms: The terms of the launch.
        c: The sums.
        row: The first row.
        count: The number of rows.
        column: The first column of the product.
        share: The product and its columns in the sums.
    """
    at = share.product * HEAD
    memory = terms.memory.reshape(terms.memory.size)
    for i in range(count):
        gain = terms.heads[row + i, at + 2]
        if terms.heads[row + i, at] >= 0 and gain >= 0:
            shift = terms.heads[row + i, at + 3]
            check_elements(memory, gain, column + share.size)
            check_elements(memory, shift, column + share.size)
            own = c[i * share.row + share.first :]
            scale = terms.scales[row + i]
            # before the products with B: the gain is that of the product alone
            for n in k.static_range(0, share.size, share.width):
                old = own.load(n, width=share.width)
                g = k.cast(memory.load(gain + column + n, width=share.width), k.f32)
                s = k.cast(memory.load(shift + column + n, width=share.width), k.f32)
                own.store(n, value=old + (old * g + s) * scale)
    _add_all(terms, memory, c, row, count, column, share)


@k.inline
def _add_all(
    terms: Terms,
    memory: k.View,
    c: k.View,
    row: k.Value,
    count: k.Value,
    column: k.Value,
    share: Share,
) -> None:
    """Adds the products with B of some rows to their sums; see `add_terms`."""
    size = terms.narrow.shape[1]
    padded = size // share.products
    narrow = terms.narrow.reshape(terms.narrow.size)[share.product * padded :]  # of this product
    at, panels = share.product * HEAD, share.size // LORA_PANEL
    # without vectors of 16 lanes there are half as many registers
    most = 4 if k.target().registers >= 32 else 2
    i = k.i64(0)
    while i < count:
        b, rank = terms.heads[row + i, at], terms.heads[row + i, at + 1]
        same = i + 1
        if b >= 0 and rank > 0:
            if rank > padded:
                raise IndexError("a rank is {}, expected up to {}", rank, padded)
            check_elements(memory, b, (column + share.size) * rank)
            # rows of one adapter share the loads of B
            while same < count and same < i + most:
                k.brief()
                if terms.heads[row + same, at] != b:
                    break
                same += 1
            own = c[i * share.row + share.first :]
            left, right = narrow[(row + i) * size :], memory[b + column * rank :]
            if same == i + 4:
                add_adapter_products(
                    own, left, right, rank, size, 4, panels, share.row, share.width
                )
            # three rows are two and one: each number of rows is a copy of the code
            elif same >= i + 2:
                same = i + 2
                add_adapter_products(
                    own, left, right, rank, size, 2, panels, share.row, share.width
                )
            else:
                add_adapter_products(
                    own, left, right, rank, size, 1, panels, share.row, share.width
                )
        i = same


class Next(NamedTuple):
    """The sites whose products with A come next.

    Args:
        distances: From B of the first product to A of each site, in elements.
        inputs: The inputs of these sites.
    """

    distances: tuple[int, ...]
    inputs: int


@k.inline
def prefetch_next(
    terms: Any, row: k.Value, count: k.Value, strip: k.Value, strips: k.Value, after: Next
) -> None:
    """Prefetches the share of a strip in the matrices A that the next launch reads: these alone would not keep the
    processor busy, and the products would not keep the memory busy.

    Args:
        terms: The terms of the launch.
        row: The first row.
        count: The number of rows.
        strip: The number of the strip.
        strips: The number of strips.
        after: The next sites.
    """
    memory = terms.memory.reshape(terms.memory.size)
    line = CACHE_LINE // terms.memory.dtype.size
    before = k.i64(-1)
    for i in range(k.min(count, PREFETCHED_ROWS)):
        b = terms.heads[row + i, 0]
        # neighboring rows mostly have one adapter
        if b >= 0 and b != before:
            # adapters have one rank at most sites
            rank = k.min(terms.heads[row + i, 1], terms.narrow.shape[1])
            lines = k.ceildiv(rank * after.inputs, line)
            # the share of this strip
            for j in range(lines * strip // strips, lines * (strip + 1) // strips):
                for distance in k.unroll(after.distances):
                    # beyond the memory of the last adapter nothing is read
                    ahead = k.min(b + distance + j * line, memory.size - 1)
                    memory.prefetch(k.max(ahead, 0), locality=NEAR)
        before = b


@k.inline
def prefetch_terms(terms: Any, row: k.Value, count: k.Value, column: k.Value, share: Share) -> None:
    """Prefetches the panels of B that `add_terms` reads."""
    memory = terms.memory.reshape(terms.memory.size)
    at = share.product * HEAD
    line = CACHE_LINE // terms.memory.dtype.size
    before = k.i64(-1)
    for i in range(k.min(count, PREFETCHED_ROWS)):
        b = terms.heads[row + i, at]
        if b >= 0 and b != before:
            rank = k.min(terms.heads[row + i, at + 1], terms.narrow.shape[1])
            first = b + column * rank
            for j in range(0, rank * share.size, line):
                memory.prefetch(k.min(first + j, memory.size - 1))
        before = b


def has_terms(operands: Sequence[Operand]) -> bool:
    """Whether a launch of products has the operands of `Terms`, after x and the weight."""
    return len(operands) == 2 + len(Terms._fields)


def terms_arguments(operands: Sequence[Operand]) -> tuple[Arg, ...]:
    """The views of `Terms`; none where the launch has no adapters."""
    if not has_terms(operands):
        return ()
    return tuple([view("operand", i, operands[i], static=False) for i in range(2, len(operands))])


def next_sites(attributes: Mapping[str, Any]) -> Next | None:
    """The sites that come next; see `mok.adapted_products`."""
    distances = attributes.get("next")
    return Next(tuple(distances), attributes["next_inputs"]) if distances else None
