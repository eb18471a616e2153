"""What ops compute of contents that are known at import: numbers, sizes that are expressions over symbols, strings.

Each function takes the node and the arrays of its operands, and returns None if it cannot tell. Arrays of objects have
dimensions among their elements, or are strings.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.graph import Dim
from max.graph.dim import StaticDim
from max.importers.node import Node
from max.importers.onnx.element_types import dtype_of
from max.importers.onnx.table import fold
from max.importers.values import Imported, is_text

Array = npt.NDArray[Any]
# larger results are left to the graph
_MOST_ELEMENTS = 1 << 14


def _is_dims(*arrays: Array | None) -> bool:
    """Whether an operand has dimensions among its elements."""
    return any(a is not None and a.dtype == object and not is_text(a) for a in arrays)


@fold("Identity")
def identity(node: Node, x: Array) -> Array:
    return x


@fold("Gather")
def gather(node: Node, x: Array, indices: Array) -> Array | None:
    axis = node.attr("axis", 0)
    if indices.dtype == object or not -x.ndim <= axis < x.ndim or indices.size > _MOST_ELEMENTS:
        return None
    size = x.shape[axis]
    if indices.size and not (-size <= indices.min() and indices.max() < size):
        return None
    return np.asarray(np.take(x, indices, axis))


@fold("Concat")
def concat(node: Node, *arrays: Array) -> Array | None:
    if not _is_dims(*arrays) and arrays[0].dtype != object:
        return np.concatenate(arrays, node.attr("axis", 0))
    # numbers among dimensions become objects too
    return np.concatenate([a.astype(object) for a in arrays], node.attr("axis", 0))


@fold("Unsqueeze")
def unsqueeze(node: Node, x: Array, axes: Array | None = None) -> Array:
    places = node.attr("axes") if axes is None else axes.reshape(-1).tolist()
    rank = x.ndim + len(places)
    new = node.axes(places, rank)
    old = iter(x.shape)
    return x.reshape([1 if axis in new else next(old) for axis in range(rank)])


@fold("Squeeze")
def squeeze(node: Node, x: Array, axes: Array | None = None) -> Array | None:
    given = node.attr("axes") if axes is None else axes.reshape(-1).tolist()
    places = (
        [a for a in range(x.ndim) if x.shape[a] == 1] if given is None else node.axes(given, x.ndim)
    )
    # the graph's op reports the error
    if any(x.shape[axis] != 1 for axis in places):
        return None
    return x.reshape([size for axis, size in enumerate(x.shape) if axis not in places])


@fold("Reshape")
def reshape(node: Node, x: Array, target: Array | None = None) -> Array | None:
    if target is None or target.dtype == object:
        return None
    sizes = [int(size) for size in target.reshape(-1)]
    # 0 keeps the size of the operand's axis, if it has one
    if not node.attr("allowzero", 0):
        if any(size == 0 and axis >= x.ndim for axis, size in enumerate(sizes)):
            return None
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


@fold("Transpose")
def transpose(node: Node, x: Array) -> Array:
    # `ascontiguousarray` gives an array of rank 0 a dimension
    return np.ascontiguousarray(x.transpose(node.attr("perm"))).reshape(
        x.transpose(node.attr("perm")).shape
    )


@fold("Slice")
def slice_(
    node: Node,
    x: Array,
    starts: Array | None = None,
    ends: Array | None = None,
    axes: Array | None = None,
    steps: Array | None = None,
) -> Array | None:
    if _is_dims(starts, ends, axes, steps):
        return None
    if node.version < 10:
        first, last = node.attr("starts"), node.attr("ends")
        places = node.attr("axes", list(range(len(first))))
        strides = [1] * len(first)
    else:
        assert starts is not None and ends is not None
        first, last = starts.tolist(), ends.tolist()
        places = list(range(len(first))) if axes is None else axes.tolist()
        strides = [1] * len(first) if steps is None else steps.tolist()
    index: list[Any] = [slice(None)] * x.ndim
    for start, stop, axis, step in zip(
        first, last, node.axes(places, x.ndim), strides, strict=True
    ):
        if step == 0:
            return None
        size = x.shape[axis]
        if step < 0 and stop < -size:
            # beyond the first element: Python has no number for that
            stop = None
        index[axis] = slice(start, stop, step)
    return x[tuple(index)]


@fold("Shape")
def shape(node: Node, x: Array) -> Array:
    return np.array(x.shape[slice(node.attr("start", 0), node.attr("end", x.ndim))], np.int64)


@fold("Size")
def size(node: Node, x: Array) -> Array:
    return np.array(x.size, np.int64)


@fold("Cast")
def cast(node: Node, x: Array) -> Any:
    if not _is_dims(x):
        return None
    dtype = dtype_of(node.attr("to"))
    if dtype not in (DType.int64, DType.int32):
        return None
    return Imported(contents=x, dtype=dtype)


@fold("Add", "Sub", "Mul", "Div")
def arithmetic(node: Node, x: Array, y: Array) -> Array | None:
    if not _is_dims(x, y) or x.size * y.size > 1 << 12:
        return None
    x, y = x.astype(object), y.astype(object)
    match node.op:
        case "Add":
            return np.asarray(x + y, object)
        case "Sub":
            return np.asarray(x - y, object)
        case "Mul":
            return np.asarray(x * y, object)
        case _:
            return _quotients(x, y)


def _quotients(x: Array, y: Array) -> Array | None:
    """Quotients of sizes, which are rounded down: of numbers that are not negative, by positive ones."""
    x, y = np.broadcast_arrays(x, y)
    results = np.empty(x.shape, object)
    for place in np.ndindex(x.shape):
        dividend, divisor = _dim(x, place), _dim(y, place)
        if not isinstance(divisor, StaticDim) or int(divisor) <= 0 or not _is_size(dividend):
            exact = None
            if divisor != 0:
                exact = dividend.expr.exact_quotient(divisor.expr)
            if exact is None:
                return None
            results[place] = Dim.from_mlir(exact)
        else:
            results[place] = dividend // divisor
    return results


def _dim(array: Array, place: tuple[int, ...]) -> Dim:
    """An element as a dimension."""
    item: Any = array[place]
    return Dim(item)


def _is_size(dim: Dim) -> bool:
    """Whether an expression cannot be negative: a number, a symbol, or sums and products of such."""
    if isinstance(dim, StaticDim):
        return int(dim) >= 0
    # negative terms and factors are printed with a sign
    return "-" not in str(dim)


@fold("Equal")
def equal(node: Node, x: Array, y: Array) -> Array | None:
    if x.dtype != object and y.dtype != object:
        return None
    if is_text(x) and is_text(y):
        return np.asarray(x == y, bool)
    x, y = np.broadcast_arrays(x.astype(object), y.astype(object))
    results = np.empty(x.shape, bool)
    for place in np.ndindex(x.shape):
        a, b = _dim(x, place), _dim(y, place)
        difference = a - b
        if a == b:
            results[place] = True
        elif isinstance(difference, StaticDim) or _differ(a, b) or _differ(b, a):
            results[place] = False
        else:
            return None
    return results


def _differ(a: Dim, b: Dim) -> bool:
    """Whether a size, which is not negative, cannot be a negative number."""
    return _is_size(a) and isinstance(b, StaticDim) and int(b) < 0


@fold("Where")
def where(node: Node, condition: Array, x: Array, y: Array) -> Array | None:
    if not _is_dims(x, y) and x.dtype != object or condition.dtype == object:
        return None
    return np.asarray(np.where(condition, x.astype(object), y.astype(object)), object)


@fold("ReduceProd")
def reduce_prod(node: Node, x: Array, axes: Array | None = None) -> Array | None:
    if not _is_dims(x) or x.ndim != 1:
        return None
    total = math.prod(x.tolist(), start=1)
    result = np.empty((1,) if node.attr("keepdims", 1) else (), object)
    result[...] = total
    return result


@fold("Expand")
def expand(node: Node, x: Array, target: Array) -> Array | None:
    if target.dtype == object or x.dtype != object:
        return None
    sizes = np.broadcast_shapes(x.shape, tuple(int(n) for n in target))
    return np.broadcast_to(x, sizes).copy() if math.prod(sizes) <= _MOST_ELEMENTS else None


@fold("Range")
def arange(node: Node, start: Array, stop: Array, step: Array) -> Array | None:
    if _is_dims(start, stop, step) or start.dtype.kind not in "iu":
        return None
    first, last, by = int(start.reshape(())), int(stop.reshape(())), int(step.reshape(()))
    if by == 0 or abs(last - first) // abs(by) > _MOST_ELEMENTS:
        return None
    return np.arange(first, last, by, dtype=start.dtype)


@fold("Split")
def split(node: Node, x: Array, sizes: Array | None = None) -> Any:
    if sizes is None or sizes.dtype == object:
        return None
    axis = node.axis("axis", x.ndim, 0)
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis))
