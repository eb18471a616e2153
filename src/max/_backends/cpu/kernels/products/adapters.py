"""The terms that low-rank adapters add to a product: `y + s * B(A x)`, with the adapter of each row.

Rows are sorted by adapter, so that a task reads the adapter of its rows once; `max.mlir.ops.models.adapters` has the
layout of the memory. Two phases::

    narrow = A x      task: 4 sorted rows × 4 rows of A        dot products along the inputs
    y + B narrow      task: 4 sorted rows × 64 columns         a panel of B is one run of memory

Register budget: 16 sums (4 rows × 4), or 8 where there are 16 registers. A row's sums do not depend on the other rows.

`project_adapters` has the first phase for the sites of one x; the launch of their products by packed weights adds the
second one to its sums (`kernels.tiles.adapter_terms`). `add_adapters` has both, for products of other kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.cpu.kernels.tiles.adapter_terms import RANKS
from max._backends.kernel_call import KernelCall, Operand, Scalar, Workspace, view
from max.dtype import DType
from max.mlir.ops.models.adapters import LORA_PANEL, lora_place_starts

if TYPE_CHECKING:
    Integer = Any
else:
    Integer = k.i64

ROWS = 4
"""The number of sorted rows of a task, which has `RANKS` rows of A."""
COLUMNS = 4 * LORA_PANEL
"""The number of columns of a task."""


class Adapters(NamedTuple):
    """The operands with the adapters, and the rows sorted by slot.

    Args:
        memory: `[slots, elements]`.
        forms: The rank of each site in each slot, and whether there are gain and shift, `[slots, sites, 2]`.
        order: The row of each position, `[rows]`.
        slots: The slot of each position, `[rows]`.
        scales: The scale of each row, `[rows]`.
        num_adapted: The number of positions that have an adapter, `[1]`.
        place: The first element and the first site of the block, `[2]`.
    """

    memory: k.Input
    forms: k.Input
    order: k.Input
    slots: k.Input
    scales: k.Input
    num_adapted: k.Input
    place: k.Input


class Place(NamedTuple):
    """The numbers of a site: at run time, so that all sites share a kernel.

    Args:
        max_rank: The bound of the rank.
        inputs: The number of inputs of the product.
        site: The index of the site in its block.
        offset: The first element of the site in its block.
        b: The offset of B in the place of the site.
        gain: The offset of the gain.
        shift: The offset of the shift.
        end: The number of elements of the place.
    """

    max_rank: Integer
    inputs: Integer
    site: Integer
    offset: Integer
    b: Integer
    gain: Integer
    shift: Integer
    end: Integer


class Site(NamedTuple):
    """What an adapter has at a site.

    Args:
        rank: Its rank; 0: it leaves the product alone.
        vectors: Whether it has gain and shift.
        elements: Its place in the memory.
    """

    rank: Any
    vectors: Any
    elements: Any


class Panel(NamedTuple):
    """The columns of a task.

    Args:
        column: The first column.
        vectors: The vectors that are computed at once.
        width: The elements of a vector.
        masked: Whether the panel has fewer columns than `LORA_PANEL`.
    """

    column: Any
    vectors: int
    width: int
    masked: bool


@k.inline
def row_at(adapters: Adapters, position: k.Integer) -> Any:
    """The row of a position."""
    row = k.i64(adapters.order[position])
    if row < 0 or row >= adapters.order.size:
        raise IndexError("order[{}] is {}, of {} rows", position, row, adapters.order.size)
    return row


@k.inline
def site_at(
    adapters: Adapters, position: k.Integer, first: k.Integer, site: k.Integer, max_rank: k.Value
) -> Site:
    """The place of the adapter of a position; `first` and `site` are checked."""
    slot = k.i64(adapters.slots[position])
    if slot < 0 or slot >= adapters.memory.shape[0]:
        raise IndexError("slot {}; there are {}", slot, adapters.memory.shape[0])
    rank = k.i64(adapters.forms[slot, site, 0])
    if rank < 0 or rank > max_rank:
        raise ValueError("the rank of slot {} is {}, expected 0 to {}", slot, rank, max_rank)
    return Site(rank, adapters.forms[slot, site, 1] != 0, adapters.memory[slot, first:])


@k.inline
def run_end(adapters: Adapters, position: k.Integer, end: k.Value) -> Any:
    """The first position after `position` with another slot, at most `end`."""
    last = position + 1
    # `last < end` comes first: the slot of `end` may not exist
    while last < end:
        k.brief()
        if adapters.slots[last] != adapters.slots[position]:
            break
        last += 1
    return last


@k.inline
def project_rows(
    narrow: k.View,
    x: k.View,
    adapters: Adapters,
    at: k.Value,
    site: Site,
    rank: k.Value,
    rows: int,
    width: int,
) -> None:
    """Stores the products of `rows` positions from `at` on with up to 4 rows of A from `rank` on.

    Args:
        narrow: The results, `[positions, padded rank]`.
        x: The inputs of the product, `[rows, inputs]`.
        adapters: The adapters.
        at: The first position.
        site: The site.
        rank: The first row of A.
        rows: The number of positions.
        width: The elements of a vector.
    """
    picked = [row_at(adapters, at + i) for i in k.static_range(rows)]
    sums = k.tile(k.f32, (rows, RANKS), width=width, fill=0.0)
    multiply_adapter_rows(sums, x, picked, site, rank, 0, rows, width)
    for i in k.static_range(rows):
        for r in k.static_range(RANKS):
            narrow[at + i, rank + r] = k.reduce_add(sums[i, r])


@k.inline
def multiply_adapter_rows(
    sums: k.View,
    x: k.View,
    picked_rows: Any,
    site: Site,
    rank: k.Value,
    ahead: k.Value,
    rows: int,
    width: int,
) -> None:
    """Adds the products of rows of x with 4 rows of A to `sums` `[rows, RANKS]`, whose lanes are to be added.

    Args:
        sums: The sums.
        x: The inputs of the product, `[rows, inputs]`.
        picked_rows: The rows of x.
        site: The site.
        rank: The first row of A.
        ahead: The distance to the elements that come next, which are prefetched.
        rows: The number of rows.
        width: The elements of a vector of sums.
    """
    size = x.shape[1]
    # past the rank the last row is read again, and its results are not used
    starts = [k.min(rank + r, site.rank - 1) * size for r in k.static_range(RANKS)]
    # pairs of neighbors share a lane
    pairs = (
        x.dtype == k.bf16
        and site.elements.dtype == k.bf16
        and bool(k.target().dot_bf16_lanes(width))
    )
    for j, mask in k.vectors(size, 2 * width if pairs else width):
        step = 2 * width if pairs else width
        for r in k.static_range(RANKS):
            site.elements.prefetch(starts[r] + ahead + j)
        a = [
            site.elements.load(starts[r] + j, width=step, mask=mask) for r in k.static_range(RANKS)
        ]
        for i in k.static_range(rows):
            v = x.load(picked_rows[i], j, width=step, mask=mask)
            for r in k.static_range(RANKS):
                if pairs:
                    sums[i, r] = k.dot_bf16(sums[i, r], v, a[r])
                else:
                    sums[i, r] = k.fma(k.cast(v, k.f32), k.cast(a[r], k.f32), sums[i, r])


@k.inline
def check_adapters(adapters: Adapters, rows: k.Value) -> None:
    """Checks the sizes of the operands with the adapters, and the number of rows that have one."""
    check_size("order", adapters.order.size, rows)
    check_size("the sorted slots", adapters.slots.size, rows)
    check_size("the scales of rows", adapters.scales.size, rows)
    check_size("count", adapters.num_adapted.size, 1)
    check_size("place", adapters.place.size, 2)
    check_size("forms", adapters.forms.shape[0], adapters.memory.shape[0])
    count = k.i64(adapters.num_adapted[0])
    if count < 0 or count > rows:
        raise ValueError("count is {}, of {} rows", count, rows)


@k.inline
def check_place(adapters: Adapters, offset: k.Value, end: k.Value, site: k.Value) -> None:
    """Checks that a site lies in the memory of a slot.

    Args:
        adapters: The adapters.
        offset: The first element of the site in its block.
        end: The number of elements of its place.
        site: The index of the site in its block.
    """
    memory, forms = adapters.memory, adapters.forms
    begin, index = k.i64(adapters.place[0]), k.i64(adapters.place[1])
    # each term is bounded before it is added
    if begin < 0 or begin > memory.shape[1] or begin + offset + end > memory.shape[1]:
        raise IndexError("a site begins at {} + {} of {} elements", begin, offset, memory.shape[1])
    if index < 0 or index >= forms.shape[1] or index + site >= forms.shape[1]:
        raise IndexError("site {} + {}; there are {}", index, site, forms.shape[1])


@k.inline
def expand_rows(
    out: k.View,
    y: k.View,
    narrow: k.View,
    adapters: Adapters,
    at: k.Value,
    site: Site,
    parts: Any,
    column: k.Integer,
    rows: int,
    width: int,
    masked: bool,
) -> None:
    """Stores `y + scale * (B narrow + gain * y + shift)` of `rows` positions from `at` on, in a panel of columns.

    Args:
        out: The result, `[rows, columns]`; it may be the memory of `y`.
        y: The product.
        narrow: The products with A.
        adapters: The adapters.
        at: The first position.
        site: The site.
        parts: The offsets of B, gain and shift.
        column: The first column of the panel.
        rows: The number of positions.
        width: The elements of a vector.
        masked: Whether the panel has fewer columns than `LORA_PANEL`.
    """
    # at most four vectors, which are 16 sums with four rows
    vectors = LORA_PANEL // width if LORA_PANEL < 4 * width else 4
    for part in k.static_range(LORA_PANEL // (width * vectors)):
        inner = part * width * vectors
        panel = Panel(column, vectors, width, masked)
        _expand_vectors(out, y, narrow, adapters, at, site, parts, panel, inner, rows)


@k.inline
def _expand_vectors(
    out: k.View,
    y: k.View,
    narrow: k.View,
    adapters: Adapters,
    at: k.Value,
    site: Site,
    parts: Any,
    panel: Panel,
    inner: int,
    rows: int,
) -> None:
    """The vectors of a panel from its column `inner` on; see `expand_rows`."""
    column, vectors, width, masked = panel
    columns, first = out.shape[1], parts.b + column * site.rank + inner
    sums = k.tile(k.f32, (rows, vectors), width=width, fill=0.0)
    for r in range(site.rank):
        b = [
            k.cast(site.elements.load(first + r * LORA_PANEL + n * width, width=width), k.f32)
            for n in k.static_range(vectors)
        ]
        for i in k.static_range(rows):
            factor = k.splat(narrow[at + i, r], width)
            for n in k.static_range(vectors):
                sums[i, n] = k.fma(factor, b[n], sums[i, n])
    for i in k.static_range(rows):
        row = row_at(adapters, at + i)
        for n in k.static_range(vectors):
            j = column + inner + n * width
            mask = None
            if masked:
                mask = k.iota(k.i64, width) < columns - j
            old = k.cast(y.load(row, j, width=width, mask=mask), k.f32)
            added = sums[i, n]
            if site.vectors:
                gain = k.cast(site.elements.load(parts.gain + j, width=width), k.f32)
                shift = k.cast(site.elements.load(parts.shift + j, width=width), k.f32)
                added = added + old * gain + shift
            out.store(row, j, value=old + added * adapters.scales[row], mask=mask)


@k.inline
def copy_columns(
    out: k.View, y: k.View, row: k.Integer, column: k.Value, count: k.Integer, width: int
) -> None:
    """Copies `count` columns of a row of `y`."""
    for j, mask in k.vectors(count, width):
        value = y.load(row, column + j, width=width, mask=mask)
        out.store(row, column + j, value=value, mask=mask)


@k.inline
def _project_all(
    narrow: k.View,
    x: k.View,
    adapters: Adapters,
    of: Place,
    first: k.Value,
    index: k.Value,
    most: int,
    width: int,
    ctx: k.Context,
    tokens: bool,
) -> None:
    """Stores the products of all positions with A; see `add_adapters`."""
    count = k.i64(adapters.num_adapted[0])
    blocks = k.ceildiv(count, ROWS)
    for block, group in ctx.parallel((blocks, k.ceildiv(of.max_rank, RANKS))):
        at, end, rank = block * ROWS, k.min(block * ROWS + ROWS, count), group * RANKS
        while at < end:
            here = site_at(adapters, at, first, index, of.max_rank)
            last = run_end(adapters, at, end)
            # adapters have ranks of their own: a task past one has nothing to do
            if rank < here.rank:
                if tokens:
                    # an embedding: the product with A is a row of its table
                    for position in range(at, last):
                        token = k.i64(x[row_at(adapters, position), 0])
                        if token < 0 or token >= of.inputs:
                            raise IndexError("token {}; there are {}", token, of.inputs)
                        for r in range(rank, k.min(rank + RANKS, here.rank)):
                            narrow[position, r] = k.f32(here.elements[token * here.rank + r])
                else:
                    position = at
                    while position + most <= last:
                        project_rows(narrow, x, adapters, position, here, rank, most, width)
                        position += most
                    while position < last:
                        project_rows(narrow, x, adapters, position, here, rank, 1, width)
                        position += 1
            at = last


@k.kernel
def add_adapters(
    out: k.Output,
    y: k.Input,
    x: k.Input,
    adapters: Adapters,
    narrow: k.InOut,
    of: Place,
    ctx: k.Context,
    *,
    tokens: bool,
) -> None:
    """Adds the terms of each row's adapter to `y` `[rows, columns]`; see `mo.lora.add`."""
    width = ctx.target.width(k.f32)
    # 16 sums and their operands need 32 registers
    most = ROWS if ctx.target.registers >= 32 else 2
    rows, columns = y.shape[0], y.shape[1]
    check_size("a row of the result", out.shape[1], columns)
    if not tokens:
        check_size("a row of x", x.shape[1], of.inputs)
    check_size("the result", out.shape[0], rows)
    check_size("x", x.shape[0], rows)
    check_adapters(adapters, rows)
    check_place(adapters, of.offset, of.end, of.site)
    begin, index = k.i64(adapters.place[0]), k.i64(adapters.place[1])
    begin += of.offset
    index += of.site
    count = k.i64(adapters.num_adapted[0])
    # a step without adapters: whole rows are copied, without phases
    if count == 0:
        for row in ctx.parallel(rows):
            copy_columns(out, y, row, 0, columns, width)
        return

    # all workers take the same path: sites of gains only have no products with A
    if of.max_rank > 0:
        _project_all(narrow, x, adapters, of, begin, index, most, width, ctx, tokens)
        # all workers read the products with A
        ctx.barrier()

    grid = k.ceildiv(rows, ROWS), k.ceildiv(columns, COLUMNS)
    for block, strip in ctx.parallel(grid):
        at, stop, first = block * ROWS, k.min(block * ROWS + ROWS, rows), strip * COLUMNS
        size = k.min(columns - first, COLUMNS)
        end = k.min(stop, count)
        while at < end:
            here = site_at(adapters, at, begin, index, of.max_rank)
            last = run_end(adapters, at, end)
            if here.rank > 0 or here.vectors:
                for column in range(first, first + size, LORA_PANEL):
                    position = at
                    if columns - column >= LORA_PANEL:
                        for together in k.unroll((most, 1)):
                            while position + together <= last:
                                expand_rows(
                                    out, y, narrow, adapters, position, here, of, column, together, width, False,
                                )  # fmt: skip
                                position += together
                    else:
                        while position < last:
                            expand_rows(
                                out, y, narrow, adapters, position, here, of, column, 1, width, True
                            )
                            position += 1
            else:
                for position in range(at, last):
                    copy_columns(out, y, row_at(adapters, position), first, size, width)
            at = last
        # rows without an adapter
        while at < stop:
            copy_columns(out, y, row_at(adapters, at), first, size, width)
            at += 1


def _lower_add(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.lora.add`; the product may be changed in place."""
    (out,), y, x = results, operands[0], operands[1]
    columns = y.shape[1]
    if not isinstance(columns, int):
        raise NotImplementedError("mo.lora.add of a symbolic number of columns")
    padded = -(-attributes["max_rank"] // RANKS) * RANKS
    # [positions, padded rank]
    narrow = Workspace(DType.float32, (y.shape[0], padded))
    args = (
        view("result", 0, out, static=False),
        *(view("operand", i, operand, static=False) for i, operand in enumerate(operands)),
        view("workspace", 0, narrow, static=False),
    )
    sizes = attributes["max_rank"], attributes["inputs"]
    place = (*sizes, attributes["site"], attributes["offset"], *lora_place_starts(*sizes, columns))
    params = {"tokens": x.dtype is DType.int64}
    scalars = tuple(map(Scalar, place))
    return KernelCall(
        add_adapters, (*args, *scalars), params, workspaces=(narrow,), in_place=((0, 0),)
    )


LOWERINGS = {"mo.lora.add": _lower_add}
