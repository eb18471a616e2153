"""Ops of mixtures of experts: rows sorted by expert, and products of groups of rows."""

from __future__ import annotations

from max.dtype import DType
from max.dtype.blocks import BLOCK_FORMATS
from max.mlir.declare import NamedTypes, check_float_result, declare, static_dims
from max.mlir.dims import DimExpr
from max.mlir.operand import FLOATS, INTEGERS, Operand
from max.mlir.operation import Attrs, Types, define
from max.mlir.types import TensorType

_WORDS = (DType.uint32, DType.int32)
_ROWS = tuple([dtype for dtype in FLOATS if dtype.size_in_bytes <= 4])
_GROUPS = (
    Operand("expert_start_indices", _WORDS, 1),
    Operand("expert_ids", _WORDS, 1),
    Operand("expert_usage_stats", _WORDS, 1, on_any_device=True),
)
"""The first row of each group and the end of the last one, the expert of each group, and the statistics ``[2]``."""


def _sorted_types(types: NamedTypes, attrs: Attrs) -> Types:
    """The order, the first row of each group, the inverse of the order, the expert of each group, the statistics."""
    ids, experts = types["ids"], attrs["experts"]
    if experts < 1:
        raise ValueError(f"moe.indices: experts is {experts}, expected 1 or more")
    rows = ids.shape[0]

    def vector(dtype: DType, size: DimExpr | int) -> TensorType:
        return TensorType.get(dtype, ids.with_shape((size,)).shape, ids.device)

    return (
        vector(DType.uint32, rows),
        vector(DType.uint32, experts + 1),
        vector(DType.uint32, rows),
        vector(DType.int32, experts),
        vector(DType.uint32, 2),
    )


define(
    declare(
        "mo.moe.indices",
        (Operand("ids", INTEGERS, 1),),
        5,
        _sorted_types,
        attributes={"experts": int},
        takes="ids: integers `[n]`",
        gives=(
            "order u32 `[n]`, starts u32 `[experts+1]`, restored u32 `[n]`, experts si32 "
            "`[experts]`, stats u32 `[2]` (most rows, groups)"
        ),
        doc="`experts`; rows sorted by expert",
    )
)


def _check_product(op: str, types: NamedTypes, results: Types) -> None:
    """Checks the statistics of the groups, and the result ``[rows, columns of the weight]``, of any float dtype."""
    x, weight, stats = types["x"], types["weight"], types["expert_usage_stats"]
    if stats.shape != stats.with_shape((2,)).shape:
        raise ValueError(f"{op}: expert_usage_stats is {stats.short}, expected [2]")
    check_float_result(op, results, x.with_shape((x.shape[0], weight.shape[1])))


def _check_multiplied(types: NamedTypes, results: Types, attrs: Attrs) -> None:
    op, x, weight = "grouped_matmul.ragged", types["x"], types["weight"]
    if x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"{op}: x is {x.short}, weight {weight.short}; the last dimensions must be equal"
        )
    _check_product(op, types, results)


GroupedMatmulRaggedOp = define(
    declare(
        "mo.grouped_matmul.ragged",
        # x: [rows, inputs]; weight: [experts, outputs, inputs]
        (Operand("x", _ROWS, 2), Operand("weight", FLOATS, 3), *_GROUPS),
        1,
        result_rule=_check_multiplied,
        takes="x `[n, K]`, w `[experts, N, K]`, starts, experts (-1: results are 0), stats",
        gives="`[n, N]`, any float dtype; rows of no group are 0",
        doc="the rows of each group times the transposed weight of its expert",
    )
)


def _check_multiplied_blocks(types: NamedTypes, results: Types, attrs: Attrs) -> None:
    op, encoding = "grouped_qmatmul.ragged", attrs["encoding"]
    x, weight = types["x"], types["weight"]
    form = BLOCK_FORMATS.get(encoding)
    if form is None:
        raise ValueError(f"{op}: encoding is {encoding!r}, expected {', '.join(BLOCK_FORMATS)}")
    (elements,) = static_dims(op, "x", x, 1)
    (size,) = static_dims(op, "weight", weight, 2)
    if elements % form.elements or elements // form.elements * form.bytes != size:
        raise ValueError(
            f"{op}: x is {x.short}, weight {weight.short}; {elements} elements in {encoding} take "
            f"{-(-elements // form.elements) * form.bytes} bytes, in whole blocks of {form.elements}"
        )
    _check_product(op, types, results)


GroupedQmatmulRaggedOp = define(
    declare(
        "mo.grouped_qmatmul.ragged",
        # x: [rows, inputs]; weight: [experts, outputs, bytes of a row of blocks]
        (Operand("x", _ROWS, 2), Operand("weight", (DType.uint8,), 3), *_GROUPS),
        1,
        result_rule=_check_multiplied_blocks,
        attributes={"encoding": str},
        takes="the same, w ui8 `[experts, N, bytes]`",
        gives="`[n, N]`",
        doc="the same, with weights of blocks",
    )
)
