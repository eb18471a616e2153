"""The table of ops of torch, which the modules of `max.importers.torch.ops` fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from max.dtype import DType
from max.graph import Dim, TensorValue
from max.graph.dim import StaticDim
from max.importers.errors import Unsupported
from max.importers.node import Node
from max.importers.table import OpTable
from max.importers.values import Imported, Items

__all__ = ["TABLE", "Call", "Ref", "op"]

TABLE = OpTable("torch")
"""The functions of ops by name, such as ``"aten.add.Tensor"``."""


class Ref(NamedTuple):
    """An argument that another node computes.

    Attributes:
        operand: The position among the operands of the node.
        is_size: Whether it is an integer of torch (a SymInt), not a tensor.
    """

    operand: int
    is_size: bool


class Call(NamedTuple):
    """What torch says of a node besides its arguments.

    Attributes:
        node: The node.
        dtype: The element type of the first result; None if it is no tensor.
        common: The element type to which torch's rules of promotion bring the first two arguments; None where they
            are not two tensors or numbers.
        sizes: The shape of the first result: numbers, and torch's expressions as texts.
    """

    node: Node
    dtype: DType | None
    common: DType | None
    sizes: list[int | str]

    def result_dtype(self) -> DType:
        """The element type of the result.

        Raises:
            Unsupported: The result is no tensor of numbers.
        """
        if self.dtype is None:
            raise Unsupported("the result is no tensor of numbers")
        return self.dtype

    def axis(self, axis: int, rank: int) -> int:
        """An axis in ``[0, rank)``."""
        return self.node.checked_axis(axis, rank)

    def axes(self, axes: int | list[int] | None, rank: int) -> list[int]:
        """Axes in ``[0, rank)``; all of them for none given."""
        if axes is None or axes == []:
            return list(range(rank))
        listed = [axes] if isinstance(axes, int) else axes
        # torch takes axes 0 and -1 of a tensor without axes
        return self.node.axes(listed, rank) if rank else []

    def static(self, dim: Dim | int) -> int:
        """A size as a number.

        Raises:
            MissingContents: It depends on a symbol.
        """
        return dim if isinstance(dim, int) else self.node.static(dim)

    def number(self, value: Any) -> Any:
        """An argument that must be a number which is known at import."""
        if isinstance(value, TensorValue | Dim):
            raise Unsupported(f"an argument is {value}, expected a number")
        return value


def op(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function that stages ops of torch.

    It takes a `Call` and the arguments of the op's schema, in their order and by their names: tensors of the graph,
    dimensions for integers that depend on symbols, numbers, lists, dtypes as `DType`. The arguments ``device``,
    ``layout``, ``memory_format``, ``pin_memory`` and ``non_blocking`` are left out.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def stage(node: Node) -> Any:
            attributes = node.source.attributes
            arguments = [_resolve(node, argument) for argument in attributes["args"]]
            named = {name: _resolve(node, value) for name, value in attributes["kwargs"].items()}
            call = Call(
                node, attributes.get("dtype"), attributes.get("common"), attributes.get("sizes", [])
            )
            return function(call, *arguments, **named)

        TABLE.op(*names)(stage)
        return function

    return register


def _resolve(node: Node, argument: Any) -> Any:
    if isinstance(argument, Ref):
        operand = node.operands[argument.operand]
        if isinstance(operand, Items) or operand is None:
            raise Unsupported("an argument is a list of another node")
        return _size(operand) if argument.is_size else operand.tensor
    if isinstance(argument, list):
        return [_resolve(node, item) for item in argument]
    return argument


def _size(operand: Imported) -> Any:
    contents = operand.contents
    if contents is None or contents.size != 1:
        raise Unsupported("an integer argument depends on the elements of a tensor")
    item = contents.reshape(-1)[0]
    if isinstance(item, Dim) and not isinstance(item, StaticDim):
        return item
    return int(item) if isinstance(item, Dim) else item.item() if hasattr(item, "item") else item
