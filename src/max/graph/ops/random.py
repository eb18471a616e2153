"""Random tensors: reproducible from a seed, whatever the machine and the number of threads.

::

    from max.graph import ops

    ops.random.set_seed(42)
    noise = ops.random.gaussian(TensorType(DType.float32, ["n", 8], device))

The numbers are those of Philox4x32-10, a counter-based generator: they depend on the seed, on how many random tensors were
made before in the graph, and on the place in the tensor.
"""

from __future__ import annotations

from max.dtype import DType
from max.graph import graph as _graph
from max.graph.ops._stage import as_tensor, stage
from max.graph.ops.constant import constant
from max.graph.ops.elementwise import cast
from max.graph.type import DeviceRef, TensorType
from max.graph.value import TensorValue, TensorValueLike

__all__ = ["SeedType", "gaussian", "normal", "set_seed", "uniform"]

SeedType = TensorType(DType.int64, [], DeviceRef.CPU())
"""The type of a seed."""


def set_seed(seed: TensorValueLike = 0) -> None:
    """Sets the seed of the random tensors that are made in the graph from here on.

    Without it the seed is 0. A seed that comes as an input gives new numbers with each execution.

    Args:
        seed: An int, or a tensor of one.

    Raises:
        TypeError: The seed is not an integer.
        ValueError: The seed has elements for more than one.
    """
    graph = _graph.Graph.current
    if isinstance(seed, int) and not isinstance(seed, bool):
        seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
        value = constant(seed, DType.int64, device=DeviceRef.CPU())
    else:
        value = as_tensor(seed)
        if not value.dtype.is_integral():
            raise TypeError(f"set_seed: the seed is {value!r}, expected an integer")
        if value.rank != 0:
            raise ValueError(f"set_seed: the seed is {value!r}, expected a tensor of rank 0")
        value = cast(value, DType.int64).to(DeviceRef.CPU())
    graph.set_random_seed(value)


def uniform(
    like: TensorType, range: tuple[TensorValueLike, TensorValueLike] = (0.0, 1.0)
) -> TensorValue:
    """A tensor of numbers drawn uniformly from an interval.

    Args:
        like: The type of the tensor, of floats.
        range: The ends of the interval; the lower one is among the numbers.

    Raises:
        TypeError: `like` is not of floats.
        ValueError: A size is unknown in the graph, or the range does not have two ends.
    """
    if len(range) != 2:
        raise ValueError(f"uniform: the range is {range!r}, expected (low, high)")
    low, high = range
    drawn = _draw("uniform", like)
    if isinstance(low, int | float) and isinstance(high, int | float):
        return _finish(drawn * float(high - low) + float(low), like)
    bottom = as_tensor(low)
    return _finish(drawn * (as_tensor(high) - bottom) + bottom, like)


def gaussian(
    like: TensorType, mean: TensorValueLike = 0.0, std: TensorValueLike = 1.0
) -> TensorValue:
    """A tensor of numbers drawn from a normal distribution.

    Args:
        like: The type of the tensor, of floats.
        mean: The mean.
        std: The standard deviation.

    Raises:
        TypeError: `like` is not of floats.
        ValueError: A size is unknown in the graph.
    """
    return _finish(_draw("normal", like) * std + mean, like)


normal = gaussian


def _draw(distribution: str, like: TensorType) -> TensorValue:
    """Numbers of the standard distribution in float32."""
    op = "gaussian" if distribution == "normal" else distribution
    if not isinstance(like, TensorType):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{op}: expected the type of a tensor, got {like!r}")
    if not like.dtype.is_float():
        raise TypeError(f"{op}: {like!r} is not of floats; draw floats and cast them")
    graph = _graph.Graph.current
    graph.check_symbols(op, like.shape.exprs)
    seed = graph.random_seed()
    if seed is None:
        seed = constant(0, DType.int64, device=DeviceRef.CPU())
    type_ = TensorType(DType.float32, like.shape, like.device).to_mlir()
    attrs = {"distribution": distribution, "stream": graph.next_random_stream()}
    return stage("random", (seed,), attrs, type_)


def _finish(drawn: TensorValue, like: TensorType) -> TensorValue:
    return cast(drawn, like.dtype)
