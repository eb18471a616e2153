"""Packed weights, and products with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self, cast

from xdsl.ir import Attribute, SSAValue

from max._backends.cpu.kernels.products.dense.coded import coded_bytes
from max._backends.cpu.kernels.products.dense.panels import panel_elements
from max._backends.cpu.kernels.products.int8.panels import ENCODINGS as INT8
from max._backends.cpu.kernels.products.quantized.packed import FORMATS
from max._backends.cpu.kernels.tiles.adapter_terms import HEAD, RANKS
from max._backends.cpu.kernels.tiles.strips import strips_of
from max._compiler.mok import backend_op
from max._compiler.mok.products import PackingOp, Piece, ProductsOp, parts_of
from max.dtype import DType
from max.dtype.blocks import BLOCK_FORMATS
from max.mlir import DimExpr, MoOp, OpSpec, TensorType, to_attr
from max.mlir.builtin import LocationAttr
from max.mlir.operation import Attrs
from max.mlir.ops.matmul import product_flops
from max.mlir.types import short_types

__all__ = [
    "AdaptedMatmulOp",
    "AdaptedProductsOp",
    "CodeOp",
    "GroupedProductsOp",
    "PackOp",
    "PackedMatmulOp",
    "PackedProductsOp",
    "ProjectAdaptersOp",
    "static_bytes",
]


def _infer_pack(types: Sequence[Attribute], attrs: Attrs) -> Sequence[Attribute]:
    """The packed weights of all parts: `[strips, elements of a strip]`; uint8 for 8-bit integers."""
    encoding: str = attrs["encoding"]
    sizes = [_panel_sizes(cast("TensorType", w), encoding) for w in types]
    # parts share one buffer of equal strips
    if len({elements for _, elements in sizes}) != 1 or len(set(map(_dtype, types))) != 1:
        raise ValueError(f"pack: {short_types(types)} do not go together")
    strips = 0
    for part in parts_of(len(types), attrs.get("pairs", ())):
        if len({sizes[i] for i in part}) != 1:
            raise ValueError(f"pack: the sizes of a pair of {short_types(types)} differ")
        strips += strips_of(sizes[part[0]][0], len(part))
    w = cast("TensorType", types[0])
    # packed int8 elements have 128 added, and are unsigned
    dtype = DType.uint8 if encoding in INT8 else w.dtype
    return (TensorType.get(dtype, [strips, sizes[0][1]], w.device),)


def static_bytes(value: SSAValue) -> int:
    """The bytes of a value of static shape."""
    type_ = value.type
    assert isinstance(type_, TensorType) and type_.static_shape is not None
    return math.prod(type_.static_shape) * type_.dtype.size_in_bytes


def _dtype(type_: Attribute) -> DType:
    return cast("TensorType", type_).dtype


def _panel_sizes(w: TensorType, encoding: str) -> tuple[int, int]:
    """The number of columns of a packed weight, and the elements of one strip of 32 columns."""
    assert w.static_shape is not None
    first, second = w.static_shape
    packed_format = FORMATS.get(encoding)
    if packed_format is not None:
        # from the bytes of a row to its elements
        inner = second // BLOCK_FORMATS[packed_format.encoding].bytes * packed_format.super_block
        return first, packed_format.group_bytes(inner)
    by_rows = encoding == "rows" or INT8.get(encoding, False)
    # a weight by rows is [columns, K]: each of its rows is a column of the product
    columns, inner = (first, second) if by_rows else (second, first)
    return columns, panel_elements(inner)


@backend_op
class PackOp(PackingOp):
    """One or more weights packed one after the other; the weights of a pair share strips.

    Encodings and their layouts:

    - that of quantized blocks: `kernels.products.quantized.packed`;
    - ``"rows"`` (`[N, K]`) or ``"columns"`` (`[K, N]`) of a dense weight: `kernels.products.dense.panels`;
    - ``"int8 rows"`` or ``"int8 columns"`` of an int8 weight: `kernels.products.int8.panels`.
    """

    name = "mok.pack"
    spec = OpSpec(
        "mok.pack",
        (1, None),
        1,
        attributes={"encoding": str},
        optional={"pairs": tuple},
        infer=_infer_pack,
    )

    @classmethod
    def of(cls, ws: Sequence[SSAValue], encoding: str, pairs: Sequence[int] = ()) -> PackOp:
        """The op for weights of static sizes; `pairs` has the index of the first weight of each pair."""
        attrs: dict[str, Any] = {"encoding": encoding}
        if pairs:
            attrs["pairs"] = tuple(pairs)
        return cls.create(
            operands=ws,
            result_types=_infer_pack([w.type for w in ws], attrs),
            attributes={name: to_attr(value) for name, value in attrs.items()},
        )

    def pieces(self) -> list[Piece]:
        """The strips of each weight; weights of a pair share them."""
        encoding: str = self.attr("encoding")
        elements = cast("TensorType", self.results[0].type).shape[1].value
        pieces: list[Piece] = []
        first = 0
        for part in parts_of(len(self.operands), self.attr_or("pairs", ())):
            w = cast("TensorType", self.operands[part[0]].type)
            strips = strips_of(_panel_sizes(w, encoding)[0], len(part))
            # two shares: both fill their half of the same strips
            for share in range(len(part)):
                attributes = {"encoding": encoding, "shares": len(part), "share": share}
                pieces.append(Piece((first, 0), (strips, elements), attributes))
            first += strips
        return pieces


def _infer_code(types: Sequence[Attribute], attrs: Attrs) -> Sequence[Attribute]:
    """Bytes with room for panels that are not coded: `[strips, bytes]`."""
    panels = cast("TensorType", types[0])
    strips, elements = panels.static_shape or (0, 0)
    shape = [strips, coded_bytes(elements, panels.dtype)]
    return (TensorType.get(DType.uint8, shape, panels.device),)


@backend_op
class CodeOp(MoOp):
    """Packed dense weights in fewer bytes without loss; see `kernels.products.dense.coded` for the encodings."""

    name = "mok.code"
    spec = OpSpec("mok.code", (1, 1), 1, attributes={"encoding": str}, infer=_infer_code)

    @classmethod
    def of(cls, packed: SSAValue, encoding: str) -> CodeOp:
        """The op for weights that `mok.pack` packed."""
        return cls.create(
            operands=(packed,),
            result_types=_infer_code([packed.type], {}),
            attributes={"encoding": to_attr(encoding)},
        )


def _infer_packed_matmul(types: Sequence[Attribute], attrs: Attrs) -> Sequence[Attribute]:
    """The result: x with `columns` as its last dim; int32 for weights of 8-bit integers."""
    x = types[0]
    assert isinstance(x, TensorType)
    shape = [*x.shape[:-1], DimExpr.of(attrs["columns"])]
    if attrs["encoding"] in INT8:
        return (TensorType.get(DType.int32, shape, x.device),)
    return (x.with_shape(shape),)


@backend_op
class PackedMatmulOp(MoOp):
    """The product of x and a packed weight of `columns` columns; int8 products are int32.

    The encoding is that of `mok.pack`, or of `mok.code` for coded weights.
    The weight is `streamed` if the caches do not hold it until the next execution.
    With `many_rows` x never has few rows, so that the kernel lacks the path for these.
    """

    name = "mok.packed_matmul"
    spec = OpSpec(
        "mok.packed_matmul",
        (2, 2),
        1,
        attributes={"encoding": str, "columns": int, "streamed": bool},
        optional={"many_rows": bool},
        infer=_infer_packed_matmul,
        flops=product_flops,
        takes_epilogue=True,
        takes_norm=True,
        separates=True,
    )

    @classmethod
    def of(
        cls,
        x: SSAValue,
        packed: SSAValue,
        encoding: str,
        columns: int,
        streamed: bool,
        location: LocationAttr,
        many_rows: bool = False,
    ) -> PackedMatmulOp:
        """The product of x and a packed weight with the given number of columns."""
        # no attribute where it is false, so that equal products are equal ops
        optional = {"many_rows": to_attr(many_rows)} if many_rows else {}
        return cls.create(
            operands=(x, packed),
            result_types=_infer_packed_matmul(
                [x.type, packed.type], {"encoding": encoding, "columns": columns}
            ),
            attributes={
                "encoding": to_attr(encoding),
                "columns": to_attr(columns),
                "streamed": to_attr(streamed),
                **optional,
            },
            location=location,
        )


def _infer_packed_products(types: Sequence[Attribute], attrs: Attrs) -> Sequence[Attribute]:
    """One result per product: x with that product's columns as its last dim."""
    x = cast("TensorType", types[0])
    dtype = attrs.get("dtype", x.dtype)
    return [
        TensorType.get(dtype, [*x.shape[:-1], DimExpr.of(columns)], x.device)
        for columns in attrs["columns"]
    ]


