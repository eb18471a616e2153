"""Access to the weights of a checkpoint by hierarchical name, for every format."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self, runtime_checkable

from max._spelling import similar_names
from max.driver import DLPackArray
from max.dtype import DType
from max.graph.quantization import QuantizationEncoding
from max.graph.shape import Shape, ShapeLike
from max.graph.type import DeviceRef
from max.graph.weight import Weight
from max.graph.weights._weight_data import WeightData


@runtime_checkable
class Weights(Protocol):
    """Access to the weights of a checkpoint by their hierarchical names.

    Attribute and index access extend the name: ``weights.model.layers[0].weight`` is ``model.layers.0.weight``. Use an
    index for a part that is also a method of this class: ``weights["data"]``.
    """

    __module__ = "max.graph.weights"

    @property
    def name(self) -> str:
        """The accumulated name, or prefix of names."""
        ...

    def items(self) -> Iterator[tuple[str, Self]]:
        """The weights under this prefix, each with its name relative to the prefix."""
        ...

    def exists(self) -> bool:
        """Whether there is a weight of exactly this name."""
        ...

    def data(self) -> WeightData:
        """The data of the weight of this name.

        Raises:
            KeyError: There is no weight of this name.
        """
        ...

    def allocate(
        self,
        dtype: DType | None = None,
        shape: ShapeLike | None = None,
        quantization_encoding: QuantizationEncoding | None = None,
        device: DeviceRef = DeviceRef.CPU(),  # noqa: B008  immutable
    ) -> Weight:
        """Creates a :class:`~max.graph.Weight` for the weight of this name.

        ``allocated_weights`` keeps its data, to be passed as ``weights_registry`` when the graph is loaded.

        Args:
            dtype: The element type to convert to; by default the stored one.
            shape: The expected shape, for an encoded weight in bytes or elements; None accepts any.
            quantization_encoding: The expected encoding; None accepts any.
            device: The device of the weight in the graph.

        Raises:
            KeyError: There is no weight of this name.
            ValueError: The shape or encoding differs from the expected one.
        """
        ...

    @property
    def allocated_weights(self) -> dict[str, DLPackArray]:
        """The data of all weights created by :meth:`allocate`, by full name."""
        ...

    def __getattr__(self, attr: str) -> Self: ...
    def __getitem__(self, idx: int | str) -> Self: ...


class HierarchicalWeights(ABC):
    """The base of all formats: names and allocation. A subclass lists and reads the weights.

    Args:
        names: A mapping whose keys are the full names.
        prefix: The accumulated name.
        allocated: The dictionary returned by ``allocated_weights``.
    """

    def __init__(
        self, names: Mapping[str, Any], prefix: str, allocated: dict[str, DLPackArray] | None
    ) -> None:
        self._names = names
        self._prefix = prefix
        self._allocated: dict[str, DLPackArray] = {} if allocated is None else allocated

    @abstractmethod
    def _read_weight(self, name: str) -> WeightData:
        """Reads the weight of an existing name."""

    @property
    def name(self) -> str:
        """The accumulated name, or prefix of names."""
        return self._prefix

    def _at(self, name: str) -> Self:
        # shallow: all names share the open files and the allocated weights
        other = copy.copy(self)
        other._prefix = name
        return other

    def __getattr__(self, attr: str) -> Self:
        # copy, pickle and others probe for special methods; no weight has such a name
        if attr.startswith("__"):
            raise AttributeError(attr)
        return self[attr]

    def __getitem__(self, idx: int | str) -> Self:
        return self._at(f"{self._prefix}.{idx}" if self._prefix else str(idx))

    def items(self) -> Iterator[tuple[str, Self]]:
        """The weights under this prefix, each with its name relative to the prefix.

        The relative name of a weight of exactly this name is empty.
        """
        start = f"{self._prefix}." if self._prefix else ""
        for name in self._names:
            if name == self._prefix or name.startswith(start):
                yield name[len(start) :], self._at(name)

    def exists(self) -> bool:
        """Whether there is a weight of exactly this name."""
        return self._prefix in self._names

    def data(self) -> WeightData:
        """The data of the weight of this name, mapped if the format allows it.

        Raises:
            KeyError: There is no weight of this name; the message lists similar names.
        """
        self._require()
        return self._read_weight(self._prefix)

    def _require(self) -> None:
        if self.exists():
            return
        close = similar_names(self._prefix, self._names, count=3)
        hint = f"; similar names: {', '.join(close)}" if close else ""
        raise KeyError(f"no weight is named {self._prefix!r}{hint}")

    def allocate(
        self,
        dtype: DType | None = None,
        shape: ShapeLike | None = None,
        quantization_encoding: QuantizationEncoding | None = None,
        device: DeviceRef = DeviceRef.CPU(),  # noqa: B008  immutable
    ) -> Weight:
        """Creates a :class:`~max.graph.Weight` for the weight of this name.

        Args:
            dtype: The element type to convert to; by default the stored one.
            shape: The expected shape, for an encoded weight in bytes or elements; None accepts any.
            quantization_encoding: The expected encoding; None accepts any.
            device: The device of the weight in the graph.

        Raises:
            KeyError: There is no weight of this name.
            ValueError: The shape or encoding differs from the expected one.
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
            actual = data.quantization_encoding
            raise ValueError(
                f"weight {data.name!r}: expected encoding {expected.value}, the file has "
                f"{'none' if actual is None else actual.value}"
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
        """The data of all weights created by :meth:`allocate`, by full name."""
        return self._allocated

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._prefix!r}, {len(self._names)} weights)"
