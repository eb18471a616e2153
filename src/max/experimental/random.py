"""Random tensors: eager, or in the graph that is being built.

The numbers depend only on the seed (`set_seed`) and on the number of random tensors made since, not on the machine or
the number of threads; see `max.graph.ops.random`.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import numpy as np

from max._names import keyword_aliases
from max.driver import Device
from max.dtype import DType
from max.experimental.record.dispatch import apply, in_graph
from max.experimental.tensor import Tensor, defaults
from max.experimental.tensors.placement import OnDevice
from max.graph import DeviceRef, Graph, ShapeLike, TensorType, TensorValue, TensorValueLike, ops

__all__ = [
    "gaussian",
    "gaussian_like",
    "normal",
    "normal_like",
    "seed",
    "set_seed",
    "uniform",
    "uniform_like",
]


class _SeedSequence:
    """The seeds of eager random tensors, one for each tensor."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self._seeds = itertools.count((first & 0x7FFFFFFF) << 32)

    def next(self) -> int:
        """The seed of the next tensor."""
        return next(self._seeds)

    def restart(self, first: int) -> None:
        """Begins the sequence of a seed."""
        self.first, self._seeds = first, itertools.count((first & 0x7FFFFFFF) << 32)


_SEEDS = _SeedSequence()


@keyword_aliases(value="seed")
def set_seed(seed: int) -> None:
    """Restarts the sequence of eager random tensors.

    Args:
        seed: The seed, of which the low 31 bits count; the sequences of two seeds differ.

    Raises:
        TypeError: It is not an integer.
    """
    try:
        first = operator.index(seed)
    except TypeError:
        raise TypeError(f"set_seed: the seed is {seed!r}, expected an integer") from None
    _SEEDS.restart(first)


def seed() -> Tensor:
    """The seed of `set_seed`, 0 before its first call: a tensor ``[1]`` of uint64 on the CPU, modulo 2**64."""
    return Tensor.from_dlpack(np.array([_SEEDS.first % (1 << 64)], np.uint64))


def uniform(
    shape: ShapeLike = (),
    range: tuple[float, float] = (0, 1),
    *,
    dtype: DType | None = None,
    device: Device | OnDevice | None = None,
) -> Tensor:
    """A tensor of numbers drawn uniformly from an interval.

    Args:
        shape: The shape.
        range: The ends of the interval; the lower one is among the numbers.
        dtype: The element type, a float; the default if None.
        device: The device; the default if None.

    Raises:
        ValueError: The range does not have two ends, or the lower one is not below the other.
    """
    if len(range) != 2:
        raise ValueError(f"uniform: the range is {range!r}, expected (low, high)")
    if range[0] >= range[1]:
        raise ValueError(
            f"uniform: the range is {range!r}, expected the first end below the second"
        )
    dtype, device = defaults(dtype, device)
    return uniform_like(TensorType(dtype, shape, DeviceRef.from_device(device)), range)


def uniform_like(
    like: TensorType | Tensor, range: tuple[TensorValueLike, TensorValueLike] = (0, 1)
) -> Tensor:
    """A tensor of a given type, of numbers drawn uniformly from an interval; see `max.graph.ops.random.uniform`.

    Args:
        like: The type, or a tensor of it.
        range: The ends of the interval, numbers or tensors.
    """
    like = like.type if isinstance(like, Tensor) else like
    if in_graph():
        return apply(ops.random.uniform, (like, range), {})
    return apply(_uniform, (_next_seed(), *_parts(like), *range), {})


def gaussian(
    shape: ShapeLike = (),
    mean: float = 0.0,
    std: float = 1.0,
    *,
    dtype: DType | None = None,
    device: Device | OnDevice | None = None,
) -> Tensor:
    """A tensor of numbers drawn from a normal distribution.

    Args:
        shape: The shape.
        mean: The mean.
        std: The standard deviation, above 0.
        dtype: The element type, a float; the default if None.
        device: The device; the default if None.

    Raises:
        ValueError: The standard deviation is not above 0.
    """
    if not std > 0:
        raise ValueError(f"gaussian: std is {std!r}, expected a number above 0")
    dtype, device = defaults(dtype, device)
    return gaussian_like(TensorType(dtype, shape, DeviceRef.from_device(device)), mean, std)


def gaussian_like(
    like: TensorType | Tensor, mean: TensorValueLike = 0, std: TensorValueLike = 1
) -> Tensor:
    """A tensor of a given type, of numbers from a normal distribution; see `max.graph.ops.random.gaussian`.

    Args:
        like: The type, or a tensor of it.
        mean: The mean, a number or tensor.
        std: The standard deviation, a number or tensor.
    """
    like = like.type if isinstance(like, Tensor) else like
    if in_graph():
        return apply(ops.random.gaussian, (like, mean, std), {})
    return apply(_gaussian, (_next_seed(), *_parts(like), mean, std), {})


normal = gaussian
normal_like = gaussian_like


def _next_seed() -> Tensor:
    return Tensor.from_dlpack(np.array(_SEEDS.next(), np.int64))


def _parts(like: TensorType) -> tuple[Any, ...]:
    """The fields of a type as separate arguments, so that its sizes can become symbols."""
    return list(like.shape), like.dtype, like.device


def _uniform(
    seed: TensorValue, shape: ShapeLike, dtype: DType, device: DeviceRef, low: Any, high: Any
) -> TensorValue:
    Graph.current.reseed(seed)
    return ops.random.uniform(TensorType(dtype, shape, device), (low, high))


def _gaussian(
    seed: TensorValue, shape: ShapeLike, dtype: DType, device: DeviceRef, mean: Any, std: Any
) -> TensorValue:
    Graph.current.reseed(seed)
    return ops.random.gaussian(TensorType(dtype, shape, device), mean, std)
