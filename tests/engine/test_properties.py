"""Each op on drawn shapes, ranks, axes, dtypes and symbols: interpreter and engine against NumPy and torch.

A property draws operands and parameters, and computes the expected result. Sizes include 0 and 1; each dimension is
static or a symbol at random (equal sizes are one symbol). `tests/ops/table.py` has the dtypes in full; here are the
shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from max import _interpreter
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from tests.tolerance import assert_close

DEVICE = DeviceRef.CPU()
SESSION = InferenceSession(devices=[CPU()])
Array = np.ndarray

PROPERTIES: dict[str, Callable[[Draw], Any]] = {}
ELSEWHERE = {
    "allgather": "tests/devices", "allreduce": "tests/devices", "transfer_to": "tests/devices",
    "assert_same_device": "tests/graph", "buffer_create": "tests/engine/test_effects.py",
    "buffer_load": "tests/engine/test_effects.py", "buffer_store": "tests/engine/test_effects.py",
    "buffer_store_slice": "tests/engine/test_slices.py", "call": "tests/engine/test_control_flow.py",
    "cond": "tests/compiler/test_random_graphs.py", "while_loop": "tests/compiler/test_random_graphs.py",
    "constant": "tests/graph", "constant_external": "tests/engine/test_weights.py",
    "custom": "tests/engine/test_custom_signatures.py",
    "inplace_custom": "tests/engine/test_custom_signatures.py", "print": "tests/engine/test_print.py",
    "random": "tests/engine/test_random.py", "rebind": "tests/engine/test_sizes.py",
    "hann_window": "tests/ops/table.py",
    "shape_to_tensor": "tests/ops/table.py", "irfft": "tests/ops/spatial.py", "fold": "tests/ops/spatial.py",
    "resize": "tests/ops/spatial.py", "resize_bicubic": "tests/graph/test_detection.py",
    "resize_linear": "tests/ops/detection.py", "resize_nearest": "tests/ops/detection.py",
    "roi_align": "tests/ops/detection.py", "non_maximum_suppression": "tests/ops/detection.py",
    "parallel": "tests/graph/test_launches.py", "shard_and_stack": "tests/graph/test_launches.py",
    "side_stream": "tests/graph/test_launches.py",
    "dequantize": "tests/ops", "qmatmul": "tests/ops", "quantize": "tests/ops",
}  # fmt: skip
"""Ops whose properties are tested elsewhere, and where."""


class Draw:
    """Draws operands, and stages the case: ``x = draw.tensor(shape)`` is an array, ``draw.value(x)`` its value in the
    graph.
    """

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        self.arrays: list[Array] = []
        self.static = False
        """Whether all sizes are known when the graph is built."""

    def __call__(self, strategy: Any) -> Any:
        return self.data.draw(strategy)

    def int(self, low: int, high: int) -> int:
        return self(st.integers(low, high))

    def choice(self, items: Any) -> Any:
        return self(st.sampled_from(list(items)))

    def shape(self, low: int = 0, high: int = 4, least: int = 0) -> tuple[int, ...]:
        sizes = [s for s in (0, 1, 1, 2, 3, 5, 8, 17) if s >= least]
        return tuple(self(st.lists(st.sampled_from(sizes), min_size=low, max_size=high)))

    def axis(self, rank: int) -> int:
        return self.int(-rank, rank - 1)

    def add(self, array: Array) -> Array:
        self.arrays.append(np.ascontiguousarray(array).reshape(array.shape))
        return self.arrays[-1]

    def floats(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        return self.add(self.rng.uniform(-3, 3, shape).astype(dtype))

    def ints(self, shape: tuple[int, ...], low: int, high: int, dtype: Any = np.int64) -> Array:
        return self.add(self.rng.integers(low, max(high, low + 1), shape).astype(dtype))

    def tensor(self, shape: tuple[int, ...]) -> Array:
        """Draws a tensor of any dtype."""
        kind = self.choice(["f4", "f4", "f8", "f2", "i4", "i8", "u1", "?"])
        if kind == "?":
            return self.add(self.rng.integers(0, 2, shape).astype(bool))
        if kind[0] == "f":
            return self.floats(shape, np.dtype(kind))
        return self.ints(shape, 0 if kind == "u1" else -50, 50, np.dtype(kind))

    def broadcastable(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Draws a shape that broadcasts with the given one, to it or to a larger one."""
        kept = shape[self.int(0, len(shape)) :]
        return tuple(1 if self.choice([True, False, False]) else size for size in kept)

    def types(self) -> list[TensorType]:
        sizes = sorted({size for array in self.arrays for size in array.shape if size > 1})
        symbols = {s: f"n{s}" for s in sizes if not self.static and self.choice([True, False])}
        return [
            TensorType(DType.from_numpy(x.dtype), [symbols.get(s, s) for s in x.shape], DEVICE)
            for x in self.arrays
        ]


