"""Pooling over images: the maximum or the mean of windows. A task is a line of the result; channels are the lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.convolution.inputs import inside
from max._backends.kernel_call import KernelCall, Lowering, Operand, run_time_views


@k.inline
def accumulator_dtype(dtype: k.ScalarType) -> Any:
    """The dtype of sums and maxima of windows: of 32 bits or more."""
    if dtype.bits >= 32:
        return dtype
    return k.f32 if dtype.is_float else k.i32


@k.kernel
def pool(
    out: k.Output,
    x: k.Input,
    ctx: k.Context,
    *,
    kernel: Any,
    stride: Any,
    dilation: Any,
    padding: Any,
    mean: bool,
    count_boundary: bool,
) -> None:
    """`out` `[N, H, W, C]` is the maximum of windows of `x` `[N, H, W, C]`, or their mean.

    Taps in the padding do not count, but for a mean with `count_boundary`, for which they are zeros.
    """
    sum_dtype = accumulator_dtype(out.dtype)
    if not out.dtype.is_float:
        # a sum of integers may exceed their dtype, a maximum does not
        sum_dtype = k.i64 if mean else out.dtype
    width = ctx.target.width(sum_dtype)
    channels = out.shape[3]
    for n, h in ctx.parallel((out.shape[0], out.shape[1])):
        top = h * stride[0] - padding[0]
        first_r, last_r = inside(top, dilation[0], kernel[0], x.shape[1])
        # taps behind the padding never count
        _, all_r = inside(
            top + padding[0], dilation[0], kernel[0], x.shape[1] + padding[0] + padding[1]
        )
        for w in range(out.shape[2]):
            left = w * stride[1] - padding[2]
            first_s, last_s = inside(left, dilation[1], kernel[1], x.shape[2])
            if count_boundary:
                _, all_s = inside(
                    left + padding[2], dilation[1], kernel[1], x.shape[2] + padding[2] + padding[3]
                )
                count = all_r * all_s
            else:
                count = (last_r - first_r) * (last_s - first_s)
            # a window without a tap is 0
            count = k.max(count, 1)
            for c, mask in k.vectors(channels, width):
                if mean:
                    total = k.splat(sum_dtype(0), width)
                else:
                    total = k.splat(sum_dtype(lowest(out.dtype)), width)
                for r in range(first_r, last_r):
                    for s in range(first_s, last_s):
                        value = x.load(
                            n, top + r * dilation[0], left + s * dilation[1], c,
                            width=width, mask=mask,
                        )  # fmt: skip
                        total = total + value if mean else k.max(total, value)
                if mean:
                    if sum_dtype.is_float:
                        total = total / sum_dtype(count)
                    else:
                        total = total // sum_dtype(count)
                out.store(n, h, w, c, value=total, mask=mask)


@k.inline
def lowest(dtype: k.ScalarType) -> Any:
    """The least value of a dtype."""
    if dtype.is_float:
        return dtype(float("-inf"))
    elif dtype.kind == "i":
        return dtype(-(2 ** (dtype.bits - 1)))
    else:
        return dtype(0)


def _lower_pool(mean: bool) -> Lowering:
    """The lowering of `mo.avg_pool` (`mean`) or `mo.max_pool`."""

    def lower(
        operands: Sequence[Operand],
        results: Sequence[Operand],
        attributes: Mapping[str, Any],
        target: k.Target,
    ) -> KernelCall:
        args = run_time_views(results, operands)
        names = ("kernel", "stride", "dilation", "padding")
        params: dict[str, Any] = {name: tuple(int(n) for n in attributes[name]) for name in names}
        params["mean"] = mean
        params["count_boundary"] = mean and bool(attributes["count_boundary"])
        return KernelCall(pool, args, params)

    return lower


LOWERINGS = {"mo.max_pool": _lower_pool(False), "mo.avg_pool": _lower_pool(True)}
