"""Products of row groups with the packed dense weights of their experts, stored expert after expert.

First all groups of few rows: a task multiplies a group by a panel as the panel is read. Then the larger groups, in
register tiles or matrix tiles: a task is a range of rows by a range of panels of one group. For the budgets see
`kernels.products.dense.packed_matmul` and `gemm`. Panels of experts without rows are not read::

    panels   │ expert 0: strips panels │ expert 1 │ …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.products.blocking import Blocking, Task, plan
from max._backends.cpu.kernels.products.dense import gemm_amx
from max._backends.cpu.kernels.products.dense.coded import ENCODINGS
from max._backends.cpu.kernels.products.dense.gemm import (
    InnerSize,
    gemm_memory,
    gemm_task,
    inner_size,
)
from max._backends.cpu.kernels.products.dense.packed_matmul import (
    ROW_THRESHOLD,
    as_panels,
    dense_tiling,
    gemv_any_panel,
    gemv_memory,
)
from max._backends.cpu.kernels.products.groups import (
    GroupOperands,
    few_rows_grain,
    group_at,
    read_groups,
    store_rows_of_no_group,
    store_zeros,
)
from max._backends.cpu.kernels.tiles.strips import (
    COLUMNS,
    Parts,
    Results,
    further_results,
    identity_of_parts,
    store_strip,
)
from max._backends.cpu.kernels.tiles.tiling import Tiling
from max._backends.kernel_call import KernelCall, Operand, view


@k.inline
def panels_from(panels: Any, first: k.Integer, t: Tiling) -> Any:
    """The panels from an index on."""
    return panels._replace(first=first) if t.coded else panels[first:]


@k.kernel
def grouped_panels(
    out: k.Output,
    x: k.Input,
    panels: k.Input,
    group_operands: GroupOperands,
    *extra: k.InOut,
    ctx: k.Context,
    inner: InnerSize,
    parts: Parts,
    epilogue: Any = identity_of_parts,
) -> None:
    """The products of each row of group `g` with the panels of `experts[g]`; `panels` `[panels, elements]` stores the
    panels expert after expert.

    There is one part of one or two products (`kernels.tiles.strips`). Sums of rows outside all groups are
    0.
    """
    t = dense_tiling(ctx.target, x.dtype, panels.dtype, inner)
    all_panels = as_panels(panels, inner.coding)
    results = Results(out, extra, epilogue, t.width, parts)
    # parts of one product have all columns of a panel, two products half of them each
    strips = k.ceildiv(out.shape[1], COLUMNS // parts[0][0])
    # panels of an expert follow each other
    groups = read_groups(group_operands, x.shape[0], panels.shape[0] // k.max(strips, 1))
    c = ctx.scratch(t.sums, (ROW_THRESHOLD * COLUMNS,))
    unit = gemv_memory(t, ctx)
    # the GEMV path requires rows of whole pairs
    limit = k.i64(0) if x.shape[1] % t.pair == 1 else k.i64(ROW_THRESHOLD)
    grain = few_rows_grain(groups)
    for number, strip in ctx.parallel((groups.count, strips), grain=grain):
        group = group_at(groups, number)
        if group.expert < 0:
            store_zeros(results, c, ROW_THRESHOLD, group.first, group.rows, strip)
        elif group.rows > 0 and group.rows <= limit:
            rows = x[group.first : group.first + group.rows]
            gemv_any_panel(c, rows, all_panels, group.expert * strips + strip, unit, t)
            store_strip(results, c, group.first, group.rows, strip)
    store_rows_of_no_group(results, c, ROW_THRESHOLD, groups, x.shape[0], strips, ctx)

    matrix_tiles = (
        x.dtype == k.bf16 and all_panels.dtype == k.bf16 and ctx.target.float_tile_products
    )
    # rows are read in place in pairs, or if they need no widening
    direct = inner.in_place and (t.pair == 2 or x.dtype == t.lane)
    tall = replace(t, height=gemm_amx.ROWS if matrix_tiles else t.height)
    if groups.max_rows > limit:
        # groups already divide the work, so large tasks, which read the least memory, keep all workers busy
        workers = k.ceildiv(ctx.num_workers, k.max(groups.count, 1))
        task_tiles, task_panels = plan(groups.max_rows, strips * COLUMNS, workers, tall)
        b = Blocking(groups.max_rows, strips, tall.height, task_tiles, task_panels)
        tiles = k.matrix_tiles(gemm_amx.SHAPES)
        if matrix_tiles:
            memory = gemm_amx.amx_memory(t.folds, t.coded, ctx)
            tiles.configure()
        else:
            memory = gemm_memory(all_panels, direct, t, ctx)
        copied = k.i64(-1)
        task_rows = task_tiles * tall.height
        shape = (
            groups.count,
            k.ceildiv(groups.max_rows, task_rows),
            k.ceildiv(strips, task_panels),
        )
        for number, row_block, part in ctx.parallel(shape, grain=1):
            group = group_at(groups, number)
            row, strip = row_block * task_rows, part * task_panels
            # groups have fewer rows than the largest: some tasks of the grid are empty
            if group.expert >= 0 and group.rows > limit and row < group.rows:
                task = Task(
                    group.first + row,
                    k.min(task_rows, group.rows - row),
                    strip,
                    k.min(task_panels, strips - strip),
                )
                # from the first panel of the expert on
                expert_panels = panels_from(all_panels, group.expert * strips, t)
                if matrix_tiles:
                    gemm_amx.gemm_task_amx(results, x, expert_panels, memory, tiles, task, b, t)
                else:
                    copied = gemm_task(
                        results, x, expert_panels, memory, task, b, copied, direct, t
                    )
        if matrix_tiles:
            tiles.release()


def lower_grouped_panels(
    operands: Sequence[Operand], results: Sequence[Operand], attributes: Mapping[str, Any]
) -> KernelCall:
    """The launch of `grouped_panels`.

    Args:
        operands: Rows, panels, starts, experts, statistics.
        results: The results of the part.
        attributes: Its `parts`.
    """
    x, panels = operands[:2]
    coding = ENCODINGS.get(attributes["encoding"])
    inner = inner_size(x.dtype, panels.dtype, x.shape[1], coding)
    args = (
        view("result", 0, results[0], static=False),
        *(view("operand", i, operands[i], static=False) for i in range(5)),
        *further_results(results),
    )
    params = {"inner": inner, "parts": attributes["parts"], "epilogue": identity_of_parts}
    return KernelCall(grouped_panels, args, params, epilogue=True)
