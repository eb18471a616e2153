"""Fuses attention: `softmax(scale * q @ kᵀ + mask) @ v`, written as matmuls and a softmax, becomes `mok.attention`.

The fused op does not write its scores to memory, and reads its operands as strided views. The pattern allows:

- a scale: a product of, or a quotient by, a constant, applied to the scores, to q or to k;
- masks that are added, and selects between the scores and a constant;
- guards of rows whose keys are all masked by -inf: a select of 0 where a probability is NaN, or where the greatest
  score of the row is -inf;
- casts of scores and probabilities, which the op carries out where they round, and reshapes that regroup the batch
  axes;
- grouped queries: KV heads broadcast over the query heads that share them, and merged into one axis.

Attention whose scores or probabilities have other uses is not fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import numpy as np
from xdsl.ir import Block, SSAValue

from max._compiler.analysis.precision import holds
from max._compiler.analysis.shapes import shape_of
from max._compiler.mok import AttentionOp
from max._compiler.passes.attention_guards import guard_of, number_of
from max._compiler.passes.base import ops_of
from max._compiler.passes.canonicalize import canonicalize, insert_before, producer
from max._compiler.passes.hoist_to_load import weights_only
from max._compiler.passes.redundant_ops import drop_dead_ops
from max._dataclass import dataclass
from max.dtype import DType
from max.mlir import DimExpr, MoOp, TensorType, build
from max.mlir.ops.elementwise import AddOp, CastOp, DivOp, MulOp, NotOp, SelectOp
from max.mlir.ops.reduction import SoftmaxOp
from max.mlir.ops.shape import BroadcastToOp, ReshapeOp, TransposeOp
from max.mlir.sizes import Size, Sizes, product

__all__ = ["fuse_attention"]

FLOATS = frozenset({DType.float32, DType.bfloat16, DType.float16})
"""The dtypes of queries, keys, values and results."""
MAX_MASKS = 4
"""The most masks of the kernel."""
SMALLEST, GREATEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass
class Scores:
    """The product that computes the scores, and the scale, masks and roundings between it and the softmax."""

    product: MoOp
    scale: float = 1.0
    masks: list[tuple[SSAValue, float | None, bool]] = field(
        default_factory=list[tuple[SSAValue, float | None, bool]]
    )
    """Each mask with its fill (None: the mask is added; else a select with that constant) and whether the condition is
    negated.
    """
    roundings: list[DType | None] = field(default_factory=lambda: [None])
    """What the scaled scores, and the scores after each mask, are rounded to; None: they stay in f32."""
    is_product: bool = True
    """Whether nothing but reshapes and casts has been applied."""

    def add_mask(self, mask: SSAValue, fill: float | None, negated: bool) -> None:
        """Applies a mask after those before."""
        self.masks.append((mask, fill, negated))
        self.roundings.append(None)
        self.is_product = False


def fuse_attention(block: Block) -> None:
    """Replaces the matmuls around each softmax by `mok.attention`."""
    ops = ops_of(block)
    softmaxes = [op for op in ops if type(op) is SoftmaxOp]
    if not softmaxes:
        return
    constant_values = weights_only(ops)
    changed = False
    for op in softmaxes:
        changed = _Fusion(op, constant_values).run() or changed
    if changed:
        canonicalize(block)
        drop_dead_ops(block)


class _Fusion:
    """The attention around one softmax."""

    def __init__(self, softmax: MoOp, constant_values: set[SSAValue]) -> None:
        self.softmax = softmax
        self.constant_values = constant_values
        self.anchor = softmax
        """New ops are inserted before this one."""
        self.guard = guard_of(softmax)

    def run(self) -> bool:
        """Fuses the ops; returns whether the pattern matched."""
        shape = shape_of(self.softmax.results[0])
        type_ = self.softmax.results[0].type
        assert isinstance(type_, TensorType)
        # casts between other dtypes are not passed, so that all operands are of these dtypes, too
        if self.softmax.attr("axis") != len(shape) - 1 or type_.dtype not in FLOATS:
            return False
        weighted_sum = self._weighted_sum()
        scores = self._scores(self.softmax.operands[0], shape)
        if weighted_sum is None or scores is None or len(scores.masks) > MAX_MASKS:
            return False
        last, weight_dtype = weighted_sum
        if self.guard.kind and weight_dtype is not None:
            # such weights are divided by their total before they are summed
            return False
        self.anchor = last
        first = scores.product
        if any(v in self.constant_values for v in (first.operands[1], last.operands[1])):
            # products with weights have their own kernels
            return False
        batch = shape[:-2]
        q, q_scale = self._source(first.operands[0])
        keys, key_scale = self._source(first.operands[1])
        if not _is_transposed(first):
            # […, head_dim, keys] in the product, […, keys, head_dim] in the op
            keys = self._matrix_transpose(keys)
        values, _ = self._source(last.operands[1], scaled=False)
        if _is_transposed(last):
            values = self._matrix_transpose(values)
        # factors of the operands are factors of the product
        scale = scores.scale * q_scale * key_scale
        operands = [self._with_batch_axes(v, batch) for v in (q, keys, values)]
        if not _is_float32(scale) or any(v is None for v in operands):
            return False
        q, keys, values = (v for v in operands if v is not None)
        sizes = (shape_of(q)[-1], shape_of(values)[-1])
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            return False
        masks = [self._mask(value, negated) for value, _, negated in scores.masks]
        fills = [fill for _, fill, _ in scores.masks]
        q, keys, values, masks = self._with_group_axes(q, keys, values, masks)
        roundings = [*scores.roundings, weight_dtype]
        self._replace(last, (q, keys, values, *masks), fills, roundings, scale)
        return True

    # the pattern -------------------------------------------------------------------------------

    def _weighted_sum(self) -> tuple[MoOp, DType | None] | None:
        """The product of the probabilities and the values, if it is their only use, and what casts round them to."""
        value = self.guard.result
        rounding: DType | None = None
        while value.has_one_use():
            (use,) = value.uses
            user = use.operation
            if not isinstance(user, MoOp):
                return None
            if user.spec.matmul:
                return (user, rounding) if use.index == 0 else None
            if not _keeps_rows_and_columns(user):
                return None
            if type(user) is CastOp:
                before, after = _cast_dtypes(user)
                joined = _join_roundings(rounding, before, after)
                if joined is None:
                    return None
                (rounding,) = joined
            value = user.results[0]
        return None

    def _scores(self, value: SSAValue, shape: Sizes) -> Scores | None:
        """The product that computes the scores, if each step from it to `value` has one use."""
        op = value.owner
        if not isinstance(op, MoOp) or value in self.constant_values:
            return None
        # the softmax, and a guard that reads the scores too
        if sum(use.operation is not self.guard.reader for use in value.uses) != 1:
            return None
        if op.spec.matmul:
            return Scores(op)
        if _keeps_rows_and_columns(op):
            scores = self._scores(op.operands[0], shape)
            return _cast_scores(scores, op) if scores and type(op) is CastOp else scores
        if type(op) in (MulOp, DivOp):
            inner, factor = _scale_of(op)
            if factor is None:
                return None
            scores = self._scores(inner, shape)
            # a mask has a rounding, too
            if scores is None or scores.roundings != [None]:
                return None
            scores.scale *= factor
            scores.is_product = False
            return scores
        if shape_of(value) != shape:
            return None
        if type(op) is AddOp:
            # either operand may be the scores; the other one is the mask then
            for index in range(2):
                scores = self._scores(op.operands[index], shape)
                if scores is not None:
                    scores.add_mask(op.operands[1 - index], None, False)
                    return scores
        if type(op) is SelectOp:
            condition, *branches = op.operands
            for index in range(2):
                fill = number_of(branches[1 - index])
                scores = self._scores(branches[index], shape) if fill is not None else None
                if scores is not None:
                    scores.add_mask(condition, fill, index == 1)
                    return scores
        return None

    # operands ----------------------------------------------------------------------------------

    def _insert(self, view: type[MoOp], value: SSAValue, shape: Sequence[Size]) -> SSAValue:
        """A view of a value with the given shape."""
        if shape_of(value) == tuple(shape):
            return value
        type_ = value.type
        assert isinstance(type_, TensorType)
        view_type = type_.with_shape([DimExpr.of(dim) for dim in shape])
        return insert_before(self.anchor, build(view, (value,), {}, (view_type,)))

    def _transpose(self, value: SSAValue, perm: Sequence[int]) -> SSAValue:
        """The transpose of a value."""
        return insert_before(self.anchor, build(TransposeOp, (value,), {"perm": tuple(perm)}))

    def _matrix_transpose(self, value: SSAValue) -> SSAValue:
        """A value with its last two axes exchanged."""
        rank = len(shape_of(value))
        return self._transpose(value, [*range(rank - 2), rank - 1, rank - 2])

    def _source(self, value: SSAValue, scaled: bool = True) -> tuple[SSAValue, float]:
        """The value before widening casts, as kernels widen what they read, and before constant factors, with its
        transposes and reshapes kept; and the product of the factors.
        """
        factor = 1.0
        while True:
            view = producer(value, TransposeOp) or producer(value, ReshapeOp)
            op = view.operands[0].owner if view is not None else value.owner
            if not isinstance(op, MoOp):
                return value, factor
            if type(op) is CastOp and _is_widening(op):
                # a product in the narrower dtype is rounded before it is widened
                inner, scaled = op.operands[0], False
            elif scaled and type(op) in (MulOp, DivOp) and op.results[0].has_one_use():
                inner, constant = _scale_of(op)
                if constant is None or (view is not None and not view.results[0].has_one_use()):
                    return value, factor
                factor *= constant
            else:
                return value, factor
            if view is None:
                value = inner
            elif type(view) is TransposeOp:
                value = self._transpose(inner, view.attr("perm"))
            else:
                value = self._insert(ReshapeOp, inner, shape_of(value))

    def _with_batch_axes(self, value: SSAValue, batch: Sizes) -> SSAValue | None:
        """A value with the given batch axes: reshaped if its own have as many elements, broadcast if it is a matrix."""
        shape = shape_of(value)
        if len(shape) == 2:
            # one matrix for the whole batch
            return self._insert(BroadcastToOp, value, (*batch, *shape))
        if product(shape[:-2]) != product(batch):
            return None
        return self._insert(ReshapeOp, value, (*batch, *shape[-2:]))

    def _mask(self, value: SSAValue, negated: bool) -> SSAValue:
        """A mask before it was broadcast to the shape of the scores."""
        # the kernel repeats masks itself
        while (inner := producer(value, BroadcastToOp)) is not None:
            value = inner.operands[0]
        if negated:
            value = insert_before(self.anchor, build(NotOp, (value,)))
        return value

    # grouped heads -----------------------------------------------------------------------------

    def _with_group_axes(
        self, q: SSAValue, keys: SSAValue, values: SSAValue, masks: list[SSAValue]
    ) -> tuple[SSAValue, SSAValue, SSAValue, list[SSAValue]]:
        """The operands with separate axes for KV heads and for the query heads of each, if keys and values have them
        merged.
        """
        first, second = self._before_merge(keys), self._before_merge(values)
        if first is None or second is None:
            return q, keys, values, masks
        (split_keys, axis), (split_values, _) = first, second
        shape, batch = shape_of(split_keys), len(shape_of(q)) - 2
        head_dims = shape[axis : axis + 2]
        if axis >= batch or shape_of(split_values)[axis : axis + 2] != head_dims:
            return q, keys, values, masks

        def split_heads(value: SSAValue, rank: int) -> SSAValue:
            """The value with its axis of heads split into KV heads and groups."""
            dims = shape_of(value)
            at = axis - (rank - len(dims))
            if at < 0:
                return value
            # an axis of size 1 is repeated over both
            split = (1, 1) if dims[at] == 1 else head_dims
            return self._insert(ReshapeOp, value, (*dims[:at], *split, *dims[at + 1 :]))

        masks = [split_heads(mask, batch + 2) for mask in masks]
        return split_heads(q, batch + 2), split_keys, split_values, masks

    def _before_merge(self, value: SSAValue) -> tuple[SSAValue, int] | None:
        """The value before an axis of heads and a broadcast axis were merged into one; and the merged axis."""
        owner = value.owner
        if not isinstance(owner, MoOp) or type(owner) not in (ReshapeOp, TransposeOp):
            return None
        source = owner.operands[0]
        if type(owner) is TransposeOp:
            unmerged = self._before_merge(source)
            if unmerged is None:
                return None
            inner, axis = unmerged
            perm: tuple[int, ...] = owner.attr("perm")
            order: list[int] = []
            for old in perm:
                # the merged axis is two axes there, and those behind it are one further
                order += [axis, axis + 1] if old == axis else [old + (old > axis)]
            return self._transpose(inner, order), perm.index(axis)
        shape, before = shape_of(value), shape_of(source)
        # [b, kv_heads, group, n, d], where each head is repeated, then [b, heads, n, d]
        if len(before) != len(shape) + 1 or producer(source, BroadcastToOp) is None:
            return None
        axis = next((i for i, dim in enumerate(shape) if dim != before[i]), len(shape) - 1)
        return (source, axis) if before[axis + 2 :] == shape[axis + 1 :] else None

    # the result --------------------------------------------------------------------------------

    def _replace(
        self,
        last: MoOp,
        operands: Sequence[SSAValue],
        fills: Sequence[float | None],
        roundings: Sequence[DType | None],
        scale: float,
    ) -> None:
        """Replaces a matched attention, whose last op is `last`, by `mok.attention` in the layout of its result."""
        result = last.results[0]
        assert isinstance(result.type, TensorType)
        batch = shape_of(operands[0])[:-2]
        axis = _queries_axis(result, batch)
        op = AttentionOp.of(
            operands,
            scale,
            fills,
            roundings,
            axis,
            result.type.dtype,
            last.location,
            self.guard.kind,
        )
        fused = insert_before(last, op)
        rank = len(batch)
        batch_axes = [i for i in range(rank + 1) if i != axis]
        fused = self._transpose(fused, [*batch_axes, axis, rank + 1])
        result.replace_all_uses_with(self._insert(ReshapeOp, fused, shape_of(result)))


def _is_float32(scale: float) -> bool:
    """Whether float32, in which the kernel scales, has the range for a number."""
    return scale == 0 or SMALLEST <= abs(scale) <= GREATEST


def _is_transposed(op: MoOp) -> bool:
    return bool(op.attr_or("transpose_b", False))


def _is_widening(op: MoOp) -> bool:
    """Whether a cast between floats keeps all values: to the same dtype, or to float32."""
    before, after = _cast_dtypes(op)
    return before in FLOATS and after is DType.float32


def _cast_dtypes(op: MoOp) -> tuple[DType, DType]:
    """The dtypes before and after a cast."""
    before, after = op.operands[0].type, op.results[0].type
    assert isinstance(before, TensorType) and isinstance(after, TensorType)
    return before.dtype, after.dtype


def _join_roundings(rounding: DType | None, *dtypes: DType) -> tuple[DType | None] | None:
    """The single rounding that equals `rounding` followed by roundings to some dtypes; None if none does."""
    for dtype in dtypes:
        if dtype is DType.float32:
            continue
        if rounding not in (None, dtype):
            return None
        rounding = dtype
    return (rounding,)


def _cast_scores(scores: Scores, op: MoOp) -> Scores | None:
    """The scores after a cast: its operand is rounded to the dtype before, its result to the one after."""
    before, after = _cast_dtypes(op)
    if scores.is_product and holds(after, before):
        # a product that is widened is not rounded first
        return scores
    joined = _join_roundings(scores.roundings[-1], before, after)
    if joined is None:
        return None
    (scores.roundings[-1],) = joined
    return scores


def _keeps_rows_and_columns(op: MoOp) -> bool:
    """Whether an op keeps the last two axes: a cast between floats, or a reshape of the batch axes."""
    if type(op) is CastOp:
        return all(dtype in FLOATS for dtype in _cast_dtypes(op))
    if type(op) is not ReshapeOp:
        return False
    before, after = shape_of(op.operands[0]), shape_of(op.results[0])
    return before[-2:] == after[-2:]


def _scale_of(op: MoOp) -> tuple[SSAValue, float | None]:
    """The scaled operand of a product or a quotient, and the constant factor (None: no operand is constant)."""
    x, y = op.operands
    number = number_of(y)
    if type(op) is DivOp:
        return x, None if number in (None, 0.0) else 1 / number
    return (x, number) if number is not None else (y, number_of(x))


def _queries_axis(result: SSAValue, batch: Sizes) -> int:
    """The batch axis before which the queries are in memory: where a later transpose moves them, else after all."""
    shape = shape_of(result)
    for use in result.uses:
        user = use.operation
        assert isinstance(user, MoOp)
        if type(user) is ReshapeOp and _keeps_rows_and_columns(user):
            return _queries_axis(user.results[0], batch)
        if type(user) is TransposeOp:
            perm: tuple[int, ...] = user.attr("perm")
            queries = len(perm) - 2
            others = [axis for axis in perm if axis != queries]
            if others != sorted(others):
                continue
            before = product(shape[: perm.index(queries)])
            for axis in range(len(batch)):
                if product(batch[:axis]) == before:
                    return axis
    return len(batch)
