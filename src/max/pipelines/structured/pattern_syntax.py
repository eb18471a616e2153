"""Reads patterns of JSON schemas: what regular expressions of ECMAScript and Python have in common."""

from __future__ import annotations

from collections.abc import Sequence
from string import hexdigits
from typing import TypeAlias

from max._dataclass import dataclass

Ranges: TypeAlias = "tuple[tuple[int, int], ...]"
"""Characters: ranges of code points, ascending and apart."""
LAST = 0x10FFFF
BEGIN, END = LAST + 1, LAST + 2
"""Signs for the begin and the end of a text, as characters."""
_MOST_TIMES = 256
_DIGITS: Ranges = ((48, 57),)
_LETTERS: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACES: Ranges = (
    (9, 13), (32, 32), (160, 160), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_KINDS = {"d": _DIGITS, "w": _LETTERS, "s": _SPACES}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}


class PatternError(ValueError):
    """A pattern has something else than what is read here."""


@dataclass(frozen=True)
class Characters:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Sequel:
    """Parts, one after the other."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Choice:
    """One of some parts."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Repeat:
    """A part, some times; no limit if ``most`` is None."""

    part: Part
    least: int
    most: int | None


@dataclass(frozen=True)
class Ahead:
    """What follows must fit a part, or must not."""

    part: Part
    fits: bool


Part: TypeAlias = "Characters | Sequel | Choice | Repeat | Ahead"


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Ranges, ascending and apart.

    Args:
        ranges: Ranges in any order.
    """
    made: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if made and low <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(made[-1][1], high))
        else:
            made.append((low, high))
    return tuple(made)


def others(ranges: Ranges) -> Ranges:
    """The characters that are not in some ranges."""
    made: list[tuple[int, int]] = []
    start = 0
    for low, high in ranges:
        if low > start:
            made.append((start, low - 1))
        start = high + 1
    return tuple([*made, (start, LAST)] if start <= LAST else made)


ANY: Ranges = ((0, LAST),)


def read_pattern(pattern: str) -> Part:
    """The parts of a pattern.

    Args:
        pattern: The pattern.

    Raises:
        PatternError: It has references, words' borders, look-behind, classes of Unicode or flags, or is wrong.
    """
    reader = _Reader(pattern)
    part = reader.choice()
    if not reader.is_done:
        raise PatternError("a bracket is closed that is not open")
    return part


class _Reader:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._text, self._at = pattern, 0

    @property
    def is_done(self) -> bool:
        """Whether the whole pattern is read."""
        return self._at >= len(self._text)

    def _peek(self, ahead: int = 0) -> str:
        """A sign that is not read yet; empty after the end."""
        return self._text[self._at + ahead : self._at + ahead + 1]

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _next(self) -> str:
        if self.is_done:
            raise PatternError("the pattern ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def choice(self) -> Part:
        """Alternatives, up to a bracket that closes."""
        parts = [self._sequel()]
        while self._take("|"):
            parts.append(self._sequel())
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _sequel(self) -> Part:
        parts: list[Part] = []
        while (sign := self._peek()) and sign not in "|)":
            parts.append(self._repetition(self._atom()))
        return parts[0] if len(parts) == 1 else Sequel(tuple(parts))

    def _repetition(self, part: Part) -> Part:
        least, most = self._times()
        if (least, most) == (1, 1):
            return part
        if isinstance(part, Ahead) or (
            isinstance(part, Characters) and part.ranges[-1:] > ((LAST, LAST),)
        ):
            raise PatternError("a place is repeated")
        # lazy: which texts fit is the same
        self._take("?")
        if max(least, most or 0) > _MOST_TIMES:
            raise PatternError("a part is repeated too often")
        return Repeat(part, least, most)

    def _times(self) -> tuple[int, int | None]:
        for sign, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return times
        if self._peek() != "{":
            return 1, 1
        end = self._text.find("}", self._at)
        inner = self._text[self._at + 1 : max(end, 0)]
        least, comma, most = inner.partition(",")
        if end < 0 or not least.isascii() or not least.isdigit() or (most and not most.isdigit()):
            raise PatternError("numbers in {} are missing")
        self._at = end + 1
        return int(least), (None if comma and not most else int(most or least))

    def _atom(self) -> Part:
        sign = self._next()
        match sign:
            case "(":
                return self._group()
            case "[":
                return Characters(self._set())
            case ".":
                # `.`: all but the line break
                return Characters(others(((10, 10),)))
            case "^":
                return Characters(((BEGIN, BEGIN),))
            case "$":
                return Characters(((END, END),))
            case "\\":
                return self._escape()
            case "*" | "+" | "?" | "{":
                raise PatternError("nothing is repeated")
        return Characters(((ord(sign), ord(sign)),))

    def _group(self) -> Part:
        ahead = None
        if self._take("?="):
            ahead = True
        elif self._take("?!"):
            ahead = False
        elif self._take("?<") or self._take("?P<"):
            if self._peek() in ("=", "!"):
                raise PatternError("it looks behind")
            while self._next() != ">":
                pass
        elif self._take("?") and not self._take(":"):
            raise PatternError("a group has flags")
        part = self.choice()
        if not self._take(")"):
            raise PatternError("a bracket is not closed")
        return part if ahead is None else Ahead(part, ahead)

    def _escape(self) -> Part:
        if self._take("Z"):
            return Characters(((END, END),))
        if self._take("A"):
            return Characters(((BEGIN, BEGIN),))
        return Characters(self._escape_ranges())

    def _escape_ranges(self) -> Ranges:
        sign = self._next()
        if sign.lower() in _KINDS:
            ranges = _KINDS[sign.lower()]
            return ranges if sign.islower() else others(ranges)
        if sign in "xu":
            return self._code_point(sign)
        code = _CONTROLS.get(sign)
        if code is None and sign.isalnum():
            raise PatternError(f"\\{sign} has no set of characters")
        code = ord(sign) if code is None else code
        return ((code, code),)

    def _code_point(self, sign: str) -> Ranges:
        if self._take("{"):
            end = self._text.find("}", self._at)
            if end < 0:
                raise PatternError("a code does not end")
            digits, self._at = self._text[self._at : end], end + 1
        else:
            size = 2 if sign == "x" else 4
            digits = self._text[self._at : self._at + size]
            self._at += size
            if len(digits) < size:
                raise PatternError("a code does not end")
        # `int` takes signs, spaces and underlines too
        if not digits or not set(digits) <= set(hexdigits):
            raise PatternError("a code is no number")
        code = int(digits, 16)
        if code > LAST or 0xD800 <= code <= 0xDFFF:
            raise PatternError("a code is no character")
        return ((code, code),)

    def _set(self) -> Ranges:
        excludes = self._take("^")
        found: list[tuple[int, int]] = []
        while not self._take("]"):
            low = self._member()
            if self._peek() == "-" and self._peek(1) not in ("", "]"):
                self._at += 1
                high = self._member()
                # a kind of characters, such as digits, is no end of a range
                if low > high or any(len(e) != 1 or e[0][0] != e[0][1] for e in (low, high)):
                    raise PatternError("a range is wrong")
                found.append((low[0][0], high[0][0]))
            else:
                found += low
        made = merge_ranges(found)
        return others(made) if excludes else made

    def _member(self) -> Ranges:
        sign = self._next()
        if sign == "\\":
            return ((8, 8),) if self._take("b") else self._escape_ranges()
        if sign == "[" or self._peek() == "&" == sign:
            # sets of sets in Rust, characters elsewhere
            raise PatternError("a bracket in brackets")
        return ((ord(sign), ord(sign)),)
