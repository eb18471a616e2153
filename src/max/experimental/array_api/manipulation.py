"""Shapes and the order of elements."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import numpy as np

from max.experimental import functional as F
from max.experimental.array_api.arguments import Axis, axes_of, shape_of
from max.experimental.array_api.data_types import astype, result_type
from max.experimental.tensor import Tensor

__all__ = [
    "broadcast_arrays",
    "broadcast_shapes",
    "broadcast_to",
    "concat",
    "expand_dims",
    "flip",
    "moveaxis",
    "permute_dims",
    "repeat",
    "reshape",
    "roll",
    "squeeze",
    "stack",
    "tile",
    "unstack",
    "pair_of",
]


def reshape(x: Tensor, /, shape: tuple[int, ...], *, copy: builtins.bool | None = None) -> Tensor:
    """The elements in another shape."""
    return x.reshape(list(shape))


def permute_dims(x: Tensor, /, axes: tuple[int, ...]) -> Tensor:
    """The axes in another order."""
    return x.permute(list(axes)) if x.rank else x


def moveaxis(
    x: Tensor, source: int | tuple[int, ...], destination: int | tuple[int, ...], /
) -> Tensor:
    """Axes moved to other places."""
    sources = [a % x.rank for a in (source if isinstance(source, tuple) else (source,))]
    places = [
        a % x.rank for a in (destination if isinstance(destination, tuple) else (destination,))
    ]
    order = [a for a in range(x.rank) if a not in sources]
    # ascending: a place counts the axes that are inserted before it
    for place, axis in sorted(zip(places, sources, strict=True)):
        order.insert(place, axis)
    return permute_dims(x, tuple(order))


def expand_dims(x: Tensor, /, axis: int = 0) -> Tensor:
    """With a new axis of size 1."""
    return x.unsqueeze(axis)


def squeeze(x: Tensor, /, axis: int | tuple[int, ...]) -> Tensor:
    """Without axes of size 1."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    # the last axis first: those before it keep their numbers
    for one in sorted((a % x.rank for a in axes), reverse=True):
        x = x.squeeze(one)
    return x


def concat(arrays: Sequence[Tensor], /, *, axis: int | None = 0) -> Tensor:
    """Tensors behind each other along an axis; None flattens them."""
    if axis is None:
        return F.concat([a.reshape((-1,)) for a in arrays], axis=0)
    return F.concat(list(arrays), axis=axis)


def stack(arrays: Sequence[Tensor], /, *, axis: int = 0) -> Tensor:
    """Tensors behind each other along a new axis."""
    return F.stack(list(arrays), axis=axis)


def unstack(x: Tensor, /, *, axis: int = 0) -> tuple[Tensor, ...]:
    """The parts of a tensor along an axis, without it."""
    return tuple(moveaxis(x, axis, 0)[i] for i in range(shape_of(x)[axis]))


def flip(x: Tensor, /, *, axis: Axis = None) -> Tensor:
    """The elements in reverse order along axes."""
    axes = axes_of(x, axis)
    return x[tuple(slice(None, None, -1) if a in axes else slice(None) for a in range(x.rank))]


def roll(x: Tensor, /, shift: int | tuple[int, ...], *, axis: Axis = None) -> Tensor:
    """The elements moved along axes; those that leave at one end come in at the other."""
    if axis is None:
        assert isinstance(shift, int)
        return roll(x.reshape((-1,)), shift, axis=0).reshape(list(shape_of(x)))
    axes = axis if isinstance(axis, tuple) else (axis,)
    shifts = shift if isinstance(shift, tuple) else (shift,) * len(axes)
    for by, one in zip(shifts, axes, strict=True):
        size = shape_of(x)[one]
        if size and by % size:
            cut = size - by % size
            head, tail = x.split([cut, size - cut], one)
            x = F.concat([tail, head], axis=one)
    return x


def repeat(x: Tensor, repeats: int | Tensor, /, *, axis: int | None = None) -> Tensor:
    """Each element a number of times.

    Args:
        x: The elements.
        repeats: The number, or one for each place of the axis, which is computed at once.
        axis: The axis; None for the elements of all.
    """
    numbers = repeats.to_numpy().reshape(-1) if isinstance(repeats, Tensor) else [repeats]
    if len(numbers) != 1:
        return F.repeat_interleave(x, repeats, axis, out_dim=int(np.sum(numbers)))
    if numbers[0] > 0:
        return F.repeat_interleave(x, int(numbers[0]), axis)
    if axis is None:
        return x.reshape((-1,))[:0]
    return x[tuple(slice(0, 0) if a == axis % x.rank else slice(None) for a in range(x.rank))]


def tile(x: Tensor, repetitions: tuple[int, ...], /) -> Tensor:
    """The whole tensor a number of times along each axis."""
    rank = builtins.max(x.rank, len(repetitions))
    x = x.reshape([1] * (rank - x.rank) + list(shape_of(x)))
    return F.tile(x, [1] * (rank - len(repetitions)) + list(repetitions))


def broadcast_to(x: Tensor, /, shape: tuple[int, ...]) -> Tensor:
    """The elements repeated along axes of size 1 and new leading axes."""
    return F.broadcast_to(x, list(shape))


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to which shapes broadcast."""
    return np.broadcast_shapes(*shapes)


def broadcast_arrays(*arrays: Tensor) -> list[Tensor]:
    """Tensors in the shape to which they broadcast."""
    shape = np.broadcast_shapes(*(shape_of(a) for a in arrays))
    return [F.broadcast_to(a, list(shape)) for a in arrays]


def pair_of(name: str, x1: Any, x2: Any) -> tuple[Tensor, Tensor]:
    """Two operands of one dtype and shape; one of them may be a number of Python."""
    tensor = x1 if isinstance(x1, Tensor) else x2
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: neither {x1!r} nor {x2!r} is a Tensor")
    x1, x2 = (
        x if isinstance(x, Tensor) else Tensor.constant(x, dtype=tensor.dtype) for x in (x1, x2)
    )
    dtype = result_type(x1, x2)
    first, second = broadcast_arrays(*(astype(x, dtype, copy=False) for x in (x1, x2)))
    return first, second
