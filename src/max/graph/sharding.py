"""Strategies that split weights over devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

__all__ = ["Ranges", "Segment", "ShardingStrategy"]

_T = TypeVar("_T", covariant=True)


class Divisible(Protocol[_T]):
    """The interface of weights, whose class is in a higher layer."""

    def part(self, strategy: ShardingStrategy, index: int) -> _T:
        """The slice of the weight on a device."""
        ...


Ranges = tuple[tuple[int, int], ...]
"""Half-open index ranges of an axis."""


@dataclass(frozen=True)
class Segment:
    """A part of an axis that is split over devices separately.

    Args:
        size: The number of elements.
        num_heads: The number of heads in the part, which are not divided; None: split anywhere.

    Raises:
        ValueError: A number is less than 1, or the heads do not divide the size.
    """

    size: int
    num_heads: int | None

    def __post_init__(self) -> None:
        heads = 1 if self.num_heads is None else self.num_heads
        if self.size < 1 or heads < 1 or self.size % heads:
            raise ValueError(f"Segment: {heads} heads cannot share {self.size} elements")


@dataclass(frozen=True)
class ShardingStrategy:
    """The split of a weight, or of the weights of a layer, over devices.

    Create it with one of the static methods::

        weight.sharding_strategy = ShardingStrategy.rowwise(num_devices=2)
        first, second = weight.shard([DeviceRef.CPU(0), DeviceRef.CPU(1)])

    Args:
        num_devices: The number of parts.
        kind: The name of the strategy: that of its static method.
        axis: The axis to split; None replicates.
        sections: The relative sizes of consecutive sections along the axis. Each section is split separately, and a
            device gets one part of each.
        unit: The granularity: sections are split at multiples of this number of elements. If the units do not divide
            evenly, the first devices get one more. One number for all sections, or one for each.
        copies: The number of consecutive devices that hold the same part.

    Raises:
        ValueError: `num_devices`, a section, `unit` or `copies` is less than 1, or `copies` does not divide
            `num_devices`.
    """

    num_devices: int
    kind: str
    axis: int | None = None
    sections: tuple[int, ...] = (1,)
    unit: int | tuple[int, ...] = 1
    copies: int = 1

    def __post_init__(self) -> None:
        sizes = {"num_devices": self.num_devices, "copies": self.copies}
        sizes |= {f"unit {i}": size for i, size in enumerate(self._units())}
        sizes |= {f"section {i}": size for i, size in enumerate(self.sections)}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(
                    f"ShardingStrategy.{self.kind}: {name} is {size}, expected 1 or more"
                )
        if self.num_devices % self.copies:
            raise ValueError(
                f"ShardingStrategy.{self.kind}: {self.copies} copies of each part cannot be spread over "
                f"{self.num_devices} devices"
            )

    @staticmethod
    def rowwise(num_devices: int) -> ShardingStrategy:
        """Splits the first axis, the outputs of a linear layer.

        Args:
            num_devices: The number of parts.
        """
        return ShardingStrategy(num_devices, "rowwise", 0)

    @staticmethod
    def columnwise(num_devices: int) -> ShardingStrategy:
        """Splits the second axis, the inputs of a linear layer; the partial results must be added.

        Args:
            num_devices: The number of parts.
        """
        return ShardingStrategy(num_devices, "columnwise", 1)

    @staticmethod
    def replicate(num_devices: int) -> ShardingStrategy:
        """Keeps the whole weight on each device.

        Args:
            num_devices: The number of devices.
        """
        return ShardingStrategy(num_devices, "replicate")

    @staticmethod
    def axiswise(axis: int, num_devices: int) -> ShardingStrategy:
        """Splits one axis.

        Args:
            axis: The axis; negative counts from the last.
            num_devices: The number of parts.
        """
        return ShardingStrategy(num_devices, "axiswise", axis)

    @staticmethod
    def head_aware_columnwise(num_devices: int, num_heads: int, head_dim: int) -> ShardingStrategy:
        """Splits the second axis between heads: for the output projection of attention.

        Args:
            num_devices: The number of parts.
            num_heads: The number of heads.
            head_dim: The size of a head.
        """
        return ShardingStrategy(num_devices, "head_aware_columnwise", 1, (num_heads,), head_dim)

    @staticmethod
    def stacked_qkv(
        num_devices: int, num_heads: int, head_dim: int, num_key_value_heads: int | None = None
    ) -> ShardingStrategy:
        """Splits the rows of a stacked query, key and value projection between heads.

        Args:
            num_devices: The number of parts.
            num_heads: The number of query heads.
            head_dim: The size of a head.
            num_key_value_heads: The number of KV heads; `num_heads` by default.
        """
        kv = num_heads if num_key_value_heads is None else num_key_value_heads
        return ShardingStrategy(num_devices, "stacked_qkv", 0, (num_heads, kv, kv), head_dim)

    @staticmethod
    def gate_up(num_devices: int, axis: int = 2) -> ShardingStrategy:
        """Splits an axis that holds the gate and up projections of a gated MLP, one after the other.

        Args:
            num_devices: The number of parts.
            axis: The axis; by default the last axis of stacked experts.
        """
        return ShardingStrategy(num_devices, "gate_up", axis, (1, 1))

    @staticmethod
    def segmented(num_devices: int, axis: int, segments: Sequence[Segment]) -> ShardingStrategy:
        """Splits an axis that consists of several parts, such as projections with different numbers of heads.

        Args:
            num_devices: The number of parts.
            axis: The axis; negative counts from the last.
            segments: The parts of the axis, in order; together they must cover the axis.

        Raises:
            TypeError: An element is not a `Segment`.
            ValueError: There is no segment.
        """
        for segment in segments:
            if not isinstance(segment, Segment):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"ShardingStrategy.segmented: expected Segments, got {segment!r}")
        if not segments:
            raise ValueError("ShardingStrategy.segmented: there are no segments")
        units = tuple(1 if s.num_heads is None else s.size // s.num_heads for s in segments)
        sizes = tuple(s.size for s in segments)
        return ShardingStrategy(num_devices, "segmented", axis, sizes, units)

    @staticmethod
    def tensor_parallel(num_devices: int) -> ShardingStrategy:
        """Splits each product of a layer over the devices; for layers only.

        Args:
            num_devices: The number of parts.
        """
        return ShardingStrategy(num_devices, "tensor_parallel")

    @staticmethod
    def expert_parallel(num_devices: int) -> ShardingStrategy:
        """Distributes the experts of a layer over the devices; for layers only.

        Args:
            num_devices: The number of parts.
        """
        return ShardingStrategy(num_devices, "expert_parallel")

    @property
    def is_rowwise(self) -> bool:
        """Whether the first axis is split."""
        return self.kind == "rowwise"

    @property
    def is_colwise(self) -> bool:
        """Whether the second axis is split."""
        return self.kind in ("columnwise", "head_aware_columnwise")

    @property
    def is_axiswise(self) -> bool:
        """Whether the strategy splits one axis, given by its index."""
        return self.kind == "axiswise"

    @property
    def is_head_aware_colwise(self) -> bool:
        """Whether the second axis is split between heads."""
        return self.kind == "head_aware_columnwise"

    @property
    def is_gate_up(self) -> bool:
        """Whether the strategy splits an axis that holds the gate and up projections."""
        return self.kind == "gate_up"

    @property
    def is_segmented(self) -> bool:
        """Whether the parts of an axis are split separately."""
        return self.kind == "segmented"

    @property
    def sharded_axis(self) -> int | None:
        """The axis that is split; None for whole weights and for strategies of layers."""
        return self.axis

    @property
    def is_replicate(self) -> bool:
        """Whether each device holds the whole weight."""
        return self.kind == "replicate"

    @property
    def is_stacked_qkv(self) -> bool:
        """Whether the rows of a stacked query, key and value projection are split between heads."""
        return self.kind == "stacked_qkv"

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether the products of a layer are split."""
        return self.kind == "tensor_parallel"

    @property
    def is_expert_parallel(self) -> bool:
        """Whether the experts of a layer are distributed."""
        return self.kind == "expert_parallel"

    def __call__(self, weight: Divisible[_T], i: int) -> _T:
        """The slice of a weight on a device, as a value of the graph that is being built.

        Args:
            weight: The weight.
            i: The index of the device.

        Raises:
            ValueError: The weight cannot be split in this way, or the strategy is for layers only.
            IndexError: The index is not in ``[0, num_devices)``.
            LookupError: No graph is being built.
        """
        return weight.part(self, i)

    def _units(self) -> tuple[int, ...]:
        """The granularity of each section."""
        return self.unit if isinstance(self.unit, tuple) else (self.unit,) * len(self.sections)

    def check_index(self, index: int) -> None:
        """Checks the index of a part.

        Raises:
            IndexError: The index is not in ``[0, num_devices)``.
        """
        if not 0 <= index < self.num_devices:
            raise IndexError(f"ShardingStrategy: shard {index} of {self.num_devices} devices")

    def ranges(self, name: str, size: int, index: int, block: int = 1) -> Ranges:
        """The ranges of the axis that a part consists of, one per section.

        Args:
            name: The weight, for error messages.
            size: The size of the axis.
            index: The index of the part.
            block: The number of elements of an encoded block, which is not divided.

        Raises:
            ValueError: The size cannot be divided as the sections and the unit require, or there are fewer units than
                devices.
            IndexError: The index is not in ``[0, num_devices)``.
        """
        self.check_index(index)
        # consecutive devices hold copies of one part
        parts, index = self.num_devices // self.copies, index // self.copies
        total = sum(self.sections)
        if size % total or (self.is_segmented and size != total):
            raise ValueError(
                f"{name}: axis {self.axis} has {size} elements, which cannot be divided into "
                f"{'+'.join(map(str, self.sections))} parts ({self.kind})"
            )
        sections: list[tuple[int, int]] = []
        begin = 0
        for section, least in zip(self.sections, self._units(), strict=True):
            # neither a head nor an encoded block is divided
            unit = math.lcm(least, block)
            # sections are proportions, such as numbers of heads of `size // total` elements each
            length = size // total * section
            units = length // unit
            if units * unit != length or units < parts:
                whole = "" if unit == 1 else f" between multiples of {unit}"
                raise ValueError(
                    f"{name}: axis {self.axis} has {length} elements, which cannot be split"
                    f"{whole} over {self.num_devices} devices ({self.kind})"
                )
            units_each, remainder = divmod(units, parts)
            # the first `remainder` parts have one unit more
            first = index * units_each + min(index, remainder)
            last = first + units_each + (index < remainder)
            sections.append((begin + first * unit, begin + last * unit))
            begin += length
        return tuple(sections)
