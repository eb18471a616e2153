"""`max.experimental.array_api` against NumPy, whose main namespace follows the standard; operators and attributes."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import numpy as np
import pytest

from max.dtype import DType
from max.experimental import Tensor
from max.experimental import array_api as xp

# the functions, constants and dtypes of the standard's main namespace, version 2024.12
STANDARD = """
e inf nan pi newaxis asarray arange empty empty_like eye from_dlpack full full_like linspace meshgrid ones ones_like
tril triu zeros zeros_like astype broadcast_arrays broadcast_shapes broadcast_to can_cast finfo isdtype iinfo
result_type int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64 complex128 bool abs acos acosh
add asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_invert bitwise_or bitwise_right_shift
bitwise_xor ceil clip conj copysign cos cosh divide equal exp expm1 floor floor_divide greater greater_equal hypot imag
isfinite isinf isnan less less_equal log log1p log2 log10 logaddexp logical_and logical_not logical_or logical_xor
maximum minimum multiply negative nextafter not_equal positive pow real reciprocal remainder round sign signbit sin
sinh square sqrt subtract tan tanh trunc take take_along_axis matmul tensordot matrix_transpose vecdot concat
expand_dims flip moveaxis permute_dims repeat reshape roll squeeze stack tile unstack argmax argmin nonzero
count_nonzero searchsorted where unique_all unique_counts unique_inverse unique_values isin argsort sort
cumulative_sum cumulative_prod max mean min prod std sum var all any diff __array_namespace_info__
""".split()

rng = np.random.default_rng(0)
X = rng.standard_normal((3, 4, 5)).astype(np.float32)
Y = rng.standard_normal((4, 5)).astype(np.float32)
UNIT = rng.uniform(-0.95, 0.95, (3, 7)).astype(np.float32)
POSITIVE = rng.uniform(0.1, 9, (3, 7)).astype(np.float32)
ODD = np.array([-np.inf, -2.5, -0.5, -0.0, 0.0, 0.5, 1.5, np.inf, np.nan], np.float32)
INTS = rng.integers(-9, 9, (3, 4)).astype(np.int32)
OTHER = rng.integers(1, 5, (3, 4)).astype(np.int32)
BOOLS = rng.random((3, 4)) < 0.5

CASES: list[tuple[str, tuple[object, ...], dict[str, object]]] = [
    *[(n, (X,), {}) for n in ("abs", "exp", "cos", "sin", "tan", "tanh", "cosh", "square", "negative", "positive")],
    *[(n, (UNIT,), {}) for n in ("acos", "atanh")],
    *[(n, (POSITIVE,), {}) for n in ("log", "log2", "log10", "log1p", "sqrt", "reciprocal")],
    *[(n, (ODD,), {}) for n in ("ceil", "floor", "round", "trunc", "sign", "isnan", "isinf", "isfinite", "abs")],
    *[(n, (INTS,), {}) for n in ("ceil", "floor", "round", "trunc", "sign", "isnan", "isinf", "isfinite", "abs")],
    *[(n, (X, Y), {}) for n in ("add", "subtract", "multiply", "divide", "maximum", "minimum", "logaddexp")],
    *[(n, (X, Y), {}) for n in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")],
    *[(n, (INTS, OTHER), {}) for n in ("add", "floor_divide", "remainder", "pow", "maximum", "less_equal")],
    ("logaddexp", (ODD, np.float32(1.5) + 0 * np.nan_to_num(ODD, posinf=0, neginf=0)), {}),
    ("logaddexp", (ODD, ODD), {}),
    ("floor_divide", (X, Y), {}),
    ("remainder", (X, Y), {}),
    ("pow", (POSITIVE, UNIT), {}),
    ("clip", (X, -0.5, 0.5), {}),
    ("clip", (INTS, -2, None), {}),
    ("logical_and", (BOOLS, ~BOOLS), {}),
    ("logical_or", (BOOLS, INTS > 0), {}),
    ("logical_xor", (BOOLS, INTS > 0), {}),
    ("logical_not", (BOOLS,), {}),
    ("where", (BOOLS, INTS, OTHER), {}),
    *[(n, (INTS, OTHER), {}) for n in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift",
            "bitwise_right_shift")],
    *[(n, (INTS.astype(np.uint8), OTHER[0].astype(np.uint8)), {}) for n in ("bitwise_and", "bitwise_right_shift")],
    *[(n, (BOOLS, ~BOOLS), {}) for n in ("bitwise_and", "bitwise_or", "bitwise_xor")],
    ("bitwise_xor", (INTS.astype(np.int64), 5), {}),
    *[(n, (x,), {}) for n in ("real", "imag", "conj") for x in (X, ODD, INTS)],
    *[("bitwise_invert", (x,), {}) for x in (INTS, INTS.astype(np.uint16), BOOLS)],
    *[("signbit", (x,), {}) for x in (ODD, -ODD, ODD.astype(np.float64))],
    ("copysign", (X, Y), {}),
    ("copysign", (ODD, -ODD[::-1].copy()), {}),
    *[("nextafter", (a.astype(t), b.astype(t)), {}) for t in (np.float32, np.float64) for a,
        b in ((ODD, ODD[::-1]), (X, X + 1), (X, X - 1))],
    *[(n, (x * scale,), {}) for n in ("expm1", "sinh", "asinh", "atan") for x in (X, ODD,
            X.astype(np.float64)) for scale in (1, 1e-4, 30)],
    *[(n, (x,), {}) for n in ("asin", "atan") for x in (UNIT, ODD, UNIT * 1e-3, UNIT.astype(np.float64))],
    *[("acosh", (x,), {}) for x in (1 + POSITIVE, 1 + POSITIVE * 1e-4, POSITIVE * 1e6, ODD)],
    *[(n, (ODD[:, None].repeat(9, 1), ODD[None].repeat(9, 0)), {}) for n in ("atan2", "hypot")],
    *[(n, (X * 1e30, Y * 1e30), {}) for n in ("atan2", "hypot")],
    *[("prod", (x,), {"axis": a, "keepdims": keep}) for x in (X, INTS, INTS.astype(np.int8)) for a,
        keep in ((None, False), (0, True), (-1, False))],
    ("prod", (X[:0],), {"axis": 0}),
    *[("cumulative_prod", (X,), {"axis": a}) for a in (0, 1, -1)],
    ("cumulative_prod", (INTS,), {"axis": 0, "include_initial": True}),
    *[("nonzero", (x,), {}) for x in (INTS, BOOLS, X, INTS * 0)],
    *[(n, (x,), {}) for n in ("unique_all", "unique_counts", "unique_inverse", "unique_values") for x in (INTS, OTHER,
            X, INTS[:0])],
    *[("searchsorted", (np.sort(UNIT[0]), UNIT), {"side": side}) for side in ("left", "right")],
    *[("searchsorted", (np.sort(INTS[0]), INTS), {"side": side}) for side in ("left", "right")],
    ("searchsorted", (UNIT[0], UNIT), {"sorter": np.argsort(UNIT[0])}),
    ("isin", (INTS, OTHER), {}),
    ("isin", (INTS, OTHER[0]), {"invert": True}),
    ("matmul", (X, Y.T.copy()), {}),
    ("matrix_transpose", (X,), {}),
    ("vecdot", (X, Y), {}),
    ("vecdot", (X, X), {"axis": -2}),
    ("tensordot", (X, Y), {}),
    ("tensordot", (X, Y), {"axes": ((1,), (0,))}),
    ("tensordot", (X, Y), {"axes": 0}),
    ("reshape", (X, (5, -1)), {}),
    ("permute_dims", (X, (2, 0, 1)), {}),
    ("moveaxis", (X, 0, -1), {}),
    ("moveaxis", (X, (0, 1), (-1, 0)), {}),
    ("expand_dims", (X,), {"axis": -1}),
    ("squeeze", (X[:, :1, None], (1, 2)), {}),
    ("concat", ([X, X[:1]],), {}),
    ("concat", ([X, Y],), {"axis": None}),
    ("stack", ([Y, Y + 1],), {"axis": 1}),
    ("unstack", (X,), {"axis": 1}),
    ("flip", (X,), {}),
    ("flip", (X,), {"axis": (0, -1)}),
    ("roll", (X, 7), {}),
    ("roll", (X, (1, -2)), {"axis": (0, 2)}),
    ("repeat", (X, 3), {"axis": 1}),
    ("repeat", (Y, 2), {}),
    ("tile", (Y, (2, 1, 3)), {}),
    ("tile", (X, (2,)), {}),
    ("tril", (X,), {"k": 1}),
    ("triu", (Y,), {"k": -1}),
    ("broadcast_to", (Y, (2, 4, 5)), {}),
    ("broadcast_arrays", (X, Y), {}),
    ("broadcast_shapes", ((3, 1), (4,)), {}),
    ("meshgrid", (np.arange(3), np.arange(4)), {}),
    ("meshgrid", (np.arange(3), np.arange(4), np.arange(2)), {"indexing": "ij"}),
    ("take", (X, np.array([2, 0])), {"axis": 1}),
    ("take_along_axis", (X, np.argsort(X, axis=1)), {"axis": 1}),
    ("argsort", (X,), {"axis": 1}),
    ("sort", (X,), {}),
    ("argsort", (INTS,), {"axis": 0, "stable": True}),
    ("sort", (INTS,), {"axis": 0}),
    ("count_nonzero", (INTS,), {"axis": 1}),
    *[(n, (X,), {"axis": a}) for n in ("argmax", "argmin") for a in (None, 0, -1)],
    ("argmax", (X,), {"axis": 1, "keepdims": True}),
    *[
        (n, (X,), {"axis": a, "keepdims": keep})
        for n in ("sum", "mean", "max", "min", "var", "std")
        for a, keep in ((None, False), (1, True), ((0, -1), False))
    ],
    ("sum", (INTS.astype(np.int8),), {}),
    ("sum", (INTS.astype(np.uint8),), {"axis": 0}),
    *[(n, (BOOLS,), {"axis": a}) for n in ("all", "any") for a in (None, 1)],
    ("any", (X,), {"axis": (0, 2)}),
    ("cumulative_sum", (X,), {"axis": 1}),
    ("cumulative_sum", (INTS,), {"axis": -1, "include_initial": True}),
    ("diff", (X,), {"axis": 0}),
    ("diff", (INTS,), {"n": 2}),
    ("zeros", ((2, 3),), {}),
    ("ones", ((4,),), {}),
    ("full", ((2, 2), 7), {}),
    ("full", ((2, 2), True), {}),
    ("zeros_like", (INTS,), {}),
    ("ones_like", (X,), {}),
    ("full_like", (INTS, 3), {}),
    ("eye", (3, 5), {"k": -1}),
    ("arange", (3,), {}),
    ("arange", (1, 9, 2), {}),
    ("arange", (0, 1, 0.25), {}),
    ("linspace", (0, 1, 7), {}),
    ("linspace", (0, 1, 5), {"endpoint": False}),
    ("asarray", ([[1, 2], [3, 4]],), {}),
    ("asarray", ([1.5, 2],), {}),
    ("from_dlpack", (X,), {}),
]  # fmt: skip


def ours(value):
    if isinstance(value, list):
        return [ours(v) for v in value]
    return (
        Tensor.from_dlpack(value.copy()) if isinstance(value, np.ndarray) and value.ndim else value
    )


def compare(result, expected, wide: bool = False) -> None:
    if isinstance(expected, tuple | list):
        assert len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            compare(one, other, wide)
        return
    if not isinstance(result, Tensor):
        assert result == expected
        return
    array, expected = result.to_numpy(), np.asarray(expected)
    assert array.shape == expected.shape
    # the default float is float32 here
    kind = expected.dtype if wide or expected.dtype != np.float64 else np.dtype(np.float32)
    assert array.dtype == kind
    np.testing.assert_allclose(
        array, expected, rtol=1e-13 if wide else 2e-5, atol=0 if wide else 1e-6
    )


@pytest.mark.parametrize(
    "name, args, kwargs", [pytest.param(*c, id=f"{i}-{c[0]}") for i, c in enumerate(CASES)]
)
def test_like_numpy(name, args, kwargs) -> None:
    with np.errstate(all="ignore"):
        expected = getattr(np, name)(*args, **kwargs)
    if name == "unique_values":  # NumPy's order is that of a hash table
        expected = np.sort(expected)
    wide = any(isinstance(arg, np.ndarray) and arg.dtype == np.float64 for arg in args)
    named = {key: ours(value) for key, value in kwargs.items()}
    compare(getattr(xp, name)(*map(ours, args), **named), expected, wide)


def test_the_page_says_how_many_there_are() -> None:
    have = [name for name in STANDARD if hasattr(xp, name)]
    absent = sorted(set(STANDARD) - set(have))
    assert set(xp.__all__) <= {*STANDARD, "linalg"}
    page = (Path(__file__).parents[2] / "docs" / "eager.md").read_text()
    part = page[page.index("## The array API standard") :]
    assert f"{len(have)} of the {len(STANDARD)} names" in part
    listed = re.findall(
        r"`(\w+)`", part[part.index("Absent are") : part.index("\n\n", part.index("Absent are"))]
    )
    assert sorted(listed) == absent
    tested = {c[0] for c in CASES} | {
        "astype",
        "can_cast",
        "finfo",
        "iinfo",
        "isdtype",
        "result_type",
    }
    tested |= {"empty", "empty_like", "e", "inf", "nan", "pi", "newaxis"}
    tested |= {"__array_namespace_info__"}
    assert [n for n in have if n not in tested and not isinstance(getattr(xp, n), DType)] == []


def test_dtypes() -> None:
    x = Tensor.zeros((2,), dtype=DType.float32)
    assert x.__array_namespace__() is xp and x.__array_namespace__(api_version="2023.12") is xp
    with pytest.raises(ValueError, match="version '1999'"):
        x.__array_namespace__(api_version="1999")
    assert (x.ndim, x.size, x.to_device(x.device).size) == (1, 2, 2)
    assert Tensor.zeros((2, 3, 4)).mT.shape == (2, 4, 3)
    assert xp.astype(x, xp.int32).dtype == DType.int32 and xp.astype(x, xp.float32, copy=False) is x
    assert xp.finfo(xp.float32).eps == np.finfo(np.float32).eps and xp.finfo(x).bits == 32
    assert xp.finfo(DType.bfloat16).max > 3e38
    assert (xp.iinfo(xp.int16).max, xp.iinfo(xp.uint8).min) == (32767, 0)
    assert xp.isdtype(xp.int8, "integral") and not xp.isdtype(xp.uint8, "signed integer")
    assert xp.isdtype(xp.bool, ("numeric", "bool")) and xp.isdtype(xp.int8, xp.int8)
    with pytest.raises(ValueError, match="kind is 'floats'"):
        xp.isdtype(xp.int8, "floats")
    assert xp.result_type(xp.int32, xp.int64) == xp.int64
    assert (
        xp.result_type(x, 1.5) == xp.float32
        and xp.result_type(xp.float32, xp.float64) == xp.float64
    )
    with pytest.raises(ValueError, match="expected a tensor or dtype"):
        xp.result_type(1.5)
    assert xp.can_cast(xp.int8, xp.int16) and not xp.can_cast(xp.float32, xp.int64)
    assert not xp.can_cast(xp.bool, xp.int8) and xp.can_cast(x, xp.float64)
    assert xp.empty((2, 3)).shape == (2, 3) and xp.empty_like(x).dtype == x.dtype


def test_asarray_copies_only_where_it_must() -> None:
    array = np.arange(4, dtype=np.float32)
    shared, copied = xp.asarray(array), xp.asarray(xp.asarray(array), copy=True)
    array[0] = 9
    assert shared[0].item() == 9 and copied[0].item() == 0
    same = xp.asarray(shared)
    assert same is shared and xp.asarray(shared, copy=True) is not shared
    with pytest.raises(ValueError, match="copy is False"):
        xp.asarray(shared, dtype=xp.float64, copy=False)
    assert xp.asarray(3).dtype == DType.int64 and xp.asarray(True).dtype == DType.bool
    assert xp.asarray(1.5).dtype == DType.float32


@pytest.mark.parametrize(
    "index",
    [1, -1, slice(None, None, -1), (..., 0), (None, 1), (slice(1, 3), slice(None, None, 2))],
)
def test_basic_indexing(index) -> None:
    np.testing.assert_array_equal(Tensor.from_dlpack(X)[index].to_numpy(), X[index])


def test_functions_have_docstrings() -> None:
    functions = [getattr(xp, n) for n in xp.__all__]
    assert [f for f in functions if inspect.isfunction(f) and not f.__doc__] == []
