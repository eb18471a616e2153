"""torchvision's own ops: the selection of boxes, resampled regions, deformable convolutions."""

from __future__ import annotations

import math

from max.graph import TensorValue, ops
from max.importers.functions.convolutions import with_bias
from max.importers.functions.deformable import deformable_convolution
from max.importers.torch.table import Call, op


@op("torchvision.nms.default")
def nms(call: Call, dets: TensorValue, scores: TensorValue, iou_threshold: float) -> TensorValue:
    """The numbers of the boxes that overlap no better one, the best first."""
    selected = ops.non_maximum_suppression(
        ops.unsqueeze(dets, 0), ops.reshape(scores, [1, 1, scores.shape[0]]), 2**62, iou_threshold, -math.inf,
        call.node.new_size("selected"),
    )  # fmt: skip
    return selected[:, 2]


@op("torchvision.roi_align.default")
def roi_align(
    call: Call,
    input: TensorValue,
    rois: TensorValue,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> TensorValue:
    y = ops.roi_align(
        ops.permute(input, [0, 2, 3, 1]), rois, call.static(pooled_height), call.static(pooled_width), spatial_scale,
        max(sampling_ratio, 0), aligned,
    )  # fmt: skip
    return ops.permute(y, [0, 3, 1, 2])


@op("torchvision.deform_conv2d.default")
def deform_conv2d(
    call: Call,
    input: TensorValue,
    weight: TensorValue,
    offset: TensorValue,
    mask: TensorValue,
    bias: TensorValue,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    groups: int,
    offset_groups: int,
    use_mask: bool,
) -> TensorValue:
    for tensor in (input, weight, offset):
        for dim in tensor.shape:
            call.static(dim)
    y = deformable_convolution(
        input, weight, offset, mask if use_mask else None, (stride_h, stride_w), (pad_h, pad_w),
        (dilation_h, dilation_w), groups, offset_groups,
    )  # fmt: skip
    return with_bias(y, bias)
