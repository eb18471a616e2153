"""Lays out weights anew for the kernels that multiply by them, once when a model is loaded."""

from __future__ import annotations

from xdsl.ir import Block, SSAValue

from max._compiler.mok import PackedMatmulOp, PackOp
from max._compiler.passes.base import ops_of
from max._compiler.passes.canonicalise import insert_before
from max._compiler.passes.once import weights_only
from max._kernels.packed import FORMATS
from max.mlir import TensorType

__all__ = ["pack_weights"]


def pack_weights(block: Block) -> None:
    """Makes products with quantised weights products with packed ones; `compute_once` moves the packing to the load.

    A weight that comes in as an input, or has a size that is not known, stays as it is.
    """
    ops = ops_of(block)
    wanted = [op for op in ops if op.name == "mo.qmatmul" and op.attr("encoding") in FORMATS]
    if not wanted:
        return
    known = weights_only(ops)
    packed: dict[tuple[SSAValue, str], SSAValue] = {}
    for op in wanted:
        x, w = op.operands
        shape = w.type.static_shape if isinstance(w.type, TensorType) else None
        if w not in known or shape is None or 0 in shape:
            continue
        encoding: str = op.attr("encoding")
        if (w, encoding) not in packed:
            packed[w, encoding] = insert_before(op, PackOp.of(w, encoding))
        made = PackedMatmulOp.of(x, packed[w, encoding], encoding, shape[0], op.location)
        op.results[0].replace_all_uses_with(insert_before(op, made))
        op.detach()
        op.erase()
