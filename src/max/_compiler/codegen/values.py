"""Writes the values of a region as assignments, each once, at its first use. Loop nests and epilogues share it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from max._backends.regions import REDUCTIONS, Leaf, Literal, Node, RegionSpec, SizeOf
from max._compiler.codegen.expressions import (
    KERNEL_NAME,
    cast,
    compute_dtype,
    expression,
    literal,
    loaded_text,
    rounded_text,
)
from max.dtype import DType

__all__ = ["Code", "ValueWriter", "cast_source"]


class Code(Protocol):
    """The code around the values, which receives statements and reads arguments."""

    def add(self, text: str) -> None:
        """Appends a statement."""
        ...

    def load(self, i: int, leaf: Leaf) -> str:
        """The expression that reads a leaf, in its own dtype."""
        ...

    def size(self, axis: int) -> str:
        """The size of an axis, as an integer."""
        ...


class ValueWriter:
    """Writes values of a region into one piece of code.

    A value is a vector if it varies along one axis, else a scalar; scalars are splatted where vectors need them.

    Args:
        spec: The region.
        code: The code around the values.
        axis: The vectorized axis.
        lanes: The number of lanes, as an expression.
        vectors: Leaves that are always vectors: the sums that an epilogue starts from.
    """

    def __init__(
        self, spec: RegionSpec, code: Code, axis: int, lanes: str, vectors: Collection[int] = ()
    ) -> None:
        self.spec = spec
        self.code = code
        self.axis = axis
        self.lanes = lanes
        self.names: dict[int, str] = {}
        """Variables of values that are valid until the end of the code."""
        self.scope: dict[int, str] | None = None
        """Variables of values that are valid in the innermost loop; None outside of it."""
        self._counter = 0
        self._vectors = dict.fromkeys(vectors, True)
        # a variable in the compute type -> the variable with its value before widening, and that dtype
        self._narrow: dict[str, tuple[str, DType]] = {}

    def fresh(self) -> str:
        """A new variable."""
        self._counter += 1
        return f"t{self._counter}"

    def is_vector(self, i: int) -> bool:
        """Whether a value varies along the vectorized axis."""
        vector = self._vectors.get(i)
        if vector is None:
            value = self.spec.values[i]
            match value:
                case Leaf(strides=strides):
                    # a stride of 0 broadcasts the leaf along the axis
                    vector = bool(strides) and strides[self.axis] != 0
                case Node(op=op, args=args):
                    # reductions run over the last axis: along it their result is one scalar
                    reduced = op in REDUCTIONS and self.axis == len(self.spec.dims) - 1
                    vector = not reduced and any(self.is_vector(a) for a in args)
                case _:
                    vector = False
            self._vectors[i] = vector
        return vector

    def value(self, i: int) -> str:
        """The variable of a value; first writes the value and its operands if needed."""
        name = self.names.get(i) or (self.scope or {}).get(i)
        if name is not None:
            return name
        if (converted_index := cast_source(self.spec, i)) != i:
            return self.value(converted_index)
        value = self.spec.values[i]
        match value:
            case Literal():
                text = literal(value.value, value.dtype)
            case SizeOf():
                text = f"k.{KERNEL_NAME[compute_dtype(value.dtype)]}({self.code.size(value.axis)})"
            case Leaf():
                text = loaded_text(self.code.load(i, value), value.dtype)
            case Node():
                text = self._node(value)
        name = self.fresh()
        # kept narrow too: a store takes it without rounding again
        if isinstance(value, Node) and value.op == "round_to":
            self.code.add(f"{name} = {text}")
            self._narrow[(wide := self.fresh())] = name, value.dtype
            name, text = wide, loaded_text(name, value.dtype)
        self.code.add(f"{name} = {text}")
        # invariant values were written before the innermost loop
        (self.names if self.scope is None else self.scope)[i] = name
        return name

    def operand(self, i: int, vector: bool, stored_dtype: DType | None = None) -> str:
        """A value as an operand.

        Args:
            i: The value.
            vector: Whether the operand must be a vector.
            stored_dtype: The dtype in memory if the operand is stored. A value that was rounded to it is used in its
                narrow form, without widening and rounding again.
        """
        text = self.value(i)
        narrow, dtype = self._narrow.get(text, (text, None))
        if dtype is stored_dtype:
            text = narrow
        return f"k.splat({text}, {self.lanes})" if vector and not self.is_vector(i) else text

    def _node(self, node: Node) -> str:
        """The text of a node over the texts of its operands."""
        vector = any(self.is_vector(a) for a in node.args)
        texts = [self.operand(a, vector) for a in node.args]
        first = self.spec.values[node.args[0]]
        if node.op == "cast":
            return cast(texts[0], first.dtype, node.dtype)
        if node.op == "cast_within":
            return f"k.cast_unchecked({texts[0]}, k.{KERNEL_NAME[node.dtype]})"
        if node.op == "round_to":
            return rounded_text(texts[0], node.dtype)
        return expression(node.op, node.attr, first.dtype, texts)


def cast_source(spec: RegionSpec, i: int) -> int:
    """The value that a cast between dtypes of one compute type takes; `i` itself for other values."""
    value = spec.values[i]
    if isinstance(value, Node) and value.op == "cast":
        source = spec.values[value.args[0]].dtype
        if compute_dtype(source) is compute_dtype(value.dtype):
            return cast_source(spec, value.args[0])
    return i
