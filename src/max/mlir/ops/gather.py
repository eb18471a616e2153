"""Gather, scatter, nonzero."""

from __future__ import annotations

from dataclasses import replace

from max.dtype import DType
from max.mlir.conditions import Condition
from max.mlir.operation import Attrs, OpSpec, Types, axis_of, define, same_device, tensor
from max.mlir.types import TensorType, dims_text


def _check_indices(op: str, indices: TensorType) -> None:
    if not indices.dtype.is_integral():
        raise TypeError(f"{op}: the indices are {indices.short}, expected integers")


def _infer_gather(types: Types, attrs: Attrs) -> Types:
    x, indices = tensor("gather", types, 0), tensor("gather", types, 1)
    _check_indices("gather", indices)
    axis = axis_of("gather", attrs["axis"], x.rank)
    same_device("gather", [x, indices])
    return (x.with_shape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]]),)


GatherOp = define(
    OpSpec(
        "mo.gather",
        (2, 2),
        1,
        attributes={"axis": int},
        infer=_infer_gather,
        may_raise=True,
        takes="x, indices",
        doc="NumPy `take`; an index out of range raises at run time",
    )
)


def _index_size(op: str, x: TensorType, indices: TensorType, batch_dims: int) -> int:
    """The length of the index vectors in the last axis of `indices`."""
    _check_indices(op, indices)
    if indices.rank == 0 or not indices.shape[-1].is_static:
        raise ValueError(
            f"{op}: the last axis of the indices {indices.short} is the index vector, its size "
            "must be static"
        )
    size = indices.shape[-1].value
    if batch_dims + size > x.rank:
        raise ValueError(
            f"{op}: {batch_dims} batch dims and index vectors of size {size} do not fit "
            f"{x.short} of rank {x.rank}"
        )
    return size


def _infer_gather_nd(types: Types, attrs: Attrs) -> Types:
    """The result: `[*indices.shape[:-1], *x.shape[batch_dims + index size:]]`."""
    x, indices = tensor("gather_nd", types, 0), tensor("gather_nd", types, 1)
    batch: int = attrs["batch_dims"]
    if not 0 <= batch < indices.rank:
        raise ValueError(
            f"gather_nd: batch_dims is {batch}, expected 0 to {indices.rank - 1} for indices "
            f"{indices.short}"
        )
    size = _index_size("gather_nd", x, indices, batch)
    if x.shape[:batch] != indices.shape[:batch]:
        raise ValueError(
            f"gather_nd: the batch dims of the input are {dims_text(x.shape[:batch])}, of the "
            f"indices {dims_text(indices.shape[:batch])}; they must be equal"
        )
    same_device("gather_nd", [x, indices])
    return (x.with_shape([*indices.shape[:-1], *x.shape[batch + size :]]),)


define(
    OpSpec(
        "mo.gather_nd",
        (2, 2),
        1,
        attributes={"batch_dims": int},
        infer=_infer_gather_nd,
        may_raise=True,
        takes="x, indices `[…, n]`",
        doc="slices of x at index vectors of n axes, which follow `batch_dims` shared axes",
    )
)


SCATTER_REDUCTIONS = ("add", "max", "min", "mul")
"""How an update and the element that it meets are combined."""


def _scatter_name(op: str, attrs: Attrs) -> str:
    """The name of the op in messages, such as ``scatter_add``."""
    return f"{op}_{attrs['reduction']}" if "reduction" in attrs else op


def _check_reduction(op: str, x: TensorType, attrs: Attrs) -> None:
    """Checks the attribute `reduction`, if there is one, and that x has numbers."""
    if "reduction" not in attrs:
        return
    if attrs["reduction"] not in SCATTER_REDUCTIONS:
        raise ValueError(
            f"{op}: the reduction is {attrs['reduction']!r}, expected {', '.join(SCATTER_REDUCTIONS)}"
        )
    if x.dtype is DType.bool:
        raise TypeError(f"{op}: the input is {x.short}, expected a number")


