"""Functions of the array API standard have NumPy's results, see `tests.experimental.standard_calls`."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from max.driver import CPU
from max.dtype import DType
from max.experimental import Tensor
from max.experimental import array_api as xp
from tests.experimental.standard_calls import DRAWS, KEYWORDS, compare

FOUND: dict[str, tuple[int, ...]] = {
    "acos": (0, 3), "acosh": (7,), "sin": (9,), "tan": (11,), "atan2": (8,), "diff": (0, 5), "vecdot": (2,),
    "repeat": (1,),
}  # fmt: skip
"""Calls that once had other results."""


@pytest.mark.parametrize(
    ("name", "seed"), [(n, seed) for n, seeds in FOUND.items() for seed in seeds]
)
def test_calls_that_differed(name: str, seed: int) -> None:
    assert compare(name, seed)


@pytest.mark.long
@pytest.mark.parametrize("name", DRAWS)
def test_random_calls(name: str) -> None:
    assert sum(compare(name, seed) for seed in range(1000, 1040)) > 20


@pytest.mark.parametrize("line", KEYWORDS.split("\n")[1:-1])
def test_parameters_by_name(line: str) -> None:
    names, keywords = line.split(": ")
    for name in names.split():
        parameters = inspect.signature(getattr(xp, name)).parameters
        assert set(keywords.split()) <= set(parameters), name


def test_all_functions_are_drawn() -> None:
    functions = {n for n in xp.__all__ if inspect.isroutine(getattr(xp, n))}
    assert functions - set(DRAWS) == {"finfo", "iinfo", "isdtype"}


def test_a_remainder_of_a_great_quotient() -> None:
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        x = (rng.standard_normal(64) * 10.0 ** rng.integers(0, 30, 64)).astype(dtype)
        y = (rng.standard_normal(64) * 10.0 ** rng.integers(-2, 5, 64)).astype(dtype)
        y[:2] = np.inf, -np.inf
        np.testing.assert_array_equal(
            (Tensor.constant(x) % Tensor.constant(y)).to_numpy(), np.mod(x, y)
        )


@pytest.mark.parametrize("name", ["floor_divide", "remainder"])
def test_quotients_of_special_values(name: str) -> None:
    special = np.array([-4.2, -1.0, -0.0, 0.0, 1.0, 5.3, np.inf, -np.inf, np.nan, 1e30, 0.1])
    x, y = np.repeat(special, len(special)), np.tile(special, len(special))
    with np.errstate(all="ignore"):
        want = getattr(np, name)(x, y)
    got = getattr(xp, name)(
        Tensor.constant(x, dtype=DType.float64), Tensor.constant(y, dtype=DType.float64)
    ).to_numpy()
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0]))


def test_numbers_among_operands() -> None:
    x = Tensor.constant([3.0, -1.0], dtype=DType.float64)
    for name, number in (("hypot", -1e30), ("atan2", 0.3), ("logaddexp", -np.inf)):
        got = getattr(xp, name)(x, number).to_numpy()
        np.testing.assert_allclose(got, getattr(np, name)(x.to_numpy(), number), rtol=1e-14)


def test_numbers_that_vary_may_be_infinite() -> None:
    x = Tensor.constant([3.0, -1.0])
    for number in (0.5, 1.5, 2.5, 3.5, np.inf, -np.inf, np.nan, 4.5):
        np.testing.assert_array_equal(xp.less(x, number).to_numpy(), x.to_numpy() < number)


def test_without_elements_and_of_bools() -> None:
    x = Tensor.zeros((2, 0))
    assert xp.cumulative_sum(x, axis=1, include_initial=True).shape == [2, 1]
    assert xp.diff(x, n=2).shape == [2, 0]
    assert xp.unique_values(
        Tensor.constant([True, False, True], dtype=DType.bool)
    ).to_numpy().tolist() == [False, True]


def test_inspection() -> None:
    info = xp.__array_namespace_info__()
    assert info.devices() == [info.default_device()] == [CPU()]
    assert info.dtypes(kind=("bool", "unsigned integer")) == {
        "bool": DType.bool, "uint8": DType.uint8, "uint16": DType.uint16, "uint32": DType.uint32, "uint64": DType.uint64
    }  # fmt: skip
    assert len(info.dtypes()) == 11
    x = xp.asarray([1.5])
    assert info.default_dtypes()["real floating"] == x.dtype
    assert info.default_dtypes()["integral"] == xp.asarray([1]).dtype
    assert info.default_dtypes()["indexing"] == xp.argmax(x).dtype
    with pytest.raises(ValueError, match="kind is 'floats'"):
        info.dtypes(kind="floats")
    capabilities = info.capabilities()
    assert capabilities["data-dependent shapes"] and xp.unique_values(x).shape == [1]
    assert capabilities["max dimensions"] == 64
    assert capabilities["boolean indexing"] and x[x > 2].shape == [0]


def test_repeats_for_each_place() -> None:
    x = xp.asarray([[1, 2], [3, 4]])
    got = xp.repeat(x, xp.asarray([2, 0]), axis=0)
    np.testing.assert_array_equal(got.to_numpy(), [[1, 2], [1, 2]])
    assert xp.repeat(x, 0, axis=1).shape == [2, 0] and xp.repeat(x, 0).shape == [0]
