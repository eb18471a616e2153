"""How a weight is split over devices."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Ranges", "ShardingStrategy"]

Ranges = tuple[tuple[int, int], ...]
"""Parts of an axis, each from a first index to one past the last."""


@dataclass(frozen=True)
class ShardingStrategy:
    """How a weight, or the weights of a layer, are split over devices.

    Made by one of the static methods::

        weight.sharding_strategy = ShardingStrategy.rowwise(num_devices=2)
        first, second = weight.shard([DeviceRef.CPU(0), DeviceRef.CPU(1)])

    Args:
        num_devices: The number of parts.
        kind: What the strategy is called: the name of its static method.
        axis: The axis that is split; None: no axis.
        sections: Relative sizes of consecutive sections along the axis; each section is split
            separately, and a device gets its part of each.
        unit: Sections are split at multiples of this many elements. If the units cannot be divided
            evenly, the first devices get one unit more.

    Raises:
        ValueError: There is no device, or a size is not positive.
    """

    num_devices: int
    kind: str
    axis: int | None = None
    sections: tuple[int, ...] = (1,)
    unit: int = 1

    def __post_init__(self) -> None:
        sizes = {"num_devices": self.num_devices, "unit": self.unit}
        sizes |= {f"section {i}": size for i, size in enumerate(self.sections)}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(
                    f"ShardingStrategy.{self.kind}: {name} is {size}, expected 1 or more"
                )

    @staticmethod
    def rowwise(num_devices: int) -> ShardingStrategy:
        """Splits the first axis: the outputs of a linear layer.

        Args:
            num_devices: The number of parts.
        """
        return ShardingStrategy(num_devices, "rowwise", 0)

    @staticmethod
    def columnwise(num_devices: int) -> ShardingStrategy:
        """Splits the second axis: the inputs of a linear layer, whose results are then to be added.

        Args:
            num_devices: The number of parts.
        """
        return ShardingStrategy(num_devices, "columnwise", 1)

    @staticmethod
    def replicate(num_devices: int) -> ShardingStrategy:
        """Gives each device the whole weight.

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
        """Splits the second axis between heads: the projection that takes what heads attended to.

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
        """Splits a matrix that has the rows of queries, keys and values, one below the other, between heads.

        Args:
            num_devices: The number of parts.
            num_heads: The number of query heads.
            head_dim: The size of a head.
            num_key_value_heads: The number of key heads; `num_heads` by default.
        """
        kv = num_heads if num_key_value_heads is None else num_key_value_heads
        return ShardingStrategy(num_devices, "stacked_qkv", 0, (num_heads, kv, kv), head_dim)

    @staticmethod
    def gate_up(num_devices: int, axis: int = 2) -> ShardingStrategy:
        """Splits an axis that has the gate's half and the other half of a gated MLP.

        Args:
            num_devices: The number of parts.
            axis: The axis; the last one of stacked experts by default.
        """
        return ShardingStrategy(num_devices, "gate_up", axis, (1, 1))

    @staticmethod
    def tensor_parallel(num_devices: int) -> ShardingStrategy:
        """Splits a layer so that each device computes a part of each product; for layers only.

        Args:
            num_devices: The number of parts.
        """
        return ShardingStrategy(num_devices, "tensor_parallel")

    @staticmethod
    def expert_parallel(num_devices: int) -> ShardingStrategy:
        """Splits a layer of experts so that each device has some of them; for layers only.

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
    def is_replicate(self) -> bool:
        """Whether each device gets everything."""
        return self.kind == "replicate"

    @property
    def is_stacked_qkv(self) -> bool:
        """Whether queries, keys and values are split each."""
        return self.kind == "stacked_qkv"

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether a layer's products are split."""
        return self.kind == "tensor_parallel"

    @property
    def is_expert_parallel(self) -> bool:
        """Whether a layer's experts are split."""
        return self.kind == "expert_parallel"

    def check_index(self, index: int) -> None:
        """Checks the number of a part.

        Raises:
            IndexError: There is no such part.
        """
        if not 0 <= index < self.num_devices:
            raise IndexError(f"ShardingStrategy: shard {index} of {self.num_devices} devices")

    def ranges(self, name: str, size: int, index: int, block: int = 1) -> Ranges:
        """What a device gets of the axis.

        Args:
            name: What is split, for errors.
            size: The size of the axis.
            index: The number of the part.
            block: Elements that cannot be parted, as they are encoded together.

        Raises:
            ValueError: The axis cannot be split so.
            IndexError: There is no such part.
        """
        self.check_index(index)
        total = sum(self.sections)
        unit = math.lcm(self.unit, block)
        if size % total:
            raise ValueError(
                f"{name}: axis {self.axis} has {size} elements, which cannot be divided into "
                f"{'+'.join(map(str, self.sections))} parts ({self.kind})"
            )
        sections: list[tuple[int, int]] = []
        begin = 0
        for section in self.sections:
            length = size // total * section
            units = length // unit
            if units * unit != length or units < self.num_devices:
                whole = "" if unit == 1 else f" between multiples of {unit}"
                raise ValueError(
                    f"{name}: axis {self.axis} has {length} elements, which cannot be split"
                    f"{whole} over {self.num_devices} devices ({self.kind})"
                )
            least, more = divmod(units, self.num_devices)
            first = index * least + min(index, more)
            last = first + least + (index < more)
            sections.append((begin + first * unit, begin + last * unit))
            begin += length
        return tuple(sections)
