"""Weights: tensors that get their values when a graph is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xdsl.ir import SSAValue

from max import mlir
from max.dtype import DType
from max.graph import graph as _graph
from max.graph.quantization import QuantizationEncoding
from max.graph.shape import Shape, ShapeLike
from max.graph.type import DeviceRef, TensorType
from max.graph.value import TensorValue, tensor_of

if TYPE_CHECKING:
    from max.driver import Device

__all__ = ["Weight"]


class Weight(TensorValue):
    """A tensor whose values come with the graph's loading, from a registry, by its name.

    A weight is made outside of a graph, and added to the graph that first uses it. It is then used
    as any tensor.

    Args:
        name: The name. In a subgraph it is relative to the prefix of the call.
        dtype: The element type.
        shape: The dimensions.
        device: Where the weight is to be.
        quantization_encoding: How the values are encoded, where they are quantised; the weight is
            then a uint8 matrix of blocks.
        align: The least alignment of the values in bytes.
        sharding_strategy: How the weight is split over devices.
        _placeholder: Whether a value must be given before use; using the weight raises.
        _has_alias: Whether another weight shares the values.

    Raises:
        ValueError: The name is empty.
    """

    name: str
    align: int | None
    quantization_encoding: QuantizationEncoding | None
    shard_idx: int | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Weight:
        return object.__new__(cls)

    def __init__(
        self,
        name: str,
        dtype: DType,
        shape: ShapeLike,
        device: Device | DeviceRef,
        quantization_encoding: QuantizationEncoding | None = None,
        align: int | None = None,
        _placeholder: bool = False,
        _has_alias: bool = False,
    ) -> None:
        if not name:
            raise ValueError("Weight: the name is empty")
        self.name = name
        self._type = TensorType(dtype, shape, device)
        self._original = (dtype, Shape(self._type.shape))
        self.quantization_encoding = quantization_encoding
        self.align = align
        self.shard_idx = None
        self._placeholder = _placeholder
        self._has_alias = _has_alias
        if quantization_encoding is not None and dtype is not DType.uint8:
            self._type = _encoded_type(self._type, quantization_encoding, name)

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self._type.dtype

    @property
    def shape(self) -> Shape:
        """The dimensions."""
        return Shape(self._type.shape)

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return self._type.rank

    @property
    def device(self) -> DeviceRef:
        """Where the weight is."""
        return self._type.device

    @property
    def type(self) -> TensorType:
        """The type of the weight."""
        return TensorType(self.dtype, self.shape, self.device)

    @property
    def original_dtype_and_shape(self) -> tuple[DType, Shape]:
        """The element type and shape before the encoding made the weight a uint8 matrix."""
        return self._original

    @property
    def is_placeholder(self) -> bool:
        """Whether the weight cannot be used before it is given values."""
        return self._placeholder

    @property
    def _mlir_value(self) -> SSAValue:  # type: ignore[override]
        return _graph.Graph.current.add_weight(self).to_mlir()

    @property
    def mlir_type(self) -> mlir.TensorType:
        return self._type.to_mlir()

    def __repr__(self) -> str:
        dims = ", ".join(str(dim) for dim in self.shape)
        encoding = self.quantization_encoding
        return (
            f"Weight({self.name!r}, {self.dtype.name}[{dims}], {self.device}"
            + (f", {encoding.name}" if encoding else "")
            + ")"
        )


def _encoded_type(type_: TensorType, encoding: QuantizationEncoding, name: str) -> TensorType:
    """The type of the blocks that hold a matrix of `type_`."""
    if not encoding.is_gguf or not type_.shape:
        return type_
    columns = type_.shape[-1]
    per_block = encoding.elements_per_block
    blocks = columns // per_block
    if blocks * per_block != columns:
        raise ValueError(
            f"Weight {name}: {encoding.name} encodes {per_block} elements at a time, the last "
            f"dimension {columns} is not a multiple"
        )
    return TensorType(DType.uint8, [*type_.shape[:-1], blocks * encoding.block_size], type_.device)


def stage_weight(weight: Weight, on_host: bool) -> TensorValue:
    """Stages the op that stands for a weight in the current graph."""
    if weight.is_placeholder:
        raise ValueError(
            f"Weight {weight.name!r} is a placeholder without values; load a state dict first"
        )
    graph = _graph.Graph.current
    wanted = weight.mlir_type
    on_cpu = mlir.TensorType.get(wanted.dtype, wanted.shape)
    attrs: dict[str, Any] = {"name": weight.name}
    if weight.align is not None:
        attrs["align"] = weight.align
    first = on_cpu if on_host else wanted
    value = tensor_of(graph.stage("mo.constant.external", (), attrs, (first,))[0])
    if first != wanted:
        value = tensor_of(graph.stage("mo.transfer", (value,), {}, (wanted,))[0])
    return value
