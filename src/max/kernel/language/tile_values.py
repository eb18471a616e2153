"""Matrix tiles: their shapes and instructions, and their semantics in plain Python."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any: these functions check their types

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from max.kernel.types import ScalarType, bf16, i8, scalar_type, u8

MAX_TILES, MAX_ROWS, MAX_BYTES = 8, 16, 64
#: The instruction that multiplies elements of two types.
PRODUCTS: dict[tuple[ScalarType, ScalarType], str] = {
    (bf16, bf16): "tdpbf16ps",
    (i8, i8): "tdpbssd",
    (i8, u8): "tdpbsud",
    (u8, i8): "tdpbusd",
    (u8, u8): "tdpbuud",
}

Shapes = tuple[tuple[int, int], ...]


def tile_shapes(shapes: Any) -> Shapes:
    """Checks the shapes of matrix tiles.

    Args:
        shapes: For each tile the rows and the bytes of a row.

    Raises:
        ValueError: There are more than 8 tiles, or a tile does not have 1 … 16 rows of 4, 8, … 64 bytes.
    """
    if not isinstance(shapes, Sequence) or not 1 <= len(shapes) <= MAX_TILES:
        raise ValueError(
            f"k.matrix_tiles takes the shapes of 1 … {MAX_TILES} tiles, got {shapes!r}"
        )
    for n, shape in enumerate(shapes):
        fits = (
            isinstance(shape, Sequence)
            and len(shape) == 2
            and all(isinstance(s, int) and not isinstance(s, bool) for s in shape)
            and 1 <= shape[0] <= MAX_ROWS
            and 4 <= shape[1] <= MAX_BYTES
            and shape[1] % 4 == 0
        )
        if not fits:
            raise ValueError(
                f"matrix tile {n} has (rows, bytes a row), rows in 1 … {MAX_ROWS} and bytes in 4, 8, … {MAX_BYTES}, "
                f"got {shape!r}"
            )
    return tuple((shape[0], shape[1]) for shape in shapes)


def check_tile(shapes: Shapes, tile: Any) -> tuple[int, int]:
    """The shape of a tile.

    Raises:
        IndexError: There is no such tile.
    """
    if isinstance(tile, bool) or not isinstance(tile, int) or not 0 <= tile < len(shapes):
        raise IndexError(f"there are matrix tiles 0 … {len(shapes) - 1}, got {tile!r}")
    return shapes[tile]


def check_elements(shape: tuple[int, int], dtype: ScalarType) -> int:
    """How many elements of a type fill a row of a tile.

    Raises:
        TypeError: They do not fill it.
    """
    if shape[1] % dtype.size or dtype.kind == "b":
        raise TypeError(f"a row of {shape[1]} bytes does not hold whole elements of {dtype.name}")
    return shape[1] // dtype.size


def check_product(shapes: Shapes, c: Any, a: Any, b: Any, left: Any, right: Any) -> str:
    """The instruction that adds the product of two tiles to a third one.

    Raises:
        IndexError: There is no such tile.
        TypeError: No instruction multiplies elements of these types.
        ValueError: The shapes do not fit together.
    """
    left = scalar_type(left)
    right = left if right is None else scalar_type(right)
    if (left, right) not in PRODUCTS:
        supported = ", ".join(f"{x.name} by {y.name}" for x, y in PRODUCTS)
        raise TypeError(f"matrix tiles multiply {supported}; got {left.name} by {right.name}")
    # (rows, bytes of a row) of each
    (m, n), (rows, depth), (steps, columns) = (check_tile(shapes, t) for t in (c, a, b))
    if rows != m or columns != n or depth != 4 * steps:
        raise ValueError(
            f"tiles c of {m} rows of {n} bytes, a of {rows} of {depth} and b of {steps} of {columns} do not fit: "
            f"a has the rows of c, b its bytes, and a row of b goes with 4 bytes of a"
        )
    return PRODUCTS[left, right]


class MatrixTiles:
    """``k.matrix_tiles`` in plain Python: the tiles of one worker.

    Args:
        shapes: For each tile the rows and the bytes of a row.
    """

    def __init__(self, shapes: Any) -> None:
        self.shapes = tile_shapes(shapes)
        self._tiles: list[np.ndarray[Any, np.dtype[np.uint8]]] = []

    def configure(self) -> None:
        """Starts the use of the tiles, which are zero."""
        self._tiles = [np.zeros(shape, np.uint8) for shape in self.shapes]

    def release(self) -> None:
        """Ends the use of the tiles."""
        self._tiles = []

    def _tile(self, tile: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
        check_tile(self.shapes, tile)
        if not self._tiles:
            raise RuntimeError("matrix tiles are used between configure() and release()")
        return self._tiles[tile]

    def zero(self, tile: int) -> None:
        """Sets a tile to zero."""
        self._tile(tile)[...] = 0

    def _part(self, tile: int, view: Any, indices: tuple[Any, ...], stride: Any) -> Any:
        """The tile, and the part of the view's array that it covers."""
        data = self._tile(tile)
        rows = data.shape[0]
        count = check_elements(self.shapes[tile], view.dtype)
        at = view._indices(indices)
        if stride is None and view.rank < 2:
            raise TypeError(f"{view.name} has no rows; stride= sets their distance")
        if view.strides[-1] != 1 and view.shape[-1] > 1:
            raise TypeError(f"{view.name}: rows of a matrix tile must be contiguous")
        if stride is None:
            for axis, index in enumerate(at):
                view._check(axis, index)
            view._check(view.rank - 2, at[-2] + rows - 1)
            view._check(view.rank - 1, at[-1] + count - 1)
            index = (*at[:-2], slice(at[-2], at[-2] + rows), slice(at[-1], at[-1] + count))
            return data, [view.array[index][r] for r in range(rows)]
        for axis, index in enumerate(at):
            view._check(axis, index)
        row = view.array[at[:-1]]
        starts = [at[-1] + r * int(stride) for r in range(rows)]
        for start in starts:
            view._check(view.rank - 1, start)
            view._check(view.rank - 1, start + count - 1)
        return data, [row[start : start + count] for start in starts]

    def load(self, tile: int, view: Any, *indices: Any, stride: Any = None) -> None:
        """Loads a tile from a view, from the element at ``indices`` on."""
        data, rows = self._part(tile, view, indices, stride)
        for r, row in enumerate(rows):
            data[r] = np.ascontiguousarray(row).view(np.uint8)

    def store(self, tile: int, view: Any, *indices: Any, stride: Any = None) -> None:
        """Stores a tile to a view."""
        view._writable()
        data, rows = self._part(tile, view, indices, stride)
        for r, row in enumerate(rows):
            row[...] = data[r].view(row.dtype)

    def dot(self, c: int, a: int, b: int, left: Any, right: Any = None) -> None:
        """Adds the product of two tiles to a third one."""
        name = check_product(self.shapes, c, a, b, left, right)
        target, x, y = self._tile(c), self._tile(a), self._tile(b)
        with np.errstate(all="ignore"):
            if name == "tdpbf16ps":
                _dot_bf16(target.view(np.float32), x, y)
            else:
                _dot_bytes(target.view(np.int32), x, y, name)


