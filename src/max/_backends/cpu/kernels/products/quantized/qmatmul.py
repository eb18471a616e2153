"""Products with unpacked quantized weights: parts of the weight are decoded to f32 in scratch memory.

These kernels support every format on every target; rows of x are not rounded. A task is up to 64 rows of x by 4 rows
of the weight (GPTQ: by a vector of columns). Register budget: 2 × 4 accumulators, 4 vectors of the weight, one of x
(GPTQ: 4 accumulators). Cache budget: the decoded part, 4 × 1024 × 4 bytes (16 KB), stays in the L1 cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.products.quantized.dequantize import decode_block
from max._backends.kernel_call import KernelCall, Operand, operand_views, view
from max.dtype.blocks import BLOCK_FORMATS

COLUMNS = 4
"""The number of rows of the weight that are decoded together."""
DEPTH = 1024
"""The number of elements of each row that are decoded together: whole blocks of every format."""
ROWS = 64
"""The maximum number of rows of x that share a decoded part."""
PASS_ROWS = 2
"""The number of rows of x per pass."""
GPTQ_DEPTH = 256
"""The number of inputs of a GPTQ weight that are decoded together."""
GPTQ_PASS_ROWS = 4
"""The number of rows of x per pass by a GPTQ weight."""


@k.inline
def add_dots(sums: k.View, x: k.View, w: k.View, depth: k.Integer, rows: int, width: int) -> None:
    """Adds the dot products of rows of `x` and of decoded rows `w` `[COLUMNS, DEPTH]` to `sums` `[rows, COLUMNS]`."""
    acc = k.tile(k.f32, (rows, COLUMNS), width=width, fill=0.0)
    # blocks of every format are whole vectors: no masks
    for p in range(0, depth, width):
        right = [w.load(c, p, width=width) for c in k.static_range(COLUMNS)]
        for r in k.static_range(rows):
            left = k.cast(x.load(r, p, width=width), k.f32)
            for c in k.static_range(COLUMNS):
                acc[r, c] = k.fma(left, right[c], acc[r, c])
    for r in k.static_range(rows):
        for c in k.static_range(COLUMNS):
            sums[r, c] += k.reduce_add(acc[r, c])


@k.kernel
def qmatmul(out: k.Output, x: k.Input, w: k.Input, ctx: k.Context, *, encoding: str) -> None:
    """`out` `[M, N]` from `x` `[M, K]` and rows of blocks `w` `[N, bytes]`."""
    elements, size = BLOCK_FORMATS[encoding]
    width = ctx.target.width(k.f32)
    decoded = ctx.scratch(k.f32, (COLUMNS, DEPTH))
    sums = ctx.scratch(k.f32, (ROWS, COLUMNS))
    inner = x.shape[1]
    tasks = (k.ceildiv(out.shape[0], ROWS), k.ceildiv(out.shape[1], COLUMNS))
    for row_block, column_block in ctx.parallel(tasks):
        first = row_block * ROWS
        rows = k.min(out.shape[0] - first, ROWS)
        column = column_block * COLUMNS
        for r in range(rows):
            for c in k.static_range(COLUMNS):
                sums[r, c] = 0.0
        for begin in range(0, inner, DEPTH):
            depth = k.min(inner - begin, DEPTH)
            for c in k.static_range(COLUMNS):
                # beyond the last column, decode it again (those results are discarded)
                at = k.min(column + c, out.shape[1] - 1)
                for b in range(depth // elements):
                    block = w[at, (begin // elements + b) * size :]
                    decode_block(decoded[c, b * elements :], block, encoding)
            r = k.i64(0)
            while r + PASS_ROWS <= rows:
                add_dots(sums[r:], x[first + r :, begin:], decoded, depth, PASS_ROWS, width)
                r += PASS_ROWS
            while r < rows:
                add_dots(sums[r:], x[first + r :, begin:], decoded, depth, 1, width)
                r += 1
        for r in range(rows):
            for c in k.static_range(COLUMNS):
                if column + c < out.shape[1]:
                    out[first + r, column + c] = sums[r, c]


@k.inline
def add_outer(sums: k.View, x: k.View, w: k.View, depth: k.Integer, rows: int, width: int) -> None:
    """Adds the products of rows of `x` with decoded inputs `w` `[depth, width]` to `sums` `[rows, width]`.

    The products are added up first, so that the error does not grow with K.
    """
    acc = k.tile(k.f32, (rows,), width=width, fill=0.0)
    for p in range(depth):
        right = w.load(p, 0, width=width)
        for r in k.static_range(rows):
            acc[r] = k.fma(k.splat(k.f32(x[r, p]), width), right, acc[r])
    for r in k.static_range(rows):
        sums.store(r, 0, value=sums.load(r, 0, width=width) + acc[r])


@k.kernel
def qmatmul_gptq(
    out: k.Output,
    x: k.Input,
    weight: k.Input,
    zeros: k.Input,
    scales: k.Input,
    *g_idx: k.Input,
    ctx: k.Context,
    bits: int,
    group_size: int,
) -> None:
    """`out` `[M, N]` from `x` `[M, K]` and a GPTQ weight; `g_idx` `[K]` is the group of each input."""
    width = ctx.target.width(k.f32)
    # elements of a 32-bit word, and the bits of one
    packed, mask = 32 // bits, 2**bits - 1
    decoded = ctx.scratch(k.f32, (GPTQ_DEPTH, width))
    sums = ctx.scratch(k.f32, (ROWS, width))
    inner = x.shape[1]
    # at least one task, so that groups are checked even if the result is empty
    tasks = (k.max(k.ceildiv(out.shape[0], ROWS), 1), k.max(k.ceildiv(out.shape[1], width), 1))
    for row_block, column_block in ctx.parallel(tasks):
        first = row_block * ROWS
        rows = k.min(out.shape[0] - first, ROWS)
        column = column_block * width
        lanes = k.iota(k.i64, width) + column
        inside = lanes < out.shape[1]
        # zero points are packed along the columns, weights along k
        shifts = k.cast(lanes % packed * bits, k.i32)
        for r in range(rows):
            sums.store(r, 0, value=k.splat(k.f32(0), width))
        group = k.i64(-1)
        scale = k.splat(k.f32(0), width)
        zero = k.splat(k.i32(0), width)
        for begin in range(0, inner, GPTQ_DEPTH):
            depth = k.min(inner - begin, GPTQ_DEPTH)
            for word in range(depth // packed):
                q = weight.load(begin // packed + word, column, width=width, mask=inside)
                for j in k.static_range(packed):
                    at = begin + word * packed + j
                    group_of = k.i64(g_idx[0][at]) if len(g_idx) else at // group_size
                    # loads scales and zero points where the group changes only
                    if group_of != group:
                        # with `g_idx` the group is data
                        if group_of < 0 or group_of >= scales.shape[0]:
                            raise IndexError(
                                "g_idx has the group {}, there are {}",
                                group_of,
                                scales.shape[0],
                            )
                        group = group_of
                        scale = k.cast(
                            scales.load(group_of, column, width=width, mask=inside), k.f32
                        )
                        words = zeros[group_of].gather(lanes // packed, mask=inside)
                        # a stored zero point is 1 too small
                        zero = ((words >> shifts) + 1) & mask
                    value = k.cast((q >> (bits * j) & mask) - zero, k.f32)
                    decoded.store(word * packed + j, 0, value=value * scale)
            r = k.i64(0)
            while r + GPTQ_PASS_ROWS <= rows:
                add_outer(sums[r:], x[first + r :, begin:], decoded, depth, GPTQ_PASS_ROWS, width)
                r += GPTQ_PASS_ROWS
            while r < rows:
                add_outer(sums[r:], x[first + r :, begin:], decoded, depth, 1, width)
                r += 1
        for r in range(rows):
            out.store(first + r, column, value=sums.load(r, 0, width=width), mask=inside)


def _rows_and_columns(value: Operand) -> tuple[range, tuple[int]]:
    last = len(value.shape) - 1
    return range(last), (last,)


def _lower_qmatmul(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.qmatmul`, on views `[rows, columns]`."""
    args = (
        view("result", 0, results[0], _rows_and_columns(results[0]), static=False),
        view("operand", 0, operands[0], _rows_and_columns(operands[0]), static=False),
        view("operand", 1, operands[1], static=False),
    )
    return KernelCall(qmatmul, args, {"encoding": attributes["encoding"]})


def _lower_qmatmul_gptq(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.qmatmul_gptq`, on views `[rows, columns]`."""
    args = (
        view("result", 0, results[0], _rows_and_columns(results[0]), static=False),
        view("operand", 0, operands[0], _rows_and_columns(operands[0]), static=False),
        *operand_views(operands, first=1, static=False),
    )
    params = {"bits": attributes["bits"], "group_size": attributes["group_size"]}
    return KernelCall(qmatmul_gptq, args, params)


LOWERINGS = {"mo.qmatmul": _lower_qmatmul, "mo.qmatmul_gptq": _lower_qmatmul_gptq}
