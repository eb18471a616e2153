"""Helpers of layers that are split over devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, Self, TypeVar, runtime_checkable

from max.graph import DeviceRef, ShardingStrategy, TensorValue, Weight
from max.nn.layers.module import Module

__all__ = [
    "Shardable",
    "call_parts",
    "check_per_device",
    "check_strategy",
    "part_of",
    "parts_of_weight",
    "shard_devices",
]

M = TypeVar("M", bound=Module)

_REGISTRIES = frozenset(
    {"_sublayers", "_layer_weights", "_weight_keys", "_shared_weights", "_weight_values"}
)


@runtime_checkable
class Shardable(Protocol):
    """A layer that can be split over devices."""

    __module__ = "max.nn.layer"

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How the weights are split; None: not split."""
        ...

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None: ...

    def shard(self, devices: Iterable[DeviceRef]) -> Sequence[Self]:
        """The shards, one per device.

        Args:
            devices: The devices of the shards.
        """
        ...


def part_of(module: Module, cls: type[M], **changed: object) -> M:
    """A copy of a module with some attributes changed.

    Weights and parts that are not among `changed` are shared.

    Args:
        module: The module.
        cls: The class of the copy: that of `module`, a base of it, or one with the same attributes.
        changed: The attributes that differ.
    """
    shard = object.__new__(cls)
    owned = module.sublayers
    for name, value in vars(module).items():
        # `setattr` below fills the registries of the copy
        if name in _REGISTRIES:
            continue
        if isinstance(value, Module) and name not in owned:
            vars(shard)[name] = value  # shared by the module, so also by the copy
        else:
            setattr(shard, name, value)
    for name, value in changed.items():
        setattr(shard, name, value)
    return shard


def check_per_device(name: str, count: int, **arguments: Sequence[object]) -> None:
    """Checks that each argument of a layer over several devices has one value per device.

    Args:
        name: The name of the layer, for error messages.
        count: The number of devices.
        arguments: The values of each argument.

    Raises:
        ValueError: An argument has more or fewer values.
    """
    for argument, values in arguments.items():
        if len(values) != count:
            raise ValueError(
                f"{name}: {argument} has {len(values)} values, expected one for each of {count} devices"
            )


def call_parts(
    name: str,
    parts: Sequence[Callable[..., TensorValue]],
    layer_idx: TensorValue,
    **arguments: Sequence[object],
) -> list[TensorValue]:
    """Calls each device's part of a layer with its values; returns the outputs in the order of the devices.

    Args:
        name: The name of the layer, for error messages.
        parts: The part of each device.
        layer_idx: The index of the layer in the cache, passed as the first argument of each part.
        arguments: The further arguments in the order of the parameters, with one value per device.

    Raises:
        ValueError: An argument has more or fewer values.
    """
    check_per_device(name, len(parts), **arguments)
    return [
        part(layer_idx, *values) for part, *values in zip(parts, *arguments.values(), strict=True)
    ]


def shard_devices(
    name: str, strategy: ShardingStrategy | None, devices: Iterable[DeviceRef]
) -> list[DeviceRef]:
    """Checks the devices of the shards of a layer and returns them as a list.

    Raises:
        ValueError: There is no strategy, or its number of devices differs.
    """
    if strategy is None:
        raise ValueError(f"{name}: there is no sharding strategy; set sharding_strategy first")
    where = [DeviceRef.from_device(device) for device in devices]
    if len(where) != strategy.num_devices:
        raise ValueError(
            f"{name}: {len(where)} devices, the sharding strategy {strategy.kind} is for "
            f"{strategy.num_devices}"
        )
    return where


def check_strategy(name: str, strategy: ShardingStrategy | None, *kinds: str) -> None:
    """Checks that a layer supports a sharding strategy.

    Raises:
        TypeError: The value is not a strategy.
        ValueError: The layer does not support the strategy.
    """
    if strategy is not None and not isinstance(strategy, ShardingStrategy):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"{name}: the sharding strategy is {strategy!r}, expected a ShardingStrategy"
        )
    if strategy is not None and strategy.kind not in kinds:
        raise ValueError(
            f"{name}: the sharding strategy is {strategy.kind}, expected {' or '.join(kinds)}"
        )


def parts_of_weight(
    weight: Weight | None, strategy: ShardingStrategy, devices: list[DeviceRef]
) -> list[Weight | None]:
    """Sets the strategy of a weight and returns its shards; a list of None if there is no weight."""
    if weight is None:
        return [None] * len(devices)
    weight.sharding_strategy = strategy
    return list(weight.shard(devices))