def _flops(operands: Sequence[Attribute], results: Sequence[Attribute]) -> DimExpr:
    """Those of all products of x."""
    columns = DimExpr.of(0)
    for result in results:
        columns = columns + cast("TensorType", result).shape[-1]
    return cast("TensorType", operands[0]).num_elements * 2 * columns


@backend_op
class PackedProductsOp(ProductsOp):
    """The products of one x with each of the weights that one `mok.pack` packed.

    `columns` has the number of columns of each; `pairs` and `streamed` are as in `mok.pack` and `mok.packed_matmul`.
    """

    name = "mok.packed_products"
    spec = OpSpec(
        "mok.packed_products",
        (2, 2),
        None,
        attributes={"encoding": str, "columns": tuple, "pairs": tuple, "streamed": bool},
        optional={"dtype": DType},
        infer=_infer_packed_products,
        flops=_flops,
        takes_epilogue=True,
        takes_norm=True,
        separates=True,
    )

    @classmethod
    def of(
        cls,
        operands: Sequence[SSAValue],
        encoding: str,
        columns: Sequence[int],
        pairs: Sequence[int],
        streamed: bool,
        location: LocationAttr,
        dtype: DType | None = None,
    ) -> Self:
        """The products of x and a packed weight, the first two operands; `dtype` is that of the results, None: that of
        x.
        """
        attrs: dict[str, Any] = {
            "encoding": encoding,
            "columns": tuple(columns),
            "pairs": tuple(pairs),
            "streamed": streamed,
        }
        if dtype is not None:
            attrs["dtype"] = dtype
        return cls.create(
            operands=operands,
            result_types=_infer_packed_products([operands[0].type], attrs),
            attributes={name: to_attr(value) for name, value in attrs.items()},
            location=location,
        )


