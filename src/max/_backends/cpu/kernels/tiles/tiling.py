"""The tiling of products on a target: element types, lanes, and the shape of the register tile.

::

    register tile                 2 vectors of columns
                                 ┌────────┬────────┐
    height rows: 12 of           │        │        │      f32 on AVX-512: 12 × 32, NEON: 12 × 8,
    32 registers, 6 of 16        └────────┴────────┘      AVX2: 6 × 16
"""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k
from max._dataclass import dataclass
from max.kernel import Target


@dataclass(frozen=True)
class Tiling:
    """The compile-time facts of products on a target.

    Register budget: a register tile holds `height` × 2 accumulators, and needs two vectors of B and one broadcast
    element of A besides: 12 × 2 + 3 of 32 registers, 6 × 2 + 3 of 16.

    Args:
        sums: Element type of the accumulators.
        lane: Element type of a lane of a packed panel (i32 holds two bf16).
        pair: Neighbors in k that share a lane.
        width: Lanes of a vector.
        height: Rows of the register tile.
        gemv_rows: Rows of A per pass of the GEMV path, which reads B unpacked.
        folds: Whether each K block has accumulators of its own, which are then added to the sums in memory; see
            `kernels.products.blocking.FOLDED_SIZE`.
        coded: Whether panels of B are coded; see `kernels.products.dense.coded`.
    """

    sums: k.ScalarType
    lane: k.ScalarType
    pair: int
    width: int
    height: int
    gemv_rows: int
    folds: bool = False
    coded: bool = False

    @property
    def step(self) -> int:
        """Neighbors in k that fill a vector."""
        return self.width * self.pair


def tiling(target: Target, a: k.ScalarType, b: k.ScalarType, folds: bool = False) -> Tiling:
    """The tiling for operands of two element types: accumulators of the wider one, at least f32 for floats.

    Args:
        target: The target.
        a: Element type of the left operand.
        b: Element type of the right operand.
        folds: Whether each K block has accumulators of its own.
    """
    sums = a if a.bits >= b.bits else b
    if sums.is_float and sums.bits < 32:
        sums = k.f32
    # pairs only where one instruction multiplies them
    pairs = a is k.bf16 and b is k.bf16 and bool(target.dot_bf16_lanes(target.width(k.f32)))
    # accumulators of two vectors each: 24 of 32 registers, or 12 of 16
    height, gemv_rows = (12, 4) if target.registers >= 32 else (6, 2)
    lane, pair = (k.i32, 2) if pairs else (sums, 1)
    return Tiling(sums, lane, pair, target.width(sums), height, gemv_rows, folds)


class Matrix(NamedTuple):
    """A matrix in a flat view: element ``(i, j)`` is ``elements[i * row + j * column]``.

    A register tile of a packed panel of A has ``row=1, column=height``; a packed panel of B has one row for each lane
    in k.

    Args:
        elements: The flat view, from the first element of the matrix on.
        row: Elements from row to row.
        column: Elements from column to column.
    """

    elements: Any
    row: Any
    column: Any = 1


@k.inline
def round_up(a: k.Value, b: k.Value) -> Any:
    """The least multiple of `b` that is at least `a`."""
    return (a + b - 1) // b * b


@k.inline
def as_lanes(v: k.SIMD, lane_dtype: k.ScalarType) -> Any:
    """Loaded elements as lanes of a packed panel: converted, or for pairs of 16 bits reinterpreted."""
    return (
        k.bitcast(v, lane_dtype)
        if lane_dtype == k.i32 and v.dtype.bits == 16
        else k.cast(v, lane_dtype)
    )


@k.inline
def multiply_add(acc: k.SIMD, x: k.SIMD, y: k.Value) -> Any:
    """`acc + x * y`; 32-bit integer lanes over an f32 accumulator are pairs of bf16."""
    if acc.dtype == k.f32 and x.dtype == k.i32:
        return k.dot_bf16(acc, k.bitcast(x, k.bf16), k.bitcast(y, k.bf16))
    elif acc.dtype.is_float:
        return k.fma(x, y, acc)
    else:
        return acc + x * y
