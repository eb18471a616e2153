"""The IR of loads and stores: the methods of tensor views that access elements."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any: these functions check their types

from __future__ import annotations

from typing import Any

from max.kernel.errors import KernelIndexError
from max.kernel.frontend.conversions import cast, coerce, literal, splat
from max.kernel.frontend.raising import guard
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.values import Index, describe, is_number
from max.kernel.frontend.views.memory import Memory, check_bytes, check_lanes
from max.kernel.frontend.views.views import (
    View,
    address,
    as_mask,
    check_indices,
    checked_width,
)
from max.kernel.ir.nodes import Atom, Const, Ref
from max.kernel.types import BOOL, INDEX, Type, scalar, vector

__all__ = ["atomic_add", "gather", "load", "prefetch", "scatter", "store"]


def _full_indices(
    fe: Frontend, view: View, indices: tuple[Any, ...], method: str
) -> tuple[Any, ...]:
    """One index per axis, given as arguments or as a tuple."""
    if len(indices) == 1 and isinstance(indices[0], tuple):
        indices = indices[0]
    if len(indices) != view.rank:
        fe.fail(
            f"{view.name}.{method} takes {view.rank} indices, got {len(indices)}", KernelIndexError
        )
    return indices


def _axis(fe: Frontend, view: View, axis: Any) -> int:
    """An axis as a number from 0."""
    if not isinstance(axis, int) or not -view.rank <= axis < view.rank:
        fe.fail(
            f"axis is an integer in [{-view.rank}, {view.rank}), got {describe(axis)}",
            KernelIndexError,
        )
    return axis % view.rank


def _iota(fe: Frontend, width: int) -> Atom:
    return fe.b.const(tuple(range(width)), vector(INDEX.dtype, width))


def _lane_offsets(fe: Frontend, stride: Index, width: int) -> Atom:
    iota = _iota(fe, width)
    return fe.b.op("mul", (iota, splat(fe, fe.b.index(stride), width)), iota.type, "nsw")


def load(
    fe: Frontend,
    view: View,
    *indices: Any,
    width: Any = None,
    mask: Any = None,
    axis: Any = -1,
    other: Any = 0,
) -> Atom:
    """``x.load(i, j, width=16, mask=None)``."""
    indices = _full_indices(fe, view, indices, "load")
    if width is None:
        check_indices(fe, view, indices)
        pointer = address(fe, view, indices)
        check_bytes(fe, view.memory, pointer, view.dtype.size, "read")
        return fe.b.op("load", (pointer,), scalar(view.dtype))
    width = checked_width(fe, width)
    axis = _axis(fe, view, axis)
    type = vector(view.dtype, width)
    mask = as_mask(fe, mask, width)
    check_indices(fe, view, indices, width, axis, mask)
    pointer = address(fe, view, indices)
    # lanes that are not adjacent are gathered, each from its own address
    stride = view.strides[axis]
    if not (isinstance(stride, int) and stride == 1):
        offsets = _lane_offsets(fe, stride, width)
        return _gather_lanes(fe, view.memory, pointer, offsets, type, mask, other)
    if mask is None:
        check_bytes(fe, view.memory, pointer, width * view.dtype.size, "read")
        return fe.b.op("load", (pointer,), type)
    check_lanes(fe, view.memory, pointer, _iota(fe, width), view.dtype.size, mask, "read")
    return fe.b.op("masked_load", (pointer, mask, coerce(fe, other, type)), type)


def _gather_lanes(
    fe: Frontend,
    memory: Memory | None,
    pointer: Atom,
    offsets: Atom,
    type: Type,
    mask: Atom | None,
    other: Any,
) -> Atom:
    """Loads the lanes at the offsets; lanes that the mask excludes are `other`."""
    check_lanes(fe, memory, pointer, offsets, type.dtype.size, mask, "read")
    if mask is None:
        return fe.b.op("gather", (pointer, offsets), type)
    return fe.b.op("masked_gather", (pointer, offsets, mask, coerce(fe, other, type)), type)


def store(
    fe: Frontend, view: View, *indices: Any, value: Any, mask: Any = None, axis: Any = -1
) -> None:
    """``x.store(i, j, value=v, mask=None)``."""
    indices = _full_indices(fe, view, indices, "store")
    _writable(fe, view)
    if is_number(value):
        value = coerce(fe, value, scalar(view.dtype))
    if not isinstance(value, (Ref, Const)):
        fe.fail(f"{view.name}.store takes a scalar or a vector, got {describe(value)}")
    value = cast(fe, value, view.dtype)
    width = value.type.width
    if width == 0:
        if mask is not None:
            fe.fail(f"{view.name}.store: a mask goes with a vector, got {describe(value)}")
        check_indices(fe, view, indices)
        pointer = address(fe, view, indices)
        check_bytes(fe, view.memory, pointer, view.dtype.size, "write")
        fe.b.store(pointer, value)
        return
    axis = _axis(fe, view, axis)
    mask = as_mask(fe, mask, width)
    check_indices(fe, view, indices, width, axis, mask)
    pointer = address(fe, view, indices)
    stride = view.strides[axis]
    if isinstance(stride, int) and stride == 1:
        if mask is None:
            check_bytes(fe, view.memory, pointer, width * view.dtype.size, "write")
        else:
            check_lanes(fe, view.memory, pointer, _iota(fe, width), view.dtype.size, mask, "write")
        fe.b.store(pointer, value, mask)
    else:
        _scatter_lanes(fe, view.memory, pointer, _lane_offsets(fe, stride, width), value, mask)


def _scatter_lanes(
    fe: Frontend,
    memory: Memory | None,
    pointer: Atom,
    offsets: Atom,
    value: Atom,
    mask: Atom | None,
) -> None:
    """Stores the lanes at the offsets, except those that the mask excludes."""
    check_lanes(fe, memory, pointer, offsets, value.type.dtype.size, mask, "write")
    args = (pointer, offsets, value) if mask is None else (pointer, offsets, value, mask)
    fe.b.effect("scatter", args)


def _writable(fe: Frontend, view: View) -> None:
    if not view.writable:
        fe.fail(f"{view.name} is a k.Input and cannot be written; declare it k.Output or k.InOut")


def _lane_indices(fe: Frontend, view: View, indices: Any, method: str) -> Atom:
    """The offsets of a vector of indices of a view of rank 1, in elements."""
    if view.rank != 1:
        fe.fail(
            f"{view.name}.{method} takes a view of rank 1, got rank {view.rank}; index the leading axes first"
        )
    if (
        not isinstance(indices, (Ref, Const))
        or not indices.type.is_vector
        or not indices.type.dtype.is_integer
    ):
        fe.fail(f"{view.name}.{method} takes a vector of integers, got {describe(indices)}")
    # 64-bit offsets: narrow lanes could overflow when scaled by the stride
    lanes = cast(fe, indices, INDEX.dtype)
    # one test of all lanes: an unsigned comparison finds negative indices too
    if fe.check:
        bool_lanes = lanes.type.with_dtype(BOOL.dtype)
        size = splat(fe, fe.b.index(view.shape[0]), lanes.type.width)
        outside = fe.b.op("uge", (lanes, size), bool_lanes)
        inside = fe.b.op("not", (fe.b.op("any", (outside,), BOOL),), BOOL)
        guard(
            fe,
            inside,
            "IndexError",
            f"{view.name}.{method}: an index is out of range for size {{}}",
            (fe.b.index(view.shape[0]),),
        )
    stride = view.strides[0]
    if isinstance(stride, int) and stride == 1:
        return lanes
    return fe.b.op(
        "mul", (lanes, splat(fe, fe.b.index(stride), lanes.type.width)), lanes.type, "nsw"
    )


def gather(fe: Frontend, view: View, indices: Any, mask: Any = None, other: Any = 0) -> Atom:
    """``x.gather(indices)``: loads one element per lane from a view of rank 1."""
    if mask is not None and isinstance(indices, (Ref, Const)) and indices.type.is_vector:
        mask = as_mask(fe, mask, indices.type.width)
        # lanes that are not read may have any index: 0 passes the check
        if mask is not None and fe.check:
            indices = fe.b.op("select", (mask, indices, literal(fe, 0, indices.type)), indices.type)
    offsets = _lane_indices(fe, view, indices, "gather")
    type = vector(view.dtype, offsets.type.width)
    mask = as_mask(fe, mask, type.width)
    return _gather_lanes(fe, view.memory, view.base, offsets, type, mask, other)


def scatter(fe: Frontend, view: View, indices: Any, value: Any, mask: Any = None) -> None:
    """``x.scatter(indices, value)``: stores one element per lane; for equal indices the last lane's value stays."""
    _writable(fe, view)
    if mask is not None and isinstance(indices, (Ref, Const)) and indices.type.is_vector:
        mask = as_mask(fe, mask, indices.type.width)
        # as in `gather`
        if mask is not None and fe.check:
            indices = fe.b.op("select", (mask, indices, literal(fe, 0, indices.type)), indices.type)
    offsets = _lane_indices(fe, view, indices, "scatter")
    value = coerce(fe, value, vector(view.dtype, offsets.type.width))
    mask = as_mask(fe, mask, offsets.type.width)
    _scatter_lanes(fe, view.memory, view.base, offsets, value, mask)


