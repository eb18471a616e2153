"""Resizing of tensors of any rank, with the coordinates and roundings of ONNX's Resize.

Element ``i`` of ``n`` lies at the position ``numerator / denominator`` of an axis of the old size. Both are integers,
so that positions are exact until they are rounded to an index.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import NamedTuple

from max import mlir
from max.dtype import DType
from max.graph.dim import Dim, DimLike
from max.graph.ops.creation.range import range as sequence
from max.graph.ops.elementwise.binary import add, div, floor_div, maximum, minimum, mul, sub
from max.graph.ops.elementwise.unary import abs, cast, negate
from max.graph.ops.images.interpolation import InterpolationMode
from max.graph.ops.images.resize import resize
from max.graph.ops.movement.gather import gather
from max.graph.ops.movement.shape import reshape, transpose
from max.graph.ops.products.matmul import matmul
from max.graph.ops.reductions.reduction import sum
from max.graph.ops.staging.promotion import cast_to
from max.graph.ops.staging.stage import as_tensor
from max.graph.value import TensorValue, TensorValueLike

__all__ = ["resize_bicubic", "resize_linear", "resize_nearest"]

HALF_PIXEL, ALIGN_CORNERS, ASYMMETRIC, HALF_PIXEL_1D = 0, 1, 2, 3
"""Coordinate transforms: half-pixel centers; aligned corners; aligned first corners; as HALF_PIXEL, but 0 for size 1.
"""
HALF_DOWN, HALF_UP, FLOOR, CEIL = 0, 1, 2, 3
"""Rounding modes of a position."""


class _Positions(NamedTuple):
    """The positions of the elements of a resized axis on the old axis."""

    numerators: TensorValue
    """int64, of rank 1."""
    denominator: TensorValue
    """int64, of rank 0, 1 or more."""
    last: TensorValue
    """The index of the last old element: int64, of rank 0."""


def resize_nearest(
    input: TensorValueLike,
    size: Iterable[DimLike],
    coordinate_transform_mode: int = 0,
    round_mode: int = 0,
) -> TensorValue:
    """Resizes a tensor: each element is the nearest of the old ones along each axis.

    Args:
        input: The tensor, of any rank and dtype.
        size: The shape of the result, of the input's rank.
        coordinate_transform_mode: The coordinate transform: 0: half-pixel centers; 1: aligned corners; 2: aligned first
            corners (asymmetric); 3: as 0, but position 0 if the new size is 1.
        round_mode: The rounding of a position to an index: 0: to nearest, halves down; 1: to nearest, halves up; 2:
            down; 3: up.

    Returns:
        A tensor of shape `size` and of the input's dtype.

    Raises:
        ValueError: The ranks differ, a mode is unknown, or an empty axis is resized to a non-empty one.
    """
    x, sizes = _operands("resize_nearest", input, size)
    transform = _mode("resize_nearest", "coordinate_transform_mode", coordinate_transform_mode)
    rounding = _mode("resize_nearest", "round_mode", round_mode)
    for axis, new in enumerate(sizes):
        if x.shape[axis] == new:
            continue
        numerators, denominator, last = _positions(x, axis, new, transform)
        if rounding == FLOOR:
            index = floor_div(numerators, denominator)
        elif rounding == CEIL:
            # ceil(x) = -floor(-x)
            index = negate(floor_div(negate(numerators), denominator))
        elif rounding == HALF_UP:
            # floor(x + 1/2)
            index = floor_div(add(mul(numerators, 2), denominator), mul(denominator, 2))
        else:
            # ceil(x - 1/2)
            doubled = sub(denominator, mul(numerators, 2))
            index = negate(floor_div(doubled, mul(denominator, 2)))
        x = gather(x, minimum(maximum(index, 0), last), axis)
    return x


def resize_linear(
    input: TensorValueLike,
    size: Iterable[DimLike],
    coordinate_transform_mode: int = 0,
    antialias: bool = False,
) -> TensorValue:
    """Resizes a tensor: elements are interpolated linearly between two neighbors along each axis.

    Computed in float32 (float64 for float64). Positions beyond the tensor take the edge elements.

    Args:
        input: The tensor, of any rank and a floating-point type.
        size: The shape of the result, of the input's rank.
        coordinate_transform_mode: The coordinate transform; see `resize_nearest`.
        antialias: Whether to filter an axis that shrinks: the weights of a new element then extend over all old
            elements that it covers.

    Returns:
        A tensor of shape `size` and of the input's dtype.

    Raises:
        ValueError: The ranks differ, the mode is unknown, or an empty axis is resized to a non-empty one.
        TypeError: The input is not of a floating-point type.
    """
    x, sizes = _operands("resize_linear", input, size)
    transform = _mode("resize_linear", "coordinate_transform_mode", coordinate_transform_mode)
    if not x.dtype.is_float():
        raise TypeError(
            f"resize_linear: the operand is {x.mlir_type.short}, expected a floating-point type"
        )
    images = x.rank == 4 and list(x.shape[:2]) == sizes[:2]
    if images and transform == HALF_PIXEL and not antialias:
        return resize(x, sizes, InterpolationMode.BILINEAR)
    dtype = x.dtype
    x = cast_to(x, DType.float64 if dtype is DType.float64 else DType.float32)
    for axis, new in enumerate(sizes):
        if x.shape[axis] != new:
            positions = _positions(x, axis, new, transform)
            x = (
                _filter_windows(x, axis, new, positions)
                if antialias
                else _interpolate_neighbors(x, axis, positions)
            )
    return cast_to(x, dtype)


def resize_bicubic(input: TensorValueLike, size: Iterable[DimLike]) -> TensorValue:
    """Resizes images by cubic interpolation between four neighbors along each axis; see `resize`.

    Args:
        input: The images: ``[N, C, H, W]``, of a floating-point type.
        size: The shape of the result: the same N and C, and the new H and W.

    Raises:
        ValueError: The rank is not 4, `size` does not have four sizes, or N or C differs.
        TypeError: The images are not of a floating-point type.
    """
    return resize(input, size, InterpolationMode.BICUBIC)


def _operands(
    op: str, input: TensorValueLike, size: Iterable[DimLike]
) -> tuple[TensorValue, list[Dim]]:
    x = as_tensor(input)
    sizes = [Dim(dim) for dim in size]
    dims = [dim.expr for dim in sizes]
    if len(sizes) != x.rank:
        raise ValueError(
            f"{op}: the size is {mlir.dims_text(dims)}, expected {x.rank} dimensions as of {x.mlir_type.short}"
        )
    for axis, dim in enumerate(dims):
        if dim.is_static and dim.value < 0:
            raise ValueError(f"{op}: size {dim} of axis {axis}, expected 0 or more")
        if x.mlir_type.shape[axis] == 0 and dim != 0:
            raise ValueError(f"{op}: axis {axis} of {x.mlir_type.short} is empty")
    return x, sizes


def _mode(op: str, name: str, value: int) -> int:
    mode = operator.index(value)
    if not 0 <= mode <= 3:
        raise ValueError(f"{op}: {name} is {mode}, expected 0 to 3")
    return mode


def _positions(x: TensorValue, axis: int, new: Dim, transform: int) -> _Positions:
    """The positions of the `new` elements of an axis."""
    place = x.device
    old_size, new_size = (
        cast(TensorValue(dim).to(place), DType.int64) for dim in (x.shape[axis], new)
    )
    places = sequence(0, new, 1, new, dtype=DType.int64, device=place)
    last = sub(old_size, 1)
    if transform == ALIGN_CORNERS:
        return _Positions(mul(places, last), maximum(sub(new_size, 1), 1), last)
    if transform == ASYMMETRIC:
        return _Positions(mul(places, old_size), maximum(new_size, 1), last)
    # (i + 1/2) * old / new - 1/2, over the denominator 2 * new
    numerators = sub(mul(add(mul(places, 2), 1), old_size), new_size)
    if transform == HALF_PIXEL_1D:
        # position 0 if the new size is 1
        numerators = mul(numerators, minimum(sub(new_size, 1), 1))
    return _Positions(numerators, maximum(mul(new_size, 2), 1), last)


def _interpolate_neighbors(x: TensorValue, axis: int, positions: _Positions) -> TensorValue:
    """Linear interpolation between two neighbors along an axis."""
    denominator, last = positions.denominator, positions.last
    inside = minimum(maximum(positions.numerators, 0), mul(last, denominator))
    # x = first + remainder / denominator
    first = floor_div(inside, denominator)
    remainder = cast(sub(inside, mul(first, denominator)), x.dtype)
    along_axis = [1] * axis + [-1] + [1] * (x.rank - 1 - axis)
    weight = reshape(div(remainder, cast(denominator, x.dtype)), along_axis)
    low = gather(x, first, axis)
    high = gather(x, minimum(add(first, 1), last), axis)
    return add(low, mul(sub(high, low), weight))


def _filter_windows(x: TensorValue, axis: int, new: Dim, positions: _Positions) -> TensorValue:
    """Weighted sums along an axis; the weights fall linearly to 0 at the distance of one old or new element."""
    old = x.shape[axis]
    center = div(cast(positions.numerators, x.dtype), cast(positions.denominator, x.dtype))
    elements = sequence(0, old, 1, old, dtype=x.dtype, device=x.device)
    old_size, new_size = (cast(TensorValue(dim).to(x.device), x.dtype) for dim in (old, new))
    # old elements for each new one: a smaller image averages, a larger one interpolates
    reach = maximum(div(old_size, maximum(new_size, 1)), 1)
    # distances from the element before each position: as in the other modes, an empty axis has none and raises
    index = floor_div(positions.numerators, positions.denominator)
    before = gather(elements, minimum(maximum(index, 0), positions.last), 0)
    steps = sub(reshape(elements, [old, 1]), reshape(before, [1, new]))
    distance = abs(sub(steps, reshape(sub(center, before), [1, new])))
    weights = maximum(sub(1, div(distance, reach)), 0)
    weights = div(weights, sum(weights, axis=0))
    # weights are [old, new]
    return transpose(matmul(transpose(x, axis, -1), weights), axis, -1)
