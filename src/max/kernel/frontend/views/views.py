"""Tensor views at compile time: layout, addresses of elements, checks of indices."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any: these functions check their types

from __future__ import annotations

import math
from typing import Any

from max._dataclass import dataclass
from max.kernel.errors import KernelIndexError
from max.kernel.frontend.conversions import as_index, coerce, splat
from max.kernel.frontend.raising import guard
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.values import Index, Runtime, describe
from max.kernel.frontend.views.memory import (
    Memory,
    scratch_memory,
)
from max.kernel.ir.nodes import Atom, Const, Ref
from max.kernel.language.limits import width_error
from max.kernel.types import (
    BOOL,
    INDEX,
    ScalarType,
    u8,
    vector,
)


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
        # a vector covers `width` elements of its axis; masked lanes are checked below
        lanes = width if k == axis and width and mask is None else 1
        if isinstance(index, int):
            if index < 0 or (isinstance(size, int) and mask is None and index + lanes > size):
                place = f"index {index}" if lanes == 1 else f"lanes {index} … {index + lanes - 1}"
                fe.fail(
                    f"{view.name}: {place} out of range for axis {k} of size {_index_text(size)}",
                    KernelIndexError,
                )
            # known to be inside
            if isinstance(size, int) and mask is None:
                continue
        if not fe.check or (k == axis and mask is not None):
            continue
        last = fe.b.index(fe.b.add(index, lanes - 1))
        bound = fe.b.index(size)
        # unsigned: a negative index is a large one
        inside = fe.b.op("ult", (last, bound), BOOL)
        text = f"{view.name}: index {{}} is out of range for axis {k} of size {{}}"
        guard(fe, inside, "IndexError", text, (last, bound))
    if fe.check and mask is not None:
        _check_masked(fe, view, indices[axis], axis, width, mask)


def _check_masked(fe: Frontend, view: View, index: Any, axis: int, width: int, mask: Atom) -> None:
    """Checks at run time that all lanes of a masked access that the mask selects are inside the axis."""
    lanes = vector(INDEX.dtype, width)
    first = splat(fe, fe.b.index(as_index(fe, index)), width)
    position = fe.b.op("add", (first, fe.b.const(tuple(range(width)), lanes)), lanes)
    size = fe.b.index(view.shape[axis])
    outside = fe.b.op("uge", (position, splat(fe, size, width)), vector(BOOL.dtype, width))
    out_of_bounds = fe.b.op("any", (fe.b.op("and", (outside, mask), outside.type),), BOOL)
    text = f"{view.name}: lanes from index {{}} are out of range for axis {axis} of size {{}}"
    guard(
        fe,
        fe.b.op("not", (out_of_bounds,), BOOL),
        "IndexError",
        text,
        (fe.b.index(as_index(fe, index)), size),
    )


def _index_text(size: Index) -> str:
    return str(size) if isinstance(size, int) else "known at run time"


def checked_width(fe: Frontend, width: Any) -> int:
    """Checks and returns a number of lanes."""
    if (error := width_error(width, describe(width))) is not None:
        fe.fail(error)
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


def scratch_view(
    fe: Frontend, pointer: Atom, offset: int, dtype: ScalarType, shape: tuple[int, ...]
) -> View:
    """A view of the worker's scratch memory."""
    base = fe.b.gep(pointer, offset, u8)
    memory = None
    if fe.check >= 2:
        memory = scratch_memory(fe, base, math.prod(shape) * dtype.size)
    return View(base, dtype, shape, contiguous_strides(fe, shape), "scratch", True, memory)
