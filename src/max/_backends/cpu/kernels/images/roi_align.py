"""Regions of images, resampled to one size by bilinear interpolation: RoIAlign (https://arxiv.org/abs/1703.06870)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.kernel_call import KernelCall, Operand, run_time_views

MAX_SAMPLES = 4096
"""The greatest number of samples along an axis of a bin, where it follows from the size of the region."""


class Extent(NamedTuple):
    """The bins of a region along one axis of the image."""

    start: Any
    """The position where the first bin begins."""
    bin_size: Any
    """The size of a bin."""
    samples: Any
    """The number of samples in a bin."""


@k.inline
def extent(
    low: k.Value,
    high: k.Value,
    bins: k.Value,
    scale: float,
    samples: int,
    aligned: bool,
    region: k.View,
    real: k.ScalarType,
) -> Extent:
    """The bins between two coordinates of a region; raises where the number of samples follows from them and is too
    large.
    """
    # aligned: pixel centers are at halves
    offset = 0.5 if aligned else 0.0
    start = real(low) * scale - offset
    size = (real(high) * scale - offset) - start
    # without alignment a region is at least one pixel long
    if not aligned:
        size = k.max(size, real(1.0))
    bin_size = size / real(bins)
    count = k.i64(samples)
    if samples == 0:
        # false for NaN too
        if not (bin_size <= float(MAX_SAMPLES)):
            raise ValueError(
                "region {} is {} pixels long for {} bins, expected at most {} pixels a bin",
                region, size, bins, MAX_SAMPLES,
            )  # fmt: skip
        count = k.i64(k.ceil(k.max(bin_size, real(0.0))))
    return Extent(start, bin_size, count)


@k.inline
def neighbors(e: Extent, bin_index: Any, sample: Any, size: k.Value) -> Any:
    """Where a sample lies: whether it is inside of the image, the elements before and behind it, and the weight of the
    latter.
    """
    real = e.start.dtype
    step = (real(sample) + 0.5) * e.bin_size / real(e.samples)
    position = e.start + real(bin_index) * e.bin_size + step
    # false for NaN
    within = (position >= -1.0) & (position <= real(size))
    # between -1 and 0 the edge repeats
    position = k.max(position, real(0.0)) if within else real(0.0)
    low = k.min(k.i64(position), size - 1)
    return within, low, k.min(low + 1, size - 1), position - real(low)


@k.kernel
def roi_align(
    out: k.Output,
    x: k.Input,
    rois: k.Input,
    ctx: k.Context,
    *,
    scale: float,
    samples: int,
    aligned: bool,
    mean: bool,
) -> None:
    """`out` `[M, H', W', C]` from `x` `[N, H, W, C]` and regions `rois` `[M, 5]`: image, left, top, right, bottom.

    A bin is the mean of its samples, or the greatest of the weighted elements around them; samples outside are 0.
    """
    wide = k.f64 if out.dtype == k.f64 else k.f32
    real = k.f64 if rois.dtype == k.f64 else k.f32
    width = ctx.target.width(wide)
    for m, i in ctx.parallel((out.shape[0], out.shape[1])):
        number = real(rois[m, 0])
        if not ((number >= 0.0) & (number < real(x.shape[0]))):
            raise IndexError("region {} is of image {} of {}", m, number, x.shape[0])
        image = k.i64(number)
        down = extent(rois[m, 2], rois[m, 4], out.shape[1], scale, samples, aligned, m, real)
        across = extent(rois[m, 1], rois[m, 3], out.shape[2], scale, samples, aligned, m, real)
        count = down.samples * across.samples
        for j in range(out.shape[2]):
            for c, mask in k.vectors(out.shape[3], width):
                total = k.splat(wide(0.0), width)
                if not mean and count > 0:
                    total = k.splat(wide(float("-inf")), width)
                for p in range(down.samples):
                    in_rows, top, bottom, v = neighbors(down, i, p, x.shape[1])
                    for q in range(across.samples):
                        in_columns, left, right, h = neighbors(across, j, q, x.shape[2])
                        if in_rows & in_columns:
                            a = k.cast(x.load(image, top, left, c, width=width, mask=mask), wide)
                            b = k.cast(x.load(image, top, right, c, width=width, mask=mask), wide)
                            d = k.cast(x.load(image, bottom, left, c, width=width, mask=mask), wide)
                            e = k.cast(
                                x.load(image, bottom, right, c, width=width, mask=mask), wide
                            )
                            a = a * wide((1.0 - v) * (1.0 - h))
                            b = b * wide((1.0 - v) * h)
                            d = d * wide(v * (1.0 - h))
                            e = e * wide(v * h)
                            if mean:
                                total = total + (a + b + d + e)
                            else:
                                total = k.max(total, k.max(k.max(a, b), k.max(d, e)))
                        elif not mean:
                            total = k.max(total, k.splat(wide(0.0), width))
                if mean:
                    total = total / wide(k.max(count, 1))
                out.store(m, i, j, c, value=total, mask=mask)


def _lower_roi_align(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.roi_align`."""
    args = run_time_views(results, operands)
    params = {
        "scale": float(attributes["spatial_scale"]),
        "samples": int(attributes["sampling_ratio"]),
        "aligned": bool(attributes["aligned"]),
        "mean": attributes["mode"] == "AVG",
    }
    return KernelCall(roi_align, args, params)


LOWERINGS = {"mo.roi_align": _lower_roi_align}
