"""Ensembles of decision trees in NumPy."""

from __future__ import annotations

import numpy as np

from max._interpreter.core import Array, register


def _check(name: str, indices: Array, end: int) -> None:
    """Raises where an index is none of ``end`` ones."""
    if indices.size and (indices.min() < 0 or indices.max() >= end):
        raise IndexError(f"trees: {name} {indices.min()} to {indices.max()}, of {end}")


def _holds(values: Array, limits: Array, missing: Array) -> Array:
    return (values <= limits) | (np.isnan(values) & (missing != 0))


@register("mo.trees.masks")
def _masks(
    x: Array,
    features: Array,
    limits: Array,
    missing: Array,
    masks: Array,
    counts: Array,
    weights: Array,
    targets: Array,
    outputs: int,
) -> Array:
    sums = np.zeros((len(x), outputs), x.dtype)
    values = weights.shape[2]
    if len(targets):
        _check("targets", targets, outputs - values + 1)
        _check("counts", counts, features.shape[1] + 1)
    rows = np.arange(len(x))
    bits = masks.dtype.itemsize * 8
    for tree, count in enumerate(counts.tolist()):
        left = np.full(len(x), ~masks.dtype.type(0))
        for node in range(count):
            if len(x):
                _check("features", features[tree, node : node + 1], x.shape[1])
                holds = _holds(x[:, features[tree, node]], limits[tree, node], missing[tree, node])
                left = np.where(holds, left, left & masks[tree, node])
        # only the lowest bit that is set
        low = left & (~left + masks.dtype.type(1))
        # the number of the lowest bit; of no bit their count
        numbers: Array = np.where(left == 0, bits, np.log2(np.maximum(low, 1)))
        place = np.round(numbers).astype(np.int64)
        _check("leaves", place, weights.shape[1])
        first = int(targets[tree])
        sums[rows, first : first + values] += weights[tree, place]
    return sums


@register("mo.trees.walk")
def _walk(
    x: Array,
    features: Array,
    limits: Array,
    missing: Array,
    yes: Array,
    no: Array,
    leaves: Array,
    roots: Array,
    depths: Array,
    weights: Array,
    targets: Array,
    outputs: int,
) -> Array:
    sums = np.zeros((len(x), outputs), x.dtype)
    values, rows = weights.shape[1], np.arange(len(x))
    if len(targets):
        _check("targets", targets, outputs - values + 1)
    for root, depth, target in zip(roots.tolist(), depths.tolist(), targets.tolist(), strict=True):
        at = np.full(len(x), root)
        _check("nodes", at, len(features))
        for _ in range(depth):
            _check("features", features[at], x.shape[1])
            holds = _holds(x[rows, features[at]], limits[at], missing[at])
            at = np.where(holds, yes[at], no[at])
            _check("nodes", at, len(features))
        _check("leaves", leaves[at], len(weights))
        sums[:, target : target + values] += weights[leaves[at]]
    return sums
