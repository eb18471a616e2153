"""Convolutions of images of 8-bit integers with packed filters, exact in 32 bits, which wrap.

Patches are read as those of floats are (`convolve`), in lanes of four channels; no copy of patches is made. What lies
around the image is a code too: that of the number 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.convolution.conv import MIN_RUN_LANES, VECTOR
from max._backends.cpu.kernels.convolution.convolve import convolve
from max._backends.cpu.kernels.convolution.filters import Filter
from max._backends.cpu.kernels.convolution.inputs import image_axes, pad_input, padded_sizes
from max._backends.cpu.kernels.convolution.int8_filters import pack_int8_filter
from max._backends.cpu.kernels.convolution.patches import Steps, Window
from max._backends.cpu.kernels.products.int8.panels import FOUR, int8_tiling
from max._backends.cpu.kernels.tiles.strips import Results, identity
from max._backends.kernel_call import KernelCall, Operand, Workspace, product, view
from max.dtype import DType


@k.kernel
def conv_int8(
    out: k.Output,
    x: k.Input,
    weight: k.Input,
    padded: k.InOut,
    *extra: k.Input,
    ctx: k.Context,
    taps: Any,
    steps: Steps,
    fill: int,
    in_place: bool,
    epilogue: Any = identity,
) -> None:
    """`out` `[N, D, H, W, F]` from `x` `[N, D, H, W, C]`, with `fill` around it, and a packed filter of `taps`."""
    t = int8_tiling(ctx.target)
    if not in_place:
        padding = steps.padding
        low = (padding[0], padding[2], padding[4])
        pad_input(padded, x, low, padded_sizes(x, padding), 1, ctx, fill)
        ctx.barrier()
    f = Filter(weight.reshape(weight.size).view(k.i32), weight.dtype, x.shape[4], 1, t)
    results = Results(out, extra, epilogue, t.width)
    mode = "in_place" if in_place else "padded"
    convolve(results, x, padded, f, Window(taps, *steps), mode, t, ctx, fill)


def _lower_pack(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mok.pack_int8_filter`."""
    rows = (range(3), (3,))  # taps and channels, columns
    args = (
        view("result", 0, results[0], static=False),
        view("operand", 0, operands[0], rows, static=False),
    )
    return KernelCall(pack_int8_filter, args, {})


def _lower_conv(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mok.int8_conv`, with a workspace for a padded image."""
    x, weight = operands
    stride, dilation, padding = (
        tuple(int(n) for n in attributes[name]) for name in ("stride", "dilation", "padding")
    )
    # an image is a volume of depth 1
    steps = Steps((1, *stride), (1, *dilation), (0, 0, *padding))
    channels = x.shape[-1]
    assert isinstance(channels, int)
    in_place = not any(padding) or channels // FOUR >= MIN_RUN_LANES
    sizes = [n + padding[2 * i] + padding[2 * i + 1] for i, n in enumerate(x.shape[1:-1])]
    # a vector that is copied may begin at the last element
    elements = (1,) if in_place else (product((x.shape[0], *sizes, channels)) + VECTOR,)
    padded = Workspace(DType.int8, elements)
    args = (
        view("result", 0, results[0], image_axes(4), static=False),
        view("operand", 0, x, image_axes(4), static=False),
        view("operand", 1, weight, static=False),
        view("workspace", 0, padded, static=False),
    )
    params = {
        "taps": (1, *(int(n) for n in attributes["taps"])),
        "steps": steps,
        "fill": int(attributes["fill"]),
        "in_place": in_place,
    }
    return KernelCall(conv_int8, args, params, epilogue=True, workspaces=(padded,))


LOWERINGS = {"mok.pack_int8_filter": _lower_pack, "mok.int8_conv": _lower_conv}
