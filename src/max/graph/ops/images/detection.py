"""Ops of object detectors: regions of images, and boxes that overlap."""

from __future__ import annotations

import operator

from max.dtype import DType
from max.graph.dim import DimLike
from max.graph.ops.elementwise.binary import greater_equal
from max.graph.ops.images.pooling import pair
from max.graph.ops.movement.concat import concat
from max.graph.ops.movement.gather import gather_nd
from max.graph.ops.movement.masking import nonzero
from max.graph.ops.movement.shape import reshape
from max.graph.ops.staging.promotion import cast_to, is_weak, promote_weak
from max.graph.ops.staging.stage import as_tensor, stage
from max.graph.value import TensorValue, TensorValueLike

__all__ = ["non_maximum_suppression", "roi_align"]


def roi_align(
    input: TensorValueLike,
    rois: TensorValueLike,
    output_height: int,
    output_width: int,
    spatial_scale: float = 1.0,
    sampling_ratio: float = 0.0,
    aligned: bool = False,
    mode: str = "AVG",
) -> TensorValue:
    """Resamples regions of images to one size, by bilinear interpolation, as ``torchvision.ops.roi_align``.

    Each bin of the result takes samples at equal distances. A sample outside of the image by more than a pixel is 0.

    Args:
        input: The images: ``[N, H, W, C]``, of a floating-point type.
        rois: The regions: ``[M, 5]``, floats: the number of the image, then left, top, right and bottom. An
            image number out of range raises when the graph runs.
        output_height: The height of the result.
        output_width: The width of the result.
        spatial_scale: Multiplies the coordinates of the regions.
        sampling_ratio: The number of samples along each axis of a bin, a whole number; 0 for one a pixel, of which a
            bin may have 4096 along an axis.
        aligned: Whether coordinates are moved by half a pixel, and regions may be smaller than a pixel.
        mode: ``"AVG"`` for the mean of the samples, ``"MAX"`` for the greatest of the weighted elements around them,
            as ONNX's RoiAlign.

    Returns:
        ``[M, output_height, output_width, C]``, of the input's dtype.

    Raises:
        ValueError: A rank, a size, the sampling ratio or the mode does not fit.
        TypeError: The images or regions are not of a floating-point type.
    """
    x, regions = as_tensor(input), as_tensor(rois)
    height, width = pair("roi_align", "the output", (output_height, output_width), 1)
    samples = float(sampling_ratio)
    if not samples.is_integer():
        raise ValueError(f"roi_align: sampling_ratio is {sampling_ratio}, expected a whole number")
    attrs = {
        "output_height": height,
        "output_width": width,
        "spatial_scale": float(spatial_scale),
        "sampling_ratio": int(samples),
        "aligned": bool(aligned),
        "mode": mode,
    }
    return stage("roi_align", (x, regions), attrs)


def non_maximum_suppression(
    boxes: TensorValueLike,
    scores: TensorValueLike,
    max_output_boxes_per_class: TensorValueLike,
    iou_threshold: TensorValueLike,
    score_threshold: TensorValueLike,
    out_dim: DimLike = "num_selected",
) -> TensorValue:
    """Selects boxes of each class by score, and drops those that overlap a selected one, as ONNX's NonMaxSuppression.

    Args:
        boxes: The boxes ``[batch, boxes, 4]``, floats: two opposite corners each, ``y, x, y, x``.
        scores: The scores ``[batch, classes, boxes]``, of the dtype of `boxes`.
        max_output_boxes_per_class: The greatest number of boxes of a class: an integer, or one of rank 0.
        iou_threshold: Boxes are dropped whose intersection over union with a selected one is above this number.
        score_threshold: Boxes are considered whose score is above this number.
        out_dim: The number of selected boxes: a new symbol, or a size, which is checked when the graph runs.

    Returns:
        int64 ``[out_dim, 3]``: batch, class and box of each, ordered by batch, class, and falling score; of equal
        scores the first box comes first.

    Raises:
        ValueError: The shapes do not match.
        TypeError: Boxes or scores are not of one floating-point type, or the greatest number is no integer.
    """
    op = "non_maximum_suppression"
    places, values = as_tensor(boxes), as_tensor(scores)
    limits: list[TensorValue] = []
    for name, value, dtype in (
        ("max_output_boxes_per_class", max_output_boxes_per_class, DType.int64),
        ("iou_threshold", iou_threshold, places.dtype),
        ("score_threshold", score_threshold, places.dtype),
    ):
        if dtype is DType.int64 and not hasattr(value, "mlir_type"):
            value = operator.index(value)  # pyright: ignore[reportArgumentType]
        weak = is_weak(value)
        limit = promote_weak(op, value, dtype, places.device) if weak else as_tensor(value)
        if limit.dtype.is_float() is not dtype.is_float() or limit.dtype is DType.bool:
            raise TypeError(f"{op}: {name} is {limit.mlir_type.short}, expected {dtype.name}")
        limits.append(reshape(cast_to(limit, dtype).to(places.device), []))
    # [batch, classes, boxes]: the boxes in the order of selection, then negative numbers
    order = stage("nms", (places, values, *limits))
    selected = nonzero(greater_equal(order, 0), out_dim)
    numbers = reshape(gather_nd(order, selected), [out_dim, 1])
    return concat([selected[:, :2], numbers], axis=1)
