"""The products of one x with the matrices A of its rows' adapters, for the launch of its products by packed weights.

Rows are sorted by adapter, so that a task reads a matrix once for its rows: 4 sorted rows by 4 rows of A, or by all
rows of A where there are enough tasks. Register budget: 16 sums (4 rows × 4 chains), or 8 where there are 16 registers.
A row's sums do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.cpu.kernels.products.adapters import (
    ROWS,
    Adapters,
    Site,
    check_adapters,
    check_place,
    multiply_adapter_rows,
    row_at,
    run_end,
    site_at,
)
from max._backends.cpu.kernels.tiles.adapter_terms import (
    HEAD,
    RANKS,
)
from max._backends.kernel_call import KernelCall, Operand, Scalar, run_time_views
from max.mlir.ops.models.adapters import lora_place_starts

SiteNumbers = tuple[int, int, int, int, int, int]
"""The first element of a site in its block, its index there, and the results of `lora_place_starts`."""


class Projection(NamedTuple):
    """A task: 4 sorted rows by 4 rows of A of one site, or by all rows where there are enough tasks.

    Args:
        at: The first position.
        end: The end of the positions.
        rank: The first row of A.
        last_rank: The end of the rows of A.
        begin: The first element of the site.
        index: The index of the site.
        b: The offset of B in the place of the site.
        gain: The offset of the gain.
        shift: The offset of the shift.
        column: The first column of the site in `narrow`.
        head: The first column of the site in the heads.
        next: The distance to the next site.
    """

    at: Any
    end: Any
    rank: Any
    last_rank: Any
    begin: Any
    index: Any
    b: Any
    gain: Any
    shift: Any
    column: Any
    head: Any
    next: Any


@k.outlined
def project_task(
    narrow: k.View,
    heads: k.View,
    x: k.View,
    adapters: Adapters,
    task: Projection,
    max_rank: k.Value,
    width: int,
) -> None:
    """Stores the products with A of the rows of a task, times their scales, and with the first rows of A the heads."""
    # 4 rows by 4 chains are 16 sums: too many for 16 registers
    most = ROWS if k.target().registers >= 32 else 2
    used = k.min(task.end, k.i64(adapters.num_adapted[0]))
    at = task.at
    while at < used:
        here = site_at(adapters, at, task.begin, task.index, max_rank)
        last = run_end(adapters, at, used)
        # of the tasks of a row the first one stores its heads
        if task.rank == 0:
            changes = here.rank > 0 or here.vectors
            first = k.i64(adapters.slots[at]) * adapters.memory.shape[1] + task.begin
            for position in range(at, last):
                row = row_at(adapters, position)
                # -1: nothing is added to the product
                heads[row, task.head] = first + task.b if changes else -1
                heads[row, task.head + 1] = here.rank
                heads[row, task.head + 2] = first + task.gain if here.vectors else -1
                heads[row, task.head + 3] = first + task.shift
        position = at
        while position + most <= last:
            project_scaled(narrow, x, adapters, position, here, task, most, width)
            position += most
        while position + 2 <= last:
            project_scaled(narrow, x, adapters, position, here, task, 2, width)
            position += 2
        if position < last:
            project_scaled(narrow, x, adapters, position, here, task, 1, width)
        at = last
    # rows without an adapter
    if task.rank == 0:
        for position in range(k.max(task.at, used), task.end):
            heads[row_at(adapters, position), task.head] = -1


@k.inline
def project_scaled(
    narrow: k.View,
    x: k.View,
    adapters: Adapters,
    at: k.Value,
    site: Site,
    task: Projection,
    rows: int,
    width: int,
) -> None:
    """Stores the products of `rows` positions from `at` on with the task's rows of A, times the scales of the rows."""
    picked = [row_at(adapters, at + i) for i in k.static_range(rows)]
    size = x.shape[1]
    for rank in range(task.rank, k.min(task.last_rank, site.rank), RANKS):
        # the next rows of A, or after the last ones those of the next site
        ahead = RANKS * size if rank + RANKS < site.rank else task.next - rank * size
        sums = k.tile(k.f32, (rows, RANKS), width=width, fill=0.0)
        multiply_adapter_rows(sums, x, picked, site, rank, ahead, rows, width)
        for i in k.static_range(rows):
            scale = adapters.scales[picked[i]]
            for r in k.static_range(RANKS):
                narrow[picked[i], task.column + rank + r] = k.reduce_add(sums[i, r]) * scale


@k.kernel
def project_adapters(
    narrow: k.Output,
    heads: k.Output,
    x: k.Input,
    adapters: Adapters,
    max_rank: k.i64,  # pyright: ignore
    inputs: k.i64,  # pyright: ignore
    ctx: k.Context,
    *,
    sites: tuple[SiteNumbers, ...],
) -> None:
    """The products of x with each row's adapter, at the sites of one x; see `mok.project_adapters`."""
    width = ctx.target.width(k.f32)
    rows = x.shape[0]
    check_size("a row of x", x.shape[1], inputs)
    check_size("the products", narrow.shape[0], rows)
    check_size("the heads", heads.shape[0], rows)
    check_adapters(adapters, rows)
    for numbers in k.unroll(sites):
        check_place(adapters, numbers[0], numbers[5], numbers[1])
    begin, index = k.i64(adapters.place[0]), k.i64(adapters.place[1])
    padded = narrow.shape[1] // len(sites)
    blocks = k.ceildiv(rows, ROWS)
    ranks = k.i64(RANKS)
    # enough tasks without splitting the ranks, so that each reads x once
    if blocks * len(sites) >= 4 * ctx.num_workers:
        ranks = k.ceildiv(max_rank, RANKS) * RANKS
    for block, number, group in ctx.parallel((blocks, len(sites), k.ceildiv(max_rank, ranks))):
        at = block * ROWS
        for n in k.static_range(len(sites)):
            if n == number:
                # from this site to the next: prefetched after the last rows of A
                following = sites[n + 1 if n + 1 < len(sites) else n][0] - sites[n][0]
                task = Projection(
                    at, k.min(at + ROWS, rows), group * ranks, group * ranks + ranks, begin + sites[n][0],
                    index + sites[n][1], sites[n][2], sites[n][3], sites[n][4], padded * n, HEAD * n, following,
                )  # fmt: skip
                project_task(narrow, heads, x, adapters, task, max_rank, width)


def _lower_project(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mok.project_adapters`."""
    max_rank, inputs = attributes["max_rank"], attributes["inputs"]
    sites = tuple(
        (offset, site, *lora_place_starts(max_rank, inputs, columns))
        for offset, site, columns in attributes["sites"]
    )
    args = (*run_time_views(results, operands), Scalar(max_rank), Scalar(inputs))
    return KernelCall(project_adapters, args, {"sites": sites})


LOWERINGS = {"mok.project_adapters": _lower_project}