def atomic_add(fe: Frontend, view: View, *indices: Any, value: Any) -> Atom:
    """``x.atomic_add(i, value=v)``: adds atomically to an element; returns the value before."""
    indices = _full_indices(fe, view, indices, "atomic_add")
    _writable(fe, view)
    # narrow floats have no arithmetic, and a sum of bools is no bool
    if view.dtype.kind == "b" or view.dtype.is_narrow_float:
        fe.fail(f"{view.name}.atomic_add takes integers, f32 and f64, got {view.dtype.name}")
    check_indices(fe, view, indices)
    pointer = address(fe, view, indices)
    check_bytes(fe, view.memory, pointer, view.dtype.size, "write")
    return fe.b.op(
        "atomic_add",
        (pointer, coerce(fe, value, scalar(view.dtype))),
        scalar(view.dtype),
    )


def prefetch(
    fe: Frontend, view: View, *indices: Any, write: Any = False, locality: Any = 3
) -> None:
    """``x.prefetch(i, j)``: prefetches the cache line of an element; indices out of range are allowed."""
    indices = _full_indices(fe, view, indices, "prefetch")
    if locality not in (0, 1, 2, 3):
        fe.fail(f"locality is 0 (once) … 3 (keep in all caches), got {describe(locality)}")
    fe.b.effect("prefetch", (address(fe, view, indices),), (int(bool(write)), locality))