def _infer_scatter(types: Types, attrs: Attrs) -> Types:
    """The type of x; updates and indices have one shape, of x's rank."""
    op = _scatter_name("scatter", attrs)
    x, updates, indices = (tensor(op, types, i) for i in range(3))
    _check_indices(op, indices)
    _check_reduction(op, x, attrs)
    axis = axis_of(op, attrs["axis"], x.rank)
    if updates.dtype is not x.dtype:
        raise TypeError(f"{op}: the updates are {updates.short}, the input is {x.short}")
    if updates.shape != indices.shape or updates.rank != x.rank:
        raise ValueError(
            f"{op}: updates {updates.short} and indices {indices.short} must have one shape, "
            f"of the input's rank {x.rank}"
        )
    for i in range(x.rank):
        extra = updates.shape[i] - x.shape[i]
        # symbolic sizes are left to the conditions
        if i != axis and extra.is_static and extra.value > 0:
            raise ValueError(
                f"{op}: axis {i} of the updates is {updates.shape[i]}, more than the input's "
                f"{x.shape[i]}"
            )
    same_device(op, [x, updates, indices])
    return (x,)


def _scatter_conditions(operands: Types, results: Types, attrs: Attrs) -> list[Condition]:
    """Conditions that the updates are not longer than x along other axes than `axis`."""
    op = _scatter_name("scatter", attrs)
    x, updates = tensor(op, operands, 0), tensor(op, operands, 1)
    return [
        Condition.at_least(
            x.shape[axis],
            updates.shape[axis],
            f"{op}: axis {axis} of the updates {updates.short} is longer than of the input {x.short}",
        )
        for axis in range(x.rank)
        if axis != attrs["axis"]
    ]


_SCATTER = OpSpec(
    "mo.scatter",
    (3, 3),
    1,
    attributes={"axis": int},
    infer=_infer_scatter,
    conditions=_scatter_conditions,
    takes="x, updates, indices",
    doc="a copy of x with elements along `axis` replaced, as NumPy `put_along_axis`",
)
define(_SCATTER)
define(
    replace(
        _SCATTER,
        name="mo.scatter_reduce",
        attributes={"axis": int, "reduction": str},
        doc=(
            "`reduction` = add, max, min, mul; updates of equal indices are all "
            "applied, in order, each result rounded to the dtype"
        ),
    ),
)


def _infer_scatter_nd(types: Types, attrs: Attrs) -> Types:
    """The type of x; the updates have the shape `[*indices.shape[:-1], *x.shape[index size:]]`."""
    op = _scatter_name("scatter_nd", attrs)
    x, updates, indices = (tensor(op, types, i) for i in range(3))
    size = _index_size(op, x, indices, 0)
    _check_reduction(op, x, attrs)
    if updates.dtype is not x.dtype:
        raise TypeError(f"{op}: the updates are {updates.short}, the input is {x.short}")
    expected = (*indices.shape[:-1], *x.shape[size:])
    if updates.shape != expected:
        raise ValueError(
            f"{op}: the updates are {updates.short}, expected shape {dims_text(expected)}"
        )
    same_device(op, [x, updates, indices])
    return (x,)


_SCATTER_ND = OpSpec(
    "mo.scatter_nd",
    (3, 3),
    1,
    infer=_infer_scatter_nd,
    takes="x, updates, indices `[…, n]`",
    doc="a copy of x with the slices at index vectors of n axes replaced",
)
define(_SCATTER_ND)
define(
    replace(
        _SCATTER_ND,
        name="mo.scatter_nd_reduce",
        attributes={"reduction": str},
        doc=(
            "`reduction` = add, max, min, mul; updates of equal indices are all "
            "applied, in order, each result rounded to the dtype"
        ),
    )
)


def _check_nonzero(operands: Types, results: Types, attrs: Attrs) -> None:
    """Checks that the result is int64 `[count, rank of the mask]`."""
    mask, count = tensor("nonzero", operands, 0), tensor("nonzero", operands, 1)
    y = tensor("nonzero", results, 0)
    if mask.dtype is not DType.bool or mask.rank == 0:
        raise TypeError(f"nonzero: the operand is {mask.short}, expected bool of rank 1 or more")
    if count.dtype is not DType.int64 or count.rank:
        raise TypeError(f"nonzero: the count is {count.short}, expected si64 of rank 0")
    # a row for each element; their number is known when the graph runs
    expected = TensorType.get(DType.int64, (y.shape[0], mask.rank), mask.device) if y.rank else None
    if y != expected:
        raise ValueError(
            f"nonzero: the result is {y.short}, expected si64 with a row of {mask.rank} for each "
            "nonzero element"
        )


define(
    OpSpec(
        "mo.nonzero",
        (2, 2),
        1,
        check=_check_nonzero,
        size_rule="count",
        introduces_symbols=True,
        takes="mask, count (rank 0 si64, on the CPU)",
        doc="si64 `[count, rank]`: the indices of the true elements",
    )
)
