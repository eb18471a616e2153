"""The table of ops: for each its staging, operands and expected results.

Every way to run a graph is tested with the same table: the NumPy interpreter, the compiled engine.
`check` stages a case with static or symbolic dimensions, runs it with any `run(graph, inputs, weights)`,
and compares with a reference in float64 (NumPy or torch).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, TensorType, ops
from max.graph.ops.elementwise import bits
from tests.ops.case import (
    ALL,
    BOOL,
    FLOATS,
    INTS,
    NUMBERS,
    Array,
    OpCase,
    Run,
)
from tests.ops.case import torch_reference as _torch
from tests.ops.detection import DETECTION
from tests.ops.quantized import QUANTIZED
from tests.ops.selection import SELECTION
from tests.ops.spatial import SPATIAL
from tests.tolerance import assert_close


def _unary(name: str, function: Any, dtypes: tuple[str, ...] = FLOATS, **options: Any) -> OpCase:
    build = options.pop("build", None) or getattr(ops, name)
    return OpCase(name, build, function, (("a", "b"),), dtypes, **options)


def _binary(name: str, function: Any, dtypes: tuple[str, ...] = NUMBERS, **options: Any) -> OpCase:
    build = options.pop("build", None) or getattr(ops, name)
    shape = ("a", "b")
    return OpCase(name, build, function, (shape, shape), dtypes, **options)


def _floor_div(x: Array, y: Array) -> Array:
    return np.floor_divide(x, y)


def _shifted(left: bool) -> Any:
    """Shifts of Python's integers, cut to the width of the dtype."""

    def reference(x: Array, y: Array) -> Array:
        width, dtype = x.dtype.itemsize * 8, x.dtype
        results = np.zeros(x.shape, dtype)
        for place in np.ndindex(x.shape):
            number, amount = int(x[place]), int(y[place])
            amount = amount if 0 <= amount < width else width
            bits = (number << amount if left else number >> amount) & ((1 << width) - 1)
            results[place] = np.array(bits, f"u{dtype.itemsize}").view(dtype)
        return results

    return reference


def _cumsum(x: Array, exclusive: bool = False, reverse: bool = False) -> Array:
    x = x[:, ::-1] if reverse else x
    total = np.cumsum(x, axis=1, dtype=x.dtype)
    total = total - x if exclusive else total
    return total[:, ::-1] if reverse else total


def _top_k(x: Array, k: int, sign: int = 1) -> tuple[Array, Array]:
    # sorts pairs (-value, index), an order independent of the interpreter's
    indices = np.array(
        [sorted(range(len(row)), key=lambda i: (-int(row[i]), i))[:k] for row in x], np.int64
    ).reshape(len(x), k)
    return sign * np.take_along_axis(x, indices, 1), indices


def _rms_norm(x: Array, w: Array, offset: float = 0.0) -> Array:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5) * (w + offset)


def _erf(torch: Any, x: Any) -> Any:
    return torch.special.erf(x)


POSITIVE = (0.05, 8.0)
UNIT = (-0.95, 0.95)

