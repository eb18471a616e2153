"""Arithmetic of sizes: integers that depend on symbols of shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import Dim, TensorValue
from max.importers.errors import MissingContents, Unsupported
from max.importers.torch.table import Call, op


def known(value: Any) -> Any:
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
        return known(function(x, y))


for _name, _function in _ARITHMETIC.items():
    _register(_name, _function)


@op("neg")
def negate(call: Call, x: Any) -> Any:
    return known(0 - x)


_NUMBERS: dict[str, Callable[..., Any]] = {
    "truediv": lambda x, y: x / y, "pow": lambda x, y: x**y, "sym_max": max, "sym_min": min, "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y, "lt": lambda x, y: x < y, "le": lambda x, y: x <= y, "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y, "sym_float": float, "sym_int": int, "sym_not": lambda x: not x, "int": int,
    "float": float, "trunc": int, "and_": lambda x, y: x and y, "or_": lambda x, y: x or y,
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
    numbers = call.node.known(0)
    if numbers.size != 1 or x.dtype is DType.bool:
        raise Unsupported("takes one number")
    return numbers.reshape(())
