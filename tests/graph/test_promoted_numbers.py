"""Numbers and integer arrays beside tensors of floats: exact, or refused; floats are rounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.experimental import functional as F
from max.experimental.tensor import Tensor
from max.graph import DeviceRef, Graph, TensorType, ops

GREATEST = {DType.bfloat16: 2**8, DType.float16: 2**11, DType.float32: 2**24, DType.float64: 2**53}
FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, n: x + n,
    "reversed": lambda x, n: n - x,
    "mul": lambda x, n: x * n,
    "pow": lambda x, n: x**n,
    "greater": lambda x, n: x > n,
    "max": ops.max,
    "where": lambda x, n: ops.where(x > 0, x, n),
}


def staged(dtype: DType, form: Callable[[Any, Any], Any], number: Any) -> DType:
    with Graph("numbers", input_types=[TensorType(dtype, (2,), DeviceRef.CPU())]) as graph:
        return form(graph.inputs[0].tensor, number).dtype


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", GREATEST, ids=str)
def test_integers_that_a_dtype_may_not_hold(dtype, form, rng):
    most = GREATEST[dtype]
    accepted = DType.bool if form == "greater" else dtype
    drawn = [int(n) for n in rng.integers(1, most, 3)]
    for number in (0, most, -most, *drawn, np.int64(most), np.array([most, -1])):
        assert staged(dtype, FORMS[form], number) is accepted
    refused = [most + 1, -most - 1, 2 * most, most + drawn[0], 10**40, -(10**400)]
    arrays = [np.int64(most + 1), np.array([1, most + 1]), np.array([-most - 1, 1])]
    for number in (*refused, *arrays):
        with pytest.raises(ValueError, match=f"may lose precision in {dtype.name}.*up to {most};"):
            staged(dtype, FORMS[form], number)


@pytest.mark.parametrize("dtype", [DType.int8, DType.uint8, DType.int32, DType.int64], ids=str)
def test_integers_out_of_the_range_of_integers(dtype):
    limits = np.iinfo(dtype.to_numpy())
    assert staged(dtype, FORMS["add"], int(limits.max)) is dtype
    for number in (int(limits.max) + 1, int(limits.min) - 1, 2**64, 10**400):
        with pytest.raises(ValueError, match=f"out of range for {dtype.name}"):
            staged(dtype, FORMS["add"], number)


@pytest.mark.parametrize("dtype", [DType.float8_e4m3fn, DType.float8_e5m2], ids=str)
def test_integers_beside_8_bits(dtype):
    most = 448 if dtype is DType.float8_e4m3fn else 57344
    assert staged(dtype, FORMS["add"], most) is dtype
    assert staged(dtype, FORMS["add"], 17) is dtype
    with pytest.raises(ValueError, match=f"up to {most}"):
        staged(dtype, FORMS["add"], most + 1)


def test_floats_are_rounded():
    """Beyond the range of the dtype they are infinite; so are the elements of arrays."""
    numbers = [
        0.1,
        4097.0,
        16777217.0,
        1e300,
        -1e300,
        3.5e38,
        math.inf,
        math.nan,
        np.float64(1e300),
    ]
    x = np.ones(2, np.float32)
    for dtype in (DType.float16, DType.float32):
        with Graph(
            "floats", input_types=[TensorType(DType.float32, (2,), DeviceRef.CPU())]
        ) as graph:
            value = graph.inputs[0].tensor.cast(dtype)
            arrays = [value * np.array([n, 1.0]) for n in numbers]
            graph.output(*[value * n for n in numbers], *arrays)
        results = InferenceSession(devices=[CPU()]).load(graph).execute(x)
        with np.errstate(over="ignore"):
            want = [np.float64(n).astype(dtype.to_numpy()) for n in numbers]
        for got, expected in zip(results[: len(numbers)], want, strict=True):
            np.testing.assert_array_equal(got.to_numpy(), np.full(2, expected))
        for got, expected in zip(results[len(numbers) :], want, strict=True):
            np.testing.assert_array_equal(got.to_numpy(), np.array([expected, 1.0], expected.dtype))


def test_eager_numbers():
    for dtype, most in [(DType.bfloat16, 2**8), (DType.float32, 2**24)]:
        x = Tensor.ones([2], dtype=dtype, device=CPU())
        assert (x + most).dtype is dtype
        for form in (lambda n, x=x: x + n, lambda n, x=x: n * x, lambda n, x=x: F.max(x, n)):
            with pytest.raises(ValueError, match="may lose precision"):
                form(most + 1)
    got = (Tensor.ones([2], dtype=DType.float32, device=CPU()) * 1e300).to_numpy()
    np.testing.assert_array_equal(got, np.full(2, np.inf, np.float32))


@pytest.mark.parametrize(("dtype", "most"), [(DType.bfloat16, 2**8), (DType.float32, 2**24)])
@pytest.mark.parametrize("sign", [1, -1])
def test_eager_numbers_that_vary(dtype, most, sign):
    """Calls that are recorded with a symbol for the number, and replayed, take exact integers only."""
    x = Tensor.ones([2], dtype=dtype, device=CPU())
    for form in (lambda n: x + n, lambda n: n * x, lambda n: F.max(x, n)):
        for n in [*range(3, 30), most]:
            form(sign * n).to_numpy()
        for n in (most + 1, 2 * most, most + 1):
            with pytest.raises(ValueError, match="may lose precision"):
                form(sign * n)
        assert form(sign * 7).dtype is dtype


@pytest.mark.parametrize("name", ["max", "min"])
def test_an_axis_beside_two_operands(name):
    """The axis of a maximum of two tensors would be ignored: it is refused, eager too."""
    with Graph("axis", input_types=[TensorType(DType.float32, (2, 3), DeviceRef.CPU())]) as graph:
        x = graph.inputs[0].tensor
        for other, axis in [(x, 0), (1.0, -1), (np.ones(3, np.float32), 1)]:
            with pytest.raises(
                ValueError, match=rf"axis={axis} with two operands.*{name}\(x, axis"
            ):
                getattr(ops, name)(x, other, axis=axis)
        assert getattr(ops, name)(x, x, axis=None).shape == [2, 3]
        assert getattr(ops, name)(x, axis=0).shape == [1, 3]
    eager = Tensor.ones([2, 3], dtype=DType.float32, device=CPU())
    with pytest.raises(ValueError, match="with two operands"):
        getattr(F, name)(eager, eager, axis=0)
