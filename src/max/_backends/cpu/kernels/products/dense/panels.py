"""The layout of packed dense weights, and the packing at model load.

A panel holds 32 columns of the right operand B `[K, N]`, row by row; 16-bit elements are stored as pairs of rows that
are adjacent in k::

    f32          column 0 1 2 … 31         bf16, f16       column 0     1     …  31
          k = 0  │ b b b …  b │                   k = 0, 1 │ b₀b₁  b₀b₁  …  b₀b₁ │
          k = 1  │ b b b …  b │                   k = 2, 3 │ b₂b₃  b₂b₃  …  b₂b₃ │

Rows past K are 0; columns past N are 0 or copies of the last one. A panel has `panel_elements(K)` elements and is one
sequential stream. A vector of B holds columns, so that no sum crosses lanes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.products.blocking import LANES_K, STEP
from max._backends.cpu.kernels.tiles.packing import pack_columns, pack_rows
from max._backends.cpu.kernels.tiles.strips import COLUMNS
from max._backends.cpu.kernels.tiles.tiling import Tiling, as_lanes
from max._backends.kernel_call import KernelCall, Operand, Scalar, view
from max.dtype import DType
from max.kernel import Target

CHUNK = 512
"""The number of elements along k of a panel that a worker packs per task."""
COPY_STRIDE = LANES_K + 16
"""The distance in lanes between rows of a copy of A; not a power of two, so that rows use different cache sets."""
DTYPES = (DType.float32, DType.bfloat16, DType.float16)
"""The element types for which panels exist."""


def panel_elements(inner: int) -> int:
    """The number of elements of a panel.

    Args:
        inner: K, the rows of B.
    """
    return -(-inner // STEP) * STEP * COLUMNS


def storage(target: Target, dtype: k.ScalarType) -> Tiling:
    """The lanes of panels: two 16-bit elements share a 32-bit lane, even if the target cannot multiply pairs."""
    width = target.width(k.f32)
    if dtype.bits == 16:
        return Tiling(k.f32, k.i32, 2, width, 0, 0)
    return Tiling(k.f32, k.f32, 1, width, 0, 0)


class GemvRows(NamedTuple):
    """Rows of A on the GEMV path.

    Args:
        elements: The rows, flat and contiguous.
        size: The number of elements of a row.
        count: The number of rows; passes beyond the end read the last row again (those results are discarded).
    """

    elements: Any
    size: Any
    count: Any


def gemv_passes(target: Target) -> tuple[tuple[int, int], ...]:
    """The numbers of rows of a pass of the GEMV path, the most first, each with the next smaller one.

    A pass has fewer rows than its number where there is none of its own, as each one is a copy of the loop.

    Args:
        target: The target.
    """
    counts = (8, 6, 5, 4, 3, 2, 1, 0) if target.registers >= 32 else (4, 2, 1, 0)
    return tuple(itertools.pairwise(counts))


@k.inline
def widened_pairs(pairs: Any, dtype: k.ScalarType) -> Any:
    """The first and the second 16-bit elements of the lanes, as two vectors of f32."""
    if dtype == k.bf16:  # a bf16 is the upper half of an f32
        bits = k.bitcast(pairs, k.u32)
        return k.bitcast(bits << 16, k.f32), k.bitcast(bits & 0xFFFF0000, k.f32)
    return k.deinterleave(k.cast(k.bitcast(pairs, dtype), k.f32))


@k.inline
def widen_block(panel: k.View, b: k.View, depth: k.Integer, dtype: k.ScalarType, t: Tiling) -> None:
    """Widens a K block of a panel of pairs to f32, row by row.

    Args:
        panel: The result, `[2 * depth][COLUMNS]`, flat.
        b: Lanes of the panel, flat.
        depth: The number of lanes in k.
        dtype: Element type of the weight.
        t: The tiling.
    """
    for n in range(depth):
        for column in k.static_range(0, COLUMNS, t.width):
            even, odd = widened_pairs(b.load(n * COLUMNS + column, width=t.width), dtype)
            panel.store(2 * n * COLUMNS + column, value=even)
            panel.store((2 * n + 1) * COLUMNS + column, value=odd)


@k.inline
def copy_rows(copy: k.View, rows: k.View, t: Tiling) -> None:
    """Copies a K block of rows of A as lanes; an incomplete last lane is zero-padded.

    Args:
        copy: Flat view of lanes, `COPY_STRIDE` per row.
        rows: `[rows, k]`.
        t: The tiling.
    """
    for r in range(rows.shape[0]):
        for i, mask in k.vectors(rows.shape[1], t.step):
            elements = rows.load(r, i, width=t.step, mask=mask)
            copy.store(r * COPY_STRIDE + i // t.pair, value=as_lanes(elements, t.lane))


@k.kernel
def pack_panels(
    out: k.Output, w: k.Input, width: k.i64, first: k.i64, ctx: k.Context, *, by_rows: bool,  # pyright: ignore
) -> None:  # fmt: skip
    """Packs `w`, `[N, K]` if `by_rows`, else `[K, N]`, into `out` `[panels, elements]`.

    The weight fills `width` columns of each panel, from `first` on; both are multiples of the vector width.
    """
    t = storage(ctx.target, w.dtype)
    inner = w.shape[1] if by_rows else w.shape[0]
    columns = w.shape[0] if by_rows else w.shape[1]
    for panel, chunk in ctx.parallel((out.shape[0], k.ceildiv(inner, CHUNK))):
        begin = chunk * CHUNK
        length = k.min(CHUNK, inner - begin)
        # from this chunk's first lane and the weight's first column on
        target = out[panel, begin * COLUMNS :].view(t.lane)[first:]
        if by_rows:
            # a run-time loop, as an unrolled transpose takes much code
            for column in range(0, width, t.width):  # pyright: ignore
                # columns past the last one are copies of it
                at = k.min(panel * width + column, columns - 1)
                source = w[at:, begin : begin + length]
                pack_rows(target[column:], COLUMNS, source, t.width, t)
        else:
            for column in range(0, width, t.width):  # pyright: ignore
                at = k.min(panel * width + column, columns)
                source = w[begin : begin + length, at : k.min(at + t.width, columns)]
                pack_columns(target[column:], source, 1, t, COLUMNS)
        if begin + length == inner:
            # zero the tail along k, as matrix tiles multiply it too
            zeros = k.splat(k.cast(0, t.lane), t.width)
            # in lanes, from this chunk on: the panel is padded to a multiple of `STEP`
            end = (out.shape[1] // COLUMNS - begin) // t.pair
            for i in range(k.ceildiv(length, t.pair), end):
                for column in range(0, width, t.width):  # pyright: ignore
                    target.store(i * COLUMNS + column, value=zeros)


def lower_pack(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    by_rows: bool,
    shares: int = 1,
    share: int = 0,
) -> KernelCall:
    """The launch that packs a weight, `[N, K]` if `by_rows`, else `[K, N]`; see `pack_panels`.

    If `shares` weights share each panel equally, this one has index `share`.
    """
    width = COLUMNS // shares
    args = (
        view("result", 0, results[0], static=False),
        view("operand", 0, operands[0], static=False),
        Scalar(width),
        Scalar(share * width),
    )
    return KernelCall(pack_panels, args, {"by_rows": by_rows})
