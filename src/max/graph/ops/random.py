"""Random tensors, reproducible from a seed on any machine and number of threads.

::

    from max.graph import ops

    ops.random.set_seed(42)
    noise = ops.random.gaussian(TensorType(DType.float32, ["n", 8], device))

The generator is Philox4x32-10, which is counter-based: an element depends on the seed, the number of random tensors
staged earlier in the graph, and its position in the tensor.
"""

from __future__ import annotations

from max._errors import ArgumentError
from max.dtype import DType
from max.graph import graph as _graph
from max.graph.ops.creation.constant import constant
from max.graph.ops.elementwise.unary import cast, floor
from max.graph.ops.staging.stage import as_tensor, stage
from max.graph.type import DeviceRef, TensorType
from max.graph.value import TensorValue, TensorValueLike

__all__ = ["SeedType", "assert_scalar", "gaussian", "normal", "set_seed", "uniform"]

SeedType = TensorType(DType.int64, [], DeviceRef.CPU())
"""The type of a seed: int64, rank 0, on the CPU."""


def assert_scalar(value: TensorValueLike) -> None:
    """Checks that a value has rank 0.

    Args:
        value: A number or a tensor.

    Raises:
        ValueError: Its rank is another.
    """
    tensor = as_tensor(value)
    if tensor.rank:
        raise ValueError(f"{tensor!r} has rank {tensor.rank}, expected a scalar")


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
        # seeds of 64 bits without a sign are taken as well, by their bits
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
        like: The type of the result, a number type. A symbol of its shape may be bound by a later op.
        range: The interval ``[low, high)``; a float close to `high` may be rounded to `high`.

    Returns:
        A tensor of type `like`; samples are drawn in float32 and cast, to integers by rounding down.

    Raises:
        TypeError: `like` is not a tensor type of numbers.
        ValueError: The range does not have two bounds, or integers of the type do not have them.
    """
    if len(range) != 2:
        raise ValueError(f"uniform: the range is {range!r}, expected (low, high)")
    low, high = range
    samples = _draw("uniform", like)
    if like.dtype.is_integral():
        return _integers(samples, low, high, like.dtype)
    if isinstance(low, int | float) and isinstance(high, int | float):
        return cast(samples * float(high - low) + float(low), like.dtype)
    low = as_tensor(low)
    return cast(samples * (as_tensor(high) - low) + low, like.dtype)


def gaussian(
    like: TensorType, mean: TensorValueLike = 0.0, std: TensorValueLike = 1.0
) -> TensorValue:
    """A tensor of samples of a normal distribution.

    Args:
        like: The type of the result, a number type. A symbol of its shape may be bound by a later op.
        mean: The mean.
        std: The standard deviation.

    Returns:
        A tensor of type `like`; samples are drawn in float32 and cast: to integers toward 0, within the type's range.

    Raises:
        TypeError: `like` is not a tensor type of numbers.
    """
    return cast(_draw("normal", like) * std + mean, like.dtype)


normal = gaussian


def _integers(
    samples: TensorValue, low: TensorValueLike, high: TensorValueLike, dtype: DType
) -> TensorValue:
    """Integers from `low` to below `high`, of samples from 0 to below 1.

    They are computed in float64: in float32 the greatest sample times a length of 2^24 is rounded to the length.
    """
    for bound in (low, high):
        if isinstance(bound, int | float) and not _fits(bound, dtype):
            raise ValueError(f"uniform: the bound {bound!r} is out of the range of {dtype}")
    first, last = (
        constant(float(bound), DType.float64, samples.device)
        if isinstance(bound, int | float)
        else cast(as_tensor(bound), DType.float64)
        for bound in (low, high)
    )
    return cast(floor(cast(samples, DType.float64) * (last - first) + first), dtype)


def _fits(limit: float, dtype: DType) -> bool:
    bits = dtype.size_in_bits
    lowest = 0 if dtype.is_unsigned_integral() else -(1 << (bits - 1))
    # the upper bound is not drawn
    return lowest <= limit <= lowest + (1 << bits)


def _draw(distribution: str, like: TensorType) -> TensorValue:
    """Samples of the standard distribution in float32."""
    op = "gaussian" if distribution == "normal" else distribution
    if not isinstance(like, TensorType):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{op}: expected the type of a tensor, got {like!r}")
    if not (like.dtype.is_float() or like.dtype.is_integral()):
        raise ArgumentError(f"{op}: {like!r} is not of numbers; compare floats with a bound")
    graph = _graph.Graph.current
    graph.check_symbols(op, like.shape.exprs, may_follow=True)
    seed = graph.random_seed()
    if seed is None:
        seed = constant(0, DType.int64, device=DeviceRef.CPU())
    type_ = TensorType(DType.float32, like.shape, like.device).to_mlir()
    attrs = {"distribution": distribution, "stream": graph.next_random_stream()}
    return stage("random", (seed,), attrs, type_)
