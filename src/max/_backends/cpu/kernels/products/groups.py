"""Groups of rows, each multiplied by its own weight: the experts of a mixture.

Rows are sorted by expert, so that a group is a range of rows. Row tiles do not cross groups; the tiles of a group start
at a multiple of the height::

    rows     │ group 0 (expert 5)   │ group 1 (expert 2) │ … │ rows of no group
    starts   0                      starts[1]            …   starts[groups]
    tiles    ├────┼────┼────┼──     ├────┼────┼───           tile starts[g] // height + g is the first one of group g
"""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.tiles.strips import COLUMNS, Results, store_strip

MEMORY_BOUND_ROWS = 4
"""The maximum number of rows of a group for which reading its weight takes as long as the product."""


class GroupOperands(NamedTuple):
    """The operands that define the groups.

    Args:
        starts: The first row of each group and the end of the last one, `[n + 1]`; elements past the number of groups
            are not read.
        experts: The expert of each group, `[n]`.
        stats: The maximum number of rows of a group (not read), and the number of groups, `[2]`.
    """

    starts: k.Input
    experts: k.Input
    stats: k.Input


class Groups(NamedTuple):
    """The groups of a launch.

    Args:
        starts: The first row of each group, and the end of the last one.
        experts: The expert of each group; -1: the results of the group are 0.
        count: The number of groups.
        max_rows: The maximum number of rows of a group.
    """

    starts: Any
    experts: Any
    count: Any
    max_rows: Any


class Group(NamedTuple):
    """A group of rows.

    Args:
        expert: The index of its expert.
        first: The index of its first row.
        rows: The number of its rows.
    """

    expert: Any
    first: Any
    rows: Any


@k.inline
def group_at(groups: Groups, index: k.Integer) -> Group:
    """The group with an index."""
    first = k.i64(groups.starts[index])
    return Group(k.i64(groups.experts[index]), first, k.i64(groups.starts[index + 1]) - first)


@k.inline
def read_groups(operands: GroupOperands, rows: k.Value, weights: k.Value) -> Groups:
    """Reads and checks the groups of a launch; called by every worker.

    Args:
        operands: The operands that define the groups.
        rows: The number of rows of the launch.
        weights: The number of experts.
    """
    starts, experts, stats = operands
    if stats.shape[0] != 2:
        raise ValueError("expert_usage_stats has size {}, expected 2", stats.shape[0])
    # data of tensors decides what is read: all of it is checked before the first access
    count = k.i64(stats[1])
    if count < 0 or count > experts.shape[0] or count >= starts.shape[0]:
        raise ValueError(
            "expert_usage_stats has {} groups, expert_ids {} and expert_start_indices {} elements",
            count,
            experts.shape[0],
            starts.shape[0],
        )
    if k.i64(starts[0]) != 0:
        raise ValueError("expert_start_indices[0] is {}, expected 0", starts[0])
    max_rows = k.i64(0)
    for g in range(count):
        size = k.i64(starts[g + 1]) - k.i64(starts[g])
        if size < 0 or k.i64(starts[g + 1]) > rows:
            raise ValueError(
                "expert_start_indices[{}] is {} after {}, of {} rows",
                g + 1,
                starts[g + 1],
                starts[g],
                rows,
            )
        # -1 stands for no expert
        if k.i64(experts[g]) < -1 or k.i64(experts[g]) >= weights:
            raise IndexError("expert_ids[{}] is {}; there are {}", g, experts[g], weights)
        # sizes of groups are known here only; this chooses between GEMV and GEMM
        max_rows = k.max(max_rows, size)
    return Groups(starts, experts, count, max_rows)


@k.inline
def zero_rows_of_no_group(out: k.View, groups: Groups, width: int, ctx: k.Context) -> None:
    """Sets the rows past the last group to 0."""
    end = k.i64(groups.starts[groups.count])
    for i in ctx.parallel(out.shape[0] - end):
        for j, mask in k.vectors(out.shape[1], width):
            out.store(end + i, j, value=k.splat(k.f32(0), width), mask=mask)


@k.inline
def few_rows_grain(groups: Groups) -> Any:
    """The grain of a loop over groups and strips: 0 (long runs of memory) if reading weights limits the speed."""
    return k.i64(0) if groups.max_rows <= MEMORY_BOUND_ROWS else k.i64(1)


@k.inline
def store_zeros(
    results: Results, c: k.View, scratch_rows: int, row: k.Value, rows: k.Integer, strip: k.Value
) -> None:
    """Stores the results for sums of 0, for some rows of a strip.

    Args:
        results: The results.
        c: Scratch memory for the sums, `scratch_rows` rows of a strip.
        scratch_rows: The number of rows of the scratch memory.
        row: The first row.
        rows: The number of rows.
        strip: The index of the strip.
    """
    zero = k.splat(k.cast(0, c.dtype), results.width)
    # an epilogue of 0 need not be 0, such as a bias: the sums are stored as any others
    for i in range(0, k.min(rows, scratch_rows) * COLUMNS, results.width):
        c.store(i, value=zero)
    for begin in range(0, rows, scratch_rows):
        store_strip(results, c, row + begin, k.min(rows - begin, scratch_rows), strip)


@k.inline
def store_rows_of_no_group(
    results: Results,
    c: k.View,
    scratch_rows: int,
    groups: Groups,
    rows: k.Value,
    strips: Any,
    ctx: k.Context,
) -> None:
    """Stores the results of the rows past the last group; see `store_zeros`."""
    end = k.i64(groups.starts[groups.count])
    for strip in ctx.parallel(strips):
        if end < rows:
            store_zeros(results, c, scratch_rows, end, rows - end, strip)
