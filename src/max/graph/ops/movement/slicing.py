"""Slices: NumPy's basic indexing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, cast

import numpy as np

from max import mlir
from max._errors import AxisError
from max.dtype import DType
from max.graph import graph
from max.graph.dim import Dim, DimLike
from max.graph.ops.creation.constant import constant
from max.graph.ops.elementwise.binary import equal, greater, where
from max.graph.ops.elementwise.unary import cast as cast_elements
from max.graph.ops.movement.shape import reshape
from max.graph.ops.staging.stage import as_tensor, stage
from max.graph.type import DeviceRef
from max.graph.value import TensorValue, TensorValueLike
from max.mlir.dims import DimExpr

__all__ = ["SliceIndex", "SliceIndices", "slice_tensor"]

SliceIndex = TensorValue | int | slice | tuple[slice, DimLike] | EllipsisType | None
"""An index of one axis; ``None`` adds an axis, ``...`` stands for any number of full slices."""
SliceIndices = Sequence[SliceIndex]

_ZERO, _ONE = DimExpr.constant(0), DimExpr.constant(1)
_FIRST, _LAST = -(1 << 63), (1 << 63) - 1

# how far bounds may lie below -dim and above dim: for an element, and for slices with positive and negative step
_ELEMENTS, _FORWARD, _BACKWARD = (0, -1), (0, 0), (-1, -1)

Bound = DimExpr | TensorValue


@dataclass(frozen=True)
class _Axis:
    """The normalized index of one axis."""

    start: Bound
    stop: Bound
    step: Bound
    size: DimExpr | None
    """The size in the result if the index states it; None: it follows from the bounds."""
    is_dropped: bool = False
    """Whether the result lacks the axis, because a scalar indexes it."""
    to_end: bool = False
    """Whether the slice has no stop; with a negative step it includes element 0."""


@dataclass(frozen=True)
class Slice:
    """A normalized index of all axes of a tensor or buffer."""

    axes: tuple[_Axis, ...]
    new_axes: tuple[int, ...]
    """The axes of size 1 in the result that ``None`` inserts."""

    @property
    def is_static(self) -> bool:
        """Whether all bounds are dimensions, not tensors."""
        return all(
            isinstance(bound, DimExpr) for a in self.axes for bound in (a.start, a.stop, a.step)
        )

    @property
    def attrs(self) -> dict[str, tuple[DimExpr, ...]]:
        """The attributes of `mo.slice`; requires `is_static`."""
        names = ("start", "stop", "step")
        return {name: tuple([getattr(a, name) for a in self.axes]) for name in names}

    def sizes(self, op: str, shape: tuple[DimExpr, ...]) -> tuple[DimExpr, ...]:
        """The sizes of all axes of the slice, including dropped ones."""
        bounds = self.attrs
        sizes = mlir.slice_shape(op, shape, bounds["start"], bounds["stop"], bounds["step"])
        return tuple(
            size if a.size is None else a.size for a, size in zip(self.axes, sizes, strict=True)
        )

    def result_shape(self, sizes: Iterable[DimExpr]) -> list[DimExpr]:
        """Computes the shape of the result from the sizes of all axes."""
        shape = [size for a, size in zip(self.axes, sizes, strict=True) if not a.is_dropped]
        for axis in self.new_axes:
            shape.insert(axis, _ONE)
        return shape


def parse_indices(op: str, shape: tuple[DimExpr, ...], indices: SliceIndices) -> Slice:
    """Normalizes indices for a shape.

    Raises:
        TypeError: An index is of an unsupported type.
        ValueError: There are too many indices, or one is out of range.
    """
    items: list[Any] = list(indices)
    if len(items) == 1 and isinstance(items[0], list):
        # a list of slices means the same as a tuple; a list of numbers would select elements in NumPy
        listed = cast("list[Any]", items[0])
        items = listed if any(map(_is_basic, listed)) else items
    if len(items) == 2 and isinstance(items[0], slice) and isinstance(items[1], str):
        # Python passes x[(slice, "size")] as two indices; a str cannot index an axis
        items = [(items[0], items[1])]
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise ValueError(f"{op}: more than one '...' in the indices")
    counted = sum(item is not None and item is not Ellipsis for item in items)
    if counted > len(shape):
        raise ValueError(f"{op}: {counted} indices for a tensor of rank {len(shape)}")
    # axes that no index names are taken whole: where `...` stands, else at the end
    full_slices = [slice(None)] * (len(shape) - counted)
    if dots:
        items[dots[0] : dots[0] + 1] = full_slices
    else:
        items.extend(full_slices)
    axes: list[_Axis] = []
    new_axes: list[int] = []
    position = 0
    for item in items:
        if item is None:
            new_axes.append(position)
            position += 1
            continue
        axis = _parse_axis(op, len(axes), shape[len(axes)], item)
        axes.append(axis)
        # `None` counts axes of the result, so a dropped one does not move it
        position += not axis.is_dropped
    return Slice(tuple(axes), tuple(new_axes))


def _is_basic(index: Any) -> bool:
    return index is None or index is Ellipsis or isinstance(index, slice)


def _parse_axis(op: str, axis: int, dim: DimExpr, item: Any) -> _Axis:
    size: DimExpr | None = None
    if isinstance(item, tuple):
        pair = cast("tuple[Any, ...]", item)
        if len(pair) != 2 or not isinstance(pair[0], slice):
            raise TypeError(f"{op}: index {pair!r} of axis {axis}; expected (slice, out_dim)")
        item, size = cast("tuple[Any, Any]", (pair[0], Dim(pair[1]).expr))
    if isinstance(item, slice):
        return _parse_slice(op, axis, dim, cast("slice[Any, Any, Any]", item), size)
    if isinstance(item, TensorValue) or hasattr(item, "__tensorvalue__"):
        start = _scalar(op, axis, as_tensor(item))
        last = constant(-1, DType.int64)
        # -1 + 1 is 0, not the end of the axis
        stop = where(equal(start, last), constant(_LAST, DType.int64), start + 1)
        return _Axis(start, stop, _ONE, _ONE, is_dropped=True)
    start = _bound_from_start(op, axis, dim, item, _ELEMENTS)
    return _Axis(start, start + 1, _ONE, None, is_dropped=True)


def _parse_slice(op: str, axis: int, dim: DimExpr, item: slice, size: DimExpr | None) -> _Axis:
    bounds = [
        as_tensor(b) if hasattr(b, "__tensorvalue__") else b
        for b in (item.start, item.stop, item.step)
    ]
    item = slice(*bounds)
    if any(isinstance(b, TensorValue) for b in bounds):
        if size is None:
            raise ValueError(
                f"{op}: the slice of axis {axis} has a tensor as bound; say the size of the "
                "result: (slice(...), out_dim)"
            )
        return _dynamic_slice(op, axis, dim, item, size)
    step = 1 if item.step is None else _step(op, axis, item.step)
    if step > 0:
        start = (
            _ZERO if item.start is None else _bound_from_start(op, axis, dim, item.start, _FORWARD)
        )
        stop = dim if item.stop is None else _bound_from_start(op, axis, dim, item.stop, _FORWARD)
        empty = stop - start
    else:
        start = (
            dim - 1
            if item.start is None
            else _bound_from_start(op, axis, dim, item.start, _BACKWARD)
        )
        stop = (
            -_ONE if item.stop is None else _bound_from_start(op, axis, dim, item.stop, _BACKWARD)
        )
        empty = start - stop
    # bounds that cross each other select nothing, as in Python; the op takes no negative size
    if empty.is_static and empty.value < 0:
        stop = start
    return _Axis(start, stop, DimExpr.constant(step), size, to_end=item.stop is None)


def _dynamic_slice(op: str, axis: int, dim: DimExpr, item: slice, size: DimExpr) -> _Axis:
    def resolve_bound(value: Any, default: Bound) -> Bound:
        if value is None:
            return default
        if isinstance(value, TensorValue):
            return _scalar(op, axis, value)
        # a dim, which a tensor of the graph must bind
        size = Dim(value).expr
        if not size.is_static:
            graph.Graph.current.check_symbols(op, (size,))
        return size

    step = resolve_bound(item.step, _ONE)
    if isinstance(step, TensorValue) and (item.start is None or item.stop is None):
        raise ValueError(
            f"{op}: the step of axis {axis} is a tensor; say start and stop of the slice too"
        )
    # the defaults of a slice without bounds depend on the direction
    backward = isinstance(step, DimExpr) and step.is_static and step.value < 0
    start = resolve_bound(item.start, dim - 1 if backward else _ZERO)
    stop = resolve_bound(item.stop, -_ONE if backward else dim)
    return _Axis(start, stop, step, size, to_end=item.stop is None and backward)


def _step(op: str, axis: int, value: Any) -> int:
    step = Dim(value).expr
    if not step.is_static or step.value == 0:
        raise ValueError(f"{op}: the step of axis {axis} is {value}, expected an int, not 0")
    return step.value


def _bound_from_start(
    op: str, axis: int, dim: DimExpr, value: Any, beyond: tuple[int, int]
) -> DimExpr:
    """Converts a possibly negative index to a dimension that counts from the start.

    Args:
        op: The op, for messages.
        axis: The axis.
        dim: Its size.
        value: The index.
        beyond: How far below ``-dim`` and above ``dim`` it may be.
    """
    try:
        index = Dim(value).expr
    except TypeError as error:
        raise TypeError(
            f"{op}: index {value!r} of axis {axis} is a {type(value).__name__}; expected an int, "
            "a Dim, a slice, a scalar tensor, None or ..."
            + ("; for many indices use ops.gather" if isinstance(value, np.ndarray | list) else "")
        ) from error
    if not index.is_static:
        graph.Graph.current.check_symbols(op, (index,))
    # symbolic indices count from the start: their sign is not known here
    from_end = index.is_static and index.value < 0
    if dim.is_static and index.is_static:
        size, at = dim.value, index.value
        low, high = beyond[0] - size, size + beyond[1]
        if not low <= at <= high:
            raise AxisError(
                f"{op}: index {at} is out of range for axis {axis} of size {size}; expected {low} to {high}"
            )
    return dim + index if from_end else index


def _scalar(op: str, axis: int, value: TensorValue) -> TensorValue:
    if value.rank != 0 or not value.dtype.is_integral():
        raise TypeError(
            f"{op}: the index of axis {axis} is {value!r}, expected a scalar of integers; for "
            "many indices use ops.gather"
        )
    if value.dtype is DType.uint64:
        # values beyond int64 clamp to its maximum, which is out of range for any axis too
        greatest = constant(np.array(_LAST, np.uint64), device=value.device)
        value = where(greater(value, greatest), greatest, value)
    return cast_elements(value, DType.int64).to(DeviceRef.CPU())


def slice_tensor(x: TensorValueLike, indices: SliceIndices) -> TensorValue:
    """Slices a tensor by NumPy's basic indexing; ``x[...]`` calls it.

    An int or a scalar tensor selects one element and drops the axis, a slice selects a range, ``None`` inserts an axis
    of size 1, ``...`` stands for the remaining axes. Bounds of a slice range from ``-dim`` to ``dim``, and with a
    negative step from ``-dim - 1`` to ``dim - 1``; other bounds are errors, whereas NumPy clamps them. Bounds of
    symbolic axes are checked when the graph runs. ``(slice, out_dim)`` states the size of the result, which a slice
    with tensor bounds requires.

    Args:
        x: The tensor.
        indices: One index per axis; missing ones are full slices.

    Returns:
        A tensor of the same dtype.

    Raises:
        ValueError: There are too many indices, one is out of range, a step is 0, or a size is missing.
        TypeError: An index is of an unsupported type.
    """
    tensor = as_tensor(x)
    type_ = tensor.mlir_type
    index = parse_indices("slice", type_.shape, indices)
    if index.is_static:
        attrs = index.attrs
        sizes = index.sizes("slice", type_.shape)
        # a slice of everything is the operand itself: the graph gets no op
        whole = sizes == type_.shape and all(a.start == 0 and a.step == 1 for a in index.axes)
        if not whole:
            tensor = stage("slice", (tensor,), attrs, type_.with_shape(sizes))
    else:
        sizes = dynamic_sizes(type_.shape, index)
        operands = (tensor, *bound_tensors(index))
        tensor = stage("slice_dynamic", operands, None, type_.with_shape(sizes))
    shape = index.result_shape(sizes)
    return reshape(tensor, [Dim.from_mlir(dim) for dim in shape])


def _backward(axis: _Axis) -> bool:
    return isinstance(axis.step, DimExpr) and axis.step.is_static and axis.step.value < 0


def bound_tensors(index: Slice) -> tuple[TensorValue, TensorValue, TensorValue]:
    """Start, stop and step of all axes: three int64 tensors ``[rank]`` on the CPU."""
    starts = _vector([a.start for a in index.axes])
    # -1 as a stop would count from the end: a backward slice up to element 0 stops at the least number
    stops = _vector([_FIRST if a.to_end and _backward(a) else a.stop for a in index.axes])
    return starts, stops, _vector([a.step for a in index.axes])


def dynamic_sizes(shape: tuple[DimExpr, ...], index: Slice) -> tuple[DimExpr, ...]:
    """The sizes of all axes of a slice with tensor bounds: the stated sizes, otherwise computed from static bounds."""
    sizes: list[DimExpr] = []
    for axis, dim in zip(index.axes, shape, strict=True):
        if axis.size is not None:
            sizes.append(axis.size)
            continue
        bounds = [axis.start, axis.stop, axis.step]
        (size,) = mlir.slice_shape("slice", (dim,), *[(b,) for b in bounds])  # type: ignore[arg-type]
        sizes.append(size)
    return tuple(sizes)


def _vector(values: Sequence[Bound | int]) -> TensorValue:
    """Packs integers, dimensions and scalar tensors into an int64 tensor of rank 1 on the CPU."""
    if all(isinstance(v, int) or (isinstance(v, DimExpr) and v.is_static) for v in values):
        numbers = [v if isinstance(v, int) else v.value for v in values]  # type: ignore[union-attr]
        return constant(np.array(numbers, np.int64))
    # one op for all sizes, instead of a concatenation of scalars
    if all(isinstance(v, DimExpr) for v in values):
        return stage("shape_to_tensor", (), {"shape": tuple(values)})
    parts = [reshape(v, [1]) if isinstance(v, TensorValue) else _vector([v]) for v in values]
    return parts[0] if len(parts) == 1 else stage("concat", parts, {"axis": 0})
