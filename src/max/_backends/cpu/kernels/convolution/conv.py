"""Convolutions over images and volumes: kernels and lowerings.

The filter is packed as strips of 32 columns: a constant filter once, when a model is loaded (`mok.pack_filter`), others
by all workers before they begin. Each position of the result is an offset into the input, which is read in place, or
from a workspace that has its padding around it and a group's channels side by side, or from copies of patches (see
`MODES` in `convolve`).

Filters are `[taps…, C, F]`. bf16 is multiplied in pairs of neighbors where the target can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.convolution.convolve import MAX_RUNS, convolve
from max._backends.cpu.kernels.convolution.filters import (
    Filter,
    conv_tiling,
    filter_tiling,
    pack_filter,
    pack_strips,
)
from max._backends.cpu.kernels.convolution.inputs import image_axes, pad_input, padded_sizes
from max._backends.cpu.kernels.convolution.narrow_groups import narrow_groups
from max._backends.cpu.kernels.convolution.patches import MAX_TAPS, RunTimeSteps, Steps, Window
from max._backends.cpu.kernels.products.blocking import is_long
from max._backends.cpu.kernels.tiles.strips import COLUMNS, Results, identity
from max._backends.cpu.kernels.tiles.tiling import Tiling
from max._backends.cpu.packing import has_narrow_groups, narrow_channels
from max._backends.kernel_call import (
    Arg,
    KernelCall,
    Operand,
    Scalar,
    Workspace,
    product,
    view,
)
from max.dtype import DType

MIN_RUN_LANES = 48
"""The minimum lanes of channels for reading patches with taps in the padding in place: checking each tap takes time."""
VECTOR = 64
"""The maximum number of elements of a vector."""


class PackedForm(NamedTuple):
    """What is known of a convolution with a packed filter when it is compiled.

    Args:
        taps: `[Q, R, S]`.
        dilation: From tap to tap along the axes.
        padding: Before and after each axis.
        groups: Groups of channels.
        reading: How patches are read; see `MODES` in `convolve`.
    """

    taps: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    groups: int
    reading: str


class Mode(NamedTuple):
    """How the products of a convolution are computed.

    Args:
        reading: How patches are read; see `MODES` in `convolve`.
        folds: Whether each K block has accumulators of its own; see `Patches`.
    """

    reading: str
    folds: bool


@k.kernel
def conv(
    out: k.Output,
    x: k.Input,
    weight: k.Input,
    packed: k.InOut,
    padded: k.InOut,
    *extra: k.Input,
    ctx: k.Context,
    steps: Steps,
    groups: int,
    mode: Mode,
    epilogue: Any = identity,
) -> None:
    """`out` `[N, D, H, W, F]` from `x` `[N, D, H, W, C]` and `weight` `[Q, R, S, C / groups, F]`."""
    t = conv_tiling(ctx.target, x.dtype, weight.dtype)
    stored = filter_tiling(ctx.target, weight.dtype, t)
    strips = packed.view(stored.lane)
    how = mode_of(mode.reading, x, t)
    pack_strips(strips, weight, groups, stored, ctx)
    if how != "in_place":
        pad(padded, x, steps.padding, groups, t, ctx)
    ctx.barrier()
    taps = (weight.shape[0], weight.shape[1], weight.shape[2])
    window = Window(taps, *steps)
    f = Filter(strips, weight.dtype, weight.shape[3], groups, stored)
    folds = int(mode.folds)
    convolve_image(out, x, padded, extra, f, window, how, folds, epilogue, t, ctx)


@k.kernel
def conv_packed(
    out: k.Output,
    x: k.Input,
    weight: k.Input,
    padded: k.InOut,
    steps: RunTimeSteps,
    *extra: k.Input,
    ctx: k.Context,
    form: PackedForm,
    epilogue: Any = identity,
) -> None:
    """`conv` with a packed filter, `[groups * strips, elements]`."""
    t = conv_tiling(ctx.target, x.dtype, weight.dtype)
    stored = filter_tiling(ctx.target, weight.dtype, t)
    strips = weight.reshape(weight.size).view(stored.lane)
    how, groups = mode_of(form.reading, x, t), form.groups
    if how != "in_place":
        pad(padded, x, form.padding, groups, t, ctx)
        ctx.barrier()
    stride = (steps.deep, steps.down, steps.along)
    window = Window(form.taps, stride, form.dilation, form.padding)
    # the shape of the packed filter does not say how many channels a group has
    f = Filter(strips, weight.dtype, x.shape[4] // groups, groups, stored)
    convolve_image(out, x, padded, extra, f, window, how, steps.folds, epilogue, t, ctx)


@k.inline
def convolve_image(
    out: Any,
    x: k.View,
    padded: k.View,
    extra: Any,
    f: Filter,
    window: Window,
    how: str,
    folds: Any,
    epilogue: Any,
    t: Tiling,
    ctx: Any,
) -> None:
    """Convolves an image, or its padded copy, with a packed filter: the common end of `conv` and `conv_packed`.

    Args:
        out: The result.
        x: The input.
        padded: The workspace of the padded input.
        extra: The operands of the epilogue.
        f: The packed filter.
        window: The taps and their positions.
        how: How patches are read; see `MODES` in `convolve`.
        folds: As of `convolve`.
        epilogue: The function that is called before results are stored.
        t: The tiling.
        ctx: The context.
    """
    results = Results(out, extra, epilogue, t.width)
    elements = padded_elements(padded, x, t)
    convolve(results, x, elements, f, window, how, t, ctx, folds=folds)


@k.inline
def mode_of(reading: str, x: Any, t: Tiling) -> str:
    """How patches are read: elements that must be converted are not read in place."""
    # elements that are no lanes are converted by the padded copy
    if reading == "in_place" and x.dtype != t.lane and t.pair == 1:
        return "padded"
    return reading


@k.inline
def padded_elements(padded: k.View, x: Any, t: Tiling) -> Any:
    """The padded input: elements of pairs, or lanes."""
    return padded.view(x.dtype if t.pair == 2 else t.lane)


@k.inline
def pad(padded: k.View, x: k.View, padding: Any, groups: int, t: Tiling, ctx: Any) -> None:
    """Writes the padded input."""
    elements = padded_elements(padded, x, t)
    low = (padding[0], padding[2], padding[4])
    pad_input(elements, x, low, padded_sizes(x, padding), groups, ctx)


def sum_dtype(*dtypes: DType) -> DType:
    """The dtype of sums of products, of 32 bits or more."""
    widest = max(dtypes, key=lambda dtype: dtype.size_in_bytes)
    if widest.size_in_bytes >= 4:
        return widest
    return DType.float32 if widest.is_float() else DType.int32


def _steps(attributes: Mapping[str, Any], rank: int) -> Steps:
    """The stride, dilation and padding along three axes."""
    stride, dilation, padding = (
        tuple(int(n) for n in attributes[name]) for name in ("stride", "dilation", "padding")
    )
    if rank == 4:
        # an image is a volume of depth 1
        stride, dilation, padding = (1, *stride), (1, *dilation), (0, 0, *padding)
    return Steps(stride, dilation, padding)


def _mode(
    x: Operand,
    taps: Sequence[Any],
    channels: Any,
    dtype: DType,
    steps: Steps,
    groups: int,
) -> tuple[Mode, Workspace]:
    """How products are computed, and memory for a padded input.

    Args:
        x: The input.
        taps: The number of taps along each axis.
        channels: Channels of a group.
        dtype: Element type of the filter.
        steps: Stride, dilation and padding.
        groups: Groups of channels.
    """
    sums = sum_dtype(x.dtype, dtype)
    pair = 2 if dtype in (DType.bfloat16, DType.float16) else 1
    static = isinstance(channels, int) and all(isinstance(n, int) for n in taps)
    # sizes known at run time only may be long
    folds = is_long(product((*taps, channels)) if static else None)
    # the padding of the axes that the input has: an image has none along D
    padding = steps.padding[10 - 2 * len(x.shape) :]
    sizes = [n + padding[2 * i] + padding[2 * i + 1] for i, n in enumerate(x.shape[1:-1])]
    # a vector that is copied may begin at the last element
    padded = Workspace(sums, (product((x.shape[0], *sizes, x.shape[-1])) + VECTOR,))
    # half a pair at the end of a run would not be whole lanes
    if not static or product(taps) > MAX_RUNS or channels % pair:
        return Mode("copied", folds), padded
    unpadded = not any(padding)
    # taps in the padding need a bit each
    long_runs = channels // pair >= MIN_RUN_LANES and (unpadded or product(taps) <= MAX_TAPS)
    if long_runs or (unpadded and groups == 1):
        # other dtypes than that of the sums are converted first
        return Mode("in_place", folds), Workspace(sums, (1,)) if x.dtype == sums else padded
    return Mode("padded", folds), padded


def _lower_conv(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.conv`, whose filter is packed in the launch; narrow groups have their own kernel."""
    x, weight = operands
    rank, groups = len(x.shape), int(attributes["groups"])
    steps = _steps(attributes, rank)
    taps = [() if rank == 4 else (0,), *((i,) for i in range(rank - 4, rank))]
    args: list[Arg] = [
        view("result", 0, results[0], image_axes(rank), static=False),
        view("operand", 0, x, image_axes(rank), static=False),
        view("operand", 1, weight, taps, static=False),
    ]
    lanes = target.width(k.scalar_type(sum_dtype(x.dtype, weight.dtype)))
    limit = min(narrow_channels(target, weight.dtype), lanes)
    if has_narrow_groups(weight.shape, groups, limit):
        params = {"steps": steps, "group": weight.shape[-2]}
        return KernelCall(narrow_groups, tuple(args), params, epilogue=True)
    pairs = weight.dtype in (DType.bfloat16, DType.float16)
    depth = product(weight.shape[:-1])
    kind = weight.dtype if pairs else sum_dtype(x.dtype, weight.dtype)
    # the last strip of a group is filled up to 32 columns, an odd row to a pair
    strips = Workspace(kind, ((depth + pairs) * (weight.shape[-1] + groups * COLUMNS),))
    mode, padded = _mode(x, weight.shape[:-2], weight.shape[-2], weight.dtype, steps, groups)
    args += [
        view("workspace", 0, strips, static=False),
        view("workspace", 1, padded, static=False),
    ]
    params = {"steps": steps, "groups": groups, "mode": mode}
    return KernelCall(conv, tuple(args), params, epilogue=True, workspaces=(strips, padded))


