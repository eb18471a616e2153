"""Mixtures of experts in NumPy: the order of rows by expert, and products of groups of rows."""

from __future__ import annotations

import numpy as np

from max._interpreter.core import Array, register
from max.dtype.blocks import decode


@register("mo.moe.indices")
def _indices(ids: Array, experts: int) -> tuple[Array, ...]:
    wrong = (ids.astype(np.int64) < 0) | (ids.astype(np.int64) >= experts)
    if wrong.any():
        raise IndexError(f"topk_ids has {ids[wrong][0]}; there are {experts} experts")
    order = np.argsort(ids, kind="stable")
    counts = np.bincount(ids.astype(np.int64), minlength=experts)
    active = np.flatnonzero(counts)
    # groups after the last active one are empty: they start at the end, and their expert is -1
    starts = np.full(experts + 1, len(ids))
    starts[: len(active)] = np.cumsum([0, *counts[active]])[:-1]
    expert_ids = np.full(experts, -1)
    expert_ids[: len(active)] = active
    most = counts.max(initial=0)
    return (
        order,
        starts,
        np.argsort(order, kind="stable"),
        expert_ids,
        np.array([most, len(active)]),
    )


def _products(x: Array, weights: list[Array], starts: Array, experts: Array, stats: Array) -> Array:
    """Each group's rows by the weight of its expert; rows of no group are 0."""
    count = int(stats[1])
    if len(stats) != 2 or count > len(experts) or count >= len(starts):
        raise ValueError(
            f"expert_usage_stats has {count} groups, expert_ids {len(experts)} elements"
        )
    bounds = [int(n) for n in starts[: count + 1]]
    if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > len(x):
        raise ValueError(
            f"expert_start_indices are {bounds}, expected to rise from 0 up to {len(x)}"
        )
    out = np.zeros((len(x), weights[0].shape[0]), np.float32)
    for g in range(count):
        expert = int(experts[g])
        if not -1 <= expert < len(weights):
            raise IndexError(f"expert_ids[{g}] is {expert}; there are {len(weights)}")
        # an expert of -1 skips its group
        if expert >= 0:
            rows = slice(bounds[g], bounds[g + 1])
            out[rows] = x[rows].astype(np.float32) @ weights[expert].astype(np.float32).T
    return out


@register("mo.grouped_matmul.ragged")
def _grouped_matmul(x: Array, w: Array, starts: Array, experts: Array, stats: Array) -> Array:
    return _products(x, list(w), starts, experts, stats)


@register("mo.grouped_qmatmul.ragged")
def _grouped_qmatmul(
    x: Array, w: Array, starts: Array, experts: Array, stats: Array, encoding: str
) -> Array:
    return _products(x, [decode(blocks, encoding) for blocks in w], starts, experts, stats)