def _infer_adapted_matmul(types: Sequence[Attribute], attrs: Attrs) -> Sequence[Attribute]:
    """The result: x with `columns` as its last dim, of the dtype of the sum."""
    x = cast("TensorType", types[0])
    shape = [*x.shape[:-1], DimExpr.of(attrs["columns"])]
    return (TensorType.get(attrs["dtype"], shape, x.device),)


@backend_op
class AdaptedMatmulOp(MoOp):
    """A product with a packed weight and the terms of adapters: `mok.packed_matmul`, then `mo.lora.add`.

    The operands are x, the packed weight, and those of `mo.lora.add` from the memory on; `site` has the first element
    and the index of the site. It stands until products are merged, then `mok.project_adapters` and
    `mok.adapted_products` take its place.
    """

    name = "mok.adapted_matmul"
    spec = OpSpec(
        "mok.adapted_matmul",
        (9, 9),
        1,
        attributes={
            "encoding": str, "columns": int, "streamed": bool, "dtype": DType, "max_rank": int, "site": tuple,
        },
        infer=_infer_adapted_matmul,
        flops=product_flops,
        separates=True,
    )  # fmt: skip

    @classmethod
    def of(cls, product: MoOp, lora_add: MoOp) -> AdaptedMatmulOp:
        """The op for a `mok.packed_matmul` and the `mo.lora.add` of its result."""
        dtype = cast("TensorType", lora_add.results[0].type).dtype
        attrs: dict[str, Any] = {
            **{name: product.attr(name) for name in ("encoding", "columns", "streamed")},
            "dtype": dtype,
            "max_rank": lora_add.attr("max_rank"),
            "site": (lora_add.attr("offset"), lora_add.attr("site")),
        }
        # without y and x, for which the product stands
        operands = (*product.operands, *lora_add.operands[2:])
        return cls.create(
            operands=operands,
            result_types=_infer_adapted_matmul([v.type for v in operands], attrs),
            attributes={name: to_attr(value) for name, value in attrs.items()},
            location=product.location,
        )


