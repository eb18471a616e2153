"""The parts of a tensor and their placement; a tensor is on one device and has one part."""

# cells are shared by the modules of this package
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

from max import driver
from max.experimental.mesh_forms import meshes
from max.experimental.record.dispatch import in_graph
from max.experimental.tensors.conversions import Conversions
from max.experimental.tensors.placement import OnDevice, device_of
from max.graph import BufferValue, TensorValue

__all__ = ["OneDevice"]


class OneDevice(Conversions):
    """The properties of a distributed tensor, for one on one device; a base of `Tensor`."""

    __slots__ = ()

    @property
    def is_distributed(self) -> bool:
        """Whether parts of it are on several devices: False."""
        return False

    @property
    def num_shards(self) -> int:
        """The number of its parts: 1."""
        return 1

    @property
    def local_shards(self) -> tuple[Self, ...]:
        """The parts: the tensor itself."""
        return (self,)

    @property
    def buffers(self) -> tuple[driver.Tensor, ...]:
        """The memory of each part; the tensor is computed if it was not.

        Raises:
            TypeError: It stands for a value of a graph.
        """
        return (self._materialize(),)

    @property
    def graph_values(self) -> tuple[TensorValue | BufferValue, ...]:
        """The value of each part in the graph that is being built.

        Raises:
            LookupError: No graph is being built.
        """
        if self._value is not None:
            return (self._value,)
        if not in_graph():
            raise LookupError(
                "graph_values: no graph is being built; buffers has an eager tensor's memory"
            )
        return (self.__tensorvalue__(),)

    def materialize(self) -> Self:
        """The tensor, computed if it was not; `Tensor.realize` as a method.

        Raises:
            TypeError: It stands for a value of a graph.
        """
        self._materialize()
        return self

    @property
    def mesh(self) -> Any:
        """The mesh of its device."""
        return self.mapping.mesh

    @property
    def placements(self) -> tuple[Any, ...]:
        """How it is placed on the mesh: whole."""
        return self.mapping.placements

    @property
    def mapping(self) -> Any:
        """The mesh of its device, and how it is placed on it."""
        return meshes().mapping_of(self.device)

    def rebind_mapping(self, mapping: OnDevice) -> Self:
        """The tensor itself, whose mapping is that of one device.

        Args:
            mapping: The mapping of its device.

        Raises:
            ValueError: It is another mapping.
        """
        if mapping != self.mapping:
            raise ValueError(f"rebind_mapping: {mapping!r} of a tensor on {self.mapping!r}")
        return self

    @classmethod
    def from_shard_values(
        cls, shard_values: Sequence[Any], mapping: OnDevice | None = None
    ) -> Self:
        """The tensor of one part.

        Args:
            shard_values: A tensor, or a value of the graph that is being built, in a list.
            mapping: A mapping of one device, or None.

        Raises:
            ValueError: There are several parts, or none.
            ShardingError: The mapping has several devices.
        """
        if len(shard_values) != 1:
            raise ValueError(
                f"from_shard_values: {len(shard_values)} parts; a tensor on one device has one"
            )
        if mapping is not None:
            device_of(mapping)
        tensor_class: Any = cls
        return tensor_class.from_graph_value(shard_values[0])

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        """What the library ``rich`` shows: the type, as the elements may not be computed."""
        yield "shape", self.shape
        yield "dtype", self.dtype
        yield "device", self.device
