"""Texts of numbers within limits, as terminals of llguidance's variant of Lark's syntax."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from math import ceil, floor
from typing import Any

_INTEGER = "-?(0|[1-9][0-9]{0,15})"
_FRACTION = r"(\.[0-9]{1,16})?"
WORDS = {
    "null": "null",
    "boolean": "true|false",
    "integer": _INTEGER,
    "number": rf"{_INTEGER}{_FRACTION}([eE][+-]?[0-9]{{1,3}})?",
}
"""Patterns of the texts of values that are no texts, lists or objects."""
LIMITS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
"""Keywords of numbers."""
_FEW_DIGITS = r"-?([0-9]{1,16}|([0-9]\.?){1,14}[0-9])"
"""Numbers that differ as texts and as floats."""
_MOST_DIGITS = 15
_MOST_LISTED = 200
_MOST_ENDS = 3
"""The maximum number of last digits that tell multiples."""


def number_patterns(limits: Mapping[str, Any], whole: bool) -> tuple[list[str], list[str]]:
    """Patterns that all match the texts of numbers within limits, and the keywords that none holds.

    Args:
        limits: The limits, by their keywords; others are ignored.
        whole: Whether the numbers are integers.
    """
    own = {key: limits[key] for key in limits if key in LIMITS}
    if not own:
        return [WORDS["integer" if whole else "number"]], []
    # one form a number, without an exponent: limits are compared digit by digit
    patterns, lacks = [f"{_INTEGER}{'' if whole else _FRACTION}", _FEW_DIGITS], list[str]()
    for keyword, strict, upper in (
        ("minimum", False, False),
        ("exclusiveMinimum", True, False),
        ("maximum", False, True),
        ("exclusiveMaximum", True, True),
    ):
        if keyword not in own:
            continue
        # the digits as JSON has them, not those of the binary fraction
        bound = Decimal(repr(own[keyword]))
        if len(format(abs(bound), "f").replace(".", "").strip("0")) > _MOST_DIGITS:
            lacks.append(keyword)
            continue
        # an upper bound is the lower bound of the opposites
        patterns.append(_beyond(-bound if upper else bound, strict, upper))
    if "multipleOf" in own:
        multiples = _multiples(own, whole)
        patterns += [] if multiples is None else [multiples]
        lacks += [] if multiples is not None else ["multipleOf"]
    return patterns, lacks


def _beyond(bound: Decimal, strict: bool, mirrored: bool) -> str:
    """The numbers from a bound on, or the opposites of these."""
    above, below = ("-", "") if mirrored else ("", "-")
    if bound > 0 or (bound == 0 and strict):
        return f"{above}({_large(bound, strict)})"
    # zero with either sign is beyond a bound that is not above it
    either = rf"{above}[0-9.]+|-?0(\.0+)?"
    small = _small(-bound, strict)
    return f"{either}|{below}({small})" if bound else either


def _parts(size: Decimal) -> tuple[str, str]:
    """The digits before and after the point, without zeros at the ends."""
    before, _, after = format(size, "f").partition(".")
    return before.lstrip("0") or "0", after.rstrip("0")


def _differing(digits: str, rest: str, greater: bool) -> list[str]:
    """Patterns of digits that first differ at some position, where they are greater or less.

    Args:
        digits: The digits.
        rest: The pattern of the digits after it; ``{}`` stands for their number.
        greater: Whether the digit there is greater.
    """
    end = "9" if greater else "0"
    return [
        digits[:at]
        + (f"[{int(digit) + 1}-9]" if greater else f"[0-{int(digit) - 1}]")
        + rest.format(len(digits) - at - 1)
        for at, digit in enumerate(digits)
        if digit != end
    ]


def _large(bound: Decimal, strict: bool) -> str:
    """The positive numbers from a bound on."""
    whole, fraction = _parts(bound)
    # more digits before the point: greater, whatever they are
    options = [rf"[1-9][0-9]{{{len(whole)},}}(\.[0-9]+)?"]
    options += [rf"{each}(\.[0-9]+)?" for each in _differing(whole, "[0-9]{{{}}}", True)]
    ends = _differing(fraction, "[0-9]*", True)
    ends.append(f"{fraction}0*[1-9][0-9]*" if strict else f"{fraction}[0-9]*")
    options.append(rf"{whole}\.({'|'.join(ends)})")
    if not fraction and not strict:
        options.append(whole)
    return "|".join(options)


def _small(bound: Decimal, strict: bool) -> str:
    """The numbers from zero to a bound that is positive."""
    whole, fraction = _parts(bound)
    # fewer digits before the point: less, whatever they are
    options = [rf"[0-9]{{1,{len(whole) - 1}}}(\.[0-9]+)?"] if len(whole) > 1 else []
    options += [rf"{each}(\.[0-9]+)?" for each in _differing(whole, "[0-9]{{{}}}", False)]
    ends = _differing(fraction, "[0-9]*", False)
    # a fraction that is a part of the bound's is less, as the rest is not zero
    ends += [fraction[:at] for at in range(1, len(fraction))]
    ends += [] if strict else [f"{fraction}0*"]
    if ends:
        options.append(rf"{whole}\.({'|'.join(ends)})")
    if fraction or not strict:
        options.append(whole)
    return "|".join(options)


def _multiples(limits: Mapping[str, Any], whole: bool) -> str | None:
    """The multiples of a divisor; None if no pattern of a fair length has them."""
    divisor = Decimal(repr(limits["multipleOf"]))
    if divisor < 1:
        # a power of ten
        sign, digits, exponent = divisor.normalize().as_tuple()
        if digits != (1,) or not isinstance(exponent, int):
            return None
        return _INTEGER if whole else rf"{_INTEGER}(\.[0-9]{{1,{-exponent}}})?"
    if divisor != int(divisor):
        return None
    step = int(divisor)
    least = max((limits[k] for k in ("minimum", "exclusiveMinimum") if k in limits), default=None)
    most = min((limits[k] for k in ("maximum", "exclusiveMaximum") if k in limits), default=None)
    if least is not None and most is not None:
        # the bounds have patterns of their own
        first, last = ceil(Decimal(repr(least)) / step), floor(Decimal(repr(most)) / step)
        if last - first < _MOST_LISTED:
            return "|".join(str(number * step) for number in range(first, last + 1)) or "x"
    # where a power of ten is a multiple, the last digits alone tell multiples
    for count in range(_MOST_ENDS + 1):
        power = 10**count
        if power % step == 0:
            ends = "|".join(f"{end:0{count}}" for end in range(0, power, step)) if count else ""
            short = "|".join(str(end) for end in range(0, power, step))
            return f"-?({short}|[1-9][0-9]*({ends}))" if count else _INTEGER
    return None
