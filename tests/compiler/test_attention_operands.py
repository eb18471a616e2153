"""The order of axes that the attention kernel gets: it reads and writes the elements that the op does."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from max._compiler.analysis.attention_operands import attention_views, is_readable
from max._compiler.analysis.layout import Layout
from max.mlir.dims import DimExpr

pytestmark = pytest.mark.any_target

Rows = dict[tuple[int, ...], Any]


def addresses(layout: Layout) -> np.ndarray:
    """The address of each element of a layout of numbers."""
    total: Any = np.full(layout.shape, layout.offset)
    for axis, (size, stride) in enumerate(zip(layout.shape, layout.strides, strict=True)):
        along = [-1 if i == axis else 1 for i in range(len(layout.shape))]
        total = total + (np.arange(size) * stride).reshape(along)
    return total


def drawn(rng: np.random.Generator, shape: tuple[int, ...], shared: tuple[int, ...] = ()) -> Layout:
    """A layout with axes in any order in memory, and some along which it is broadcast."""
    order = list(range(len(shape)))
    if rng.random() < 0.5:
        order = [int(axis) for axis in rng.permutation(len(shape))]
    strides, size = [0] * len(shape), 1
    for axis in reversed(order):
        if axis in shared:
            continue
        strides[axis] = size
        size *= shape[axis] + int(rng.random() < 0.3)
    return Layout(shape, tuple(strides), int(rng.integers(4)))


def rows_of(
    batch: tuple[int, ...], rows: int, out: Any, q: Any, k: Any, v: Any, masks: Any
) -> Rows:
    """What each row of the result is computed of, by the addresses of the row."""
    found: Rows = {}
    for at in itertools.product(*map(range, batch)):
        for row in range(rows):
            read = [
                q[at][row].tolist(),
                k[at].tolist(),
                v[at].tolist(),
                *[m[at][row].tolist() for m in masks],
            ]
            found[tuple(out[at][row].tolist())] = read
    return found


@pytest.mark.parametrize("seed", range(120))
def test_the_kernel_computes_the_same_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(1, 4))
    batch = tuple(int(size) for size in rng.integers(1, 4, rank))
    rows, keys, size, width = (int(n) for n in rng.integers(1, 4, 4))
    shared = tuple(axis for axis in range(rank) if rng.random() < 0.4)
    only_keys = tuple(axis for axis in range(rank) if rng.random() < 0.2)
    only_values = tuple(axis for axis in range(rank) if rng.random() < 0.2)
    axis = int(rng.integers(rank + 1))
    result = drawn(rng, (*batch[:axis], rows, *batch[axis:], width))
    q = drawn(rng, (*batch, rows, size))
    k = drawn(rng, (*batch, keys, size), (*shared, *only_keys))
    v = drawn(rng, (*batch, keys, width), (*shared, *only_values))
    masks = [drawn(rng, (*batch[i:], rows, keys)) for i in (0, int(rng.integers(rank + 1)))]
    views, columns = attention_views(result, [q, k, v, *masks], axis)
    out, new_q, new_k, new_v, *new_masks = views
    dims, group = out.shape[:-3], out.shape[-3]
    assert new_q.shape == (*dims, group, rows, size) and out.shape == (*dims, group, rows, width)
    assert columns == (k.strides[-1] != 1 and size != 1)
    assert new_k.shape == (*dims, *((size, keys) if columns else (keys, size)))
    assert new_v.shape == (*dims, keys, width)
    assert all(mask.shape == (*dims, group, rows, keys) for mask in new_masks)

    before = [addresses(layout) for layout in (q, k, v)]
    whole = [np.broadcast_to(addresses(mask), (*batch, rows, keys)) for mask in masks]
    expected = rows_of(batch, rows, np.moveaxis(addresses(result), axis, rank), *before, whole)
    groups = (*dims, group)
    read_k = addresses(new_k).swapaxes(-1, -2) if columns else addresses(new_k)
    by_group = [
        np.repeat(array[..., None, :, :], group, -3) for array in (read_k, addresses(new_v))
    ]
    new = [addresses(mask) for mask in new_masks]
    assert rows_of(groups, rows, addresses(out), addresses(new_q), *by_group, new) == expected

    # the innermost of the axes that share keys and values is the group, with those that merge with it
    sharing = [i for i in range(rank) if batch[i] != 1 and not k.strides[i] and not v.strides[i]]
    if not sharing:
        assert group == 1 and out.strides[-3] == 0
    else:
        assert group % batch[sharing[-1]] == 0 and group in (
            batch[sharing[-1]],
            math.prod(batch[i] for i in sharing),
        )
    # an axis that is left is none that merges into the next one, or has one element
    for i in range(len(dims) - 1):
        assert any(view.strides[i] != view.strides[i + 1] * dims[i + 1] for view in views)
    assert 1 not in dims or dims == (1,)
    # vectors are loaded along axes of one element too
    for view, width_of in ((out, width), (new_q, size), (new_v, width)):
        assert width_of != 1 or view.strides[-1] == 1
    assert [mask.strides[-1] for mask in new_masks] == [mask.strides[-1] for mask in masks]


def test_axes_that_share_keys_and_do_not_merge() -> None:
    """Queries of two groups with other ones between: the inner axis is the group, the outer one a batch axis."""
    q = Layout((2, 3, 4, 5, 8), (450, 7 * 450, 100, 8, 1))
    k = Layout((2, 3, 4, 6, 8), (0, 48, 0, 8, 1))
    (out, new_q, new_k, _), _ = attention_views(q, [q, k, k], 3)
    assert out.shape == new_q.shape == (2, 3, 4, 5, 8) and new_k.shape == (2, 3, 6, 8)
    assert new_k.strides == (0, 48, 8, 1)
    # an axis of one element is no group
    q = Layout((2, 3, 4, 1, 5, 8), (450, 7 * 450, 100, 1, 8, 1))
    k = Layout((2, 3, 4, 1, 6, 8), (0, 48, 0, 0, 8, 1))
    (out, *_), _ = attention_views(q, [q, k, k], 4)
    assert out.shape == (2, 3, 4, 5, 8)
    merged = Layout((3, 2, 4, 5, 8), (800, 400, 100, 8, 1))
    (out, _, new_k, _), _ = attention_views(
        merged, [merged, *[Layout((3, 2, 4, 6, 8), (48, 0, 0, 8, 1))] * 2], 3
    )
    assert (
        out.shape == (3, 8, 5, 8) and out.strides == (800, 100, 8, 1) and new_k.shape == (3, 6, 8)
    )


def test_an_axis_of_unknown_size_is_no_group() -> None:
    """The kernel's groups have a size that is known when it is compiled."""
    n = DimExpr.symbol("n")
    q = Layout((n, 5, 8), (40, 8, 1))
    k = Layout((n, 6, 8), (0, 8, 1))
    (out, _, new_k, _), _ = attention_views(q, [q, k, k], 1)
    assert out.shape == (n, 1, 5, 8) and new_k.shape == (n, 6, 8)


def test_operands_that_the_kernel_reads() -> None:
    """Queries, values and masks along rows; keys also along columns; scalars always."""
    rows, columns, sparse = Layout((4, 6), (6, 1)), Layout((4, 6), (1, 4)), Layout((4, 6), (12, 2))
    assert [is_readable(index, rows) for index in range(4)] == [True] * 4
    assert [is_readable(index, columns) for index in range(4)] == [False, True, False, False]
    assert not any(is_readable(index, sparse) for index in range(4))
    assert is_readable(0, Layout((4, 1), (9, 5))) and is_readable(1, Layout((1, 6), (3, 2)))
    assert is_readable(3, Layout((), ()))
