"""torchvision's own ops: those of the package where it is installed, else these definitions in NumPy."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

__all__ = ["declare", "import_torchvision"]

_OPS = [
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
    "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, "
    "SymInt offset_groups, bool use_mask) -> Tensor",
]
_LIBRARIES: list[torch.library.Library] = []


def import_torchvision() -> ModuleType:
    """The package torchvision. Its wheel for GPUs lacks its own ops where torch is one for CPUs: they are declared.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import torchvision
    except RuntimeError:
        _declare()
        import torchvision
    return torchvision


def declare() -> None:
    """Declares the ops where torchvision does not."""
    try:
        import_torchvision()
    except ImportError:
        if not _LIBRARIES:
            _declare()


def _declare() -> None:
    library = torch.library.Library("torchvision", "DEF")
    for schema in _OPS:
        library.define(schema)
    for name, function in (
        ("nms", _nms),
        ("roi_align", _roi_align),
        ("deform_conv2d", _deform_conv2d),
    ):
        library.impl(name, function, "CPU")
    _LIBRARIES.append(library)


def _nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """The boxes that overlap no better one, the best first."""
    order = scores.argsort(descending=True, stable=True)
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept: list[int] = []
    for index in order.tolist():
        low = torch.maximum(boxes[index, :2], boxes[kept, :2])
        high = torch.minimum(boxes[index, 2:], boxes[kept, 2:])
        common = (high - low).clamp(min=0).prod(-1)
        if not (common / (area[index] + area[kept] - common) > threshold).any():
            kept.append(index)
    return torch.tensor(kept, dtype=torch.int64)


def _sample(image: np.ndarray, y: float, x: float) -> np.ndarray:
    """The channels of an image ``[C, H, W]`` between its elements; 0 where there are none."""
    total = np.zeros(image.shape[0])
    row, column = int(np.floor(y)), int(np.floor(x))
    for i in (row, row + 1):
        for j in (column, column + 1):
            if 0 <= i < image.shape[1] and 0 <= j < image.shape[2]:
                total += (1 - abs(y - i)) * (1 - abs(x - j)) * image[:, i, j]
    return total


def _roi_align(
    input: torch.Tensor, rois: torch.Tensor, scale: float, height: int, width: int, ratio: int, aligned: bool
) -> torch.Tensor:  # fmt: skip
    images = input.double().numpy()
    result = np.zeros((len(rois), images.shape[1], height, width))
    for index, roi in enumerate(rois.double().numpy()):
        image = images[int(roi[0])]
        left, top, right, bottom = roi[1:] * scale - (0.5 if aligned else 0)
        size = np.array([bottom - top, right - left])
        size = size if aligned else np.maximum(size, 1)
        cell = size / (height, width)
        counts = [ratio if ratio > 0 else int(np.ceil(side)) for side in cell]
        for i, j in np.ndindex(height, width):
            samples = []
            for a, b in np.ndindex(*counts):
                y = top + (i + (a + 0.5) / counts[0]) * cell[0]
                x = left + (j + (b + 0.5) / counts[1]) * cell[1]
                if -1 <= y <= image.shape[1] and -1 <= x <= image.shape[2]:
                    y, x = np.clip(y, 0, image.shape[1] - 1), np.clip(x, 0, image.shape[2] - 1)
                    samples.append(_sample(image, y, x))
            result[index, :, i, j] = sum(samples) / max(counts[0] * counts[1], 1)
    return torch.from_numpy(result).to(input.dtype)


def _deform_conv2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    offset: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor,
    *numbers: int,
) -> torch.Tensor:
    *steps, groups, parts, use_mask = numbers
    stride, pad, dilation = steps[:2], steps[2:4], steps[4:]
    x, filters = input.double().numpy(), weight.double().numpy()
    count, channels = x.shape[:2]
    taps = filters.shape[2:]
    rows, columns = offset.shape[2:]
    shifts = offset.double().numpy().reshape(count, parts, *taps, 2, rows, columns)
    factors = np.ones((count, parts, *taps, rows, columns))
    if use_mask:
        factors = mask.double().numpy().reshape(factors.shape)
    windows = np.zeros((count, channels, *taps, rows, columns))
    share = channels // parts
    for n, part, a, b, i, j in np.ndindex(count, parts, *taps, rows, columns):
        y = i * stride[0] - pad[0] + a * dilation[0] + shifts[n, part, a, b, 0, i, j]
        z = j * stride[1] - pad[1] + b * dilation[1] + shifts[n, part, a, b, 1, i, j]
        span = slice(part * share, (part + 1) * share)
        windows[n, span, a, b, i, j] = _sample(x[n, span], y, z) * factors[n, part, a, b, i, j]
    split = windows.reshape(count, groups, channels // groups, *taps, rows, columns)
    parted = filters.reshape(groups, len(filters) // groups, *filters.shape[1:])
    result = np.einsum("ngcabij,gfcab->ngfij", split, parted)
    result = result.reshape(count, len(filters), rows, columns)
    return torch.from_numpy(result + bias.double().numpy()[:, None, None]).to(input.dtype)
