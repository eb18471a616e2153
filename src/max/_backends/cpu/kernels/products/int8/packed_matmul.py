"""Exact products with packed weights of 8-bit integers (`kernels.products.int8.panels`) in 32 bits, which
wrap.

One kernel, which branches on the number of rows at run time: GEMV up to `ROW_THRESHOLD` rows, else GEMM in register
tiles (`gemm`) or matrix tiles (`gemm_amx`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.products.int8.gemm import gemm_int8
from max._backends.cpu.kernels.products.int8.gemm_amx import gemm_int8_amx
from max._backends.cpu.kernels.products.int8.gemv import Int8Rows, gemv_int8, sum_rows
from max._backends.cpu.kernels.products.int8.panels import (
    ENCODINGS,
    FOUR,
    by_magnitude,
    int8_tiling,
)
from max._backends.cpu.kernels.tiles.strips import (
    COLUMNS,
    SET_PERIOD,
    Results,
    identity,
    store_strip,
)
from max._backends.cpu.kernels.tiles.tiling import Matrix, Tiling
from max._backends.kernel_call import KernelCall, Operand, Workspace, product, view
from max.dtype import DType

ROW_THRESHOLD = 8
"""The maximum number of rows of the GEMV path."""
L1_WAYS = 8
"""The associativity of the L1 cache: more rows than this in the same sets evict each other."""
GEMV_PASSES = (8, 4, 2, 1)
"""Rows per pass of the GEMV path, for 32 registers and for fewer."""


@k.inline
def lanes_of(a: k.View, workspace: k.View, in_place: bool, width: int, ctx: k.Context) -> Matrix:
    """The rows of `a` `[M, K]` as lanes of four bytes; rows that are not whole lanes are copied to the workspace and
    zero-padded.

    Args:
        a: The rows.
        workspace: Bytes for the copy.
        in_place: Whether rows consist of whole lanes.
        width: The vector width in lanes.
        ctx: The context.
    """
    rows, size = a.shape[0], a.shape[1]
    stride = k.ceildiv(size, FOUR)
    if not in_place:
        # lanes of four need whole words: rows are copied with zeros behind
        for row in ctx.parallel(rows):
            copy = workspace[row * stride * FOUR :]
            # zeroes the last lane, which the row then fills in part
            for i in range(size - size % FOUR, stride * FOUR):
                copy[i] = k.i8(0)
            for i, mask in k.vectors(size, FOUR * width):
                copy.store(i, value=a.load(row, i, width=FOUR * width, mask=mask), mask=mask)
        # each worker reads rows that others copied
        ctx.barrier()
    copies = workspace[: rows * stride * FOUR]
    return Matrix(a.reshape(rows * size).view(k.i32) if in_place else copies.view(k.i32), stride)


@k.inline
def gemv_panels_int8(
    results: Results, a: Matrix, panels: Any, magnitude: bool, t: Tiling, ctx: k.Context
) -> None:
    """Computes `results` from up to `ROW_THRESHOLD` rows `a` and `panels`; a task is a panel."""
    rows, stride = results.out.shape[0], a.row
    c = ctx.scratch(k.i32, (ROW_THRESHOLD * COLUMNS,))
    zero_sums = ctx.scratch(k.i32, (ROW_THRESHOLD,))
    all_rows = Int8Rows(a.elements, stride, rows, zero_sums, k.i64(0), magnitude)
    has_lowest = sum_rows(all_rows, stride, t.width)
    for strip in ctx.parallel(k.ceildiv(results.out.shape[1], COLUMNS)):
        i = k.i64(0)
        while i < rows:
            remaining = rows - i
            done = k.i64(0)
            for count in k.unroll(GEMV_PASSES[ctx.target.registers < 32 :]):
                if done == 0 and remaining > count // 2:
                    # for one or two rows all columns of a panel fit the registers, so whole cache lines are read
                    vectors = COLUMNS // t.width if count <= 2 else 2
                    left = Int8Rows(
                        a.elements[i * stride :], stride, remaining, zero_sums[i:], has_lowest,
                        magnitude,
                    )  # fmt: skip
                    for first in range(0, COLUMNS, vectors * t.width):
                        gemv_int8(
                            c[i * COLUMNS :], left, panels[strip], stride, first, count, vectors, t
                        )
                    done = k.min(remaining, count)
            i += done
        store_strip(results, c, k.i64(0), rows, strip)


@k.kernel
def matmul_int8(
    out: k.Output,
    a: k.Input,
    panels: k.Input,
    workspace: k.InOut,
    *extra: k.Input,
    ctx: k.Context,
    in_place: bool,
    shares_sets: bool,
    epilogue: Any = identity,
) -> None:
    """`out` `[M, N]` = `epilogue(a @ b)` from `a` `[M, K]` and the panels `[panels, bytes]` of b.

    `in_place`: rows consist of whole lanes. `shares_sets`: all rows of a tile map to the same sets of the L1 cache.
    """
    t = int8_tiling(ctx.target)
    magnitude = by_magnitude(ctx.target)
    results = Results(out, extra, epilogue, t.width)
    lanes = lanes_of(a, workspace, in_place, t.width, ctx)
    if a.shape[0] > ROW_THRESHOLD:
        if ctx.target.tile_products:
            gemm_int8_amx(results, lanes, panels, t, ctx)
        else:
            # register tiles higher than the associativity evict their own rows
            copied = shares_sets and t.height > L1_WAYS
            gemm_int8(results, lanes, panels, magnitude, copied, t, ctx)
        return
    gemv_panels_int8(results, lanes, panels, magnitude, t, ctx)


def lower_matmul(operands: Sequence[Operand], results: Sequence[Operand]) -> KernelCall:
    """The product of x `[…, K]` and panels."""
    x, out = operands[0], results[0]
    last = len(x.shape) - 1
    inner = x.shape[last]
    in_place = isinstance(inner, int) and inner % FOUR == 0
    elements = (product(x.shape[:last]), inner + FOUR) if not in_place else (1, 1)
    workspace = Workspace(DType.int8, elements)
    args = (
        view("result", 0, out, (range(last), (last,)), static=False),
        view("operand", 0, x, (range(last), (last,)), static=False),
        view("operand", 1, operands[1], static=False),
        view("workspace", 0, workspace, ((0, 1),), static=False),
    )
    params = {"in_place": in_place, "shares_sets": in_place and inner % SET_PERIOD == 0}
    return KernelCall(matmul_int8, args, params, epilogue=True, workspaces=(workspace,))


__all__ = ["ENCODINGS", "lower_matmul", "matmul_int8"]
