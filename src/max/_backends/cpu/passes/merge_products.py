"""Merges products of one x with several packed weights into one launch: workers read and round x once, and wait at one
barrier.
"""

from __future__ import annotations

from collections import Counter

from xdsl.ir import Block, SSAValue

from max._backends.backend import RunsHere
from max._backends.cpu.kernels.products.quantized.packed import DENSE, FORMATS
from max._backends.cpu.passes.adapted_products import insert_adapted
from max._backends.cpu.passes.packed_ops import (
    AdaptedMatmulOp,
    PackedMatmulOp,
    PackedProductsOp,
    PackOp,
)
from max._compiler.analysis.shapes import shape_of
from max._compiler.passes.base import ops_of
from max._compiler.passes.canonicalize import insert_before
from max._dataclass import dataclass
from max.mlir import MoOp

__all__ = ["bring_before", "merge_products", "pairs_of"]

_MERGED = (PackedMatmulOp, AdaptedMatmulOp)
MAX_PARTS = 4
"""The most parts of one launch: the kernel has code for the epilogue of each."""
CONE_OPS = 32
"""The most element-wise ops after a product that are searched."""


def merge_products(block: Block, runs_here: RunsHere) -> None:
    """Merges `mok.packed_matmul` ops of one x into `mok.packed_products`, whose weights are packed into one buffer.

    Two products of equal sizes whose results meet in element-wise ops, as in a gated MLP, become a pair: they share
    strips, so that one epilogue has both sums. Three kinds of products are not merged: those whose results meet but do
    not form a pair (the later one takes the epilogue); one whose epilogue depends on another product; and one whose
    weight has other uses (a weight is packed once).
    """
    ops = ops_of(block)
    op_index = {op: i for i, op in enumerate(ops)}
    packed_weights: dict[Plan, SSAValue] = {}
    for plan, members in _decide(_groups(ops, runs_here), op_index):
        _merge(plan, members, op_index, packed_weights)
    # weights of merged products are packed again, together
    for op in ops:
        if type(op) is PackOp and op.results[0].first_use is None:
            op.detach()
            op.erase()


@dataclass(frozen=True)
class Plan:
    """The weights that are packed into one buffer, and the index of the first of each pair."""

    packed: tuple[SSAValue, ...]
    pairs: tuple[int, ...]


def _decide(groups: list[list[MoOp]], op_index: dict[MoOp, int]) -> list[tuple[Plan, list[MoOp]]]:
    """The plans and their products, chosen so that no weight is packed twice."""
    # layers that share weights use them in equal groups; a weight of several different groups is not merged
    weights = [tuple([op.operands[1] for op in group]) for group in groups]
    sets: dict[SSAValue, tuple[SSAValue, ...]] = {}
    shared: set[SSAValue] = set()
    for together in weights:
        for packed in together:
            if sets.setdefault(packed, together) != together or together.count(packed) > 1:
                shared.add(packed)
    planned: list[tuple[Plan, list[MoOp], tuple[SSAValue, ...]]] = []
    for group, together in zip(groups, weights, strict=True):
        unshared = [op for op in group if op.operands[1] not in shared]
        planned += [(*_plan(parts), together) for parts in _parts(unshared, op_index)]
    # weights that two groups would pack differently stay unmerged
    groups_of, planning = Counter(weights), Counter(plan for plan, _, _ in planned)
    return [
        (plan, members)
        for plan, members, together in planned
        if len(members) > 1 and planning[plan] == groups_of[together]
    ]


def _plan(parts: list[tuple[MoOp, ...]]) -> tuple[Plan, list[MoOp]]:
    """The plan of one launch and its products."""
    members = [op for part in parts for op in part]
    pairs = [members.index(part[0]) for part in parts if len(part) == 2]
    return Plan(tuple([op.operands[1] for op in members]), tuple(pairs)), members


def _groups(ops: list[MoOp], runs_here: RunsHere) -> list[list[MoOp]]:
    """The products in groups of one x without an op that separates them; a group may have one product."""
    groups: list[list[MoOp]] = []
    open_: dict[tuple[object, ...], list[MoOp]] = {}
    for op in ops:
        if type(op) not in _MERGED or not runs_here(op):
            if op.spec.separates:
                open_.clear()
            continue
        encoding = op.attr("encoding")
        # products with adapters merge if these are the same, at sites of one rank
        adapted: tuple[object, ...] = ()
        if type(op) is AdaptedMatmulOp:
            adapted = (*op.operands[2:], op.attr("dtype"), op.attr("max_rank"))
        key = (op.operands[0], encoding, *adapted)
        group = open_.get(key)
        # a product separates the products of other values, too
        open_ = {}
        if group is None or (encoding not in FORMATS and encoding not in DENSE):
            groups.append(group := [])
        group.append(op)
        open_[key] = group
    return groups


