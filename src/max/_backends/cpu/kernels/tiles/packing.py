"""Packing of rows and columns into panels.

A panel is `[k / pair][rows][pair]`: for A with the rows of a register tile, for B with its columns. With ``pair`` 2 two
neighbors in k share a 32-bit lane, as `dot_bf16` multiplies them.

Rows are transposed in registers, `width` rows by `width` lanes at a time: 2 × `width` vectors, see
`kernels.tiles.transpose`.
"""

from __future__ import annotations

from max import kernel as k
from max._backends.cpu.kernels.tiles.tiling import Tiling, as_lanes
from max._backends.cpu.kernels.tiles.transpose import transpose


@k.inline
def pack_block(
    panel: k.View,
    stride: k.Value,
    source: k.View,
    mask: k.Mask | None,
    inside: k.Mask | None,
    t: Tiling,
) -> None:
    """Transposes the first `width` lanes in k of some rows into a panel.

    Args:
        panel: Flat view of lanes.
        stride: Lanes from one k to the next.
        source: `[rows, k]`.
        mask: Elements of a row that are loaded; None: all of a vector.
        inside: The mask of the rows that are packed; None: all lanes of a vector.
        t: The tiling.
    """
    block = k.tile(t.lane, (t.width,), width=t.width)
    last = source.shape[0] - 1
    for r in k.static_range(t.width):
        # [step] elements of row r, as `width` lanes
        block[r] = as_lanes(source.load(k.min(r, last), 0, width=t.step, mask=mask), t.lane)
    transpose(block, t.width)
    for r in k.static_range(t.width):
        panel.store(r * stride, value=block[r], mask=inside)


@k.inline
def masks_are_free() -> bool:
    """Whether masked loads and stores of the target cost nothing."""
    # AVX-512BW has mask registers for elements of every size
    return k.target().has("avx512bw")


@k.inline
def pack_rows(panel: k.View, stride: k.Value, source: k.View, count: int, t: Tiling) -> None:
    """Packs rows side by side: `panel[i * stride + r]` is lane `i` of row `r`.

    ::

        source  r0: a0 a1 a2 …        panel  a0 b0 c0 … | a1 b1 c1 … | a2 b2 c2 …
                r1: b0 b1 b2 …               ← stride →
                r2: c0 c1 c2 …

    With lanes of 32 bits the panel continues, with lanes of 0, to the next multiple of the width in k.

    Args:
        panel: Flat view of lanes.
        stride: Lanes from one k to the next.
        source: `[rows, k]`, contiguous along k; rows past the last one read the last one (their results are discarded).
        count: Rows to pack, at most the width of a vector where lanes have 32 bits.
        t: The tiling.
    """
    if t.lane.bits == 32 and t.width >= 4:
        # a transpose takes a lot of code: one copy of it serves all sizes
        any_count = k.run_time(count) if masks_are_free() else count
        pack_blocks(k.run_time(panel), k.run_time(stride), k.run_time(source), any_count, t)
    else:
        pack_elements(panel, stride, source, count, t)


@k.outlined
def pack_blocks(panel: k.View, stride: k.Value, source: k.View, count: k.Value, t: Tiling) -> None:
    """`pack_rows` by transposes of register tiles."""
    size = source.shape[1]
    if masks_are_free():
        # one body for full and partial blocks
        inside = k.iota(k.i32, t.width) < k.i32(count)
        for i in range(0, size, t.step):
            mask = k.iota(k.i32, t.step) < k.i32(size - i)
            pack_block(panel[i // t.pair * stride :], stride, source[:, i:], mask, inside, t)
    else:
        inside = None if count == t.width else k.iota(k.i32, t.width) < count
        for i, mask in k.vectors(size, t.step):
            pack_block(panel[i // t.pair * stride :], stride, source[:, i:], mask, inside, t)


@k.outlined
def pack_elements(panel: k.View, stride: k.Value, source: k.View, count: int, t: Tiling) -> None:
    """`pack_rows` element by element."""
    for r in range(count):
        for i in range(source.shape[1]):
            element = source[k.min(r, source.shape[0] - 1), i]
            panel[i * stride + r] = k.cast(element, t.lane)


@k.inline
def pack_columns(panel: k.View, source: k.View, vectors: int, t: Tiling, step: int = 0) -> None:
    """Packs rows of B, contiguous along its columns, into a panel; columns past the last one are 0.

    With pairs, two rows are interleaved into one row of lanes, ``a0 b0 a1 b1 …``; an odd last row is paired with zeros.

    Args:
        panel: Flat view of lanes.
        source: `[k, columns]`.
        vectors: Width of the panel in vectors.
        t: The tiling.
        step: Lanes from row to row; 0: the panel's width.
    """
    for i in range(0, source.shape[0], t.pair):
        for j in k.static_range(vectors):
            target = i // t.pair * (step or vectors * t.width) + j * t.width
            mask = k.iota(k.i64, t.width) + j * t.width < source.shape[1]
            first = source.load(i, j * t.width, width=t.width, mask=mask)
            if t.pair == 1:
                panel.store(target, value=k.cast(first, t.lane))
            else:
                second = k.splat(k.cast(k.f32(0), source.dtype), t.width)
                if i + 1 < source.shape[0]:
                    second = source.load(i + 1, j * t.width, width=t.width, mask=mask)
                panel.store(target, value=k.bitcast(k.interleave(first, second), t.lane))
