"""Builds a `RegionSpec`, the plain data that the code generator takes, from the body of a `mok.region`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from xdsl.ir import Block, SSAValue

from max._backends.regions import Leaf, Literal, Node, RegionSpec, Result, SizeOf, Value
from max._compiler.analysis.layout import Layout, collapse
from max._compiler.analysis.precision import KEEPS, holds
from max._compiler.analysis.shapes import is_view, shape_of, strip, view_layout
from max._compiler.codegen.expressions import compute_dtype
from max._compiler.mok import BodyOp
from max._compiler.passes.base import constant_of, ops_of
from max._dataclass import dataclass
from max.dtype import DType
from max.mlir import MoOp, ShapedType
from max.mlir.ops import normalization, reduction
from max.mlir.ops.elementwise import CastOp
from max.mlir.sizes import Size, Sizes, contiguous_strides

__all__ = ["RegionParts", "epilogue_parts", "needed_ops", "norm_before", "region_parts"]


@dataclass(frozen=True)
class RegionParts:
    """A region for the code generator, and the sources of its leaves."""

    spec: RegionSpec
    sources: tuple[tuple[int, Size], ...]
    """For each leaf, its operand, and the offset of its first element in the operand."""


class _Builder:
    """Collects the values of one region."""

    strip = True
    """Whether the iteration space leaves out axes of size 1."""

    def __init__(
        self, region: BodyOp, only_value: SSAValue | None = None, main: MoOp | None = None
    ) -> None:
        self.results_in_body = region.results_in_body if only_value is None else (only_value,)
        ops = ops_of(region.block)[:-1] if only_value is None else needed_ops(only_value)
        norm = None if main is None else norm_before(main)
        self.ops = [op for op in ops if op is not norm]
        self.values: list[Value] = []
        self.sources: list[tuple[int, Size]] = []
        self.number_of: dict[Value, int] = {}
        self.leaves: dict[tuple[int, Sizes, Size], int] = {}
        self.sums: set[int] = set()
        """Leaves that are sums of the kernel: not loaded, and not rounded yet."""
        self.exact_dtypes: dict[int, DType | None] = {}
        # a value of the body is a view of an argument, or has the number of a computed value
        self.layouts: dict[SSAValue, tuple[int, Layout]] = {}
        self.numbers: dict[SSAValue, int] = {}
        self.space, self.axis = self.find_space()

    def find_space(self) -> tuple[Sizes, int]:
        """The iteration space with the reduction axis last, and that axis's index before the move; -1 without one."""
        for op in self.ops:
            if op.spec.row_flops:
                shape = shape_of(op.operands[0])
                axis: int = op.attr_or("axis", len(shape) - 1)
                outer = strip(shape[:axis]) + strip(shape[axis + 1 :])
                return (*outer, shape[axis]), len(strip(shape[:axis]))
        return strip(shape_of(self.results_in_body[0])), -1

    def strides(self, layout: Layout) -> Sizes:
        """A layout's strides over the iteration space."""
        if not self.strip:
            lead = len(self.space) - len(layout.shape)
            assert lead == 0, f"{layout.shape} is not the iteration space {self.space}"
            return layout.strides
        pairs = [(d, s) for d, s in zip(layout.shape, layout.strides, strict=True) if d != 1]
        dims, strides = tuple(d for d, _ in pairs), tuple(s for _, s in pairs)
        if self.axis < 0:
            assert dims == self.space, f"{dims} is not the iteration space {self.space}"
            return strides
        outer = len(self.space) - 1
        # does not vary along the reduction axis, or the axis has size 1
        if len(dims) == outer:
            return (*strides, 0)
        return (*strides[: self.axis], *strides[self.axis + 1 :], strides[self.axis])

    def add(self, value: Value) -> int:
        if value not in self.number_of:
            self.number_of[value] = len(self.values)
            self.values.append(value)
        return self.number_of[value]

    def node(self, op: str, args: Sequence[int], dtype: DType, attr: str = "") -> int:
        return self.add(Node(op, tuple(args), dtype, attr))

    def literal(self, value: float, dtype: DType) -> int:
        return self.add(Literal(dtype, value))

    def operand(self, value: SSAValue) -> int:
        """The number of a value of the body; a layout becomes a leaf."""
        if value in self.numbers:
            return self.numbers[value]
        argument, layout = self.layouts[value]
        type_ = value.type
        assert isinstance(type_, ShapedType)
        return self.leaf(argument, type_.dtype, self.strides(layout), layout.offset)

    def result(self, value: SSAValue) -> int:
        """The number of a stored value; its rounded form if other values need that too."""
        number = self.operand(value)
        type_ = value.type
        assert isinstance(type_, ShapedType)
        return self.number_of.get(Node("round_to", (number,), type_.dtype), number)

    def column(self, value: SSAValue) -> int:
        """The number of a vector over the reduction axis, the same for all rows."""
        if value in self.numbers:
            return self.numbers[value]
        argument, layout = self.layouts[value]
        type_ = value.type
        assert isinstance(type_, ShapedType)
        strides = (*[0] * (len(self.space) - 1), layout.strides[-1])
        return self.leaf(argument, type_.dtype, strides, layout.offset)

    def leaf(self, argument: int, dtype: DType, strides: Sizes, offset: Size) -> int:
        """The number of the leaf that reads an argument through these strides."""
        key = (argument, strides, offset)
        if key not in self.leaves:
            # equal leaves of different arguments are different values
            self.leaves[key] = len(self.values)
            self.values.append(Leaf(dtype, strides))
            self.sources.append((argument, offset))
        return self.leaves[key]

    def visit(self, op: MoOp) -> None:
        """Adds an op of the region: a literal for a constant, a layout for a view, nodes for other ops."""
        (result,) = op.results
        if (array := constant_of(op)) is not None:
            # all its elements are equal
            dtype = DType.from_numpy(array.dtype)
            self.numbers[result] = self.literal(array.flat[0].item(), dtype)
        elif is_view(op):
            (source,) = op.operands
            if source in self.numbers:
                self.numbers[result] = self.numbers[source]
                return
            argument, layout = self.layouts[source]
            view = view_layout(op, layout)
            assert view is not None, f"{op.name} in a region has no layout"
            self.layouts[result] = (argument, view)
        elif op.spec.row_flops:
            self.numbers[result] = self.rowwise(op)
        elif type(op) is CastOp:
            (source,) = op.operands
            before, after = source.type, result.type
            assert isinstance(before, ShapedType) and isinstance(after, ShapedType)
            self.numbers[result] = self.cast(self.operand(source), before.dtype, after.dtype)
        else:
            type_ = result.type
            assert isinstance(type_, ShapedType)
            attr = op.attr_or("approximate", "")
            args = [self.operand(v) for v in op.operands]
            # the dialects have no names in common
            self.numbers[result] = self.node(op.name.partition(".")[2], args, type_.dtype, attr)

    def cast(self, value: int, before: DType, after: DType) -> int:
        """A staged conversion: its operand and its result are rounded to their dtypes.

        A sum that is widened is not rounded: programs write a product of narrow factors with a wide result this way.
        """
        if value not in self.sums or not holds(after, before):
            value = self.round_value(value, before)
        if before is DType.float64 and compute_dtype(after) is not after:
            # one rounding: not through the compute type
            return self.node("round_to", (value,), after)
        return self.round_value(self.node("cast", (value,), after), after)

    def round_value(self, value: int, dtype: DType) -> int:
        """A value of the compute type of `dtype`, rounded to `dtype` unless `dtype` is known to hold it."""
        if self.exact_dtype(value) is not None:
            return value
        return self.node("round_to", (value,), dtype)

    def exact_dtype(self, index: int) -> DType | None:
        """The narrowest dtype that is known to hold a value exactly; None if the value has excess precision."""
        if index not in self.exact_dtypes:
            self.exact_dtypes[index] = self._exact_dtype(index)
        return self.exact_dtypes[index]

    def _exact_dtype(self, index: int) -> DType | None:
        """The narrowest known dtype that holds a value exactly; None if its own dtype may not."""
        value = self.values[index]
        dtype = value.dtype
        own_dtype = dtype if compute_dtype(dtype) is dtype else None
        if not isinstance(value, Node):
            return own_dtype if index in self.sums else dtype
        if value.op == "round_to":
            return dtype
        if value.op == "cast":
            (source,) = value.args
            inner = self.exact_dtype(source)
            return inner if inner is not None and holds(dtype, inner) else own_dtype
        if value.op in KEEPS:
            # the condition of a select is no value
            dtypes = {self.exact_dtype(a) for a in value.args[value.op == "select" :]}
            if None not in dtypes:
                return dtypes.pop() if len(dtypes) == 1 else dtype
        return own_dtype

    def rowwise(self, op: MoOp) -> int:
        """Softmax, normalizations and reductions as sums, maxima and element-wise nodes."""
        (result,) = op.results
        x = self.operand(op.operands[0])
        assert isinstance(result.type, ShapedType)
        dtype = result.type.dtype
        match type(op):
            case reduction.ReduceMeanOp:
                return self.mean(x, dtype)
            case _ if op.spec.reduction:
                return self.node(op.name.removeprefix("mo."), (x,), dtype)
            case reduction.SoftmaxOp | reduction.LogsoftmaxOp:
                # exponentials of differences to the maximum do not overflow
                centered = self.node("sub", (x, self.node("reduce_max", (x,), dtype)), dtype)
                powers = self.node("exp", (centered,), dtype)
                total = self.node("reduce_sum", (powers,), dtype)
                if type(op) is reduction.SoftmaxOp:
                    return self.node("div", (powers, total), dtype)
                return self.node("sub", (centered, self.node("log", (total,), dtype)), dtype)
            case normalization.RmsNormOp:
                square = self.mean(self.node("mul", (x, x), dtype), dtype)
                scaled = self.node("mul", (x, self.inverse_root(square, op, dtype)), dtype)
                # as the graph rounds: the norm before gamma multiplies it
                if not op.attr("multiply_before_cast"):
                    scaled = self.round_value(scaled, dtype)
                gamma = self.column(op.operands[1])
                offset = op.attr("weight_offset")
                if offset:
                    gamma = self.node("add", (gamma, self.literal(offset, dtype)), dtype)
                return self.node("mul", (scaled, gamma), dtype)
            case _:
                # products with the inverse of the size: the error of the mean is corrected (codegen/centering.py)
                part = self.node("div", (self.literal(1.0, dtype), self.size(dtype)), dtype)
                total = self.node("reduce_sum", (x,), dtype)
                centered = self.node("sub", (x, self.node("mul", (total, part), dtype)), dtype)
                squares = self.node("mul", (centered, centered), dtype)
                total = self.node("reduce_sum", (squares,), dtype)
                variance = self.node("mul", (total, part), dtype)
                scaled = self.node("mul", (centered, self.inverse_root(variance, op, dtype)), dtype)
                gamma, beta = (self.column(v) for v in op.operands[1:])
                return self.node("fma", (scaled, gamma, beta), dtype)

    def mean(self, x: int, dtype: DType) -> int:
        total = self.node("reduce_sum", (x,), dtype)
        return self.node("div", (total, self.size(dtype)), dtype)

    def size(self, dtype: DType) -> int:
        """The number of elements that a reduction combines; the axis gets its number when axes are merged."""
        return self.add(SizeOf(dtype, self.axis))

    def inverse_root(self, x: int, op: MoOp, dtype: DType) -> int:
        shifted = self.node("add", (x, self.literal(op.attr("epsilon"), dtype)), dtype)
        return self.node(
            "div", (self.literal(1.0, dtype), self.node("sqrt", (shifted,), dtype)), dtype
        )


