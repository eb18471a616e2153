"""Codes packed weights that come from memory in each execution, so that fewer bytes are read."""

from __future__ import annotations

from xdsl.ir import Block, SSAValue

from max._backends.backend import RunsHere
from max._backends.cpu.kernels.products.dense.coded import can_code
from max._backends.cpu.packing import Packing
from max._backends.cpu.passes.packed_ops import (
    AdaptedProductsOp,
    CodeOp,
    GroupedProductsOp,
    PackedMatmulOp,
    PackedProductsOp,
    static_bytes,
)
from max._compiler.analysis.shapes import shape_of
from max._compiler.passes.base import ops_of
from max.mlir import MoOp, TensorType, to_attr

__all__ = ["code_weights"]

PRODUCTS = (PackedMatmulOp, PackedProductsOp, GroupedProductsOp, AdaptedProductsOp)


def code_weights(block: Block, runs_here: RunsHere, packing: Packing) -> None:
    """Lets products read coded weights where these are streamed and have a dtype that the target decodes fast.

    Args:
        block: The block.
        runs_here: Whether an op runs on the CPU.
        packing: Which weights are coded.
    """
    # many rows wait for the processor, not for memory; a weight of theirs is not kept twice
    plain = {
        op.operands[1]
        for op in ops_of(block)
        if type(op) in PRODUCTS and op.attr_or("many_rows", False)
    }
    chosen: dict[MoOp, str] = {}
    for op in ops_of(block):
        encoding = _encoding(op, packing) if type(op) in PRODUCTS and runs_here(op) else None
        if encoding is not None and op.operands[1] not in plain:
            chosen[op] = encoding
    # of few weights, as of a classifier behind convolutions, the kernels take longer to compile than they save
    if sum(map(static_bytes, {op.operands[1] for op in chosen})) < packing.streamed_bytes:
        return
    coded: dict[SSAValue, SSAValue] = {}
    for op, encoding in chosen.items():
        packed = op.operands[1]
        # a packed weight of several products is coded once
        if packed not in coded:
            code = CodeOp.of(packed, encoding)
            assert isinstance(packed.owner, MoOp)
            block.insert_op_after(code, packed.owner)
            coded[packed] = code.results[0]
        op.operands[1] = coded[packed]
        op.attributes["encoding"] = to_attr(encoding)


def _encoding(op: MoOp, packing: Packing) -> str | None:
    """The encoding of a product's weight; None: it is not coded."""
    packed, inner = op.operands[1].type, shape_of(op.operands[0])[-1]
    # a packed weight is static, and so is the axis that is summed
    assert isinstance(packed, TensorType) and isinstance(inner, int)
    # those of blocks and of 8-bit integers are bytes, which have no code
    return packing.codings.get(packed.dtype) if op.attr("streamed") and can_code(inner) else None