ELEMENTWISE = (
    _unary("abs", np.abs, NUMBERS),
    _unary("negate", np.negative, FLOATS + ("int8", "int16", "int32", "int64")),
    _unary("relu", lambda x: np.maximum(x, 0), NUMBERS),
    _unary("exp", np.exp),
    _unary("log", np.log, domain=POSITIVE),
    _unary("log1p", np.log1p, domain=(-0.9, 8.0)),
    _unary("sqrt", np.sqrt, domain=POSITIVE),
    _unary("rsqrt", lambda x: 1 / np.sqrt(x), domain=POSITIVE),
    _unary("tanh", np.tanh),
    _unary("sin", np.sin, domain=(-30.0, 30.0)),
    _unary("cos", np.cos, domain=(-30.0, 30.0)),
    _unary("acos", lambda x: np.arccos(np.clip(x, -1, 1)), domain=(-1.5, 1.5)),
    _unary("atanh", np.arctanh, domain=UNIT),
    _unary("erf", _torch(_erf)),
    _unary("floor", np.floor, domain=(-50.0, 50.0)),
    _unary("ceil", np.ceil, domain=(-50.0, 50.0)),
    _unary("round", np.rint, domain=(-50.0, 50.0)),
    _unary("trunc", np.trunc, domain=(-50.0, 50.0)),
    _unary("sigmoid", _torch(lambda t, x: t.sigmoid(x)), domain=(-30.0, 30.0)),
    _unary("silu", _torch(lambda t, x: t.nn.functional.silu(x)), domain=(-30.0, 30.0)),
    _unary("gelu", _torch(lambda t, x: t.nn.functional.gelu(x))),
    _unary(
        "gelu_tanh",
        _torch(lambda t, x: t.nn.functional.gelu(x, approximate="tanh")),
        build=lambda x: ops.gelu(x, "tanh"),
    ),
    _unary(
        "gelu_quick",
        _torch(lambda t, x: x * t.sigmoid(1.702 * x)),
        build=lambda x: ops.gelu(x, "quick"),
    ),
    _unary("is_nan", lambda x: np.isnan(x), ALL),
    _unary("is_inf", lambda x: np.isinf(x), ALL),
    _unary("logical_not", np.logical_not, BOOL),
    _binary("add", np.add),
    _binary("sub", np.subtract),
    _binary("mul", np.multiply, ALL),
    _binary("div", np.divide, NUMBERS, domain=POSITIVE),
    _binary(
        "floor_div",
        _floor_div,
        ("float32", "float64", *INTS),
        domain=POSITIVE,
        build=lambda x, y: x // y,
    ),
    _binary("mod", np.mod, ("float32", "float64", *INTS), domain=POSITIVE, scale=4.0),
    _binary("pow", np.power, ("float32", "float64"), domain=(0.1, 3.0), scale=4.0),
    _binary("max", np.maximum, ALL),
    _binary("min", np.minimum, ALL),
    _binary("equal", np.equal, ALL),
    _binary("not_equal", np.not_equal, ALL),
    _binary("greater", np.greater),
    _binary("greater_equal", np.greater_equal),
    _binary("logical_and", np.logical_and, BOOL),
    _binary("logical_or", np.logical_or, BOOL),
    _binary("logical_xor", np.logical_xor, BOOL),
    _binary("bit_and", np.bitwise_and, INTS, build=bits.bit_and),
    _binary("bit_or", np.bitwise_or, INTS, build=bits.bit_or),
    _binary("bit_xor", np.bitwise_xor, INTS, build=bits.bit_xor),
    _binary("shift_left", _shifted(True), INTS, build=bits.shift_left, scale=9.0),
    _binary("shift_right", _shifted(False), INTS, build=bits.shift_right, scale=9.0),
    OpCase(
        "where",
        ops.where,
        np.where,
        (("a", "b"), ("a", "b"), ("a", "b")),
        ALL,
        fixed={0: ("bool", (0, 1))},
    ),
    OpCase("add_broadcast", ops.add, np.add, (("a", 1, "c"), ("b", 1)), NUMBERS),
    OpCase("mul_scalar", lambda x: x * 3, lambda x: x * 3, (("a", "b"),), FLOATS),
    OpCase("rsub_scalar", lambda x: 2 - x, lambda x: 2 - x, (("a", "b"),), FLOATS),
    OpCase("mul_rank_0", ops.mul, np.multiply, ((), ()), NUMBERS),
)


def _cast(target: DType, dtypes: tuple[str, ...], **options: Any) -> OpCase:
    def reference(x: Array) -> Array:
        if target is DType.bool:
            return x != 0
        return x if target.is_float() else np.trunc(x).astype(target.to_numpy())

    name = f"cast_{target.name}"
    return OpCase(name, lambda x: ops.cast(x, target), reference, (("a", "b"),), dtypes, **options)


CASTS = (
    _cast(DType.float32, ALL),
    _cast(DType.float64, ALL),
    _cast(DType.bfloat16, ALL),
    _cast(DType.float16, ALL),
    _cast(DType.int32, ALL, domain=(-50.0, 50.0)),
    _cast(DType.int64, ALL, domain=(-50.0, 50.0)),
    _cast(DType.uint8, FLOATS, domain=(0.0, 50.0)),
    _cast(DType.int8, ALL, domain=(-50.0, 50.0)),
    _cast(DType.bool, NUMBERS, domain=(-1.0, 1.0)),
)

MOVES = ("float32", "bfloat16", "int64", "uint8", "bool")