def prop(*names: str) -> Callable[[Any], Any]:
    """Registers a property of ops: a function that returns how to stage the op and its expected results."""

    def register(function: Any) -> Any:
        for name in names:
            PROPERTIES[name] = lambda draw, name=name: function(draw, name)
        return function

    return register


NUMPY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
    "equal": np.equal, "not_equal": np.not_equal, "greater": np.greater, "greater_equal": np.greater_equal,
    "logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor,
    "abs": np.abs, "negate": np.negative, "exp": np.exp, "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
    "floor": np.floor, "ceil": np.ceil, "round": np.rint, "trunc": np.trunc, "is_nan": np.isnan, "is_inf": np.isinf,
    "relu": lambda x: np.maximum(x, 0), "sqrt": lambda x: np.sqrt(np.abs(x)), "logical_not": np.logical_not,
    "rsqrt": lambda x: 1 / np.sqrt(np.abs(x) + 1), "log": lambda x: np.log(np.abs(x) + 1),
    "log1p": lambda x: np.log1p(np.abs(x)), "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)), "acos": lambda x: np.arccos(x / 4), "atanh": lambda x: np.arctanh(x / 4),
    "div": lambda x, y: x / (np.abs(y) + 1), "mod": lambda x, y: np.mod(x, np.abs(y) + 1),
    "floor_div": lambda x, y: np.floor_divide(x, np.abs(y) + 1), "pow": lambda x, y: np.power(np.abs(x) + 1, y),
}  # fmt: skip
BEFORE: dict[str, Callable[..., Any]] = {
    "sqrt": lambda x: (ops.abs(x),), "rsqrt": lambda x: (ops.abs(x) + 1,), "log": lambda x: (ops.abs(x) + 1,),
    "log1p": lambda x: (ops.abs(x),), "acos": lambda x: (x / 4,), "atanh": lambda x: (x / 4,),
    "div": lambda x, y: (x, ops.abs(y) + 1), "mod": lambda x, y: (x, ops.abs(y) + 1),
    "floor_div": lambda x, y: (x, ops.abs(y) + 1), "pow": lambda x, y: (ops.abs(x) + 1, y),
}  # fmt: skip
LOGICAL = ("logical_and", "logical_or", "logical_xor", "logical_not")
BINARY = (
    "add", "sub", "mul", "div", "mod", "floor_div", "pow", "max", "min", "equal", "not_equal", "greater",
    "greater_equal",
    "logical_and", "logical_or", "logical_xor",
)  # fmt: skip
UNARY = (
    "abs", "negate", "exp", "tanh", "sin", "cos", "floor", "ceil", "round", "trunc", "is_nan", "is_inf", "relu",
    "sqrt", "rsqrt",
    "log", "log1p", "sigmoid", "silu", "acos", "atanh", "logical_not",
)  # fmt: skip


