"""Attention of prompts over expanded latent keys and values: a chunk of the context at a time.

The keys of a chunk have a part without positions, expanded in a buffer, and a rotated part that all heads share, in the last elements of the
cached latent. Softmax runs on over chunks: each row keeps its maximum and total::

    buffer   row buffer_offsets[b] + i   is token  cache_offsets[b] + i  of sequence b
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._kernel_library.attention.online_softmax import LOG2_E, NEGATIVE_INFINITY
from max._kernel_library.attention.paged_cache import (
    check_batch,
    check_rising,
    check_size,
    layer_of,
    page_of,
    sequence_of,
    unsigned,
)
from max._kernel_library.lowering import KernelCall, Operand, view
from max.dtype import DType

MOST_VALUES = 512
"""Most elements of a value."""


@k.inline
def dot(x: Any, y: Any, size: int, width: int) -> Any:
    """The dot product of two flat views, f32."""
    total = k.splat(k.f32(0), width)
    for j, mask in k.vectors(size, width):
        left = k.cast(x.load(j, width=width, mask=mask), k.f32)
        total = k.fma(left, k.cast(y.load(j, width=width, mask=mask), k.f32), total)
    return k.reduce_add(total)


@k.kernel
def latent_prefill(
    out: k.Output,
    info: k.Output,
    q: k.Input,
    keys: k.Input,
    values: k.Input,
    offsets: k.Input,
    buffer_offsets: k.Input,
    cache_offsets: k.Input,
    blocks: k.InOut,
    cache_lengths: k.Input,
    lookup_table: k.Input,
    layer_index: k.Input,
    scale: k.Input,
    *previous: k.Input,
    ctx: k.Context,
    causal: bool,
) -> None:
    """`out[row, head] = softmax(scale · q[row, head] · keys) · values` over the chunk, and over the chunks before where they are given.

    `q` is `[rows, heads, size]`, `keys` `[buffer, heads, size - rotated]`, `values` `[buffer, heads, value_size]`; `info` `[rows, heads, 2]`
    has the maximum and the total of each row. `previous` are `out` and `info` of the chunks before.
    """
    width = ctx.target.width(k.f32)
    heads, plain, size = q.shape[1], keys.shape[2], values.shape[2]
    rotated = q.shape[2] - plain
    batch = cache_lengths.shape[0]
    layer = layer_of(blocks, layer_index)
    check_batch(offsets, q.shape[0], blocks, cache_lengths, lookup_table, width, 1)
    check_size("buffer_row_offsets", buffer_offsets.shape[0], batch + 1)
    check_size("cache_offsets", cache_offsets.shape[0], batch)
    check_rising("buffer_row_offsets", buffer_offsets, width)
    if k.i64(buffer_offsets[batch]) > keys.shape[0] or values.shape[0] != keys.shape[0]:
        raise ValueError(
            "buffer_row_offsets end at {}; there are {} keys and {} values",
            buffer_offsets[batch],
            keys.shape[0],
            values.shape[0],
        )
    check_size("the result", out.shape[0], q.shape[0])
    sums = ctx.scratch(k.f32, (MOST_VALUES,))
    for row, head in ctx.parallel((q.shape[0], heads)):
        sequence = sequence_of(offsets, batch, row)
        position = k.i64(cache_lengths[sequence]) + row - k.i64(offsets[sequence])
        first = k.i64(cache_offsets[sequence])
        begin = k.i64(buffer_offsets[sequence])
        count = k.i64(buffer_offsets[sequence + 1]) - begin
        if causal:
            count = k.min(count, position + 1 - first)
        top, total = k.f32(NEGATIVE_INFINITY), k.f32(0)
        for j in range(0, size, width):
            sums.store(j, value=k.splat(k.f32(0), width))
        if len(previous) == 2:
            top, total = previous[1][row, head, 0], previous[1][row, head, 1]
            for j, mask in k.vectors(size, width):
                before = k.cast(previous[0].load(row, head, j, width=width, mask=mask), k.f32)
                sums.store(j, value=before * total)
        query = q[row, head]
        for i in range(k.max(count, 0)):
            page = page_of(blocks, lookup_table, sequence, first + i)
            latent = blocks[page, 0, layer, (first + i) % blocks.shape[3], 0]
            score = dot(query, keys[begin + i, head], plain, width)
            shared = latent[latent.shape[0] - rotated :]
            score = (score + dot(query[plain:], shared, rotated, width)) * k.f32(scale[0])
            change = k.f32(1)
            if score > top:
                change = k.exp2((top - score) * LOG2_E) if total > 0 else k.f32(0)
                top = score
            weight = k.exp2((score - top) * LOG2_E)
            total = total * change + weight
            for j, mask in k.vectors(size, width):
                value = k.cast(values.load(begin + i, head, j, width=width, mask=mask), k.f32)
                before = sums.load(j, width=width) * change
                sums.store(j, value=k.fma(value, k.splat(weight, width), before))
        info[row, head, 0] = top
        info[row, head, 1] = total
        share = 1 / total if total > 0 else k.f32(0)
        for j, mask in k.vectors(size, width):
            out.store(row, head, j, value=sums.load(j, width=width) * share, mask=mask)


def _lower_prefill(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    op = "mo.mla.prefill.ragged.paged"
    q, keys, values, *numbers = operands[:10]
    previous = operands[11:]
    unsigned(op, [*numbers[:3], *numbers[4:7]])
    sizes = [*q.shape[1:], *keys.shape[1:], *values.shape[1:]]
    if not all(isinstance(size, int) for size in sizes) or not (
        q.shape[1] == keys.shape[1] == values.shape[1]
        and keys.shape[2] <= q.shape[2]
        and values.shape[2] <= MOST_VALUES
    ):
        raise NotImplementedError(
            f"{op}: queries {q.shape}, keys {keys.shape} and values {values.shape} do not fit; values have up to {MOST_VALUES} elements"
        )
    if operands[6].dtype is DType.int8:
        raise NotImplementedError(f"{op}: a cache of int8; a float dtype would fit")
    rows = (False, True, True)
    args = (
        view("result", 0, results[0], static=rows),
        view("result", 1, results[1], static=rows),
        *(view("operand", i, operands[i], static=rows) for i in range(3)),
        *(view("operand", i, operands[i], static=False) for i in range(3, 6)),
        view("operand", 6, operands[6], static=(False, True, False, True, True, True)),
        view("operand", 7, operands[7], static=False),
        view("operand", 8, operands[8], static=False),
        view("operand", 9, operands[9], ((),)),
        view("operand", 10, operands[10], ((),)),
        *(view("operand", 11 + i, x, static=rows) for i, x in enumerate(previous)),
    )
    return KernelCall(latent_prefill, args, {"causal": bool(attributes["causal"])})


LOWERINGS = {"mo.mla.prefill.ragged.paged": _lower_prefill}
