"""Non-maximum suppression: of boxes that overlap, the one with the greatest score is kept.

A task is a class of an image. Each step takes the box with the greatest remaining score, and sets the scores of the
boxes that overlap it to -inf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.indexing.selection import best_of_row
from max._backends.kernel_call import KernelCall, Operand, Workspace, view
from max.dtype import DType


@k.inline
def overlap(a: Any, b: Any) -> Any:
    """Intersection over union of two boxes, rows of two corners in any order; 0 where the union is empty."""
    top = k.max(k.min(a[0], a[2]), k.min(b[0], b[2]))
    left = k.max(k.min(a[1], a[3]), k.min(b[1], b[3]))
    bottom = k.min(k.max(a[0], a[2]), k.max(b[0], b[2]))
    right = k.min(k.max(a[1], a[3]), k.max(b[1], b[3]))
    common = k.max(bottom - top, 0.0) * k.max(right - left, 0.0)
    area_a = k.abs((a[2] - a[0]) * (a[3] - a[1]))
    area_b = k.abs((b[2] - b[0]) * (b[3] - b[1]))
    union = area_a + area_b - common
    # 0 of the boxes' dtype
    return common / union if union > 0.0 else a[0] * 0.0


@k.kernel
def suppress(
    order: k.Output,
    boxes: k.Input,
    scores: k.Input,
    max_boxes: k.Input,
    max_overlap: k.Input,
    min_score: k.Input,
    remaining: k.InOut,
    ctx: k.Context,
) -> None:
    """`order` `[B, C, N]` has for each class the numbers of the boxes that are kept, by falling score, then -1.

    `boxes` are `[B, N, 4]`, `scores` `[B, C, N]`. `remaining` `[B, C, N]` holds the scores of boxes that may still be
    kept, and -inf for the others. Of equal scores the first box comes first.
    """
    width = ctx.target.width(remaining.dtype)
    count = scores.shape[2]
    nothing = remaining.dtype(float("-inf"))
    threshold = remaining.dtype(min_score[0])
    for b, c in ctx.parallel((scores.shape[0], scores.shape[1])):
        row = remaining[b, c]
        for i in range(count):
            score = remaining.dtype(scores[b, c, i])
            # a NaN is not above the threshold
            row[i] = score if score > threshold else nothing
            order[b, c, i] = -1
        kept = k.i64(0)
        going = True
        while going:
            going = kept < k.min(k.i64(max_boxes[0]), count)
            if going:
                best, index = best_of_row(row, True, width)
                going = best > nothing
                if going:
                    order[b, c, kept] = index
                    kept += 1
                    row[index] = nothing
                    for i in range(count):
                        # -inf: kept already, below the threshold, or suppressed
                        if row[i] > nothing:
                            if overlap(boxes[b, i], boxes[b, index]) > max_overlap[0]:
                                row[i] = nothing


def _lower_nms(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.nms`, with a workspace for the scores of the remaining boxes."""
    boxes, scores, *_ = operands
    (out,) = results
    workspace = Workspace(
        DType.float64 if boxes.dtype is DType.float64 else DType.float32, scores.shape
    )
    args = (
        view("result", 0, out, static=False),
        view("operand", 0, boxes, static=False),
        view("operand", 1, scores, static=False),
        *(view("operand", i, operands[i], ((),)) for i in (2, 3, 4)),
        view("workspace", 0, workspace, static=False),
    )
    return KernelCall(suppress, args, workspaces=(workspace,))


LOWERINGS = {"mo.nms": _lower_nms}
