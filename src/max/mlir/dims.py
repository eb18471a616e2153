"""Dimension expressions: integer polynomials over symbols with floor divisions, in canonical form.

Expressions that are equal as polynomials compare and hash equal::

    >>> a, b = DimExpr.symbol("a"), DimExpr.symbol("b")
    >>> (a + b) * (a + b) == a * a + 2 * a * b + b * b
    True
    >>> str((a * 6 + 7) // 3)
    'a * 2 + 2'
    >>> str((a + b) // 2 * b)
    'b * ((a + b) // 2)'
"""

# module functions build instances of `DimExpr` and read its fields
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from max._host.process_caches import cached_results

__all__ = [
    "DimExpr",
    "FloorDiv",
    "is_symbol_name",
    "may_be_negative",
]

_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEYWORDS = frozenset({"floordiv"})


class FloorDiv(NamedTuple):
    """An irreducible quotient ``numerator // denominator``, rounded toward minus infinity."""

    numerator: DimExpr
    denominator: DimExpr


Atom = str | FloorDiv
Monomial = tuple[tuple[Atom, int], ...]
"""Pairs of atom and power, sorted by `_atom_key`; the empty tuple is the constant monomial."""


def is_symbol_name(name: str) -> bool:
    """Whether `name` is a valid symbol: a letter or ``_``, then letters, digits, ``_``; not a keyword."""
    return _SYMBOL.fullmatch(name) is not None and name not in _KEYWORDS


def _atom_key(atom: Atom) -> tuple[int, str]:
    if type(atom) is str:
        return (0, atom)
    assert isinstance(atom, FloorDiv)
    return (1, f"{atom.numerator.text()} // {atom.denominator.text()}")


def _monomial_key(monomial: Monomial) -> tuple[int, tuple[tuple[tuple[int, str], int], ...]]:
    """Sort key of the graded lexicographic order, greatest first. Long division requires a monomial order."""
    degree = 0
    for _, power in monomial:
        degree += power
    return (-degree, tuple((_atom_key(atom), -power) for atom, power in monomial))


def _multiply(x: Monomial, y: Monomial) -> Monomial:
    if not x:
        return y
    if not y:
        return x
    powers = dict(x)
    for atom, power in y:
        powers[atom] = powers.get(atom, 0) + power
    return tuple(sorted(powers.items(), key=lambda item: _atom_key(item[0])))


def _divide(x: Monomial, y: Monomial) -> Monomial | None:
    """``x / y``, or None if `y` does not divide `x`."""
    if not y:
        return x
    powers = dict(x)
    for atom, power in y:
        remaining = powers.get(atom, 0) - power
        if remaining < 0:
            return None
        powers[atom] = remaining
    return tuple((atom, power) for atom, power in x if powers[atom] for power in (powers[atom],))


