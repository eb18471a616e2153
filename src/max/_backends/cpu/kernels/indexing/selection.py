"""The best elements of a row: a binary heap of (value, index) pairs in memory, and the best element of a row.

The root of the heap is the worst kept element. A vector of a row is compared with the root first; most vectors of a
long row have no better element and are skipped. Equal elements are ordered by index, the lower one first.

`greatest` (compile time) tells whether the greatest elements are best, or the smallest. NaN counts as the greatest
element, so it is the best or the worst.
"""

from __future__ import annotations

from typing import Any

from max import kernel as k


@k.inline
def precedes(a: k.SIMD, b: k.SIMD, greatest: bool) -> Any:
    """Whether `a` is better than `b`."""
    # the smallest is best: the order reversed, NaN stays greatest
    return beats(a, b, True) if greatest else beats(b, a, True)


@k.inline
def better(
    value: k.SIMD, index: k.Value, other_value: k.SIMD, other_index: k.Value, greatest: bool
) -> Any:
    """Whether an element comes before another: better, or equal and earlier."""
    return precedes(value, other_value, greatest) | (
        same(value, other_value) & (index < other_index)
    )


@k.inline
def sift_down(
    values: k.View, indices: k.View, size: k.Value, value: k.SIMD, index: k.Value, greatest: bool
) -> None:
    """Replaces the root, the worst of `size` elements, by a new element and restores the heap."""
    hole = k.i64(0)
    moving = True
    while moving:
        k.brief()
        child = 2 * hole + 1
        moving = child < size
        if moving:
            if child + 1 < size:
                if better(
                    values[child],
                    k.i64(indices[child]),
                    values[child + 1],
                    k.i64(indices[child + 1]),
                    greatest,
                ):
                    child += 1
            # the new element sinks while it is better than the worse child
            moving = better(value, index, values[child], k.i64(indices[child]), greatest)
            if moving:
                values[hole] = values[child]
                indices[hole] = indices[child]
                hole = child
    values[hole] = value
    indices[hole] = index


@k.inline
def sift_up(
    values: k.View, indices: k.View, last: k.Value, value: k.SIMD, index: k.Value, greatest: bool
) -> None:
    """Adds an element to a heap of `last` elements, whose root is the worst."""
    hole = k.i64(last)
    moving = hole > 0
    while moving:
        k.brief()
        parent = (hole - 1) // 2
        moving = better(values[parent], k.i64(indices[parent]), value, index, greatest)
        if moving:
            values[hole] = values[parent]
            indices[hole] = indices[parent]
            hole = parent
            moving = hole > 0
    values[hole] = value
    indices[hole] = index


@k.inline
def sort_heap(values: k.View, indices: k.View, size: k.Value, greatest: bool) -> None:
    """Sorts a heap, the best first."""
    last = k.i64(size - 1)
    while last > 0:
        value = values[last]
        index = k.i64(indices[last])
        # the root is the worst that remains: it goes to the end
        values[last] = values[0]
        indices[last] = indices[0]
        sift_down(values, indices, last, value, index, greatest)
        last -= 1


@k.inline
def keep_best(
    values: k.View,
    places: k.View,
    row: k.View,
    count: k.Value,
    width: int,
    greatest: bool,
) -> None:
    """Fills a heap with the `count` best elements of a row and their indices.

    Args:
        values: The heap's elements.
        places: Their indices.
        row: Rank 1, any strides.
        count: The size of the heap, at least 1; a shorter row is kept whole.
        width: The number of lanes compared with the worst kept element at once, for contiguous rows.
        greatest: Whether the greatest elements are kept, or the smallest (compile time).
    """
    size = row.size
    at = k.min(k.i64(count), size)
    # the first elements fill the heap
    for j in range(at):
        sift_up(values, places, j, row[j], k.i64(j), greatest)
    while at < size:
        end = size
        if row.is_contiguous:
            worst = values[0]
            while at + width <= size and not k.any(
                rises_above(row.load(at, width=width), worst, greatest)
            ):
                k.brief()
                at += width
            end = k.min(at + width, size)
        for j in range(at, end):
            value = row[j]
            # among equal elements the heap keeps the earlier one
            if precedes(value, values[0], greatest):
                sift_down(values, places, count, value, k.i64(j), greatest)
        at = end


@k.inline
def rises_above(candidates: k.Value, worst: k.Value, greatest: bool) -> Any:
    """Whether elements may be better than the worst kept element; true if one of them is NaN."""
    return ~(candidates <= worst) if greatest else ~(candidates >= worst)


@k.inline
def best_of_row(row: k.View, greatest: bool, width: int) -> Any:
    """Value and index of the greatest or smallest element of a row of rank 1, the first of equals; NaN comes first.

    Args:
        row: Any strides.
        greatest: Whether the greatest element is best, or the smallest (compile time).
        width: Lanes of a vector; of contiguous rows.
    """
    best = row[0]
    index = k.i64(0)
    size = row.size
    if row.is_contiguous:
        start = k.i64(0)
        if size >= width:
            values = row.load(0, width=width)
            places = k.iota(k.i64, width)
            aligned_size = size - size % width
            for j in range(width, aligned_size, width):
                candidates = row.load(j, width=width)
                wins = beats(candidates, values, greatest)
                values = k.select(wins, candidates, values)
                places = k.select(wins, k.iota(k.i64, width) + j, places)
            best = values[0]
            index = places[0]
            for lane in k.static_range(1, width):
                # of equal lanes the one with the lower place
                if beats(values[lane], best, greatest) | (
                    same(values[lane], best) & (places[lane] < index)
                ):
                    best = values[lane]
                    index = places[lane]
            start = aligned_size
        for j in range(start, size):
            if beats(row[j], best, greatest):
                best = row[j]
                index = j
    else:
        for j in range(1, size):
            if beats(row[j], best, greatest):
                best = row[j]
                index = k.i64(j)
    return best, index


@k.inline
def beats(a: k.SIMD, b: k.Value, greatest: bool) -> Any:
    """Whether `a` comes before `b`: greater or smaller, NaN first."""
    if a.dtype.is_float:
        wins = a > b if greatest else a < b
        return wins | (k.isnan(a) & ~k.isnan(b))
    else:
        return a > b if greatest else a < b


@k.inline
def same(a: k.SIMD, b: k.Value) -> Any:
    """Whether two elements are equal; NaN equals NaN."""
    if a.dtype.is_float:
        return (a == b) | (k.isnan(a) & k.isnan(b))
    else:
        return a == b
