"""Pooling, folding, resizing, regions and suppression at the edges of images, against loops in NumPy and torch; in the
interpreter, which refuses each access outside of an image.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from max._backends.cpu.kernels.images import roi_align
from tests.cpu_kernels.harness import interpreted
from tests.tolerance import assert_close

Array = np.ndarray[Any, Any]
F32, F64, I64 = np.float32, np.float64, np.int64
WINDOWS = [
    ((1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    ((3, 2), (2, 2), (1, 1), (1, 1, 0, 1)),
    ((2, 3), (1, 2), (2, 1), (0, 1, 2, 0)),
    ((3, 3), (3, 1), (1, 2), (1, 0, 1, 2)),
]
"""Kernel, stride, dilation and padding."""


def windows(size: int, axis: int, window: Any, ceil: bool = False) -> int:
    """How many windows an axis of an image has."""
    kernel, stride, dilation, padding = window
    before, after = padding[2 * axis : 2 * axis + 2]
    spare = size + before + after - dilation[axis] * (kernel[axis] - 1) - 1
    count = (spare + (stride[axis] - 1) * ceil) // stride[axis] + 1
    # the last window begins in the image or in the padding before it
    return count - (ceil and (count - 1) * stride[axis] >= size + before)


def pooled(x: Array, shape: Any, window: Any, mean: bool, count_boundary: bool) -> Array:
    """Pools an image `[H, W, C]`."""
    kernel, stride, dilation, padding = window
    out = np.zeros((*shape, x.shape[2]), F64)
    for h, w in np.ndindex(*shape):
        taps, count = [], 0
        for r, s in np.ndindex(*kernel):
            at = (
                h * stride[0] + r * dilation[0] - padding[0],
                w * stride[1] + s * dilation[1] - padding[2],
            )
            if 0 <= at[0] < x.shape[0] and 0 <= at[1] < x.shape[1]:
                taps.append(x[at])
            count += at[0] < x.shape[0] + padding[1] and at[1] < x.shape[1] + padding[3]
        if mean:
            total = np.sum(taps, 0, F64) if taps else 0
            out[h, w] = total / (count if count_boundary else max(len(taps), 1))
        else:
            lowest = np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf
            out[h, w] = np.max(taps, 0, initial=lowest) if taps else lowest
    return np.floor(out) if x.dtype.kind in "iu" else out


@pytest.mark.parametrize("window", [*WINDOWS, ((2, 2), (1, 1), (9, 10), (5, 5, 5, 5))], ids=str)
@pytest.mark.parametrize("dtype", [F32, F64, np.float16, np.int8, np.uint32])
def test_pooling(window: Any, dtype: Any) -> None:
    names = dict(zip(("kernel", "stride", "dilation", "padding"), window, strict=True))
    rng = np.random.default_rng(3)
    for (height, width), ceil in itertools.product(((5, 6), (7, 5)), (False, True)):
        x = rng.integers(-90, 90, (1, height, width, 5)).astype(dtype)
        shape = windows(height, 0, window, ceil), windows(width, 1, window, ceil)
        for mean, boundary in ((False, False), (True, False), (True, True)):
            want = np.stack([pooled(image, shape, window, mean, boundary) for image in x])
            attributes = {**names, "ceil_mode": ceil, "count_boundary": boundary}
            symbol = "mo.avg_pool" if mean else "mo.max_pool"
            (got,) = interpreted(symbol, [x], [(dtype, want.shape)], attributes, machine="generic")
            assert_close(got, want.astype(dtype))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dtype", [F32, F64, np.float16, np.int8])
def test_folding(window: Any, dtype: Any) -> None:
    kernel, stride, dilation, padding = window
    rows, columns = windows(5, 0, window), windows(9, 1, window)
    # thirds: sums of f64 are not those of f32; sums of i8 wrap
    numbers = np.random.default_rng(4).integers(-99, 99, (2, 3, *kernel, rows, columns))
    x = (numbers if dtype is np.int8 else numbers / 3).astype(dtype)
    want = np.zeros((2, 3, 5, 9), I64 if dtype is np.int8 else F64)
    for r, s, i, j in np.ndindex(*kernel, rows, columns):
        h, w = (
            i * stride[0] + r * dilation[0] - padding[0],
            j * stride[1] + s * dilation[1] - padding[2],
        )
        if 0 <= h < 5 and 0 <= w < 9:
            want[:, :, h, w] += x[:, :, r, s, i, j]
    flat = x.reshape(2, 3 * kernel[0] * kernel[1], rows * columns)
    attributes = dict(zip(("kernel", "stride", "dilation", "padding"), window, strict=True))
    (got,) = interpreted("mo.fold", [flat], [(dtype, want.shape)], attributes, machine="generic")
    assert_close(got, want.astype(dtype))


SIZES = (((1, 1), (3, 2)), ((2, 3), (1, 1)), ((3, 7), (7, 3)), ((4, 5), (5, 9)), ((6, 2), (6, 2)))
"""Sizes of images before and after."""


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_resizing(mode: str, dtype: Any) -> None:
    rng = np.random.default_rng(5)
    options = {} if mode == "nearest" else {"align_corners": False}
    for size, other in SIZES:
        x = rng.standard_normal((2, 1, *size)).astype(dtype)
        want = torch.nn.functional.interpolate(torch.from_numpy(x), other, mode=mode, **options)
        for workers in (1, 2):
            (got,) = interpreted(
                "mo.resize", [x], [(dtype, (2, 1, *other))], {"mode": mode}, workers, "generic"
            )
            assert_close(got, want.numpy(), scale=20.0)


def overlap(a: Array, b: Array) -> float:
    low = np.maximum(np.minimum(a[:2], a[2:]), np.minimum(b[:2], b[2:]))
    high = np.minimum(np.maximum(a[:2], a[2:]), np.maximum(b[:2], b[2:]))
    common = np.prod(np.maximum(high - low, 0))
    union = sum(abs(np.prod(x[2:] - x[:2])) for x in (a, b)) - common
    return float(common / union) if union else 0.0


def kept(boxes: Array, scores: Array, most: int, max_overlap: float, least: float) -> list[int]:
    """The boxes that stay: each has the greatest score of those that overlap none of the boxes before."""
    result: list[int] = []
    for i in np.argsort(-np.where(np.isnan(scores), -np.inf, scores), kind="stable"):
        if len(result) == max(most, 0) or not scores[i] > least:
            continue
        if all(overlap(boxes[i], boxes[j]) <= max_overlap for j in result):
            result.append(int(i))
    return result


@pytest.mark.parametrize("dtype", [F32, F64])
def test_suppression(dtype: Any) -> None:
    rng = np.random.default_rng(6)
    for count, most in ((0, 3), (1, 0), (1, 1), (7, 2), (7, 7), (20, 19), (20, 2**62), (5, -1)):
        # halves: overlaps are exact, and some equal the threshold
        boxes = rng.integers(0, 5, (2, count, 4)).astype(dtype)
        scores = rng.integers(0, 6, (2, 3, count)).astype(dtype)
        scores.flat[::7] = np.nan
        operands = [boxes, scores, np.array(most), np.array(0.5, F32), np.array(1, F32)]
        (got,) = interpreted("mo.nms", operands, [(I64, scores.shape)], {}, machine="generic")
        for b, c in np.ndindex(2, 3):
            want = kept(boxes[b], scores[b, c], most, 0.5, 1)
            assert got[b, c].tolist() == [*want, *[-1] * (count - len(want))]


def test_boxes_without_an_area() -> None:
    """Their overlap is 0, which is more than a negative threshold."""
    boxes, scores = np.ones((1, 3, 4), F32), np.array([[[1, 3, 2]]], F32)
    for most, expected in ((-0.5, [1, -1, -1]), (0.0, [1, 2, 0])):
        operands = [boxes, scores, np.array(3), np.array(most, F32), np.array(0, F32)]
        (got,) = interpreted("mo.nms", operands, [(I64, scores.shape)])
        assert got.tolist() == [[expected]]


def sampled(image: Array, y: float, x: float) -> Array | None:
    """The weighted elements around a place of an image; None outside."""
    height, width, _ = image.shape
    if not (-1 <= y <= height and -1 <= x <= width):
        return None
    y, x = max(y, 0.0), max(x, 0.0)
    top, left = min(int(y), height - 1), min(int(x), width - 1)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    v, h = y - top, x - left
    return np.stack([
        image[top, left] * (1 - v) * (1 - h), image[top, right] * (1 - v) * h,
        image[bottom, left] * v * (1 - h), image[bottom, right] * v * h,
    ])  # fmt: skip


REGIONS = [
    [0, 0, 0, 7, 5], [1, -2, -2, 2, 2], [1, 3.5, 1.5, 8, 9], [0, 6, 4, 6, 4], [0, -1, -1, -1, -1],
    [1, 2, 2, 2, 14], [0, 4, 3, 1, 1], [0, 100, 100, 110, 110], [0, 9, 2, 16, 11],
]  # fmt: skip
"""Image, left, top, right, bottom: within the image, over its edges, of one place, reversed, and outside."""


@pytest.mark.parametrize("mode", ["AVG", "MAX"])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(("samples", "dtype"), [(0, F32), (1, F32), (2, F64)])
def test_regions(mode: str, aligned: bool, samples: int, dtype: Any) -> None:
    x = np.random.default_rng(7).standard_normal((2, 5, 7, 5)).astype(dtype)
    rois, scale, bins = np.array(REGIONS, dtype), 0.5, (2, 3)
    want = np.zeros((len(rois), *bins, 5), F64)
    for m, (image, *corners) in enumerate(rois.astype(F64)):
        low = np.array(corners[1::-1]) * scale - 0.5 * aligned
        size = np.array(corners[3:1:-1]) * scale - 0.5 * aligned - low
        size = size if aligned else np.maximum(size, 1)
        counts = [samples or max(int(np.ceil(s / n)), 0) for s, n in zip(size, bins, strict=True)]
        for i, j in np.ndindex(*bins):
            found = []
            for p, q in np.ndindex(*counts):
                at = low + size / bins * (np.array((i, j)) + (np.array((p, q)) + 0.5) / counts)
                part = sampled(x[int(image)].astype(F64), *at)
                found.append(np.zeros((4, 5)) if part is None else part)
            if found:
                parts = np.stack(found)
                want[m, i, j] = parts.sum(1).mean(0) if mode == "AVG" else parts.max((0, 1))
    attributes = {
        "output_height": 2, "output_width": 3, "spatial_scale": scale, "sampling_ratio": samples, "aligned": aligned,
        "mode": mode,
    }  # fmt: skip
    (got,) = interpreted("mo.roi_align", [x, rois], [(dtype, want.shape)], attributes, 1, "generic")
    assert_close(got, want.astype(dtype), scale=20.0)


def regions(x: Array, region: list[float], samples: int) -> list[Array]:
    attributes = {"spatial_scale": 1.0, "sampling_ratio": samples, "aligned": True, "mode": "AVG"}
    rois = np.array([[0, 0, 0, 1, 1], region], F32)
    return interpreted("mo.roi_align", [x, rois], [(F32, (2, 1, 1, 1))], attributes)


def test_regions_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roi_align, "MAX_SAMPLES", 4)
    x = np.ones((2, 3, 3, 1), F32)
    for number in (2, -1, np.nan, np.inf):
        with pytest.raises(IndexError, match=f"region 1 is of image {number}.* of 2"):
            regions(x, [number, 0, 0, 1, 1], 1)
    for length in (4.5, np.nan):
        for corners in ([0, 0, 1, length], [0, 0, length, 1]):
            with pytest.raises(ValueError, match="region 1 is .* for 1 bins, expected at most 4"):
                regions(x, [1, *corners], 0)
            regions(x, [1, *corners], 2)
    regions(x, [1, 0, 0, 4, 4], 0)
