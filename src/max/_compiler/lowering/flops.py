"""Operation counts and names of launches, for profiles."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.ir import SSAValue

from max._compiler.analysis.shapes import shape_of
from max._compiler.mok import BodyOp, CastWithinOp
from max._compiler.passes.base import ops_of
from max.mlir import MoOp
from max.mlir.ops.elementwise import CastOp
from max.mlir.sizes import Size, product, simplify


def region_flops(op: BodyOp) -> Size:
    """The arithmetic operations of a region: one per element and op."""
    total: Size = 0
    for inner in ops_of(op.block):
        # ops over rows state their operations per element
        weight = inner.spec.row_flops or int(inner.spec.elementwise)
        if weight and type(inner) not in (CastOp, CastWithinOp):
            total = simplify(total + weight * product(shape_of(inner.operands[0])))
    return total


def op_flops(op: MoOp, results: Sequence[SSAValue]) -> Size:
    """The multiplications and additions of a product, attention or a convolution, the tests of trees; 0 for other ops.

    Args:
        op: The op.
        results: The values that its kernel stores: its results, or those of an epilogue.
    """
    if op.spec.flops is None:
        return 0
    return simplify(op.spec.flops([v.type for v in op.operands], [v.type for v in results]))


def region_name(op: BodyOp) -> str:
    """The names of a region's ops, in program order."""
    # names without their dialect
    names = [o.name.partition(".")[2] for o in ops_of(op.block)]
    hidden = {"yield", "constant", "reshape", "rebind", "transfer", "broadcast_to"}
    shown = [name for name in names if name not in hidden]
    return "+".join(shown) or "copy"
