"""Indexing of tensors by masks and arrays of integers, as NumPy's advanced indexing.

Integers, slices, ``None`` and ``...`` are `max.graph.ops.slice_tensor`. Of an index with masks or arrays these come
first; then the axes that the arrays index are gathered. Only a run tells how many elements a mask selects, so masks of
eager tensors are computed at once.
"""

# the cells of tensors are read directly; `Tensor` is defined above this module
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, cast

import numpy as np

from max import driver
from max._errors import AxisError
from max.driver import CPU
from max.dtype import DType
from max.experimental.record.dispatch import apply, in_graph
from max.graph import Dim, TensorValue, ops
from max.graph.ops.staging.broadcasting import broadcast_shapes

__all__ = ["array_indices", "index_by_arrays", "is_advanced"]

_BASIC = frozenset({int, slice, EllipsisType, type(None)})


def is_advanced(indices: tuple[Any, ...]) -> bool:
    """Whether indices have a mask or an array among them.

    Args:
        indices: The indices of one subscript.

    Raises:
        TypeError: One of them is a list of other indices than slices, ``None`` and ``...``.
    """
    advanced = False
    for index in indices:
        if type(index) in _BASIC:
            continue
        if isinstance(index, list):
            _check_list(cast("list[Any]", index), indices)
        elif _is_array(index):
            advanced = True
    return advanced


def _check_list(index: list[Any], indices: tuple[Any, ...]) -> None:
    if len(indices) == 1 and any(i is None or isinstance(i, slice | EllipsisType) for i in index):
        return  # a list of slices is the tuple of them
    shown = repr(index) if len(index) < 9 else f"a list of {len(index)}"
    raise AxisError(
        f"index: {shown} is a list, which MAX reads as a tuple of indices, and NumPy as an array; "
        "expected x[tuple(index)] or x[numpy.array(index)]"
    )


def _is_array(index: Any) -> bool:
    """Whether an index selects by a mask or by many integers; an integer of rank 0 is a number."""
    if isinstance(index, np.generic | str | bytes) or not hasattr(index, "__dlpack__"):
        return False
    shape, dtype = index.shape, index.dtype
    return len(shape) > 0 or _is_bool(dtype)


def _is_bool(dtype: Any) -> bool:
    return dtype is DType.bool or str(dtype) in ("bool", "torch.bool")


@dataclass(frozen=True)
class _Plan:
    """Which axes are gathered, and where they are in the result.

    Attributes:
        axes: The axis of the operand that each component of the index vectors counts along.
        position: Where the axes of the arrays are in the result.
    """

    axes: tuple[int, ...]
    position: int


def index_by_arrays(x: Any, indices: tuple[Any, ...]) -> Any:
    """The elements at indices with masks or arrays of integers among them, as NumPy's advanced indexing.

    Arrays of one index broadcast. A mask of rank ``r`` selects along ``r`` axes, which have its sizes.

    Args:
        x: A tensor.
        indices: One index for each axis or mask, see `is_advanced`; missing ones are full slices.

    Raises:
        IndexError: There are too many indices, an array is neither of integers nor of bools, or a mask has other sizes
            than its axes. Integers out of range raise when the result is computed.
        ValueError: The arrays do not broadcast.
        TypeError: A mask while a graph is being built.
    """
    unindexed = _unindexed_axes(indices, x.rank)
    basic: list[Any] = []
    blocks: list[Any] = []
    axes: list[int] = []
    # the number of axes of the result before the arrays; None until there is an array or integer
    first: int | None = None
    contiguous, ended = True, False
    kept = 0  # axes before this index, once basic indices are applied
    at = 0  # the axis of the operand
    dots = any(index is Ellipsis for index in indices)
    for entry in indices if dots else (*indices, Ellipsis):
        if entry is Ellipsis:
            # an ellipsis separates arrays even if it stands for no axis
            ended = ended or first is not None
            basic.extend([slice(None)] * unindexed)
            kept, at = kept + unindexed, at + unindexed
            continue
        array = _is_array(entry)
        number = not array and entry is not None and not isinstance(entry, slice | tuple)
        if array or number:
            contiguous = contiguous and not ended
            first = kept - len(axes) if first is None else first
        elif first is not None:
            ended = True
        if not array:
            basic.append(entry)
            kept += not number
            at += entry is not None
            continue
        block, count = _block(entry, x, at)
        blocks.append(block)
        basic.extend([slice(None)] * count)
        axes.extend(range(kept, kept + count))
        kept, at = kept + count, at + count
    plan = _Plan(tuple(axes), first if contiguous and first is not None else 0)
    if not all(isinstance(index, slice) and index == slice(None) for index in basic):
        x = apply(ops.slice_tensor, (x, tuple(basic)), {})
    return apply(_gather_axes, (x, blocks, plan), {})


