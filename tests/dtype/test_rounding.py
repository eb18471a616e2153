"""float64 arrays converted to narrow floats, against the nearest of all values."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from max.dtype.rounding import convert_rounding_once
from tests.rounding import near_ties, nearest

NARROW = [
    np.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e5m2fnuz,
]


@pytest.mark.parametrize("dtype", NARROW, ids=lambda d: np.dtype(d).name)
def test_once(dtype: type, rng: np.random.Generator) -> None:
    x = near_ties(dtype, rng, 3000)
    with np.errstate(all="ignore"):
        result = convert_rounding_once(x, dtype).astype(np.float64)
        twice = x.astype(np.float32).astype(dtype).astype(np.float64)
    expected = nearest(x, dtype)
    result[np.isinf(result)] = np.nan
    np.testing.assert_array_equal(result, expected)
    # by way of float32 some of them are moved onto a tie
    assert (twice[np.isfinite(expected)] != expected[np.isfinite(expected)]).sum() > 100


def test_shapes_and_other_types(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 6))[:, ::2]
    np.testing.assert_array_equal(
        convert_rounding_once(x, ml_dtypes.bfloat16),
        x.astype(np.float32).astype(ml_dtypes.bfloat16),
    )
    assert (
        convert_rounding_once(np.array(1.0 + 2.0**-8 + 2.0**-40), ml_dtypes.bfloat16)
        == 1.0 + 2.0**-7
    )
    assert convert_rounding_once(np.float32([2.5]), np.int64).tolist() == [2]
    assert convert_rounding_once(np.arange(3), ml_dtypes.float8_e4m3fn).astype(int).tolist() == [
        0,
        1,
        2,
    ]
