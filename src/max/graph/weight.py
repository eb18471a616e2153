"""Weights: tensors whose values are bound by name when a graph is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from max import mlir
from max.driver import Device
from max.dtype import DType
from max.graph._operators import ops
from max.graph.dim import StaticDim
from max.graph.quantization import QuantizationEncoding
from max.graph.shape import Shape, ShapeLike
from max.graph.sharding import Ranges, Segment, ShardingStrategy
from max.graph.staging.current import Staging, current_graph
from max.graph.type import DeviceRef, TensorType
from max.graph.value import TensorValue, tensor_of

__all__ = ["Segment", "Weight"]


class Weight(TensorValue):
    """A tensor whose values are read from the weights registry, by name, when the graph is loaded.

    A weight is created outside of any graph. Its first use in a graph adds it there.

    Args:
        name: The name; in a subgraph, relative to the prefix of the call.
        dtype: The element type.
        shape: The shape in elements.
        device: The device of the weight in the graph.
        quantization_encoding: The encoding of quantized values, or None. With a block encoding the weight is a uint8
            tensor whose last axis holds encoded blocks.
        align: The minimum alignment of the values in bytes.
        sharding_strategy: The split over devices.
        _placeholder: Whether calls complete the name with their prefix.
        _has_alias: Whether another weight shares the values.

    Raises:
        ValueError: The name is empty, or the last dimension is not a multiple of the encoding's block.
        TypeError: The name is not a str.
    """

    name: str
    align: int | None
    quantization_encoding: QuantizationEncoding | None
    shard_idx: int | None
    """The number of this shard; None for a whole weight."""

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
        sharding_strategy: ShardingStrategy | None = None,
        _placeholder: bool = False,
        _has_alias: bool = False,
    ) -> None:
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Weight: the name is {name!r}, expected text")
        if not name:
            raise ValueError("Weight: the name is empty")
        self.name = name
        self._type = TensorType(dtype, shape, device)
        self._original = (dtype, Shape(self._type.shape))
        self.quantization_encoding = quantization_encoding
        self.align = align
        self.shard_idx = None
        self._sharding: ShardingStrategy | None = None
        self._placeholder = _placeholder
        self._has_alias = _has_alias
        # the shape counts elements; one of uint8 counts bytes already
        if quantization_encoding is not None and dtype is not DType.uint8:
            self._type = _encoded_type(self._type, quantization_encoding, name)
        if sharding_strategy is not None:
            self.sharding_strategy = sharding_strategy

    @property
    def dtype(self) -> DType:
        """The element type; it may be set before the weight is used in a graph."""
        return self._type.dtype

    @dtype.setter
    def dtype(self, dtype: DType) -> None:
        self._type = TensorType(dtype, self.shape, self.device)

    @property
    def shape(self) -> Shape:
        """The dimensions; they may be set before the weight is used in a graph."""
        return Shape(self._type.shape)

    @shape.setter
    def shape(self, shape: ShapeLike) -> None:
        self._type = TensorType(self.dtype, shape, self.device)

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return self._type.rank

    @property
    def device(self) -> DeviceRef:
        """The device of the weight; it may be set before the weight is used in a graph."""
        return self._type.device

    @device.setter
    def device(self, device: Device | DeviceRef) -> None:
        self._type = TensorType(self.dtype, self.shape, device)

    @property
    def type(self) -> TensorType:
        """The type of the weight."""
        return TensorType(self.dtype, self.shape, self.device)

    @property
    def original_dtype_and_shape(self) -> tuple[DType, Shape]:
        """The element type and shape before encoding."""
        return self._original

    @property
    def is_placeholder(self) -> bool:
        """Whether calls complete the name with their prefix."""
        return self._placeholder

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """The split that `shard` performs, or None.

        Raises:
            TypeError: It is set to an object of another class.
            ValueError: It is set to a strategy for layers, or on a shard.
        """
        return self._sharding

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        if strategy is not None:
            self._check_strategy(strategy)
        self._sharding = strategy

    def _check_strategy(self, strategy: ShardingStrategy) -> None:
        if not isinstance(strategy, ShardingStrategy):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"Weight {self.name}: the sharding strategy is {strategy!r}, expected a "
                "ShardingStrategy"
            )
        if strategy.is_tensor_parallel or strategy.is_expert_parallel:
            raise ValueError(
                f"Weight {self.name}: {strategy.kind} is a strategy of layers; a weight takes "
                "rowwise, columnwise, replicate, axiswise, stacked_qkv, head_aware_columnwise, "
                "gate_up or segmented"
            )

    def shard(self, devices: Iterable[DeviceRef]) -> list[Weight]:
        """Splits the weight over devices by its `sharding_strategy`.

        A shard holds no values: it is a slice of this weight, and only this weight is in state dicts and registries.
        Encoded weights are split at block boundaries.

        Args:
            devices: The device of each part, in order.

        Returns:
            One weight per device.

        Raises:
            ValueError: The weight has no sharding strategy, is a shard itself, or cannot be split as the strategy
                requires; or the number of devices differs from the strategy's.
        """
        strategy = self.sharding_strategy
        if self.shard_idx is not None:
            raise ValueError(f"Weight {self.name}: a shard cannot be sharded further")
        if strategy is None:
            raise ValueError(
                f"Weight {self.name}: there is no sharding strategy; set sharding_strategy first"
            )
        where = [DeviceRef.from_device(device) for device in devices]
        if len(where) != strategy.num_devices:
            raise ValueError(
                f"Weight {self.name}: {len(where)} devices, the sharding strategy "
                f"{strategy.kind} is for {strategy.num_devices}"
            )
        shards: list[Weight] = [_Shard(self, strategy, i, d) for i, d in enumerate(where)]
        for shard in shards:
            _ = shard.shape  # raises if the weight cannot be split
        return shards

    def part(self, strategy: ShardingStrategy, index: int) -> TensorValue:
        """The slice of this weight for a device under a strategy; the slice stays on the weight's device.

        Args:
            strategy: The strategy.
            index: The index of the device.

        Raises:
            ValueError: The weight cannot be split in this way, or the strategy is for layers only.
            IndexError: The strategy has no such device.
            LookupError: No graph is being built.
        """
        self._check_strategy(strategy)
        return TensorValue(_Shard(self, strategy, index, self.device))

    @property
    def _mlir_value(self) -> mlir.SSAValue:  # type: ignore[override]
        return current_graph().add_weight(self).to_mlir()

    @property
    def mlir_type(self) -> mlir.TensorType:
        return self._type.to_mlir()

    def __getstate__(self) -> dict[str, Any]:
        # leave out `_mlir_value`, which is a property here: reading it would add the weight to a graph
        return dict(vars(self))

    def __repr__(self) -> str:
        dims = ", ".join(str(dim) for dim in self.shape)
        encoding = self.quantization_encoding
        return (
            f"Weight({self.name!r}, {self.dtype.name}[{dims}], {self.device}"
            + (f", {encoding.name}" if encoding else "")
            + ")"
        )


class _Shard(Weight):
    """A part of a weight on a device. Name, dtype, shape and encoding follow later changes of the weight."""

    def __init__(
        self, whole: Weight, strategy: ShardingStrategy, index: int, device: DeviceRef
    ) -> None:
        self._whole, self._strategy, self._where = whole, strategy, device
        self.shard_idx = index
        self._has_alias = True

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the whole weight and the index of the part."""
        return f"{self._whole.name}.shards.{self.shard_idx}"

    @property
    def align(self) -> int | None:  # type: ignore[override]
        """None: the offset of a part has no guaranteed alignment."""
        return None

    @property
    def quantization_encoding(self) -> QuantizationEncoding | None:  # type: ignore[override]
        """The encoding of the whole weight."""
        return self._whole.quantization_encoding

    @property
    def original_dtype_and_shape(self) -> tuple[DType, Shape]:
        """The element type and shape of the part before encoding."""
        dtype, shape = self._whole.original_dtype_and_shape
        # where the shape was given in bytes, it is that of the encoded blocks
        return dtype, self._part_of(shape, in_bytes=list(shape) == list(self._whole.shape))

    @property
    def is_placeholder(self) -> bool:
        """Whether calls complete the name with their prefix."""
        return self._whole.is_placeholder

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """The split of the whole weight. A shard is not split further: setting it raises ValueError."""
        return self._strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        raise ValueError(f"Weight {self.name}: a shard cannot be sharded further")

    @property
    def _type(self) -> TensorType:  # type: ignore[override]
        shape = self._part_of(self._whole.shape, in_bytes=True)
        return TensorType(self._whole.dtype, shape, self._where)

    def _part_of(self, shape: Shape, in_bytes: bool) -> Shape:
        """The shape of this part, for a shape of the whole weight."""
        axis, ranges = self._part_ranges(in_bytes)
        if axis is None:
            return shape
        size = sum(stop - start for start, stop in ranges)
        return Shape([*shape[:axis], size, *shape[axis + 1 :]])

    def _part_ranges(self, in_bytes: bool = True) -> tuple[int | None, Ranges]:
        """The split axis (None if replicated) and the ranges of this part, for an encoded axis in bytes or elements."""
        whole, strategy = self._whole, self._strategy
        assert self.shard_idx is not None
        strategy.check_index(self.shard_idx)
        if strategy.axis is None:
            return None, ()
        label, encoding = f"Weight {whole.name}", whole.quantization_encoding
        if encoding is not None and not encoding.is_gguf:
            raise ValueError(
                f"{label}: {encoding.name.upper()} weights are not split ({strategy.kind}); use replicate"
            )
        rank = whole.rank
        axis = strategy.axis + rank if strategy.axis < 0 else strategy.axis
        if not 0 <= axis < rank:
            raise ValueError(
                f"{label}: {strategy.kind} splits axis {strategy.axis}, the weight has rank {rank}"
            )
        dim = whole.shape[axis]
        if not isinstance(dim, StaticDim):
            raise ValueError(f"{label}: axis {axis} is {dim}, only a static axis can be split")
        size = int(dim)
        if encoding is None or axis != rank - 1:
            return axis, strategy.ranges(label, size, self.shard_idx)
        # blocks stay whole: their elements share a scale
        per_block, block_bytes = encoding.elements_per_block, encoding.block_size
        elements = size // block_bytes * per_block
        ranges = strategy.ranges(label, elements, self.shard_idx, per_block)
        if not in_bytes:
            return axis, ranges
        in_blocks = ((a // per_block, b // per_block) for a, b in ranges)
        return axis, tuple((a * block_bytes, b * block_bytes) for a, b in in_blocks)

    @property
    def _mlir_value(self) -> mlir.SSAValue:  # type: ignore[override]
        # slices of the whole weight, so that the registry holds the values once
        graph = current_graph()
        whole = graph.add_weight(self._whole)
        axis, ranges = self._part_ranges()
        if axis is None:
            return whole.to(self._where).to_mlir()
        before = [slice(None)] * axis
        parts = [whole[(*before, slice(start, stop))] for start, stop in ranges]
        part = parts[0] if len(parts) == 1 else ops.concat(parts, axis)
        return part.to(self._where).to_mlir()


def _encoded_type(type_: TensorType, encoding: QuantizationEncoding, name: str) -> TensorType:
    """The uint8 type of the encoded blocks of a weight of type `type_`."""
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


def stage_weight(graph: Staging, weight: Weight, on_host: bool) -> TensorValue:
    """Stages `mo.constant.external` for a weight, and a transfer to its device if it is loaded on the host."""
    type_ = weight.mlir_type
    on_cpu = mlir.TensorType.get(type_.dtype, type_.shape)
    attrs: dict[str, Any] = {"name": weight.name}
    if weight.align is not None:
        attrs["align"] = weight.align
    first = on_cpu if on_host else type_
    value = tensor_of(graph.stage("mo.constant.external", (), attrs, (first,))[0])
    if first != type_:
        value = tensor_of(graph.stage("mo.transfer", (value,), {}, (type_,))[0])
    return value
