"""Packs weights into the layout that the kernels read, once when a model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdsl.ir import Block, SSAValue

from max._backends.backend import RunsHere
from max._backends.cpu.packing import NO_PACKING, Packing, has_narrow_groups
from max._backends.cpu.passes.packed_ops import PackedMatmulOp, PackOp, static_bytes
from max._compiler.analysis.layout import Layout
from max._compiler.analysis.shapes import shape_of, view_layout
from max._compiler.passes.base import ops_of
from max._compiler.passes.canonicalize import insert_before, producer
from max._compiler.passes.hoist_to_load import weights_only
from max._compiler.passes.materialize import base_of
from max._compiler.passes.redundant_ops import drop_dead_ops
from max._config import flags
from max._lazy import lazy_module
from max.dtype import DType
from max.mlir import DimExpr, MoOp, TensorType, build
from max.mlir.ops.elementwise import CastOp
from max.mlir.ops.quantized import QmatmulOp
from max.mlir.ops.shape import ReshapeOp, TransposeOp
from max.mlir.ops.spatial import ConvOp
from max.mlir.sizes import product

if TYPE_CHECKING:
    from max._backends.cpu.passes import int8_filters, packed_filters, winograd_ops
else:
    # with their kernels; a decoder has no convolution
    int8_filters = lazy_module("max._backends.cpu.passes.int8_filters")
    packed_filters = lazy_module("max._backends.cpu.passes.packed_filters")
    winograd_ops = lazy_module("max._backends.cpu.passes.winograd_ops")

__all__ = ["pack_weights"]

MANY_ROWS = 32
"""The rows from which on a product with a dense weight is never computed panel by panel."""


def pack_weights(block: Block, runs_here: RunsHere, packing: Packing) -> None:
    """Replaces products and convolutions with weights by those with packed weights.

    `compute_once` then hoists the packing. A weight that is an input, or has a symbolic size, is not packed.

    Args:
        block: The block.
        runs_here: Whether an op runs on the CPU.
        packing: Which weights are packed.
    """
    ops = ops_of(block)
    candidates = [op for op in ops if op.spec.packable and runs_here(op)]
    if candidates and packing != NO_PACKING:
        _pack(block, candidates, weights_only(ops), packing)


def _pack(block: Block, candidates: list[MoOp], constant: set[SSAValue], packing: Packing) -> None:
    """Packs the weights of the candidates, all of one device."""
    products = [op for op in candidates if type(op) is not ConvOp]
    convolutions = [op for op in candidates if type(op) is ConvOp]
    if packing.int8:
        added = _convolve_codes(convolutions, constant, packing)
        # what they were replaced by
        convolutions = [op for op in convolutions if op.parent is not None]
        convolutions += [op for op in added if type(op) is ConvOp]
        products += [op for op in added if type(op) is not ConvOp]
        if added:
            constant = weights_only(ops_of(block))
        _pack_int8([op for op in products if type(op) is not QmatmulOp], constant, packing)
    _pack_filters(convolutions, constant, packing)
    products = [op for op in products if op.parent is not None]
    # casts to int32 of operands that int8 products now read directly
    drop_dead_ops(block)
    packed: dict[tuple[SSAValue, str], SSAValue] = {}
    chosen: list[tuple[MoOp, SSAValue, str]] = []
    for op in products:
        x, w = op.operands
        # a product of weights only runs once, at load
        if x in constant or w not in constant:
            continue
        encoding = _encoding(op, packing)
        if encoding is None:
            continue
        source = transposed_matrix(w) if encoding == "columns" else None
        if source is not None:
            # panels take either orientation: the transpose costs nothing
            encoding, w = "rows", source
        chosen.append((op, w, encoding))
        # a weight of several products is packed once
        if (w, encoding) not in packed:
            matrix = as_matrix(op, w) if source is not None else w
            packed[w, encoding] = insert_before(op, PackOp.of([matrix], encoding))
    # whether the caches hold the weights until the next execution
    streamed = sum(map(static_bytes, packed.values())) >= packing.streamed_bytes
    for op, w, encoding in chosen:
        x = op.operands[0]
        columns = shape_of(op.results[0])[-1]
        assert isinstance(columns, int)
        many = encoding in ("rows", "columns") and least_rows(x) >= MANY_ROWS
        replaced = PackedMatmulOp.of(
            x, packed[w, encoding], encoding, columns, streamed, op.location, many
        )
        op.results[0].replace_all_uses_with(insert_before(op, replaced))
        op.detach()
        op.erase()
    # the transposes of weights that are packed as they lie in memory
    drop_dead_ops(block)


def _pack_int8(products: list[MoOp], constant: set[SSAValue], packing: Packing) -> None:
    """Packs int8 weights of products of int8 operands, or of int8 operands that are each cast to int32."""
    packed: dict[tuple[SSAValue, str], SSAValue] = {}
    for op in products:
        x, w = (_int8(value, op.results[0]) for value in op.operands)
        if x is None or w is None or x in constant or w not in constant:
            continue
        by_rows: bool = op.attr_or("transpose_b", False)
        transpose = producer(w, TransposeOp)
        if transpose is not None:
            # the layout of panels takes either orientation: the transpose costs nothing
            w, by_rows = transpose.operands[0], not by_rows
        shape = w.type.static_shape if isinstance(w.type, TensorType) else None
        if shape is None or len(shape) != 2 or min(shape) < packing.min_size:
            continue
        encoding = "int8 rows" if by_rows else "int8 columns"
        if (w, encoding) not in packed:
            packed[w, encoding] = insert_before(op, PackOp.of([w], encoding))
        panels = packed[w, encoding]
        columns, streamed = (
            shape[0 if by_rows else 1],
            static_bytes(panels) >= packing.streamed_bytes,
        )
        product = PackedMatmulOp.of(x, panels, encoding, columns, streamed, op.location)
        result = insert_before(op, product)
        # the kernel's result is int32; a product that wraps in 8 bits is narrowed
        if result.type != op.results[0].type:
            result = insert_before(op, build(CastOp, (result,), {}, op.result_types))
        op.results[0].replace_all_uses_with(result)
        op.detach()
        op.erase()


def _convolve_codes(
    convolutions: list[MoOp], constant: set[SSAValue], packing: Packing
) -> list[MoOp]:
    """Replaces convolutions of int8 operands that are each cast to int32; returns the ops whose weights are yet to be
    packed.
    """
    packed: dict[SSAValue, SSAValue] = {}
    added: list[MoOp] = []
    for op in convolutions:
        x, w = (_int8(value, op.results[0]) for value in op.operands)
        if x is None or w is None or x in constant or w not in constant:
            continue
        if op.operands[0] is x:
            continue  # a convolution that wraps in 8 bits
        found = int8_filters.convolve_codes(op, x, w, packing.int8_filters, packed)
        if found is not None:
            added.append(found)
    return added


def _int8(value: SSAValue, result: SSAValue) -> SSAValue | None:
    """The int8 value that an operand of a product is, or is cast from; None if there is none."""
    wide = producer(value, CastOp)
    narrow = value if wide is None else wide.operands[0]
    assert isinstance(result.type, TensorType)
    # without a cast the product has the dtype of its operands
    result_dtype = DType.int8 if wide is None else DType.int32
    type_ = narrow.type
    if result.type.dtype is not result_dtype or not isinstance(type_, TensorType):
        return None
    return narrow if type_.dtype is DType.int8 else None


def _pack_filters(convolutions: list[MoOp], constant: set[SSAValue], packing: Packing) -> None:
    """Packs the filters of convolutions but those of narrow groups, such as depthwise ones."""
    packed: dict[tuple[SSAValue, int], SSAValue] = {}
    transformed: dict[SSAValue, SSAValue] = {}
    for op in convolutions:
        x, w = op.operands
        groups = op.attr("groups")
        if x in constant or w not in constant:
            continue
        assert isinstance(w.type, TensorType) and w.type.static_shape is not None
        shape = w.type.static_shape
        if 0 in shape or w.type.dtype not in packing.filters:
            continue
        if has_narrow_groups(shape, groups, packing.narrow_channels.get(w.type.dtype, 1)):
            continue
        if flags.MAX_WINOGRAD and winograd_ops.fits_winograd(op):
            if w not in transformed:
                transformed[w] = insert_before(op, winograd_ops.WinogradFilterOp.of(w))
            convolved = insert_before(op, winograd_ops.WinogradConvOp.of(op, transformed[w]))
        else:
            if (w, groups) not in packed:
                packed[w, groups] = insert_before(op, packed_filters.PackFilterOp.of(w, groups))
            convolved = insert_before(op, packed_filters.PackedConvOp.of(op, packed[w, groups]))
        op.results[0].replace_all_uses_with(convolved)
        op.detach()
        op.erase()


def least_rows(x: SSAValue) -> int:
    """The rows of a product's left operand if each size that is known at run time only is 1."""
    rows = DimExpr.of(product(shape_of(x)[:-1]))
    return rows.evaluate(dict.fromkeys(rows.symbols, 1))


