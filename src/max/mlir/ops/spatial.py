"""Ops over the spatial axes of images and volumes: convolution, pooling, resize, fold.

Images are ``[N, H, W, C]``, volumes ``[N, D, H, W, C]``; filters are ``[R, S, C, F]`` or ``[Q, R, S, C, F]``.
Attributes have one number per spatial axis; paddings have two, before and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import mul

from max.dtype import DType
from max.mlir.conditions import Condition
from max.mlir.dims import DimExpr
from max.mlir.operation import Attrs, Conditions, Infer, OpSpec, Types, define, same_device, tensor
from max.mlir.types import TensorType


def _counts(op: str, attrs: Attrs, spatial: int) -> None:
    """Checks length and minimum of the attributes over spatial axes."""
    for name, length, least in (
        ("kernel", spatial, 1),
        ("stride", spatial, 1),
        ("dilation", spatial, 1),
        ("padding", 2 * spatial, 0),
        ("output_padding", spatial, 0),
    ):
        if name in attrs:
            values: tuple[int, ...] = attrs[name]
            if len(values) != length or min(values) < least:
                raise ValueError(
                    f"{op}: {name} is {list(values)}, expected {length} numbers, {least} or more"
                )


def _window_size(
    op: str, x: TensorType, axis: int, taps: DimExpr, dilation: int, stride: int, padding: int
) -> DimExpr:
    """The number of windows of `taps` elements along an axis with `padding` on both sides together."""
    # from the first to the last element of a window
    reach = (taps - 1) * dilation + 1
    room = x.shape[axis] + padding - reach
    if room.is_static and room.value < 0:
        raise ValueError(
            f"{op}: the window reaches over {reach} elements, axis {axis} of {x.short} has "
            f"{x.shape[axis] + padding} with its padding"
        )
    return room // stride + 1


def _window_conditions(x: TensorType, y: TensorType, op: str) -> list[Condition]:
    """Conditions that each spatial axis of images has a window, where only a run knows the sizes."""
    return [
        Condition.at_least(
            y.shape[axis],
            1,
            f"{op}: the window is larger than axis {axis} of {x.short} with its padding",
        )
        for axis in range(1, x.rank - 1)
    ]


def _operands(op: str, types: Types, ranks: Sequence[int]) -> tuple[TensorType, TensorType]:
    """The input and the filter, checked for one of the ranks, one dtype of numbers and one device."""
    x, weight = tensor(op, types, 0), tensor(op, types, 1)
    if x.rank not in ranks or weight.rank != x.rank:
        raise ValueError(
            f"{op}: the input is {x.short}, the filter {weight.short}; both must have rank "
            + " or ".join(str(rank) for rank in ranks)
        )
    if x.dtype is not weight.dtype or x.dtype is DType.bool:
        raise TypeError(
            f"{op}: the input is {x.short}, the filter {weight.short}; expected numbers of one dtype"
        )
    same_device(op, [x, weight])
    return x, weight


def _differ(x: DimExpr, y: DimExpr) -> bool:
    """Whether two dimensions can never be equal."""
    missing = x - y
    return missing.is_static and missing.value != 0


def _infer_conv(types: Types, attrs: Attrs) -> Types:
    """The result: the input with the sizes of its windows and the filter's features."""
    x, weight = _operands("conv", types, (4, 5))
    _counts("conv", attrs, x.rank - 2)
    groups: int = attrs["groups"]
    if groups < 1:
        raise ValueError(f"conv: groups is {groups}, expected 1 or more")
    channels, features = weight.shape[-2:]  # of one group, of all groups
    if _differ(channels * groups, x.shape[-1]):
        raise ValueError(
            f"conv: the input {x.short} has {x.shape[-1]} channels; the filter {weight.short} takes "
            f"{channels} in each of {groups} groups"
        )
    if features.is_static and features.value % groups:
        raise ValueError(
            f"conv: the filter {weight.short} gives {features} channels, which is not a multiple of "
            f"groups, {groups}"
        )
    padding: tuple[int, ...] = attrs["padding"]
    sizes = [
        _window_size(
            "conv", x, 1 + i, weight.shape[i], attrs["dilation"][i], attrs["stride"][i],
            padding[2 * i] + padding[2 * i + 1],
        )
        for i in range(x.rank - 2)
    ]  # fmt: skip
    return (x.with_shape([x.shape[0], *sizes, features]),)


