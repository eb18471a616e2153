"""Transposes of register tiles, and the lane sums of four vectors, by shuffles within and across 128-bit lanes."""

from __future__ import annotations

from typing import Any

from max import kernel as k


def _unpack(width: int, group: int, high: int) -> tuple[int, ...]:
    """Shuffle indices that interleave groups of lanes of the low or high half of each 128-bit lane of two vectors."""
    indices: list[int] = []
    for lane in range(0, width, 4):
        for position in range(2 // group):
            start = lane + 2 * high + position * group
            # from the first vector, then from the second
            indices += [*range(start, start + group), *range(width + start, width + start + group)]
    return tuple(indices)


def _every_other(width: int, odd: int) -> tuple[int, ...]:
    """Shuffle indices of the even or odd 128-bit lanes of two vectors."""
    return tuple(lane + i for lane in range(4 * odd, 2 * width, 8) for i in range(4))


# shuffle indices by vector width: low and high halves of 32- and 64-bit groups, even and odd 128-bit lanes
LOW_1 = {width: _unpack(width, 1, 0) for width in (4, 8, 16)}
HIGH_1 = {width: _unpack(width, 1, 1) for width in (4, 8, 16)}
LOW_2 = {width: _unpack(width, 2, 0) for width in (4, 8, 16)}
HIGH_2 = {width: _unpack(width, 2, 1) for width in (4, 8, 16)}
EVEN = {width: _every_other(width, 0) for width in (8, 16)}
ODD = {width: _every_other(width, 1) for width in (8, 16)}
# halves of vectors of 16 and of 8 lanes
FIRST_8, LAST_8 = tuple(range(8)), tuple(range(8, 16))
FIRST_4, LAST_4 = tuple(range(4)), tuple(range(4, 8))


@k.inline
def transpose(rows: k.View, width: int) -> None:
    """Transposes in place a tile of `width` (4, 8 or 16) vectors of `width` 32-bit lanes.

    Two steps transpose 4 × 4 blocks inside the 128-bit lanes, the others move whole 128-bit lanes. With 8 vectors::

        r0 | a0 a1 a2 a3 | a4 a5 a6 a7        | a0 b0 c0 d0 | a4 b4 c4 d4        | a0 b0 … h0 |
        r1 | b0 b1 b2 b3 | b4 b5 b6 b7   →    | a1 b1 c1 d1 | a5 b5 c5 d5   →    | a1 b1 … h1 |
        …                                       …                                  …

    Register budget: 2 × `width` vectors; with 16 registers the compiler keeps some of 8 × 8 on the stack.
    """
    half = k.tile(rows.dtype, (width,), width=width)
    for i in k.static_range(0, width, 2):
        half[i] = k.shuffle(rows[i], rows[i + 1], LOW_1[width])
        half[i + 1] = k.shuffle(rows[i], rows[i + 1], HIGH_1[width])
    # afterwards lane j of rows[4 * g + c] holds column 4 * j + c of rows 4 * g … 4 * g + 3
    for i in k.static_range(0, width, 4):
        for j in k.static_range(2):
            rows[i + 2 * j] = k.shuffle(half[i + j], half[i + 2 + j], LOW_2[width])
            rows[i + 2 * j + 1] = k.shuffle(half[i + j], half[i + 2 + j], HIGH_2[width])
    if width == 8:
        for c in k.static_range(4):
            half[c] = k.shuffle(rows[c], rows[4 + c], EVEN[width])
            half[4 + c] = k.shuffle(rows[c], rows[4 + c], ODD[width])
        for i in k.static_range(8):
            rows[i] = half[i]
    if width == 16:
        for c in k.static_range(4):
            even_low = k.shuffle(rows[c], rows[4 + c], EVEN[width])
            even_high = k.shuffle(rows[8 + c], rows[12 + c], EVEN[width])
            odd_low = k.shuffle(rows[c], rows[4 + c], ODD[width])
            odd_high = k.shuffle(rows[8 + c], rows[12 + c], ODD[width])
            half[c] = k.shuffle(even_low, even_high, EVEN[width])
            half[8 + c] = k.shuffle(even_low, even_high, ODD[width])
            half[4 + c] = k.shuffle(odd_low, odd_high, EVEN[width])
            half[12 + c] = k.shuffle(odd_low, odd_high, ODD[width])
        for i in k.static_range(16):
            rows[i] = half[i]


@k.inline
def lane_sums(a: k.Value, b: k.Value, c: k.Value, d: k.Value, width: int) -> Any:
    """The sums over the lanes of four vectors, side by side in one vector of 4.

    It takes 13 instructions for 16 lanes, where four separate reductions take 36.
    """
    ab = k.shuffle(a, b, LOW_1[width]) + k.shuffle(a, b, HIGH_1[width])
    cd = k.shuffle(c, d, LOW_1[width]) + k.shuffle(c, d, HIGH_1[width])
    total = k.shuffle(ab, cd, LOW_2[width]) + k.shuffle(ab, cd, HIGH_2[width])
    if width == 16:
        total = k.shuffle(total, None, FIRST_8) + k.shuffle(total, None, LAST_8)
    if width >= 8:
        total = k.shuffle(total, None, FIRST_4) + k.shuffle(total, None, LAST_4)
    return total
