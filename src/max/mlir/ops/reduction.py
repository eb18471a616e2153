"""Reductions, scans and sorts along one axis."""

from __future__ import annotations

from max.dtype import DType
from max.mlir.conditions import Condition
from max.mlir.dims import DimExpr
from max.mlir.operation import OPS, Attrs, Conditions, Infer, OpSpec, Types, axis_of, define, tensor
from max.mlir.types import TensorType

REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_mean": "mean",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_mul": "prod",
}
"""Reductions that keep the dtype, and their names in `max.graph.ops`."""
ARG_REDUCTIONS = {"argmax": "argmax", "argmin": "argmin"}
SCANS = {"softmax": "softmax", "logsoftmax": "logsoftmax"}
"""Ops along an axis whose result has the operand's type."""


def _numbers(op: str, x: TensorType, floats: bool = False) -> None:
    if x.dtype is DType.bool or (floats and not x.dtype.is_float()):
        expected = "a floating-point type" if floats else "a number"
        raise TypeError(f"{op}: the operand is {x.short}, expected {expected}")


def _not_empty(op: str, x: TensorType, axis: int) -> None:
    if x.shape[axis] == 0:
        raise ValueError(f"{op}: axis {axis} of {x.short} is empty")


def _reduction(op: str, result: DType | None, needs_elements: bool) -> Infer:
    """The rule of a reduction: x with size 1 along the axis, of the dtype `result` if it is given."""

    def infer(types: Types, attrs: Attrs) -> Types:
        x = tensor(op, types, 0)
        _numbers(op, x)
        axis = axis_of(op, attrs["axis"], x.rank)
        if needs_elements:
            _not_empty(op, x, axis)
        one = DimExpr.constant(1)
        reduced = x.with_shape([*x.shape[:axis], one, *x.shape[axis + 1 :]])
        return (reduced if result is None else reduced.with_dtype(result),)

    return infer


def _along_axis(op: str, floats: bool) -> Infer:
    """The rule of an op along an axis that keeps the type."""

    def infer(types: Types, attrs: Attrs) -> Types:
        x = tensor(op, types, 0)
        _numbers(op, x, floats)
        axis_of(op, attrs["axis"], x.rank)
        return (x,)

    return infer


def _elements_conditions(op: str) -> Conditions:
    """The condition that the axis is not empty, for ops without a value for an empty axis."""

    def conditions(operands: Types, results: Types, attrs: Attrs) -> list[Condition]:
        x = tensor(op, operands, 0)
        axis: int = attrs["axis"]
        return [Condition.at_least(x.shape[axis], 1, f"{op}: axis {axis} of {x.short} is empty")]

    return conditions


_AXIS = {"axis": int}

for _name, _op in REDUCTIONS.items():
    _extreme = _op in ("max", "min")
    define(
        OpSpec(
            f"mo.{_name}",
            (1, 1),
            1,
            attributes=_AXIS,
            infer=_reduction(_op, None, needs_elements=_extreme),
            conditions=_elements_conditions(_op) if _extreme else None,
            reduction=True,
            row_flops=1,
            takes="x",
            doc="along `axis`, which stays with size 1; the result has the dtype of x",
        )
    )
for _name, _op in ARG_REDUCTIONS.items():
    _infer = _reduction(_op, DType.int64, needs_elements=True)
    define(
        OpSpec(
            f"mo.{_name}",
            (1, 1),
            1,
            attributes=_AXIS,
            infer=_infer,
            conditions=_elements_conditions(_op),
            takes="x",
            doc="the si64 index along `axis`, which stays with size 1; the first of equals, NaN first",
        )
    )
for _name, _op in SCANS.items():
    define(
        OpSpec(
            f"mo.{_name}",
            (1, 1),
            1,
            attributes=_AXIS,
            infer=_along_axis(_op, floats=True),
            row_flops=4,
            region_size=6,
            takes="x",
            doc="on floats, along `axis`",
        )
    )

define(
    OpSpec(
        "mo.cumsum",
        (1, 1),
        1,
        attributes={"axis": int, "exclusive": bool, "reverse": bool},
        infer=_along_axis("cumsum", floats=False),
        takes="x",
        doc="running sums along `axis`, `exclusive` of the element itself, from the end if `reverse`",
    )
)


def _selection(op: str) -> OpSpec:
    """An op with the k first elements along an axis in some order, and their indices."""

    def infer(types: Types, attrs: Attrs) -> Types:
        """Values and int64 indices, with `k` elements along the axis."""
        x = tensor(op, types, 0)
        _numbers(op, x)
        axis = axis_of(op, attrs["axis"], x.rank)
        k: int = attrs["k"]
        dim = x.shape[axis]
        if k < 1 or (dim.is_static and k > dim.value):
            raise ValueError(f"{op}: k is {k}, expected 1 to {dim}, the size of axis {axis}")
        shape = [*x.shape[:axis], DimExpr.constant(k), *x.shape[axis + 1 :]]
        values = x.with_shape(shape)
        return (values, values.with_dtype(DType.int64))

    def conditions(operands: Types, results: Types, attrs: Attrs) -> list[Condition]:
        x = tensor(op, operands, 0)
        k: int = attrs["k"]
        axis: int = attrs["axis"]
        message = f"{op}: k is {k}, more than axis {axis} of {x.short} has elements"
        return [Condition.at_least(x.shape[axis], k, message)]

    return OpSpec(
        f"mo.{op}",
        (1, 1),
        2,
        attributes={"k": int, "axis": int},
        infer=infer,
        conditions=conditions,
        takes="x",
        gives="values, si64 indices",
        doc="the `k` first elements along `axis` in falling, in rising order; NaN is the greatest",
    )


define(_selection("top_k"))
define(_selection("bottom_k"))


def _infer_argsort(types: Types, attrs: Attrs) -> Types:
    x = tensor("argsort", types, 0)
    _numbers("argsort", x)
    axis_of("argsort", attrs["axis"], x.rank)
    return (x.with_dtype(DType.int64),)


define(
    OpSpec(
        "mo.argsort",
        (1, 1),
        1,
        attributes={"axis": int, "ascending": bool},
        infer=_infer_argsort,
        takes="x",
        doc="si64; stable, NaN is the greatest",
    )
)

# ops that passes name
LogsoftmaxOp = OPS["mo.logsoftmax"]
ReduceMaxOp = OPS["mo.reduce_max"]
ReduceMeanOp = OPS["mo.reduce_mean"]
ReduceMinOp = OPS["mo.reduce_min"]
ReduceMulOp = OPS["mo.reduce_mul"]
ReduceSumOp = OPS["mo.reduce_sum"]
SoftmaxOp = OPS["mo.softmax"]
