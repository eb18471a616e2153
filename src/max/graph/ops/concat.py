"""Ops that join, split, repeat and pad tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, cast

import numpy as np

from max import mlir
from max.dtype import DType
from max.graph.dim import Dim, DimLike
from max.graph.ops._stage import as_tensor, normalize_axis, stage
from max.graph.ops.promotion import cast_to, is_weak, promote_types, promote_weak
from max.graph.ops.shape import broadcast_to, flatten, reshape, unsqueeze
from max.graph.shape import Shape
from max.graph.value import TensorValue, TensorValueLike
from max.mlir.dims import DimExpr
from max.mlir.ops.shape import PAD_MODES

__all__ = ["chunk", "concat", "pad", "repeat_interleave", "split", "stack", "tile"]

_ZERO, _ONE = DimExpr.constant(0), DimExpr.constant(1)


def _tensors(op: str, values: Iterable[TensorValueLike]) -> list[TensorValue]:
    """Operands of any number as tensors of one dtype."""
    items = list(values)
    if not items:
        raise ValueError(f"{op}: expected at least one tensor")
    strong = [as_tensor(v) for v in items if not is_weak(v)]
    if not strong:
        strong = [as_tensor(items[0])]
        items[0] = strong[0]
    dtype = strong[0].dtype
    for tensor in strong[1:]:
        dtype = promote_types(op, dtype, tensor.dtype)
    device = strong[0].device
    return [
        promote_weak(op, v, dtype, device) if is_weak(v) else cast_to(as_tensor(v), dtype)
        for v in items
    ]


def concat(original_vals: Iterable[TensorValueLike], axis: int = 0) -> TensorValue:
    """Joins tensors along an axis.

    Args:
        original_vals: The tensors, at least one; all of one rank, and of equal sizes but for `axis`.
        axis: The axis; negative counts from the last.

    Raises:
        ValueError: No tensor, ranks or other sizes that differ, an axis out of range.
        TypeError: No dtype fits all.
    """
    tensors = _tensors("concat", original_vals)
    attrs = {"axis": normalize_axis("concat", axis, tensors[0].rank)}
    return tensors[0] if len(tensors) == 1 else stage("concat", tensors, attrs)


def stack(values: Iterable[TensorValueLike], axis: int = 0) -> TensorValue:
    """Joins tensors along a new axis.

    Args:
        values: The tensors, at least one; all of one shape.
        axis: Where the new axis is; negative counts from the last axis of the result.

    Raises:
        ValueError: No tensor, shapes that differ, an axis out of range.
        TypeError: No dtype fits all.
    """
    tensors = _tensors("stack", values)
    index = normalize_axis("stack", axis, tensors[0].rank + 1)
    first = tensors[0].mlir_type
    for i, tensor in enumerate(tensors[1:], 1):
        if (type_ := tensor.mlir_type).shape != first.shape:
            raise ValueError(
                f"stack: tensor {i} is {type_.short}, tensor 0 is {first.short}; expected one shape"
            )
    return concat([unsqueeze(tensor, index) for tensor in tensors], index)


def split(x: TensorValueLike, split_sizes: Sequence[DimLike], axis: int = 0) -> list[TensorValue]:
    """Cuts a tensor into parts along an axis.

    Args:
        x: The tensor.
        split_sizes: The sizes of the parts; they add up to the size of the axis.
        axis: The axis; negative counts from the last.

    Raises:
        ValueError: The sizes do not add up, or the axis is out of range.
    """
    tensor = as_tensor(x)
    type_ = tensor.mlir_type
    index = normalize_axis("split", axis, type_.rank)
    sizes = [Dim(size).expr for size in split_sizes]
    total = sum(sizes, start=_ZERO)
    if total != type_.shape[index]:
        raise ValueError(
            f"split: the sizes {[str(s) for s in sizes]} add up to {total}, axis {axis} of "
            f"{type_.short} has size {type_.shape[index]}"
        )
    if any(size.is_static and size.value < 0 for size in sizes):
        raise ValueError(f"split: the sizes {[str(s) for s in sizes]} must not be negative")
    parts: list[TensorValue] = []
    offset = _ZERO
    for size in sizes:
        shape = (*type_.shape[:index], size, *type_.shape[index + 1 :])
        start = [_ZERO] * type_.rank
        stop = list(type_.shape)
        start[index], stop[index] = offset, offset + size
        offset = stop[index]
        attrs = {"start": tuple(start), "stop": tuple(stop), "step": (_ONE,) * type_.rank}
        parts.append(
            tensor
            if shape == type_.shape
            else stage("slice", (tensor,), attrs, type_.with_shape(shape))
        )
    return parts


def chunk(x: TensorValueLike, chunks: int, axis: int = 0) -> list[TensorValue]:
    """Cuts a tensor into equal parts along an axis.

    Args:
        x: The tensor.
        chunks: How many parts; the size of the axis is a multiple of it.
        axis: The axis; negative counts from the last.

    Raises:
        ValueError: The axis is not divisible or out of range, or `chunks` is not positive.
    """
    tensor = as_tensor(x)
    type_ = tensor.mlir_type
    index = normalize_axis("chunk", axis, type_.rank)
    if chunks < 1:
        raise ValueError(f"chunk: chunks is {chunks}, expected 1 or more")
    size = type_.shape[index].exact_quotient(chunks)
    if size is None:
        raise ValueError(
            f"chunk: axis {axis} of {type_.short} has size {type_.shape[index]}, which is not "
            f"known to be a multiple of {chunks}"
        )
    return split(tensor, [Dim.from_mlir(size)] * chunks, index)


def tile(x: TensorValueLike, repeats: Iterable[DimLike]) -> TensorValue:
    """Repeats a whole tensor along each axis.

    Args:
        x: The tensor.
        repeats: How often, for each axis.

    Raises:
        ValueError: The number of repeats is not the rank, or one is negative.
    """
    tensor = as_tensor(x)
    shape = tensor.shape
    times = [Dim(r) for r in repeats]
    if len(times) != len(shape):
        raise ValueError(f"tile: {len(times)} repeats for a tensor of rank {len(shape)}")
    if any(r.expr.is_static and r.expr.value < 0 for r in times):
        raise ValueError(f"tile: the repeats {[str(r) for r in times]} must not be negative")
    split_shape = Shape(d for dim in shape for d in (1, dim))
    wide_shape = Shape(d for r, dim in zip(times, shape, strict=True) for d in (r, dim))
    final = Shape(r * dim for r, dim in zip(times, shape, strict=True))
    return reshape(broadcast_to(reshape(tensor, split_shape), wide_shape), final)


def repeat_interleave(
    x: TensorValueLike,
    repeats: int | TensorValue,
    axis: int | None = None,
    out_dim: DimLike | None = None,
) -> TensorValue:
    """Repeats each element along an axis.

    Args:
        x: The tensor.
        repeats: How often each element is repeated. A tensor (rank 1, integers, on the CPU) says it
            for each element of the axis; of size 1, for all.
        axis: The axis; negative counts from the last. None flattens the tensor first.
        out_dim: The size of the axis in the result, where `repeats` is a tensor and not a constant.

    Raises:
        ValueError: `repeats` is not positive or of a wrong shape, the axis is out of range, or
            `out_dim` is missing. A tensor with a negative number is an error when the graph runs.
    """
    tensor = as_tensor(x)
    if axis is None:
        tensor, axis = flatten(tensor), 0
    shape = tensor.shape
    index = normalize_axis("repeat_interleave", axis, len(shape))
    if isinstance(repeats, TensorValue):
        return _repeat_by_tensor(tensor, repeats, index, out_dim)
    if repeats < 1:
        raise ValueError(f"repeat_interleave: repeats is {repeats}, expected 1 or more")
    wide = unsqueeze(tensor, index + 1)
    wide = broadcast_to(wide, Shape([*shape[: index + 1], repeats, *shape[index + 1 :]]))
    return reshape(wide, Shape([*shape[:index], shape[index] * repeats, *shape[index + 1 :]]))


def _sum_of_constant(repeats: TensorValue, size: Dim) -> Dim:
    op = repeats.to_mlir().owner
    if not isinstance(op, mlir.MoOp) or op.name != "mo.constant":
        raise ValueError("repeat_interleave: repeats is a tensor; say the size: out_dim")
    counts = op.attr("value")
    if (counts < 0).any():
        raise ValueError(f"repeat_interleave: repeats are {counts.tolist()}, expected 0 or more")
    return Dim(int(counts.sum())) if counts.size > 1 else size * int(counts.sum())


def _repeat_by_tensor(
    x: TensorValue, repeats: TensorValue, axis: int, out_dim: DimLike | None
) -> TensorValue:
    """Element i of the result is element j of `x` where i first lies below the sum of repeats[:j+1]."""
    from max.graph.ops.custom import custom
    from max.graph.ops.gather import gather
    from max.graph.ops.range import range
    from max.graph.ops.reduction import cumsum, sum

    size = x.shape[axis]
    if repeats.rank != 1 or not repeats.dtype.is_integral():
        raise ValueError(
            f"repeat_interleave: repeats is {repeats!r}, expected a vector of integers"
        )
    if out_dim is None:
        out_dim = _sum_of_constant(repeats, size)
    counts = cast_to(repeats, DType.int64).to(x.device)
    what = {"what": "repeat_interleave: repeats"}
    checked = custom("mo.check.counts", x.device, [counts], [counts.type], what)
    counts = checked[0].tensor
    if counts.shape[0] == 1 and size != 1:
        counts = broadcast_to(counts, [size])
    if counts.shape[0] != size:
        raise ValueError(
            f"repeat_interleave: repeats has size {counts.shape[0]}, axis {axis} has {size}"
        )
    total = Dim(out_dim)
    ends = cumsum(counts, axis=0)
    # a new name for the size is known once the range has run
    last = reshape(sum(counts, axis=0), [])
    positions = range(0, last, 1, out_dim=total, dtype=DType.int64, device=x.device)
    passed = reshape(positions, [total, 1]) >= reshape(ends, [1, size])
    return gather(x, reshape(sum(cast_to(passed, DType.int64), axis=1), [total]), axis)


def pad(
    input: TensorValueLike,
    paddings: Iterable[int],
    mode: Literal["constant"] = "constant",
    value: TensorValueLike = 0,
) -> TensorValue:
    """Adds elements around a tensor.

    Args:
        input: The tensor.
        paddings: For each axis how many elements before and after: ``[before_0, after_0, …]``.
        mode: ``constant``, the only mode.
        value: The value of the new elements: a number that fits the dtype.

    Raises:
        ValueError: A wrong number of paddings, a negative one, another mode, a value that does not
            fit.
        TypeError: The value is not a number.
    """
    tensor = as_tensor(input)
    amounts = [Dim(p).expr for p in paddings]
    if len(amounts) != 2 * tensor.rank:
        raise ValueError(
            f"pad: {len(amounts)} paddings for a tensor of rank {tensor.rank}, expected "
            f"{2 * tensor.rank}"
        )
    if mode not in PAD_MODES:
        raise ValueError(f"pad: mode is {mode!r}, expected {', '.join(PAD_MODES)}")
    if isinstance(value, TensorValue) or not np.isscalar(value):
        raise TypeError(f"pad: the value is {value!r}, expected a number")
    number = cast("int | float", value.item() if isinstance(value, np.generic) else value)
    if not tensor.dtype.is_float() and number % 1 != 0:
        raise ValueError(f"pad: the value {number} does not fit {tensor.dtype.name}")
    attrs = {
        "low": tuple(amounts[0::2]),
        "high": tuple(amounts[1::2]),
        "mode": mode,
        "value": float(number) if tensor.dtype.is_float() else int(number),
    }
    return stage("pad", (tensor,), attrs)