def _unindexed_axes(indices: tuple[Any, ...], rank: int) -> int:
    """The number of axes without an index."""
    if sum(index is Ellipsis for index in indices) > 1:
        raise AxisError("index: more than one '...' in the indices")
    counted = sum(
        (len(index.shape) if _is_mask(index) else 1)
        for index in indices
        if index is not None and index is not Ellipsis
    )
    if counted > rank:
        raise AxisError(f"index: {counted} indices for a tensor of rank {rank}")
    return rank - counted


def _is_mask(index: Any) -> bool:
    return _is_array(index) and _is_bool(index.dtype)


def _block(index: Any, x: Any, at: int) -> tuple[Any, int]:
    """Index vectors ``[..., count]`` of an array, and their size.

    Args:
        index: A mask or an array of integers.
        x: The tensor that is indexed.
        at: The first axis of the tensor that it indexes.
    """
    tensor = _as_tensor(index, x)
    if tensor.dtype is not DType.bool:
        if not tensor.dtype.is_integral():
            raise AxisError(
                f"index: the array at axis {at} is {tensor.dtype.name}, expected integers or bools"
            )
        return tensor.unsqueeze(-1), 1
    for axis, (size, expected) in enumerate(
        zip(tensor.shape, list(x.shape)[at : at + tensor.rank], strict=True), at
    ):
        # a mask without elements selects none
        if size not in (expected, 0):
            raise AxisError(f"index: the mask has size {size} at axis {axis}, expected {expected}")
    if in_graph():
        raise TypeError(
            "index: a mask selects a number of elements that only a run tells; in a graph name it: "
            "F.gather_nd(x, F.nonzero(mask, 'count')), or F.where(mask, new, x) to replace elements"
        )
    return apply(ops.nonzero, (tensor, "count"), {}), tensor.rank


def _as_tensor(index: Any, x: Any) -> Any:
    """An index as a tensor on the device of another one; of an array a copy, so that programs do not depend on it."""
    if not hasattr(index, "_cell"):
        index = type(x).constant(np.array(_host_array(index)), device=CPU())
    return index if index.device == x.device else index.to(x.device)


def _host_array(index: Any) -> np.ndarray[Any, Any]:
    if isinstance(index, np.ndarray):
        return cast("np.ndarray[Any, Any]", index)
    if hasattr(index, "_host"):
        return index._host()
    return driver.Tensor.from_dlpack(index).to(CPU()).to_numpy()


def _gather_axes(x: TensorValue, blocks: Sequence[TensorValue], plan: _Plan) -> TensorValue:
    """Gathers along some axes.

    Args:
        x: The tensor.
        blocks: Parts of the index vectors, each ``[..., count]``; they broadcast but for the last axis.
        plan: Which axes, and where those of the index vectors are in the result.
    """
    # in a graph they are tensors that stand for its values
    x, blocks = TensorValue(x), [TensorValue(block) for block in blocks]
    if len(blocks) == 1 and plan.axes == (plan.position,):
        return ops.gather(x, ops.squeeze(blocks[0], -1), plan.position)
    shapes = [tuple(block.mlir_type.shape[:-1]) for block in blocks]
    lead = [Dim.from_mlir(dim) for dim in broadcast_shapes("index", shapes)]
    other_axes = [axis for axis in range(x.rank) if axis not in plan.axes]
    parts = [
        ops.broadcast_to(ops.cast(block, DType.int64), [*lead, block.shape[-1]])
        for block in blocks
        if block.shape[-1] != 0
    ]
    moved = ops.permute(x, [*plan.axes, *other_axes])
    if parts:
        vectors = parts[0] if len(parts) == 1 else ops.concat(parts, -1)
        taken = ops.gather_nd(moved, vectors)
    else:
        taken = ops.broadcast_to(moved, [*lead, *x.shape])
    before = range(len(lead), len(lead) + plan.position)
    order = [*before, *range(len(lead)), *range(len(lead) + plan.position, taken.rank)]
    return ops.permute(taken, order)


def array_indices(indices: tuple[Any, ...]) -> tuple[Any, ...]:
    """Indices with their tensors and arrays as arrays of NumPy, for which they are computed."""
    return tuple([_host_array(index) if _is_array(index) else index for index in indices])
