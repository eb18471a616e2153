"""Products with packed dense weights (`kernels.products.dense.panels`).

One kernel, which branches on the number of rows at run time:

- GEMV path, up to the row threshold: a task is a panel; passes of up to eight rows multiply it as it is read, limited
  by memory bandwidth; weights that come from memory are coded without loss (`coded`, `coded_gemv`);
- GEMM path: tasks of rows by panels, in register tiles (`gemm`) or matrix tiles (`gemm_amx`).

Register budget of the GEMV path: 8 × 2 accumulators with 32 registers, 4 × 2 with 16; one or two rows use all columns
of a panel at once, 2 × 2 vectors with AVX-512 and 2 × 4 with AVX2; more rows with AVX2 take a piece of it by halves.
Cache budget: the rows and `MAX_GEMV_ROWS` × 32 sums (8 KB) stay in the L1 cache while a panel streams through it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.products.blocking import LANES_K, STEP, cut_depth
from max._backends.cpu.kernels.products.dense.coded import (
    ENCODINGS,
    HALVED,
    PLAIN,
    UNIT_DEPTH,
    CodedPanels,
    coded_panel,
    panel_weights,
)
from max._backends.cpu.kernels.products.dense.coded_gemv import gemv_coded
from max._backends.cpu.kernels.products.dense.gemm import (
    InnerSize,
    count_panels,
    gemm_panels,
    inner_size,
)
from max._backends.cpu.kernels.products.dense.gemm_amx import gemm_panels_amx
from max._backends.cpu.kernels.products.dense.panels import (
    GemvRows,
    gemv_passes,
    storage,
    widened_pairs,
)
from max._backends.cpu.kernels.products.row_norms import (
    Norm,
    NormOperands,
    norm_arguments,
    normalize,
)
from max._backends.cpu.kernels.products.streams import ELEMENTS, prefetch_stream
from max._backends.cpu.kernels.tiles.adapter_terms import (
    Next,
    Terms,
    has_terms,
    next_sites,
    terms_arguments,
)
from max._backends.cpu.kernels.tiles.micro_kernels import add_sums, load_sums, store_sums
from max._backends.cpu.kernels.tiles.strips import (
    COLUMNS,
    Parts,
    Results,
    further_results,
    identity,
    identity_of_parts,
    prefetch_adapters,
    store_strip,
)
from max._backends.cpu.kernels.tiles.tiling import Matrix, Tiling, multiply_add, tiling
from max._backends.kernel_call import KernelCall, Limit, Operand, Scalar, product, view

ROW_THRESHOLD = 8
"""Default row threshold for the GEMV path, used when no measurement exists."""
MAX_GEMV_ROWS = 64
"""The maximum number of rows of the GEMV path, as its sums are in scratch memory of fixed size."""
_ROW_THRESHOLDS: Mapping[str, Mapping[str, int]] = {
    # docs/log/2026-11-30-few-rows-zen4.md
    "znver4": {"float32": 64, "coded float32": 64, "halved float32": 16, "coded bfloat16": 12},
}
"""Row thresholds where they were measured, with passes of eight rows: by LLVM's name of the processor, and the weights'
dtype or encoding."""
PIECE_LANES = 16
"""The number of lanes in k of a piece of a panel, 2 KB, that some of its columns take at a time."""


@k.inline
def add_lanes(
    sums: k.View, a: GemvRows, panel: k.View, begin: k.Integer, end: k.Integer, last: Any, rows: int, vectors: int,
    t: Tiling,
) -> None:  # fmt: skip
    """Adds the products of lanes `[begin, end)` of a panel, and where `last` of an odd last element; see
    `gemv_panel`.
    """
    stored = storage(k.target(), panel.dtype)
    b = panel.view(stored.lane)
    size = a.size
    words = a.elements.view(k.i32) if t.pair == 2 else a.elements
    begins = [k.min(k.i64(r), a.count - 1) * (size // t.pair) for r in k.static_range(rows)]
    line = panel.view(k.u8)
    for n in range(begin, end):
        prefetch_stream(line[4 * n * COLUMNS :], 4 * vectors * t.width, rows, ELEMENTS)
        for v in k.static_range(vectors):
            right = b.load(n * COLUMNS + v * t.width, width=t.width)
            # lanes as stored are multiplied: f32, or pairs where the target multiplies pairs
            if stored.pair == 1 or t.pair == 2:
                for r in k.static_range(rows):
                    left = k.splat(words[begins[r] + n], t.width)
                    sums[r, v] = multiply_add(sums[r, v], left, right)
            else:
                both = widened_pairs(right, panel.dtype)
                for r in k.static_range(rows):
                    # [2] adjacent in k
                    pair = a.elements.load(begins[r] + 2 * n, width=2)
                    if a.elements.dtype == k.bf16 and t.width > 4:
                        # as one word that is broadcast, then widened in its lanes; arm64 (4 lanes) multiplies by one
                        left = widened_pairs(k.splat(k.bitcast(pair, k.i32)[0], t.width), k.bf16)
                    else:
                        left = [k.splat(k.cast(pair, k.f32)[i], t.width) for i in range(2)]
                    for i in k.static_range(2):
                        sums[r, v] = k.fma(left[i], both[i], sums[r, v])
    if stored.pair != t.pair:
        if size % 2 == 1 and last:
            # the last element of an odd K has no pair
            for v in k.static_range(vectors):
                right = b.load(size // 2 * COLUMNS + v * t.width, width=t.width)
                both = widened_pairs(right, panel.dtype)
                for r in k.static_range(rows):
                    left = k.splat(k.f32(a.elements[begins[r] + size - 1]), t.width)
                    sums[r, v] = k.fma(left, both[0], sums[r, v])


@k.inline
def gemv_panel(c: Any, a: GemvRows, panel: k.View, rows: int, vectors: int, t: Tiling) -> None:
    """Multiplies `rows` rows of A by some vectors of columns of a panel, a single stream for the hardware prefetcher.

    Register budget: rows × vectors accumulators (16 at most), a vector of B (two if B is widened) and a broadcast
    element of A.

    Args:
        c: The sums, `COLUMNS` per row.
        a: The rows.
        panel: The panel, from the first of the columns on.
        rows: The number of rows per pass.
        vectors: The number of vectors of columns.
        t: The tiling.
    """
    # lanes in k, without an odd last element
    depth = a.size // storage(k.target(), panel.dtype).pair
    target = Matrix(c, COLUMNS)
    if t.folds:
        # the K blocks of the GEMM path, whose results are the same to the last bit
        cut = cut_depth(a.size, LANES_K * t.pair, STEP)
        block = cut[1] // storage(k.target(), panel.dtype).pair
        for number in range(cut[0]):
            sums = k.tile(k.f32, (rows, vectors), width=t.width, fill=0.0)
            end = k.min(number * block + block, depth)
            # the last K block has the odd element
            add_lanes(sums, a, panel, number * block, end, number == cut[0] - 1, rows, vectors, t)
            if number > 0:
                add_sums(sums, target, rows, vectors, t.width)
            store_sums(target, sums, rows, vectors, t.width)
    else:
        sums = k.tile(k.f32, (rows, vectors), width=t.width, fill=0.0)
        add_lanes(sums, a, panel, 0, depth, True, rows, vectors, t)
        store_sums(target, sums, rows, vectors, t.width)


@k.inline
def gemv_pieces(c: Any, a: GemvRows, panel: k.View, rows: int, vectors: int, t: Tiling) -> None:
    """`gemv_panel` for all columns of a panel, some vectors of them at a time, in pieces of `PIECE_LANES` lanes.

    All cache lines of a piece are read before those of the next one: if one half of the columns took the whole panel
    first, every second line would be read from memory, then the others.
    """
    pair = storage(k.target(), panel.dtype).pair
    depth = a.size // pair
    for begin in range(0, k.max(depth, 1), PIECE_LANES):
        end = k.min(begin + PIECE_LANES, depth)
        for first in range(0, COLUMNS, vectors * t.width):
            sums = k.tile(k.f32, (rows, vectors), width=t.width, fill=0.0)
            target = Matrix(c[first:], COLUMNS)
            if begin > 0:
                load_sums(sums, target, rows, vectors, t.width)
            # the last piece has the odd element
            add_lanes(sums, a, panel[first * pair :], begin, end, end == depth, rows, vectors, t)
            store_sums(target, sums, rows, vectors, t.width)


@k.outlined
def gemv_by_panel(c: k.View, a: k.View, panel: k.View, t: Tiling) -> None:
    """Multiplies all rows of `a` `[M, K]`, in passes, by a panel; `c` holds the sums, `COLUMNS` per row."""
    rows, size = a.shape[0], a.shape[1]
    i = k.i64(0)
    flat = a.reshape(rows * size)
    while i < rows:
        remaining = rows - i
        done = k.i64(0)
        for count, fewer in k.unroll(gemv_passes(k.target())):
            # a pass with a wasted row reads the panel once, two passes twice
            if done == 0 and remaining > fewer:
                # for one or two rows all columns of a panel fit the registers, so whole cache lines are read
                vectors = COLUMNS // t.width if count <= 2 else 2
                pass_rows = GemvRows(flat[i * size :], size, remaining)
                if vectors * t.width == COLUMNS or t.folds:
                    # a run-time loop, so that one copy of the code serves all columns
                    for first in range(0, COLUMNS, vectors * t.width):
                        columns = panel[first * storage(k.target(), panel.dtype).pair :]
                        sums = c[i * COLUMNS + first :]
                        gemv_panel(sums, pass_rows, columns, count, vectors, t)
                else:
                    gemv_pieces(c[i * COLUMNS :], pass_rows, panel, count, vectors, t)
                done = k.min(remaining, count)
        i += done


@k.inline
def gemv_any_panel(
    c: k.View, a: k.View, panels: Any, strip: k.Integer, memory: k.View, t: Tiling
) -> None:
    """`gemv_by_panel` for a panel of a strip, coded or not; `memory` is that of `gemv_memory`."""
    if t.coded:
        panel = coded_panel(panels, strip, a.shape[1])
        if panel.form == PLAIN:
            gemv_by_panel(c, a, panel_weights(panel, False), t)
        elif panel.coding == HALVED:
            gemv_by_panel(c, a, panel_weights(panel, True), t)
        else:
            gemv_coded(c, a, panel, memory, t)
    else:
        gemv_by_panel(c, a, panels[strip], t)


@k.inline
def gemv_memory(t: Tiling, ctx: k.Context) -> Any:
    """Scratch memory for a decoded unit of a coded panel."""
    return ctx.scratch(t.lane, (UNIT_DEPTH * COLUMNS if t.coded else 1,))


@k.inline
def gemv_panels(results: Results, a: k.View, panels: Any, t: Tiling, ctx: k.Context) -> None:
    """Computes `results` from up to `MAX_GEMV_ROWS` rows of `a` `[M, K]` and `panels`; a task is a panel."""
    c = ctx.scratch(t.sums, (MAX_GEMV_ROWS * COLUMNS,))
    memory = gemv_memory(t, ctx)
    for strip in ctx.parallel(count_panels(panels, t)):
        prefetch_adapters(results, k.i64(0), a.shape[0], strip)
        gemv_any_panel(c, a, panels, strip, memory, t)
        store_strip(results, c, k.i64(0), a.shape[0], strip)


@k.inline
def multiply_dense(
    results: Results,
    a: k.View,
    panels: Any,
    row_threshold: k.Value,
    inner: InnerSize,
    t: Tiling,
    ctx: k.Context,
) -> None:
    """The products of a launch; see `matmul_panels`."""
    rows, size = a.shape[0], a.shape[1]
    matrix_tiles = a.dtype == k.bf16 and panels.dtype == k.bf16 and ctx.target.float_tile_products
    # a fixed limit with matrix tiles: these round sums in another order, and a measured limit would change results
    limit = k.i64(ROW_THRESHOLD) if matrix_tiles else k.min(row_threshold, MAX_GEMV_ROWS)
    # the GEMV path requires rows of whole pairs
    if inner.many_rows or rows > limit or size % t.pair == 1:
        if matrix_tiles:
            gemm_panels_amx(results, a, panels, t, ctx)
        else:
            direct = inner.in_place and (t.pair == 2 or a.dtype == t.lane)
            gemm_panels(results, a, panels, direct, t, ctx)
        return
    gemv_panels(results, a, panels, t, ctx)


def default_threshold(target: k.Target, weights: str) -> int:
    """The row threshold that is used when no measurement exists.

    Args:
        target: The target.
        weights: The dtype or the encoding of the weights.
    """
    # with fewer registers passes have four rows
    known = _ROW_THRESHOLDS.get(getattr(target, "cpu", "")) if target.registers >= 32 else None
    return ROW_THRESHOLD if known is None else known.get(weights, ROW_THRESHOLD)


def dense_tiling(
    target: k.Target, a: k.ScalarType, panels: k.ScalarType, inner: InnerSize
) -> Tiling:
    """The tiling of a product with panels of a dtype, or with coded panels of weights of another one."""
    if inner.coding is None:
        return tiling(target, a, panels, inner.folds)
    return replace(tiling(target, a, inner.coding.dtype, inner.folds), coded=True)


@k.inline
def as_panels(panels: k.View, coding: Any) -> Any:
    """An operand as panels: a view, or where it is coded a record."""
    if coding is None:
        return panels
    else:
        flat = panels.reshape(panels.size)
        return CodedPanels(flat, k.i64(0), panels.shape[0], coding.dtype, coding.form)


@k.kernel
def matmul_panels(
    out: k.Output,
    a: k.Input,
    panels: k.Input,
    row_threshold: k.i64,  # pyright: ignore
    *extra: k.InOut,
    ctx: k.Context,
    inner: InnerSize,
    parts: Parts = (),
    epilogue: Any = identity,
) -> None:
    """`out` `[M, N]` = `epilogue(a @ b)` from `a` `[M, K]` and the panels `[panels, elements]` of b.

    Up to `row_threshold` rows take the GEMV path. With `parts` there are several products; see
    `kernels.tiles.strips`.
    """
    t = dense_tiling(ctx.target, a.dtype, panels.dtype, inner)
    results = Results(out, extra, epilogue, t.width, parts)
    weights = as_panels(panels, inner.coding)
    multiply_dense(results, a, weights, row_threshold, inner, t, ctx)


@k.kernel
def matmul_normalized(
    out: k.Output,
    a: k.Input,
    panels: k.Input,
    norm_operands: NormOperands,
    row_threshold: k.i64,  # pyright: ignore
    *extra: k.InOut,
    ctx: k.Context,
    inner: InnerSize,
    norm: Norm,
    parts: Parts = (),
    epilogue: Any = identity,
) -> None:
    """`matmul_panels` on the RMS norm of `a`; see `kernels.products.row_norms`."""
    rows = normalize(a, norm_operands, norm, ctx)
    t = dense_tiling(ctx.target, a.dtype, panels.dtype, inner)
    results = Results(out, extra, epilogue, t.width, parts)
    weights = as_panels(panels, inner.coding)
    multiply_dense(results, rows, weights, row_threshold, inner, t, ctx)


@k.kernel
def matmul_adapted(
    out: k.Output,
    a: k.Input,
    panels: k.Input,
    terms: Terms,
    row_threshold: k.i64,  # pyright: ignore
    *extra: k.InOut,
    ctx: k.Context,
    inner: InnerSize,
    parts: Parts,
    after: Next | None,
    epilogue: Any = identity_of_parts,
) -> None:
    """`matmul_panels` with the terms of adapters; see `kernels.tiles.adapter_terms`."""
    t = dense_tiling(ctx.target, a.dtype, panels.dtype, inner)
    results = Results(out, extra, epilogue, t.width, parts, terms, after)
    weights = as_panels(panels, inner.coding)
    multiply_dense(results, a, weights, row_threshold, inner, t, ctx)


def lower_matmul(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The launch of a product of x `[…, K]`, or of its norm, with panels; with `parts` of several products.

    Four more operands are those of `Terms`.
    """
    x, out = operands[0], results[0]
    parts: Parts = attributes.get("parts", ())
    norm_args, norm_params, memory = norm_arguments(operands, attributes, 0)
    last = len(x.shape) - 1
    inner = x.shape[last]
    encoding: str = attributes["encoding"]
    coding = ENCODINGS.get(encoding)
    weights = operands[1].dtype.name if coding is None else encoding
    many_rows: bool = attributes.get("many_rows", False)
    kinds = f"{x.dtype.name} by panels of {weights}, k {inner}"
    args = (
        view("result", 0, out, (range(last), (last,)), static=False),
        view("operand", 0, x, (range(last), (last,)), static=False),
        view("operand", 1, operands[1], static=False),
        *norm_args,
        *terms_arguments(operands),
        # a threshold that no launch reaches is not measured
        Scalar(0)
        if many_rows
        else Limit(
            kinds, default_threshold(target, weights), MAX_GEMV_ROWS, product(x.shape[:last])
        ),
        *further_results(results),
    )
    known = inner_size(x.dtype, operands[1].dtype, inner, coding, many_rows)
    params = {"inner": known, **norm_params}
    if parts:
        params |= {"parts": parts, "epilogue": identity_of_parts}
    kernel = matmul_normalized if memory else matmul_panels
    if has_terms(operands):
        kernel = matmul_adapted
        params["after"] = next_sites(attributes)
    return KernelCall(kernel, args, params, epilogue=True, workspaces=memory)