def _dot_bf16(c: Any, a: Any, b: Any) -> None:
    """The sums of first and of second elements of pairs, each rounded once a product, are added to each other and then
    to ``c``.
    """
    left = a.view(bf16.numpy).astype(np.float32).astype(np.float64)  # [rows, 2 * steps]
    right = b.view(bf16.numpy).astype(np.float32).astype(np.float64)
    sums = np.zeros((2, *c.shape), np.float32)
    for k in range(b.shape[0]):
        for i in range(2):
            # b: [steps, 2 * columns], the pair of a column side by side
            product = left[:, 2 * k + i, None] * right[None, k, i::2]
            sums[i] = (sums[i] + product).astype(np.float32)
    c += sums[0] + sums[1]


def _dot_bytes(c: Any, a: Any, b: Any, name: str) -> None:
    left = a.view(np.int8 if name[4] == "s" else np.uint8).astype(np.int32)
    right = b.view(np.int8 if name[5] == "s" else np.uint8).astype(np.int32)
    steps = b.shape[0]
    # [steps, columns, 4]
    quads = right.reshape(steps, -1, 4)
    # [rows, steps, 4] by [steps, columns, 4]
    c += np.einsum("mki,kni->mn", left.reshape(-1, steps, 4), quads).astype(np.int32)


__all__ = ["MatrixTiles", "check_elements", "check_product", "check_tile", "tile_shapes"]