def _cone(product: MoOp) -> set[MoOp]:
    """The element-wise ops that the result of a product reaches."""
    cone: set[MoOp] = set()
    todo = [product]
    while todo and len(cone) < CONE_OPS:
        for use in todo.pop().results[0].uses:
            user = use.operation
            assert isinstance(user, MoOp)
            if user not in cone and user.spec.elementwise:
                cone.add(user)
                todo.append(user)
    return cone


def _depends_on_others(
    op: MoOp, cone: set[MoOp], others: set[MoOp], op_index: dict[MoOp, int]
) -> bool:
    """Whether the element-wise ops after a product depend on other products through ops outside of the cone."""
    if not others:
        return False
    # walk up from the operands that the cone takes from outside
    todo = [v.owner for inner in cone for v in inner.operands if v.owner not in cone]
    first = min(op_index[other] for other in others)
    seen: set[object] = {op}
    while todo:
        owner = todo.pop()
        if owner in seen or not isinstance(owner, MoOp):
            continue
        seen.add(owner)
        if owner in others:
            return True
        # an op before the first of the others cannot depend on one
        if op_index[owner] > first:
            todo.extend(v.owner for v in owner.operands)
    return False


def _parts(products: list[MoOp], op_index: dict[MoOp, int]) -> list[list[tuple[MoOp, ...]]]:
    """The single products and pairs of each launch; products that are not merged are left out."""
    if len(products) < 2:
        return []
    cones = {op: _cone(op) for op in products}
    parts: list[tuple[MoOp, ...]] = []
    paired: set[MoOp] = set()
    for op in products:
        others = [other for other in products if other is not op and cones[op] & cones[other]]
        # the merged launch would wait for itself
        if _depends_on_others(op, cones[op], set(products) - {op, *others}, op_index):
            continue
        if not others:
            parts.append((op,))
        elif len(others) == 1 and op not in paired and _is_pair(op, others[0], cones):
            paired.add(others[0])
            parts.append((op, others[0]))
    return [parts[i : i + MAX_PARTS] for i in range(0, len(parts), MAX_PARTS)]


def pairs_of(products: list[MoOp], op_index: dict[MoOp, int]) -> list[tuple[MoOp, ...]]:
    """The pairs among products of the same rows: two of equal sizes whose results meet in element-wise ops only.

    Args:
        products: The products, in program order.
        op_index: The index of each op in its block.
    """
    return [part for launch in _parts(products, op_index) for part in launch if len(part) == 2]


def _is_pair(a: MoOp, b: MoOp, cones: dict[MoOp, set[MoOp]]) -> bool:
    """Whether one epilogue can consume both results."""
    # a third product whose ops meet both could not get its sums in this epilogue
    no_third_product = sum(bool(cones[b] & cone) for cone in cones.values()) == 2
    return (
        no_third_product
        and a.results[0].type == b.results[0].type
        and all(use.operation in cones[op] for op in (a, b) for use in op.results[0].uses)
    )


def _merge(
    plan: Plan, members: list[MoOp], op_index: dict[MoOp, int], packed_weights: dict[Plan, SSAValue]
) -> None:
    """Replaces the products by one op at the place of the first of them; `members` may be in any order."""
    first = min(members, key=op_index.__getitem__)
    block = first.parent
    assert block is not None
    encoding: str = first.attr("encoding")
    if plan not in packed_weights:
        weights: list[SSAValue] = []
        for value in plan.packed:
            pack = value.owner
            assert isinstance(pack, MoOp)
            weights.append(pack.operands[0])
            # the packing moves up to the first product, and its weights with it
            bring_before(pack.operands[0], first, op_index)
        packed_weights[plan] = insert_before(first, PackOp.of(weights, encoding, plan.pairs))
    if first.name == AdaptedMatmulOp.name:
        merged = insert_adapted(members, packed_weights[plan], plan.pairs, first)
    else:
        columns = [shape_of(op.results[0])[-1] for op in members]
        merged = PackedProductsOp.of(
            (first.operands[0], packed_weights[plan]),
            encoding,
            [size for size in columns if isinstance(size, int)],
            plan.pairs,
            first.attr("streamed"),
            first.location,
        )
        block.insert_op_before(merged, first)
    for op, result in zip(members, merged.results, strict=True):
        op.results[0].replace_all_uses_with(result)
        op.detach()
        op.erase()


def bring_before(value: SSAValue, before: MoOp, op_index: dict[MoOp, int]) -> None:
    """Moves the ops that compute a weight, which depend on weights and constants only, before an op.

    Args:
        value: The weight.
        before: The op.
        op_index: The index of each op in its block; a moved op gets that of `before`.
    """
    op = value.owner
    assert isinstance(op, MoOp)
    if op_index[op] <= op_index[before]:
        return
    for operand in op.operands:
        bring_before(operand, before, op_index)
    block = before.parent
    assert block is not None
    op.detach()
    block.insert_op_before(op, before)
    op_index[op] = op_index[before]
