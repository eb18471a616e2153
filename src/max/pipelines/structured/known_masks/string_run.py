"""Where the mask of a grammar is one that was computed before: within a string of JSON.

A lexer of JSON reads a string character by character, and the parser waits for its end. So what may follow within a
string depends on what the string is at most: one of the texts that the schema names, or any text, perhaps of a bounded
length. After more characters than the named texts have, only the others are left. They then allow the same after each
whole character, until a token could reach one of the bounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max.pipelines.structured.kept_tokens import Flags
from max.pipelines.structured.known_masks.string_rules import StringRules

MOST_CHARACTERS = 24
"""The length of the longest token after which a mask is taken to be the same without a look at the token, so that a few
tokens stay far from a bound."""
_QUOTE, _BACKSLASH, _UNICODE = b'"\\u'
Place = tuple[object, int]
"""A string, and the number of bounds that it has passed."""


@dataclass
class TokenTexts:
    """The texts of the tokens of a vocabulary.

    Args:
        texts: The bytes of each token; None: it is no text.
        lengths: The number of characters of those of whole characters that go on with a string of JSON; 0 of others.
        plain: Those of them with at most `MOST_CHARACTERS`, bool ``[tokens]``.
        longest: The number of bytes of the longest one.
    """

    texts: list[bytes | None]
    lengths: list[int]
    plain: Flags
    longest: int

    @classmethod
    def of(cls, size: int, text_of: Callable[[int], bytes | None]) -> TokenTexts:
        """Reads the texts.

        Args:
            size: The number of tokens.
            text_of: A function to the text of a token.
        """
        texts = [text_of(token) for token in range(size)]
        lengths = [_plain_length(text) for text in texts]
        plain = np.array([0 < length <= MOST_CHARACTERS for length in lengths], np.bool_)
        return cls(texts, lengths, plain, max((len(text or b"") for text in texts), default=0))


def _plain_length(text: bytes | None) -> int:
    if text is None or _QUOTE in text or _BACKSLASH in text:
        return 0
    try:
        return len(text.decode())
    except UnicodeDecodeError:
        return 0


class StringRun:
    """Follows a text of JSON, and keeps the mask of the string that it is in.

    Args:
        rules: What the strings of its schema depend on.
        tokens: The texts of tokens.
    """

    def __init__(self, rules: StringRules, tokens: TokenTexts) -> None:
        self._rules, self._tokens = rules, tokens
        self._string, self._characters = object(), 0
        """Unknown to other copies of the run if one has begun it: its tokens may not become part of the text."""
        self._following = 0
        """The number of bytes that a character lacks."""
        self._inside = self._is_escape = self._uncertain = self._is_lost = False
        self._known: dict[Place, npt.NDArray[np.int32]] = {}

    @property
    def plain(self) -> Flags:
        """The tokens after which a known mask is the same, bool ``[tokens]``."""
        return self._tokens.plain

    def copy(self) -> StringRun:
        """Another run at the same place; both know the masks that one of them learns."""
        other = StringRun(self._rules, self._tokens)
        other.__dict__.update(self.__dict__)
        return other

    def advance(self, token: int) -> None:
        """Follows a token of the text."""
        tokens = self._tokens
        if not 0 <= token < len(tokens.texts) or (text := tokens.texts[token]) is None:
            self._is_lost = True
        elif self._inside and tokens.lengths[token] and not self._is_escape:
            self._characters += tokens.lengths[token]
        else:
            for byte in text:
                self._read(byte)

    def advance_plain(self, tokens: Sequence[int]) -> bool:
        """Follows tokens if a known mask allows each, and is the same after each; else returns False, and follows none.

        Args:
            tokens: The tokens.
        """
        mask, lengths, characters = self.mask(len(tokens)), self._tokens.lengths, 0
        if mask is None:
            return False
        for token in tokens:
            length = lengths[token] if 0 <= token < len(lengths) else 0
            if not 0 < length <= MOST_CHARACTERS or not mask.item(token >> 5) >> (token & 31) & 1:
                return False
            characters += length
        self._characters += characters
        return True

    def _read(self, byte: int) -> None:
        if not self._inside:
            if byte == _QUOTE:
                self._inside, self._uncertain = True, False
                self._string, self._characters = object(), 0
        elif self._is_escape:
            # whether half of a pair is a character is left open, so that its digits need no count
            self._uncertain = self._uncertain or byte == _UNICODE
            self._is_escape = False
            self._characters += 1
        elif self._following:
            self._following -= 1
        elif byte == _QUOTE:
            self._inside = False
        elif byte == _BACKSLASH:
            self._is_escape = True
        else:
            self._characters += 1
            self._following = 0 if byte < 0xC0 else 1 + (byte >= 0xE0) + (byte >= 0xF0)

    def _place(self) -> tuple[Place, int] | None:
        """The place, and the number of characters for which it is the same; None where a mask is not known."""
        if not self._inside or self._is_lost:
            return None
        if self._is_escape or self._following or self._uncertain:
            return None
        if self._characters <= self._rules.longest_name:
            return None
        bounds = self._rules.bounds
        passed = bisect_left(bounds, self._characters)
        place = self._string, passed
        if passed == len(bounds):
            return place, -1
        left = bounds[passed] - self._tokens.longest - self._characters
        return (place, left) if left > 0 else None

    def mask(self, steps: int = 0) -> npt.NDArray[np.int32] | None:
        """The mask of the next token, one bit per token; None if it is not known.

        Args:
            steps: The number of plain tokens after which it must be the same.
        """
        found = self._place()
        if found is None or 0 <= found[1] <= steps * MOST_CHARACTERS:
            return None
        return self._known.get(found[0])

    def learn(self, mask: npt.NDArray[np.int32]) -> None:
        """Keeps the mask of the next token, in place of the one before, if the text is at a place where it is known.

        Args:
            mask: The mask, one bit per token.
        """
        found = self._place()
        if found is not None and found[0] not in self._known:
            self._known.clear()
            self._known[found[0]] = mask.copy()