SHAPES = (
    OpCase(
        "broadcast_to",
        lambda x: ops.broadcast_to(x, [3, x.shape[0], 4]),
        lambda x: np.broadcast_to(x, (3, x.shape[0], 4)),
        (("a", 1),),
        MOVES,
    ),
    OpCase(
        "reshape",
        lambda x: ops.reshape(x, [x.shape[1], -1, 2]),
        lambda x: x.reshape(x.shape[1], -1, 2),
        (("a", "b", 4),),
        MOVES,
    ),
    OpCase(
        "flatten",
        lambda x: ops.flatten(x, 1, 2),
        lambda x: x.reshape(x.shape[0], -1),
        (("a", "b", "c"),),
        MOVES,
        sizes=(1, 2, 3, 5),
    ),
    OpCase("transpose", lambda x: ops.transpose(x, 0, 1), np.transpose, (("a", "b"),), MOVES),
    OpCase(
        "permute",
        lambda x: ops.permute(x, [2, 0, 1]),
        lambda x: np.transpose(x, (2, 0, 1)),
        (("a", "b", "c"),),
        MOVES,
        sizes=(1, 2, 3, 5),
    ),
    OpCase("squeeze", lambda x: ops.squeeze(x, 1), lambda x: x[:, 0], (("a", 1, "b"),), MOVES),
    OpCase(
        "unsqueeze", lambda x: ops.unsqueeze(x, -1), lambda x: x[..., None], (("a", "b"),), MOVES
    ),
    OpCase("slice", lambda x: x[1:, 2:7:2], lambda x: x[1:, 2:7:2], (("a", 9),), MOVES),
    OpCase("slice_end", lambda x: x[:-1, -3:], lambda x: x[:-1, -3:], (("a", 9),), MOVES),
    OpCase("slice_reverse", lambda x: x[::-1, ::-2], lambda x: x[::-1, ::-2], (("a", "b"),), MOVES),
    OpCase(
        "slice_int", lambda x: x[0, None, -1], lambda x: x[0, None, -1], (("a", "b", 3),), MOVES
    ),
    OpCase(
        "slice_dynamic",
        lambda x, i: x[i, (slice(i, None, None), Dim("rest"))],
        lambda x, i: x[i, int(i) :],
        (("a", "b"), ()),
        MOVES,
        fixed={1: ("int64", (0, 1))},
        sizes=(2, 3, 5, 17),
    ),
    OpCase(
        "concat",
        lambda x, y: ops.concat([x, y, x], axis=1),
        lambda x, y: np.concatenate([x, y, x], 1),
        (("a", "b"), ("a", "c")),
        MOVES,
    ),
    OpCase(
        "stack",
        lambda x, y: ops.stack([x, y], axis=-1),
        lambda x, y: np.stack([x, y], -1),
        (("a", "b"), ("a", "b")),
        MOVES,
    ),
    OpCase(
        "split",
        lambda x: ops.split(x, [2, 1, 4], axis=1),
        lambda x: np.split(x, [2, 3], 1),
        (("a", 7),),
        MOVES,
    ),
    OpCase("chunk", lambda x: ops.chunk(x, 3, 1), lambda x: np.split(x, 3, 1), (("a", 6),), MOVES),
    OpCase(
        "tile", lambda x: ops.tile(x, [2, 3]), lambda x: np.tile(x, (2, 3)), (("a", "b"),), MOVES
    ),
    OpCase(
        "repeat_interleave",
        lambda x: ops.repeat_interleave(x, 3, 1),
        lambda x: np.repeat(x, 3, 1),
        (("a", "b"),),
        MOVES,
    ),
    OpCase(
        "repeat_interleave_tensor",
        lambda x, r: ops.repeat_interleave(x, r, 0, out_dim="total"),
        lambda x, r: np.repeat(x, r, 0),
        (("a", "b"), ("a",)),
        MOVES,
        fixed={1: ("int64", (0, 4))},
    ),
    OpCase(
        "pad",
        lambda x: ops.pad(x, [1, 0, 2, 3], value=1),
        lambda x: np.pad(x, ((1, 0), (2, 3)), constant_values=1),
        (("a", "b"),),
        ("float32", "bfloat16", "int64", "uint8"),
    ),
    OpCase(
        "as_interleaved_complex",
        ops.as_interleaved_complex,
        lambda x: x.reshape(*x.shape[:-1], -1, 2),
        (("a", 6),),
        MOVES,
    ),
    OpCase(
        "band_part",
        lambda x: ops.band_part(x, 1, 2),
        lambda x: np.triu(np.tril(x, 2), -1),
        (("a", "b"),),
        ("float32", "bfloat16", "int64"),
        sizes=(3, 5, 17),
    ),
    OpCase(
        "range",
        lambda x: ops.range(0, x.shape[0], dtype=DType.int64, device=DeviceRef.CPU()),
        lambda x: np.arange(x.shape[0]),
        (("a",),),
        ("float32",),
    ),
    OpCase(
        "range_float",
        lambda x: ops.range(1.0, -2.0, -0.25, dtype=DType.float32, device=DeviceRef.CPU()) + x,
        lambda x: np.arange(1.0, -2.0, -0.25) + x,
        ((),),
        ("float32",),
    ),
    OpCase(
        "shape_to_tensor",
        lambda x: ops.shape_to_tensor([x.shape[0] * 2 + 1, x.shape[1]]),
        lambda x: np.array([x.shape[0] * 2 + 1, x.shape[1]]),
        (("a", "b"),),
        ("float32",),
    ),
)

