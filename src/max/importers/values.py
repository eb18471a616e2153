"""What a name of the source model stands for while it is imported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.graph import Dim, Graph, TensorValue, ops
from max.graph.dim import StaticDim
from max.importers.errors import Unsupported

__all__ = ["Imported", "Items", "Value", "as_contents", "is_text", "same_dims"]

Array = npt.NDArray[Any]


NARROW = frozenset({"int2", "uint2", "int4", "uint4"})
"""NumPy names of integers of less than 8 bits. A graph holds each in an element of 8 bits."""


class Items(list["Imported"]):
    """A sequence of the source model. Its length is known at import."""


class Imported:
    """A tensor of the source model: known at import, or a value of the graph.

    Args:
        tensor: The value of the graph; None for known contents.
        contents: The elements, if they are known: an array of numbers, of `str` objects, or an array of objects whose
            elements are ints and dimensions.
        dtype: The element type of contents with dimensions; int64 if it is not given.
        stored_as: The NumPy name of the source's element type where `dtype` is a wider one: "int4".
        source: What the framework's functions note about the value: the codes that it was before it was dequantized.
    """

    __slots__ = ("_staged", "contents", "dtype", "source", "stored_as", "tensor_value")

    def __init__(
        self,
        tensor: TensorValue | None = None,
        contents: Array | None = None,
        dtype: DType | None = None,
        stored_as: str = "",
        source: object = None,
    ) -> None:
        if contents is not None and contents.dtype.name in NARROW:
            stored_as = contents.dtype.name
            contents = contents.astype(np.uint8 if stored_as.startswith("u") else np.int8)
        self.stored_as = stored_as
        self.source = source
        self.tensor_value = tensor
        self.contents = None if contents is None else as_contents(contents, dtype)
        self._staged: tuple[Graph, TensorValue] | None = None
        self.dtype: DType | None
        if tensor is not None:
            self.dtype = tensor.dtype
        elif self.contents is not None and self.contents.dtype == object:
            self.dtype = None if is_text(self.contents) else (dtype or DType.int64)
        else:
            assert self.contents is not None
            self.dtype = DType.from_numpy(self.contents.dtype)

    @property
    def is_text(self) -> bool:
        """Whether the elements are strings."""
        return self.dtype is None

    @property
    def shape(self) -> list[Dim]:
        """The dimensions."""
        if self.tensor_value is not None:
            return list(self.tensor_value.shape)
        assert self.contents is not None
        return [Dim(size) for size in self.contents.shape]

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def is_static(self) -> bool:
        """Whether no dimension depends on a symbol."""
        return all(isinstance(dim, StaticDim) for dim in self.shape)

    @property
    def numbers(self) -> Array | None:
        """The elements as numbers, if all are known."""
        contents = self.contents
        return None if contents is None or contents.dtype == object else contents

    @property
    def tensor(self) -> TensorValue:
        """The value in the graph that is being built; known contents are staged as a constant on first use."""
        if self.tensor_value is not None:
            return self.tensor_value
        graph = Graph.current
        if self._staged is None or self._staged[0] is not graph:
            self._staged = (graph, self._constant())
        return self._staged[1]

    def _constant(self) -> TensorValue:
        contents = self.contents
        assert contents is not None
        if contents.dtype != object:
            return ops.constant(contents)
        if self.dtype is None:
            raise Unsupported("takes no strings here")
        dims = [Dim(size) for size in contents.reshape(-1)]
        flat = ops.shape_to_tensor(dims)
        return ops.cast(ops.reshape(flat, contents.shape), self.dtype)

    def __repr__(self) -> str:
        what = self.tensor_value if self.contents is None else self.contents
        return f"Imported({what!r})"


Value = Imported | Items | None
"""A value of the source model; None is an absent optional one."""


def is_text(array: Array) -> bool:
    """Whether an array of objects holds strings. An empty one does: sizes are arrays of integers when all are known."""
    return array.dtype == object and all(isinstance(item, str) for item in array.flat)


def as_contents(contents: Array, dtype: DType | None = None) -> Array:
    """Known contents in their normal form: an array of numbers if no element is an expression over symbols."""
    if contents.dtype.kind in "US":
        return contents.astype(object)
    if contents.dtype != object or is_text(contents) and contents.size:
        return contents
    if contents.size and not all(
        isinstance(item, int | np.integer | StaticDim) for item in contents.flat
    ):
        return contents
    if contents.size == 0 and dtype is None:
        return contents
    numbers = [int(item) for item in contents.flat]
    return np.array(numbers, (dtype or DType.int64).to_numpy()).reshape(contents.shape)


def same_dims(x: Iterable[Dim], y: Iterable[Dim]) -> bool:
    """Whether two shapes are known to be equal."""
    return list(x) == list(y)