def _lower_pack_filter(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mok.pack_filter`."""
    weight = operands[0]
    rank = len(weight.shape)
    taps = [() if rank == 4 else (0,), *((i,) for i in range(rank - 4, rank))]
    args = (
        view("result", 0, results[0], static=False),
        view("operand", 0, weight, taps, static=False),
    )
    return KernelCall(pack_filter, args, {"groups": int(attributes["groups"])})


def _lower_packed_conv(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mok.packed_conv`, with a workspace for a padded input."""
    x, weight = operands
    rank, groups = len(x.shape), int(attributes["groups"])
    steps = _steps(attributes, rank)
    taps = tuple(int(n) for n in attributes["taps"])
    channels = x.shape[-1] // groups if isinstance(x.shape[-1], int) else None
    mode, padded = _mode(x, taps, channels, weight.dtype, steps, groups)
    args = (
        view("result", 0, results[0], image_axes(rank), static=False),
        view("operand", 0, x, image_axes(rank), static=False),
        view("operand", 1, weight, static=False),
        view("workspace", 0, padded, static=False),
        *(Scalar(n) for n in (*steps.stride, int(mode.folds))),
    )
    all_taps = taps if rank == 5 else (1, *taps)
    form = PackedForm(all_taps, steps.dilation, steps.padding, groups, mode.reading)
    return KernelCall(conv_packed, args, {"form": form}, epilogue=True, workspaces=(padded,))


LOWERINGS = {
    "mo.conv": _lower_conv,
    "mok.pack_filter": _lower_pack_filter,
    "mok.packed_conv": _lower_packed_conv,
}
