"""A node as the functions of its op see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.graph import Dim, Graph, TensorValue
from max.graph.dim import StaticDim
from max.importers.errors import MissingContents, Unsupported
from max.importers.source import SourceGraph, SourceNode
from max.importers.values import Imported, Items, Value

__all__ = ["Bodies", "Node"]

Array = npt.NDArray[Any]


class Bodies(Protocol):
    """What stages the graph around a node, and the bodies among its attributes.

    Attributes:
        values: The values by name.
    """

    values: dict[str, Any]

    def inner(self, graph: SourceGraph, arguments: Sequence[Value]) -> list[Value]:
        """Stages a body into the graph that is being built; the values of its outputs."""
        ...


class Node:
    """A node with the values of its operands.

    Args:
        source: The node in the source model.
        operands: Their values; None for an absent operand.
        walker: What stages the graph around the node.
    """

    def __init__(self, source: SourceNode, operands: Sequence[Value], walker: Bodies) -> None:
        self.source = source
        self.operands = list(operands)
        self.walker = walker

    @property
    def op(self) -> str:
        """The name of the op."""
        return self.source.op

    @property
    def version(self) -> int:
        """The version of the op's definition: the version of the op set that the model uses."""
        return self.source.version

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute, or `default` where the model leaves it out."""
        value = self.source.attributes.get(name)
        return default if value is None else value

    def body(self, name: str) -> SourceGraph:
        """A graph among the attributes."""
        value = self.attr(name)
        if not isinstance(value, SourceGraph):
            raise Unsupported(f"lacks the graph {name!r}")
        return value

    # operands ------------------------------------------------------------------------------------

    def has(self, index: int) -> bool:
        """Whether an operand is given."""
        return index < len(self.operands) and self.operands[index] is not None

    def value(self, index: int) -> Imported:
        """An operand that must be a tensor."""
        operand = self.operands[index] if index < len(self.operands) else None
        if not isinstance(operand, Imported):
            what = "a sequence" if isinstance(operand, Items) else "absent"
            raise Unsupported(f"operand {index} is {what}, expected a tensor")
        return operand

    def items(self, index: int) -> Items:
        """An operand that must be a sequence."""
        operand = self.operands[index] if index < len(self.operands) else None
        if not isinstance(operand, Items):
            raise Unsupported(f"operand {index} is a tensor, expected a sequence")
        return operand

    def tensor(self, index: int) -> TensorValue:
        """An operand as a tensor of the graph."""
        return self.value(index).tensor

    def tensors(self) -> list[TensorValue | None]:
        """All operands as tensors of the graph; None for absent ones."""
        return [self.tensor(i) if self.has(i) else None for i in range(len(self.operands))]

    def elements(self, index: int, default: Any = None) -> Array:
        """The elements of an operand, as numbers.

        Args:
            index: The operand.
            default: What an absent operand stands for.

        Raises:
            MissingContents: They are not known at import.
        """
        if not self.has(index) and default is not None:
            return np.asarray(default)
        numbers = self.value(index).numbers
        if numbers is None:
            raise MissingContents(self.source.inputs[index], "the elements")
        return numbers

    def number(self, index: int, default: Any = None) -> Any:
        """The one element of an operand, as a Python number."""
        numbers = self.elements(index, default)
        if numbers.size != 1:
            raise Unsupported(f"operand {index} has {numbers.size} elements, expected one")
        return numbers.reshape(-1)[0].item()

    def ints(self, index: int, default: Sequence[int] | None = None) -> list[int]:
        """The elements of an operand of integers, as a list."""
        numbers = self.elements(index, default)
        return [int(number) for number in numbers.reshape(-1)]

    def sizes(self, index: int) -> list[Dim]:
        """The elements of an operand as dimensions, which may be expressions over symbols.

        Raises:
            MissingContents: They are not known at import.
        """
        contents = self.value(index).contents
        if contents is None:
            raise MissingContents(self.source.inputs[index], "the elements")
        return [Dim(item if isinstance(item, Dim) else int(item)) for item in contents.reshape(-1)]

    def static_shape(self, index: int) -> list[int]:
        """The sizes of an operand, as numbers.

        Raises:
            MissingContents: One depends on a symbol.
        """
        return [self.static(dim, index) for dim in self.value(index).shape]

    def static(self, dim: Dim, index: int = 0) -> int:
        """A size of an operand, as a number.

        Raises:
            MissingContents: It depends on a symbol.
        """
        if not isinstance(dim, StaticDim):
            raise MissingContents(self.source.inputs[index], f"the size {dim}")
        return int(dim)

    def axis(self, name: str, rank: int, default: int | None = None) -> int:
        """An attribute that is an axis, in ``[0, rank)``."""
        return self.checked_axis(self.attr(name, default), rank)

    def checked_axis(self, axis: Any, rank: int) -> int:
        """An axis in ``[0, rank)``; negative ones count from the end."""
        if not isinstance(axis, int) or not -rank <= axis < max(rank, 1):
            raise Unsupported(f"the axis is {axis!r}, the operand has rank {rank}")
        return axis + rank if axis < 0 else axis

    def axes(self, axes: Sequence[int], rank: int) -> list[int]:
        """Axes in ``[0, rank)``, all different."""
        found = [self.checked_axis(int(axis), rank) for axis in axes]
        if len(set(found)) != len(found):
            raise Unsupported(f"the axes {list(axes)} name one axis twice")
        return found

    # results -------------------------------------------------------------------------------------

    def wants(self, index: int) -> bool:
        """Whether the model uses a result."""
        return index < len(self.source.outputs) and bool(self.source.outputs[index])

    @property
    def num_outputs(self) -> int:
        """The number of results."""
        return len(self.source.outputs)

    def new_size(self, stem: str) -> Dim:
        """A new symbol for a size that the run computes."""
        return Dim(Graph.current.new_symbol(stem))

    def dtype(self, index: int = 0) -> DType:
        """The element type of an operand."""
        dtype = self.value(index).dtype
        if dtype is None:
            raise Unsupported("takes no strings")
        return dtype