class DimExpr:
    """An immutable integer expression over named symbols, in canonical form.

    Supports ``+``, ``-``, ``*``, ``//`` with expressions and ints. Constants compare and hash equal to ints.
    """

    __slots__ = ("__weakref__", "_hash", "_symbols", "_terms", "_value")

    _terms: tuple[tuple[Monomial, int], ...]
    _hash: int
    _symbols: tuple[str, ...] | None
    _value: int | None

    def __init__(self, value: int | str | DimExpr) -> None:
        other = DimExpr.of(value)
        self._terms = other._terms
        self._hash = other._hash
        self._symbols = other._symbols
        self._value = other._value

    @staticmethod
    def of(value: int | str | DimExpr) -> DimExpr:
        """Converts an int or a symbol's name; an expression is returned unchanged."""
        if isinstance(value, DimExpr):
            return value
        if isinstance(value, str):
            return DimExpr.symbol(value)
        return _constant(int(value))

    @staticmethod
    def symbol(name: str) -> DimExpr:
        """The symbol `name`.

        Raises:
            ValueError: The name is not a valid symbol.
        """
        return _symbol(name)

    @staticmethod
    def constant(value: int) -> DimExpr:
        """A constant expression."""
        return _constant(value)

    @staticmethod
    def from_terms(terms: Mapping[Monomial, int]) -> DimExpr:
        """The sum of coefficient times monomial, for monomials of other expressions."""
        return _from_terms(terms)

    # Structure

    @property
    def terms(self) -> tuple[tuple[Monomial, int], ...]:
        """Pairs of monomial and non-zero coefficient, greatest monomial first."""
        return self._terms

    @property
    def is_static(self) -> bool:
        """Whether the expression is a constant."""
        return self._value is not None

    @property
    def value(self) -> int:
        """The value of a static expression.

        Raises:
            ValueError: The expression depends on symbols.
        """
        if self._value is not None:
            return self._value
        raise ValueError(f"dimension {self} is not static: it depends on {', '.join(self.symbols)}")

    @property
    def symbol_name(self) -> str | None:
        """The name if the expression is a single symbol, else None."""
        terms = self._terms
        if len(terms) == 1 and terms[0][1] == 1:
            monomial = terms[0][0]
            if len(monomial) == 1 and monomial[0][1] == 1 and type(monomial[0][0]) is str:
                return monomial[0][0]
        return None

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of all symbols in the expression, sorted."""
        if self._symbols is None:
            names: set[str] = set()
            for monomial, _ in self._terms:
                for atom, _ in monomial:
                    if isinstance(atom, FloorDiv):
                        names.update(atom.numerator.symbols)
                        names.update(atom.denominator.symbols)
                    else:
                        names.add(atom)
            self._symbols = tuple(sorted(names))
        return self._symbols

    def evaluate(self, env: Mapping[str, int]) -> int:
        """Evaluates the expression for the sizes in `env`.

        Raises:
            KeyError: A symbol is not in `env`.
            ZeroDivisionError: A denominator is 0 under `env`.
        """
        total = 0
        for monomial, coefficient in self._terms:
            product = coefficient
            for atom, power in monomial:
                if isinstance(atom, FloorDiv):
                    factor = atom.numerator.evaluate(env) // atom.denominator.evaluate(env)
                else:
                    factor = env[atom]
                product *= factor if power == 1 else factor**power
            total += product
        return total

    def substitute(self, env: Mapping[str, int | DimExpr]) -> DimExpr:
        """Replaces the symbols in `env`."""
        if not any(name in env for name in self.symbols):
            return self
        total = _constant(0)
        for monomial, coefficient in self._terms:
            product = _constant(coefficient)
            for atom, power in monomial:
                if isinstance(atom, FloorDiv):
                    factor = atom.numerator.substitute(env) // atom.denominator.substitute(env)
                else:
                    factor = DimExpr.of(env.get(atom, atom))
                for _ in range(power):
                    product = product * factor
            total = total + product
        return total

    # Arithmetic

    def __add__(self, other: int | DimExpr) -> DimExpr:
        y = _coerce(other)
        if y is None:
            return NotImplemented
        if self._value is not None and y._value is not None:
            return _constant(self._value + y._value)
        if not y._terms:
            return self
        if not self._terms:
            return y
        terms = dict(self._terms)
        for monomial, coefficient in y._terms:
            terms[monomial] = terms.get(monomial, 0) + coefficient
        return _from_terms(terms)

    __radd__ = __add__

    def __neg__(self) -> DimExpr:
        if self._value is not None:
            return _constant(-self._value)
        return _build(tuple((monomial, -coefficient) for monomial, coefficient in self._terms))

    def __sub__(self, other: int | DimExpr) -> DimExpr:
        y = _coerce(other)
        if y is None:
            return NotImplemented
        if self._hash == y._hash and self._terms == y._terms:
            return _constant(0)
        return self + -y

    def __rsub__(self, other: int) -> DimExpr:
        y = _coerce(other)
        return NotImplemented if y is None else y + -self

    def __mul__(self, other: int | DimExpr) -> DimExpr:
        y = _coerce(other)
        if y is None:
            return NotImplemented
        if self._value is not None and y._value is not None:
            return _constant(self._value * y._value)
        terms: dict[Monomial, int] = {}
        for x_monomial, x_coefficient in self._terms:
            for y_monomial, y_coefficient in y._terms:
                monomial = _multiply(x_monomial, y_monomial)
                terms[monomial] = terms.get(monomial, 0) + x_coefficient * y_coefficient
        return _from_terms(terms)

    __rmul__ = __mul__

    def __floordiv__(self, other: int | DimExpr) -> DimExpr:
        y = _coerce(other)
        return NotImplemented if y is None else _floor_divide(self, y)

    def __rfloordiv__(self, other: int) -> DimExpr:
        y = _coerce(other)
        return NotImplemented if y is None else _floor_divide(y, self)

    def exact_quotient(self, divisor: int | DimExpr) -> DimExpr | None:
        """``self / divisor`` if the division has no remainder, else None."""
        y = DimExpr.of(divisor)
        if not y._terms:
            return None
        quotient, remainder = _long_division(self, y)
        return None if remainder._terms else quotient

    # Comparison and text

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, DimExpr):
            return self._hash == other._hash and self._terms == other._terms
        if isinstance(other, int):
            return self.is_static and self.value == other
        return NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"DimExpr({self.text()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (DimExpr.from_terms, (dict(self._terms),))

    def text(self, floor_div: str = "//") -> str:
        """Formats the expression for `max.mlir.dim_parser`; `floor_div` is ``//``, or ``floordiv`` for MLIR."""
        if not self._terms:
            return "0"
        parts: list[str] = []
        for index, (monomial, coefficient) in enumerate(self._terms):
            factors: list[str] = []
            for atom, power in monomial:
                factors.extend([_atom_text(atom, floor_div)] * power)
            if index == 0:
                if not factors:
                    parts.append(str(coefficient))
                    continue
                if coefficient == -1:
                    factors[0] = "-" + factors[0]
                elif coefficient != 1:
                    factors.append(str(coefficient))
                parts.append(" * ".join(factors))
            else:
                if not factors or abs(coefficient) != 1:
                    factors.append(str(abs(coefficient)))
                parts.append(("- " if coefficient < 0 else "+ ") + " * ".join(factors))
        return " ".join(parts)