def _conv_conditions(operands: Types, results: Types, attrs: Attrs) -> list[Condition]:
    """Conditions that windows fit, that input and filter have the same channels, that groups divide the features."""
    x, weight = tensor("conv", operands, 0), tensor("conv", operands, 1)
    groups: int = attrs["groups"]
    channels, features = weight.shape[-2:]
    conditions = [
        *_window_conditions(x, tensor("conv", results, 0), "conv"),
        Condition.equal(
            x.shape[-1],
            channels * groups,
            f"conv: the channels of {x.short} are not those of {groups} groups of {weight.short}",
        ),
    ]
    if groups > 1:
        message = f"conv: the features of {weight.short} are not a multiple of groups, {groups}"
        conditions.append(Condition.equal(features, features // groups * groups, message))
    return conditions


def _conv_flops(operands: Types, results: Types) -> DimExpr:
    """A multiplication and an addition for each element of the result and each one of its window."""
    window = tensor("conv", operands, 1).shape[:-1]  # taps, channels of a group
    return reduce(mul, window, tensor("conv", results, 0).num_elements * 2)


_WINDOW = {"stride": tuple, "dilation": tuple, "padding": tuple}

ConvOp = define(
    OpSpec(
        "mo.conv",
        (2, 2),
        1,
        attributes={**_WINDOW, "groups": int},
        infer=_infer_conv,
        conditions=_conv_conditions,
        flops=_conv_flops,
        packable=True,
        takes_epilogue=True,
        separates=True,
        takes="x `[N, H, W, C]` or `[N, D, H, W, C]`, filter `[taps…, C / groups, F]`",
        doc="`stride`, `dilation`, `padding` (before and after each axis), `groups`",
    )
)


def _infer_conv_transpose(types: Types, attrs: Attrs) -> Types:
    """The result: `[N, height, width, features]`, with sizes by stride, dilation, padding and output padding."""
    x, weight = _operands("conv_transpose", types, (4,))
    _counts("conv_transpose", attrs, 2)
    if _differ(weight.shape[-2], x.shape[-1]):
        raise ValueError(
            f"conv_transpose: the input {x.short} has {x.shape[-1]} channels, the filter "
            f"{weight.short} takes {weight.shape[-2]}"
        )
    sizes: list[DimExpr] = []
    for i in range(2):
        taps = weight.shape[i]
        stride, dilation, more = (
            int(attrs[name][i]) for name in ("stride", "dilation", "output_padding")
        )
        if not taps.is_static:
            raise ValueError(f"conv_transpose: axis {i} of the filter {weight.short} is not static")
        if more >= max(stride, dilation):
            raise ValueError(
                f"conv_transpose: output padding {more} of axis {1 + i} must be less than its stride "
                f"{stride} or its dilation {dilation}"
            )
        cut = sum(attrs["padding"][2 * i : 2 * i + 2])
        # the size for which a convolution has as many windows as the input has elements
        size = (x.shape[1 + i] - 1) * stride + ((taps - 1) * dilation + 1 + more - cut)
        if size.is_static and size.value < 0:
            raise ValueError(
                f"conv_transpose: axis {1 + i} of {x.short} would have size {size}; the padding "
                f"{cut} is too large"
            )
        sizes.append(size)
    return (x.with_shape([x.shape[0], *sizes, weight.shape[-1]]),)


def _conv_transpose_conditions(operands: Types, results: Types, attrs: Attrs) -> list[Condition]:
    x, weight = tensor("conv_transpose", operands, 0), tensor("conv_transpose", operands, 1)
    message = f"conv_transpose: the channels of {x.short} are not those of {weight.short}"
    return [Condition.equal(x.shape[-1], weight.shape[-2], message)]


define(
    OpSpec(
        "mo.conv_transpose",
        (2, 2),
        1,
        attributes={**_WINDOW, "output_padding": tuple},
        infer=_infer_conv_transpose,
        conditions=_conv_transpose_conditions,
        takes_epilogue=True,
        separates=True,
        takes="x `[N, H, W, C]`, filter `[R, S, C, F]`",
        doc="each element of x adds a window to the result, which `padding` then cuts",
    )
)


def pooled_size(
    size: DimExpr, taps: int, dilation: int, stride: int, before: int, after: int, ceil: bool
) -> DimExpr:
    """The number of pooling windows along an axis.

    Args:
        size: The size of the axis.
        taps: The number of elements of the window.
        dilation: The distance between these elements.
        stride: The distance between windows.
        before: The padding before the axis.
        after: The padding after the axis.
        ceil: Whether to round up: a last window may exceed the padding if it starts before the trailing padding.
    """
    # `stride` for the first window, so that one division gives their number
    room = before + after - dilation * (taps - 1) - 1 + stride
    if ceil:
        # rounded up, but without windows that start in the trailing padding
        room = min(room + stride - 1, before + stride - 1)
    return (size + room) // stride


def _pool(op: str) -> Infer:
    """The rule of a pooling op: the input with the sizes of its windows."""

    def infer(types: Types, attrs: Attrs) -> Types:
        x = tensor(op, types, 0)
        if x.rank != 4:
            raise ValueError(f"{op}: the input is {x.short}, expected rank 4: [N, H, W, C]")
        if x.dtype is DType.bool:
            raise TypeError(f"{op}: the input is {x.short}, expected numbers")
        _counts(op, attrs, 2)
        sizes: list[DimExpr] = []
        for i in range(2):
            taps, dilation, stride = (int(attrs[n][i]) for n in ("kernel", "dilation", "stride"))
            before, after = attrs["padding"][2 * i : 2 * i + 2]
            reach = dilation * (taps - 1) + 1
            # so that each window has an element of the image
            if 2 * max(before, after) > reach:
                raise ValueError(
                    f"{op}: the padding {[before, after]} of axis {1 + i} is more than half of the "
                    f"window, which reaches over {reach} elements"
                )
            size = pooled_size(
                x.shape[1 + i], taps, dilation, stride, before, after, attrs["ceil_mode"]
            )
            if size.is_static and size.value < 1:
                raise ValueError(
                    f"{op}: the window reaches over {reach} elements, axis {1 + i} of {x.short} has "
                    f"{x.shape[1 + i] + before + after} with its padding"
                )
            sizes.append(size)
        return (x.with_shape([x.shape[0], *sizes, x.shape[3]]),)

    return infer


def _pool_conditions(op: str) -> Conditions:
    return lambda operands, results, attrs: _window_conditions(
        tensor(op, operands, 0), tensor(op, results, 0), op
    )


_POOL = {"kernel": tuple, **_WINDOW, "ceil_mode": bool}

define(
    OpSpec(
        "mo.max_pool",
        (1, 1),
        1,
        attributes=_POOL,
        infer=_pool("max_pool"),
        conditions=_pool_conditions("max_pool"),
        takes="x `[N, H, W, C]`",
        doc="`kernel`, `stride`, `dilation`, `padding`, `ceil_mode`; `count_boundary`",
    )
)
define(
    OpSpec(
        "mo.avg_pool",
        (1, 1),
        1,
        attributes={**_POOL, "count_boundary": bool},
        infer=_pool("avg_pool"),
        conditions=_pool_conditions("avg_pool"),
        takes="x `[N, H, W, C]`",
        doc="means of windows, by size `kernel`; those that reach into the padding count it if `count_boundary`",
    )
)

RESIZE_MODES = ("nearest", "bilinear", "bicubic")


def _check_resize(operands: Types, results: Types, attrs: Attrs) -> None:
    """Checks rank 4, a known mode, and that only H and W change."""
    x, y = tensor("resize", operands, 0), tensor("resize", results, 0)
    mode: str = attrs["mode"]
    if mode not in RESIZE_MODES:
        raise ValueError(f"resize: the mode is {mode!r}, expected {', '.join(RESIZE_MODES)}")
    if x.rank != 4 or x.with_shape(y.shape) != y or y.shape[:2] != x.shape[:2]:
        raise ValueError(
            f"resize: {x.short} to {y.short}; expected rank 4, [N, C, H, W], and another H and W only"
        )
    if x.dtype is DType.bool or (mode != "nearest" and not x.dtype.is_float()):
        raise TypeError(
            f"resize: the operand is {x.short}, expected a floating-point type for the mode {mode}"
        )
    for axis in (2, 3):
        if x.shape[axis] == 0 and y.shape[axis] != 0:
            raise ValueError(f"resize: axis {axis} of {x.short} is empty")


def _resize_conditions(operands: Types, results: Types, attrs: Attrs) -> list[Condition]:
    """Conditions that axes to resize are not empty."""
    x, y = tensor("resize", operands, 0), tensor("resize", results, 0)
    return [
        Condition.at_least(x.shape[axis], 1, f"resize: axis {axis} of {x.short} is empty")
        for axis in (2, 3)
        if y.shape[axis] != 0
    ]


define(
    OpSpec(
        "mo.resize",
        (1, 1),
        1,
        attributes={"mode": str},
        check=_check_resize,
        conditions=_resize_conditions,
        takes="x `[N, C, H, W]`",
        doc=(
            "`mode` = nearest, bilinear, bicubic; to the result's H and W; pixel centers at halves"
        ),
    )
)


def _check_fold(operands: Types, results: Types, attrs: Attrs) -> None:
    """Checks ranks and dtypes, and the numbers of channels and blocks where they are static."""
    x, y = tensor("fold", operands, 0), tensor("fold", results, 0)
    _counts("fold", attrs, 2)
    if x.rank != 3 or y.rank != 4 or x.dtype is not y.dtype or x.dtype is DType.bool:
        raise ValueError(
            f"fold: {x.short} to {y.short}; expected numbers [N, C * kernel, L] to [N, C, H, W]"
        )
    taps = int(attrs["kernel"][0]) * int(attrs["kernel"][1])
    if y.shape[0] != x.shape[0] or _differ(y.shape[1] * taps, x.shape[1]):
        raise ValueError(
            f"fold: axis 1 of {x.short} must be C * {taps}, the window's elements, for {y.short}"
        )
    blocks = reduce(mul, _fold_windows(y, attrs))
    missing = blocks - x.shape[2]
    if missing.is_static and missing.value:
        raise ValueError(f"fold: {x.short} has {x.shape[2]} blocks, {y.short} has {blocks}")


def _fold_windows(y: TensorType, attrs: Attrs) -> list[DimExpr]:
    """The number of windows along each spatial axis of a fold's result."""
    windows: list[DimExpr] = []
    for i in range(2):
        size, dilation, stride = (int(attrs[n][i]) for n in ("kernel", "dilation", "stride"))
        padding = sum(attrs["padding"][2 * i : 2 * i + 2])
        window = DimExpr.constant(size)
        windows.append(_window_size("fold", y, 2 + i, window, dilation, stride, padding))
    return windows


def _fold_conditions(operands: Types, results: Types, attrs: Attrs) -> list[Condition]:
    """Conditions that the windows fit, and that channels and blocks fill the result."""
    x, y = tensor("fold", operands, 0), tensor("fold", results, 0)
    windows = _fold_windows(y, attrs)
    fits = [
        Condition.at_least(
            count, 1, f"fold: the window does not fit into axis {2 + i} of {y.short}"
        )
        for i, count in enumerate(windows)
    ]
    taps = int(attrs["kernel"][0]) * int(attrs["kernel"][1])
    message = f"fold: axis 1 of {x.short} is not a multiple of {taps}, the elements of a window"
    fits.append(Condition.equal(x.shape[1], y.shape[1] * taps, message))
    message = f"fold: {x.short} has {x.shape[2]} blocks, which do not fill {y.short}"
    return [*fits, Condition.equal(x.shape[2], reduce(mul, windows), message)]


define(
    OpSpec(
        "mo.fold",
        (1, 1),
        1,
        attributes={"kernel": tuple, **_WINDOW},
        check=_check_fold,
        conditions=_fold_conditions,
        takes="x `[N, C * kernel, L]`",
        doc="the sum of windows, to the result's `[N, C, H, W]`",
    )
)