def region_parts(
    region: BodyOp,
    main: MoOp | None = None,
    layouts: Sequence[Layout] | None = None,
    only_value: SSAValue | None = None,
) -> RegionParts:
    """Describes a region of kind ``map`` or ``rows``, with loop axes merged if the strides allow it.

    Args:
        region: The region.
        main: In a library region, the library op: its results are read from memory, as operands number -1, -2, ….
        layouts: How the results lie in memory; contiguous by default.
        only_value: The yielded value to compute; all by default.
    """
    builder = _Builder(region, only_value, main)
    for index, argument in enumerate(region.block.args):
        builder.layouts[argument] = (index, Layout.contiguous(shape_of(argument)))
    for op in builder.ops:
        if op is main:
            for number, result in enumerate(op.results):
                layout = Layout.contiguous(shape_of(result))
                # negative: a result of the library op, and no argument of the region
                builder.layouts[result] = (-1 - number, layout)
        else:
            builder.visit(op)
    results: list[Result] = []
    for index, value in enumerate(builder.results_in_body):
        type_ = value.type
        assert isinstance(type_, ShapedType)
        layout = layouts[index] if layouts is not None else Layout.contiguous(shape_of(value))
        strides = builder.strides(layout)
        results.append(Result(builder.result(value), type_.dtype, strides))
    return RegionParts(_collapse_axes(builder, results), tuple(builder.sources))


