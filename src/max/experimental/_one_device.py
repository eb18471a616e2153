"""The API of tensors that are distributed over devices, of later releases; here a tensor has one part."""

# cells are shared by the modules of this package
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from max import driver
from max.experimental._conversions import Conversions
from max.experimental._dispatch import in_graph
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
        return (self.realize.driver_tensor,)

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
        return self.realize

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        """What the library ``rich`` shows: the type, as the elements may not be computed."""
        yield "shape", self.shape
        yield "dtype", self.dtype
        yield "device", self.device
