"""Filters of 8-bit integers, and convolutions of codes with them.

Importers stage the convolution of codes as `mo.conv` of casts to int32. On the CPU it becomes `mok.int8_conv`, or,
where no instruction multiplies lanes of four bytes or matrix tiles do it faster, a product of copied patches; of few
channels a convolution in floats, whose sums are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import cast

from xdsl.ir import Attribute, SSAValue

from max._backends.cpu.kernels.convolution.patches import MAX_TAPS
from max._backends.cpu.kernels.tiles.strips import COLUMNS
from max._backends.cpu.passes.packed_filters import CONV_ATTRIBUTES, ConvOfFilterOp, infer_conv
from max._compiler.mok import backend_op
from max._compiler.passes.canonicalize import insert_before, producer
from max.dtype import DType
from max.mlir import DimExpr, MoOp, OpSpec, TensorType, build, to_attr
from max.mlir.operation import Attrs
from max.mlir.ops.elementwise import CastOp
from max.mlir.ops.matmul import MatmulOp
from max.mlir.ops.shape import ConcatOp, PadOp, ReshapeOp, SliceOp
from max.mlir.ops.spatial import ConvOp

__all__ = ["Int8ConvOp", "PackInt8FilterOp", "convolve_codes"]

FOUR = 4
"""Channels that share a lane."""
PATCH_CHANNELS = 16
"""The least channels of patches that are copied: of fewer, copies of bytes take longer than floats."""
EXACT_DEPTH = 1 << 10
"""Elements of a sum of products of bytes that float32 holds exactly."""


def _shape(value: SSAValue) -> tuple[int, ...]:
    shape = cast("TensorType", value.type).static_shape
    assert shape is not None
    return shape


def _infer_pack(types: Sequence[Attribute], attrs: Attrs) -> Sequence[Attribute]:
    """The packed filter: `[strips, bytes]`, with a line before the rows of each strip."""
    (w,) = types
    assert isinstance(w, TensorType) and w.static_shape is not None
    *taps, channels, columns = w.static_shape
    rows = math.prod(taps) * channels
    # the line of sums, 4 bytes per column, is as long as FOUR rows
    return (w.with_shape([-(-columns // COLUMNS), (rows + FOUR) * COLUMNS]),)


@backend_op
class PackInt8FilterOp(MoOp):
    """A filter `[R, S, C, F]` of i8 in the layout of `kernels.convolution.int8_filters`; C is a multiple of four."""

    name = "mok.pack_int8_filter"
    spec = OpSpec("mok.pack_int8_filter", (1, 1), 1, infer=_infer_pack)

    @classmethod
    def of(cls, w: SSAValue) -> PackInt8FilterOp:
        """The op for a filter of static sizes."""
        return cls.create(operands=(w,), result_types=_infer_pack([w.type], {}))


def _infer_conv(types: Sequence[Attribute], attrs: Attrs) -> Sequence[Attribute]:
    """The result type of `mo.conv` with the unpacked filter, in int32."""
    wide = [cast("TensorType", type_).with_dtype(DType.int32) for type_ in types]
    return infer_conv(wide, attrs)


def _conv_flops(operands: Sequence[Attribute], results: Sequence[Attribute]) -> DimExpr:
    """Those of the convolution with the unpacked filter."""
    # a strip has COLUMNS bytes for each tap and channel, after a line as long as FOUR of them
    strip = cast("TensorType", operands[1]).shape[-1]
    return cast("TensorType", results[0]).num_elements * 2 * (strip // COLUMNS - FOUR)


@backend_op
class Int8ConvOp(ConvOfFilterOp):
    """`mo.conv` in int32 of an image of i8 with `fill` around it, and a packed filter of i8."""

    name = "mok.int8_conv"
    spec = OpSpec(
        "mok.int8_conv",
        (2, 2),
        1,
        attributes={**CONV_ATTRIBUTES, "fill": int},
        infer=_infer_conv,
        flops=_conv_flops,
        takes_epilogue=True,
        separates=True,
    )

    @classmethod
    def of_codes(cls, conv: MoOp, x: SSAValue, packed: SSAValue) -> Int8ConvOp:
        """The op for an `mo.conv` of int32.

        Args:
            conv: The convolution.
            x: The image, before its cast; a constant padding becomes that of the convolution.
            packed: The packed filter.
        """
        *taps, _, _ = _shape(conv.operands[1])
        window = [(n - 1) * int(d) + 1 for n, d in zip(taps, conv.attr("dilation"), strict=True)]
        image, padding, fill = _split_padding(x, tuple(conv.attr("padding")), window)
        attributes = {"padding": to_attr(padding), "fill": to_attr(fill)}
        return cls.of_image(conv, image, packed, attributes)


def _split_padding(
    x: SSAValue, padding: tuple[int, ...], window: Sequence[int]
) -> tuple[SSAValue, tuple[int, ...], int]:
    """An image without the constant padding of its height and width, that padding, and what it holds.

    Args:
        x: The image.
        padding: The padding of the convolution, which holds 0.
        window: What a window spans along each axis. More padding than that is kept, as kernels expect no window of
            padding only.
    """
    unchanged = (x, padding, 0)
    pad = producer(x, PadOp)
    if pad is None or any(padding):
        return unchanged
    margins: list[tuple[DimExpr, DimExpr]] = list(
        zip(pad.attr("low"), pad.attr("high"), strict=True)
    )
    if not all(side.is_static for pair in margins for side in pair):
        return unchanged
    amounts = [[side.value for side in pair] for pair in margins]
    # convolutions pad neither the batch nor the channels
    if any(amounts[0]) or any(amounts[-1]):
        return unchanged
    inner = amounts[1:-1]
    if any(max(pair) >= size for pair, size in zip(inner, window, strict=True)):
        return unchanged
    return pad.operands[0], tuple([n for pair in inner for n in pair]), int(pad.attr("value"))


def convolve_codes(
    op: MoOp, x: SSAValue, w: SSAValue, by_bytes: bool, packed: dict[SSAValue, SSAValue]
) -> MoOp | None:
    """Replaces a convolution in int32 of an image and a constant filter that are cast from i8.

    Args:
        op: The convolution.
        x: The image, before its cast.
        w: The filter, before its cast.
        by_bytes: Whether `mok.int8_conv` is the fastest form.
        packed: The packed filters.

    Returns:
        The convolution or product whose weight is yet to be packed; None: there is none.
    """
    shape = _shape(w)
    if len(shape) != 4 or 0 in shape or op.attr("groups") != 1:
        return None
    *taps, channels, _ = shape
    if by_bytes and channels % FOUR == 0 and math.prod(taps) <= MAX_TAPS:
        if w not in packed:
            packed[w] = insert_before(op, PackInt8FilterOp.of(w))
        _replace(op, insert_before(op, Int8ConvOp.of_codes(op, x, packed[w])))
        return None
    depth = math.prod(taps) * channels
    if channels >= PATCH_CHANNELS and not any(op.attr("padding")):
        return _multiply_patches(op, x, w)
    # float32 would round longer sums
    if depth > EXACT_DEPTH:
        return None
    floats = [_cast(op, value, DType.float32) for value in (x, w)]
    attributes = {name: op.attr(name) for name in ConvOp.spec.attributes}
    convolved = build(ConvOp, floats, attributes)
    total = insert_before(op, convolved)
    _replace(op, _cast(op, total, DType.int32))
    return convolved


def _replace(op: MoOp, value: SSAValue) -> None:
    op.results[0].replace_all_uses_with(value)
    op.detach()
    op.erase()


def _cast(anchor: MoOp, value: SSAValue, dtype: DType) -> SSAValue:
    result = cast("TensorType", value.type).with_dtype(dtype)
    return insert_before(anchor, build(CastOp, (value,), {}, (result,)))


def _multiply_patches(op: MoOp, x: SSAValue, w: SSAValue) -> MoOp:
    """Replaces a convolution by a product of patches `[N, H', W', R * S * C]`; returns the product."""
    type_, result = (cast("TensorType", value.type) for value in (x, op.results[0]))
    *taps, channels, columns = _shape(w)
    batch, *_, depth = type_.shape
    one = DimExpr.of(1)
    step = [one, *map(DimExpr.of, op.attr("stride")), one]
    parts: list[SSAValue] = []
    for tap in product(*map(range, taps)):
        first = [n * int(d) for n, d in zip(tap, op.attr("dilation"), strict=True)]
        # the elements that this tap meets at all places of the result
        sizes = result.shape[1:3]
        last = [f + (n - 1) * s + 1 for f, n, s in zip(first, sizes, step[1:3], strict=True)]
        bounds = {
            "start": tuple(map(DimExpr.of, (0, *first, 0))),
            "stop": tuple(map(DimExpr.of, (batch, *last, depth))),
            "step": tuple(step),
        }
        part = type_.with_shape([batch, *sizes, depth])
        parts.append(insert_before(op, build(SliceOp, (x,), bounds, (part,))))
    patches = parts[0]
    if len(parts) > 1:
        patches = insert_before(op, build(ConcatOp, tuple(parts), {"axis": 3}))
    rows = math.prod(taps) * channels
    matrix = cast("TensorType", w.type).with_shape([rows, columns])
    weight = insert_before(op, build(ReshapeOp, (w,), {}, (matrix,)))
    operands = tuple([_cast(op, value, DType.int32) for value in (patches, weight)])
    multiplied = build(MatmulOp, operands, {}, (result,))
    _replace(op, insert_before(op, multiplied))
    return multiplied
