"""The graph of one call of a function on eager tensors: the tensors that it reads become inputs where they are read."""

# the graph's block and cells are shared by the modules of these packages
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence

from max import driver
from max.experimental.programs.lazy_values import Cell
from max.experimental.programs.sessions import session_of
from max.experimental.record import recorder
from max.graph import Graph, TensorType, TensorValue
from max.graph.value import value_of

__all__ = ["CalledGraph"]


class CalledGraph(Graph):
    """A graph that is built, run once and dropped.

    Args:
        name: Its name, for errors.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._cells: list[Cell] = []
        self._values: dict[int, TensorValue] = {}

    def input_of(self, cell: Cell) -> TensorValue:
        """The input for a tensor.

        Args:
            cell: The tensor's cell.
        """
        value = self._values.get(id(cell))
        if value is None:
            type_ = TensorType(cell.type.dtype, cell.type.shape, cell.type.device).to_mlir()
            argument = self._block.insert_arg(type_, self._num_inputs)
            self._num_inputs += 1
            self._cells.append(cell)
            value = self._values[id(cell)] = value_of(argument).tensor
        return value

    def run(self, outputs: Sequence[TensorValue]) -> list[driver.Tensor]:
        """Ends the graph and runs it.

        Args:
            outputs: Its outputs.

        Returns:
            A tensor in memory for each output.
        """
        self.output(*outputs)
        recorder.materialize(self._cells)
        inputs = [cell.storage for cell in self._cells]
        devices = [value.device.to_device() for value in outputs]
        devices += [cell.type.device.to_device() for cell in self._cells]
        return session_of(devices).load(self).execute(*inputs)
