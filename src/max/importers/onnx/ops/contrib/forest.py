"""The nodes of an ensemble of decision trees; all trees of all rows descend a level at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.graph import TensorValue, ops
from max.importers.errors import ModelFileError

Array = npt.NDArray[Any]

MEMBER = 6
"""The mode of a node that tests for members of a set."""
_DEEPEST = 512


@dataclass
class Forest:
    """The nodes of all trees in one numbering; leaves are their own successors.

    Attributes:
        features: The feature that a node tests.
        values: What it compares with.
        modes: How: 0 to 5 for <=, <, >=, >, ==, !=, then `MEMBER`; -1 for leaves.
        yes: The successor if the test holds.
        no: The successor otherwise.
        missing: Whether NaN takes the first.
        roots: The first node of each tree.
        sets: The members of sets, by node.
    """

    features: Array
    values: Array
    modes: Array
    yes: Array
    no: Array
    missing: Array
    roots: Array
    sets: dict[int, Array]

    def depth(self) -> int:
        """The number of steps from the roots to the deepest leaf.

        Raises:
            ModelFileError: A tree has a cycle, or is deeper than the limit.
        """
        level, steps = np.unique(self.roots), 0
        # all trees descend together: `level` has the nodes that any of them reaches
        while (self.modes[level] >= 0).any():
            inner = level[self.modes[level] >= 0]
            level = np.unique(np.concatenate([self.yes[inner], self.no[inner]]))
            steps += 1
            if steps > _DEEPEST:
                raise ModelFileError(f"a tree is deeper than {_DEEPEST} nodes, or has a cycle")
        return steps

    def leaves(self, x: TensorValue) -> TensorValue:
        """The leaf of each row in each tree, int64 ``[rows, trees]``."""
        rows, trees = x.shape[0], len(self.roots)
        at = ops.broadcast_to(ops.constant(self.roots.astype(np.int64)[None]), [rows, trees])
        steps = self.depth()
        kinds = {int(mode) for mode in self.modes if mode >= 0}
        tables = {
            name: ops.constant(np.ascontiguousarray(getattr(self, name)))
            for name in ("features", "yes", "no")
        }
        values = ops.constant(self.values)
        for _ in range(steps):
            # a tree that ends earlier stays at its leaf, which is its own successor
            feature = ops.gather(tables["features"], at, 0)
            value = ops.gather_nd(x, ops.unsqueeze(feature, 2), 1)  # x[row, feature]
            holds = self._holds(value, ops.gather(values, at, 0), at, kinds)
            if self.missing.any() and x.dtype.is_float():
                takes = ops.gather(ops.constant(self.missing), at, 0)
                holds = ops.logical_or(holds, ops.logical_and(takes, ops.is_nan(value)))
            at = ops.where(holds, ops.gather(tables["yes"], at, 0), ops.gather(tables["no"], at, 0))
        return at

    def _holds(
        self, value: TensorValue, limit: TensorValue, at: TensorValue, kinds: set[int]
    ) -> TensorValue:
        """Whether the tests of the nodes hold."""
        tests = {
            0: lambda: value <= limit,
            1: lambda: value < limit,
            2: lambda: value >= limit,
            3: lambda: value > limit,
            4: lambda: ops.equal(value, limit),
            5: lambda: ops.not_equal(value, limit),
            MEMBER: lambda: self._is_member(value, at),
        }
        first, *others = sorted(kinds)
        holds = tests[first]()
        mode = ops.gather(ops.constant(self.modes.astype(np.int8)), at, 0) if others else None
        for kind in others:
            assert mode is not None
            holds = ops.where(ops.equal(mode, kind), tests[kind](), holds)
        return holds

    def _is_member(self, value: TensorValue, at: TensorValue) -> TensorValue:
        width = max(len(members) for members in self.sets.values())
        # NaN, which equals nothing, fills the rows of smaller sets
        table = np.full((len(self.modes), width), np.nan, self.values.dtype)
        for node, members in self.sets.items():
            table[node, : len(members)] = members
        rows = ops.gather(ops.constant(table), at, 0)
        found = ops.cast(ops.equal(rows, ops.unsqueeze(value, 2)), DType.uint8)
        return ops.reshape(ops.max(found, axis=2), at.shape) > 0