GATHERS = (
    OpCase(
        "gather",
        lambda x, i: ops.gather(x, i, 0),
        lambda x, i: np.take(x, i, 0),
        ((5, "a"), ("b", "c")),
        MOVES,
        fixed={1: ("int64", (-5, 4))},
        sizes=(1, 2, 3, 17),
    ),
    OpCase(
        "gather_axis_1",
        lambda x, i: ops.gather(x, i, 1),
        lambda x, i: np.take(x, i, 1),
        (("a", 5, "b"), ("c",)),
        MOVES,
        fixed={1: ("uint32", (0, 4))},
        sizes=(1, 2, 3, 17),
    ),
    OpCase(
        "gather_nd",
        lambda x, i: ops.gather_nd(x, i, batch_dims=1),
        lambda x, i: np.stack([x[n][tuple(np.moveaxis(i[n], -1, 0))] for n in range(len(x))]),
        (("a", 4, 4, "b"), ("a", "c", 2)),
        MOVES,
        fixed={1: ("int32", (0, 3))},
        sizes=(1, 2, 3),
    ),
    OpCase(
        "scatter",
        lambda x, u: ops.scatter(x, u, np.array([[2, 0], [1, 3]]), axis=1),
        lambda x, u: np.array(
            [
                [u[r, [2, 0].index(c)] if c in (2, 0) else x[r, c] for c in range(4)]
                if r == 0
                else [u[r, [1, 3].index(c)] if c in (1, 3) else x[r, c] for c in range(4)]
                for r in range(2)
            ]
        ),
        ((2, 4), (2, 2)),
        MOVES,
    ),
    OpCase(
        "scatter_nd",
        lambda x, u: ops.scatter_nd(x, u, np.array([[3], [1]])),
        lambda x, u: np.stack([x[0], u[1], x[2], u[0]]),
        ((4, "a"), (2, "a")),
        MOVES,
    ),
)


def _scattered(reduction: Any, axis: int) -> Any:
    """Updates applied one after another, as the op says; of updates of equal indices each counts."""

    def reference(x: Array, updates: Array, indices: Array) -> Array:
        result = x.copy()
        for at in np.ndindex(*indices.shape):
            to = list(at)
            to[axis] = indices[at]
            result[tuple(to)] = reduction(result[tuple(to)], updates[at])
        return result

    return reference


def _scattered_nd(reduction: Any) -> Any:
    def reference(x: Array, updates: Array, indices: Array) -> Array:
        result = x.copy()
        for at in np.ndindex(*indices.shape[:-1]):
            to = tuple(indices[at])
            result[to] = reduction(result[to], updates[at])
        return result

    return reference


