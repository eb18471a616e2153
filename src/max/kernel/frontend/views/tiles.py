"""Tiles of the kernel language at compile time: arrays of registers, indexed by numbers that are known when they are
unrolled.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any: these functions check their types

from __future__ import annotations

import math
from typing import Any

from max._dataclass import dataclass
from max.kernel.errors import KernelIndexError, KernelValueError
from max.kernel.frontend.conversions import as_index, coerce
from max.kernel.frontend.raising import guard
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.values import Index, Runtime, describe
from max.kernel.frontend.views.views import checked_width
from max.kernel.ir.nodes import Atom
from max.kernel.language.limits import MAX_TILES_BYTES, tile_error
from max.kernel.types import (
    BOOL,
    Type,
    scalar,
    scalar_type,
    vector,
)


@dataclass(frozen=True, slots=True, eq=False)
class Tile(Runtime):
    """An array of values on the worker's stack, or in registers if all indices are known at compile time."""

    slot: int
    type: Type
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"a tile {list(self.shape)} of {self.type.describe()}"


def make_tile(fe: Frontend, dtype: Any, shape: Any, width: Any = None, fill: Any = None) -> Tile:
    """``k.tile(dtype, shape, width=None, fill=None)``."""
    sizes = (shape,) if isinstance(shape, int) else shape
    if not isinstance(sizes, tuple) or not all(isinstance(s, int) and s >= 0 for s in sizes):
        fe.fail(f"the shape of a tile is known at compile time, got {describe(shape)}")
    dtype = scalar_type(dtype)
    type = scalar(dtype) if width is None else vector(dtype, checked_width(fe, width))
    element_bytes = dtype.size * max(type.width, 1)
    if (error := tile_error(sizes, element_bytes)) is not None:
        fe.fail(error, KernelValueError)
    count = math.prod(sizes)
    fe.b.tile_bytes += count * element_bytes
    if fe.b.tile_bytes > MAX_TILES_BYTES:
        fe.fail(
            f"the tiles of the kernel have more than {MAX_TILES_BYTES} bytes; ctx.scratch gives a worker more memory",
            KernelValueError,
        )
    tile = Tile(fe.b.alloc(type, count), type, sizes)
    if fill is not None:
        value = coerce(fe, fill, type)
        for k in range(count):
            fe.b.assign(tile.slot, value, k)
    return tile


def _tile_index(fe: Frontend, tile: Tile, index: Any) -> Index:
    """The flat index of an element of a tile, checked against its shape."""
    indices = index if isinstance(index, tuple) else (index,)
    if len(indices) != len(tile.shape):
        fe.fail(f"{tile} takes {len(tile.shape)} indices, got {len(indices)}", KernelIndexError)
    flat: Index = 0
    for i, size in zip(indices, tile.shape, strict=True):
        i = as_index(fe, i)
        if isinstance(i, int) and not 0 <= i < size:
            fe.fail(f"index {i} out of range for {tile}", KernelIndexError)
        if fe.check and not isinstance(i, int):
            bound = fe.b.index(size)
            guard(
                fe,
                # unsigned: a negative index is a large one
                fe.b.op("ult", (i, bound), BOOL),
                "IndexError",
                "tile: index {} is out of range for size {}",
                (i, bound),
            )
        flat = fe.b.add(fe.b.mul(flat, size), i)  # row-major
    return flat


def tile_get(fe: Frontend, tile: Tile, index: Any) -> Atom:
    """``t[i, j]``."""
    return fe.b.read(tile.slot, tile.type, _tile_index(fe, tile, index))


def tile_set(fe: Frontend, tile: Tile, index: Any, value: Any) -> None:
    """``t[i, j] = v``."""
    fe.b.assign(tile.slot, coerce(fe, value, tile.type), _tile_index(fe, tile, index))
