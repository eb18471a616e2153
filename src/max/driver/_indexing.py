"""Basic NumPy indexing on shapes and strides, without data."""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import Any, NamedTuple, SupportsIndex, TypeAlias, cast

from max._errors import AxisError

Index: TypeAlias = "int | slice | EllipsisType | None"


class View(NamedTuple):
    """The view that an index selects: offset, sizes and strides, in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The row-major strides of a shape, in elements."""
    strides, step = [0] * len(shape), 1
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements are in row-major order without gaps; an empty tensor is contiguous with any strides."""
    if 0 in shape:
        return True
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        # the stride of a single element is never used
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def _as_integer(item: object) -> int:
    """The integer of an index.

    Raises:
        TypeError: It is an array, a mask or another object.
    """
    if not isinstance(item, bool):
        try:
            return operator.index(cast("SupportsIndex", item))
        except TypeError:
            pass
    raise TypeError(
        f"Tensor index: expected integers, slices, ... or None, got {type(item).__name__}; for "
        "index arrays and masks go through to_numpy()"
    )


def apply_index(
    index: Index | tuple[Index, ...], shape: tuple[int, ...], strides: tuple[int, ...]
) -> View:
    """Resolves an index against a shape.

    Raises:
        AxisError: There are too many indices, or one is out of range.
        TypeError: An index is an array or a mask.
    """
    items: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
    ellipses = sum(item is Ellipsis for item in items)
    if ellipses > 1:
        raise AxisError("Tensor index: an index can have only one ellipsis (...)")
    num_indices = sum(item is not None and item is not Ellipsis for item in items)
    if num_indices > len(shape):
        raise AxisError(f"Tensor index: {num_indices} indices for a tensor of rank {len(shape)}")
    if not ellipses:
        items = (*items, Ellipsis)

    offset, axis = 0, 0
    new_shape: list[int] = []
    new_strides: list[int] = []
    for item in items:
        if item is None:
            new_shape.append(1)
            new_strides.append(0)
        elif item is Ellipsis:
            omitted = len(shape) - num_indices
            new_shape += shape[axis : axis + omitted]
            new_strides += strides[axis : axis + omitted]
            axis += omitted
        elif isinstance(item, slice):
            start, stop, step = item.indices(shape[axis])
            size = len(range(start, stop, step))
            # an empty selection keeps the base pointer, which stays inside the memory
            offset += start * strides[axis] if size else 0
            new_shape.append(size)
            new_strides.append(strides[axis] * step)
            axis += 1
        else:
            position = _as_integer(item)
            size = shape[axis]
            if not -size <= position < size:
                raise AxisError(
                    f"Tensor index: {position} is out of range for axis {axis} of size {size}"
                )
            offset += (position % size) * strides[axis]
            axis += 1
    return View(offset, tuple(new_shape), tuple(new_strides))
