"""Rotary position embedding (RoPE) of the queries of a ragged batch, and of its new keys in the paged cache.

A task is a token with all its heads. Element `j` of a pair is rotated by the angle in columns `2 j` (cosine) and `2 j +
1` (sine) of the position's row of `freqs_cis`::

    interleaved        x0 y0 x1 y1 …      pairs side by side
    not interleaved    x0 x1 … y0 y1 …    the second elements in the second half of the rotated part
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.attention.cache_formats import (
    MAX_FINITE,
    is_rounded,
    load_head,
    store_head,
)
from max._backends.cpu.kernels.attention.paged_cache import (
    CACHE_DIMS,
    BatchRows,
    PagedCache,
    check_ancestors,
    check_batch,
    layer_of,
    page_of,
    place_of,
    tree_position,
)
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.kernel_call import KernelCall, Operand, view
from max.dtype.cache_rows import cache_row_elements


@k.inline
def rotate_head(
    target: k.View,
    source: k.View,
    angles: k.View,
    rotated: k.Integer,
    interleaved: bool,
    width: int,
) -> None:
    """Rotates the first `rotated` elements of a head by `angles` (cosine and sine in turn), and copies the others.

    `target` and `source` may be the same head.
    """
    half = rotated // 2
    for j, mask in k.vectors(half, width):
        # the mask counts pairs, a load of both elements twice as many lanes
        pairs = None if mask is None else k.iota(k.i64, 2 * width) < 2 * (half - j)
        cosine, sine = k.deinterleave(angles.load(2 * j, width=2 * width, mask=pairs))
        if interleaved:
            x, y = k.deinterleave(k.cast(source.load(2 * j, width=2 * width, mask=pairs), k.f32))
            target.store(
                2 * j, value=k.interleave(x * cosine - y * sine, x * sine + y * cosine), mask=pairs
            )
        else:
            x = k.cast(source.load(j, width=width, mask=mask), k.f32)
            y = k.cast(source.load(half + j, width=width, mask=mask), k.f32)
            target.store(j, value=x * cosine - y * sine, mask=mask)
            target.store(half + j, value=x * sine + y * cosine, mask=mask)
    # both may be the same head: this part is then copied to itself
    for j, mask in k.vectors(rotated, source.size, width):
        target.store(j, value=source.load(j, width=width, mask=mask), mask=mask)


@k.kernel
def rope(
    out: k.Output,
    q: k.Input,
    batch_rows: BatchRows,
    freqs_cis: k.Input[k.f32, 2],
    cache: PagedCache,
    max_lengths: k.Input,
    layer_index: k.Input,
    ctx: k.Context,
    *,
    interleaved: bool,
    rotates_cache: bool,
    trees: bool,
) -> None:
    """`out[token, head]` is `q[token, head]` rotated by its position's row of `freqs_cis`; with `rotates_cache` new
    keys are rotated in place too.

    Keys of 8 bits are widened, and rounded again. With `trees` the position of a row is that behind its ancestors.
    """
    width = ctx.target.width(k.f32)
    blocks, _, lookup_table = cache
    input_row_offsets, ancestors = batch_rows
    rounds = is_rounded(blocks.dtype) or blocks.dtype.name in MAX_FINITE
    # a key of 8 bits is rotated in f32 and rounded once
    key_row = ctx.scratch(k.f32, (q.shape[2] if rounds else 1,))
    layer = layer_of(blocks, layer_index)
    rotated = freqs_cis.shape[1]
    check_batch(input_row_offsets, q.shape[0], cache, width, 1)
    for d in k.static_range(3):
        check_size("the result", out.shape[d], q.shape[d])
    if trees:
        check_ancestors(ancestors, input_row_offsets, q.shape[0])
    if rotates_cache:
        check_size("a key", blocks.shape[5], cache_row_elements(blocks.dtype, q.shape[2]))
    for token in ctx.parallel(q.shape[0]):
        sequence, place = place_of(input_row_offsets, cache, token)
        position = k.i64(place)
        if trees:
            first = k.i64(input_row_offsets[sequence])
            position = tree_position(ancestors, token, place, first)
        if position >= freqs_cis.shape[0]:
            raise IndexError(
                "position {} of sequence {}; freqs_cis has {} rows",
                position,
                sequence,
                freqs_cis.shape[0],
            )
        page = page_of(blocks, lookup_table, sequence, place)
        slot = place % blocks.shape[3]
        angles = freqs_cis[position]
        for head in range(q.shape[1]):
            rotate_head(out[token, head], q[token, head], angles, rotated, interleaved, width)
        if rotates_cache:
            for head in range(blocks.shape[4]):
                key = blocks[page, 0, layer, slot, head]  # [row size]
                if rounds:
                    load_head(key_row, key, width)
                    rotate_head(key_row, key_row, angles, rotated, interleaved, width)
                    store_head(key, key_row, width)
                else:
                    rotate_head(key, key, angles, rotated, interleaved, width)


def _lower_rope(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.rope.ragged.paged`; the queries may be rotated in place."""
    q, freqs_cis, blocks = operands[0], operands[2], operands[3]
    trees = bool(attributes.get("trees", False))
    # absent ancestors are replaced by another operand, which the kernel does not read
    ancestors = 8 if trees else 1
    (out,) = results
    args = (
        view("result", 0, out),
        view("operand", 0, q),
        view("operand", 1, operands[1], static=False),
        view("operand", ancestors, operands[ancestors], static=False),
        view("operand", 2, freqs_cis, static=(False, True)),
        view("operand", 3, blocks, static=CACHE_DIMS),
        view("operand", 4, operands[4], static=False),
        view("operand", 5, operands[5], static=False),
        view("operand", 6, operands[6], static=False),
        view("operand", 7, operands[7], ((),)),
    )
    params = {
        "interleaved": bool(attributes.get("interleaved", True)),
        "rotates_cache": bool(attributes.get("rotates_cache", True)),
        "trees": trees,
    }
    return KernelCall(rope, args, params, in_place=((0, 0),))


LOWERINGS = {"mo.rope.ragged.paged": _lower_rope}
