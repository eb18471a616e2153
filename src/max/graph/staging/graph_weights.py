"""Weights of a graph under construction, by hierarchical name."""

from __future__ import annotations

from collections.abc import Mapping

from max.driver import DLPackArray
from max.dtype import DType
from max.graph.quantization import QuantizationEncoding
from max.graph.shape import ShapeLike
from max.graph.type import DeviceRef
from max.graph.weight import Weight
from max.graph.weights._hierarchical import HierarchicalWeights
from max.graph.weights._weight_data import WeightData


class GraphWeights(HierarchicalWeights):
    """Allocates weights of a graph; their values are given when the graph is loaded.

    Args:
        added_weights: The weights of the graph.
        prefix: The name accumulated by attribute and index access.
        allocated: Values of the weights: none.
    """

    def __init__(
        self,
        added_weights: Mapping[str, Weight],
        prefix: str = "",
        allocated: dict[str, DLPackArray] | None = None,
    ) -> None:
        self._by_name = dict(added_weights)
        super().__init__(self._by_name, prefix, allocated)

    def _read_weight(self, name: str) -> WeightData:
        raise KeyError(f"weight {name!r} has no data yet: its values come when the graph is loaded")

    def allocate(
        self,
        dtype: DType | None = None,
        shape: ShapeLike | None = None,
        quantization_encoding: QuantizationEncoding | None = None,
        device: DeviceRef = DeviceRef.CPU(),  # noqa: B008  immutable
    ) -> Weight:
        """Creates the weight of this name.

        Args:
            dtype: The element type.
            shape: The shape.
            quantization_encoding: The encoding of quantized values; None for plain ones.
            device: The device of the weight in the graph.

        Raises:
            ValueError: `dtype` or `shape` is missing, or the name is taken.
        """
        if self._prefix in self._by_name:
            raise ValueError(f"allocate: there is a weight of the name {self._prefix!r} already")
        if dtype is None or shape is None:
            missing = "dtype" if dtype is None else "shape"
            raise ValueError(
                f"allocate: weight {self._prefix!r} needs a {missing}, as no file tells it"
            )
        weight = Weight(self._prefix, dtype, shape, device, quantization_encoding)
        self._by_name[self._prefix] = weight
        return weight