def transposed_matrix(w: SSAValue) -> SSAValue | None:
    """The value whose memory, as `[N, K]`, has the elements of a weight `[K, N]`; None if there is none.

    A convolution of one tap is a product with its filter `[F, C, 1, 1]`, transposed and without the axes of size 1.
    """
    base = base_of(w)
    views: list[MoOp] = []
    value = w
    while value is not base:
        owner = value.owner
        assert isinstance(owner, MoOp)
        views.append(owner)
        value = owner.operands[0]
    layout: Layout | None = Layout.contiguous(shape_of(base))
    for view in reversed(views):
        layout = view_layout(view, layout)
        if layout is None:
            return None
    inner, columns = shape_of(w)
    is_whole = product(shape_of(base)) == product((inner, columns))
    if is_whole and 1 not in (inner, columns) and layout == Layout((inner, columns), (1, inner)):
        return base
    return None


def as_matrix(op: MoOp, base: SSAValue) -> SSAValue:
    """The memory of a weight of an op as `[N, K]`; see `transposed_matrix`."""
    inner, columns = shape_of(op.operands[1])
    shape = [columns, inner]
    type_ = base.type
    assert isinstance(type_, TensorType)
    if list(shape_of(base)) == shape:
        return base
    return insert_before(op, build(ReshapeOp, (base,), {}, (type_.with_shape(shape),)))


def _encoding(op: MoOp, packing: Packing) -> str | None:
    """The encoding in which the weight of a product is packed; None: not packed."""
    w = op.operands[1].type
    assert isinstance(w, TensorType) and w.static_shape is not None
    shape = w.static_shape
    if len(shape) != 2 or 0 in shape:
        return None
    if type(op) is QmatmulOp:
        return op.attr("encoding") if op.attr("encoding") in packing.quantized else None
    if w.dtype not in packing.dense or min(shape) < packing.min_size:
        return None
    return "rows" if op.attr_or("transpose_b", False) else "columns"
