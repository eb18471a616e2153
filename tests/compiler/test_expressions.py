"""Expressions of the kernel language that the code generator writes, evaluated on NumPy scalars."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from max._compiler.codegen.expressions import (
    KERNEL_NAME,
    cast,
    combine,
    compute_dtype,
    expression,
    has_expression,
    identity,
    literal,
    loaded_text,
    register_expression,
    rounded_text,
)
from max.dtype import DType

pytestmark = pytest.mark.any_target

BOOL, F32, F64, BF16, F16 = (
    DType.bool, DType.float32, DType.float64, DType.bfloat16, DType.float16,
)  # fmt: skip
INTEGERS = [
    DType.int8, DType.int16, DType.int32, DType.int64, DType.uint8, DType.uint16, DType.uint32, DType.uint64,
]  # fmt: skip
NARROW = [BF16, F16, DType.float8_e4m3fn, DType.float8_e5m2, DType.float4_e2m1fn]
TYPES = {name: dtype.to_numpy().type for dtype, name in KERNEL_NAME.items()}
K = SimpleNamespace(
    **TYPES,
    max=np.maximum,
    min=np.minimum,
    cast=lambda value, kind: kind(value),
    floor=np.floor,
    pow=np.power,
)
FN = SimpleNamespace(
    floor_div=lambda x, y: ("floor_div", x, y),
    floor_mod=lambda x, y: ("floor_mod", x, y),
    integer_mod=lambda x, y: ("integer_mod", x, y),
    signed_pow=lambda x, y: ("signed_pow", x, y),
    unsigned_pow=lambda x, y: ("unsigned_pow", x, y),
)


def value_of(text: str, **names: Any) -> Any:
    return eval(text, {"k": K, "fn": FN, "nan": math.nan, "inf": math.inf, **names})


def test_what_values_are_computed_in() -> None:
    for dtype in (BOOL, F64, F32, *INTEGERS):
        assert compute_dtype(dtype) is dtype
    for dtype in NARROW:
        assert compute_dtype(dtype) is F32


@pytest.mark.parametrize("dtype", [BOOL, F32, F64, *INTEGERS, *NARROW], ids=str)
def test_literals(dtype: DType) -> None:
    """A number of the compute type: a literal of a narrow float is not rounded."""
    kind = compute_dtype(dtype).to_numpy().type
    numbers: list[float] = [0, 1, 2, True, False]
    numbers += [0.1, -2.5, 1e30, 300.0, math.inf, -math.inf, math.nan] if dtype.is_float() else []
    numbers += [7.0, 100] if dtype in INTEGERS else []
    for number in numbers:
        found = value_of(literal(number, dtype))
        assert type(found) is kind
        np.testing.assert_array_equal(found, kind(number))


def test_literals_of_large_integers() -> None:
    for dtype in INTEGERS:
        limits = np.iinfo(dtype.to_numpy())
        assert [value_of(literal(n, dtype)) for n in (limits.min, limits.max)] == [limits.min, limits.max]  # fmt: skip


@pytest.mark.parametrize("dtype", [BOOL, F32, F64, *INTEGERS, BF16], ids=str)
def test_identities_change_nothing(dtype: DType) -> None:
    """Combined with any element, the identity of a reduction gives that element, in the element's type."""
    kind = compute_dtype(dtype).to_numpy().type
    if dtype is BOOL:
        elements: list[Any] = [False, True]
    elif dtype.is_float():
        elements = [-math.inf, -1.5, 0.0, 2.0, math.inf]
    else:
        elements = [np.iinfo(kind).min, 0, 1, np.iinfo(kind).max]
    for reduction in ("reduce_sum", "reduce_mul", "reduce_max", "reduce_min"):
        start = value_of(identity(reduction, dtype))
        assert type(start) is kind
        for element in map(kind, elements):
            result = value_of(combine(reduction, "total", "x"), total=start, x=element)
            assert result == element and type(result) is type(start), (reduction, element)


def test_combinations() -> None:
    reductions: dict[str, Callable[[Any, Any], Any]] = {
        "reduce_sum": np.add, "reduce_mul": np.multiply, "reduce_max": np.maximum, "reduce_min": np.minimum,
    }  # fmt: skip
    for reduction, reference in reductions.items():
        for x, y in ((3.0, 4.0), (-2.0, 5.0), (7.0, -1.5)):
            assert value_of(combine(reduction, "x", "y"), x=x, y=y) == reference(x, y)


def test_the_element_is_the_first_argument() -> None:
    """Kernels test the first one for NaN, and the accumulator is what the next step waits for."""
    assert combine("reduce_max", "total", "x") == "k.max(x, total)"


def test_operands_are_in_their_order() -> None:
    x, y = np.float32(7.0), np.float32(2.0)
    for op, expected in (("sub", 5.0), ("div", 3.5), ("greater", True), ("pow", 49.0)):
        assert value_of(expression(op, "", F32, ["x", "y"]), x=x, y=y) == expected
        assert value_of(expression(op, "", BF16, ["x", "y"]), x=x, y=y) == expected


def test_floats_and_integers() -> None:
    def called(op: str, dtype: DType) -> Any:
        found = value_of(expression(op, "", dtype, ["x", "y"]), x=7, y=2)
        return found if isinstance(found, tuple) else float(found)

    assert called("div", F16) == 3.5 and called("div", DType.int8) == ("floor_div", 7, 2)
    assert called("mod", F32) == ("floor_mod", 7, 2)
    assert called("mod", DType.uint8) == ("integer_mod", 7, 2)
    assert called("pow", F64) == 49.0
    assert called("pow", DType.int32) == ("signed_pow", 7, 2)
    assert called("pow", DType.uint32) == ("unsigned_pow", 7, 2)
    assert value_of(expression("floor", "", F32, ["x"]), x=2.5) == 2.0
    assert expression("floor", "", DType.int32, ["x"]) == "x", "integers are whole"


def test_casts() -> None:
    x = np.float32(2.75)
    assert value_of(cast("x", F32, DType.int32), x=x) == 2
    assert cast("x", F32, BF16) == cast("x", BF16, F16) == cast("x", BOOL, BOOL) == "x"
    for value, flag in ((0.0, False), (-0.0, False), (0.5, True), (math.nan, True)):
        found = value_of(cast("x", F64, BOOL), x=np.float64(value))
        assert found == flag and type(found) is np.bool_
    assert type(value_of(cast("x", F32, F64), x=x)) is np.float64
    assert type(value_of(cast("x", DType.int8, BF16), x=np.int8(3))) is np.float32


def test_rounding_and_loading() -> None:
    third = np.float32(1 / 3)
    assert value_of(rounded_text("x", BF16), x=third) == BF16.to_numpy().type(third)
    assert value_of(rounded_text("x", F64), x=third) == np.float64(third)
    narrow = F16.to_numpy().type(third)
    loaded = value_of(loaded_text("x", F16), x=narrow)
    assert type(loaded) is np.float32 and loaded == np.float32(narrow)
    assert loaded_text("x", F32) == loaded_text("x", F64) == "x"
    assert loaded_text("x", DType.int8) == loaded_text("x", BOOL) == "x"


def test_which_ops_have_expressions() -> None:
    assert all(has_expression(op) for op in ("add", "tanh", "cast", "round_to"))
    assert not any(has_expression(op) for op in ("matmul", "reduce_sum", ""))
    with pytest.raises(KeyError):
        expression("matmul", "", F32, ["x", "y"])
    with pytest.raises(ValueError, match="has an expression for 'cast'"):
        register_expression("cast", lambda dtype, attr, args: "")
