"""Argument trees of calls: the arguments of an op without its tensors and numbers.

Two calls with equal argument trees, and tensors and numbers of the same kinds, stage the same ops with other sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from max import driver
from max.graph import Value
from max.graph.dim import StaticDim

__all__ = ["ArgumentTree", "describe", "is_mutable"]


class _Mark:
    """The place of a tensor or number in an argument tree."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


TENSOR, NUMBER, INTEGER = _Mark("tensor"), _Mark("number"), _Mark("integer")


class _Items(NamedTuple):
    """A sequence or slice in an argument tree."""

    cls: type
    items: tuple[Any, ...]


class _Literal(NamedTuple):
    """A hashable argument; its type keeps ``True`` apart from 1."""

    cls: type
    value: Any


class _Array:
    """An array or a scalar of NumPy, compared by its content: 0.0 is not -0.0, NaN is NaN.

    The content is copied, as the program may write to its array before the call is compiled.
    """

    __slots__ = ("_key", "_scalar")

    def __init__(self, array: Any) -> None:
        self._scalar = array if isinstance(array, np.generic) else None
        # not `dtype.str`, which all dtypes of ml_dtypes of one size share
        self._key = (array.shape, array.dtype, array.tobytes())

    @property
    def array(self) -> Any:
        """The scalar, or a read-only array of the content."""
        if self._scalar is not None:
            return self._scalar
        shape, dtype, content = self._key
        return np.frombuffer(content, dtype).reshape(shape)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Array) and self._key == other._key


class _Object:
    """An argument without a hash, compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.value is other.value


def describe(value: Any, cells: list[Any], numbers: list[int | float]) -> Any:
    """The tree of an argument; its tensors are appended to `cells`, its numbers to `numbers`."""
    kind = type(value)
    if kind is int:
        numbers.append(value)
        return INTEGER
    if kind is float:
        # == does not find NaN or the sign of zero
        if value == 0.0 or math.isnan(value):
            return _Literal(float, value.hex())
        numbers.append(value)
        return NUMBER
    if value is None or kind is str:
        return value
    cell = getattr(value, "_cell", None)
    if cell is not None:
        cells.append(cell)
        return TENSOR
    if isinstance(value, StaticDim):
        numbers.append(int(value))
        return INTEGER
    if isinstance(value, tuple | list):
        container = kind if kind in (tuple, list) else list
        return _Items(container, tuple([describe(item, cells, numbers) for item in value]))
    if kind is slice:
        bounds = (value.start, value.stop, value.step)
        return _Items(slice, tuple([describe(bound, cells, numbers) for bound in bounds]))
    if isinstance(value, Mapping):
        items = [(key, describe(item, cells, numbers)) for key, item in value.items()]
        return _Items(dict, tuple(items))
    if isinstance(value, np.generic) or (
        isinstance(value, np.ndarray) and not value.dtype.hasobject
    ):
        return _Array(value)
    if isinstance(value, Value):
        raise TypeError(
            f"{value!r} is of a graph that is being built; it cannot meet an eager tensor outside of the graph"
        )
    if not is_mutable(value):
        return _Literal(kind, value)
    if hasattr(kind, "__dlpack__") and not isinstance(value, np.ndarray):
        return _Array(driver.Tensor.from_dlpack(value).to(driver.CPU()).to_numpy())
    if isinstance(value, Sequence):
        return _Items(list, tuple([describe(item, cells, numbers) for item in value]))
    return _Object(value)


def is_mutable(value: object) -> bool:
    """Whether the content of an argument may change while it stays the same object: arrays and sequences."""
    kind = type(value)
    if hasattr(kind, "__dlpack__"):
        return True
    # a hash by identity says nothing about the content
    if kind.__hash__ is object.__hash__:
        return isinstance(value, Sequence)
    try:
        hash(value)
    except TypeError:
        return True
    return False


def _rebuild(tree: Any, tensors: Iterator[Any], numbers: Iterator[Any]) -> Any:
    """The argument of a tree, with its tensors and numbers taken in order."""
    if tree is TENSOR:
        return next(tensors)
    if tree is INTEGER or tree is NUMBER:
        return next(numbers)
    if isinstance(tree, _Items):
        if tree.cls is dict:
            return {key: _rebuild(item, tensors, numbers) for key, item in tree.items}
        items = [_rebuild(item, tensors, numbers) for item in tree.items]
        return slice(*items) if tree.cls is slice else tree.cls(items)
    if isinstance(tree, _Literal):
        return float.fromhex(tree.value) if tree.cls is float else tree.value
    if isinstance(tree, _Array):
        return tree.array
    if isinstance(tree, _Object):
        return tree.value
    return tree


class ArgumentTree(NamedTuple):
    """A call without its tensors and numbers."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    names: tuple[str, ...]
    """The keywords of the last arguments."""

    def call(self, tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
        """Calls the op."""
        tensors_left, numbers_left = iter(tensors), iter(numbers)
        values = [_rebuild(arg, tensors_left, numbers_left) for arg in self.args]
        positional = len(values) - len(self.names)
        keywords = dict(zip(self.names, values[positional:], strict=True))
        return self.op(*values[:positional], **keywords)
