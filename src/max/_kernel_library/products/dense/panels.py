"""Dense weights in panels, which are packed once when a model is loaded, and products with them.

A panel has 32 columns of the right operand B `[K, N]`: row after row of it, or where elements have 16 bits, pair after pair of rows
with neighbours in k side by side, ``[K / 2][32][2]``. Rows that are not there are 0, columns 0 or copies. Panels begin
`panel_lanes` apart. So what is read lies one after the other, a vector of B holds columns, and no sum goes across its lanes.

One kernel, which branches on the number of rows at run time:

- few rows: one after the other or four at once, at the speed at which B is read;
- more: tasks of some rows by some panels, see `max._kernel_library.products.panel_blocks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._kernel_library.lowering import KernelCall, Limit, Operand, product, view
from max._kernel_library.products.dense import amx_panels
from max._kernel_library.products.matmul import identity
from max._kernel_library.products.panel_blocks import (
    COLUMNS,
    STEP,
    many_rows,
    storage,
    widened,
)
from max._kernel_library.products.row_norms import Norm, norm_arguments, normalise
from max._kernel_library.tiles.register_tiles import (
    Tiling,
    multiply_add,
    pack_columns,
    pack_rows,
    tiling,
)
from max._kernel_library.tiles.strips import Parts, further_results, store_strip, unchanged
from max.dtype import DType

CHUNK = 512
"""Elements along k of a panel that a worker packs at once."""
FEW_ROWS = 8
"""Up to so many rows, where nothing was measured, are multiplied by a panel before the next one is."""
MOST_FEW_ROWS = 64
"""The most that this can be done with."""
FEW_AT_ONCE = (8, 4, 2, 1)
"""Rows that are multiplied at once then, at most the half of them where there are few registers."""
DTYPES = (DType.float32, DType.bfloat16, DType.float16)
"""The element types that have panels."""


def panel_elements(inner: int) -> int:
    """Elements of a panel with so many rows of B."""
    return -(-inner // STEP) * STEP * COLUMNS


@k.kernel
def pack_panels(
    out: k.Output, w: k.Input, ctx: k.Context, *, by_rows: bool, shares: int = 1, share: int = 0
) -> None:
    """`out` `[panels, elements]` from `w` `[N, K]` where `by_rows`, else `[K, N]`.

    Where `shares` weights have equal parts of each panel, this is number `share`.
    """
    t = storage(ctx.target, w.dtype)
    inner = w.shape[1] if by_rows else w.shape[0]
    columns = w.shape[0] if by_rows else w.shape[1]
    wide = COLUMNS // shares
    for panel, chunk in ctx.parallel((out.shape[0], k.ceildiv(inner, CHUNK))):
        begin = chunk * CHUNK
        length = k.min(CHUNK, inner - begin)
        target = out[panel, begin * COLUMNS :].view(t.lane)[share * wide :]
        for column in k.static_range(0, wide, t.width):
            # the last column stands in for those that are not there
            at = k.min(panel * wide + column, columns - 1)
            if by_rows:
                source = w[at:, begin : begin + length]
                pack_rows(target[column:], COLUMNS, source, t.width, t)
        if not by_rows:
            column = panel * wide
            source = w[begin : begin + length, column : k.min(column + wide, columns)]
            pack_columns(target, source, wide // t.width, t, COLUMNS)
        if begin + length == inner:
            # what K is filled up with takes part in the products of matrix tiles
            nothing = k.splat(k.cast(0, t.lane), t.width)
            last = (out.shape[1] // COLUMNS - begin) // t.pair
            for i in range(k.ceildiv(length, t.pair), last):
                for column in k.static_range(0, wide, t.width):
                    target.store(i * COLUMNS + column, value=nothing)


@k.inline
def few_rows(
    c: Any, a: Any, size: Any, count: Any, panel: Any, first: int, rows: int, vectors: int,
    t: Tiling,
) -> None:  # fmt: skip
    """A few rows of A by some vectors of columns of a panel, which the hardware asks for ahead of its use.

    Args:
        c: Where the sums go, `COLUMNS` a row.
        a: The rows' elements, one row after the other.
        size: Of them a row.
        count: How many rows there are; the last stands in for those that are not there.
        panel: The panel.
        first: The first column, within the panel.
        rows: Rows at once.
        vectors: Vectors of columns.
        t: The tiling.
    """
    stored = storage(k.target(), panel.dtype)
    b = panel.view(stored.lane)
    sums = k.tile(k.f32, (rows, vectors), width=t.width, fill=0.0)
    words = a.view(k.i32) if t.pair == 2 else a
    begins = [k.min(k.i64(r), count - 1) * (size // t.pair) for r in k.static_range(rows)]
    for n in range(size // stored.pair):
        for v in k.static_range(vectors):
            right = b.load(n * COLUMNS + first + v * t.width, width=t.width)
            if stored.pair == 1 or t.pair == 2:
                for r in k.static_range(rows):
                    left = k.splat(words[begins[r] + n], t.width)
                    sums[r, v] = multiply_add(sums[r, v], left, right)
            else:
                both = widened(right, panel.dtype)
                for r in k.static_range(rows):
                    pair = k.cast(a.load(begins[r] + 2 * n, width=2), k.f32)
                    for i in k.static_range(2):
                        sums[r, v] = k.fma(k.splat(pair[i], t.width), both[i], sums[r, v])
    if stored.pair != t.pair and size % 2 == 1:
        # the last element has no neighbour
        for v in k.static_range(vectors):
            right = b.load(size // 2 * COLUMNS + first + v * t.width, width=t.width)
            both = widened(right, panel.dtype)
            for r in k.static_range(rows):
                left = k.splat(k.f32(a[begins[r] + size - 1]), t.width)
                sums[r, v] = k.fma(left, both[0], sums[r, v])
    for r in k.static_range(rows):
        for v in k.static_range(vectors):
            c.store(r * COLUMNS + first + v * t.width, value=sums[r, v])


@k.inline
def multiply(
    out: Any, a: Any, panels: Any, few: Any, extra: Any, ctx: Any, in_place: bool, parts: Parts,
    epilogue: Any,
) -> None:  # fmt: skip
    """The products of a launch; see `matmul_panels`."""
    t = tiling(ctx.target, a.dtype, panels.dtype)
    rows, size, strips = a.shape[0], a.shape[1], panels.shape[0]
    by_tiles = a.dtype == k.bf16 and panels.dtype == k.bf16 and ctx.target.float_tile_products
    # sums in matrix tiles are rounded in another order, and a measurement must not change results
    limit = k.i64(FEW_ROWS) if by_tiles else k.min(few, MOST_FEW_ROWS)
    # rows of an odd number of elements are not rows of pairs
    if rows > limit or size % t.pair == 1:
        if by_tiles:
            amx_panels.many_rows(out, a, panels, extra, epilogue, parts, t, ctx)
        else:
            direct = in_place and (t.pair == 2 or a.dtype == t.lane)
            many_rows(out, a, panels, extra, direct, epilogue, parts, t, ctx)
        return
    c = ctx.scratch(t.sums, (MOST_FEW_ROWS * COLUMNS,))
    for strip in ctx.parallel(strips):
        i = k.i64(0)
        flat = a.reshape(rows * size)
        while i < rows:
            left = rows - i
            done = k.i64(0)
            for at_once in k.unroll(FEW_AT_ONCE[ctx.target.registers < 32 :]):
                if done == 0 and left > at_once // 2:
                    # narrow vectors: one row or two take whole lines
                    vectors = COLUMNS // t.width if at_once <= 2 else 2
                    for part in k.static_range(0, COLUMNS, vectors * t.width):
                        few_rows(
                            c[i * COLUMNS :], flat[i * size :], size, left, panels[strip], part,
                            at_once, vectors, t,
                        )  # fmt: skip
                    done = k.min(left, at_once)
            i += done
        store_strip(out, c, k.i64(0), rows, strip, extra, epilogue, parts, t.width)


@k.kernel
def matmul_panels(
    out: k.Output,
    a: k.Input,
    panels: k.Input,
    few: k.i64,  # pyright: ignore
    *extra: k.InOut,
    ctx: k.Context,
    in_place: bool,
    parts: Parts = (),
    epilogue: Any = identity,
) -> None:
    """`out` `[M, N]` = `epilogue(a @ b)` from `a` `[M, K]` and the panels `[panels, elements]` of b.

    Up to `few` rows are multiplied panel by panel. Where `in_place`, rows are whole lanes whatever a lane is. With `parts` there are several products; see `max._kernel_library.tiles.strips`.
    """
    multiply(out, a, panels, few, extra, ctx, in_place, parts, epilogue)


@k.kernel
def matmul_normalised(
    out: k.Output,
    a: k.Input,
    panels: k.Input,
    gamma: k.Input,
    memory: k.InOut,
    few: k.i64,  # pyright: ignore
    *extra: k.InOut,
    ctx: k.Context,
    in_place: bool,
    norm: Norm,
    parts: Parts = (),
    epilogue: Any = identity,
) -> None:
    """`matmul_panels` of `a`, normalised; see `max._kernel_library.products.row_norms`."""
    rows = normalise(a, gamma, memory, norm, ctx)
    multiply(out, rows, panels, few, extra, ctx, in_place, parts, epilogue)


def lower_pack(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    by_rows: bool,
    shares: int = 1,
    share: int = 0,
) -> KernelCall:
    """The packing of a weight `[N, K]` where `by_rows`, else `[K, N]`; see `pack_panels`."""
    args = (
        view("result", 0, results[0], static=False),
        view("operand", 0, operands[0], static=False),
    )
    return KernelCall(pack_panels, args, {"by_rows": by_rows, "shares": shares, "share": share})


def lower_matmul(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The product of x `[…, K]` and panels, or with `parts` several, or of x normalised."""
    x, out = operands[0], results[0]
    parts: Parts = attributes.get("parts", ())
    norm_args, norm_params, memory = norm_arguments(operands, attributes, 0)
    last = len(x.shape) - 1
    inner = x.shape[last]
    kinds = f"{x.dtype.name} by panels of {operands[1].dtype.name}, k {inner}"
    args = (
        view("result", 0, out, (range(last), (last,)), static=False),
        view("operand", 0, x, (range(last), (last,)), static=False),
        view("operand", 1, operands[1], static=False),
        *norm_args,
        Limit(kinds, FEW_ROWS, MOST_FEW_ROWS, product(x.shape[:last])),
        *further_results(results),
    )
    # a row of an odd number of elements does not end with a pair
    pairs = DType.bfloat16 in (x.dtype, operands[1].dtype)
    in_place = not pairs or (isinstance(inner, int) and inner % 2 == 0)
    params = {"in_place": in_place, **norm_params}
    if parts:
        params |= {"parts": parts, "epilogue": unchanged}
    kernel = matmul_normalised if memory else matmul_panels
    return KernelCall(kernel, args, params, epilogue=True, workspaces=memory)
