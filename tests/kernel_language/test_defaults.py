"""Defaults of parameters: their values in compiled kernels are those in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from max import kernel as k
from tests.kernel_language.harness import both

twice = "a value of this name, which the default does not mean"


@k.inline
def scaled(x: k.Value, how: str = "twice", unit: str = "") -> Any:
    if unit != "":
        return x
    return x * 2 if how == "twice" else x * 3


@k.kernel
def scale_all(out: k.Output, x: k.Input, *, how: str = "twice", unit: str = "") -> None:
    for i in range(out.shape[0]):
        out[i] = scaled(x[i]) + scaled(x[i], how, unit)


@pytest.mark.parametrize(
    ("params", "factor"), [({}, 4), ({"how": "thrice"}, 5), ({"unit": "m"}, 3)]
)
def test_texts(params: dict[str, str], factor: int) -> None:
    x = np.random.default_rng(5).integers(-9, 9, 7)
    out, *_ = both(scale_all, [np.zeros(7, np.int64), x], params)
    np.testing.assert_array_equal(out, factor * x)


@k.inline
def moved(x: k.Value, by: tuple[int, ...] = (1, -2), times: int = 3, more: bool = False) -> Any:
    total = x
    for _ in k.static_range(times):
        total = total + k.i64(by[0]) + by[1]
    return -total if more else total


@k.kernel
def move_all(out: k.Output, x: k.Input) -> None:
    for i in range(out.shape[0]):
        out[i] = moved(x[i]) + moved(x[i], more=True, by=(5, 6))


def test_numbers_and_tuples() -> None:
    x = np.random.default_rng(6).integers(-9, 9, 7)
    out, *_ = both(move_all, [np.zeros(7, np.int64), x], {})
    np.testing.assert_array_equal(out, (x - 3) - (x + 33))
