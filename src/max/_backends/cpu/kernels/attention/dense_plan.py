"""The plan of dense attention: compile-time facts, and the records of a task.

In: the target, dtypes and attributes of a call. Out: a `Plan`, which `kernels.attention.dense_rows`
    follows.

A row is a query of one head of a group, the heads that share keys and values. With two heads the rows are::

    query 0, head 0 │ query 0, head 1 │ query 1, head 0 │ …         row r: query r // group, head r % group
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.attention.online_softmax import (
    LOG2_E,
    RowState,
    Scaling,
    round_up,
)
from max._backends.cpu.kernels.tiles import amx_tiles
from max._backends.cpu.kernels.tiles.tiling import Tiling, tiling
from max._dataclass import dataclass

MAX_KEYS = 512
"""Keys of a block, except for large heads."""
BLOCK_ELEMENTS = 1 << 17
"""The maximum number of elements of the packed keys and values of a block, which stay in the L2 cache."""
MAX_KEYS_ROUNDED = 4096
"""Keys of a block read in place with rounded weights: only the scores of the first block are not computed twice.
"""
IN_PLACE_PASSES = 4
"""A task reads keys and values in place if its rows take up to this many passes."""


class DenseForm(NamedTuple):
    """The compile-time parameters of the kernel.

    Args:
        scale: The factor of scores.
        fills: For each mask None, where it is added, or the value where it is false.
        roundings: What the scaled scores, the scores after each mask, and the weights are rounded to.
        columns: Whether keys are `[size, keys]`.
        guard: Which rows are 0: "nan", those whose total is no number above 0; "masked", those whose total is 0, as
            their scores are all -inf; "": none.
    """

    scale: float
    fills: tuple[float | None, ...]
    roundings: tuple[k.ScalarType | None, ...]
    columns: bool
    guard: str


@dataclass(frozen=True)
class Plan:
    """The compile-time facts of a call.

    Args:
        plain: Tiling of products in f32.
        left: Tiling of queries and keys.
        right: Tiling of weights and values.
        row_threshold: The maximum number of rows of a task that reads keys and values in place.
        depth: Lanes of a packed query or key.
        stride: Elements from row to row of the sums.
        keys: Keys of a block.
        state_rows: Rows of state of a row tile, a multiple of 4.
        scale: The factor of scores where there are masks.
        factor: The factor from scores to powers of 2.
        query_factor: The factor of queries: the sign of the scale, which is applied before the maximum is taken.
        fills: For each mask None, where it is added, or the value where it is false.
        score_dtypes: What the scaled scores and the scores after each mask are rounded to, if to anything.
        weight_dtype: What weights are rounded to, divided by their total; None: they are summed as they are.
        columns: Whether keys are `[size, keys]`.
        guard: Which rows are 0: "nan", those whose total is no number above 0; "masked", those whose total is 0, as
            their scores are all -inf; "": none.
        matrix_tiles: Whether packed operands are multiplied in matrix tiles.
    """

    plain: Tiling
    left: Tiling
    right: Tiling
    row_threshold: int
    depth: int
    stride: int
    keys: int
    state_rows: int
    scale: float
    factor: float
    query_factor: float
    fills: tuple[float | None, ...]
    score_dtypes: tuple[k.ScalarType | None, ...]
    weight_dtype: k.ScalarType | None
    columns: bool
    guard: str
    matrix_tiles: bool

    @property
    def rewrites_scores(self) -> bool:
        """Whether scores are scaled before the softmax: they are masked or rounded."""
        return any(self.score_dtypes) or bool(self.fills)

    @property
    def in_place(self) -> Plan:
        """The plan of tasks that read keys and values in place."""
        return self if self.weight_dtype is None else replace(self, keys=MAX_KEYS_ROUNDED)

    @property
    def scaling(self) -> Scaling:
        """The scaling of scores for the softmax: masked scores may be large."""
        return Scaling(self.factor, bool(self.fills))


class Task(NamedTuple):
    """The operands of a task, and its part of them.

    Args:
        q: `[group, queries, size]`.
        keys: `[keys, size]`, or `[size, keys]`.
        values: `[keys, width]`.
        masks: Views `[group, queries, keys]`.
        first: The first row.
        rows: Rows.
        begin: The first key.
        end: The key after the last one.
    """

    q: Any
    keys: Any
    values: Any
    masks: Any
    first: Any
    rows: Any
    begin: Any
    end: Any


class Scratch(NamedTuple):
    """Scratch memory of a worker.

    Args:
        queries: Rows that are read in place, `[rows, size]`, f32.
        unpacked: Rows before they are packed, `[rows, size]`.
        packed: Packed rows, flat lanes.
        key_panels: A block of keys in panels, flat lanes.
        value_panels: A block of values in panels, flat lanes.
        scores: Scores of rows, `keys` of the plan a row, flat.
        rounded_weights: Weights as bf16, as the scores.
        state: The state of all rows.
        tiles: The matrix tiles.
    """

    queries: Any
    unpacked: Any
    packed: Any
    key_panels: Any
    value_panels: Any
    scores: Any
    rounded_weights: Any
    state: RowState
    tiles: Any


class KeyBlock(NamedTuple):
    """A block of keys: the first one, the number of keys, and the masks of the task."""

    first: Any
    count: Any
    masks: Any


class Sweep(NamedTuple):
    """A pass over the keys of a task: whether it computes maxima and totals, and whether it adds values."""

    first: Any
    last: Any


def _split_scale(scale: float) -> tuple[float, float]:
    """The factors of scores and of queries; see `kernels.attention.paged_plan.split_scale`."""
    return (1.0, 0.0) if scale == 0 else (abs(scale), math.copysign(1.0, scale))


def plan_dense(
    target: k.Target,
    dtypes: tuple[k.ScalarType, ...],
    sizes: tuple[int, int],
    form: DenseForm,
) -> Plan:
    """The plan of a call.

    Args:
        target: The target.
        dtypes: Element types of queries, keys, values and the result.
        sizes: Sizes of a query and of a value.
        form: The parameters of the kernel.
    """
    scale, fills, roundings, columns, guard = form
    size, width = sizes
    t = tiling(target, k.f32, k.f32)
    # pairs of bf16, else f32; weights are rounded as the graph rounds its probabilities, to the dtype of the result
    left, right = (
        pairs if (pairs := tiling(target, *operand_dtypes)).pair == 2 else t
        for operand_dtypes in ((dtypes[0], dtypes[1]), (dtypes[3], dtypes[2]))
    )
    matrix_tiles = amx_tiles.takes_tiles(target, left, right)
    if matrix_tiles:
        t, left, right = (amx_tiles.with_tile_height(x) for x in (t, left, right))
    rewrites_scores = any(roundings[:-1]) or bool(fills)
    factor, query_factor = (1.0, 1.0) if rewrites_scores else _split_scale(scale)
    return Plan(
        plain=t,
        left=left,
        right=right,
        # batch-invariant: the path of a row must not depend on the number of rows beside it
        row_threshold=0 if target.batch_invariant else IN_PLACE_PASSES * t.gemv_rows,
        # lanes of whole vectors along k
        depth=round_up(size, left.step) // left.pair,
        # sums are computed in strips of four vectors
        stride=round_up(width, 4 * t.width),
        # a multiple of 64; heads too large for that many keys exceed the budget
        keys=max(64, min(MAX_KEYS, BLOCK_ELEMENTS // (size + width) // 64 * 64)),
        # the softmax takes four rows at a time
        state_rows=round_up(t.height, 4),
        scale=scale,
        factor=factor * LOG2_E,
        query_factor=query_factor,
        fills=fills,
        score_dtypes=roundings[:-1],
        weight_dtype=roundings[-1],
        columns=columns,
        guard=guard,
        matrix_tiles=matrix_tiles,
    )
