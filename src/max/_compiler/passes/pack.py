"""Lays out weights anew for the kernels that multiply by them, once when a model is loaded."""

from __future__ import annotations

import math

from xdsl.ir import Block, SSAValue

from max._compiler.mok import PackedConvOp, PackedMatmulOp, PackFilterOp, PackOp
from max._compiler.passes.base import ops_of
from max._compiler.passes.canonicalise import insert_before, producer
from max._compiler.passes.dce import drop_dead_ops
from max._compiler.passes.once import weights_only
from max._compiler.shapes import shape_of
from max._kernel_library.products.dense.panels import DTYPES
from max._kernel_library.products.quantised.packed import FORMATS
from max.dtype import DType
from max.mlir import MoOp, TensorType, build

__all__ = ["pack_weights"]


STREAMED_BYTES = 32 << 20
"""Weights of a graph of so many bytes are not expected to stay in the caches between executions."""
LEAST_ROWS = 32
"""Weights with fewer rows or columns are not packed: a panel would hold little else than padding."""


def pack_weights(block: Block) -> None:
    """Makes products and convolutions with weights those with packed ones; `compute_once` moves the packing to the load.

    A weight that comes in as an input, or has a size that is not known, stays as it is.
    """
    ops = ops_of(block)
    wanted = [op for op in ops if op.name in ("mo.qmatmul", "mo.matmul", "mok.matmul")]
    convolutions = [op for op in ops if op.name == "mo.conv"]
    if not wanted and not convolutions:
        return
    known = weights_only(ops)
    _pack_filters(convolutions, known)
    _pack_int8([op for op in wanted if op.name != "mo.qmatmul"], known)
    wanted = [op for op in wanted if op.parent is not None]
    # casts of operands that are now multiplied as they are
    drop_dead_ops(block)
    packed: dict[tuple[SSAValue, str], SSAValue] = {}
    chosen: list[tuple[MoOp, str]] = []
    for op in wanted:
        x, w = op.operands
        encoding = _encoding(op)
        if x in known or w not in known or encoding is None:
            continue
        chosen.append((op, encoding))
        if (w, encoding) not in packed:
            packed[w, encoding] = insert_before(op, PackOp.of([w], encoding))
    streamed = sum(map(_bytes, packed.values())) >= STREAMED_BYTES
    for op, encoding in chosen:
        x, w = op.operands
        columns = shape_of(op.results[0])[-1]
        assert isinstance(columns, int)
        made = PackedMatmulOp.of(x, packed[w, encoding], encoding, columns, streamed, op.location)
        op.results[0].replace_all_uses_with(insert_before(op, made))
        op.detach()
        op.erase()


def _pack_int8(products: list[MoOp], known: set[SSAValue]) -> None:
    """Packs weights of 8-bit integers, whose products are written in 8 bits, or in 32 with a cast of each operand."""
    packed: dict[tuple[SSAValue, str], SSAValue] = {}
    for op in products:
        x, w = (_int8(value, op.results[0]) for value in op.operands)
        if x is None or w is None or x in known or w not in known:
            continue
        by_rows: bool = op.attr_or("transpose_b", False)
        turned = producer(w, "mo.transpose")
        if turned is not None:
            w, by_rows = turned.operands[0], not by_rows
        shape = w.type.static_shape if isinstance(w.type, TensorType) else None
        if shape is None or len(shape) != 2 or min(shape) < LEAST_ROWS:
            continue
        encoding = "int8 rows" if by_rows else "int8 columns"
        if (w, encoding) not in packed:
            packed[w, encoding] = insert_before(op, PackOp.of([w], encoding))
        panels = packed[w, encoding]
        columns, streamed = shape[0 if by_rows else 1], _bytes(panels) >= STREAMED_BYTES
        made = PackedMatmulOp.of(x, panels, encoding, columns, streamed, op.location)
        result = insert_before(op, made)
        if result.type != op.results[0].type:
            result = insert_before(op, build("mo.cast", (result,), {}, op.result_types))
        op.results[0].replace_all_uses_with(result)
        op.detach()
        op.erase()


def _int8(value: SSAValue, result: SSAValue) -> SSAValue | None:
    """The 8-bit integers that an operand of a product stands for; None where it is not of them."""
    wide = producer(value, "mo.cast")
    narrow = value if wide is None else wide.operands[0]
    assert isinstance(result.type, TensorType)
    wanted = DType.int8 if wide is None else DType.int32
    type_ = narrow.type
    if result.type.dtype is not wanted or not isinstance(type_, TensorType):
        return None
    return narrow if type_.dtype is DType.int8 else None


def _pack_filters(convolutions: list[MoOp], known: set[SSAValue]) -> None:
    """Packs the filters of convolutions, but for those of one channel and column a group, which are read as they are."""
    packed: dict[tuple[SSAValue, int], SSAValue] = {}
    for op in convolutions:
        x, w = op.operands
        groups = op.attr("groups")
        shape = w.type.static_shape if isinstance(w.type, TensorType) else None
        if x in known or w not in known or shape is None or 0 in shape:
            continue
        assert isinstance(x.type, TensorType) and isinstance(w.type, TensorType)
        if x.type.dtype is not w.type.dtype or w.type.dtype not in DTYPES:
            continue
        if shape[-2] == 1 and shape[-1] == groups:
            continue
        if (w, groups) not in packed:
            packed[w, groups] = insert_before(op, PackFilterOp.of(w, groups))
        made = insert_before(op, PackedConvOp.of(op, packed[w, groups]))
        op.results[0].replace_all_uses_with(made)
        op.detach()
        op.erase()


def _bytes(value: SSAValue) -> int:
    type_ = value.type
    assert isinstance(type_, TensorType) and type_.static_shape is not None
    return math.prod(type_.static_shape) * type_.dtype.size_in_bytes


def _encoding(op: MoOp) -> str | None:
    """How the weight of a product is packed; None where it is not."""
    x, w = (value.type for value in op.operands)
    shape = w.static_shape if isinstance(w, TensorType) else None
    if shape is None or len(shape) != 2 or 0 in shape:
        return None
    if op.name == "mo.qmatmul":
        return op.attr("encoding") if op.attr("encoding") in FORMATS else None
    assert isinstance(x, TensorType) and isinstance(w, TensorType)
    if w.dtype not in DTYPES or x.dtype is not w.dtype or min(shape) < LEAST_ROWS:
        return None
    return "rows" if op.attr_or("transpose_b", False) else "columns"