_COMBINE = {"add": np.add, "max": np.maximum, "min": np.minimum, "mul": np.multiply}
SCATTERS = (
    *(
        OpCase(
            f"scatter_{name}",
            lambda x, u, i, name=name: getattr(ops, f"scatter_{name}")(x, u, i, axis=0),
            _scattered(function, 0),
            ((5, "a"), ("b", "a"), ("b", "a")),
            NUMBERS,
            fixed={2: ("int64", (-5, 4))},
            domain=(-2.0, 2.0),
            scale=16.0,
        )
        for name, function in _COMBINE.items()
    ),
    *(
        OpCase(
            f"scatter_{name}_last_axis",
            lambda x, u, i, name=name: getattr(ops, f"scatter_{name}")(x, u, i),
            _scattered(function, 1),
            (("a", 3), ("a", "b"), ("a", "b")),
            fixed={2: ("int32", (-3, 2))},
            domain=(-2.0, 2.0),
            scale=16.0,
        )
        for name, function in _COMBINE.items()
    ),
    *(
        OpCase(
            f"scatter_nd_{name}",
            lambda x, u, i, name=name: getattr(ops, f"scatter_nd_{name}")(x, u, i),
            _scattered_nd(function),
            ((2, 3, "a"), ("b", "a"), ("b", 2)),
            NUMBERS,
            fixed={2: ("int64", (-2, 1))},
            domain=(-2.0, 2.0),
            scale=16.0,
        )
        for name, function in _COMBINE.items()
    ),
    OpCase(
        "scatter_nd_elements",
        ops.scatter_nd_add,
        _scattered_nd(np.add),
        ((3, 2), ("a", "b"), ("a", "b", 2)),
        ("float32", "int32"),
        fixed={2: ("uint32", (0, 1))},
        scale=64.0,
    ),
)

_AB = (("a", "b"),)

REDUCTIONS = (
    OpCase("sum", ops.sum, lambda x: np.sum(x, -1, keepdims=True, dtype=x.dtype), _AB, NUMBERS),
    OpCase("sum_axis_0", lambda x: ops.sum(x, 0), lambda x: np.sum(x, 0, keepdims=True), _AB),
    OpCase("mean", ops.mean, lambda x: np.mean(x, -1, keepdims=True), _AB),
    OpCase(
        "mean_int",
        lambda x: ops.mean(x, 0),
        lambda x: np.floor(np.mean(x.astype(np.float64), 0, keepdims=True)).astype(x.dtype),
        _AB,
        ("int32", "int64"),
    ),
    OpCase("reduce_max", ops.max, lambda x: np.max(x, -1, keepdims=True), _AB, ALL),
    OpCase(
        "reduce_min",
        lambda x: ops.min(x, axis=0),
        lambda x: np.min(x, 0, keepdims=True),
        _AB,
        ALL,
    ),
    OpCase(
        "prod",
        ops.prod,
        lambda x: np.prod(x, -1, keepdims=True, dtype=x.dtype),
        _AB,
        NUMBERS,
        domain=(-1.2, 1.2),
        scale=8.0,
    ),
    OpCase(
        "prod_axis_0",
        lambda x: ops.prod(x, 0),
        lambda x: np.prod(x, 0, keepdims=True, dtype=x.dtype),
        _AB,
        ("float32", "int16", "uint8"),
        domain=(-1.2, 1.2),
        scale=8.0,
    ),
    OpCase("argmax", ops.argmax, lambda x: np.argmax(x, -1, keepdims=True), _AB, NUMBERS),
    OpCase(
        "argmin", lambda x: ops.argmin(x, 0), lambda x: np.argmin(x, 0, keepdims=True), _AB, NUMBERS
    ),
    OpCase(
        "var",
        lambda x: x.var(),
        lambda x: np.var(x, -1, keepdims=True),
        _AB,
        ("float32", "float64"),
    ),
    OpCase(
        "stdev",
        lambda x: x.stdev(0),
        lambda x: np.std(x, 0, keepdims=True),
        _AB,
        ("float32",),
        scale=50.0,
    ),
    OpCase("cumsum", ops.cumsum, _cumsum, _AB, ("float32", "float64", "int32", "int64"), scale=4.0),
    OpCase(
        "cumsum_exclusive",
        lambda x: ops.cumsum(x, exclusive=True),
        lambda x: _cumsum(x, exclusive=True),
        _AB,
        ("float32", "int64"),
        scale=4.0,
    ),
    OpCase(
        "cumsum_reverse",
        lambda x: ops.cumsum(x, axis=1, exclusive=True, reverse=True),
        lambda x: _cumsum(x, exclusive=True, reverse=True),
        _AB,
        ("float32", "int64"),
        scale=4.0,
    ),
    OpCase("softmax", ops.softmax, _torch(lambda t, x: t.softmax(x, -1)), _AB),
    OpCase(
        "softmax_axis_0", lambda x: ops.softmax(x, 0), _torch(lambda t, x: t.softmax(x, 0)), _AB
    ),
    OpCase("logsoftmax", ops.logsoftmax, _torch(lambda t, x: t.log_softmax(x, -1)), _AB),
    OpCase(
        "top_k",
        lambda x: ops.top_k(x, 3),
        lambda x: _top_k(x, 3),
        (("a", "b"),),
        ("int32", "int64"),
        domain=(-6.0, 6.0),
        sizes=(3, 5, 17, 33),
    ),
    OpCase(
        "bottom_k",
        lambda x: ops.bottom_k(x, 3, axis=0),
        lambda x: tuple(np.ascontiguousarray(part.T) for part in _top_k(-x.T, 3, -1)),
        (("a", "b"),),
        ("int32", "int64"),
        domain=(-6.0, 6.0),
        sizes=(3, 5, 17, 33),
    ),
)

