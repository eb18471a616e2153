"""Staging of ops: element types, constants, and error messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from max import _interpreter
from max.driver import Tensor
from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, Shape, TensorType, TensorValue, ops
from max.graph.ops.staging.promotion import promote_types

CPU = DeviceRef.CPU()
NUMBERS = [d for d in DType if d is not DType.bool and not d.is_float8() and d.size_in_bits >= 8]


def tensor(dtype: DType, *shape: Any) -> TensorType:
    return TensorType(dtype, shape, CPU)


# Element types


@pytest.mark.parametrize("y", NUMBERS, ids=lambda d: d.name)
@pytest.mark.parametrize("x", NUMBERS, ids=lambda d: d.name)
def test_promotion_holds_both(x: DType, y: DType) -> None:
    if {x, y} in ({DType.uint64, s} for s in NUMBERS if s.is_signed_integral()):
        with pytest.raises(TypeError, match="add: no integer type holds both"):
            promote_types("add", x, y)
        return
    dtype = promote_types("add", x, y)
    assert dtype is promote_types("add", y, x)
    assert dtype.size_in_bits >= max(x.size_in_bits, y.size_in_bits)
    assert dtype.is_float() == (x.is_float() or y.is_float())
    if not dtype.is_float():
        # as in NumPy
        assert dtype.to_numpy() == np.promote_types(x.to_numpy(), y.to_numpy())


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ("float32", "int32", "float32"),
        ("float32", "int64", "float64"),
        ("bfloat16", "int8", "bfloat16"),
        ("bfloat16", "float16", "float32"),
        ("float8_e4m3fn", "float8_e5m2", "float16"),
        ("bfloat16", "float8_e5m2", "bfloat16"),
        ("bool", "uint8", "uint8"),
        ("uint8", "int8", "int16"),
        ("uint32", "int64", "int64"),
    ],
)
def test_promotion(x: str, y: str, expected: str) -> None:
    assert promote_types("add", DType[x], DType[y]) is DType[expected]


@pytest.mark.parametrize(
    ("build", "dtype", "expected"),
    [
        (lambda x: x + 1, DType.bfloat16, DType.bfloat16),
        (lambda x: 1.5 - x, DType.float16, DType.float16),
        (lambda x: x * 2, DType.uint8, DType.uint8),
        (lambda x: x * np.float64(2.5), DType.float32, DType.float32),
        (lambda x: x * np.array([1.0, 2.0]), DType.bfloat16, DType.bfloat16),
        (lambda x: x + Dim(3), DType.float32, DType.float32),
        (lambda x: x * Dim("n"), DType.float32, DType.float32),
        (lambda x: x * x.shape[0], DType.int32, DType.int64),
        (lambda x: x + x.shape, DType.int32, DType.int64),
        (lambda x: x + Dim(3), DType.uint8, DType.int64),
        (lambda x: x / 2, DType.int32, DType.float64),
        (lambda x: x / 2.5, DType.int64, DType.float64),
        (lambda x: x / x, DType.int8, DType.float64),
        (lambda x: x / ops.cast(x, DType.bfloat16), DType.int8, DType.bfloat16),
        (lambda x: 1 / x, DType.bfloat16, DType.bfloat16),
        (lambda x: x // 2, DType.int16, DType.int16),
        (lambda x: x // 2, DType.float32, DType.float32),
        (lambda x: x < 2, DType.float32, DType.bool),
        (lambda x: ops.where(x > 0, x, 0), DType.float16, DType.float16),
        (
            lambda x: ops.concat([x, x + ops.constant(1.0, DType.float32)]),
            DType.bfloat16,
            DType.float32,
        ),
        (lambda x: x @ np.ones((2, 3)), DType.bfloat16, DType.bfloat16),
        (lambda x: np.ones(2) + x, DType.bfloat16, DType.bfloat16),
        (lambda x: ops.add(1, 2), DType.float32, DType.int64),
        (lambda x: ops.add(1, 2.5), DType.float32, DType.float64),
    ],
)
def test_element_type_of_results(
    build: Callable[[TensorValue], TensorValue], dtype: DType, expected: DType
) -> None:
    graph = Graph("g", build, [tensor(dtype, "n", 2)])
    assert graph.output_types[0].dtype is expected  # type: ignore[union-attr]


def test_operators_are_those_of_python() -> None:
    def forward(x: TensorValue, y: TensorValue) -> list[TensorValue]:
        return [
            *(x + y, x - y, x * y, x / y, x // y, x % y, x**y, *divmod(x, y)),
            *(2 + x, 2 - x, 2 * x, 2 / x, 2 // x, 2 % x, 2**x, *divmod(2, x)),
            *(x < y, x <= y, x > y, x >= y, x == y, x != y, 2 < x, x < 2),
            *(-x, abs(x), round(x), x.argmax(), x.max(), x.min(), x.mean()),
            *(~(x < y), (x < 1) & (y < 1), (x < 1) | (y < 1), (x < 1) ^ (y < 1)),
            *(True & (x < 1), False | (x < 1), True ^ (x < 1)),
        ]

    x = np.array([0.5, 1.5, 3.25], np.float32)
    y = np.array([1.5, 0.5, 2.0], np.float32)
    outputs = _interpreter.run(Graph("g", forward, [tensor(DType.float32, 3)] * 2), [x, y])
    expected = [
        *(x + y, x - y, x * y, x / y, x // y, x % y, x**y, *divmod(x, y)),
        *(2 + x, 2 - x, 2 * x, 2 / x, 2 // x, 2 % x, 2**x, *divmod(2, x)),
        *(x < y, x <= y, x > y, x >= y, x == y, x != y, x > 2, x < 2),
        *(-x, abs(x), np.rint(x), [2], [3.25], [0.5], [x.mean()]),
        *(~(x < y), (x < 1) & (y < 1), (x < 1) | (y < 1), (x < 1) ^ (y < 1)),
        *(x < 1, x < 1, ~(x < 1)),
    ]
    for i, (out, want) in enumerate(zip(outputs, expected, strict=True)):
        np.testing.assert_allclose(out, want, rtol=1e-6, err_msg=str(i))


# Constants


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.int8, np.uint64, np.bool_]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9),
    )
)
def test_constants_come_back(array: np.ndarray) -> None:
    (out,) = _interpreter.run(Graph("g", lambda: ops.constant(array)), [])
    assert out.dtype == array.dtype
    np.testing.assert_array_equal(out, array)


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (3, None, np.array(3, np.int64)),
        (2.5, None, np.array(2.5, np.float32)),
        (True, None, np.array(True)),
        ([1, 2], None, np.array([1, 2], np.int64)),
        ([[1.5], [2]], None, np.array([[1.5], [2]], np.float32)),
        ([np.float64(1.5)], None, np.array([1.5])),
        (np.float16(1.5), None, np.array(1.5, np.float16)),
        (3.0, DType.int8, np.array(3, np.int8)),
        (1, DType.bool, np.array(True)),
        (0.1, DType.bfloat16, np.array(0.1, ml_dtypes.bfloat16)),
        (
            np.arange(6).reshape(2, 3).T,
            DType.float32,
            np.array([[0, 3], [1, 4], [2, 5]], np.float32),
        ),
        (float("inf"), DType.float16, np.array(np.inf, np.float16)),
        (16777217, DType.float32, np.array(16777216.0, np.float32)),
        (1e-60, DType.float32, np.array(0.0, np.float32)),
        (Tensor.from_numpy(np.arange(3)), None, np.arange(3)),
    ],
    ids=str,
)
def test_constant_values(value: Any, dtype: DType | None, expected: np.ndarray) -> None:
    (out,) = _interpreter.run(Graph("g", lambda: ops.constant(value, dtype, CPU)), [])
    assert out.dtype == expected.dtype and out.shape == expected.shape
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("value", "dtype", "error", "message"),
    [
        (300, DType.uint8, ValueError, r"300 is out of range for uint8 \(0 to 255\)"),
        (-1, DType.uint64, ValueError, "-1 is out of range for uint64"),
        (1.5, DType.int32, ValueError, "1.5 is not a whole number, it does not fit int32"),
        (float("nan"), DType.int32, ValueError, "is not a whole number"),
        ([0, 2], DType.bool, ValueError, "do not fit bool"),
        (70000.0, DType.float16, ValueError, "70000.0 is out of range for float16"),
        (1e39, DType.float32, ValueError, "out of range for float32"),
        (1e39, None, ValueError, "out of range for float32"),
        ("1", None, TypeError, "'1' of type str is not a number or an array"),
        ([None], None, TypeError, "an array of object is not numeric"),
        (1j, None, TypeError, "of type complex is not a number"),
        (np.ones(2, complex), None, TypeError, "an array of complex128 is not numeric"),
    ],
)
def test_constants_that_do_not_fit(
    value: Any, dtype: DType | None, error: type[Exception], message: str
) -> None:
    with Graph("g"), pytest.raises(error, match="constant: " + ".*" + message):
        ops.constant(value, dtype)


def test_big_constants_are_not_copied() -> None:
    array = np.arange(1000, dtype=np.float32)
    (out,) = _interpreter.run(Graph("g", lambda: ops.constant(array)), [])
    assert np.shares_memory(out, array)
    text = str(Graph("g", lambda: (ops.constant(array), ops.constant(array))))
    assert '"constant_0"' in text and '"constant_1"' in text and len(text) < 700


# Errors: the message starts with the op's name, and contains the value and the requirement

F, S, B = DType.float32, DType.int64, DType.bool
MISTAKES: list[tuple[Callable[..., Any], list[TensorType], type[Exception], str]] = [
    (
        lambda x, y: x + y,
        [tensor(F, "n", 4), tensor(F, 3)],
        ValueError,
        r"add: the shapes \[n, 4\] and \[3\] do not broadcast: axis -1 is 4 and 3; dimensions must be equal or 1",
    ),
    (
        lambda x, y: x * y,
        [tensor(F, "n"), tensor(F, "m")],
        ValueError,
        r"mul: .* axis -1 is n and m; .*\(state what is equal with rebind\)",
    ),
    (
        lambda x: x + 1.5,
        [tensor(S, 3)],
        TypeError,
        "add: 1.5 is a float, the other operand is int64; cast",
    ),
    (lambda x: x + 300, [tensor(DType.int8, 3)], ValueError, "300 is out of range for int8"),
    (
        lambda x: x + x,
        [tensor(B, 3)],
        TypeError,
        "add: operand 0 has dtype bool, expected a number",
    ),
    (
        lambda x: ops.exp(x),
        [tensor(S, 3)],
        TypeError,
        "exp: operand 0 has dtype int64, expected a float",
    ),
    (lambda x: x & x, [tensor(F, 3)], TypeError, "and: operand 0 has dtype float32, expected bool"),
    (
        lambda x: ops.gelu(x, "fast"),
        [tensor(F, 3)],
        ValueError,
        "gelu: approximate is 'fast', expected one of none",
    ),
    (
        lambda x: ops.where(x, x, x),
        [tensor(F, 3)],
        TypeError,
        "where: the condition has dtype float32",
    ),
    (
        lambda x: ops.cast(x, "f32"),
        [tensor(F, 3)],
        TypeError,
        "cast: the dtype is 'f32', expected a DType",
    ),
    (
        lambda x: ops.abs("x"),
        [tensor(F, 3)],
        TypeError,
        "'x' of type str is not a number or an array",
    ),
    (
        lambda x: x.reshape([2, 2]),
        [tensor(F, 3)],
        ValueError,
        r"reshape: f32\[3\] has 3 elements, \[2, 2\] has 4",
    ),
    (
        lambda x: x.reshape([-1, 2]),
        [tensor(F, "n", 3)],
        ValueError,
        r"reshape: the n \* 3 elements of f32\[n, 3\] do not fill \[-1, 2\]: they are not a multiple of 2",
    ),
    (
        lambda x: x.reshape([-1, -1]),
        [tensor(F, 4)],
        ValueError,
        "has 2 dimensions of -1, at most 1",
    ),
    (lambda x: x.reshape([-2, -2]), [tensor(F, 4)], ValueError, "dimension 0 of .* is negative"),
    (lambda x: x.reshape([-1, 0]), [tensor(F, 0)], ValueError, "leaves -1 open"),
    (
        lambda x: x.reshape(["m", 3]),
        [tensor(F, "n", 3)],
        ValueError,
        "reshape: the dimension 'm' is unknown .*: n",
    ),
    (
        lambda x: x.reshape(3),
        [tensor(F, 3)],
        TypeError,
        "reshape: the shape is 3, expected a sequence",
    ),
    (
        lambda x: x.reshape([None]),
        [tensor(F, 3)],
        TypeError,
        "reshape: None of type NoneType is not a dimension",
    ),
    (
        lambda x: x.broadcast_to([3, 2]),
        [tensor(F, 3)],
        ValueError,
        r"broadcast_to: f32\[3\] does not broadcast",
    ),
    (
        lambda x: x.broadcast_to([-1, 3]),
        [tensor(F, 3)],
        ValueError,
        "dimension 0 of .* is negative",
    ),
    (
        lambda x: ops.broadcast_to(x, x.shape, [3]),
        [tensor(F, 3)],
        ValueError,
        "out_dims is for a shape that is",
    ),
    (
        lambda x: ops.broadcast_to(x, ops.constant([3])),
        [tensor(F, 3)],
        ValueError,
        "needs out_dims",
    ),
    (
        lambda x: x.rebind([4], "why"),
        [tensor(F, 3)],
        ValueError,
        "rebind: axis 0 of .* is 3, which is never 4: why",
    ),
    (lambda x: x.rebind([3, 1]), [tensor(F, 3)], ValueError, "has rank 1, .* has 2"),
    (
        lambda x: x.transpose(0, 2),
        [tensor(F, 3, 4)],
        ValueError,
        "transpose: axis_2 2 is out of range .*; expected -2 to 1",
    ),
    (
        lambda x: x.permute([0, 0]),
        [tensor(F, 3, 4)],
        ValueError,
        r"permute: \[0, 0\] names an axis twice",
    ),
    (
        lambda x: x.permute([0]),
        [tensor(F, 3, 4)],
        ValueError,
        r"permute: \[0\] has 1 axes, the tensor has 2",
    ),
    (
        lambda x: ops.squeeze(x, 1),
        [tensor(F, 3, 4)],
        ValueError,
        "squeeze: axis 1 of .* has size 4, not 1",
    ),
    (
        lambda x: ops.unsqueeze(x, 3),
        [tensor(F, 3)],
        ValueError,
        "unsqueeze: axis 3 is out of range",
    ),
    (
        lambda x: x.flatten(1, 0),
        [tensor(F, 3, 4)],
        ValueError,
        "flatten: start_dim 1 comes after end_dim 0",
    ),
    (
        lambda x: ops.as_interleaved_complex(x),
        [tensor(F, 3)],
        ValueError,
        "has size 3, expected an even one",
    ),
    (lambda x: ops.concat([]), [], ValueError, "concat: expected at least one tensor"),
    (
        lambda x, y: ops.concat([x, y], 1),
        [tensor(F, 3, 4), tensor(F, 2, 4)],
        ValueError,
        "concat: axis 0 of operand 1 is 2, of operand 0 3; only axis 1 may differ",
    ),
    (
        lambda x, y: ops.concat([x, y]),
        [tensor(F, 3), tensor(F, 3, 1)],
        ValueError,
        "expected one rank",
    ),
    (
        lambda x, y: ops.stack([x, y]),
        [tensor(F, 3), tensor(F, 4)],
        ValueError,
        r"stack: tensor 1 is f32\[4\], tensor 0",
    ),
    (
        lambda x: ops.split(x, [1, 1]),
        [tensor(F, 3)],
        ValueError,
        r"split: .* add up to 2, axis 0 of f32\[3\] has size 3",
    ),
    (lambda x: ops.split(x, [4, -1]), [tensor(F, 3)], ValueError, "must not be negative"),
    (lambda x: ops.chunk(x, 2), [tensor(F, 3)], ValueError, "not known to be a multiple of 2"),
    (lambda x: ops.chunk(x, 0), [tensor(F, 3)], ValueError, "chunks is 0, expected 1 or more"),
    (
        lambda x: ops.tile(x, [2, 2]),
        [tensor(F, 3)],
        ValueError,
        "tile: 2 repeats for a tensor of rank 1",
    ),
    (
        lambda x: ops.repeat_interleave(x, 0),
        [tensor(F, 3)],
        ValueError,
        "repeats is 0, expected 1 or more",
    ),
    (
        lambda x, n: ops.repeat_interleave(x, n),
        [tensor(F, 3), tensor(DType.int64, 3)],
        ValueError,
        "set out_dim, the size",
    ),
    (
        lambda x: ops.pad(x, [1]),
        [tensor(F, 3)],
        ValueError,
        "pad: 1 paddings for a tensor of rank 1, expected 2",
    ),
    (
        lambda x: ops.pad(x, [1, -1]),
        [tensor(F, 3)],
        ValueError,
        "the padding -1 of axis 0 is negative",
    ),
    (
        lambda x: ops.pad(x, [1, 1], "wrap"),
        [tensor(F, 3)],
        ValueError,
        "mode is 'wrap', expected constant, reflect, edge",
    ),
    (
        lambda x: ops.pad(x, [1, 1], value=1.5),
        [tensor(S, 3)],
        ValueError,
        "the value 1.5 does not fit int64",
    ),
    (lambda x: ops.pad(x, [1, 1], value=x), [tensor(S, 3)], TypeError, "expected a number"),
    (
        lambda x: ops.gather(x, x, 0),
        [tensor(F, 3)],
        TypeError,
        r"gather: the indices are f32\[3\], expected integers",
    ),
    (lambda x: ops.gather(x, 0, 1), [tensor(F, 3)], ValueError, "gather: axis 1 is out of range"),
    (
        lambda x: ops.scatter(x, ops.constant([1]), 0),
        [tensor(F, 3)],
        TypeError,
        "scatter: the updates are int64",
    ),
    (
        lambda x: ops.sum(x, 1),
        [tensor(F, 3)],
        ValueError,
        "sum: axis 1 is out of range for a tensor of rank 1; .* -1 to 0",
    ),
    (lambda x: ops.sum(x, 0.5), [tensor(F, 3)], TypeError, "sum: axis is 0.5, expected an int"),
    (lambda x: ops.sum(x), [tensor(F)], ValueError, "expected a tensor of rank 1 or more"),
    (lambda x: ops.max(x), [tensor(F, 0)], ValueError, "max: axis 0 of .* is empty"),
    (
        lambda x: ops.softmax(x),
        [tensor(S, 3)],
        TypeError,
        r"softmax: the operand is si64\[3\], expected a float",
    ),
    (
        lambda x: ops.top_k(x, 4),
        [tensor(F, 3)],
        ValueError,
        "top_k: k is 4, expected 1 to 3, the size of axis 0",
    ),
    (
        lambda x, y: x @ y,
        [tensor(F, "n", 4), tensor(F, 5, 6)],
        ValueError,
        r"matmul: f32\[n, 4\] @ f32\[5, 6\]: the last dimension of the left operand, 4, must equal",
    ),
    (
        lambda x, y: x @ y,
        [tensor(F, 4), tensor(F)],
        ValueError,
        "matmul: .*: an operand has rank 0",
    ),
    (
        lambda x, y: x @ y,
        [tensor(F, 2, 1, 4), tensor(F, 3, 4, 1)],
        ValueError,
        "matmul: the shapes .* do not broadcast",
    ),
    (
        lambda x, g: ops.rms_norm(x, g, 1e-5),
        [tensor(F, 2, 4), tensor(F, 3)],
        ValueError,
        r"expected shape \[4\]",
    ),
    (
        lambda x, g: ops.layer_norm(x, g, g, 0.0),
        [tensor(F, 2, 4), tensor(F, 4)],
        ValueError,
        "epsilon is 0.0",
    ),
    (lambda x: ops.range(0, 5, 0, dtype=S, device=CPU), [], ValueError, "range: the step is 0"),
    (
        lambda x: ops.range(0, 5, -1, dtype=S, device=CPU),
        [],
        ValueError,
        "steps of -1 do not lead from 0 to 5",
    ),
    (
        lambda x: ops.range(0, x[0], dtype=S, device=CPU),
        [tensor(S, 3)],
        ValueError,
        "is not known .* set out_dim",
    ),
    (
        lambda x: ops.range(0, 5, 1, 4, dtype=S, device=CPU),
        [],
        ValueError,
        "has 5 elements, out_dim is 4",
    ),
    (
        lambda x: ops.range(0, x, 1, "m", dtype=S, device=CPU),
        [tensor(S, 3)],
        TypeError,
        "is not a scalar",
    ),
    (
        lambda x: ops.band_part(x),
        [tensor(F, 3)],
        ValueError,
        "band_part: .* has rank 1, expected 2 or more",
    ),
    (
        lambda x: ops.band_part(x, 4),
        [tensor(F, 3, 3)],
        ValueError,
        r"num_lower is 4, expected -1 \(all\) or 0 or more and less than 3",
    ),
    (lambda x: ops.hann_window(-1, CPU), [], ValueError, "the length is -1, expected 0 or more"),
    (lambda x: ops.hann_window(2.0, CPU), [], TypeError, "the length is 2.0, expected an int"),
    (
        lambda x: ops.constant_external("", tensor(F, 3)),
        [],
        ValueError,
        "constant_external: the name is empty",
    ),
    (
        lambda x: ops.reshape(x, ["k"]),
        [tensor(F, 3)],
        ValueError,
        "the dimension 'k' is unknown",
    ),
    (
        lambda x: ops.assert_same_device(x, other=x.to(DeviceRef.GPU())),
        [tensor(F, 3)],
        ValueError,
        "value 0 on cpu:0, other on gpu:0",
    ),
    (
        lambda x: x + x.to(DeviceRef.GPU()),
        [tensor(F, 3)],
        ValueError,
        r"add: .* different devices \(cpu:0, gpu:0\)",
    ),
]


@pytest.mark.parametrize(("build", "types", "error", "message"), MISTAKES)
def test_mistake(
    build: Callable[..., Any], types: list[TensorType], error: type[Exception], message: str
) -> None:
    with Graph("g", input_types=types) as graph, pytest.raises(error, match=message):
        build(*graph.inputs) if graph.inputs else build(None)


@pytest.mark.parametrize(
    ("left", "right", "hint"), [(3, 4, False), (3, "n", True), ("n", 3, True), ("n", "m", True)]
)
def test_rebind_is_named_where_a_size_is_symbolic(
    left: int | str, right: int | str, hint: bool
) -> None:
    with Graph("g", input_types=[tensor(F, left), tensor(F, right)]) as graph:
        x, y = (value.tensor for value in graph.inputs)
        with pytest.raises(ValueError, match=f"axis -1 is {left} and {right};") as caught:
            x + y
    assert ("state what is equal with rebind" in str(caught.value)) == hint


def test_none_equals_no_tensor() -> None:
    with Graph("g", input_types=[tensor(F, 3)]) as graph:
        x = graph.inputs[0].tensor
        assert (x == None) is False and (x != None) is True  # noqa: E711
        assert (None == x) is False  # noqa: E711


def test_an_array_by_a_matrix() -> None:
    with Graph("g", input_types=[tensor(F, 3, 2)]) as graph:
        product = np.ones((4, 3), np.float32) @ graph.inputs[0].tensor
    assert isinstance(product, TensorValue) and list(product.shape) == [4, 2]


def test_a_mistake_adds_no_op() -> None:
    with Graph("g", input_types=[tensor(F, 3), tensor(F, 4)]) as graph:
        before = str(graph)
        with pytest.raises(ValueError, match="do not broadcast"):
            graph.inputs[0].tensor + graph.inputs[1].tensor
        assert str(graph) == before


# Ops without an effect are not staged


@pytest.mark.parametrize(
    "build",
    [
        lambda x: x.reshape(x.shape),
        lambda x: x.reshape([-1, 4]),
        lambda x: x.broadcast_to(["n", 4]),
        lambda x: x.rebind(["n", 4]),
        lambda x: x.cast(DType.float32),
        lambda x: x.to(CPU),
        lambda x: x[:],
        lambda x: x[..., 0:4],
        lambda x: x.transpose(1, -1),
        lambda x: ops.concat([x]),
        lambda x: ops.split(x, ["n"])[0],
    ],
)
def test_identity(build: Callable[[TensorValue], TensorValue]) -> None:
    graph = Graph("g", build, [tensor(F, "n", 4)])
    assert graph.to_mlir().is_structurally_equivalent(
        Graph("g", lambda x: x, [tensor(F, "n", 4)]).to_mlir()
    )


def test_hann_window() -> None:
    import torch

    for n in (0, 1, 2, 9):
        for periodic in (True, False):
            (out,) = _interpreter.run(
                Graph("g", lambda n=n, p=periodic: ops.hann_window(n, CPU, p)), []
            )
            np.testing.assert_allclose(out, torch.hann_window(n, periodic).numpy(), atol=1e-6)


def test_band_part_keeps_or_excludes() -> None:
    x = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    graph = Graph(
        "g",
        lambda x: (
            ops.band_part(x),
            ops.band_part(x, 0, None),
            ops.band_part(x, None, 1, exclude=True),
            ops.band_part(x, exclude=True),
        ),
        [tensor(F, "m", 4)],
    )
    whole, upper, outside, nothing = _interpreter.run(graph, [x])
    np.testing.assert_array_equal(whole, x)
    np.testing.assert_array_equal(upper, np.triu(x))
    np.testing.assert_array_equal(outside, np.triu(x, 2))
    np.testing.assert_array_equal(nothing, np.zeros_like(x))


def test_shapes_are_inferred_in_symbols() -> None:
    with Graph("g", input_types=[tensor(F, "batch", "seq", 64)]) as graph:
        x = graph.inputs[0].tensor
        n, s = x.shape[:2]
        assert x.reshape(["batch", "seq", 8, -1]).shape == ["batch", "seq", 8, 8]
        assert x.reshape([-1, 64]).shape == [n * s, 64]
        assert x.flatten().shape == [n * s * 64]
        assert ops.concat([x, x[:, 1:]], 1).shape == [n, s * 2 - 1, 64]
        assert x[::2].shape == [(n + 1) // 2, s, 64]
        assert (x @ np.ones((64, 3))).shape == [n, s, 3]
        assert ops.pad(x, [0, 0, 1, 2, 0, 0]).shape == [n, s + 3, 64]
        assert ops.tile(x, [1, 2, 3]).shape == [n, s * 2, 192]
        assert ops.sum(x, 1).shape == [n, 1, 64]
        assert ops.outer(x[0, 0], x[0, 0]).shape == [64, 64]
        assert ops.gather(x, ops.constant([[0, 1]]), 1).shape == [n, 1, 2, 64]
        assert Shape(x.T.shape) == [n, 64, s]


def test_rebind_introduces_names_and_is_checked() -> None:
    graph = Graph(
        "g",
        lambda x: x.rebind(["k", 2], "rows of k").reshape([Dim("k") * 2]),
        [tensor(F, "n", "m")],
    )
    (out,) = _interpreter.run(graph, [np.zeros((3, 2), np.float32)])
    assert out.shape == (6,)
    with pytest.raises(_interpreter.InterpreterError, match="rows of k.*: m is 3, expected 2"):
        _interpreter.run(graph, [np.zeros((3, 3), np.float32)])


def test_mistakes_of_masks() -> None:
    with Graph("masks", input_types=[tensor(DType.float32, 3), tensor(DType.bool, 2, 3)]) as graph:
        x, mask = (value.tensor for value in graph.inputs)
        with pytest.raises(TypeError, match=r"masked_scatter: the mask is f32\[3\], expected bool"):
            ops.masked_scatter(x, x, x, "n")
        with pytest.raises(TypeError, match="masked_scatter: the updates are f64.*cast one"):
            ops.masked_scatter(x, mask[0], x.cast(DType.float64), "n")
        with pytest.raises(ValueError, match="masked_scatter: 3 updates for 4 elements"):
            ops.masked_scatter(x, mask[0], x, 4)
        with pytest.raises(ValueError, match="broadcast_to"):
            ops.masked_scatter(x, mask, x, "n")
        with pytest.raises(ValueError, match="argsort: axis 0 is out of range"):
            ops.argsort(x[0])
