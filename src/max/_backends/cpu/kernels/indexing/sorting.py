"""Sorting along an axis: stable merge sort of (value, index) pairs.

A column is cut into up to 16 runs. A task sorts one run: pieces of `INSERTION_RUN` elements by insertion, then by
merging. Four levels then merge pairs of runs; a task writes one piece of a merged run, whose start positions in both
runs `merged_from_first` finds by bisection::

    runs       0   1   2   3 …          values and indices alternate between two workspaces from level to level
    level 0   [0 1] [2 3] …
    level 1   [0 1 2 3] …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.indexing.selection import beats
from max._backends.kernel_call import KernelCall, Operand, Workspace, around, product, view
from max.dtype import DType

LEVELS = 4
"""The number of levels that merge pairs of runs."""
MIN_RUN = 1024
"""The minimum number of elements of a run."""
INSERTION_RUN = 16
"""The number of elements of a piece that is sorted by insertion."""


@k.inline
def before(a: k.SIMD, b: k.SIMD, ascending: bool) -> Any:
    """Whether `a` sorts before `b`; NaN is greater than all numbers."""
    return beats(b, a, True) if ascending else beats(a, b, True)


@k.inline
def merge(
    values: k.View, indices: k.View, from_values: k.View, from_indices: k.View,
    at: k.Integer, a: k.Integer, a_end: k.Value, b: k.Integer, b_end: k.Value, end: k.Value, ascending: bool,
) -> None:  # fmt: skip
    """Merges two sorted runs, which begin at `a` and `b`, into the positions `at` to `end`."""
    while at < end:
        second = b < b_end
        if second and a < a_end:
            # equal elements come from the first run: the sort is stable
            second = before(from_values[b], from_values[a], ascending)
        source = b if second else a
        values[at] = from_values[source]
        indices[at] = from_indices[source]
        if second:
            b += 1
        else:
            a += 1
        at += 1


@k.inline
def merged_from_first(
    values: Any,
    a: k.Value,
    a_size: k.Value,
    b: k.Value,
    b_size: k.Value,
    count: k.Value,
    ascending: bool,
) -> Any:
    """How many of the first `count` elements of the merge of two runs come from the first run."""
    # the second run has no more than `b_size`
    low = k.max(count - b_size, 0)
    high = k.min(count, a_size)
    while low < high:
        k.brief()
        middle = (low + high) // 2
        # element `middle` of the first run comes after this one of the second
        if before(values[b + count - middle - 1], values[a + middle], ascending):
            high = middle
        else:
            low = middle + 1
    return low


@k.inline
def sort_run(
    values: k.View,
    indices: k.View,
    other_values: k.View,
    other_indices: k.View,
    size: k.Integer,
    ascending: bool,
) -> None:
    """Sorts the first `size` elements; the other views are scratch memory of the same size."""
    for start in range(0, size, INSERTION_RUN):
        for i in range(start + 1, k.min(start + INSERTION_RUN, size)):
            value = values[i]
            index = k.i64(indices[i])
            hole = k.i64(i)
            moving = before(value, values[hole - 1], ascending)
            while moving:
                k.brief()
                values[hole] = values[hole - 1]
                indices[hole] = indices[hole - 1]
                hole -= 1
                moving = hole > start
                if moving:
                    moving = before(value, values[hole - 1], ascending)
            values[hole] = value
            indices[hole] = index
    width = k.i64(INSERTION_RUN)
    while width < size:
        # two merges per round, so that the elements end in the views in which they began
        merge_pairs(other_values, other_indices, values, indices, width, size, ascending)
        merge_pairs(values, indices, other_values, other_indices, 2 * width, size, ascending)
        width = 4 * width


@k.inline
def merge_pairs(
    values: k.View, indices: k.View, from_values: k.View, from_indices: k.View, width: k.Value, size: k.Value,
    ascending: bool,
) -> None:  # fmt: skip
    """Merges each pair of adjacent runs of `width` elements."""
    start = k.i64(0)
    while start < size:
        middle = k.min(start + width, size)
        end = k.min(middle + width, size)
        merge(
            values, indices, from_values, from_indices,
            start, start, middle, middle, end, end, ascending,
        )  # fmt: skip
        start = end


@k.kernel
def argsort(
    out: k.Output,
    x: k.Input,
    values: k.InOut,
    indices: k.InOut,
    ctx: k.Context,
    *,
    ascending: bool,
) -> None:
    """The order of each column of `x` `[outer, n, inner]`; the workspaces are `[2, outer * inner * n]`."""
    size = x.shape[1]
    columns = x.shape[0] * x.shape[2]
    run = k.max(k.ceildiv(size, 2**LEVELS), MIN_RUN)  # at most 2 ** LEVELS runs
    pieces = k.ceildiv(size, run)
    for column, piece in ctx.parallel((columns, pieces), grain=1):
        begin = piece * run
        length = k.min(run, size - begin)
        at = column * size + begin
        o = column // x.shape[2]
        inner = column % x.shape[2]
        for i in range(length):
            # columns become contiguous
            values[0, at + i] = x[o, begin + i, inner]
            indices[0, at + i] = begin + i
        sort_run(
            values[0, at:], indices[0, at:], values[1, at:], indices[1, at:], length, ascending
        )
    ctx.barrier()
    for level in k.static_range(LEVELS):
        # a single run is already sorted
        if pieces > 1:
            # levels alternate between the workspaces
            source = level % 2
            pair = run * 2 ** (level + 1)
            for column, piece in ctx.parallel((columns, pieces), grain=1):
                first = piece * run
                start = first // pair * pair
                middle = k.min(start + pair // 2, size)
                end = k.min(start + pair, size)
                # a task writes as many elements as a run has, wherever they come from
                stop = k.min(first + run, end)
                base = column * size
                run_values = values[source, base:]
                a = merged_from_first(
                    run_values,
                    start,
                    middle - start,
                    middle,
                    end - middle,
                    first - start,
                    ascending,
                )
                merge(
                    values[1 - source, base:], indices[1 - source, base:],
                    run_values, indices[source, base:],
                    first, start + a, middle, middle + first - start - a, end, stop, ascending,
                )  # fmt: skip
            ctx.barrier()
    for column, piece in ctx.parallel((columns, pieces), grain=1):
        o = column // x.shape[2]
        inner = column % x.shape[2]
        for i in range(piece * run, k.min((piece + 1) * run, size)):
            # LEVELS is even: the result is in the first workspace
            out[o, i, inner] = indices[0, column * size + i]


def _lower_argsort(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    (x,) = operands
    (out,) = results
    axis = int(attributes["axis"])
    groups = around(axis, len(x.shape))
    workspaces = tuple(Workspace(dtype, (2, product(x.shape))) for dtype in (x.dtype, DType.int64))
    args = (
        view("result", 0, out, groups, static=False),
        view("operand", 0, x, groups, static=False),
        *(view("workspace", i, space, static=(True, False)) for i, space in enumerate(workspaces)),
    )
    params = {"ascending": bool(attributes["ascending"])}
    return KernelCall(argsort, args, params, workspaces=workspaces)


LOWERINGS = {"mo.argsort": _lower_argsort}