@prop(*BINARY)
def binary(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    other = draw.broadcastable(shape)
    if draw.choice([True, False]):
        shape, other = other, shape
    if name in LOGICAL:
        x, y = (draw.add(draw.rng.integers(0, 2, s).astype(bool)) for s in (shape, other))
    elif name == "floor_div":
        x, y = (draw.ints(s, -50, 50, np.int32) for s in (shape, other))
    else:
        x, y = draw.floats(shape), draw.floats(other)
    before = BEFORE.get(name, lambda *args: args)
    return lambda a, b: getattr(ops, name)(*before(a, b)), NUMPY[name](x, y)


@prop(*UNARY, "erf", "gelu")
def unary(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    if name == "logical_not":
        x = draw.add(draw.rng.integers(0, 2, shape).astype(bool))
    else:
        x = draw.floats(shape)
    if name in ("erf", "gelu"):
        import torch

        y = torch.from_numpy(x)
        want = torch.special.erf(y) if name == "erf" else torch.nn.functional.gelu(y)
        return getattr(ops, name), want.numpy()
    before = BEFORE.get(name, lambda *args: args)
    return lambda a: getattr(ops, name)(*before(a)), NUMPY[name](x)


@prop("where")
def where(draw: Draw, name: str) -> Any:
    shape = draw.shape()
    condition = draw.add(draw.rng.integers(0, 2, draw.broadcastable(shape)).astype(bool))
    x, y = draw.floats(shape), draw.floats(draw.broadcastable(shape))
    return ops.where, np.where(condition, x, y)


@prop("cast")
def cast(draw: Draw, name: str) -> Any:
    x = draw.tensor(draw.shape())
    dtype = draw.choice([DType.float32, DType.int32, DType.int64, DType.bool, DType.float64])
    return lambda a: ops.cast(a, dtype), x.astype(dtype.to_numpy())


@prop("sum", "mean", "max", "min", "prod")
def reduction(draw: Draw, name: str) -> Any:
    # an extremum of no elements is undefined
    shape = draw.shape(low=1, least=0 if name in ("sum", "prod") else 1)
    axis = draw.axis(len(shape))
    x = draw.floats(shape)
    want = getattr(np, name)(x.astype(np.float64), axis=axis, keepdims=True)
    return lambda a: getattr(ops, name)(a, axis=axis), want.astype(np.float32)


PROPERTIES["max_of_two"], PROPERTIES["min_of_two"] = PROPERTIES["max"], PROPERTIES["min"]
for _name in ("max", "min"):
    PROPERTIES[f"{_name}_of_two"] = lambda draw, name=_name: binary(draw, name)


@prop("argmax", "argmin")
def arg_reduction(draw: Draw, name: str) -> Any:
    shape = draw.shape(low=1, least=1)
    axis = draw.axis(len(shape))
    # with ties
    x = draw.ints(shape, -3, 4, np.int32) if draw.choice([True, False]) else draw.floats(shape)
    return lambda a: getattr(ops, name)(a, axis=axis), getattr(np, name)(
        x, axis=axis, keepdims=True
    )


@prop("softmax", "logsoftmax")
def softmax(draw: Draw, name: str) -> Any:
    shape = draw.shape(low=1)
    axis = draw.axis(len(shape))
    x = draw.floats(shape).astype(np.float64)
    if 0 in shape:
        return lambda a: getattr(ops, name)(a, axis=axis), x.astype(np.float32)
    shifted = x - x.max(axis, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))
    want = log if name == "logsoftmax" else np.exp(log)
    return lambda a: getattr(ops, name)(a, axis=axis), want.astype(np.float32)


@prop("cumsum")
def cumsum(draw: Draw, name: str) -> Any:
    shape = draw.shape(low=1)
    axis, exclusive, reverse = (
        draw.axis(len(shape)),
        draw.choice([True, False]),
        draw.choice([True, False]),
    )
    x = draw.ints(shape, -9, 9, np.int64)
    y = np.flip(x, axis) if reverse else x
    total = y.cumsum(axis) - (y if exclusive else 0)
    want = np.flip(total, axis) if reverse else total
    return lambda a: ops.cumsum(a, axis=axis, exclusive=exclusive, reverse=reverse), want


@prop("layer_norm", "rms_norm")
def norm(draw: Draw, name: str) -> Any:
    shape = draw.shape(low=1, least=1)
    x, gamma = draw.floats(shape), draw.floats(shape[-1:])
    wide = x.astype(np.float64)
    if name == "rms_norm":
        want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * gamma
        return lambda a, g: ops.rms_norm(a, g, 1e-3), want.astype(np.float32)
    beta = draw.floats(shape[-1:])
    centered = wide - wide.mean(-1, keepdims=True)
    want = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-3) * gamma + beta
    return lambda a, g, b: ops.layer_norm(a, g, b, 1e-3), want.astype(np.float32)


