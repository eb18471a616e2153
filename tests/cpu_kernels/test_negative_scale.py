"""Attention by a negative scale equals that of negated queries by the positive one, bit by bit: both are exact."""

from __future__ import annotations

import copy
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.cpu_kernels.harness import run
from tests.cpu_kernels.test_interpreted import CASES

BF16 = np.dtype(ml_dtypes.bfloat16)
# the number of the scale's operand; None: an attribute
SCALES = {
    "attention of a ragged batch": 4,
    "attention": 7,
    "latent prefill": 10,
    "attention of selected tokens": 7,
    "dense attention of 3 rows, bf16": None,
    "dense attention of 11 rows, bf16": None,
}


def attend(name: str, machine: str, sign: float) -> list[np.ndarray]:
    symbol, operands, results, attributes = CASES[name]
    attributes = dict(attributes)
    values = copy.deepcopy([np.asarray(x) for x in operands])
    at = SCALES[name]
    scale = 0.3 * sign
    for i, x in enumerate(values):
        if x.dtype == np.float32 and i != at:
            values[i] = x.astype(BF16)
    values[0] = values[0] * BF16.type(sign)
    if at is None:
        attributes["scale"] = scale
    else:
        values[at] = np.full_like(values[at], scale)
    narrow: list[tuple[Any, tuple[int, ...]]] = [(BF16, shape) for _, shape in results]
    return [x.astype(np.float32) for x in run(symbol, values, narrow, attributes, machine=machine)]


@pytest.mark.parametrize("machine", ["host", "invariant host"])
@pytest.mark.parametrize("name", SCALES)
def test_negative_scale(name: str, machine: str) -> None:
    positive, negative = (attend(name, machine, sign) for sign in (1.0, -1.0))
    for a, b in zip(positive, negative, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)