def _atom_text(atom: Atom, floor_div: str) -> str:
    if isinstance(atom, FloorDiv):
        numerator, denominator = (_operand_text(side, floor_div) for side in atom)
        return f"({numerator} {floor_div} {denominator})"
    return atom


def _operand_text(expr: DimExpr, floor_div: str) -> str:
    text = expr.text(floor_div)
    return text if expr.symbol_name or (expr.is_static and expr.value >= 0) else f"({text})"


def _coerce(value: object) -> DimExpr | None:
    if type(value) is DimExpr:
        return value
    if isinstance(value, int):
        return _constant(int(value))
    return None


def _build(terms: tuple[tuple[Monomial, int], ...], value: int | None = None) -> DimExpr:
    """An expression of sorted terms; `value` is that of a constant."""
    expr = DimExpr.__new__(DimExpr)
    expr._terms = terms
    expr._symbols = None
    expr._value = value
    # constants hash as their int, which they equal
    expr._hash = hash(terms if value is None else value)
    return expr


def _from_terms(terms: Mapping[Monomial, int]) -> DimExpr:
    nonzero = [(monomial, coefficient) for monomial, coefficient in terms.items() if coefficient]
    if len(nonzero) > 1:
        nonzero.sort(key=lambda term: _monomial_key(term[0]))
    elif not nonzero or not nonzero[0][0]:
        return _constant(nonzero[0][1] if nonzero else 0)
    return _build(tuple(nonzero))


@cached_results(4096)
def _constant(value: int) -> DimExpr:
    return _build((((), value),) if value else (), value)


@cached_results(4096)
def _symbol(name: str) -> DimExpr:
    if not is_symbol_name(name):
        raise ValueError(
            f"{name!r} cannot name a symbolic dimension: a name starts with a letter or '_', goes on with "
            "letters, digits and '_', and is not 'floordiv'"
        )
    return _build(((((name, 1),), 1),))


