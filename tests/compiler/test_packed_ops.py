"""Types, pieces and arithmetic of the ops with packed weights."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from xdsl.ir import Block, SSAValue
from xdsl.utils.exceptions import VerifyException

from max._backends.cpu.passes.packed_filters import PackedConvOp, PackFilterOp
from max._backends.cpu.passes.packed_ops import (
    AdaptedMatmulOp,
    AdaptedProductsOp,
    CodeOp,
    GroupedProductsOp,
    PackedMatmulOp,
    PackedProductsOp,
    PackOp,
    ProjectAdaptersOp,
)
from max._backends.cpu.passes.winograd_ops import WinogradConvOp, WinogradFilterOp
from max._compiler.passes.redundant_ops import drop_dead_ops
from max.dtype import DType
from max.graph import DeviceRef
from max.mlir import DimExpr, MoOp, TensorType, build
from max.mlir.builtin import UNKNOWN_LOC
from max.mlir.ops.spatial import ConvOp

F32, BF16, U8, I8 = DType.float32, DType.bfloat16, DType.uint8, DType.int8
CPU = DeviceRef.CPU().to_mlir()


def values(*types: tuple[DType, Sequence[int | str]]) -> tuple[SSAValue, ...]:
    """Values of these dtypes and shapes."""
    made = [TensorType.get(dtype, [DimExpr.of(d) for d in dims], CPU) for dtype, dims in types]
    return tuple(Block(arg_types=made).args)


def shape(op: MoOp, number: int = 0) -> tuple[DType, list[str]]:
    type_ = op.results[number].type
    assert isinstance(type_, TensorType)
    return type_.dtype, [str(dim) for dim in type_.shape]


def flops(op: MoOp) -> str:
    assert op.spec.flops is not None
    return str(op.spec.flops([v.type for v in op.operands], op.result_types))


def test_weights_share_a_buffer_of_strips() -> None:
    """32 columns each; those of a pair fill one half of each strip."""
    ws = values((F32, (70, 64)), (F32, (40, 64)), (F32, (40, 64)), (F32, (1, 64)))
    op = PackOp.of(ws, "rows", (1,))
    assert shape(op) == (F32, ["7", "2048"])
    assert [(piece.start, piece.shape) for piece in op.pieces()] == [
        ((0, 0), (3, 2048)), ((3, 0), (3, 2048)), ((3, 0), (3, 2048)), ((6, 0), (1, 2048)),
    ]  # fmt: skip
    halves = [(piece.attributes["share"], piece.attributes["shares"]) for piece in op.pieces()]
    assert halves == [(0, 1), (0, 2), (1, 2), (0, 1)]


@pytest.mark.parametrize(
    ("encoding", "dims", "strips"),
    [("rows", (33, 64), 2), ("columns", (64, 33), 2), ("int8 rows", (32, 64), 1), ("int8 columns", (64, 65), 3)],
)  # fmt: skip
def test_orientation_of_weights(encoding: str, dims: tuple[int, int], strips: int) -> None:
    is_int8 = encoding.startswith("int8")
    dtype, sizes = shape(PackOp.of(values((I8 if is_int8 else F32, dims)), encoding))
    assert dtype is (U8 if is_int8 else F32) and sizes == [str(strips), "2048"]


@pytest.mark.parametrize(
    ("types", "pairs", "message"),
    [
        ([(F32, (32, 64)), (F32, (32, 96))], (), "do not go together"),
        ([(F32, (32, 64)), (BF16, (32, 64))], (), "do not go together"),
        ([(F32, (32, 64)), (F32, (40, 64))], (0,), "the sizes of a pair"),
    ],
)
def test_weights_that_share_no_buffer(
    types: list[tuple[DType, tuple[int, int]]], pairs: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PackOp.of(values(*types), "rows", pairs)


def test_products() -> None:
    x, packed, codes = values((BF16, ("b", "n", 64)), (BF16, (3, 2048)), (U8, (3, 2048)))
    op = PackedMatmulOp.of(x, packed, "rows", 70, False, UNKNOWN_LOC)
    assert shape(op) == (BF16, ["b", "n", "70"]) and flops(op) == str(
        DimExpr.of("b") * DimExpr.of("n") * 70 * 2 * 64
    )
    int8 = PackedMatmulOp.of(x, codes, "int8 rows", 70, False, UNKNOWN_LOC)
    assert shape(int8) == (DType.int32, ["b", "n", "70"])
    several = PackedProductsOp.of((x, packed), "rows", (8, 9), (), True, UNKNOWN_LOC, F32)
    assert [shape(several, i) for i in (0, 1)] == [(F32, ["b", "n", "8"]), (F32, ["b", "n", "9"])]
    assert flops(several) == str(DimExpr.of("b") * DimExpr.of("n") * 64 * 2 * (8 + 9))
    plain = PackedProductsOp.of((x, packed), "rows", (8,), (), True, UNKNOWN_LOC)
    assert shape(plain) == (BF16, ["b", "n", "8"])


def test_codes_have_the_strips_of_their_panels() -> None:
    (packed,) = values((F32, (3, 2048)))
    dtype, (strips, num_bytes) = shape(CodeOp.of(packed, "coded float32"))
    assert dtype is U8 and strips == "3" and int(num_bytes) >= 2048 * 4


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("taps", "channels", "columns", "groups", "strips"),
    [((3, 3), 4, 70, 1, 3), ((3, 2), 2, 66, 2, 4), ((1, 1), 6, 32, 1, 1), ((2, 3, 4), 2, 8, 4, 4)],
)
def test_filters(
    dtype: DType, taps: tuple[int, ...], channels: int, columns: int, groups: int, strips: int
) -> None:
    """Strips of 32 columns of a group; the convolution has the type and the work of that with the plain filter."""
    rank = len(taps)
    x, w = values((dtype, ("n", *[9] * rank, channels * groups)), (dtype, (*taps, channels, columns)))  # fmt: skip
    attrs = {
        "stride": (1,) * rank, "dilation": (1,) * rank, "padding": (0,) * 2 * rank, "groups": groups,
    }  # fmt: skip
    conv = build(ConvOp, (x, w), attrs)
    packed = PackFilterOp.of(w, groups)
    size = channels * 32
    for tap in taps:
        size *= tap
    assert shape(packed) == (dtype, [str(strips), str(size)])
    op = PackedConvOp.of(conv, packed.results[0])
    op.verify()
    assert op.results[0].type == conv.results[0].type and flops(op) == flops(conv)


def test_filters_of_winograd() -> None:
    """36 products of each channel and column, in strips of 32 columns; the work is that of the plain convolution."""
    x, w = values((F32, ("n", "h", 21, 40)), (F32, (3, 3, 40, 70)))
    attrs = {"stride": (1, 1), "dilation": (1, 1), "padding": (0, 1, 0, 1), "groups": 1}
    conv = build(ConvOp, (x, w), attrs)
    filters = WinogradFilterOp.of(w)
    filters.verify()
    assert shape(filters) == (F32, ["3", str(36 * 40 * 32)])
    op = WinogradConvOp.of(conv, filters.results[0])
    op.verify()
    assert op.results[0].type == conv.results[0].type and flops(op) == flops(conv)
    assert op.spec.takes_epilogue


def test_the_input_of_a_transformed_filter_has_its_channels() -> None:
    """The type of the result follows from that of the input, the attributes and `columns`."""
    x, w, other = values((F32, (2, 20, 21, 40)), (F32, (3, 3, 40, 70)), (F32, (2, 20, 19, 40)))
    attrs = {"stride": (1, 1), "dilation": (1, 1), "padding": (0, 0, 0, 0), "groups": 1}
    conv = build(ConvOp, (x, w), attrs)
    filters = WinogradFilterOp.of(w).results[0]
    op = WinogradConvOp.of(conv, filters)
    op.verify_()
    wrong = WinogradConvOp.create(
        operands=(other, filters), result_types=op.result_types, attributes=op.attributes
    )
    with pytest.raises(VerifyException, match="mok.winograd_conv"):
        wrong.verify_()


@pytest.mark.parametrize(
    ("op", "count"),
    [
        (WinogradFilterOp, 1), (WinogradConvOp, 2),
        (CodeOp, 1), (PackedMatmulOp, 2), (PackedProductsOp, 2), (GroupedProductsOp, 5), (AdaptedMatmulOp, 9),
        (ProjectAdaptersOp, 8), (AdaptedProductsOp, 6),
    ],
)  # fmt: skip
def test_numbers_of_operands(op: type[MoOp], count: int) -> None:
    for number in (count - 1, count + 1):
        wrong = op.create(operands=values(*[(F32, (4, 4))] * number))
        with pytest.raises(VerifyException, match=f"takes {count} operands, got {number}"):
            wrong.verify_()


def test_products_of_one_value_stay_apart() -> None:
    """`merge_products` joins no products across one of another value: their results would be alive longer."""
    ops = (
        PackedMatmulOp, PackedProductsOp, GroupedProductsOp, AdaptedMatmulOp, AdaptedProductsOp, PackedConvOp,
        WinogradConvOp,
    )  # fmt: skip
    assert all(op.spec.separates for op in ops) and not PackOp.spec.separates


@pytest.mark.parametrize(
    ("op", "operands", "results"),
    [(CodeOp, 1, 1), (PackedMatmulOp, 2, 1), (AdaptedMatmulOp, 9, 1), (ProjectAdaptersOp, 8, 2)],
)
def test_numbers_of_results(op: type[MoOp], operands: int, results: int) -> None:
    types = [v.type for v in values(*[(F32, (4, 4))] * (results + 1))]
    for number in (results - 1, results + 1):
        wrong = op.create(operands=values(*[(F32, (4, 4))] * operands), result_types=types[:number])
        with pytest.raises(VerifyException, match=f"has {results} results, got {number}"):
            wrong.verify_()


def test_products_with_adapters_pad_the_rank_and_have_a_head_for_each_site() -> None:
    operands = values((F32, ("n", 64)), *[(F32, (4, 4))] * 7)
    op = ProjectAdaptersOp.of(operands, 9, [(0, 0, 32), (500, 1, 40)], UNKNOWN_LOC)
    assert shape(op, 0) == (F32, ["n", "24"]) and shape(op, 1) == (DType.int64, ["n", "8"])
    assert op.attr("inputs") == 64


def test_packed_ops_without_uses_are_dropped() -> None:
    ops = (
        PackOp, CodeOp, PackedMatmulOp, PackedProductsOp, GroupedProductsOp, AdaptedProductsOp, AdaptedMatmulOp,
        ProjectAdaptersOp, WinogradFilterOp, WinogradConvOp,
    )  # fmt: skip
    assert all(op.spec.pure for op in ops)
    weight = TensorType.get(F32, [DimExpr.of(70), DimExpr.of(64)], CPU)
    block = Block(arg_types=[weight])
    block.add_op(PackOp.of(block.args, "rows", ()))
    drop_dead_ops(block)
    assert not [*block.ops]
