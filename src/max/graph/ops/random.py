"""Random tensors, reproducible from a seed on any machine and number of threads.

::

    from max.graph import ops

    ops.random.set_seed(42)
    noise = ops.random.gaussian(TensorType(DType.float32, ["n", 8], device))

The generator is Philox4x32-10, which is counter-based: an element depends on the seed, the number of random tensors
staged earlier in the graph, and its position in the tensor.
"""

from __future__ import annotations

from max.dtype import DType
from max.graph import graph as _graph
from max.graph.ops._stage import as_tensor, stage
from max.graph.ops.constant import constant
from max.graph.ops.unary import cast
from max.graph.type import DeviceRef, TensorType
from max.graph.value import TensorValue, TensorValueLike

__all__ = ["SeedType", "gaussian", "normal", "set_seed", "uniform"]

SeedType = TensorType(DType.int64, [], DeviceRef.CPU())
"""The type of a seed: int64, rank 0, on the CPU."""


def set_seed(seed: TensorValueLike = 0) -> None:
    """Sets the seed of random tensors staged after this call.

    The default seed is 0. To draw new numbers in each execution, pass an input of the graph.

    Args:
        seed: An int, which wraps to 64 bits, or an integer tensor of rank 0.

    Raises:
        TypeError: The seed is not an integer.
        ValueError: The seed is a tensor of another rank.
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
    """A tensor of samples of a uniform distribution.

    Args:
        like: The type of the result, a floating-point type.
        range: The interval ``[low, high)``; a sample close to `high` may be rounded to `high`.

    Returns:
        A tensor of type `like`; samples are drawn in float32 and cast.

    Raises:
        TypeError: `like` is not a tensor type of floats.
        ValueError: A symbol of the shape is not bound in the graph, or the range does not have two bounds.
    """
    if len(range) != 2:
        raise ValueError(f"uniform: the range is {range!r}, expected (low, high)")
    low, high = range
    samples = _draw("uniform", like)
    if isinstance(low, int | float) and isinstance(high, int | float):
        return cast(samples * float(high - low) + float(low), like.dtype)
    low = as_tensor(low)
    return cast(samples * (as_tensor(high) - low) + low, like.dtype)


def gaussian(
    like: TensorType, mean: TensorValueLike = 0.0, std: TensorValueLike = 1.0
) -> TensorValue:
    """A tensor of samples of a normal distribution.

    Args:
        like: The type of the result, a floating-point type.
        mean: The mean.
        std: The standard deviation.

    Returns:
        A tensor of type `like`; samples are drawn in float32 and cast.

    Raises:
        TypeError: `like` is not a tensor type of floats.
        ValueError: A symbol of the shape is not bound in the graph.
    """
    return cast(_draw("normal", like) * std + mean, like.dtype)


normal = gaussian


def _draw(distribution: str, like: TensorType) -> TensorValue:
    """Samples of the standard distribution in float32."""
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
