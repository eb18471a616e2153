"""Resizing of images: the nearest element, or weighted sums of two (bilinear) or four (bicubic) neighbors along each
axis.

The places of columns are the same for all lines and are computed first; then a task is a line of the result.

Pixel centers are at halves: element `i` of `n` is at `(i + 0.5) / n`, as in PyTorch without `align_corners`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.kernel_call import KernelCall, Operand, Workspace, view
from max.dtype import DType

CUBIC = -0.75
"""The slope of the cubic weights at the first neighbor."""


@k.inline
def source(
    position: k.Value, size: k.Value, input_size: k.Value, mode: str, dtype: k.ScalarType
) -> Any:
    """The element of an axis of `input_size` before a position of an axis of `size`, and their distance in elements."""
    if mode == "nearest":
        return position * input_size // size, dtype(0)
    # in integers, as multiples of half a pixel, so that positions are exact
    numerator = (2 * position + 1) * input_size - size
    if mode == "bilinear":
        # bilinear: places before the first pixel center repeat the edge
        numerator = k.max(numerator, 0)
    first = numerator // (2 * size)
    return first, k.cast(numerator - first * (2 * size), dtype) / k.cast(2 * size, dtype)


@k.inline
def interpolation_weights(t: k.Value, mode: str) -> Any:
    """The weights of the neighbors of a place that is `t` after the first of them, or after the second of four."""
    if mode == "nearest":
        return (None,)
    if mode == "bilinear":
        return (1.0 - t, t)
    near = 1.0 - t
    return (
        far_weight(t + 1.0),
        ((CUBIC + 2.0) * t - (CUBIC + 3.0)) * t * t + 1.0,
        ((CUBIC + 2.0) * near - (CUBIC + 3.0)) * near * near + 1.0,
        far_weight(near + 1.0),
    )


@k.inline
def far_weight(d: k.Value) -> Any:
    """The cubic weight of an element at a distance between 1 and 2."""
    return ((CUBIC * d - 5.0 * CUBIC) * d + 8.0 * CUBIC) * d - 4.0 * CUBIC


@k.kernel
def resize(
    out: k.Output, x: k.Input, firsts: k.InOut, behind: k.InOut, ctx: k.Context, *, mode: str
) -> None:
    """`out` `[N, H, W]` from `x` `[N, h, w]`; the workspaces are `[W]`: each column's place in a row of `x`."""
    sums = behind.dtype
    width = ctx.target.width(k.f64 if sums == k.f64 else k.f32)
    columns = out.shape[2]
    # bicubic: one neighbor lies before the place's first
    before = 1 if mode == "bicubic" else 0
    for j in ctx.parallel(columns):
        first, t = source(j, columns, x.shape[2], mode, sums)
        firsts[j] = first
        behind[j] = t
    ctx.barrier()
    for n, i in ctx.parallel((out.shape[0], out.shape[1])):
        top, t = source(i, out.shape[1], x.shape[1], mode, sums)
        vertical = interpolation_weights(t, mode)
        for j, mask in k.vectors(columns, width):
            at = firsts.load(j, width=width, mask=mask)
            if mode == "nearest":
                out.store(n, i, j, value=x[n, top].gather(at, mask=mask), mask=mask)
            else:
                horizontal = interpolation_weights(behind.load(j, width=width, mask=mask), mode)
                total = k.splat(sums(0), width)
                for r in k.static_range(len(vertical)):
                    # rows past an edge repeat it
                    row = x[n, k.min(k.max(top + r - before, 0), x.shape[1] - 1)]
                    part = k.splat(sums(0), width)
                    for s in k.static_range(len(horizontal)):
                        place = k.min(k.max(at + (s - before), 0), k.i32(x.shape[2] - 1))
                        part += k.cast(row.gather(place, mask=mask), sums) * horizontal[s]
                    total += part * vertical[r]
                out.store(n, i, j, value=total, mask=mask)


def _lower_resize(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.resize`, with workspaces for each column's place in a row of x."""
    (x,) = operands
    (out,) = results
    sums = DType.float64 if x.dtype is DType.float64 else DType.float32
    workspaces = (Workspace(DType.int32, (out.shape[3],)), Workspace(sums, (out.shape[3],)))
    planes = ((0, 1), (2,), (3,))
    args = (
        view("result", 0, out, planes, static=False),
        view("operand", 0, x, planes, static=False),
        *(view("workspace", i, space, static=False) for i, space in enumerate(workspaces)),
    )
    return KernelCall(resize, args, {"mode": attributes["mode"]}, workspaces=workspaces)


LOWERINGS = {"mo.resize": _lower_resize}