def _long_division(x: DimExpr, y: DimExpr) -> tuple[DimExpr, DimExpr]:
    """Polynomial long division: quotient q and remainder r with ``x == q * y + r``.

    Coefficients of `r` at multiples of y's leading monomial lie between 0 and the leading coefficient, which is
    excluded. Dividends that differ by a multiple of `y` therefore have the same remainder, which makes quotients
    canonical.
    """
    leading, leading_coefficient = y._terms[0]
    dividend = dict(x._terms)
    quotient_terms: dict[Monomial, int] = {}
    remainder_terms: dict[Monomial, int] = {}
    while dividend:
        # the least key is that of the greatest monomial
        monomial = min(dividend, key=_monomial_key)
        coefficient = dividend.pop(monomial)
        shift = _divide(monomial, leading)
        if shift is not None:
            factor = quotient_terms[shift] = coefficient // leading_coefficient
            for y_monomial, y_coefficient in y._terms[1:]:
                key = _multiply(shift, y_monomial)
                value = dividend.get(key, 0) - factor * y_coefficient
                if value:
                    dividend[key] = value
                else:
                    dividend.pop(key, None)
            coefficient -= factor * leading_coefficient
        if coefficient:
            remainder_terms[monomial] = coefficient
    return _from_terms(quotient_terms), _from_terms(remainder_terms)


def _common_factor(x: DimExpr, y: DimExpr) -> DimExpr:
    """The greatest term that divides every term of both."""
    terms = (*x._terms, *y._terms)
    coefficient = math.gcd(*(c for _, c in terms))
    common, *others = [dict(monomial) for monomial, _ in terms]
    for powers in others:
        common = {a: min(p, powers[a]) for a, p in common.items() if a in powers}
    return _from_terms({tuple(sorted(common.items(), key=lambda i: _atom_key(i[0]))): coefficient})


@cached_results(4096)
def _floor_divide(x: DimExpr, y: DimExpr) -> DimExpr:
    if not y._terms:
        raise ZeroDivisionError(f"dimension {x} divided by 0")
    if y._terms[0][1] < 0:
        # a // b == -a // -b: long division needs a positive leading coefficient
        return _floor_divide(-x, -y)
    quotient, remainder = _long_division(x, y)
    if not remainder._terms:
        return quotient
    common = _common_factor(remainder, y)
    # (g * a) // (g * b) == a // b
    if common != 1:
        numerator = remainder.exact_quotient(common)
        denominator = y.exact_quotient(common)
        assert numerator is not None and denominator is not None
        return quotient + _floor_divide(numerator, denominator)
    if y._value is not None:
        return quotient + _floor_divide_by_constant(remainder, y._value)
    return quotient + _from_terms({((FloorDiv(remainder, y), 1),): 1})


def _floor_divide_by_constant(x: DimExpr, divisor: int) -> DimExpr:
    """The canonical form of ``x // divisor``, for coefficients in ``[0, divisor)`` and a positive constant."""
    symbolic = [(monomial, c) for monomial, c in x._terms if monomial]
    offset = sum(c for monomial, c in x._terms if not monomial)
    if not symbolic:
        return _constant(offset // divisor)
    # cancel the common factor: floor(n / (g * d)) == floor(floor(n / g) / d) for positive g and d
    shared = math.gcd(divisor, *(c for _, c in symbolic))
    if shared > 1:
        inner = {monomial: c // shared for monomial, c in symbolic}
        return _floor_divide(_from_terms(inner) + offset // shared, _constant(divisor // shared))
    # merge nested quotients: (a // b + c) // d == (a + b * c) // (b * d) for positive d
    if len(symbolic) == 1:
        (monomial, coefficient) = symbolic[0]
        if coefficient == 1 and len(monomial) == 1 and monomial[0][1] == 1:
            atom = monomial[0][0]
            if isinstance(atom, FloorDiv):
                inner_divisor = atom.denominator
                return _floor_divide(
                    atom.numerator + inner_divisor * offset, inner_divisor * divisor
                )
    return _from_terms({((FloorDiv(x, _constant(divisor)), 1),): 1})


def may_be_negative(expr: DimExpr) -> bool:
    """Whether an expression may be negative for some non-negative sizes of its symbols.

    False is a proof; True is conservative.
    """
    return any(
        coefficient < 0
        or any(isinstance(atom, FloorDiv) and any(map(may_be_negative, atom)) for atom, _ in powers)
        for powers, coefficient in expr.terms
    )
