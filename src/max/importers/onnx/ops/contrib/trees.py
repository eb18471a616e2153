"""Ensembles of decision trees: sums of leaves by a kernel; else all trees of all rows descend a level at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.graph import TensorValue, ops
from max.importers.errors import ModelFileError, Unsupported
from max.importers.node import Node
from max.importers.onnx.ops.contrib.forest import MEMBER, Forest
from max.importers.onnx.ops.contrib.labels import label_classes, scores_of
from max.importers.onnx.ops.contrib.tree_tables import sum_leaves
from max.importers.onnx.table import op

Array = npt.NDArray[Any]

_ML = "ai.onnx.ml"
_LEAF = "LEAF"
_MODES = {
    "BRANCH_LEQ": 0,
    "BRANCH_LT": 1,
    "BRANCH_GTE": 2,
    "BRANCH_GT": 3,
    "BRANCH_EQ": 4,
    "BRANCH_NEQ": 5,
}


def _array(node: Node, name: str, dtype: Any = None) -> Array:
    """An attribute that is a list of numbers or a tensor."""
    value = node.attr(name)
    if value is None:
        value = node.attr(f"{name}_as_tensor")
    array = np.asarray([] if value is None else value)
    return array if dtype is None else array.astype(dtype)


def _old_forest(node: Node, dtype: Any) -> tuple[Forest, dict[tuple[int, int], int]]:
    """The trees of TreeEnsembleRegressor and -Classifier, whose nodes have numbers in their trees."""
    trees, numbers = node.attr("nodes_treeids"), node.attr("nodes_nodeids")
    index = {(t, n): i for i, (t, n) in enumerate(zip(trees, numbers, strict=True))}
    modes = node.attr("nodes_modes")
    count = len(modes)
    try:
        kinds = np.array([-1 if mode == _LEAF else _MODES[mode] for mode in modes])
    except KeyError as error:
        raise Unsupported(f"a node has the mode {error.args[0]!r}") from error
    own = np.arange(count)

    def successors(name: str) -> Array:
        targets = [index.get((t, n), -1) for t, n in zip(trees, node.attr(name), strict=True)]
        # a leaf leads to itself, so that shallow trees wait for deep ones
        found = np.where(kinds >= 0, targets, own)
        if (found < 0).any():
            raise ModelFileError(f"{name} names a node that its tree lacks")
        return found.astype(np.int64)

    missing = node.attr("nodes_missing_value_tracks_true") or [0] * count
    yes, no = successors("nodes_truenodeids"), successors("nodes_falsenodeids")
    # the root of a tree is no other node's successor
    targets = set(yes[kinds >= 0].tolist()) | set(no[kinds >= 0].tolist())
    first: dict[int, int] = {}
    for position, tree in enumerate(trees):
        if position not in targets:
            first.setdefault(tree, position)
    forest = Forest(
        np.array(node.attr("nodes_featureids"), np.int64), _array(node, "nodes_values", dtype), kinds, yes, no,
        np.array(missing, bool), np.array(list(first.values()), np.int64), {},
    )  # fmt: skip
    return forest, index


@dataclass
class Leaves:
    """What the leaves add to the targets.

    Attributes:
        values: ``[nodes, targets]``.
        present: Whether a leaf has a value for a target.
    """

    values: Array
    present: Array

    def is_dense(self, leaves: Array) -> bool:
        """Whether each leaf has a value for each target."""
        return bool(self.present[leaves].all())


def _weights(
    node: Node, prefix: str, count: int, nodes: int, index: dict[tuple[int, int], int], dtype: Any
) -> Leaves:
    """The weights of a TreeEnsembleRegressor or -Classifier."""
    table = np.zeros((nodes, count), dtype)
    present = np.zeros((nodes, count), bool)
    ids, weights = node.attr(f"{prefix}_ids"), _array(node, f"{prefix}_weights", dtype)
    places = zip(node.attr(f"{prefix}_treeids"), node.attr(f"{prefix}_nodeids"), strict=True)
    for place, target, weight in zip(places, ids, weights, strict=True):
        if place not in index or not 0 <= target < count:
            raise ModelFileError(f"{prefix}_ids or {prefix}_nodeids names what the model lacks")
        # a leaf may name a target several times
        table[index[place], target] += weight
        present[index[place], target] = True
    return Leaves(table, present)


def _reached_targets(leaves: TensorValue, weights: Leaves) -> TensorValue:
    """Whether a tree has a value for a target of a row: bool ``[rows, targets]``."""
    found = ops.gather(ops.constant(weights.present.astype(np.uint8)), leaves, 0)
    return ops.reshape(ops.max(found, axis=1), [found.shape[0], found.shape[2]]) > 0


def _join_trees(forest: Forest, x: TensorValue, weights: Leaves, aggregate: str) -> TensorValue:
    """The results of all trees, joined: ``[rows, targets]``."""
    table = weights.values
    if aggregate in ("SUM", "AVERAGE"):
        total = sum_leaves(forest, x, table, weights.present)
        if total is not None:
            return total if aggregate == "SUM" else total / float(len(forest.roots))
    leaves = forest.leaves(x)
    dense = weights.is_dense(forest.modes < 0)
    if aggregate in ("MIN", "MAX") and not dense:
        # trees without a value for a target have no say in its extremum
        table = np.where(weights.present, table, np.inf if aggregate == "MIN" else -np.inf)
    parts = ops.gather(ops.constant(table.astype(weights.values.dtype)), leaves, 0)
    shape = [parts.shape[0], parts.shape[2]]
    match aggregate:
        case "SUM":
            return ops.reshape(ops.sum(parts, 1), shape)
        case "AVERAGE":
            return ops.reshape(ops.sum(parts, 1), shape) / float(int(leaves.shape[1]))
        case "MIN" | "MAX":
            extremum = ops.min(parts, axis=1) if aggregate == "MIN" else ops.max(parts, axis=1)
            y = ops.reshape(extremum, shape)
            # targets that no tree has a value for
            return y if dense else ops.where(_reached_targets(leaves, weights), y, 0.0)
        case _:
            raise Unsupported(f"aggregate_function is {aggregate!r}")


def _kind(x: TensorValue) -> Any:
    return np.float64 if x.dtype is DType.float64 else np.float32


@op(f"{_ML}:TreeEnsembleRegressor")
def tree_ensemble_regressor(node: Node, x: TensorValue) -> TensorValue:
    dtype = _kind(x)
    x = x if x.dtype.is_float() else ops.cast(x, DType.float32)
    forest, index = _old_forest(node, dtype)
    count = node.attr("n_targets", 1)
    table = _weights(node, "target", count, len(forest.modes), index, dtype)
    y = _join_trees(forest, x, table, node.attr("aggregate_function", "SUM"))
    base = _array(node, "base_values", dtype)
    y = y + ops.constant(base) if base.size else y
    return ops.cast(scores_of(y, node.attr("post_transform", "NONE")), DType.float32)


@op(f"{_ML}:TreeEnsembleClassifier")
def tree_ensemble_classifier(node: Node) -> Any:
    x = node.tensor(0)
    dtype = _kind(x)
    x = x if x.dtype.is_float() else ops.cast(x, DType.float32)
    forest, index = _old_forest(node, dtype)
    labels = node.attr("classlabels_strings") or node.attr("classlabels_int64s")
    count = len(labels)
    table = _weights(node, "class", count, len(forest.modes), index, dtype)
    y = _join_trees(forest, x, table, "SUM")
    base = _array(node, "base_values", dtype)
    transform = node.attr("post_transform", "NONE")
    ids = set(node.attr("class_ids"))
    if count == 2 and len(ids) == 1:
        # two classes of which leaves score one: the other's score follows from it
        (only,) = ids
        score = y[:, only : only + 1]
        if base.size == 1:
            score = score + ops.constant(base)
        elif base.size == 2:
            score = score + ops.constant(base[1:])
        # scores count as probabilities then
        positive = bool((_array(node, "class_weights", dtype) >= 0).all())
        limit = 0.5 if positive else 0.0
        choice = ops.cast(score > limit, DType.int64)
        if transform == "LOGISTIC":
            scores = ops.concat([ops.sigmoid(-score), ops.sigmoid(score)], 1)
        elif transform == "PROBIT":
            scores = scores_of(ops.concat([1.0 - score, score], 1), transform)
        else:
            scores = ops.concat([1.0 - score if positive else -score, score], 1)
        return label_classes(node, ops.reshape(choice, [-1]), ops.cast(scores, DType.float32))
    y = y + ops.constant(base) if base.size else y
    # classes that no leaf speaks of are not chosen
    seen = (
        y
        if table.is_dense(forest.modes < 0)
        else ops.where(_reached_targets(forest.leaves(x), table), y, -np.inf)
    )
    choice = ops.reshape(ops.argmax(seen, 1), [-1])
    return label_classes(node, choice, ops.cast(scores_of(y, transform), DType.float32))


_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


@op(f"{_ML}:TreeEnsemble")
def tree_ensemble(node: Node, x: TensorValue) -> TensorValue:
    forest, offset = _new_forest(node)
    count = node.attr("n_targets", 1)
    weights = _array(node, "leaf_weights")
    targets = node.attr("leaf_targetids")
    table = np.zeros((len(forest.modes), count), weights.dtype)
    present = np.zeros(table.shape, bool)
    table[offset + np.arange(len(targets)), targets] = weights
    present[offset + np.arange(len(targets)), targets] = True
    aggregate = _AGGREGATES[node.attr("aggregate_function", 1)]
    y = _join_trees(forest, x, Leaves(table, present), aggregate)
    return scores_of(y, _TRANSFORMS[node.attr("post_transform", 0)])


def _new_forest(node: Node) -> tuple[Forest, int]:
    """The trees of TreeEnsemble: inner nodes, then leaves; and the number of the first leaf."""
    modes = np.asarray(node.attr("nodes_modes")).astype(np.int64).reshape(-1)
    inner, leaves = len(modes), len(node.attr("leaf_targetids"))
    count = inner + leaves
    own = np.arange(count)

    def successors(name: str, flags: str) -> Array:
        places = np.array(node.attr(name), np.int64)
        # leaves are numbered from 0: here they stand behind the inner nodes
        places = places + inner * np.array(node.attr(flags), np.int64)
        if ((places < 0) | (places >= count)).any():
            raise ModelFileError(f"{name} names a node that the model lacks")
        return np.concatenate([places, own[inner:]])

    values = _array(node, "nodes_splits")
    padding = np.zeros(leaves, values.dtype)
    missing = node.attr("nodes_missing_value_tracks_true") or [0] * inner
    members = _array(node, "membership_values", values.dtype)
    sets: dict[int, Array] = {}
    remaining: Sequence[float] = members.tolist()
    for place in np.flatnonzero(modes == MEMBER):
        end = next((i for i, value in enumerate(remaining) if np.isnan(value)), len(remaining))
        sets[int(place)] = np.array(remaining[:end], values.dtype)
        remaining = remaining[end + 1 :]
    forest = Forest(
        np.concatenate(
            [np.array(node.attr("nodes_featureids"), np.int64), np.zeros(leaves, np.int64)]
        ),
        np.concatenate([values, padding]),
        np.concatenate([modes, np.full(leaves, -1)]),
        successors("nodes_truenodeids", "nodes_trueleafs"),
        successors("nodes_falsenodeids", "nodes_falseleafs"),
        np.concatenate([np.array(missing, bool), np.zeros(leaves, bool)]),
        np.array(node.attr("tree_roots"), np.int64),
        sets,
    )
    return forest, inner
