"""The weights that a graph and its branches have added."""

from __future__ import annotations

from typing import NamedTuple

from max.graph.value import TensorValue
from max.graph.weight import Weight

__all__ = ["AddedWeights"]


class _Added(NamedTuple):
    weight: Weight
    value: TensorValue
    branch: object
    """The branch of a `cond` or `while_loop` that added it; None for the graph itself."""


class AddedWeights:
    """The weights of a graph by name. Its branches share those of one name and type.

    Args:
        graph: The name of the graph, for errors.
    """

    def __init__(self, graph: str) -> None:
        self._graph = graph
        self._by_name: dict[str, _Added] = {}

    def find(self, branch: object, weight: Weight) -> TensorValue | None:
        """The value of a weight that was added before, else None.

        Args:
            branch: The branch that adds it; None: the graph itself.
            weight: The weight.

        Raises:
            ValueError: The graph or the same branch has another weight of this name, or another branch has one of
                another type.
        """
        added = self._by_name.get(weight.name)
        if added is None:
            return None
        shared = added.branch not in (None, branch) and added.weight.type == weight.type
        if added.weight is not weight and not shared:
            raise ValueError(
                f"Graph {self._graph}: another weight of the name {weight.name!r} is in the graph already"
            )
        return added.value

    def keep(self, branch: object, weight: Weight, value: TensorValue) -> None:
        """Records a weight that was staged.

        Args:
            branch: The branch that added it; None: the graph itself.
            weight: The weight.
            value: Its value in the graph.
        """
        self._by_name[weight.name] = _Added(weight, value, branch)

    def by_name(self) -> dict[str, Weight]:
        """The weights."""
        return {name: added.weight for name, added in self._by_name.items()}
