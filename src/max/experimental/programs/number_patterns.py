"""Patterns of the numbers of a computation: which of them are constants, and which depend on symbols.

The details of a computation are its numbers in a fixed order: the sizes of its inputs, then the numbers among its
arguments. A pattern describes all details that one program computes. It is made from examples (their
anti-unification): a position is a constant where they agree, else a symbol, or an integer multiple of an earlier symbol
plus a constant where that holds in all examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from max.dtype import DType

__all__ = ["Details", "Pattern", "Symbol"]

Details = tuple[int | float, ...]
"""The numbers of a computation."""


class Symbol(NamedTuple):
    """A position that varies: ``factor * symbol + offset``."""

    number: int
    """The number of the symbol."""
    factor: int = 1
    offset: int = 0


class Pattern:
    """A set of details.

    Args:
        positions: A constant or symbol for each position. The first position of a symbol is the symbol itself.
        dtypes: int64 or float64 for each symbol.
        signed: Symbols of positions that may be negative ints.
    """

    __slots__ = ("_dtypes", "_first", "positions", "signed")

    def __init__(
        self,
        positions: Sequence[int | float | Symbol],
        dtypes: Sequence[DType] = (),
        signed: Iterable[int] = (),
    ) -> None:
        self.positions = tuple(positions)
        self._dtypes = tuple(dtypes)
        self.signed = frozenset(signed)
        first: dict[int, int] = {}
        for index, position in enumerate(self.positions):
            if isinstance(position, Symbol):
                first.setdefault(position.number, index)
        self._first = [first[number] for number in range(len(first))]

    @staticmethod
    def covering(examples: Sequence[Details]) -> Pattern:
        """The pattern of examples, at least one, of one length."""
        bases: list[tuple[int | float, ...]] = []
        dtypes: list[DType] = []
        positions: list[int | float | Symbol] = []
        signed: set[int] = set()
        for values in zip(*examples, strict=True):
            if all(value == values[0] for value in values):
                positions.append(values[0])
                continue
            dtype = DType.int64 if all(type(value) is int for value in values) else DType.float64
            symbol = None
            for number, base in enumerate(bases):
                if dtypes[number] is dtype:
                    symbol = _multiple(number, base, values)
                if symbol is not None:
                    break
            if symbol is None:
                symbol = Symbol(len(bases))
                bases.append(values)
                dtypes.append(dtype)
            positions.append(symbol)
            if any(type(value) is int and value < 0 for value in values):
                signed.add(symbol.number)
        return Pattern(positions, dtypes, signed)

    @property
    def symbols(self) -> int:
        """The number of symbols."""
        return len(self._first)

    def dtype(self, symbol_number: int) -> DType:
        """The dtype of the values of a symbol: int64 or float64."""
        return self._dtypes[symbol_number]

    def match(self, details: Details) -> list[int | float] | None:
        """The values of the symbols; None where the details are not in the set."""
        values = [details[index] for index in self._first]
        for position, value in zip(self.positions, details, strict=True):
            if isinstance(position, Symbol):
                # an integer matches a symbol of floats, but a float matches no symbol of integers
                expected = position.factor * values[position.number] + position.offset
                if type(value) is float and self._dtypes[position.number] is DType.int64:
                    return None
                if type(value) is int and value < 0 and position.number not in self.signed:
                    return None
            else:
                expected = position
            if value != expected:
                return None
        return values

    def implied_by(
        self, positions: Sequence[int | float | Symbol]
    ) -> list[int | float | Symbol] | None:
        """The values of the symbols for details that have symbols of another pattern themselves.

        Args:
            positions: The details: constants, and symbols of the other pattern.

        Returns:
            A constant or symbol of the other pattern for each symbol; None if not all details are in the set.
        """
        values = [positions[index] for index in self._first]
        for position, actual in zip(self.positions, positions, strict=True):
            expected: int | float | Symbol = position  # type: ignore[assignment]
            if isinstance(position, Symbol):
                value = values[position.number]
                if isinstance(value, Symbol):
                    factor, offset = position.factor * value.factor, position.factor * value.offset
                    expected = Symbol(value.number, factor, offset + position.offset)
                else:
                    expected = position.factor * value + position.offset
            if expected != actual or isinstance(expected, Symbol) is not isinstance(actual, Symbol):
                return None
        return values


def _multiple(
    number: int, base: Sequence[int | float], values: Sequence[int | float]
) -> Symbol | None:
    """The values as a multiple of the symbol with the values `base`, plus a constant; None if they are not."""
    # floats too, whose multiples are not looked for
    if tuple(values) == tuple(base):
        return Symbol(number)
    if not all(type(value) is int for value in (*base, *values)):
        return None
    # the examples of a symbol are not all equal
    other = next(i for i, value in enumerate(base) if value != base[0])
    factor, remainder = divmod(int(values[other] - values[0]), int(base[other] - base[0]))
    offset = int(values[0] - factor * base[0])
    if remainder or factor < 1:
        return None
    if any(value != factor * start + offset for value, start in zip(values, base, strict=True)):
        return None
    return Symbol(number, factor, offset)
