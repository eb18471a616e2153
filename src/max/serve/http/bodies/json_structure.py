"""Where the brackets, commas, colons and quotes of a JSON text are: NumPy finds them without the GIL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Indices: TypeAlias = npt.NDArray[np.int64]

QUOTE, COMMA, COLON, BACKSLASH = map(ord, '",:\\')
OBJECT, OBJECT_END, ARRAY, ARRAY_END = map(ord, "{}[]")
_IS_MARK = np.zeros(256, np.bool_)
_IS_MARK[[COMMA, COLON, OBJECT, OBJECT_END, ARRAY, ARRAY_END]] = True
_STEP = np.zeros(256, np.int64)
_STEP[[OBJECT, ARRAY]] = 1
_STEP[[OBJECT_END, ARRAY_END]] = -1


@dataclass(frozen=True)
class Structure:
    """The structure of a part of a text; positions are those in the text.

    Args:
        quotes: The quotes that begin and end strings.
        marks: The brackets, commas and colons outside of strings.
        kinds: The characters of the marks.
        depths: The number of open brackets after each mark.
    """

    quotes: Indices
    marks: Indices
    kinds: npt.NDArray[np.uint8]
    depths: Indices

    def tail(self, at: int) -> Structure:
        """The structure from a position on.

        Args:
            at: The position.
        """
        quote, mark = np.searchsorted(self.quotes, at), np.searchsorted(self.marks, at)
        return Structure(
            self.quotes[quote:], self.marks[mark:], self.kinds[mark:], self.depths[mark:]
        )

    def head(self, at: int) -> Structure:
        """The structure before a position.

        Args:
            at: The position.
        """
        quote, mark = np.searchsorted(self.quotes, at), np.searchsorted(self.marks, at)
        return Structure(
            self.quotes[:quote], self.marks[:mark], self.kinds[:mark], self.depths[:mark]
        )

    def before(self, other: Structure) -> Structure:
        """The structure of this part and the next one.

        Args:
            other: The next part.
        """
        pairs: Any = (
            (self.quotes, other.quotes), (self.marks, other.marks), (self.kinds, other.kinds),
            (self.depths, other.depths),
        )  # fmt: skip
        return Structure(*(np.concatenate(pair) if len(pair[0]) else pair[1] for pair in pairs))


NO_STRUCTURE = Structure(
    np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint8), np.zeros(0, np.int64)
)


class StructureScanner:
    """Finds the structure of a text, part by part.

    Args:
        text: The text.
    """

    def __init__(self, text: bytes | bytearray) -> None:
        self._text = text
        self._at, self._depth = 0, 0
        self._in_string = self._escaped = False

    def scan(self, end: int) -> Structure:
        """The structure of the next part.

        Args:
            end: Where it ends.
        """
        begin = self._at
        part = np.frombuffer(self._text, np.uint8, end - begin, begin)
        is_quote = part == QUOTE
        is_quote[self._escaped_characters(part)] = False
        quotes = np.flatnonzero(is_quote)
        # odd after an opening quote; it may overflow, as only its last bit counts
        inside = np.cumsum(is_quote, dtype=np.uint8) + np.uint8(self._in_string) & 1
        marks = np.flatnonzero(_IS_MARK[part] & (inside == 0))
        kinds = part[marks]
        # the depth after each mark
        depths = self._depth + np.cumsum(_STEP[kinds])
        self._in_string ^= bool(len(quotes) & 1)
        self._at = end
        if len(depths):
            self._depth = int(depths[-1])
        return Structure(quotes + begin, marks + begin, kinds, depths)

    @property
    def in_string(self) -> bool:
        """Whether the parts so far end within a string."""
        return self._in_string

    def _escaped_characters(self, part: npt.NDArray[np.uint8]) -> Indices:
        """The characters after a backslash that is not itself escaped."""
        backslashes = np.flatnonzero(part == BACKSLASH)
        first = [0] if self._escaped else []
        if self._escaped and len(backslashes) and backslashes[0] == 0:
            backslashes = backslashes[1:]
        self._escaped = False
        if not len(backslashes):
            return np.array(first, np.int64)
        # of a run of backslashes every second one is escaped, and what follows a run of odd length
        begins = np.flatnonzero(np.diff(backslashes, prepend=-2) != 1)
        lengths = np.diff(begins, append=len(backslashes))
        after = (backslashes[begins] + lengths)[lengths & 1 == 1]
        # the part ends with an open escape
        if len(after) and after[-1] == len(part):
            self._escaped, after = True, after[:-1]
        return np.concatenate((np.array(first, np.int64), after))
