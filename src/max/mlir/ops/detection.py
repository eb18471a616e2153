"""Ops on regions of images and on boxes."""

from __future__ import annotations

from max.dtype import DType
from max.mlir.conditions import Condition
from max.mlir.dims import DimExpr
from max.mlir.operation import Attrs, OpSpec, Types, define, same_device, tensor
from max.mlir.types import TensorType

ROI_MODES = ("AVG", "MAX")


MAX_SAMPLES = 4096
"""The maximum number of samples of a bin along an axis, also where the size of a region determines it."""


def _infer_roi_align(types: Types, attrs: Attrs) -> Types:
    """The result: `[regions, output_height, output_width, channels]`."""
    x, rois = tensor("roi_align", types, 0), tensor("roi_align", types, 1)
    for name, type_, rank in (("images", x, 4), ("regions", rois, 2)):
        if not type_.dtype.is_float():
            raise TypeError(f"roi_align: the {name} are {type_.short}, expected floats")
        if type_.rank != rank:
            raise ValueError(f"roi_align: the {name} are {type_.short}, expected rank {rank}")
    if rois.shape[1] != 5:
        raise ValueError(
            f"roi_align: the regions are {rois.short}, expected 5 columns: image, left, top, right, bottom"
        )
    size: tuple[int, ...] = (attrs["output_height"], attrs["output_width"])
    if min(size) < 1:
        raise ValueError(f"roi_align: the output is {list(size)}, expected sizes of 1 or more")
    if not 0 <= attrs["sampling_ratio"] <= MAX_SAMPLES or attrs["mode"] not in ROI_MODES:
        raise ValueError(
            f"roi_align: sampling_ratio is {attrs['sampling_ratio']}, mode is {attrs['mode']!r}; expected 0 to "
            f"{MAX_SAMPLES}, and one of {', '.join(ROI_MODES)}"
        )
    for axis in (1, 2):
        if x.shape[axis] == 0:
            raise ValueError(f"roi_align: axis {axis} of {x.short} is empty")
    same_device("roi_align", [x, rois])
    sizes = [DimExpr.constant(n) for n in size]
    return (x.with_shape([rois.shape[0], *sizes, x.shape[3]]),)


def _roi_align_conditions(operands: Types, results: Types, attrs: Attrs) -> list[Condition]:
    x = tensor("roi_align", operands, 0)
    return [
        Condition.at_least(x.shape[axis], 1, f"roi_align: axis {axis} of {x.short} is empty")
        for axis in (1, 2)
    ]


define(
    OpSpec(
        "mo.roi_align",
        (2, 2),
        1,
        attributes={
            "output_height": int,
            "output_width": int,
            "spatial_scale": float,
            "sampling_ratio": int,
            "aligned": bool,
            "mode": str,
        },
        infer=_infer_roi_align,
        conditions=_roi_align_conditions,
        takes="x `[N, H, W, C]`, rois `[M, 5]`: image, left, top, right, bottom",
        doc=(
            "`output_height`, `output_width`, `spatial_scale`, `sampling_ratio` (0: a "
            "sample a pixel), `aligned`, `mode` = AVG, MAX; `[M, output_height, "
            "output_width, C]`; an image index out of range raises at run time"
        ),
    )
)


def _infer_nms(types: Types, attrs: Attrs) -> Types:
    """The result: int64 of the scores' shape, `[batch, classes, boxes]`."""
    op = "non_maximum_suppression"
    boxes, scores = tensor(op, types, 0), tensor(op, types, 1)
    if not boxes.dtype.is_float() or scores.dtype is not boxes.dtype:
        raise TypeError(
            f"{op}: boxes {boxes.short} and scores {scores.short}, expected one float dtype"
        )
    if boxes.rank != 3 or scores.rank != 3 or boxes.shape[2] != 4:
        raise ValueError(
            f"{op}: boxes {boxes.short} and scores {scores.short}, expected [batch, boxes, 4] and [batch, classes, "
            "boxes]"
        )
    if boxes.shape[0] != scores.shape[0] or boxes.shape[1] != scores.shape[2]:
        raise ValueError(
            f"{op}: boxes {boxes.short} and scores {scores.short} differ in the batch or in the number of boxes"
        )
    for index, dtype in ((2, DType.int64), (3, boxes.dtype), (4, boxes.dtype)):
        type_ = tensor(op, types, index)
        if type_ != TensorType.get(dtype, (), boxes.device):
            raise TypeError(
                f"{op}: operand {index} is {type_.short}, expected {dtype.name} of rank 0"
            )
    same_device(op, [boxes, scores])
    return (scores.with_dtype(DType.int64),)


define(
    OpSpec(
        "mo.nms",
        (5, 5),
        1,
        infer=_infer_nms,
        takes=(
            "boxes `[B, N, 4]`, scores `[B, C, N]`; greatest number si64, overlap, least "
            "score (rank 0)"
        ),
        doc="si64 `[B, C, N]`: the boxes that are kept, by falling score, then -1",
    )
)
