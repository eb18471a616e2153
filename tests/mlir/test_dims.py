"""Dimension expressions against plain integers."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max.graph.dim import POC
from max.mlir.dim_parser import DimParseError, parse_dim
from max.mlir.dims import DimExpr, is_symbol_name, may_be_negative

SYMBOLS = ("a", "b", "c")
OPERATORS: dict[str, Callable[..., object]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
}

leaves = st.one_of(st.sampled_from(SYMBOLS), st.integers(-9, 9).map(lambda n: f"({n})"))
texts = st.recursive(
    leaves,
    lambda inner: st.tuples(inner, st.sampled_from(list(OPERATORS)), inner).map(
        lambda t: f"({t[0]} {t[1]} {t[2]})"
    ),
    max_leaves=7,
)
environments = st.fixed_dictionaries({name: st.integers(0, 12) for name in SYMBOLS})


linear = st.tuples(*[st.integers(-6, 6)] * 4).map(
    lambda k: f"({k[0]} * a + {k[1]} * b + {k[2]} * c + {k[3]})"
)
divisors = st.one_of(st.integers(-6, 6).map(lambda n: f"({n})"), st.sampled_from(SYMBOLS), linear)
quotients = st.tuples(linear, divisors).map(lambda t: f"({t[0]} // {t[1]})")
# sizes of windows, chunks and pages: quotients of linear forms, and of such quotients
nested_quotients = st.tuples(
    st.integers(-3, 3), quotients, st.integers(-9, 9), divisors, st.integers(-3, 3), quotients
).map(lambda t: f"(({t[0]} * {t[1]} + {t[2]}) // {t[3]} + {t[4]} * {t[5]})")


def parsed(text: str) -> DimExpr | None:
    """The expression, or None where a part divides by a constant 0."""
    try:
        return parse_dim(text)
    except ZeroDivisionError:
        return None


@given(texts | nested_quotients, environments)
@settings(max_examples=400)
def test_value_is_that_of_python(text: str, env: dict[str, int]) -> None:
    expr = parsed(text)
    try:
        expected = eval(text, {}, dict(env))
    except ZeroDivisionError:
        return
    if expr is not None:
        assert expr.evaluate(env) == expected
        assert expr.substitute(env) == expected


@given(texts | nested_quotients)
def test_text_is_read_back(text: str) -> None:
    expr = parsed(text)
    if expr is None:
        return
    for again in (parse_dim(str(expr)), parse_dim(expr.text("floordiv")), copy.deepcopy(expr)):
        assert again == expr
        assert hash(again) == hash(expr)
    assert pickle.loads(pickle.dumps(expr)) == expr
    assert set(expr.symbols) <= set(SYMBOLS)


@given(texts, texts, texts)
def test_equal_polynomials_are_one_expression(x: str, y: str, z: str) -> None:
    a, b, c = parsed(x), parsed(y), parsed(z)
    if a is None or b is None or c is None:
        return
    assert a + b == b + a
    assert a * b == b * a
    assert (a + b) + c == a + (b + c)
    assert (a * b) * c == a * (b * c)
    assert a * (b + c) == a * b + a * c
    assert a - a == 0 and hash(a - a) == hash(0)
    assert 0 - (0 - a) == a
    if b != 0:
        assert (a * b) // b == a
        # a multiple of the divisor is moved out of the quotient
        assert (a + c * b) // b == a // b + c


@given(texts, environments)
def test_substitution_by_expressions(text: str, env: dict[str, int]) -> None:
    expr = parsed(text)
    if expr is None:
        return
    a, b = DimExpr("a"), DimExpr("b")
    try:
        replaced = expr.substitute({"a": a + b, "c": 3})
        expected = expr.evaluate({**env, "a": env["a"] + env["b"], "c": 3})
    except ZeroDivisionError:
        return
    assert replaced.evaluate(env) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch * 5", "batch * 5"),
        ("5 * batch", "batch * 5"),
        ("a + a + a", "a * 3"),
        ("-a - 4", "-a - 4"),
        ("-(a + 4)", "-a - 4"),
        ("a * b * a", "a * a * b"),
        ("b - a", "-a + b"),
        ("a * 6 floordiv 3", "a * 2"),
        ("(a * 6 + 7) // 3", "a * 2 + 2"),
        ("(a + 127) // 128 * 128", "((a + 127) // 128) * 128"),
        ("(2 * a + 1) // 4", "(a // 2)"),
        ("a // 2 // 3", "(a // 6)"),
        ("(a // b + 1) // 3", "((a + b) // (b * 3))"),
        ("((a // 2) * (a // 2) + 1) // 3", "(((a // 2) * (a // 2) + 1) // 3)"),
        ("((a // 2) * (b // 2) + 1) // 3", "(((a // 2) * (b // 2) + 1) // 3)"),
        ("(a // 2) * b", "b * (a // 2)"),
        ("a // (1 - b)", "((-a) // (b - 1))"),
        ("-3 // a", "((-3) // a)"),
        ("a + -1 // b", "a + ((-1) // b)"),
        ("(a // 2 + 1) // 3", "((a + 2) // 6)"),
        ("(a * b + b) // b", "a + 1"),
        ("(a * a - b * b) // (a - b)", "a + b"),
        ("(a * b) // (a * c)", "(b // c)"),
        ("a // -2", "-a + (a // 2)"),
        ("7 // 2 - 4", "-1"),
        ("0 * a", "0"),
        ("(2 * a + 7) // 4", "((a + 1) // 2) + 1"),
        ("(a // 2 + 3) // 5", "((a + 6) // 10)"),
        ("(3 * (a // 2) + 1) // 5", "(((a // 2) * 3 + 1) // 5)"),
        ("a * c // (a * a * b)", "(c // (a * b))"),
        ("a * a * c // (a * b)", "((a * c) // b)"),
        ("_a + 1", "_a + 1"),
        ("-(a * b)", "-a * b"),
    ],
)
def test_canonical_text(text: str, expected: str) -> None:
    expr = parse_dim(text)
    assert str(expr) == expected


def test_constants_are_ints() -> None:
    seven = DimExpr(3) + 4
    assert seven == 7 and hash(seven) == hash(7) and seven.is_static and seven.value == 7
    assert {7: "x"}[seven] == "x"  # type: ignore[index]
    # Python's hash of -1 is that of -2
    assert DimExpr(-1) - DimExpr(-2) == 1 and DimExpr(-1) != DimExpr(-2)
    assert seven != 8 and DimExpr("a") != 7 and DimExpr("a") != "a"
    # other types say themselves whether they are equal
    assert (DimExpr("a") == "a") is False and DimExpr("a") == ANY
    assert 10 // DimExpr(3) == 3 and 1 - DimExpr(3) == -2 and 2 * DimExpr(3) == 6


def test_structure() -> None:
    a, b = DimExpr("a"), DimExpr("b")
    assert a.symbol_name == "a" and (a + 0).symbol_name == "a"
    for no_symbol in (a * 2, a * a, a * b, a // 2, a + b, DimExpr(1)):
        assert no_symbol.symbol_name is None
    assert (b * a // (a + 1)).symbols == ("a", "b")
    assert (a * b * 6).exact_quotient(a * 2) == b * 3
    assert (a * b + 1).exact_quotient(a) is None
    assert a.exact_quotient(0) is None
    expr = a * a * 3 - b + 5
    assert DimExpr.from_terms(dict(expr.terms)) == expr and DimExpr.from_terms({}) == 0
    with pytest.raises(ValueError, match="dimension a \\* 2 is not static: it depends on a"):
        (a * 2).value  # noqa: B018
    assert (a * b * 6).exact_quotient(a * -2) == b * -3
    assert POC.add.apply([a, b, a]) == a * 2 + b
    assert POC.sub.apply([a, b, b]) == a - b * 2
    assert POC.mul.apply([a, b]) == a * b and POC.div.apply([a * 4, 2, 2]) == a
    names = [f"n{i}" for i in range(20)]
    assert sum(map(DimExpr, names), DimExpr(0)).symbols == tuple(sorted(names))
    assert repr(a * 2) == "DimExpr('a * 2')"


@pytest.mark.parametrize("apply", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.parametrize("other", ["x", 1.5, None])
def test_other_operands_are_type_errors(apply: Callable[..., object], other: object) -> None:
    for operands in ((DimExpr("a"), other), (other, DimExpr("a"))):
        with pytest.raises(TypeError):
            apply(*operands)


def test_what_is_never_negative() -> None:
    a, b = DimExpr("a"), DimExpr("b")
    for expr in (a, a * b + 3, (a + 1) // 2, (a + 5) // (b + 1), DimExpr(0)):
        assert not may_be_negative(expr)
    for expr in (a - 1, DimExpr(-1), (a - 1) // 2 + b, a - b, (a - b) // (b + 1), a // (b - 1)):
        assert may_be_negative(expr)


def test_division_by_zero() -> None:
    with pytest.raises(ZeroDivisionError, match="dimension a divided by 0"):
        DimExpr("a") // 0
    with pytest.raises(ZeroDivisionError):
        (DimExpr("a") // DimExpr("b")).evaluate({"a": 1, "b": 0})


@pytest.mark.parametrize("name", ["", "1a", "a b", "a-b", "a.b", "ä", "floordiv", "a\n"])
def test_names_that_are_none(name: str) -> None:
    assert not is_symbol_name(name)
    with pytest.raises(ValueError, match="cannot name a symbolic dimension"):
        DimExpr.symbol(name)


@pytest.mark.parametrize("text", ["", "a +", "(a", "a b", "a ** 2", "2.5", "a / 2", ")"])
def test_texts_that_are_none(text: str) -> None:
    with pytest.raises(DimParseError, match="is not a dimension"):
        parse_dim(text)
