"""The formats of a paged KV cache: how a head's key or value lies in a page.

Floats are stored as they are; 8-bit ones are clamped to the greatest finite value. A cache of `i8` holds rounded rows,
``code * scale`` with one scale a row, so that the scale factors out of both products of attention::

    byte  0       4                  4 + head_dim
          ├ scale ┼ codes ───────────┼ padding to a multiple of 4
            f32     i8, -127 to 127
"""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_size
from max.dtype.cache_rows import SCALE_BYTES

# a cast of 464 or more gives NaN, as e4m3fn has no infinity
MAX_FINITE = {"f8e4m3fn": 448.0}
"""The greatest finite value of the 8-bit floats that a cache can have."""


def is_rounded(dtype: k.ScalarType) -> bool:
    """Whether rows of a cache are codes with a scale."""
    return dtype is k.i8


@k.inline
def elements_of(rows: k.View, head_dim: int) -> Any:
    """The elements, or codes, of rows `[count, row size]`: `[count, head_dim]`."""
    if is_rounded(rows.dtype):
        rows = rows[:, SCALE_BYTES : SCALE_BYTES + head_dim]  # [count, head_dim]
    return rows


@k.inline
def scales_of(blocks: k.View) -> Any:
    """The cache as 32-bit words, the first word of each row being its scale; for a cache of floats a stand-in."""
    if is_rounded(blocks.dtype):
        return blocks.view(k.f32)
    else:
        return blocks


@k.inline
def load_head(target: k.View, row: k.View, width: int) -> None:
    """Widens a row to `target` `[head_dim]`."""
    if is_rounded(row.dtype):
        # pages hold bytes: the scale is the first 4 of the row
        scale, codes = row.view(k.f32)[0], row[SCALE_BYTES:]
        for j, mask in k.vectors(target.shape[0], width):
            v = k.cast(codes.load(j, width=width, mask=mask), k.f32)
            target.store(j, value=v * scale, mask=mask)
    else:
        for j, mask in k.vectors(target.shape[0], width):
            target.store(j, value=row.load(j, width=width, mask=mask), mask=mask)


@k.inline
def store_head(row: k.View, source: k.View, width: int) -> None:
    """Rounds `source` `[head_dim]` to a row.

    A row of codes with a NaN or an infinity has a scale that is not finite: it reads as NaN.
    """
    size = source.shape[0]
    if is_rounded(row.dtype):
        largest = k.splat(k.f32(0), width)
        for j, mask in k.vectors(size, width):
            v = k.cast(source.load(j, width=width, mask=mask), k.f32)
            largest = k.max(largest, k.abs(v))
        top = k.reduce_max(largest)
        # a row of zeros, or whose greatest value is NaN, has no inverse
        inverse = 127.0 / top if top > 0 else k.f32(0)
        row.view(k.f32)[0] = top * k.f32(1 / 127)
        codes = row[SCALE_BYTES:]
        for j, mask in k.vectors(size, width):
            v = k.cast(source.load(j, width=width, mask=mask), k.f32)
            codes.store(j, value=k.cast(k.round(v * inverse), k.i8), mask=mask)
    else:
        copy_elements(row, source, width)


@k.inline
def copy_elements(target: k.View, source: k.View, width: int) -> None:
    """Copies a flat view to floats of the cache."""
    for j, mask in k.vectors(source.shape[0], width):
        v = source.load(j, width=width, mask=mask)
        if target.dtype.name in MAX_FINITE:
            limit = MAX_FINITE[target.dtype.name]
            v = k.max(k.min(k.cast(v, k.f32), limit), -limit)
        target.store(j, value=v, mask=mask)


@k.inline
def store_heads(rows: k.View, source: k.View, width: int) -> None:
    """Stores the keys or values of a token.

    Args:
        rows: `[kv_heads, row size]` of a page.
        source: `[kv_heads * head_dim]`.
        width: Lanes of a vector.
    """
    if is_rounded(rows.dtype):
        size = source.shape[0] // rows.shape[0]  # head_dim
        for head in range(rows.shape[0]):
            store_head(rows[head], source[head * size : (head + 1) * size], width)
    else:
        # all heads of a slot are adjacent in a cache of floats
        copy_elements(rows.reshape(source.shape[0]), source, width)


@k.inline
def check_heads(name: str, size: k.Value, blocks: k.View) -> None:
    """Raises where a row of all heads does not fit a cache of floats; for one of codes the op checks it.

    Args:
        name: The name of the row in the message (compile time).
        size: Its elements.
        blocks: The cache.
    """
    # a page's token is [kv_heads, head_dim]
    if not is_rounded(blocks.dtype):
        check_size(name, size, blocks.shape[4] * blocks.shape[5])
