"""Arithmetic of sizes: integers that depend on symbols of shapes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import Dim, TensorValue, ops
from max.importers.errors import MissingContents, Unsupported
from max.importers.torch.table import Call, op
from max.importers.values import Imported


def size_result(value: Any) -> Any:
    """A result of sizes: a dimension, or an array of a number."""
    return value if isinstance(value, Dim) else np.array(value)


@op("aten.sym_size.int", "sym_size_int")
def sym_size(call: Call, x: TensorValue, axis: int) -> Any:
    return x.shape[call.axis(axis, x.rank)]


@op("aten.sym_numel.default")
def sym_numel(call: Call, x: TensorValue) -> Any:
    total = Dim(1)
    for dim in x.shape:
        total = total * dim
    return total


def _modulo(x: Any, y: Any) -> Any:
    return x - (x // y) * y if isinstance(x, Dim) or isinstance(y, Dim) else x % y


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y,
    "floordiv": lambda x, y: x // y, "mod": _modulo,
}  # fmt: skip


def _register(name: str, function: Callable[[Any, Any], Any]) -> None:
    @op(name)
    def compute(call: Call, x: Any, y: Any) -> Any:
        if not all(isinstance(value, int | Dim) for value in (x, y)):
            raise Unsupported(f"computes with {x!r} and {y!r}, expected sizes")
        return size_result(function(x, y))


for _name, _function in _ARITHMETIC.items():
    _register(_name, _function)


@op("neg")
def negate(call: Call, x: Any) -> Any:
    return size_result(0 - x)


def extreme(call: Call, name: str, x: Any, y: Any) -> Any:
    """The least ("min") or greatest ("max") of two sizes; a new symbol where only a run knows which one it is.

    The same two sizes have the same symbol everywhere in a graph.
    """
    try:
        difference = int(x - y)
    except TypeError:
        pass
    else:
        return (x if difference < 0 else y) if name == "min" else (x if difference > 0 else y)
    choose = ops.min if name == "min" else ops.max
    number = choose(number_of(call, Dim(x)), number_of(call, Dim(y)))
    # the order of the two sizes does not matter
    return size_of(call, f"{name} of {sorted([str(x), str(y)])}", number)


def size_of(call: Call, key: str, size: TensorValue) -> Dim:
    """A number that the run computes as a size: a symbol, the same one for each key in a graph."""
    values = call.node.walker.values
    if key not in values:
        symbol = call.node.new_size("size")
        # what gives the symbol its value where no slice does
        line = ops.range(0, size, 1, symbol, dtype=DType.int64, device=size.device)
        values[key] = Imported(contents=np.array(line.shape[0], object))
        values[f"size {symbol}"] = Imported(size)
    return values[key].contents.item()


def number_of(call: Call, size: Dim) -> TensorValue:
    """A size as a tensor; for one of `size_of` the tensor that it is made of, which does not depend on its symbol."""
    known = call.node.walker.values.get(f"size {size}")
    return TensorValue(size) if known is None else known.tensor


@op("sym_max")
def sym_max(call: Call, x: Any, y: Any) -> Any:
    return size_result(extreme(call, "max", x, y))


@op("sym_min")
def sym_min(call: Call, x: Any, y: Any) -> Any:
    return size_result(extreme(call, "min", x, y))


_COMPARISONS: dict[str, tuple[Callable[[Any, Any], Any], Callable[..., TensorValue]]] = {
    "eq": (operator.eq, ops.equal), "ne": (operator.ne, ops.not_equal), "lt": (operator.lt, lambda x, y: y > x),
    "le": (operator.le, lambda x, y: y >= x), "gt": (operator.gt, ops.greater),
    "ge": (operator.ge, ops.greater_equal),
}  # fmt: skip


def _register_comparison(
    name: str, compare: Callable[[Any, Any], Any], stage: Callable[..., TensorValue]
) -> None:
    @op(name)
    def compute(call: Call, x: Any, y: Any) -> Any:
        if isinstance(x, Dim) or isinstance(y, Dim):
            # a condition that depends on symbols: only a run knows it
            return stage(TensorValue(Dim(x)), TensorValue(Dim(y)))
        return np.array(compare(x, y))


for _name, _functions in _COMPARISONS.items():
    _register_comparison(_name, *_functions)


_NUMBERS: dict[str, Callable[..., Any]] = {
    "truediv": lambda x, y: x / y, "pow": lambda x, y: x**y, "sym_float": float, "sym_int": int,
    "sym_not": lambda x: not x, "int": int, "float": float, "trunc": int, "and_": lambda x, y: x and y,
    "or_": lambda x, y: x or y,
}  # fmt: skip


def _register_number(name: str, function: Callable[..., Any]) -> None:
    @op(name)
    def compute(call: Call, *values: Any) -> Any:
        for value in values:
            if isinstance(value, Dim):
                raise MissingContents(call.node.source.inputs[0], f"the size {value}")
        return np.array(function(*values))


for _name, _number in _NUMBERS.items():
    _register_number(_name, _number)


@op("aten.item.default", "aten._local_scalar_dense.default")
def item(call: Call, x: TensorValue) -> Any:
    numbers = call.node.elements(0)
    if numbers.size != 1 or x.dtype is DType.bool:
        raise Unsupported("takes one number")
    return numbers.reshape(())
