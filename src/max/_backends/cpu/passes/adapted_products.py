"""Adds the terms of adapters (LoRA) to the sums of packed products, in the launch that computes these::

    y = mok.packed_matmul(x, w)             mok.adapted_matmul              p, h = mok.project_adapters(x, …)
    z = mo.lora.add(y, x, memory, …)   ->   (products merge as others)  ->  z… = mok.adapted_products(x, w, p, h, …)

One launch has the products with A at all sites of one x. The other one keeps the epilogues of plain products, so that a
batch without adapters takes little longer than in a graph without them.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.ir import Block, SSAValue

from max._backends.backend import RunsHere
from max._backends.cpu.kernels.products.quantized.packed import DENSE, FORMATS
from max._backends.cpu.passes.packed_ops import (
    AdaptedMatmulOp,
    AdaptedProductsOp,
    PackedMatmulOp,
    ProjectAdaptersOp,
)
from max._compiler.passes.base import ops_of
from max._compiler.passes.canonicalize import producer
from max.dtype import DType
from max.mlir import MoOp, TensorType, to_attr
from max.mlir.ops.elementwise import CastOp
from max.mlir.ops.models.adapters import LoraAddOp, lora_place_size, lora_place_starts

__all__ = ["attach_adapters", "insert_adapted", "project_adapters"]

_DTYPES = {DType.float32, DType.bfloat16, DType.float16}


def attach_adapters(block: Block, runs_here: RunsHere) -> None:
    """Replaces a packed product whose only use adds the terms of adapters by one op for both.

    Args:
        block: The block.
        runs_here: Whether an op runs on the CPU.
    """
    for op in ops_of(block):
        if type(op) is not LoraAddOp or not runs_here(op):
            continue
        product = _product_of(op)
        if product is None:
            continue
        joined = AdaptedMatmulOp.of(product, op)
        block.insert_op_before(joined, op)
        op.results[0].replace_all_uses_with(joined.results[0])
        before = op.operands[0].owner
        for old in (op, before, product):
            # the cast of the product, where there is none the product itself
            if isinstance(old, MoOp) and old.parent is not None:
                old.detach()
                old.erase()


def _product_of(op: MoOp) -> MoOp | None:
    """The packed product that an op adds the terms of adapters to; None: the op stays."""
    y, x = op.operands[0], op.operands[1]
    cast = producer(y, CastOp)
    inner = y if cast is None else cast.operands[0]
    product = inner.owner
    if not isinstance(product, PackedMatmulOp):
        return None
    # another user needs the product without the terms
    if any(value.get_user_of_unique_use() is None for value in (y, inner)):
        return None
    # kernels of other encodings have no terms
    encoding = product.attr("encoding")
    if encoding not in FORMATS and encoding not in DENSE:
        return None
    rows = product.operands[0]
    # a product rounds a wide x: its terms are those of the rounded x, too
    if rows != x and _uncast(rows) != x and _uncast(x) != rows:
        return None
    dtypes = {t.dtype for t in (rows.type, inner.type, y.type) if isinstance(t, TensorType)}
    return product if dtypes <= _DTYPES else None


def _uncast(value: SSAValue) -> SSAValue:
    """The value that a cast takes; other values are returned unchanged."""
    cast = producer(value, CastOp)
    return value if cast is None else cast.operands[0]


def insert_adapted(
    members: Sequence[MoOp], packed: SSAValue, pairs: Sequence[int], before: MoOp
) -> AdaptedProductsOp:
    """Inserts the launches for `mok.adapted_matmul` ops of one x.

    Args:
        members: The ops, in the order of their weights.
        packed: Their weights.
        pairs: The first of each pair.
        before: The op before which they are inserted.

    Returns:
        The products, with a result for each op.
    """
    first = members[0]
    x, _, *adapters = first.operands
    columns = [op.attr("columns") for op in members]
    sites = [(*op.attr("site"), size) for op, size in zip(members, columns, strict=True)]
    block = before.parent
    assert block is not None
    project = ProjectAdaptersOp.of((x, *adapters), first.attr("max_rank"), sites, first.location)
    memory, scales = adapters[0], adapters[4]
    merged = AdaptedProductsOp.of(
        (x, packed, *project.results, memory, scales),
        first.attr("encoding"),
        columns,
        pairs,
        first.attr("streamed"),
        first.location,
        first.attr("dtype"),
    )
    block.insert_op_before(project, before)
    block.insert_op_before(merged, before)
    return merged


def project_adapters(block: Block, runs_here: RunsHere) -> None:
    """Gives each `mok.adapted_matmul` that was not merged launches of its own.

    Args:
        block: The block.
        runs_here: Whether an op runs on the CPU.
    """
    for op in ops_of(block):
        if type(op) is AdaptedMatmulOp:
            products = insert_adapted([op], op.operands[1], (), op)
            op.results[0].replace_all_uses_with(products.results[0])
            op.detach()
            op.erase()
    _name_next([op for op in ops_of(block) if type(op) is AdaptedProductsOp])


def _name_next(launches: Sequence[MoOp]) -> None:
    """Notes for each launch of products the sites of the next one, which it prefetches.

    The last one of a block of a decoder is followed by the first one of the next block, whose place follows its own.
    """
    projects = [op.operands[2].owner for op in launches]
    end = max(map(_end, projects), default=0)
    for op, project, later in zip(launches, projects, projects[1:] + projects[:1], strict=True):
        assert isinstance(project, MoOp) and isinstance(later, MoOp)
        # operand 7 is the place of the block: within one, distances are known when compiling
        if project.operands[7] != later.operands[7]:
            continue
        max_rank, inputs = project.attr("max_rank"), project.attr("inputs")
        sites: Sequence[tuple[int, int, int]] = project.attr("sites")
        first, _, columns = sites[0]
        b = first + lora_place_starts(max_rank, inputs, columns)[0]
        after = end if later is projects[0] else 0
        op.attributes["next"] = to_attr(
            tuple([after + offset - b for offset, _, _ in later.attr("sites")])
        )
        op.attributes["next_inputs"] = to_attr(later.attr("inputs"))


def _end(project: object) -> int:
    """The end of the sites of a launch, in the place of their block."""
    assert isinstance(project, MoOp)
    max_rank, inputs = project.attr("max_rank"), project.attr("inputs")
    return max(
        offset + lora_place_size(max_rank, inputs, columns)
        for offset, _, columns in project.attr("sites")
    )
