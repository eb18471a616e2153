"""The methods, subscripts and attributes of tensor views in kernels, and the views that they return."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any: these functions check their types

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from max.kernel.errors import KernelIndexError, KernelTypeError, KernelValueError
from max.kernel.frontend.arithmetic import binary, truth
from max.kernel.frontend.conversions import as_index
from max.kernel.frontend.raising import guard
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.values import Index, describe
from max.kernel.frontend.views.elements import (
    atomic_add,
    gather,
    load,
    prefetch,
    scatter,
    store,
)
from max.kernel.frontend.views.memory import chosen_memory
from max.kernel.frontend.views.views import (
    View,
    address,
    check_indices,
    contiguous_strides,
    is_contiguous,
    product,
)
from max.kernel.ir.nodes import Const, Ref
from max.kernel.types import BOOL, INDEX, POINTER, scalar_type

__all__ = ["VIEW_METHODS", "assign", "attribute", "select_view", "subscript"]


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
    # products of run-time sizes may be equal without being the same value
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
        return replace(view, dtype=dtype)  # strides are in elements: they stay valid
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
    # slices are not checked here: an empty one may start at the end of its axis
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
        # strides of contiguous views follow from the selected sizes
        or not (is_contiguous(fe, a) and is_contiguous(fe, b))
    ):
        fe.fail(f"k.select takes contiguous views of one element type and rank, got {a} and {b}")
    if not isinstance(cond, Ref):
        return a if cond else b

    def select_index(x: Index, y: Index) -> Index:
        if x is y or (isinstance(x, int) and x == y):
            return x
        return fe.b.op("select", (cond, fe.b.index(x), fe.b.index(y)), INDEX)

    shape = tuple(select_index(x, y) for x, y in zip(a.shape, b.shape, strict=True))
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
