"""Operation counts and names of launches, for profiles."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.ir import SSAValue

from max._compiler.mok import BodyOp
from max._compiler.passes.base import ops_of
from max._compiler.shapes import shape_of
from max._compiler.sizes import Size, product, simplify
from max._kernel_library.tiles.strips import COLUMNS


def region_flops(op: BodyOp) -> Size:
    """The arithmetic operations of a region: one per element and op."""
    total: Size = 0
    for inner in ops_of(op.block):
        weight = inner.spec.row_flops or int(inner.spec.elementwise)
        if weight and inner.name != "mo.cast":
            total = simplify(total + weight * product(shape_of(inner.operands[0])))
    return total


def product_flops(name: str, operands: Sequence[SSAValue], results: Sequence[SSAValue]) -> Size:
    """The multiplications and additions of a matmul, attention or a convolution; 0 for other ops."""
    if name in ("mo.matmul", "mo.qmatmul", "mok.packed_matmul"):
        return simplify(2 * product(shape_of(results[0])) * shape_of(operands[0])[-1])
    if name in ("mok.packed_products", "mok.grouped_products"):
        columns: Size = 0
        for result in results:
            columns = simplify(columns + shape_of(result)[-1])
        return simplify(2 * product(shape_of(operands[0])) * columns)
    if name == "mok.attention":
        q, keys, values = (shape_of(v) for v in operands[:3])
        return simplify(2 * product(q[:-1]) * keys[-2] * (q[-1] + values[-1]))
    if name == "mo.conv":
        taps = product(shape_of(operands[1])[:-1])
        return simplify(2 * product(shape_of(results[0])) * taps)
    if name == "mok.packed_conv":
        strip = shape_of(operands[1])[-1]
        return simplify(2 * product(shape_of(results[0])) * (strip // COLUMNS))
    return 0


def region_name(op: BodyOp) -> str:
    """The names of a region's ops, in program order."""
    names = [o.name.partition(".")[2] for o in ops_of(op.block)]
    hidden = {"yield", "constant", "reshape", "rebind", "transfer", "broadcast_to"}
    shown = [name for name in names if name not in hidden]
    return "+".join(shown) or "copy"
