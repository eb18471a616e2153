"""Hoists ops on weights and constants into `mok.once`, which runs when a model is loaded."""

from __future__ import annotations

from xdsl.ir import Attribute, Block, SSAValue

from max._compiler.analysis.layout import Layout
from max._compiler.analysis.shapes import is_view, shape_of, view_layout
from max._compiler.mok import OnceOp, YieldOp
from max._compiler.passes.base import constant_of, ops_of
from max._compiler.passes.materialize import needs_contiguous
from max.mlir import DimAttr, MoOp, ShapeAttr, TensorType, builtin

__all__ = ["compute_once", "weights_only"]

MAX_GROWTH = 4
"""The largest ratio of the bytes of a hoisted result to the bytes of the weights that it is computed from."""
SMALL_BYTES = 1 << 28
"""Results of at most this many bytes are hoisted at any ratio."""


def _bytes(value: SSAValue) -> int | None:
    """The size of a tensor in bytes; None for other types and symbolic sizes."""
    type_ = value.type
    if not isinstance(type_, TensorType) or type_.static_shape is None:
        return None
    total = type_.dtype.size_in_bytes
    for dim in type_.static_shape:
        total *= dim
    return total


def _symbolic(attr: Attribute) -> bool:
    """Whether an attribute has symbolic dims."""
    if isinstance(attr, ShapeAttr):
        return not all(dim.is_static for dim in attr.data)
    return isinstance(attr, DimAttr) and not attr.data.is_static


def _is_constant(op: MoOp, constants: set[SSAValue]) -> bool:
    """Whether an op computes the same results in each execution: pure, of static sizes, from constants only."""
    # sizes of an execution are unknown when the model is loaded
    return (
        op.is_pure
        and op.spec.hoistable
        and not any(_symbolic(attr) for attr in op.attributes.values())
        and bool(op.results)
        and all(operand in constants for operand in op.operands)
        and all(_bytes(result) is not None for result in op.results)
    )


def weights_only(ops: list[MoOp]) -> set[SSAValue]:
    """The values that depend on weights and constants only.

    Args:
        ops: The ops of a block.
    """
    constants: set[SSAValue] = set()
    for op in ops:
        if op.spec.source or _is_constant(op, constants):
            constants.update(op.results)
    return constants


def _worth_keeping(op: MoOp, sources: dict[SSAValue, int]) -> bool:
    """Whether the memory of an op's results is in proportion to the computation that they save."""
    size = sum(_bytes(result) or 0 for result in op.results)
    # a dict, so that an operand that is used twice counts once
    origin = sum({operand: sources[operand] for operand in op.operands}.values())
    return size <= max(SMALL_BYTES, MAX_GROWTH * origin)


def _move_sources_up(block: Block, ops: list[MoOp]) -> MoOp | None:
    """Moves constants and weights to the start of the block, in their order; returns the last of them."""
    first = next((op for op in ops if not op.spec.source), None)
    last: MoOp | None = None
    for op in ops:
        if op.spec.source:
            if first is not None:
                op.detach()
                block.insert_op_before(op, first)
            last = op
    return last


def compute_once(block: Block) -> None:
    """Hoists ops that depend on weights and constants only.

    Views cost nothing: they stay, unless a hoisted op needs them. A strided view is hoisted too if an op outside needs
    it contiguous: it is then copied once (`materialize` inserts the copy). A reshape that no strides can describe is a
    copy, too. Small constants are already folded, by `fold_constants`.
    """
    ops = ops_of(block)
    constants: set[SSAValue] = set()
    sources: dict[SSAValue, int] = {}
    candidates: list[MoOp] = []
    for op in ops:
        if op.spec.source or (_is_constant(op, constants) and _worth_keeping(op, sources)):
            constants.update(op.results)
            origin = sum({v: sources[v] for v in op.operands}.values())
            # an op's results inherit the bytes of the weights behind its operands
            for result in op.results:
                sources[result] = (_bytes(result) or 0) if op.spec.source else origin
            if not op.spec.source:
                candidates.append(op)
    # in reverse order: users that are not needed in `mok.once` stay outside
    needed = set[object]()
    views = _views(candidates)
    for op in reversed(candidates):
        users = {use.operation for result in op.results for use in result.uses}
        if any(user in needed or _reads_hoisted(op, user, views) for user in users):
            needed.add(op)
    hoisted = [op for op in candidates if op in needed]
    if hoisted:
        _build(block, ops, hoisted, views)


def _views(ops: list[MoOp]) -> dict[object, Layout]:
    """The views of weights that move no elements, with the layout of each."""
    layouts: dict[SSAValue, Layout] = {}
    views: dict[object, Layout] = {}
    for op in ops:
        if not is_view(op):
            continue
        source = op.operands[0]
        layout = view_layout(op, layouts.get(source) or Layout.contiguous(shape_of(source)))
        if layout is not None:
            layouts[op.results[0]] = views[op] = layout
    return views


def _reads_hoisted(op: MoOp, user: object, views: dict[object, Layout]) -> bool:
    """Whether a user outside reads the hoisted result of an op.

    Only users that need a contiguous operand read the result of a strided view; other users of views read the source.
    """
    layout = views.get(op)
    if layout is None:
        return True
    return not layout.is_contiguous and isinstance(user, MoOp) and needs_contiguous(user)


def _build(
    block: Block, ops: list[MoOp], hoisted_ops: list[MoOp], views: dict[object, Layout]
) -> None:
    """Moves the hoisted ops into a new `mok.once`, after the weights that it reads."""
    inside = set(hoisted_ops)
    inputs: list[SSAValue] = []
    for op in hoisted_ops:
        for operand in op.operands:
            if (
                operand.owner not in inside
                and operand not in inputs
                and constant_of(operand.owner) is None
            ):
                inputs.append(operand)
    body = builtin.Block(arg_types=[value.type for value in inputs])
    mapper: dict[SSAValue, SSAValue] = dict(zip(inputs, body.args, strict=True))
    for op in hoisted_ops:
        for operand in op.operands:
            if operand not in mapper:  # a constant: copied into the body
                assert isinstance(operand.owner, MoOp)
                body.add_op(operand.owner.clone(mapper))
        body.add_op(op.clone(mapper))
    # what only hoisted ops read stays inside
    results = [
        result
        for op in hoisted_ops
        for result in op.results
        if any(
            _reads_hoisted(op, use.operation, views)
            for use in result.uses
            if use.operation not in inside
        )
    ]
    body.add_op(YieldOp.create(operands=[mapper[result] for result in results]))
    once = OnceOp.make(inputs, [result.type for result in results], body, {})
    last = _move_sources_up(block, ops)
    assert last is not None or not inputs
    if last is not None:
        block.insert_op_after(once, last)
    else:
        first = block.first_op
        assert first is not None
        block.insert_op_before(once, first)
    for old, new in zip(results, once.results, strict=True):
        old.replace_all_uses_with(new)
    # users first: their operands lose their last use
    for op in reversed(hoisted_ops):
        if all(result.first_use is None for result in op.results):
            op.detach()
            op.erase()
