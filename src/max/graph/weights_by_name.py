"""Hierarchical access to the weights of a checkpoint, for every format."""

from __future__ import annotations

import copy
import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self, runtime_checkable

from max.driver import DLPackArray
from max.dtype import DType
from max.graph.quantization import QuantizationEncoding
from max.graph.shape import Shape, ShapeLike
from max.graph.type import DeviceRef
from max.graph.weight import Weight
from max.graph.weight_data import WeightData


@runtime_checkable
class Weights(Protocol):
    """Access to the weights of a checkpoint by their hierarchical names.

    Attributes and indices build the name: ``weights.model.layers[0].weight`` stands for
    ``model.layers.0.weight``. A part that is also a name of this class, such as ``data``, is
    reached by an index: ``weights["data"]``.
    """

    __module__ = "max.graph.weights"

    @property
    def name(self) -> str:
        """The name, or the prefix of names, that has been built so far."""
        ...

    def items(self) -> Iterator[tuple[str, Self]]:
        """The weights under this prefix, each with its name relative to the prefix."""
        ...

    def exists(self) -> bool:
        """Whether there is a weight of exactly this name."""
        ...

    def data(self) -> WeightData:
        """The weight of this name.

        Raises:
            KeyError: There is none.
        """
        ...

    def allocate(
        self,
        dtype: DType | None = None,
        shape: ShapeLike | None = None,
        quantization_encoding: QuantizationEncoding | None = None,
        device: DeviceRef = DeviceRef.CPU(),  # noqa: B008  immutable
    ) -> Weight:
        """A graph's :class:`~max.graph.Weight` for the weight of this name.

        Its data is remembered in ``allocated_weights``, which is the ``weights_registry`` for
        loading the graph.

        Args:
            dtype: The element type to convert to; as stored if not given.
            shape: The shape that is expected, of an encoded weight in bytes or in elements; any if not given.
            quantization_encoding: The encoding that is expected; any if not given.
            device: The device that the graph wants the weight on.

        Raises:
            KeyError: There is no weight of this name.
            ValueError: Its shape or encoding is another.
        """
        ...

    @property
    def allocated_weights(self) -> dict[str, DLPackArray]:
        """The data of all weights that :meth:`allocate` has been called for, by full name."""
        ...

    def __getattr__(self, attr: str) -> Self: ...
    def __getitem__(self, idx: int | str) -> Self: ...


class HierarchicalWeights(ABC):
    """What the formats share: names, and allocation. A format lists and reads.

    Args:
        names: The full names, as the keys of a mapping.
        prefix: The name built so far.
        allocated: The dictionary behind ``allocated_weights``.
    """

    def __init__(
        self, names: Mapping[str, Any], prefix: str, allocated: dict[str, DLPackArray] | None
    ) -> None:
        self._names = names
        self._prefix = prefix
        self._allocated: dict[str, DLPackArray] = {} if allocated is None else allocated

    @abstractmethod
    def _read(self, name: str) -> WeightData:
        """The weight of a name that exists."""

    @property
    def name(self) -> str:
        """The name, or the prefix of names, that has been built so far."""
        return self._prefix

    def _at(self, name: str) -> Self:
        other = copy.copy(self)
        other._prefix = name
        return other

    def __getattr__(self, attr: str) -> Self:
        # special methods are looked up by copy, pickle and others; no weight has such a name
        if attr.startswith("__"):
            raise AttributeError(attr)
        return self[attr]

    def __getitem__(self, idx: int | str) -> Self:
        return self._at(f"{self._prefix}.{idx}" if self._prefix else str(idx))

    def items(self) -> Iterator[tuple[str, Self]]:
        """The weights under this prefix, each with its name relative to the prefix.

        A weight of exactly this name comes with an empty relative name.
        """
        start = f"{self._prefix}." if self._prefix else ""
        for name in self._names:
            if name == self._prefix or name.startswith(start):
                yield name[len(start) :], self._at(name)

    def exists(self) -> bool:
        """Whether there is a weight of exactly this name."""
        return self._prefix in self._names

    def data(self) -> WeightData:
        """The weight of this name, on the file's own bytes where the format allows it.

        Raises:
            KeyError: There is none; the message has the nearest names.
        """
        self._require()
        return self._read(self._prefix)

    def _require(self) -> None:
        if self.exists():
            return
        close = difflib.get_close_matches(self._prefix, self._names, n=3)
        hint = f"; near are {', '.join(close)}" if close else ""
        raise KeyError(f"no weight is named {self._prefix!r}{hint}")

    def allocate(
        self,
        dtype: DType | None = None,
        shape: ShapeLike | None = None,
        quantization_encoding: QuantizationEncoding | None = None,
        device: DeviceRef = DeviceRef.CPU(),  # noqa: B008  immutable
    ) -> Weight:
        """A graph's :class:`~max.graph.Weight` for the weight of this name.

        Args:
            dtype: The element type to convert to; as stored if not given.
            shape: The shape that is expected, of an encoded weight in bytes or in elements; any if not given.
            quantization_encoding: The encoding that is expected; any if not given.
            device: The device that the graph wants the weight on.

        Raises:
            KeyError: There is no weight of this name.
            ValueError: Its shape or encoding is another.
        """
        data = self.data()
        self._check_encoding(data, quantization_encoding)
        if shape is not None and Shape(shape) not in (data.shape, data.element_shape):
            raise ValueError(
                f"weight {data.name!r}: expected shape {list(Shape(shape))}, the file has "
                f"{list(data.shape)}"
            )
        if dtype is not None:
            data = data.astype(dtype)
        return self._allocate(data, device)

    def _check_encoding(self, data: WeightData, expected: QuantizationEncoding | None) -> None:
        if expected is not None and expected is not data.quantization_encoding:
            has = data.quantization_encoding
            raise ValueError(
                f"weight {data.name!r}: expected encoding {expected.value}, the file has "
                f"{'none' if has is None else has.value}"
            )

    def _allocate(self, data: WeightData, device: DeviceRef) -> Weight:
        self._allocated[data.name] = data.data
        return Weight(
            data.name,
            data.dtype,
            data.shape,
            device,
            quantization_encoding=data.quantization_encoding,
        )

    @property
    def allocated_weights(self) -> dict[str, DLPackArray]:
        """The data of all weights that :meth:`allocate` has been called for, by full name."""
        return self._allocated

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._prefix!r}, {len(self._names)} weights)"
