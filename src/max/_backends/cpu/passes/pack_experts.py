"""Packs the weights of all experts into one buffer, so that a group of rows is multiplied by a part of it."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.ir import Block, SSAValue

from max._backends.backend import RunsHere
from max._backends.cpu.kernels.tiles.strips import COLUMNS
from max._backends.cpu.packing import Packing
from max._backends.cpu.passes.merge_products import bring_before, pairs_of
from max._backends.cpu.passes.packed_ops import GroupedProductsOp, PackOp, static_bytes
from max._compiler.analysis.shapes import shape_of
from max._compiler.passes.base import ops_of
from max._compiler.passes.canonicalize import insert_before
from max._compiler.passes.hoist_to_load import weights_only
from max.mlir import DimExpr, MoOp, TensorType, build
from max.mlir.ops.models.experts import GroupedMatmulRaggedOp, GroupedQmatmulRaggedOp
from max.mlir.ops.shape import ReshapeOp, SliceOp

__all__ = ["pack_experts"]

"""The grouped products: of rows, weights, starts, experts, statistics."""


def pack_experts(block: Block, runs_here: RunsHere, packing: Packing) -> None:
    """Replaces grouped products with constant weights by `mok.grouped_products`.

    Two products of the same rows whose results meet in element-wise ops, as in a gated MLP, become a pair: one launch,
    whose epilogue has both sums. A pair is split if other products use its weights too, so that no weight is packed
    twice.

    Args:
        block: The block.
        runs_here: Whether an op runs on the CPU.
        packing: Which weights are packed.
    """
    ops = ops_of(block)
    products = [
        op
        for op in ops
        if type(op) in (GroupedMatmulRaggedOp, GroupedQmatmulRaggedOp) and runs_here(op)
    ]
    if not products:
        return
    constant = weights_only(ops)
    # products of the same rows, in equal encodings
    groups: dict[tuple[object, ...], list[MoOp]] = {}
    for op in products:
        encoding = _encoding(op, constant, packing)
        if encoding is not None:
            x, _, *grouping = op.operands
            # the grouping is part of the key: one launch has one
            groups.setdefault((encoding, x, *grouping), []).append(op)
    op_index = {op: i for i, op in enumerate(ops)}
    # each part is one launch: a product, or a pair
    parts: list[tuple[str, tuple[MoOp, ...]]] = []
    for (encoding, *_), members in groups.items():
        pairs = pairs_of(members, op_index)
        paired = {op for pair in pairs for op in pair}
        single = [(op,) for op in members if op not in paired]
        parts += [(str(encoding), part) for part in (*pairs, *single)]
    parts = _without_shared_weights(parts)
    packed: dict[tuple[object, ...], SSAValue] = {}
    # in program order, as a packed weight comes before its first use
    for encoding, part in sorted(parts, key=lambda p: op_index[p[1][0]]):
        first = part[0]
        weights = [op.operands[1] for op in part]
        if (encoding, *weights) not in packed:
            for w in weights:
                bring_before(w, first, op_index)
            packed[encoding, *weights] = _packed_weights(first, weights, encoding)
        _replace(first, part, packed[encoding, *weights], encoding, packing)


def _without_shared_weights(
    parts: Sequence[tuple[str, tuple[MoOp, ...]]],
) -> list[tuple[str, tuple[MoOp, ...]]]:
    """Splits pairs with a weight that another product uses unpaired, or in another pair: a weight is packed once."""
    groups_of: dict[SSAValue, set[tuple[SSAValue, ...]]] = {}
    for _, part in parts:
        weights = tuple([op.operands[1] for op in part])
        for w in weights:
            groups_of.setdefault(w, set()).add(weights)
    unshared: list[tuple[str, tuple[MoOp, ...]]] = []
    for encoding, part in parts:
        if all(len(groups_of[op.operands[1]]) == 1 for op in part):
            unshared.append((encoding, part))
        else:
            unshared += [(encoding, (op,)) for op in part]
    return unshared


def _encoding(op: MoOp, constant: set[SSAValue], packing: Packing) -> str | None:
    """The encoding in which the weight of a grouped product is packed; None: it is not packed."""
    x, w = op.operands[0].type, op.operands[1].type
    shape = w.static_shape if isinstance(w, TensorType) else None
    if op.operands[1] not in constant or shape is None or 0 in shape:
        return None
    if type(op) is GroupedQmatmulRaggedOp:
        encoding: str = op.attr("encoding")
        return encoding if encoding in packing.quantized else None
    assert isinstance(x, TensorType) and isinstance(w, TensorType)
    # [experts, rows, columns]
    fits = w.dtype in packing.dense and x.dtype is w.dtype and min(shape[1:]) >= packing.min_size
    return "rows" if fits else None


def _replace(
    first: MoOp, part: Sequence[MoOp], packed: SSAValue, encoding: str, packing: Packing
) -> None:
    """Replaces a product, or both of a pair, by one op at the place of the first one."""
    x, _, *grouping = first.operands
    result_type = first.results[0].type
    assert isinstance(result_type, TensorType)
    columns = [shape_of(op.results[0])[-1] for op in part]
    product = GroupedProductsOp.of(
        (x, packed, *grouping),
        encoding,
        [size for size in columns if isinstance(size, int)],
        (0,) if len(part) == 2 else (),
        static_bytes(packed) >= packing.streamed_bytes,
        first.location,
        result_type.dtype,
    )
    insert_before(first, product)
    for op, result in zip(part, product.results, strict=True):
        op.results[0].replace_all_uses_with(result)
        op.detach()
        op.erase()


def _packed_weights(first: MoOp, weights: Sequence[SSAValue], encoding: str) -> SSAValue:
    """Packs the weights of all experts, of a product or of a pair that shares strips."""
    rows = shape_of(weights[0])[1]
    assert isinstance(rows, int)
    # a strip must not have rows of two experts: pack each expert separately
    as_one_matrix = rows % (COLUMNS // len(weights)) == 0
    parts = [_matrices(first, w, as_one_matrix) for w in weights]
    # expert by expert: the two weights of a pair share the strips of their expert
    matrices = [matrix for of_expert in zip(*parts, strict=True) for matrix in of_expert]
    pairs = range(0, len(matrices), 2) if len(weights) == 2 else ()
    return insert_before(first, PackOp.of(matrices, encoding, tuple(pairs)))


def _matrices(before: MoOp, w: SSAValue, as_one_matrix: bool) -> list[SSAValue]:
    """The rows of all experts as one matrix where `as_one_matrix`, else as a matrix for each expert."""
    assert isinstance(w.type, TensorType) and w.type.static_shape is not None
    count, rows, size = w.type.static_shape
    matrix = insert_before(
        before, build(ReshapeOp, (w,), {}, (w.type.with_shape([count * rows, size]),))
    )
    if as_one_matrix:
        return [matrix]
    expert_type = w.type.with_shape([rows, size])

    def rows_from(first: int) -> SSAValue:
        bounds = {"start": (first, 0), "stop": (first + rows, size), "step": (1, 1)}
        attributes = {name: tuple(map(DimExpr.of, dims)) for name, dims in bounds.items()}
        return insert_before(before, build(SliceOp, (matrix,), attributes, (expert_type,)))

    return [rows_from(expert * rows) for expert in range(count)]