NORMALIZATIONS = (
    OpCase(
        "group_norm",
        lambda x, g, b: ops.group_norm(x, g, b, 3, 1e-5),
        _torch(lambda t, x, g, b: t.nn.functional.group_norm(x, 3, g, b, 1e-5)),
        (("a", 6, "b", "c"), (6,), (6,)),
        sizes=(2, 3, 5, 7),
        scale=4.0,
    ),
    OpCase(
        "layer_norm",
        lambda x, g, b: ops.layer_norm(x, g, b, 1e-5),
        _torch(lambda t, x, g, b: t.nn.functional.layer_norm(x, g.shape, g, b, 1e-5)),
        (("a", 24), (24,), (24,)),
        scale=4.0,
    ),
    OpCase(
        "rms_norm",
        lambda x, w: ops.rms_norm(x, w, 1e-5),
        _torch(lambda t, x, w: t.nn.functional.rms_norm(x, w.shape, w, 1e-5)),
        (("a", "b", 40), (40,)),
        sizes=(1, 2, 3, 17),
    ),
    OpCase(
        "rms_norm_gemma",
        lambda x, w: ops.rms_norm(x, w, 1e-5, 1.0, multiply_before_cast=False),
        lambda x, w: _rms_norm(x, w, 1.0),
        (("a", 33), (33,)),
    ),
)

MATMULS = (
    OpCase("matmul", ops.matmul, np.matmul, (("m", "k"), ("k", "n")), scale=4.0),
    OpCase("matmul_int", ops.matmul, np.matmul, (("m", "k"), ("k", "n")), ("int32", "int64")),
    OpCase(
        "matmul_batched",
        ops.matmul,
        np.matmul,
        (("b", 1, "m", "k"), (3, "k", "n")),
        ("float32", "bfloat16"),
        sizes=(1, 2, 3, 7),
        scale=4.0,
    ),
    OpCase(
        "matmul_leading",
        ops.matmul,
        np.matmul,
        (("b", "m", "k"), ("k", "n")),
        ("float32",),
        sizes=(1, 3, 5, 17),
        scale=4.0,
    ),
    OpCase("matmul_vectors", ops.matmul, np.matmul, (("k",), ("k",)), ("float32",), scale=4.0),
    OpCase(
        "matmul_vector_left", ops.matmul, np.matmul, (("k",), ("k", "n")), ("float32",), scale=4.0
    ),
    OpCase(
        "matmul_vector_right", ops.matmul, np.matmul, (("m", "k"), ("k",)), ("float32",), scale=4.0
    ),
    OpCase("outer", ops.outer, np.outer, (("a",), ("b",)), ("float32", "int64")),
)

CASES: tuple[OpCase, ...] = (
    *DETECTION,
    *ELEMENTWISE,
    *CASTS,
    *SHAPES,
    *GATHERS,
    *SCATTERS,
    *REDUCTIONS,
    *NORMALIZATIONS,
    *MATMULS,
    *SELECTION,
    *SPATIAL,
    *QUANTIZED,
)

