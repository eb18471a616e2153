"""Packed filters, and convolutions with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

from xdsl.ir import Attribute, SSAValue

from max._backends.cpu.kernels.convolution.filters import filter_elements
from max._backends.cpu.kernels.tiles.strips import COLUMNS
from max._compiler.mok import backend_op
from max.mlir import DimExpr, MoOp, OpSpec, TensorType, to_attr
from max.mlir.operation import Attrs
from max.mlir.ops.spatial import ConvOp

__all__ = ["CONV_ATTRIBUTES", "ConvOfFilterOp", "PackFilterOp", "PackedConvOp", "infer_conv"]


def _infer_pack_filter(types: Sequence[Attribute], attrs: Attrs) -> Sequence[Attribute]:
    """The packed filter: `[strips, elements]`, with strips of `COLUMNS` columns in each group."""
    (w,) = types
    assert isinstance(w, TensorType) and w.static_shape is not None
    *taps, channels, columns = w.static_shape
    groups = int(attrs["groups"])
    # each group begins a strip
    strips = groups * -(-(columns // groups) // COLUMNS)
    return (w.with_shape([strips, filter_elements(taps, channels, w.dtype)]),)


@backend_op
class PackFilterOp(MoOp):
    """A filter `[taps…, C / groups, F]` in the packed layout that `kernels.convolution.conv` reads."""

    name = "mok.pack_filter"
    spec = OpSpec(
        "mok.pack_filter", (1, 1), 1, attributes={"groups": int}, infer=_infer_pack_filter
    )

    @classmethod
    def of(cls, w: SSAValue, groups: int) -> PackFilterOp:
        """The op for a filter of static sizes."""
        return cls.create(
            operands=(w,),
            result_types=_infer_pack_filter([w.type], {"groups": groups}),
            attributes={"groups": to_attr(groups)},
        )


def infer_conv(types: Sequence[Attribute], attrs: Attrs) -> Sequence[Attribute]:
    """The result type of `mo.conv` with the unpacked filter, whose shape the attributes give."""
    x, filters = types
    assert isinstance(x, TensorType) and isinstance(filters, TensorType)
    channels = x.shape[-1] // int(attrs["groups"])
    taps, columns = map(DimExpr.of, attrs["taps"]), DimExpr.of(attrs["columns"])
    w = filters.with_shape([*taps, channels, columns])
    infer = ConvOp.spec.infer
    assert infer is not None
    return infer((x, w), attrs)


CONV_ATTRIBUTES: dict[str, Any] = {**ConvOp.spec.attributes, "taps": tuple, "columns": int}
"""Those of `mo.conv`, and the filter's taps along each axis and output channels, which its layout does not show."""


class ConvOfFilterOp(MoOp):
    """`mo.conv` with a filter that was brought into the layout of a kernel at load."""

    @classmethod
    def of(cls, conv: MoOp, filters: SSAValue) -> Self:
        """The op for an `mo.conv`, given its filter in the other layout."""
        return cls.of_image(conv, conv.operands[0], filters, {})

    @classmethod
    def of_image(
        cls, conv: MoOp, image: SSAValue, filters: SSAValue, attributes: Mapping[str, Attribute]
    ) -> Self:
        """The op for an `mo.conv`, with another image and attributes that the convolution does not have or has changed.

        Args:
            conv: The convolution.
            image: The image.
            filters: The filter in the other layout.
            attributes: The attributes.
        """
        shape = cast("TensorType", conv.operands[1].type).static_shape
        assert shape is not None
        *taps, _, columns = shape
        return cls.create(
            operands=(image, filters),
            result_types=conv.result_types,
            attributes={
                **conv.attributes,
                "taps": to_attr(tuple(taps)),
                "columns": to_attr(columns),
                **attributes,
            },
            location=conv.location,
        )


def _packed_conv_flops(operands: Sequence[Attribute], results: Sequence[Attribute]) -> DimExpr:
    """Those of the convolution with the unpacked filter."""
    strip = cast("TensorType", operands[1]).shape[-1]
    # a strip has 32 columns for each tap and channel
    return cast("TensorType", results[0]).num_elements * 2 * (strip // COLUMNS)


@backend_op
class PackedConvOp(ConvOfFilterOp):
    """`mo.conv` with a packed filter."""

    name = "mok.packed_conv"
    spec = OpSpec(
        "mok.packed_conv",
        (2, 2),
        1,
        attributes=CONV_ATTRIBUTES,
        infer=infer_conv,
        flops=_packed_conv_flops,
        takes_epilogue=True,
        separates=True,
    )
