"""The record of eager operations as an object: `max.experimental.tensor.ComputeGraph`."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakValueDictionary

from max.experimental.record import recorder
from max.experimental.replay.pending_tensors import PENDING
from max.experimental.tensors.conversions import Conversions
from max.graph import Graph, Value

__all__ = ["GRAPH", "ComputeGraph"]


class ComputeGraph:
    """The operations that are recorded and not computed yet.

    All tensors of a process share one record; an object of this class is a view of it.

    Args:
        context: Not used: MLIR contexts are implicit. For compatibility.
        sources: Tensors of graph values, see :attr:`sources`.
        seed: The seed of random tensors, see `max.experimental.random`.
    """

    sources: dict[Value[Any], Any]
    """Keeps tensors alive that the values of a graph stand for."""

    def __init__(
        self,
        context: object = None,
        sources: dict[Value[Any], Any] | Sequence[Any] = (),
        seed: int = 0,
    ) -> None:
        self.sources = dict(cast("dict[Value[Any], Any]", sources))
        self.seed = seed

    @property
    def unrealized(self) -> WeakValueDictionary[int, Any]:
        """The tensors that are not computed yet, by the identity of their values, as they are at this moment.

        They are not kept alive: a value that nothing holds is not computed.
        """
        return WeakValueDictionary(
            {id(tensor._cell): tensor for tensor in recorder.pending_tensors()}
        )

    @property
    def graph(self) -> Graph:
        """A graph of what was recorded, with all tensors that are not computed yet as outputs."""
        return recorder.staged_graph()

    def add_source(self, tensor: Conversions) -> None:
        """Keeps a tensor of a graph value alive.

        Raises:
            TypeError: The tensor is no value of a graph.
        """
        if tensor._value is None:
            raise TypeError(f"add_source: {tensor!r} is not a value of a graph")
        self.sources[tensor._value] = tensor

    def add_unrealized(self, tensor: Conversions) -> None:
        """Adds a tensor to those that are not computed yet.

        Raises:
            TypeError: The tensor is computed already, or a value of a graph.
        """
        if tensor._cell is None or tensor._cell.storage is not None:
            raise TypeError(f"add_unrealized: {tensor!r} has a value already")
        PENDING.add(tensor._cell, tensor)

    async def evaluate(self, tensor: Conversions) -> None:
        """Computes a tensor, and with it the tensors that it depends on.

        Args:
            tensor: The tensor.
        """
        tensor._materialize()


GRAPH = ComputeGraph()
"""The record of the process."""