def _infer_projections(types: Sequence[Attribute], attrs: Attrs) -> Sequence[Attribute]:
    """The products with A of each site, padded to whole tasks, and the heads."""
    x = cast("TensorType", types[0])
    # RANKS ranks are one task
    padded = -(-attrs["max_rank"] // RANKS) * RANKS
    count = len(attrs["sites"])
    return [
        TensorType.get(dtype, [x.shape[0], DimExpr.of(count * size)], x.device)
        for dtype, size in ((DType.float32, padded), (DType.int64, HEAD))
    ]


@backend_op
class ProjectAdaptersOp(MoOp):
    """The products of x with each row's adapter, as the products of x by packed weights add them.

    The operands are x, then those of `mo.lora.add` from the memory on. Each of `sites` has its first element, its index
    and its columns. The results are the first two fields of `kernels.tiles.adapter_terms.Terms`.
    """

    name = "mok.project_adapters"
    spec = OpSpec(
        "mok.project_adapters",
        (8, 8),
        2,
        attributes={"max_rank": int, "inputs": int, "sites": tuple},
        infer=_infer_projections,
    )

    @classmethod
    def of(
        cls,
        operands: Sequence[SSAValue],
        max_rank: int,
        sites: Sequence[tuple[int, int, int]],
        location: LocationAttr,
    ) -> ProjectAdaptersOp:
        """The op for the sites of one x, the first operand."""
        inputs = cast("TensorType", operands[0].type).shape[-1].value
        attrs: dict[str, Any] = {"max_rank": max_rank, "inputs": inputs, "sites": tuple(sites)}
        return cls.create(
            operands=operands,
            result_types=_infer_projections([v.type for v in operands], attrs),
            attributes={name: to_attr(value) for name, value in attrs.items()},
            location=location,
        )


@backend_op
class AdaptedProductsOp(PackedProductsOp):
    """`mok.packed_products` with the terms of adapters in each sum.

    The further operands are the results of `mok.project_adapters` for the products in their order, the memory, and the
    scales of the rows. The next launch of such products reads A of sites with `next_inputs` inputs, `next` elements
    after B of the first product.
    """

    name = "mok.adapted_products"
    spec = OpSpec(
        "mok.adapted_products",
        (6, 6),
        None,
        attributes={"encoding": str, "columns": tuple, "pairs": tuple, "streamed": bool},
        optional={"dtype": DType, "next": tuple, "next_inputs": int},
        infer=_infer_packed_products,
        flops=_flops,
        takes_epilogue=True,
        separates=True,
    )


@backend_op
class GroupedProductsOp(PackedProductsOp):
    """The products of groups of rows with the weights of their experts, whose strips follow each other in one buffer.

    Operands: the rows, the packed weights, and the starts, experts and statistics of `mo.moe.indices`. There is one
    product, or a pair.
    """

    name = "mok.grouped_products"
    spec = OpSpec(
        "mok.grouped_products",
        (5, 5),
        None,
        attributes={"encoding": str, "columns": tuple, "pairs": tuple, "streamed": bool},
        optional={"dtype": DType},
        infer=_infer_packed_products,
        flops=_flops,
        takes_epilogue=True,
        separates=True,
    )
