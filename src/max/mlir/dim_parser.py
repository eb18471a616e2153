"""Parsing of dimension expressions, from plain text and inside MLIR text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from max.mlir.dims import DimExpr

__all__ = ["DimParseError", "TokenSource", "parse_dim", "parse_expression"]


class DimParseError(ValueError):
    """A text is not a dimension expression."""


class TokenSource(Protocol):
    """The input of `parse_expression`: the tokens of a text, or an MLIR parser."""

    def name(self) -> str | None:
        """Consumes a symbol's name if one is next, else returns None."""
        ...

    def integer(self) -> int | None:
        """Consumes a non-negative integer if one is next, else returns None."""
        ...

    def accept(self, token: str) -> bool:
        """Consumes `token` (an operator or a parenthesis) if it is next; ``//`` also stands for ``floordiv``."""
        ...

    def fail(self, message: str) -> Exception:
        """The exception for a syntax error at the current position."""
        ...


def parse_expression(source: TokenSource) -> DimExpr:
    """Parses one expression.

    ``sum ::= product (('+' | '-') product)*``, ``product ::= factor (('*' | '//') factor)*``.
    """
    total = _parse_product(source)
    while True:
        if source.accept("+"):
            total = total + _parse_product(source)
        elif source.accept("-"):
            total = total - _parse_product(source)
        else:
            return total


def _parse_product(source: TokenSource) -> DimExpr:
    """Parses factors that `*` and `//` join, from left to right."""
    product = _parse_factor(source)
    while True:
        if source.accept("*"):
            product = product * _parse_factor(source)
        elif source.accept("//"):
            product = product // _parse_factor(source)
        else:
            return product


def _parse_factor(source: TokenSource) -> DimExpr:
    """Parses an integer, a symbol, an expression in brackets, or the negative of one of them."""
    # binds to the factor: -a * b is (-a) * b
    if source.accept("-"):
        return -_parse_factor(source)
    if source.accept("("):
        inner = parse_expression(source)
        if not source.accept(")"):
            raise source.fail("expected ')' in a dimension")
        return inner
    if (number := source.integer()) is not None:
        return DimExpr.constant(number)
    if (name := source.name()) is not None:
        return DimExpr.symbol(name)
    raise source.fail("expected an integer, a symbol or '(' in a dimension")


class _TextSource:
    """The tokens of a text."""

    _TOKEN = re.compile(r"\s*(//|[-+*()]|\d+|[A-Za-z_][A-Za-z0-9_]*)")

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._tokens_of(text))
        self._next = 0

    def _tokens_of(self, text: str) -> Iterable[str]:
        """The tokens of a text, with `//` for `floordiv`."""
        position = 0
        end = len(text.rstrip())
        while position < end:
            match = self._TOKEN.match(text, position)
            if match is None:
                raise DimParseError(
                    f"{text!r} is not a dimension: {text[position:].strip()!r} was not understood"
                )
            yield "//" if match[1] == "floordiv" else match[1]
            position = match.end()

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def name(self) -> str | None:
        token = self._peek()
        if token[:1].isalpha() or token[:1] == "_":
            self._next += 1
            return token
        return None

    def integer(self) -> int | None:
        token = self._peek()
        if token.isdigit():
            self._next += 1
            return int(token)
        return None

    def accept(self, token: str) -> bool:
        if self._peek() == token:
            self._next += 1
            return True
        return False

    def fail(self, message: str) -> DimParseError:
        token = self._peek() or "its end"
        return DimParseError(f"{self._text!r} is not a dimension: {message}, found {token}")

    @property
    def at_end(self) -> bool:
        return self._next == len(self._tokens)


def parse_dim(text: str) -> DimExpr:
    """Parses an expression, for example ``"batch * 5 + 1"`` or ``"(n + 127) // 128"``.

    Raises:
        DimParseError: The text is not an expression.
    """
    source = _TextSource(text)
    expr = parse_expression(source)
    if not source.at_end:
        raise source.fail("expected an operator")
    return expr
