"""The tables of an ensemble of trees for the kernels that sum the values of leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from max.graph import TensorValue, ops
from max.graph.ops.staging.stage import stage_declared
from max.importers.onnx.ops.contrib.forest import Forest

Array = npt.NDArray[Any]

_LEQ, _LT, _GTE, _GT = range(4)
_MOST = 2048
"""Features and outputs that the kernels take."""
_BITS = 64
"""Leaves of a tree whose nodes are masks."""


@dataclass
class _Tests:
    """The tests of all nodes in one form: an element is at most the limit, or NaN with the flag.

    Attributes:
        limits: By node.
        missing: Whether NaN holds.
        yes: The successor if the test holds; of a leaf itself.
        no: The successor otherwise.
    """

    limits: Array
    missing: Array
    yes: Array
    no: Array


def _tests(forest: Forest) -> _Tests | None:
    """The tests in one form; None if some have none."""
    modes, limits = forest.modes, forest.values
    inner = modes >= 0
    if (modes > _GT).any() or np.isnan(limits[inner]).any():
        return None
    # x < v is x <= the number before v
    below = (modes == _LT) | (modes == _GTE)
    if (limits[below] == -np.inf).any():
        return None
    moved = np.nextafter(limits, np.asarray(-np.inf, limits.dtype), dtype=limits.dtype)
    # x >= v is the opposite of x < v, for NaN too
    opposite = (modes == _GTE) | (modes == _GT)
    return _Tests(
        np.where(below, moved, limits),
        forest.missing ^ opposite,
        np.where(opposite, forest.no, forest.yes),
        np.where(opposite, forest.yes, forest.no),
    )


def _depths(roots: Array, tests: _Tests, inner: Array) -> Array:
    """The steps from each root to the deepest leaf below it; the forest has no cycles."""
    count = len(inner)
    # pairs of tree and node as one number, as trees may share nodes
    level = np.arange(len(roots)) * count + roots
    depths = np.zeros(len(roots), np.int32)
    steps = 0
    while len(level):
        trees, nodes = np.divmod(level, count)
        depths[trees] = steps
        held = inner[nodes]
        base, nodes = trees[held] * count, nodes[held]
        # unique: a shared child counts once a level
        level = np.unique(np.concatenate([base + tests.yes[nodes], base + tests.no[nodes]]))
        steps += 1
    return depths


def _in_order(root: int, tests: _Tests, inner: Array) -> tuple[list[int], Any] | None:
    """The leaves of a tree from the left, and its inner nodes with the leaves below the first child.

    None if there are more leaves than bits.
    """
    leaves: list[int] = []
    nodes: list[list[int]] = []
    # an inner node comes twice: before its first child and after it
    stack: list[tuple[int, int]] = [(root, -1)]
    while stack:
        node, entry = stack.pop()
        if entry >= 0:
            nodes[entry][2] = len(leaves)
        elif inner[node]:
            nodes.append([node, len(leaves), 0])
            stack += [(int(tests.no[node]), -1), (node, len(nodes) - 1), (int(tests.yes[node]), -1)]
        else:
            leaves.append(node)
            if len(leaves) > _BITS:
                return None
    return leaves, nodes


def _spans(forest: Forest, present: Array, trees: list[Array]) -> tuple[Array, int]:
    """The first target of each tree, and the number of targets from it on that hold all of its values."""
    firsts, width = np.zeros(len(trees), np.int64), 1
    for i, leaves in enumerate(trees):
        used = np.flatnonzero(present[leaves].any(0))
        if len(used):
            firsts[i] = used[0]
            width = max(width, int(used[-1] - used[0]) + 1)
    # moved back where the common width would end behind the last target
    return np.minimum(firsts, present.shape[1] - width).astype(np.int32), width


def sum_leaves(forest: Forest, x: TensorValue, values: Array, present: Array) -> TensorValue | None:
    """The sums ``[rows, targets]`` of the values of the leaves that rows reach; None if no kernel fits.

    Args:
        forest: The trees.
        x: The rows.
        values: ``[nodes, targets]``, 0 where a leaf has no value.
        present: Whether a leaf has a value.
    """
    dtype, targets = x.dtype.to_numpy(), values.shape[1]
    features = x.shape[1]
    if dtype not in (np.float32, np.float64) or forest.values.dtype != dtype:
        return None
    try:
        if int(features) > _MOST or targets > _MOST or not len(forest.roots):
            return None
    except TypeError:
        return None
    tests, inner = _tests(forest), forest.modes >= 0
    if tests is None:
        return None
    depths = _depths(forest.roots, tests, inner)
    found = [_in_order(int(root), tests, inner) for root in np.asarray(forest.roots)]
    if all(tree is not None for tree in found):
        return _masks(forest, tests, x, values, present, [tree for tree in found if tree])
    return _walks(forest, tests, x, values, present, depths)


def _masks(
    forest: Forest, tests: _Tests, x: TensorValue, values: Array, present: Array, trees: list[Any]
) -> TensorValue:
    """The form of masks."""
    order = [np.array(leaves) for leaves, _ in trees]
    firsts, width = _spans(forest, present, order)
    # one bit for each leaf of the largest tree
    bits = np.uint32 if max(map(len, order)) <= 32 else np.uint64
    full = (1 << (8 * np.dtype(bits).itemsize)) - 1
    shape = (len(trees), max([1, *(len(nodes) for _, nodes in trees)]))
    tables = [
        np.zeros(shape, kind) for kind in (np.int32, values.dtype, np.uint8)
    ]  # feature, limit, flag
    masks = np.full(shape, full, bits)
    weights = np.zeros((len(trees), max(map(len, order)), width), values.dtype)
    for i, (leaves, nodes) in enumerate(trees):
        if nodes:
            numbers = np.array([node for node, _, _ in nodes])
            for table, source in zip(
                tables, (forest.features, tests.limits, tests.missing), strict=True
            ):
                table[i, : len(nodes)] = source[numbers]
            masks[i, : len(nodes)] = [
                # a test that fails clears the leaves below the first child
                full & ~((1 << end) - (1 << start))
                for _, start, end in nodes
            ]
        weights[i, : len(leaves)] = values[leaves, firsts[i] : firsts[i] + width]
    counts = np.array([len(nodes) for _, nodes in trees], np.int32)
    operands = [*tables, masks, counts, weights, firsts]
    return _stage_tables("trees.masks", x, operands, values.shape[1])


def _walks(
    forest: Forest, tests: _Tests, x: TensorValue, values: Array, present: Array, depths: Array
) -> TensorValue:
    """The form of walks."""
    inner = forest.modes >= 0
    leaves = np.flatnonzero(~inner)
    number = np.zeros(len(inner), np.int32)
    # the row of a leaf in the table of values
    number[leaves] = np.arange(len(leaves))
    # all trees have values for all targets in this form: their leaves would have to be found otherwise
    firsts = np.zeros(len(forest.roots), np.int32)
    features = np.where(inner, forest.features, 0).astype(np.int32)
    limits = np.where(inner, tests.limits, 0).astype(values.dtype)
    operands = [
        features, limits, tests.missing.astype(np.uint8), tests.yes.astype(np.int32), tests.no.astype(np.int32),
        number, forest.roots.astype(np.int32), depths, values[leaves], firsts,
    ]  # fmt: skip
    return _stage_tables("trees.walk", x, operands, values.shape[1])


def _stage_tables(name: str, x: TensorValue, tables: list[Array], outputs: int) -> TensorValue:
    operands = [x, *(ops.constant(np.ascontiguousarray(table)) for table in tables)]
    return stage_declared(name, operands, {"outputs": outputs})[0]
