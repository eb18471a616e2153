"""Packed filters, and convolutions with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from xdsl.ir import Attribute, OpTraits, SSAValue
from xdsl.traits import Pure

from max._backends.cpu.kernels.convolution.filters import filter_elements
from max._backends.cpu.kernels.tiles.strips import COLUMNS
from max._compiler.mok import backend_op
from max.mlir import DimExpr, MoOp, OpSpec, TensorType, to_attr
from max.mlir.operation import Attrs
from max.mlir.ops.spatial import ConvOp

__all__ = ["PackFilterOp", "PackedConvOp"]


def _infer_pack_filter(types: Sequence[Attribute], attrs: Attrs) -> Sequence[Attribute]:
    """The packed filter: `[strips, elements]`, with strips of `COLUMNS` columns in each group."""
    (w,) = types
    assert isinstance(w, TensorType) and w.static_shape is not None
    *taps, channels, columns = w.static_shape
    groups = int(attrs["groups"])
    strips = groups * -(-(columns // groups) // COLUMNS)
    return (w.with_shape([strips, filter_elements(taps, channels, w.dtype)]),)


@backend_op
class PackFilterOp(MoOp):
    """A filter `[taps…, C / groups, F]` in the packed layout that `kernels.convolution.conv` reads."""

    name = "mok.pack_filter"
    spec = OpSpec(
        "mok.pack_filter", (1, 1), 1, attributes={"groups": int}, infer=_infer_pack_filter
    )
    traits = OpTraits(lambda: (Pure(),))

    @classmethod
    def of(cls, w: SSAValue, groups: int) -> PackFilterOp:
        """The op for a filter of static sizes."""
        return cls.create(
            operands=(w,),
            result_types=_infer_pack_filter([w.type], {"groups": groups}),
            attributes={"groups": to_attr(groups)},
        )


def _infer_packed_conv(types: Sequence[Attribute], attrs: Attrs) -> Sequence[Attribute]:
    """The result type of `mo.conv` with the unpacked filter, whose shape the attributes give."""
    x, packed = types
    assert isinstance(x, TensorType) and isinstance(packed, TensorType)
    channels = x.shape[-1] // int(attrs["groups"])
    w = packed.with_shape([*map(DimExpr.of, attrs["taps"]), channels, DimExpr.of(attrs["columns"])])
    infer = ConvOp.spec.infer
    assert infer is not None
    return infer((x, w), attrs)


def _packed_conv_flops(operands: Sequence[Attribute], results: Sequence[Attribute]) -> DimExpr:
    """Those of the convolution with the unpacked filter."""
    strip = cast("TensorType", operands[1]).shape[-1]
    # a strip has 32 columns for each tap and channel
    return cast("TensorType", results[0]).num_elements * 2 * (strip // COLUMNS)


@backend_op
class PackedConvOp(MoOp):
    """`mo.conv` with a packed filter, which has `taps` along each axis and `columns` output channels."""

    name = "mok.packed_conv"
    spec = OpSpec(
        "mok.packed_conv",
        (2, 2),
        1,
        attributes={**ConvOp.spec.attributes, "taps": tuple, "columns": int},
        infer=_infer_packed_conv,
        flops=_packed_conv_flops,
        takes_epilogue=True,
        separates=True,
    )
    traits = OpTraits(lambda: (Pure(),))

    @classmethod
    def of(cls, conv: MoOp, packed: SSAValue) -> PackedConvOp:
        """The op for an `mo.conv`, given its packed filter."""
        shape = cast("TensorType", conv.operands[1].type).static_shape
        assert shape is not None
        *taps, _, columns = shape
        return cls.create(
            operands=(conv.operands[0], packed),
            result_types=[conv.results[0].type],
            attributes={
                **conv.attributes,
                "taps": to_attr(tuple(taps)),
                "columns": to_attr(columns),
            },
            location=conv.location,
        )
