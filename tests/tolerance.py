"""The one table of tolerances, by dtype; a test that needs another says why."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

# relative to the reference's magnitude: a few units in the last place, times the depth of a short sum
TOLERANCE: dict[str, float] = {
    "float64": 1e-12,
    "float32": 2e-5,
    "float16": 2e-3,
    "bfloat16": 1.6e-2,
    "float8_e4m3fn": 1.3e-1,
    "float8_e4m3fnuz": 1.3e-1,
    "float8_e5m2": 2.6e-1,
    "float8_e5m2fnuz": 2.6e-1,
    "float4_e2m1fn": 5.1e-1,
    "float6_e2m3fn": 1.3e-1,
    "float6_e3m2fn": 2.6e-1,
}


def tolerance(dtype: Any) -> float:
    """The tolerance of a dtype; 0 for integers and bool."""
    return TOLERANCE.get(np.dtype(dtype).name, 0.0)


def assert_close(
    actual: Any, expected: Any, dtype: Any = None, *, scale: float = 1.0, check_shape: bool = True
) -> None:
    """Compare with a reference: exact for integers, else within the table's tolerance.

    ``dtype`` is the least precise dtype of the computation (default: that of ``actual``). ``scale`` widens the
    tolerance where a long sum or a deep chain makes that due; NaN and infinities must stand at the same places.
    The absolute tolerance follows the reference's root mean square, so that cancellation near 0 is judged fairly.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    if check_shape:
        assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    tol = tolerance(actual.dtype if dtype is None else dtype) * scale
    if tol == 0.0:
        np.testing.assert_array_equal(actual, expected)
        return
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.abs(e[np.isfinite(e)])
    rms = float(np.sqrt(np.mean(finite * finite))) if finite.size else 0.0
    np.testing.assert_allclose(a, e, rtol=tol, atol=tol * max(rms, 1e-30))


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
