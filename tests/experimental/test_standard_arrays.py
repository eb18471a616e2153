"""What the array API standard says of arrays beside the results of functions: bits, copies, exact integers."""

from __future__ import annotations

import math
import operator
from typing import Any, Literal

import numpy as np
import pytest

from max.driver import Tensor as DriverTensor
from max.experimental import Tensor
from max.experimental import array_api as xp

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
OF_OPERATORS = {
    operator.and_: "bitwise_and",
    operator.or_: "bitwise_or",
    operator.xor: "bitwise_xor",
    operator.lshift: "bitwise_left_shift",
    operator.rshift: "bitwise_right_shift",
}
OPERATORS = list(OF_OPERATORS)


def drawn(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    limits = np.iinfo(dtype)
    rng = np.random.default_rng(seed)
    return rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
def test_operators_of_bits(op, dtype: str) -> None:
    x, y = drawn(dtype, (3, 1, 5), 0), drawn(dtype, (4, 5), 1)
    if op in (operator.lshift, operator.rshift):
        # fewer places than bits, as many, more, and negative ones
        bits = np.iinfo(dtype).bits
        y = np.resize([0, 1, bits - 1, bits, bits + 1, 2 * bits - 1, 3], (4, 5)).astype(dtype)
        y[0, 0] = np.iinfo(dtype).min
    got = op(Tensor(x), Tensor(y))
    assert got.dtype.name == dtype and got.shape == (3, 4, 5)
    np.testing.assert_array_equal(got.to_numpy(), op(x, y))
    np.testing.assert_array_equal(op(Tensor(x), 3).to_numpy(), op(x, 3))
    np.testing.assert_array_equal(op(3, Tensor(y)).to_numpy(), op(np.asarray(3, dtype), y))
    changed = Tensor(x)
    changed = getattr(operator, "i" + op.__name__.strip("_"))(changed, 3)
    np.testing.assert_array_equal(changed.to_numpy(), op(x, 3))
    name = OF_OPERATORS[op]
    np.testing.assert_array_equal(getattr(xp, name)(Tensor(x), Tensor(y)).to_numpy(), op(x, y))


@pytest.mark.parametrize("dtype", [*INTEGERS, "bool"])
def test_inverted_bits(dtype: str) -> None:
    x = drawn(dtype, (7,), 2) if dtype != "bool" else np.array([True, False, True])
    np.testing.assert_array_equal((~Tensor(x)).to_numpy(), ~x)


@pytest.mark.parametrize("op", OPERATORS[:3], ids=lambda op: op.__name__)
def test_operators_of_bools(op) -> None:
    x, y = np.array([True, True, False, False]), np.array([True, False, True, False])
    np.testing.assert_array_equal(op(Tensor(x), Tensor(y)).to_numpy(), op(x, y))
    for flag in (True, False):
        np.testing.assert_array_equal(op(Tensor(x), flag).to_numpy(), op(x, flag))
        np.testing.assert_array_equal(op(flag, Tensor(x)).to_numpy(), op(flag, x))


def test_bits_of_two_dtypes_and_of_no_elements() -> None:
    x, y = drawn("int8", (3, 5), 3), drawn("uint16", (5,), 4)
    both = Tensor(x) & Tensor(y)
    assert both.dtype == xp.int32
    np.testing.assert_array_equal(both.to_numpy(), x & y)
    empty = Tensor(np.zeros((0, 3), np.int32))
    assert (empty << 1).shape == (0, 3) and (Tensor(np.array(6, np.int32)) ^ 3).item() == 5


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (
            lambda: Tensor([1.0]) & Tensor([2.0]),
            "operands are float32, expected bool or an integer",
        ),
        (lambda: ~Tensor([1.0]), "operand is float32, expected bool or an integer"),
        (lambda: Tensor(np.array([True])) << 1, "operands are bool, expected an integer type"),
        (lambda: xp.bitwise_and(1, 2), "neither 1 nor 2 is a Tensor"),
        (lambda: Tensor(np.array([1])) | 1.5, "1.5 is a float"),
        (lambda: xp.conj(Tensor(np.array([True]))), "operand is bool, expected numbers"),
    ],
)
def test_operands_without_bits(compute, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        compute()


def test_operators_of_bits_in_one_program() -> None:
    x, y = drawn("uint32", (6, 7), 5), drawn("uint32", (7,), 6)
    got = ((Tensor(y) ^ (Tensor(x) >> 16)) * 0x45D9F3B) & 0xFFFF
    np.testing.assert_array_equal(
        got.to_numpy(), ((y ^ (x >> 16)) * np.uint32(0x45D9F3B)) & np.uint32(0xFFFF)
    )


def test_numbers_of_python() -> None:
    assert complex(Tensor(2.5)) == 2.5 + 0j and complex(Tensor(np.array(True))) == 1
    assert complex(Tensor(math.inf)) == complex(math.inf, 0)
    nan = complex(Tensor(math.nan))
    assert math.isnan(nan.real) and math.isnan(nan.imag)


def test_parts_of_real_numbers() -> None:
    x = np.array([-1.5, -0.0, np.inf, np.nan], np.float32)
    for name in ("real", "imag", "conj"):
        got = getattr(xp, name)(Tensor(x))
        assert got.dtype == xp.float32
        np.testing.assert_array_equal(got.to_numpy(), getattr(np, name)(x))


def test_integers_of_lists_are_exact() -> None:
    # NumPy alone reads each of these lists as float64
    for numbers in (
        [2**63 + 11, 3],
        [[2**64 - 1], [0]],
        [2**53 + 1, 1.0],
        [np.uint64(2**64 - 1), 3],
    ):
        want = np.array([int(n) for n in np.array(numbers, object).flat], np.uint64)
        for make in (
            lambda n: xp.asarray(n, dtype=xp.uint64),
            lambda n: Tensor(n, dtype=xp.uint64),
        ):
            got = make(numbers).to_numpy()
            assert got.shape == np.shape(numbers)
            np.testing.assert_array_equal(got.reshape(-1), want)
    with pytest.raises(ValueError, match="-2 is out of range for uint64"):
        xp.asarray([2**63, -2], dtype=xp.uint64)
    with pytest.raises(ValueError, match="18446744073709551615 is out of range for int64"):
        xp.asarray([2**64 - 1, -2], dtype=xp.int64)
    with pytest.raises(ValueError, match="2.5 is not a whole number"):
        xp.asarray([2**63, 2.5], dtype=xp.uint64)
    with pytest.raises(ValueError, match="nan is not a whole number"):
        xp.asarray([2**63, math.nan], dtype=xp.uint64)
    with pytest.raises(ValueError, match="no dtype holds all of the integers"):
        xp.asarray([2**63 + 11, 3])
    assert xp.asarray([2**63 + 11, 0.5]).dtype == xp.float32


def test_a_range_of_great_integers() -> None:
    got = xp.arange(2**63, 2**63 + 5, 2, dtype=xp.uint64).to_numpy()
    assert got.tolist() == [2**63, 2**63 + 2, 2**63 + 4]
    got = xp.arange(2**63 - 1, -(2**63), -(2**61) - 1).to_numpy()
    assert got.tolist() == list(range(2**63 - 1, -(2**63), -(2**61) - 1))
    assert xp.arange(5, 1, -2, dtype=xp.float32).to_numpy().tolist() == [5.0, 3.0]
    assert xp.arange(3, 3).shape == (0,)
    for arguments, message in (
        ((300,), "299 is out of range for uint8"),
        ((-5, 5), "-5 is out of range for uint8"),
        ((0, 2, 0.5), "0.5 is not a whole number"),
        ((0, 2, 0), "the step is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            xp.arange(*arguments, dtype=xp.uint8)


@pytest.mark.parametrize("computed", [True, False])
@pytest.mark.parametrize(
    "copy",
    [
        lambda x: xp.astype(x, x.dtype),
        lambda x: xp.asarray(x, copy=True),
        lambda x: xp.from_dlpack(x, copy=True),
    ],
)
def test_a_copy_has_memory_of_its_own(copy, computed: bool) -> None:
    x = Tensor(np.arange(5, dtype=np.float32))
    x = x if computed else x + 0
    y = copy(x)
    y[0] = 77
    x[1] = 55
    assert x.to_numpy().tolist() == [0, 55, 2, 3, 4]
    assert y.to_numpy().tolist() == [77, 1, 2, 3, 4]


def test_copies_of_arrays_of_other_libraries() -> None:
    array = np.arange(6, dtype=np.float32)
    shared, copied = xp.asarray(array), xp.asarray(array, copy=True)
    array[0] = 9
    assert shared[0].item() == 9 and copied[0].item() == 0
    same = xp.asarray(array, dtype=xp.float32, copy=False)
    array[1] = 8
    assert same[1].item() == 8
    kept = xp.asarray(shared, copy=False)
    assert kept is shared and xp.astype(shared, xp.float32, copy=False) is shared
    refused: list[tuple[Any, Any]] = [
        (array, xp.float64),
        (array[::2], None),
        (shared, xp.int32),
        ([1, 2], None),
        (3, None),
    ]
    for obj, dtype in refused:
        with pytest.raises(ValueError, match="copy is False"):
            xp.asarray(obj, dtype=dtype, copy=False)


def test_a_shape_of_a_tensor_is_a_shape() -> None:
    x = Tensor.zeros((2, 3))
    assert xp.ones(x.shape).shape == (2, 3) and xp.empty(x.shape[:1]).shape == (2,)
    assert xp.full([3], 2).shape == (3,) and xp.zeros(4).shape == (4,)


def test_products_of_vectors_of_different_sizes() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for y, axis in ((x[:, :1], -1), (x[:1], -2), (x[0], -2), (x[0], 0)):
        with pytest.raises(ValueError, match=r"vecdot: axis -?\d of shapes"):
            xp.vecdot(Tensor(x), Tensor(y.copy()), axis=axis)
    got = xp.vecdot(Tensor(x), Tensor(x[0].copy()))
    np.testing.assert_array_equal(got.to_numpy(), x @ x[0])


def test_capsules_take_the_arguments_of_the_standard() -> None:
    x = Tensor(np.arange(4, dtype=np.float32))
    capsule = x.__dlpack__(stream=None, max_version=(1, 0), dl_device=(1, 0), copy=True)
    assert "dltensor" in repr(capsule)
    with pytest.raises(BufferError, match="not on DLPack device"):
        x.__dlpack__(dl_device=(2, 0))
    assert isinstance(DriverTensor.from_dlpack(x), DriverTensor)


def test_the_number_of_axes_that_the_namespace_names() -> None:
    most = xp.__array_namespace_info__().capabilities()["max dimensions"]
    assert (Tensor.zeros((1,) * most) + 1).to_numpy().ndim == most
    with pytest.raises(ValueError, match="dimension"):
        Tensor.zeros((1,) * (most + 1))


@pytest.mark.parametrize("side", ["left", "right"])
def test_places_of_nans(side: Literal["left", "right"]) -> None:
    wanted = np.array([np.nan, 0, 9, -np.inf, np.inf, 1.5], np.float64)
    for x in (np.array([-np.inf, 0, 1.5, np.nan, np.nan]), np.array([1.0, 2.0]), np.array([1, 5])):
        got = xp.searchsorted(Tensor(x), Tensor(wanted), side=side)
        np.testing.assert_array_equal(got.to_numpy(), np.searchsorted(x, wanted, side=side))


@pytest.mark.parametrize("mask", [(0, 4), (3, 0), (0, 0), (0,)])
def test_masks_without_elements(mask: tuple[int, ...]) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    index = np.zeros(mask, bool)
    assert Tensor(x)[Tensor(index)].shape == x[index].shape
    with pytest.raises(IndexError, match="the mask has size 2 at axis 0, expected 3"):
        Tensor(x)[Tensor(np.zeros((2,), bool))]
