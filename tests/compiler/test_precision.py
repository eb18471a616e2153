"""Which conversions are exact, against the values of NumPy's and ml_dtypes' types."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from max._compiler.analysis.precision import KEEPS, holds
from max.dtype import DType

pytestmark = pytest.mark.any_target

SMALL = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float6_e2m3fn", "float6_e3m2fn",
         "float4_e2m1fn"]  # fmt: skip
LARGE = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


def numpy_type(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name) if name in SMALL or name == "bfloat16" else name)


def values_of(name: str) -> np.ndarray:
    """All values of a type; of more than 16 bits those at its ends, and some with all bits of the significand."""
    kind = numpy_type(name)
    if name in SMALL or kind.itemsize == 2:
        bits = {"float6_e2m3fn": 6, "float6_e3m2fn": 6, "float4_e2m1fn": 4}.get(
            name, 8 * kind.itemsize
        )
        return np.arange(1 << bits).astype(f"u{kind.itemsize}").view(kind)
    if kind.kind == "f":
        limits = np.finfo(kind)
        ends = [
            limits.max,
            -limits.max,
            limits.smallest_subnormal,
            1 + limits.eps,
            0.0,
            -0.0,
            np.inf,
            -np.inf,
            np.nan,
        ]
        return np.array(ends, kind)
    if kind.kind == "b":
        return np.array([False, True])
    limits = np.iinfo(kind)
    return np.array([limits.min, limits.max, limits.max // 2, 0, 1], kind)


def is_exact(wide: str, narrow: str) -> bool:
    """Whether a conversion and the one back give the same bits; all NaN are one."""
    values = values_of(narrow)
    with np.errstate(all="ignore"):
        # the types of ml_dtypes convert to the floats of NumPy exactly
        through = values.astype(np.float64) if narrow in SMALL else values
        there = through.astype(numpy_type(wide)).astype(np.float64)
        one = values.astype(np.float64)
    if values.dtype.kind in "iub":
        return all(
            float(x).is_integer() and int(x) == int(y) for x, y in zip(there, values, strict=True)
        )
    same = (one.view(np.int64) == there.view(np.int64)) | (np.isnan(one) & np.isnan(there))
    return bool(same.all())


@pytest.mark.parametrize("wide", LARGE)
def test_a_large_float_holds_what_it_converts_exactly(wide: str) -> None:
    for narrow in [*SMALL, *LARGE, *INTEGERS, "bool"]:
        assert holds(DType[wide], DType[narrow]) == is_exact(wide, narrow), narrow


@pytest.mark.parametrize("wide", SMALL)
def test_a_small_float_holds_itself_and_flags(wide: str) -> None:
    """It may lack infinities, NaN or a negative zero."""
    held = [name for name in [*SMALL, *LARGE, *INTEGERS, "bool"] if holds(DType[wide], DType[name])]
    assert held == [wide, "bool"]


def test_nodes_that_keep_exactness() -> None:
    """Their results are operands, integers between, or an operand with another sign."""
    assert {"neg", "abs", "max", "floor", "select", "reduce_min"} <= KEEPS
    assert not KEEPS & {"add", "sub", "mul", "div", "sqrt", "exp", "reduce_add"}
