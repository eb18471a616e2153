"""Ops on shapes: what they compute of sizes is known at import."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import Dim, TensorValue, ops
from max.graph.dim import StaticDim
from max.importers.errors import MissingContents, Unsupported
from max.importers.node import Node
from max.importers.onnx.element_types import dtype_of
from max.importers.onnx.ops.elementwise import flatten_matrix
from max.importers.onnx.table import op
from max.importers.values import Imported


def sizes_array(dims: Sequence[Dim]) -> np.ndarray:
    """Dimensions as known contents."""
    array = np.empty(len(dims), object)
    # symbols stay expressions, with which folds compute
    array[:] = [int(dim) if isinstance(dim, StaticDim) else dim for dim in dims]
    return array


@op("Shape")
def shape(node: Node) -> Any:
    dims = node.value(0).shape
    start, end = node.attr("start", 0), node.attr("end", len(dims))
    return Imported(contents=sizes_array(dims[slice(start, end)]), dtype=DType.int64)


@op("Size")
def size(node: Node) -> Any:
    total = math.prod(node.value(0).shape, start=Dim(1))
    array = np.empty((), object)
    array[()] = int(total) if isinstance(total, StaticDim) else total
    return Imported(contents=array, dtype=DType.int64)


@op("Reshape")
def reshape(node: Node) -> TensorValue:
    x = node.tensor(0)
    if node.version < 5:
        target = [Dim(int(size)) for size in node.attr("shape", [])]
    else:
        target = node.sizes(1)
    # 0 keeps the operand's size
    if not node.attr("allowzero", 0):
        for axis, dim in enumerate(target):
            if dim == 0:
                if axis >= x.rank:
                    raise Unsupported(
                        f"the shape has 0 for axis {axis}, the operand has rank {x.rank}"
                    )
                target[axis] = x.shape[axis]
    return ops.reshape(x, target)


@op("Flatten")
def flatten(node: Node, x: TensorValue) -> TensorValue:
    axis = node.attr("axis", 1)
    if not -x.rank <= axis <= x.rank:
        raise Unsupported(f"the axis is {axis}, the operand has rank {x.rank}")
    return flatten_matrix(x, axis + x.rank if axis < 0 else axis)


@op("Transpose")
def transpose(node: Node, x: TensorValue) -> TensorValue:
    perm = node.attr("perm") or list(range(x.rank))[::-1]
    if sorted(perm) != list(range(x.rank)):
        raise Unsupported(f"perm is {perm}, the operand has rank {x.rank}")
    return ops.permute(x, list(perm)) if x.rank else x


@op("Squeeze")
def squeeze(node: Node) -> TensorValue:
    x = node.tensor(0)
    axes = node.attr("axes") if node.version < 13 else (node.ints(1) if node.has(1) else None)
    if axes is None:
        # without axes all of size 1 go: sizes must be known
        axes = [axis for axis in range(x.rank) if node.static(x.shape[axis]) == 1]
    axes = node.axes(axes, x.rank)
    for axis in axes:
        if x.shape[axis] != 1:
            if isinstance(x.shape[axis], StaticDim):
                raise Unsupported(f"axis {axis} has size {x.shape[axis]}, expected 1")
            raise MissingContents(node.source.inputs[0], f"the size {x.shape[axis]}")
    return ops.reshape(x, [dim for axis, dim in enumerate(x.shape) if axis not in axes])


@op("Unsqueeze")
def unsqueeze(node: Node) -> TensorValue:
    x = node.tensor(0)
    axes = node.attr("axes") if node.version < 13 else node.ints(1)
    rank = x.rank + len(axes)
    new = node.axes(axes, rank)
    old = iter(x.shape)
    return ops.reshape(x, [1 if axis in new else next(old) for axis in range(rank)])


@op("Expand")
def expand(node: Node) -> TensorValue:
    x = node.tensor(0)
    target = node.sizes(1)
    rank = max(x.rank, len(target))
    # shapes are aligned at the right
    own = [Dim(1)] * (rank - x.rank) + list(x.shape)
    wanted = [Dim(1)] * (rank - len(target)) + target
    return ops.broadcast_to(
        x, [broadcast_size(node, a, b) for a, b in zip(own, wanted, strict=True)]
    )


def broadcast_size(node: Node, a: Dim, b: Dim) -> Dim:
    """The size to which two sizes broadcast."""
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    if isinstance(a, StaticDim) and isinstance(b, StaticDim):
        raise Unsupported(f"sizes {a} and {b} do not broadcast")
    raise MissingContents(node.source.inputs[0], f"the sizes {a} and {b}")


@op("Tile")
def tile(node: Node) -> TensorValue:
    x = node.tensor(0)
    if node.version < 6:
        repeats = [Dim(1)] * x.rank
        repeats[int(node.number(2))] = Dim(int(node.number(1)))
        return ops.tile(x, repeats)
    repeats = node.sizes(1)
    if any(count == 0 for count in repeats):
        shape = [dim * count for dim, count in zip(x.shape, repeats, strict=True)]
        return ops.broadcast_to(ops.constant(np.zeros((), x.dtype.to_numpy())), shape)
    return ops.tile(x, repeats)


@op("Concat")
def concat(node: Node) -> TensorValue:
    tensors = [node.tensor(index) for index in range(len(node.operands))]
    axis = node.axis("axis", tensors[0].rank, 1 if node.version < 4 else None)
    return ops.concat(tensors, axis)


@op("Split")
def split(node: Node) -> Any:
    x = node.tensor(0)
    axis = node.axis("axis", x.rank, 0)
    sizes = split_sizes(node, x, axis)
    return tuple(ops.split(x, sizes, axis))


def split_sizes(node: Node, x: TensorValue, axis: int) -> list[Dim]:
    """The sizes of the parts of a Split."""
    given = node.attr("split") if node.version < 13 else (node.sizes(1) if node.has(1) else None)
    if given is not None:
        return [Dim(size) for size in given]
    parts = node.attr("num_outputs", node.num_outputs)
    total = x.shape[axis]
    if not isinstance(total, StaticDim):
        # a symbolic size can be split if it is a multiple of the parts
        exact = total.expr.exact_quotient(parts)
        if exact is not None:
            return [Dim.from_mlir(exact)] * parts
    total = node.static(total)
    # equal parts, the last one smaller
    each = -(-total // parts)
    return [Dim(min(each, max(total - each * part, 0))) for part in range(parts)]


@op("Constant")
def constant(node: Node) -> Any:
    for name, value in node.source.attributes.items():
        match name:
            case "value" | "sparse_value":
                return np.asarray(value)
            case "value_float":
                return np.array(value, np.float32)
            case "value_floats":
                return np.array(value, np.float32)
            case "value_int" | "value_ints":
                return np.array(value, np.int64)
            case "value_string":
                return np.array(value, object)
            case "value_strings":
                return np.array(value, object).reshape(-1)
            case _:
                continue
    raise Unsupported("has no value")


@op("ConstantOfShape")
def constant_of_shape(node: Node) -> TensorValue:
    value = node.attr("value")
    element = np.zeros((), np.float32) if value is None else np.asarray(value).reshape(-1)[0]
    return ops.broadcast_to(ops.constant(np.asarray(element)), node.sizes(0))


@op("EyeLike")
def eye_like(node: Node) -> TensorValue:
    x = node.value(0)
    rows, columns = x.shape
    dtype = dtype_of(node.attr("dtype")) if node.attr("dtype") else x.dtype
    assert dtype is not None
    device = ops.constant(0).device
    row = ops.reshape(ops.range(0, rows, 1, dtype=DType.int64, device=device), [rows, 1])
    column = ops.reshape(ops.range(0, columns, 1, dtype=DType.int64, device=device), [1, columns])
    return ops.cast(ops.equal(column - row, node.attr("k", 0)), dtype)


@op("Range")
def arange(node: Node) -> TensorValue:
    dtype = node.dtype(0)
    numbers = [node.value(index) for index in range(3)]
    if dtype.is_integral():
        start, stop, step = (node.sizes(index)[0] for index in range(3))
        if all(isinstance(n, StaticDim) for n in (start, stop, step)):
            count = max(0, -(-(int(stop) - int(start)) // int(step)))
            return _sequence(node, numbers, Dim(count), dtype)
        # the size is the stop itself, which may be an expression
        if step == 1 and start == 0:
            return _sequence(node, numbers, stop, dtype)
        raise MissingContents(node.source.inputs[1], "the elements")
    start, stop, step = (node.number(index) for index in range(3))
    if step == 0:
        raise Unsupported("the step is 0")
    count = max(0, math.ceil((stop - start) / step))
    return _sequence(node, numbers, Dim(count), dtype)


def _sequence(node: Node, numbers: Sequence[Imported], count: Dim, dtype: DType) -> TensorValue:
    """``start + step * i``, each element rounded once."""
    device = ops.constant(0).device
    # integers are exact as they are; small floats are computed in float32
    wide = dtype
    if dtype.is_float():
        wide = DType.float64 if dtype is DType.float64 else DType.float32
    places = ops.range(0, count, 1, dtype=wide, device=device)
    start, step = (ops.cast(ops.reshape(numbers[i].tensor, []), wide) for i in (0, 2))
    return ops.cast(start + places * step, dtype)
