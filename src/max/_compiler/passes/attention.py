"""Makes attention that is written as products and a softmax one op: `softmax(scale * q @ kᵀ + mask) @ v` becomes `mok.attention`.

Its scores never go to memory, and its operands are read as the strided views that they are. What may stand around the softmax:

- the scale as a product with, or a division by, a constant, of the scores, of q or of k;
- masks that are added, and selections between the scores and a constant;
- casts of the scores to wider floats, a cast of the probabilities before their product, and reshapes that regroup the batch axes;
- key heads that are repeated for the query heads that share them: a broadcast, merged into the heads.

Where the scores or the probabilities are used elsewhere they are computed as they are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

from xdsl.ir import Block, SSAValue

from max._compiler.mok import AttentionOp
from max._compiler.passes.base import constant_of, ops_of
from max._compiler.passes.canonicalise import canonicalise, insert_before, producer
from max._compiler.passes.once import weights_only
from max._compiler.precision import holds
from max._compiler.shapes import shape_of
from max._compiler.sizes import Size, Sizes, product
from max.dtype import DType
from max.mlir import DimExpr, MoOp, TensorType, build

__all__ = ["fuse_attention"]

FLOATS = frozenset({DType.float32, DType.bfloat16, DType.float16})
MATMULS = frozenset({"mo.matmul", "mok.matmul"})
MAX_MASKS = 4


@dataclass
class Scores:
    """Scores, seen through what is done to them before the softmax."""

    product: MoOp
    scale: float = 1.0
    masks: list[tuple[SSAValue, float | None, bool]] = field(
        default_factory=list[tuple[SSAValue, float | None, bool]]
    )
    """What is added (None), or says where the scores stand (or, with True, where not) and what stands elsewhere."""


def fuse_attention(block: Block) -> None:
    """Replaces products around a softmax by `mok.attention`."""
    ops = ops_of(block)
    softmaxes = [op for op in ops if op.name == "mo.softmax"]
    if not softmaxes:
        return
    known = weights_only(ops)
    changed = False
    for op in softmaxes:
        changed = _Fusion(op, known).run() or changed
    if changed:
        for op in reversed(ops_of(block)):
            if op.is_pure and all(result.first_use is None for result in op.results):
                op.detach()
                op.erase()
        canonicalise(block)


class _Fusion:
    """The attention around one softmax."""

    def __init__(self, softmax: MoOp, known: set[SSAValue]) -> None:
        self.softmax = softmax
        self.known = known
        self.anchor = softmax
        """New ops come before this one."""

    def run(self) -> bool:
        """Replaces the ops; whether that was possible."""
        shape = shape_of(self.softmax.results[0])
        if len(shape) < 2 or self.softmax.attr("axis") != len(shape) - 1:
            return False
        last = self._weighted_sum()
        scores = self._scores(self.softmax.operands[0], shape)
        if last is None or scores is None or len(scores.masks) > MAX_MASKS:
            return False
        self.anchor = last
        first = scores.product
        if any(v in self.known for v in (first.operands[1], last.operands[1])):
            # products with weights have kernels of their own
            return False
        types = [v.type for v in (*first.operands, *last.operands, *last.results)]
        if not all(isinstance(t, TensorType) and t.dtype in FLOATS for t in types):
            return False
        batch = shape[:-2]
        q, q_scale = self._source(first.operands[0])
        keys, key_scale = self._source(self._rows(first, not _transposed(first)))
        values = self._widened(self._rows(last, _transposed(last)))
        scale = scores.scale * q_scale * key_scale
        operands = [self._batched(v, batch) for v in (q, keys, values)]
        if not isfinite(scale) or any(v is None for v in operands):
            return False
        q, keys, values = (v for v in operands if v is not None)
        sizes = (shape_of(q)[-1], shape_of(values)[-1])
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            return False
        masks = [self._mask(value, negated) for value, _, negated in scores.masks]
        fills = [fill for _, fill, _ in scores.masks]
        q, keys, values, masks = self._grouped(q, keys, values, masks)
        self._replace(last, q, keys, values, masks, fills, scale)
        return True

    # the pattern -------------------------------------------------------------------------------

    def _weighted_sum(self) -> MoOp | None:
        """The product of the probabilities, which nothing else uses, with the values."""
        value = self.softmax.results[0]
        narrowed = False
        while value.has_one_use():
            (use,) = value.uses
            user = use.operation
            if not isinstance(user, MoOp):
                return None
            if user.name in MATMULS:
                return user if use.index == 0 else None
            # what is narrowed and cast again is meant to be rounded there
            if not _same_places(user) or (narrowed and user.name == "mo.cast"):
                return None
            narrowed = narrowed or _is_narrowing(user)
            value = user.results[0]
        return None

    def _scores(self, value: SSAValue, shape: Sizes) -> Scores | None:
        """The product that scores come from, each step of which only the next one uses."""
        op = value.owner
        if not isinstance(op, MoOp) or not value.has_one_use() or value in self.known:
            return None
        if op.name in MATMULS:
            return Scores(op)
        if _same_places(op):
            return None if _is_narrowing(op) else self._scores(op.operands[0], shape)
        if op.name in ("mo.mul", "mo.div"):
            inner, factor = _scaled(op)
            found = self._scores(inner, shape) if factor is not None else None
            if found is None or factor is None or found.masks:
                return None
            found.scale *= factor
            return found
        if shape_of(value) != shape:
            return None
        if op.name == "mo.add":
            for index in range(2):
                found = self._scores(op.operands[index], shape)
                if found is not None:
                    found.masks.append((op.operands[1 - index], None, False))
                    return found
        if op.name == "mo.select":
            condition, *branches = op.operands
            for index in range(2):
                fill = _number(branches[1 - index])
                found = self._scores(branches[index], shape) if fill is not None else None
                if found is not None:
                    found.masks.append((condition, fill, index == 1))
                    return found
        return None

    # operands ----------------------------------------------------------------------------------

    def _insert(self, name: str, value: SSAValue, shape: Sequence[Size]) -> SSAValue:
        """A view of a value with another shape."""
        if shape_of(value) == tuple(shape):
            return value
        type_ = value.type
        assert isinstance(type_, TensorType)
        wanted = type_.with_shape([DimExpr.of(dim) for dim in shape])
        return insert_before(self.anchor, build(name, (value,), {}, (wanted,)))

    def _transpose(self, value: SSAValue, perm: Sequence[int]) -> SSAValue:
        """A value with its axes in another order."""
        inner = producer(value, "mo.transpose")
        if inner is not None:
            first: tuple[int, ...] = inner.attr("perm")
            value, perm = inner.operands[0], [first[axis] for axis in perm]
        if list(perm) == list(range(len(perm))):
            return value
        return insert_before(self.anchor, build("mo.transpose", (value,), {"perm": tuple(perm)}))

    def _rows(self, op: MoOp, turned: bool) -> SSAValue:
        """The right operand of a product, its last axes exchanged where `turned`."""
        value = op.operands[1]
        rank = len(shape_of(value))
        order = [*range(rank - 2), rank - 1, rank - 2]
        return self._transpose(value, order) if turned else value

    def _widened(self, value: SSAValue) -> SSAValue:
        """What a value was before it was widened: kernels widen what they read."""
        return self._source(value, scaled=False)[0]

    def _source(self, value: SSAValue, scaled: bool = True) -> tuple[SSAValue, float]:
        """What a value was before it was widened, transposed or not, and multiplied by a constant; and the constant."""
        factor = 1.0
        while True:
            view = producer(value, "mo.transpose")
            op = view.operands[0].owner if view is not None else value.owner
            if not isinstance(op, MoOp):
                return value, factor
            inner, by = op.operands[0] if op.operands else value, 1.0
            if op.name == "mo.cast" and _is_widening(op):
                # a product in the narrower dtype is rounded before it is widened
                scaled = False
            elif scaled and op.name in ("mo.mul", "mo.div") and op.results[0].has_one_use():
                inner, found = _scaled(op)
                if found is None or (view is not None and not view.results[0].has_one_use()):
                    return value, factor
                by = found
            else:
                return value, factor
            factor *= by
            value = inner if view is None else self._transpose(inner, view.attr("perm"))

    def _batched(self, value: SSAValue, batch: Sizes) -> SSAValue | None:
        """A value with these batch axes, if it has as many elements along its own; a matrix is the same for all."""
        shape = shape_of(value)
        if shape[:-2] == batch:
            return value
        if len(shape) == 2:
            return self._insert("mo.broadcast_to", value, (*batch, *shape))
        if product(shape[:-2]) != product(batch):
            return None
        wanted = (*batch, *shape[-2:])
        while (inner := producer(value, "mo.reshape")) is not None:
            value = inner.operands[0]
        return self._insert("mo.reshape", value, wanted)

    def _mask(self, value: SSAValue, negated: bool) -> SSAValue:
        """A mask as it was before it was spread over the scores."""
        while (inner := producer(value, "mo.broadcast_to")) is not None:
            value = inner.operands[0]
        if negated:
            value = insert_before(self.anchor, build("mo.not", (value,)))
        return value

    # grouped heads -----------------------------------------------------------------------------

    def _grouped(
        self, q: SSAValue, keys: SSAValue, values: SSAValue, masks: list[SSAValue]
    ) -> tuple[SSAValue, SSAValue, SSAValue, list[SSAValue]]:
        """The operands with a batch axis for the repetitions of keys and values, where these are merged into one."""
        first, second = self._unmerged(keys), self._unmerged(values)
        if first is None or second is None or first[1] != second[1]:
            return q, keys, values, masks
        keys_apart, axis = first
        values_apart = second[0]
        shape, batch = shape_of(keys_apart), len(shape_of(q)) - 2
        parts = shape[axis : axis + 2]
        if axis >= batch or shape_of(values_apart)[axis : axis + 2] != parts:
            return q, keys, values, masks

        def apart(value: SSAValue, rank: int) -> SSAValue:
            dims = shape_of(value)
            at = axis - (rank - len(dims))
            if at < 0:
                return value
            split = (1, 1) if dims[at] == 1 else parts
            return self._insert("mo.reshape", value, (*dims[:at], *split, *dims[at + 1 :]))

        masks = [apart(mask, batch + 2) for mask in masks]
        return apart(q, batch + 2), keys_apart, values_apart, masks

    def _unmerged(self, value: SSAValue) -> tuple[SSAValue, int] | None:
        """A value before one of its axes was merged from two, of which one repeats it; and that axis."""
        owner = value.owner
        if not isinstance(owner, MoOp) or owner.name not in ("mo.reshape", "mo.transpose"):
            return None
        source = owner.operands[0]
        if owner.name == "mo.transpose":
            found = self._unmerged(source)
            if found is None:
                return None
            inner, axis = found
            perm: tuple[int, ...] = owner.attr("perm")
            order: list[int] = []
            for old in perm:
                order += [axis, axis + 1] if old == axis else [old + (old > axis)]
            return self._transpose(inner, order), perm.index(axis)
        shape, before = shape_of(value), shape_of(source)
        if len(before) != len(shape) + 1 or producer(source, "mo.broadcast_to") is None:
            return None
        axis = next((i for i, dim in enumerate(shape) if dim != before[i]), len(shape) - 1)
        return (source, axis) if before[axis + 2 :] == shape[axis + 1 :] else None

    # the result --------------------------------------------------------------------------------

    def _replace(
        self,
        last: MoOp,
        q: SSAValue,
        keys: SSAValue,
        values: SSAValue,
        masks: list[SSAValue],
        fills: list[float | None],
        scale: float,
    ) -> None:
        result = last.results[0]
        assert isinstance(result.type, TensorType)
        batch = shape_of(q)[:-2]
        axis = _queries_axis(result, batch)
        op = AttentionOp.of(
            (q, keys, values, *masks), scale, fills, axis, result.type.dtype, last.location
        )
        made = insert_before(last, op)
        rank = len(batch)
        rest = [i for i in range(rank + 1) if i != axis]
        made = self._transpose(made, [*rest, axis, rank + 1])
        result.replace_all_uses_with(self._insert("mo.reshape", made, shape_of(result)))


def _transposed(op: MoOp) -> bool:
    return bool(op.attr_or("transpose_b", False))


def _is_widening(op: MoOp) -> bool:
    before, after = op.operands[0].type, op.results[0].type
    assert isinstance(before, TensorType) and isinstance(after, TensorType)
    return (
        before.dtype in FLOATS
        and after.dtype in FLOATS
        and before.dtype.size_in_bytes <= after.dtype.size_in_bytes
        and (before.dtype is after.dtype or after.dtype is DType.float32)
    )


def _is_narrowing(op: MoOp) -> bool:
    """Whether an op is a cast that rounds."""
    if op.name != "mo.cast":
        return False
    before, after = op.operands[0].type, op.results[0].type
    assert isinstance(before, TensorType) and isinstance(after, TensorType)
    return not holds(after.dtype, before.dtype)


def _same_places(op: MoOp) -> bool:
    """Whether an op leaves each score at its query and key: a cast between floats, or a reshape of the batch axes."""
    if op.name == "mo.cast":
        types = (op.operands[0].type, op.results[0].type)
        return all(isinstance(t, TensorType) and t.dtype in FLOATS for t in types)
    if op.name != "mo.reshape":
        return False
    before, after = shape_of(op.operands[0]), shape_of(op.results[0])
    return len(before) > 1 and before[-2:] == after[-2:]


def _number(value: SSAValue) -> float | None:
    """The number that a value is everywhere, if it is a constant."""
    casts: list[DType] = []
    while (owner := value.owner) and isinstance(owner, MoOp) and owner.name in (
        "mo.broadcast_to",
        "mo.reshape",
        "mo.cast",
    ):  # fmt: skip
        if isinstance(type_ := value.type, TensorType) and owner.name == "mo.cast":
            casts.append(type_.dtype)
        value = owner.operands[0]
    array = constant_of(value.owner)
    if array is None or array.size != 1:
        return None
    for dtype in reversed(casts):
        array = array.astype(dtype.to_numpy())
    return float(array.reshape(-1)[0])


def _scaled(op: MoOp) -> tuple[SSAValue, float | None]:
    """What a product or a quotient scales, and by what constant."""
    x, y = op.operands
    number = _number(y)
    if op.name == "mo.div":
        return x, None if number in (None, 0.0) else 1 / number
    return (x, number) if number is not None else (y, _number(x))


def _queries_axis(result: SSAValue, batch: Sizes) -> int:
    """Before which batch axis the queries stand in memory: where a transpose puts them, else after all."""
    shape = shape_of(result)
    for use in result.uses:
        user = use.operation
        if not isinstance(user, MoOp):
            continue
        if user.name == "mo.reshape" and _same_places(user):
            return _queries_axis(user.results[0], batch)
        if user.name == "mo.transpose":
            perm: tuple[int, ...] = user.attr("perm")
            rank = len(perm)
            others = [axis for axis in perm if axis != rank - 2]
            place = perm.index(rank - 2)
            if perm[-1] != rank - 1 or others != sorted(others):
                continue
            before = product(shape[:place])
            for axis in range(len(batch)):
                if product(batch[:axis]) == before:
                    return axis
    return len(batch)
