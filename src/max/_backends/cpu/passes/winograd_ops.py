"""Convolutions by Winograd's algorithm, and their transformed filters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from xdsl.ir import Attribute, SSAValue

from max._backends.cpu.kernels.convolution.winograd import MAX_CHANNELS, PRODUCTS, STEP
from max._backends.cpu.kernels.tiles.strips import COLUMNS
from max._backends.cpu.passes.packed_filters import CONV_ATTRIBUTES, ConvOfFilterOp, infer_conv
from max._compiler.analysis.shapes import shape_of
from max._compiler.mok import backend_op
from max.dtype import DType
from max.mlir import DimExpr, MoOp, OpSpec, TensorType
from max.mlir.operation import Attrs

__all__ = ["WinogradConvOp", "WinogradFilterOp", "fits_winograd"]

MIN_CHANNELS = 32
"""The minimum number of channels and of columns: of fewer, the transforms take longer than the saved products."""
MIN_TILES = 16
"""The minimum number of tiles of an image whose sizes are known: the transformed filter is four times as large as the
filter, and reading it from memory for fewer tiles would take longer than the saved products. An image of 14 by 14 has
16."""
MIN_USED = 0.7
"""The least share of the positions of tiles that lie in the image."""


def _axis_tiles(size: int, dilation: int) -> int:
    """The number of tiles along an axis: those of the images of every `dilation`-th position."""
    # as `axis_of` of the kernel
    least, longer = divmod(size, dilation)
    return longer * -(-(least + 1) // STEP) + (dilation - longer) * -(-least // STEP)


def fits_winograd(op: MoOp) -> bool:
    """Whether a convolution takes less time by Winograd's algorithm: images with 3 × 3 taps side by side, of f32.

    Args:
        op: The convolution; the sizes of its filter are static.
    """
    w = op.operands[1].type
    assert isinstance(w, TensorType) and w.static_shape is not None
    shape = w.static_shape
    if w.dtype is not DType.float32 or len(shape) != 4:
        return False
    if shape[:2] != (3, 3) or op.attr("groups") != 1:
        return False
    if set(op.attr("stride")) != {1}:
        return False
    channels, columns = shape[2:]
    if not MIN_CHANNELS <= channels <= MAX_CHANNELS or columns < MIN_CHANNELS:
        return False
    (result,) = op.results
    sizes = shape_of(result)[1:3]
    dilation: tuple[int, ...] = op.attr("dilation")
    known = [
        (size, _axis_tiles(size, step))
        for size, step in zip(sizes, dilation, strict=True)
        if isinstance(size, int)
    ]
    # tiles of a wide dilation could lie outside of an image of unknown size
    if len(known) < len(sizes) and set(dilation) != {1}:
        return False
    used = math.prod(size / (STEP * tiles) for size, tiles in known)
    is_small = len(known) == len(sizes) and math.prod(tiles for _, tiles in known) < MIN_TILES
    return used >= MIN_USED and not is_small


def _infer_filter(types: Sequence[Attribute], attrs: Attrs) -> Sequence[Attribute]:
    """The transformed filter: `[strips, PRODUCTS * C * COLUMNS]`."""
    (w,) = types
    assert isinstance(w, TensorType) and w.static_shape is not None
    *_, channels, columns = w.static_shape
    return (w.with_shape([-(-columns // COLUMNS), PRODUCTS * channels * COLUMNS]),)


@backend_op
class WinogradFilterOp(MoOp):
    """A filter `[3, 3, C, F]` in the form that `kernels.convolution.winograd` reads."""

    name = "mok.winograd_filter"
    spec = OpSpec("mok.winograd_filter", (1, 1), 1, infer=_infer_filter)

    @classmethod
    def of(cls, w: SSAValue) -> WinogradFilterOp:
        """The op for a filter of static sizes."""
        return cls.create(operands=(w,), result_types=_infer_filter([w.type], {}))


def _conv_flops(operands: Sequence[Attribute], results: Sequence[Attribute]) -> DimExpr:
    """Those of the convolution without the algorithm."""
    x, _ = cast("Sequence[TensorType]", operands)
    (result,) = cast("Sequence[TensorType]", results)
    # 9 taps, each a multiplication and an addition
    return result.num_elements * 18 * x.shape[-1]


@backend_op
class WinogradConvOp(ConvOfFilterOp):
    """`mo.conv` with a transformed filter."""

    name = "mok.winograd_conv"
    spec = OpSpec(
        "mok.winograd_conv",
        (2, 2),
        1,
        attributes=CONV_ATTRIBUTES,
        infer=infer_conv,
        flops=_conv_flops,
        takes_epilogue=True,
        separates=True,
    )
