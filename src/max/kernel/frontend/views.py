"""Tensor views at compile time, and the IR that their methods emit."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any: these functions check their types

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from max._dataclass import dataclass
from max.kernel.errors import KernelIndexError, KernelTypeError, KernelValueError
from max.kernel.frontend.arithmetic import binary, truth
from max.kernel.frontend.conversions import as_index, cast, coerce, literal, splat
from max.kernel.frontend.memory import (
    Memory,
    check_bytes,
    check_lanes,
    chosen_memory,
    scratch_memory,
)
from max.kernel.frontend.raising import guard
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.values import Index, Runtime, describe, is_number
from max.kernel.ir.nodes import Atom, Const, Ref
from max.kernel.types import (
    BOOL,
    INDEX,
    POINTER,
    ScalarType,
    Type,
    scalar,
    scalar_type,
    u8,
    vector,
)

MAX_WIDTH = 4096


@dataclass(frozen=True, slots=True, eq=False)
class View(Runtime):
    """A tensor view; static sizes and strides are ints."""

    base: Atom
    dtype: ScalarType
    shape: tuple[Index, ...]
    strides: tuple[Index, ...]
    name: str
    writable: bool
    memory: Memory | None = None
    """The memory that accesses must stay in, checked at the second level of ``MAX_KERNEL_CHECK``."""

    @property
    def rank(self) -> int:
        return len(self.shape)

    def __str__(self) -> str:
        return f"the view {self.name} ({self.dtype.name}, rank {self.rank})"


def contiguous_strides(fe: Frontend, shape: tuple[Index, ...]) -> tuple[Index, ...]:
    """Row-major strides in elements."""
    strides: list[Index] = []
    step: Index = 1
    for size in reversed(shape):
        strides.append(step)
        step = fe.b.mul(step, size)
    return tuple(reversed(strides))


def product(fe: Frontend, shape: tuple[Index, ...]) -> Index:
    """The number of elements of a shape."""
    total: Index = 1
    for size in shape:
        total = fe.b.mul(total, size)
    return total


def is_contiguous(fe: Frontend, view: View) -> bool:
    """Whether the view is known to be row-major without gaps; strides of axes of size 1 are ignored."""
    expected = contiguous_strides(fe, view.shape)
    return all(
        a is b or a == b or n == 1
        for a, b, n in zip(view.strides, expected, view.shape, strict=True)
    )


def address(fe: Frontend, view: View, indices: tuple[Any, ...]) -> Atom:
    """The address of an element. Adds the terms of outer loops first, so that their sum can leave the inner loops."""
    terms: list[tuple[int, Index]] = []
    constant = 0
    for index, stride in zip(indices, view.strides, strict=False):
        index = as_index(fe, index)
        term = fe.b.mul(index, stride)
        if isinstance(term, int):
            constant += term
        else:
            terms.append((term.level if isinstance(term, Ref) else 0, term))
    pointer = view.base
    for _, term in sorted(terms, key=lambda t: t[0]):
        pointer = fe.b.gep(pointer, term, view.dtype)
    return fe.b.gep(pointer, constant, view.dtype)


def check_indices(
    fe: Frontend,
    view: View,
    indices: tuple[Any, ...],
    width: int = 0,
    axis: int = -1,
    mask: Atom | None = None,
) -> None:
    """Checks the range of indices: of known ones now, of others at run time if ``MAX_KERNEL_CHECK`` is set."""
    axis %= max(view.rank, 1)
    for k, (index, size) in enumerate(zip(indices, view.shape, strict=False)):
        if index is None:  # a slice, which an axis of size 0 allows
            continue
        index = as_index(fe, index)
        lanes = width if k == axis and width and mask is None else 1
        if isinstance(index, int):
            if index < 0 or (isinstance(size, int) and mask is None and index + lanes > size):
                place = f"index {index}" if lanes == 1 else f"lanes {index} … {index + lanes - 1}"
                fe.fail(
                    f"{view.name}: {place} out of range for axis {k} of size {_shown(size)}",
                    KernelIndexError,
                )
            if isinstance(size, int) and mask is None:
                continue
        if not fe.check or (k == axis and mask is not None):
            continue
        last = fe.b.index(fe.b.add(index, lanes - 1))
        bound = fe.b.index(size)
        inside = fe.b.op("ult", (last, bound), BOOL)
        text = f"{view.name}: index {{}} is out of range for axis {k} of size {{}}"
        guard(fe, inside, "IndexError", text, (last, bound))
    if fe.check and mask is not None:
        _check_masked(fe, view, indices[axis], axis, width, mask)


def _check_masked(fe: Frontend, view: View, index: Any, axis: int, width: int, mask: Atom) -> None:
    lanes = vector(INDEX.dtype, width)
    first = splat(fe, fe.b.index(as_index(fe, index)), width)
    position = fe.b.op("add", (first, fe.b.const(tuple(range(width)), lanes)), lanes)
    size = fe.b.index(view.shape[axis])
    outside = fe.b.op("uge", (position, splat(fe, size, width)), vector(BOOL.dtype, width))
    bad = fe.b.op("any", (fe.b.op("and", (outside, mask), outside.type),), BOOL)
    text = f"{view.name}: lanes from index {{}} are out of range for axis {axis} of size {{}}"
    guard(
        fe,
        fe.b.op("not", (bad,), BOOL),
        "IndexError",
        text,
        (fe.b.index(as_index(fe, index)), size),
    )


def _shown(size: Index) -> str:
    return str(size) if isinstance(size, int) else "known at run time"


def checked_width(fe: Frontend, width: Any) -> int:
    """Checks and returns a number of lanes."""
    if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= MAX_WIDTH:
        type_text = describe(width)
        fe.fail(f"width is an integer in [1, {MAX_WIDTH}] known at compile time, got {type_text}")
    return width


def as_mask(fe: Frontend, mask: Any, width: int) -> Atom | None:
    """Converts a mask argument to ``SIMD[bool, width]``, or None for all lanes; a bool applies to all lanes."""
    if mask is None:
        return None
    if isinstance(mask, bool):
        return None if mask else fe.b.const(False, vector(BOOL.dtype, width))
    if not isinstance(mask, (Ref, Const)) or mask.type.dtype is not BOOL.dtype:
        fe.fail(f"mask is None or SIMD[bool, {width}], got {describe(mask)}")
    return coerce(fe, mask, vector(BOOL.dtype, width))


def _full_indices(
    fe: Frontend, view: View, indices: tuple[Any, ...], method: str
) -> tuple[Any, ...]:
    if len(indices) == 1 and isinstance(indices[0], tuple):
        indices = indices[0]
    if len(indices) != view.rank:
        fe.fail(
            f"{view.name}.{method} takes {view.rank} indices, got {len(indices)}", KernelIndexError
        )
    return indices


def _axis(fe: Frontend, view: View, axis: Any) -> int:
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
    check_lanes(fe, memory, pointer, offsets, value.type.dtype.size, mask, "write")
    args = (pointer, offsets, value) if mask is None else (pointer, offsets, value, mask)
    fe.b.effect("scatter", args)


def _writable(fe: Frontend, view: View) -> None:
    if not view.writable:
        fe.fail(f"{view.name} is a k.Input and cannot be written; declare it k.Output or k.InOut")


def _lane_indices(fe: Frontend, view: View, indices: Any, method: str) -> Atom:
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
    lanes = cast(fe, indices, INDEX.dtype)
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


def reshape(fe: Frontend, view: View, *shape: Any) -> View:
    """``x.reshape(…)``: the same elements of a contiguous view with other sizes, one of which may be -1."""
    if len(shape) == 1 and isinstance(shape[0], tuple):
        shape = shape[0]
    if not is_contiguous(fe, view):
        fe.fail(
            f"{view.name}.reshape takes a contiguous view; this one has strides", KernelTypeError
        )
    sizes = [as_index(fe, s) for s in shape]
    total = product(fe, view.shape)
    unknown = [k for k, s in enumerate(sizes) if isinstance(s, int) and s == -1]
    if len(unknown) > 1:
        fe.fail("reshape: only one size may be -1", KernelValueError)
    if unknown:
        others = product(fe, tuple(s for k, s in enumerate(sizes) if k not in unknown))
        sizes[unknown[0]] = binary(fe, "floordiv", total, others)
    new_total = product(fe, tuple(sizes))
    if isinstance(total, int) and isinstance(new_total, int) and total != new_total:
        fe.fail(
            f"{view.name}.reshape: {total} elements do not fill {list(shape)}", KernelValueError
        )
    if (
        fe.check
        and not (isinstance(total, int) and isinstance(new_total, int))
        and total is not new_total
    ):
        a, b = fe.b.index(total), fe.b.index(new_total)
        guard(
            fe,
            fe.b.op("eq", (a, b), BOOL),
            "ValueError",
            f"{view.name}.reshape: {{}} elements do not fill {{}}",
            (a, b),
        )
    return replace(view, shape=tuple(sizes), strides=contiguous_strides(fe, tuple(sizes)))


def reinterpret(fe: Frontend, view: View, dtype: Any) -> View:
    """``x.view(dtype)``: the same memory with another element type; the last axis grows or shrinks."""
    dtype = scalar_type(dtype)
    if dtype.size == view.dtype.size:
        return replace(view, dtype=dtype)
    if view.rank == 0 or not is_contiguous(fe, view):
        fe.fail(f"{view.name}.view takes a contiguous view with at least one axis")
    if view.dtype.size > dtype.size:
        last = fe.b.mul(view.shape[-1], view.dtype.size // dtype.size)
    else:
        last = binary(fe, "floordiv", view.shape[-1], dtype.size // view.dtype.size)
    shape = (*view.shape[:-1], last)
    return replace(view, dtype=dtype, shape=shape, strides=contiguous_strides(fe, shape))


def transpose(fe: Frontend, view: View, *axes: Any) -> View:
    """``x.transpose(1, 0)``: the same memory with the axes in another order."""
    if len(axes) == 1 and isinstance(axes[0], tuple):
        axes = axes[0]
    if sorted(axes) != list(range(view.rank)):
        fe.fail(
            f"transpose takes the axes 0 … {view.rank - 1} in some order, got {list(axes)}",
            KernelIndexError,
        )
    return replace(
        view, shape=tuple(view.shape[a] for a in axes), strides=tuple(view.strides[a] for a in axes)
    )


def subscript(fe: Frontend, view: View, index: Any) -> Any:
    """``x[i, j]``: an element, or with fewer indices or with slices a view."""
    indices = index if isinstance(index, tuple) else (index,)
    if len(indices) > view.rank:
        fe.fail(f"{view.name} has {view.rank} axes, got {len(indices)} indices", KernelIndexError)
    if len(indices) == view.rank and not any(isinstance(i, slice) for i in indices):
        return load(fe, view, *indices)
    return subview(fe, view, indices)


def subview(fe: Frontend, view: View, indices: tuple[Any, ...]) -> View:
    """The part of a view at leading indices and slices."""
    shape: list[Index] = []
    strides: list[Index] = []
    starts: list[Any] = []
    for k, index in enumerate(indices):
        if not isinstance(index, slice):
            starts.append(index)
            continue
        if index.step not in (None, 1):
            fe.fail(f"{view.name}: slices have step 1, got {describe(index.step)}")
        start: Index = 0 if index.start is None else as_index(fe, index.start)
        stop: Index = view.shape[k] if index.stop is None else as_index(fe, index.stop)
        starts.append(start)
        shape.append(fe.b.sub(stop, start))
        strides.append(view.strides[k])
    num_indices = len(indices)
    check_indices(fe, view, tuple(None if isinstance(i, slice) else i for i in indices))
    pointer = address(fe, view, tuple(starts))
    return replace(
        view,
        base=pointer,
        shape=(*shape, *view.shape[num_indices:]),
        strides=(*strides, *view.strides[num_indices:]),
    )


def select_view(fe: Frontend, cond: Any, a: View, b: View) -> View:
    """``k.select(cond, x, y)`` of views of equal element type, rank and layout; their sizes may differ."""
    cond = truth(fe, cond)
    if (
        a.dtype is not b.dtype
        or a.rank != b.rank
        or not (is_contiguous(fe, a) and is_contiguous(fe, b))
    ):
        fe.fail(f"k.select takes contiguous views of one element type and rank, got {a} and {b}")
    if not isinstance(cond, Ref):
        return a if cond else b

    def chosen(x: Index, y: Index) -> Index:
        if x is y or (isinstance(x, int) and x == y):
            return x
        return fe.b.op("select", (cond, fe.b.index(x), fe.b.index(y)), INDEX)

    shape = tuple(chosen(x, y) for x, y in zip(a.shape, b.shape, strict=True))
    base = fe.b.op("select", (cond, a.base, b.base), POINTER)
    writable = a.writable and b.writable
    memory = chosen_memory(fe, cond, a.memory, b.memory)
    return View(base, a.dtype, shape, contiguous_strides(fe, shape), a.name, writable, memory)


def assign(fe: Frontend, view: View, index: Any, value: Any) -> None:
    """``x[i, j] = v``."""
    indices = index if isinstance(index, tuple) else (index,)
    if len(indices) != view.rank or any(isinstance(i, slice) for i in indices):
        fe.fail(
            f"{view.name}[…] = … takes {view.rank} indices, got {len(indices)}", KernelIndexError
        )
    if isinstance(value, (Ref, Const)) and value.type.width:
        fe.fail(
            f"{view.name}[…] = … takes a scalar, got {describe(value)}; use {view.name}.store(…, value=v)"
        )
    store(fe, view, *indices, value=value)


def attribute(fe: Frontend, view: View, name: str) -> Any:
    """An attribute such as ``x.shape``; None if views have no such attribute."""
    if name == "shape":
        return view.shape
    if name == "strides":
        return view.strides
    if name == "rank":
        return view.rank
    if name == "dtype":
        return view.dtype
    if name == "size":
        return product(fe, view.shape)
    if name == "is_contiguous":
        return is_contiguous(fe, view)
    return None


VIEW_METHODS: dict[str, Callable[..., Any]] = {
    "load": load,
    "store": store,
    "gather": gather,
    "scatter": scatter,
    "atomic_add": atomic_add,
    "prefetch": prefetch,
    "reshape": reshape,
    "view": reinterpret,
    "transpose": transpose,
}


def scratch_view(
    fe: Frontend, pointer: Atom, offset: int, dtype: ScalarType, shape: tuple[int, ...]
) -> View:
    """A view of the worker's scratch memory."""
    base = fe.b.gep(pointer, offset, u8)
    memory = None
    if fe.check >= 2:
        memory = scratch_memory(fe, base, math.prod(shape) * dtype.size)
    return View(base, dtype, shape, contiguous_strides(fe, shape), "scratch", True, memory)