@prop("group_norm")
def group_norm(draw: Draw, name: str) -> Any:
    groups, size = draw.int(1, 3), draw.int(1, 3)
    channels = groups * size
    shape = (draw.int(1, 3), channels, *draw.shape(high=2, least=1))
    x, gamma, beta = draw.floats(shape), draw.floats((channels,)), draw.floats((channels,))
    wide = x.astype(np.float64).reshape(shape[0], groups, -1)
    centered = wide - wide.mean(-1, keepdims=True)
    scaled = (centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-3)).reshape(shape)
    per_channel = (channels, *[1] * (len(shape) - 2))
    want = scaled * gamma.reshape(per_channel) + beta.reshape(per_channel)

    def build(a: Any, g: Any, b: Any) -> Any:
        g, b = ops.rebind(g, [channels]), ops.rebind(b, [channels])
        return ops.group_norm(ops.rebind(a, shape), g, b, groups, 1e-3)

    return build, want.astype(np.float32)


@prop("reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "broadcast_to")
def views(draw: Draw, name: str) -> Any:
    shape = draw.shape(low=0 if name in ("unsqueeze", "reshape", "broadcast_to") else 1)
    rank = len(shape)
    x = draw.tensor(shape)
    if name == "reshape":
        flat = int(np.prod(shape))
        last = draw.choice([d for d in (1, 2, 3, 5, 8, 17) if flat % d == 0])
        goal = (last, flat // last)
        return lambda a: ops.reshape(ops.rebind(a, shape), goal), x.reshape(goal)
    if name == "flatten":
        first = draw.int(0, rank - 1)
        last = draw.int(first, rank - 1)
        merged = int(np.prod(shape[first : last + 1]))
        want = x.reshape(*shape[:first], merged, *shape[last + 1 :])
        return lambda a: ops.flatten(a, first, last), want
    if name == "squeeze":
        axis = draw.int(0, rank)
        x = draw.arrays[-1] = np.expand_dims(x, axis)
        at = draw.choice([axis, axis - x.ndim])
        return lambda a: ops.squeeze(ops.rebind(a, x.shape), at), x.squeeze(axis)
    if name == "unsqueeze":
        axis = draw.int(-rank - 1, rank)
        return lambda a: ops.unsqueeze(a, axis), np.expand_dims(x, axis)
    if name == "transpose":
        one, other = draw.axis(rank), draw.axis(rank)
        return lambda a: ops.transpose(a, one, other), np.swapaxes(x, one, other)
    if name == "permute":
        order = draw(st.permutations(range(rank)))
        return lambda a: ops.permute(a, list(order)), np.transpose(x, order)
    lead = draw.shape(high=2)
    narrow = tuple(1 if draw.choice([True, False]) else size for size in shape)
    x = draw.arrays[-1] = x[tuple(slice(0, n) for n in narrow)]
    goal = (*lead, *[s if n == 1 else n for s, n in zip(shape, x.shape, strict=True)])
    return lambda a: ops.broadcast_to(ops.rebind(a, x.shape), goal), np.broadcast_to(x, goal)


@prop("slice_tensor")
def slices(draw: Draw, name: str) -> Any:
    shape = draw.shape(low=1, least=1)
    x = draw.tensor(shape)
    index: list[Any] = []
    # indices of the first axes, and after an ellipsis of the last ones
    count = draw.int(0, len(shape))
    front = draw.int(0, count)
    for size in (*shape[:front], *shape[len(shape) - (count - front) :]):
        if draw.choice([True, False, False, False]):
            index.append(draw.axis(size))
            continue
        step = draw.choice([1, 1, 2, 3, -1, -2])
        beyond = int(step < 0)
        bounds = st.one_of(st.none(), st.integers(-size - beyond, size - beyond))
        index.append(slice(draw(bounds), draw(bounds), step))
    if count > front or draw.choice([True, False]):
        index.insert(front, ...)
    for _ in range(draw.int(0, 2)):
        index.insert(draw.int(0, len(index)), None)
    # bounds are checked against symbolic sizes at run time
    return lambda a: ops.slice_tensor(ops.rebind(a, shape), index), x[tuple(index)]


@prop("concat", "stack")
def joins(draw: Draw, name: str) -> Any:
    shape = draw.shape(low=1)
    axis = draw.axis(len(shape)) if name == "concat" else draw.int(-len(shape) - 1, len(shape))
    parts = []
    for _ in range(draw.int(1, 4)):
        own = list(shape)
        if name == "concat":
            own[axis] = draw.int(0, 4)
        parts.append(draw.floats(tuple(own)))
    join = getattr(np, {"concat": "concatenate", "stack": "stack"}[name])
    return lambda *a: getattr(ops, name)(list(a), axis=axis), join(parts, axis=axis)


@prop("split", "chunk")
def parts(draw: Draw, name: str) -> Any:
    shape = list(draw.shape(low=1))
    axis = draw.axis(len(shape))
    if name == "chunk":
        count = draw.int(1, 4)
        shape[axis] *= count
        x = draw.tensor(tuple(shape))
        return lambda a: ops.chunk(ops.rebind(a, shape), count, axis), np.split(x, count, axis)
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    shape[axis] = sum(sizes)
    x = draw.tensor(tuple(shape))
    want = np.split(x, np.cumsum(sizes)[:-1], axis)
    return lambda a: ops.split(ops.rebind(a, shape), sizes, axis), want


@prop("tile", "pad", "repeat_interleave")
def grows(draw: Draw, name: str) -> Any:
    shape = draw.shape(low=1, high=3)
    x = draw.floats(shape)
    if name == "tile":
        times = draw(st.lists(st.integers(1, 3), min_size=len(shape), max_size=len(shape)))
        return lambda a: ops.tile(a, times), np.tile(x, times)
    if name == "repeat_interleave":
        count = draw.int(1, 3)
        axis = draw.choice([None, draw.axis(len(shape))])
        return lambda a: ops.repeat_interleave(a, count, axis), np.repeat(x, count, axis)
    widths = draw(st.lists(st.integers(0, 3), min_size=2 * len(shape), max_size=2 * len(shape)))
    pairs = list(zip(widths[::2], widths[1::2], strict=True))
    return lambda a: ops.pad(a, widths, value=1.5), np.pad(x, pairs, constant_values=1.5)


@prop("gather", "gather_nd", "scatter", "scatter_nd")
def indexing(draw: Draw, name: str) -> Any:
    shape = draw.shape(low=1, high=3, least=1)
    rank = len(shape)
    x = draw.floats(shape)
    dtype = draw.choice([np.int64, np.int32])
    if name == "gather":
        axis = draw.axis(rank)
        at = draw.ints(draw.shape(high=2), -shape[axis], shape[axis], dtype)
        return lambda a, i: ops.gather(a, i, axis), np.take(x, at, axis)
    if name == "scatter":
        axis = draw.axis(rank)
        own = list(shape)
        own[axis] = draw.int(0, shape[axis])
        order = np.argsort(draw.rng.random(shape), axis=axis)  # no duplicate index
        at = draw.add(np.take(order, range(own[axis]), axis).astype(dtype))
        updates = draw.floats(tuple(own))
        want = x.copy()
        np.put_along_axis(want, at.astype(np.int64), updates, axis)
        draw.arrays = [x, updates, at]
        return lambda a, u, i: ops.scatter(a, u, i, axis), want
    draw.static = True
    depth = draw.int(1, rank)
    lead = draw.shape(low=1, high=2)
    if name == "gather_nd":
        at = np.stack([draw.rng.integers(0, s, lead) for s in shape[:depth]], -1).astype(dtype)
        at = draw.add(at)
        want = x[tuple(np.moveaxis(at, -1, 0))]
        return lambda a, i: ops.gather_nd(a, i), want
    cells = int(np.prod(shape[:depth]))
    count = draw.int(0, cells)
    chosen = draw.rng.permutation(cells)[:count]
    at = draw.add(np.stack(np.unravel_index(chosen, shape[:depth]), -1).astype(dtype))
    updates = draw.floats((count, *shape[depth:]))
    want = x.copy()
    want[tuple(np.moveaxis(at, -1, 0))] = updates
    draw.arrays = [x, updates, at]
    return lambda a, u, i: ops.scatter_nd(a, u, i), want


COMBINE = {"add": np.add, "max": np.maximum, "min": np.minimum, "mul": np.multiply}


@prop(*(f"scatter_{way}{name}" for way in ("", "nd_") for name in COMBINE))
def scatter_reductions(draw: Draw, name: str) -> Any:
    shape = draw.shape(low=1, high=3, least=1)
    x = draw.floats(shape)
    dtype = draw.choice([np.int64, np.int32])
    function = COMBINE[name.rpartition("_")[2]]
    want = x.astype(np.float64)
    # few places for many updates: indices come several times
    if "_nd_" in name:
        draw.static = True
        depth = draw.int(1, len(shape))
        count = draw.int(0, 12)
        at = np.stack([draw.rng.integers(-s, s, count) for s in shape[:depth]], -1).astype(dtype)
        updates = draw.floats((count, *shape[depth:]))
        function.at(want, tuple(np.moveaxis(at, -1, 0)), updates)
        draw.arrays = [x, updates, at]
        return lambda a, u, i: getattr(ops, name)(a, u, i), want.astype(np.float32)
    axis = draw.axis(len(shape))
    own = list(shape)
    own[axis] = draw.int(0, 12)
    at = draw.rng.integers(-shape[axis], shape[axis], own).astype(dtype)
    updates = draw.floats(tuple(own))
    places: list[Any] = list(np.indices(own, sparse=True))
    places[axis] = at
    function.at(want, tuple(places), updates)
    draw.arrays = [x, updates, at]
    return lambda a, u, i: getattr(ops, name)(a, u, i, axis), want.astype(np.float32)


@prop("nonzero", "masked_scatter")
def masks(draw: Draw, name: str) -> Any:
    shape = draw.shape(low=1, high=3)
    mask = draw.rng.integers(0, 2, shape).astype(bool)
    if name == "nonzero":
        draw.add(mask)
        return lambda m: ops.nonzero(m, "found"), np.argwhere(mask)
    x = draw.floats(shape)
    draw.add(mask)
    updates = draw.floats((int(mask.sum()),))
    want = x.copy()
    want[mask] = updates
    return lambda a, m, u: ops.masked_scatter(a, m, u, out_dim="found"), want


@prop("top_k", "bottom_k", "argsort")
def order(draw: Draw, name: str) -> Any:
    if name == "argsort":
        x = draw.floats((draw.int(0, 40),))
        ascending = draw.choice([True, False])
        want = np.argsort(x if ascending else -x, kind="stable")
        return lambda a: ops.argsort(a, ascending=ascending), want
    shape = draw.shape(low=1, high=3, least=1)
    axis = draw.axis(len(shape))
    count = draw.int(1, shape[axis])
    x = draw.floats(shape)
    keys = x if name == "bottom_k" else -x
    at = np.take(np.argsort(keys, axis=axis, kind="stable"), range(count), axis)
    want = [np.take_along_axis(x, at, axis), at]
    return lambda a: getattr(ops, name)(ops.rebind(a, shape), count, axis), want


@prop("range")
def ranges(draw: Draw, name: str) -> Any:
    start, step = draw.int(-9, 9), draw.choice([1, 2, 5, -1, -3])
    stop = start + step * draw.int(0, 9)
    dtype = draw.choice([DType.int32, DType.int64, DType.float32])
    want = np.arange(start, stop, step).astype(dtype.to_numpy())
    x = draw.floats((1,))
    return lambda a: (ops.range(start, stop, step, dtype=dtype, device=DEVICE), a), [want, x]


@prop("matmul")
def matmul(draw: Draw, name: str) -> Any:
    m, n, size = (draw.choice([0, 1, 2, 5, 17, 33]) for _ in range(3))
    lead = draw.shape(high=2)
    x = draw.floats((*lead, m, size))
    y = draw.floats((*draw.broadcastable(lead), size, n))
    return ops.matmul, np.matmul(x.astype(np.float64), y).astype(np.float32)


@prop("outer", "as_interleaved_complex", "band_part")
def forms(draw: Draw, name: str) -> Any:
    if name == "outer":
        x, y = draw.floats((draw.int(0, 9),)), draw.floats((draw.int(0, 9),))
        return ops.outer, np.outer(x, y)
    if name == "band_part":
        shape = draw.shape(low=2, high=3)
        x = draw.floats(shape)
        lower, upper = (draw.choice([None, 0, max(size - 1, 0)]) for size in shape[-2:])
        row, column = np.indices(shape[-2:])
        inside = (lower is None or (row - column <= lower)) & (
            upper is None or (column - row <= upper)
        )
        return lambda a: ops.band_part(a, lower, upper), np.where(inside, x, 0).astype(np.float32)
    shape = draw.shape(low=1, high=3, least=1)
    x = draw.floats((*shape[:-1], 2 * shape[-1]))
    goal = (*x.shape[:-1], shape[-1], 2)
    return lambda a: ops.as_interleaved_complex(ops.rebind(a, x.shape)), x.reshape(goal)


@prop("conv2d", "conv2d_transpose", "conv3d", "max_pool2d", "avg_pool2d")
def windows(draw: Draw, name: str) -> Any:
    import torch
    from torch.nn import functional

    draw.static = True
    axes = 3 if name == "conv3d" else 2
    kernel = [draw.int(1, 3) for _ in range(axes)]
    stride = [draw.int(1, 3) for _ in range(axes)]
    dilation = [draw.int(1, 2) for _ in range(axes)]
    padding = [draw.int(0, k // 2) for k in kernel]
    sizes = [draw.int((k - 1) * d + 1, 9) for k, d in zip(kernel, dilation, strict=True)]
    groups = draw.choice([1, 1, 2]) if name in ("conv2d", "conv3d") else 1
    inner, outer = draw.int(1, 3), draw.int(1, 3)
    x = draw.floats((draw.int(1, 2), *sizes, inner * groups))
    last_first = (0, axes + 1, *range(1, axes + 1))
    first_last = (0, *range(2, axes + 2), 1)
    image = torch.from_numpy(np.ascontiguousarray(x.transpose(last_first)))
    both = tuple(p for pad in padding for p in (pad, pad))
    if name == "max_pool2d":
        want = functional.max_pool2d(image, kernel, stride, padding, dilation)

        def build(a):
            return ops.max_pool2d(a, tuple(kernel), tuple(stride), tuple(dilation), tuple(padding))

        return build, want.numpy().transpose(first_last)
    if name == "avg_pool2d":
        want = functional.avg_pool2d(image, kernel, stride, padding)
        build = lambda a: ops.avg_pool2d(a, tuple(kernel), tuple(stride), (1, 1), tuple(padding))  # noqa: E731
        return build, want.numpy().transpose(first_last)
    if name == "conv2d_transpose":
        w = draw.floats((*kernel, outer, inner))
        weight = torch.from_numpy(np.ascontiguousarray(w.transpose(3, 2, 0, 1)))
        want = functional.conv_transpose2d(image, weight, None, stride, padding, 0, 1, dilation)
        build = lambda a, f: ops.conv2d_transpose(a, f, tuple(stride), tuple(dilation), both)  # noqa: E731
        return build, want.numpy().transpose(first_last)
    w = draw.floats((*kernel, inner, outer * groups))
    weight = torch.from_numpy(np.ascontiguousarray(w.transpose(axes + 1, axes, *range(axes))))
    run = functional.conv2d if axes == 2 else functional.conv3d
    # torch 2.13 reads wrong elements in float32 for one channel and a stride along the first of three axes
    want = run(image.double(), weight.double(), None, stride, padding, dilation, groups).float()
    build = lambda a, f: getattr(ops, name)(a, f, tuple(stride), tuple(dilation), both, groups)  # noqa: E731
    return build, want.numpy().transpose(first_last)


def check(data: st.DataObject, name: str) -> None:
    draw = Draw(data)
    build, want = PROPERTIES[name](draw)
    wanted = list(want) if isinstance(want, list | tuple) else [want]
    with Graph(name, input_types=draw.types()) as graph:
        made = build(*[value.tensor for value in graph.inputs])
        made = list(made) if isinstance(made, list | tuple) else [made]
        graph.output(*made)
    assert len(made) == len(wanted)
    interpreted = _interpreter.run(graph, draw.arrays)
    executed = [out.to_numpy() for out in SESSION.load(graph).execute(*draw.arrays)]
    for who, results in (("interpreter", interpreted), ("engine", executed)):
        for got, expected in zip(results, wanted, strict=True):
            try:
                assert got.shape == np.shape(expected)
                if got.dtype.kind == "f":
                    assert_close(got, np.asarray(expected), dtype=got.dtype, scale=16.0)
                else:
                    np.testing.assert_array_equal(got, expected)
            except AssertionError as error:
                shapes = [(a.shape, str(a.dtype)) for a in draw.arrays]
                raise AssertionError(f"{who}, {name} of {shapes}: {error}\n{graph}") from None


@pytest.mark.parametrize("name", sorted(PROPERTIES))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_property(name: str, data: st.DataObject) -> None:
    check(data, name)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(PROPERTIES))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_property_long(name: str, data: st.DataObject) -> None:
    check(data, name)


def test_each_op_has_a_property() -> None:
    public = {name for name in ops.__all__ if name[0].islower() and name != "Callable"}
    assert public - set(PROPERTIES) - set(ELSEWHERE) == set()