PAIRS = [(case, dtype) for case in CASES for dtype in case.dtypes]
"""Every case with each of its dtypes, for ``pytest.mark.parametrize``."""
IDS = [f"{case}-{dtype}" for case, dtype in PAIRS]


def draw(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, domain: tuple[float, float]
) -> Array:
    """Returns random elements of a dtype: floats and whole numbers within the domain."""
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    if dtype == "bool":
        return np.asarray(rng.random(shape) < 0.5)
    if dtype in FLOATS:
        return np.asarray(rng.uniform(*domain, shape)).astype(kind)
    low, high = (int(np.ceil(bound)) for bound in domain)
    low, high = (max(low, 0), max(high, 1)) if dtype.startswith("u") else (low, high)
    return np.asarray(rng.integers(low, high + 1, shape)).astype(kind)


def inputs_of(case: OpCase, dtype: str, rng: np.random.Generator) -> list[Array]:
    """Returns random operands of a case."""
    letters = {d for shape in case.shapes for d in shape if isinstance(d, str)}
    sizes = {letter: int(rng.choice(case.sizes)) for letter in sorted(letters)}
    arrays: list[Array] = []
    for index, shape in enumerate(case.shapes):
        kind, domain = (case.fixed or {}).get(index, (dtype, case.domain))
        dims = tuple(sizes[d] if isinstance(d, str) else d for d in shape)
        arrays.append(draw(rng, dims, kind, domain))
    return arrays


def stage(case: OpCase, inputs: Sequence[Array], symbolic: bool) -> Graph:
    """Stages a case for inputs of these dtypes and shapes."""
    types = [
        TensorType(
            DType.from_numpy(x.dtype),
            [d if symbolic else n for d, n in zip(shape, x.shape, strict=True)],
            DeviceRef.CPU(),
        )
        for shape, x in zip(case.shapes, inputs, strict=True)
    ]
    with Graph(case.name, input_types=types) as graph:
        result = case.build(*(value.tensor for value in graph.inputs))
        graph.output(*(result if isinstance(result, tuple | list) else (result,)))
    return graph


def expected_of(case: OpCase, inputs: Sequence[Array]) -> list[Array]:
    """Returns the reference's results, in float64 where the operands are floats."""
    wide = [x.astype(np.float64) if x.dtype.name in FLOATS else x for x in inputs]
    with np.errstate(all="ignore"):
        result = case.reference(*wide)
    return list(result) if isinstance(result, tuple | list) else [np.asarray(result)]


def check(case: OpCase, dtype: str, rng: np.random.Generator, run: Run, *, symbolic: bool) -> None:
    """Runs a case on random operands and compares with its reference.

    Args:
        case: The case.
        dtype: The dtype of its operands.
        rng: Where operands and sizes are drawn from.
        run: Runs a graph: ``run(graph, inputs, weights) -> outputs`` (arrays, or objects with ``to_numpy``).
        symbolic: Whether the graph's dimensions are symbols.
    """
    inputs = inputs_of(case, dtype, rng)
    graph = stage(case, inputs, symbolic)
    outputs = run(graph, inputs, {})
    arrays = [x.to_numpy() if hasattr(x, "to_numpy") else np.asarray(x) for x in outputs]
    for array, type_ in zip(arrays, graph.output_types, strict=True):
        assert array.dtype == type_.dtype.to_numpy()
    compare(case, dtype, inputs, arrays)


def compare(case: OpCase, dtype: str, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    """Compares the results of a case with its reference.

    Args:
        case: The case.
        dtype: The dtype of its operands.
        inputs: The operands.
        outputs: The results.
    """
    expected = expected_of(case, inputs)
    assert len(outputs) == len(expected)
    for actual, want in zip(outputs, expected, strict=True):
        assert actual.shape == np.shape(want)
        assert_close(
            actual,
            want,
            None if dtype not in FLOATS else _least(actual.dtype, dtype),
            scale=case.scale,
        )


def _least(actual: Any, dtype: str) -> Any:
    """Returns the least precise of the dtypes of the result and the operands."""
    order = ["float64", "float32", "float16", "bfloat16"]
    name = np.dtype(actual).name
    if name not in order:
        return actual
    return getattr(
        ml_dtypes, name if order.index(name) > order.index(dtype) else dtype, None
    ) or np.dtype(name if order.index(name) > order.index(dtype) else dtype)
