"""Functions of two or more operands that broadcast, element by element: arithmetic, comparisons, logic, bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from max.graph import TensorValue, ops
from max.graph.ops.elementwise.binary import maximum, minimum
from max.graph.ops.elementwise.bits import bit_and, bit_or, bit_xor, shift_left, shift_right
from max.graph.ops.staging.broadcasting import broadcast_all
from max.importers.errors import Unsupported
from max.importers.functions import mathematics
from max.importers.functions.scaled_sums import add_scaled
from max.importers.node import Node
from max.importers.onnx.table import op
from max.importers.values import Imported

Binary = Callable[[TensorValue, TensorValue], TensorValue]


def quotient(x: TensorValue, y: TensorValue) -> TensorValue:
    """ONNX's quotient: integers are rounded to 0."""
    return mathematics.truncated_quotient(x, y) if x.dtype.is_integral() else ops.div(x, y)


_SIMPLE: dict[str, Binary] = {
    "Sub": ops.sub, "Mul": ops.mul, "Div": quotient, "And": ops.logical_and, "Or": ops.logical_or,
    "Xor": ops.logical_xor, "Equal": ops.equal, "Greater": ops.greater, "GreaterOrEqual": ops.greater_equal,
    "Less": lambda x, y: ops.greater(y, x), "LessOrEqual": lambda x, y: ops.greater_equal(y, x),
    "Pow": mathematics.power,
}  # fmt: skip
_BITS: dict[str, Binary] = {"BitwiseAnd": bit_and, "BitwiseOr": bit_or, "BitwiseXor": bit_xor}
_VARIADIC: dict[str, Binary] = {"Max": maximum, "Min": minimum, "Sum": ops.add, "Mean": ops.add}


def _register(name: str, function: Binary) -> None:
    @op(name)
    def stage_binary(node: Node, x: TensorValue, y: TensorValue) -> TensorValue:
        return function(x, align_axes(node, x, y))


def align_axes(node: Node, x: TensorValue, y: TensorValue) -> TensorValue:
    """The second operand as the rules of version 6 broadcast it: its axes are those of the first from `axis` on."""
    if node.version >= 7 or not node.attr("broadcast", 0) or node.attr("axis") is None:
        return y
    behind = x.rank - node.attr("axis") - y.rank  # the axes of x behind those of y
    return ops.reshape(y, [*y.shape, *[1] * behind]) if behind > 0 else y


@op("Add")
def add(node: Node, x: TensorValue, y: TensorValue) -> TensorValue | Imported:
    total = ops.add(x, align_axes(node, x, y))
    # `axis` of version 6 moves the second operand, which `add_scaled` does not know
    source = add_scaled(node.value(0), node.value(1)) if node.version >= 7 else None
    return total if source is None else Imported(total, source=source)


for _name, _function in _SIMPLE.items():
    _register(_name, _function)


@op(*_BITS)
def bitwise(node: Node, x: TensorValue, y: TensorValue) -> TensorValue:
    return _BITS[node.op](x, y)


@op("BitwiseNot")
def bitwise_not(node: Node, x: TensorValue) -> TensorValue:
    low, high = mathematics.limits(x.dtype)
    # all bits set: the largest unsigned number, or -1
    ones = np.array(high if low == 0 else -1, x.dtype.to_numpy())
    return bit_xor(x, ops.constant(ones))


@op("BitShift")
def bit_shift(node: Node, x: TensorValue, y: TensorValue) -> TensorValue:
    direction = node.attr("direction", "")
    if direction not in ("LEFT", "RIGHT"):
        raise Unsupported(f"the direction is {direction!r}, expected LEFT or RIGHT")
    return shift_left(x, y) if direction == "LEFT" else shift_right(x, y)


@op("Mod")
def modulo(node: Node, x: TensorValue, y: TensorValue) -> TensorValue:
    if node.attr("fmod", 0):
        return mathematics.fmod(*broadcast_all("mod", (x, y)))
    return ops.mod(x, y)


@op(*_VARIADIC)
def variadic(node: Node) -> TensorValue:
    tensors = [node.tensor(index) for index in range(len(node.operands))]
    result = tensors[0]
    for tensor in tensors[1:]:
        result = _VARIADIC[node.op](result, tensor)
    return result / float(len(tensors)) if node.op == "Mean" else result


@op("Where")
def where(node: Node, condition: TensorValue, x: TensorValue, y: TensorValue) -> TensorValue:
    return ops.where(condition, x, y)
