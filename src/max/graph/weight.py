"""Weights: tensors that get their values when a graph is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from max import mlir
from max.driver import Device
from max.dtype import DType
from max.graph.current import Staging, current_graph
from max.graph.dim import StaticDim
from max.graph.quantization import QuantizationEncoding
from max.graph.shape import Shape, ShapeLike
from max.graph.sharding import Ranges, ShardingStrategy
from max.graph.type import DeviceRef, TensorType
from max.graph.value import TensorValue, ops, tensor_of

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
        _placeholder: Whether the name is one that calls complete with their prefix; `is_placeholder` tells.
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
        """Whether the name is one that calls complete with their prefix."""
        return self._placeholder

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How `shard` splits the weight; None where it is not split.

        Raises:
            TypeError: It is set to something else.
            ValueError: It is set to a strategy of layers, or on a shard.
        """
        return self._sharding

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        if strategy is not None:
            if not isinstance(strategy, ShardingStrategy):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(
                    f"Weight {self.name}: the sharding strategy is {strategy!r}, expected a "
                    "ShardingStrategy"
                )
            if strategy.is_tensor_parallel or strategy.is_expert_parallel:
                raise ValueError(
                    f"Weight {self.name}: {strategy.kind} is a strategy of layers; a weight takes "
                    "rowwise, columnwise, replicate, axiswise, stacked_qkv, head_aware_columnwise "
                    "or gate_up"
                )
        self._sharding = strategy

    def shard(self, devices: Iterable[DeviceRef]) -> list[Weight]:
        """The parts of the weight on devices, as `sharding_strategy` says.

        A shard has no values of its own: it is a view of this weight, which alone is in state dicts
        and registries. An encoded weight is split between its blocks.

        Args:
            devices: Where the parts are to be, in their order.

        Raises:
            ValueError: The weight has no sharding strategy, is a shard itself, or cannot be split so;
                or the number of devices is not that of the strategy.
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
            _ = shard.shape  # what cannot be split raises here
        return shards

    @property
    def _mlir_value(self) -> mlir.SSAValue:  # type: ignore[override]
        return current_graph().add_weight(self).to_mlir()

    @property
    def mlir_type(self) -> mlir.TensorType:
        return self._type.to_mlir()

    def __getstate__(self) -> dict[str, Any]:
        # copies are not in a graph, whose value the inherited slot would give
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
    """A part of a weight on a device. It follows its weight in name, dtype, shape and encoding."""

    def __init__(
        self, whole: Weight, strategy: ShardingStrategy, index: int, device: DeviceRef
    ) -> None:
        self._whole, self._strategy, self._where = whole, strategy, device
        self.shard_idx = index
        self._has_alias = True

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the whole weight and the number of the part."""
        return f"{self._whole.name}.shards.{self.shard_idx}"

    @property
    def align(self) -> int | None:  # type: ignore[override]
        """None: a part begins anywhere."""
        return None

    @property
    def quantization_encoding(self) -> QuantizationEncoding | None:  # type: ignore[override]
        """How the values are encoded."""
        return self._whole.quantization_encoding

    @property
    def original_dtype_and_shape(self) -> tuple[DType, Shape]:
        """The element type and shape of the part before the encoding made a uint8 matrix of it."""
        dtype, shape = self._whole.original_dtype_and_shape
        return dtype, self._part_of(shape, in_bytes=list(shape) == list(self._whole.shape))

    @property
    def is_placeholder(self) -> bool:
        """Whether the name is one that calls complete with their prefix."""
        return self._whole.is_placeholder

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """None: a shard is not split further. Setting it raises ValueError."""
        return None

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        raise ValueError(f"Weight {self.name}: a shard cannot be sharded further")

    @property
    def _type(self) -> TensorType:  # type: ignore[override]
        shape = self._part_of(self._whole.shape, in_bytes=True)
        return TensorType(self._whole.dtype, shape, self._where)

    def _part_of(self, shape: Shape, in_bytes: bool) -> Shape:
        """The shape of the part of a shape of the whole weight."""
        axis, ranges = self._cut(in_bytes)
        if axis is None:
            return shape
        size = sum(stop - start for start, stop in ranges)
        return Shape([*shape[:axis], size, *shape[axis + 1 :]])

    def _cut(self, in_bytes: bool = True) -> tuple[int | None, Ranges]:
        """The axis that is split, and what is taken of it; of an encoded axis in bytes or in elements."""
        whole, strategy = self._whole, self._strategy
        assert self.shard_idx is not None
        strategy.check_index(self.shard_idx)
        if strategy.axis is None:
            return None, ()
        what, encoding = f"Weight {whole.name}", whole.quantization_encoding
        if encoding is not None and not encoding.is_gguf:
            raise ValueError(
                f"{what}: {encoding.name.upper()} weights are not split ({strategy.kind}); use replicate"
            )
        rank = whole.rank
        axis = strategy.axis + rank if strategy.axis < 0 else strategy.axis
        if not 0 <= axis < rank:
            raise ValueError(
                f"{what}: {strategy.kind} splits axis {strategy.axis}, the weight has rank {rank}"
            )
        dim = whole.shape[axis]
        if not isinstance(dim, StaticDim):
            raise ValueError(f"{what}: axis {axis} is {dim}, only a static axis can be split")
        size = int(dim)
        if encoding is None or axis != rank - 1:
            return axis, strategy.ranges(what, size, self.shard_idx)
        per_block, block_bytes = encoding.elements_per_block, encoding.block_size
        elements = size // block_bytes * per_block
        ranges = strategy.ranges(what, elements, self.shard_idx, per_block)
        if not in_bytes:
            return axis, ranges
        in_blocks = ((a // per_block, b // per_block) for a, b in ranges)
        return axis, tuple((a * block_bytes, b * block_bytes) for a, b in in_blocks)

    @property
    def _mlir_value(self) -> mlir.SSAValue:  # type: ignore[override]
        # slices of the whole weight, which has the values: nothing is registered twice
        graph = current_graph()
        whole = graph.add_weight(self._whole)
        axis, ranges = self._cut()
        if axis is None:
            return whole.to(self._where).to_mlir()
        before = [slice(None)] * axis
        parts = [whole[(*before, slice(start, stop))] for start, stop in ranges]
        part = parts[0] if len(parts) == 1 else ops.concat(parts, axis)
        return part.to(self._where).to_mlir()


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


def stage_weight(graph: Staging, weight: Weight, on_host: bool) -> TensorValue:
    """Stages the op that stands for a weight in a graph."""
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
