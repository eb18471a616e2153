"""Folding (col2im): each element of an image is the sum of the elements of all windows that cover it.

A task is a line of a channel; it goes vector by vector of positions, and gathers from the windows of each tap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.kernel_call import KernelCall, Operand, run_time_views


@k.kernel
def fold(
    out: k.Output,
    x: k.Input,
    ctx: k.Context,
    *,
    kernel: Any,
    stride: Any,
    dilation: Any,
    padding: Any,
) -> None:
    """`out` `[N, C, H, W]` from `x` `[N, C * kernel, L]`, whose last axis are the windows, row by row."""
    sums = k.f32 if out.dtype.is_float and out.dtype.bits < 32 else out.dtype
    width = ctx.target.width(k.f64 if sums.bits == 64 else k.f32)
    # the last place of a window along each axis
    high = out.shape[2] + padding[0] + padding[1] - dilation[0] * (kernel[0] - 1) - 1
    wide = out.shape[3] + padding[2] + padding[3] - dilation[1] * (kernel[1] - 1) - 1
    rows = high // stride[0] + 1
    columns = wide // stride[1] + 1
    for n, c, h in ctx.parallel((out.shape[0], out.shape[1], out.shape[2])):
        for j, mask in k.vectors(out.shape[3], width):
            total = k.splat(sums(0), width)
            for r in range(kernel[0]):
                from_h = h + padding[0] - r * dilation[0]
                row = from_h // stride[0]
                # other taps fall between windows
                if from_h % stride[0] == 0 and row >= 0 and row < rows:
                    for s in range(kernel[1]):
                        windows = x[n, (c * kernel[0] + r) * kernel[1] + s]
                        from_w = k.iota(k.i32, width) + k.i32(j + padding[2] - s * dilation[1])
                        column = from_w // stride[1] if stride[1] > 1 else from_w
                        seen = (column >= 0) & (column < k.i32(columns))
                        if stride[1] > 1:
                            # a column between two windows sees neither
                            seen = seen & (column * stride[1] == from_w)
                        line = windows[row * columns :]
                        total += k.cast(line.gather(column, mask=seen, other=0), sums)
            out.store(n, c, h, j, value=total, mask=mask)


def _lower_fold(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.fold`."""
    args = run_time_views(results, operands)
    names = ("kernel", "stride", "dilation", "padding")
    return KernelCall(fold, args, {name: tuple(map(int, attributes[name])) for name in names})


LOWERINGS = {"mo.fold": _lower_fold}
