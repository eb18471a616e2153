"""The operands of the `mok.attention` kernel: supported layouts, and the order of axes."""

from __future__ import annotations

from collections.abc import Sequence

from max._compiler.analysis.layout import Layout, collapse
from max.mlir.sizes import Size, Sizes

__all__ = ["attention_views", "is_readable"]


def _unit_stride(layout: Layout, axis: int) -> bool:
    """Whether vectors can be loaded along an axis."""
    # a stride of an axis of size 1 is never used
    return layout.strides[axis] == 1 or layout.shape[axis] == 1


def is_readable(index: int, layout: Layout) -> bool:
    """Whether the kernel can read an operand with a layout.

    Args:
        index: The operand: queries, keys, values, then masks.
        layout: Its layout.
    """
    if not layout.shape:
        return True
    # keys may be contiguous along either axis, as the kernel reads rows and columns
    return _unit_stride(layout, -1) or (index == 1 and _unit_stride(layout, -2))


def attention_views(
    result: Layout, operands: Sequence[Layout], axis: int
) -> tuple[list[Layout], bool]:
    """Permutes the axes of result and operands to the kernel's order.

    Batch axes are merged where all views allow it. A batch axis along which keys and values are broadcast becomes the
    group of query heads that share a KV head: it follows the batch axes in queries, result and masks, and is absent
    from keys and values::

        queries, result, masks   [batch…, group, rows, columns]
        keys, values             [batch…, rows, columns]

    Args:
        result: The layout of the result, with the queries before the batch axis `axis`.
        operands: The layouts of queries, keys, values and masks.
        axis: See `result`.

    Returns:
        The layouts of the result and of the operands, in that order, and whether the keys are transposed: `[size,
        keys]`.
    """
    q, keys, values, *masks = operands
    rank = len(q.shape) - 2
    batch_axes = [i for i in range(rank + 1) if i != axis]
    out = result.transpose([*batch_axes, axis, rank + 1])
    # masks broadcast: axes that they lack have stride 0
    full_masks = [mask.broadcast_to((*q.shape[:-1], keys.shape[-2])) for mask in masks]
    views = [out, q, keys, values, *full_masks]

    def is_shared(i: int) -> bool:
        # only an axis along which neither varies can become the group
        return isinstance(q.shape[i], int) and keys.strides[i] == 0 and values.strides[i] == 0

    group_axes = [i for i in range(rank) if q.shape[i] != 1 and is_shared(i)]
    others = [i for i in range(rank) if i not in group_axes]
    group_dims, group_strides = _merge_axes(q.shape, views, group_axes)
    if len(group_dims) > 1:
        # axes that do not merge: the innermost is the group, the others are batch axes
        others, group_axes = sorted([*others, *group_axes[:-1]]), group_axes[-1:]
        group_dims, group_strides = _merge_axes(q.shape, views, group_axes)
    dims, strides = _merge_axes(q.shape, views, others)
    group: Size = group_dims[0] if group_dims else 1
    columns = not _unit_stride(keys, -1)
    layouts: list[Layout] = []
    for i, view in enumerate(views):
        shape, steps = view.shape[-2:], view.strides[-2:]
        # transposed keys: the kernel takes them as `[size, keys]`
        if i == 2 and columns:
            shape, steps = shape[::-1], steps[::-1]
        # the stride of an axis of size 1 is never used; 1 allows vector loads
        steps = (steps[0], 1 if shape[1] == 1 and i < 4 else steps[1])
        if i not in (2, 3):
            shape = (group, *shape)
            steps = (group_strides[i][0] if group_dims else 0, *steps)
        layouts.append(Layout((*dims, *shape), (*strides[i], *steps), view.offset))
    return layouts, columns


def _merge_axes(
    shape: Sizes, views: Sequence[Layout], axes: Sequence[int]
) -> tuple[Sizes, list[Sizes]]:
    """Merges batch axes where all views allow it; returns the dims, and each view's strides along them."""
    return collapse(
        [shape[i] for i in axes], [tuple([view.strides[i] for i in axes]) for view in views]
    )