def norm_before(main: MoOp) -> MoOp | None:
    """The norm in the body of a library region that the product computes itself, on its left operand."""
    owner = main.operands[0].owner if main.operands else None
    return owner if isinstance(owner, normalization.RmsNormOp) else None


def needed_ops(value: SSAValue) -> list[MoOp]:
    """The ops of a block that compute a value, in program order."""
    needed: set[object] = set()
    todo = [value.owner]
    block: Block | None = None
    while todo:
        op = todo.pop()
        if isinstance(op, MoOp) and op not in needed:
            needed.add(op)
            block = op.parent
            todo.extend(operand.owner for operand in op.operands)
    return [] if block is None else [op for op in ops_of(block) if op in needed]


def epilogue_parts(
    region: BodyOp,
    op: MoOp,
    products: Sequence[SSAValue] | None = None,
    only_value: SSAValue | None = None,
) -> RegionParts | None:
    """Describes the epilogue of a library region, the ops after its library op, over ``[rows, columns]``.

    Args:
        region: The region.
        op: The op in its body whose results come first among the values.
        products: Which of its results; the first by default.
        only_value: The yielded value to compute; all by default.

    Returns:
        The parts, without sources for the first leaves; None if an operand has no single stride over the merged rows.
    """
    builder = _Builder(region, only_value, op)
    products = op.results[:1] if products is None else products
    shape = shape_of(products[0])
    # over all axes, those of size 1 included
    builder.space, builder.axis = shape, -1
    for index, argument in enumerate(region.block.args):
        builder.layouts[argument] = (index, Layout.contiguous(shape_of(argument)))
    sum_strides = contiguous_strides(shape)
    for number, product in enumerate(products):
        assert isinstance(product.type, ShapedType)
        builder.values.append(Leaf(product.type.dtype, sum_strides))
        builder.numbers[product] = number
        builder.sums.add(number)
    builder.strip = False
    for other in builder.ops:
        if other is not op:
            builder.visit(other)
    views = [value.strides for value in builder.values if isinstance(value, Leaf)]
    # columns stay apart: [rows…, 1] is merged to one axis of rows where strides allow it
    rows, merged = collapse((*shape[:-1], 1), [(*view[:-1], 0) for view in views], keep_last=True)
    if len(rows) > 2:
        return None
    flat = [
        (view[0] if len(rows) == 2 else 0, full_strides[-1])
        for view, full_strides in zip(merged, views, strict=True)
    ]
    dims = (rows[0] if len(rows) == 2 else 1, shape[-1])
    strides = iter(flat)
    values = tuple(
        replace(v, strides=next(strides)) if isinstance(v, Leaf) else v for v in builder.values
    )
    (value,) = builder.results_in_body
    number = builder.result(value)
    type_ = value.type
    assert isinstance(type_, ShapedType)
    spec = RegionSpec(dims, False, values, (Result(number, type_.dtype, contiguous_strides(dims)),))
    return RegionParts(spec, tuple(builder.sources))


def _collapse_axes(builder: _Builder, results: list[Result]) -> RegionSpec:
    """The region with adjacent axes merged where all strides allow it; a reduction axis stays the last one."""
    reduces = builder.axis >= 0
    leaves = [value for value in builder.values if isinstance(value, Leaf)]
    views = [leaf.strides for leaf in leaves] + [result.strides for result in results]
    dims, strides = collapse(builder.space, views, keep_last=reduces)
    # of the leaves first, then of the results, as in `views`
    moved = iter(strides)
    values = tuple(
        replace(value, strides=next(moved))
        if isinstance(value, Leaf)
        else replace(value, axis=len(dims) - 1)
        if isinstance(value, SizeOf)
        else value
        for value in builder.values
    )
    return RegionSpec(
        dims, reduces, values, tuple(replace(result, strides=next(moved)) for result in results)
    )
