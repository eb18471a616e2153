"""Where the mask of a grammar is one that was computed before: within a string of JSON.

A lexer of JSON reads a string character by character, and the parser waits for its end. So what may follow within a
string depends on what the string is at most: one of the texts that the schema names, or any text, perhaps of a bounded
length. After more characters than the named texts have, only the others are left. They then allow the same after each
whole character, until a token could reach one of the bounds. Near a greatest length they allow the same but for the
tokens of more characters than are left.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max.pipelines.structured.kept_tokens import Flags
from max.pipelines.structured.known_masks.string_rules import StringRules

MOST_CHARACTERS = 24
"""The length of the longest token after which a mask is taken to be the same without a look at the token where a bound
follows, so that a few tokens stay far from it."""
_QUOTE, _BACKSLASH, _UNICODE = b'"\\u'
_SIMPLE_ESCAPE = re.compile(rb'\\["\\/bfnrt]')
_BEGUN_ESCAPE = re.compile(rb"\\(?:u[0-9A-Fa-f]{0,4}|.|$)", re.DOTALL)
Place = tuple[object, int]
"""A string, and the number of bounds that it has passed."""


@dataclass
class TokenTexts:
    """The texts of the tokens of a vocabulary.

    Args:
        texts: The bytes of each token; None: it is no text.
        lengths: The number of characters of those of whole characters that go on with a string of JSON; 0 of others.
        needs: The number of characters that a string of JSON must still admit for each token, int32 ``[tokens]``.
        plain: Those that go on with a string, bool ``[tokens]``.
        short: Those of them with at most `MOST_CHARACTERS`, bool ``[tokens]``.
        longest: The number of bytes of the longest one.
        plain_lengths: The numbers of characters of the plain ones that each string admits if it is long enough,
            ascending.
    """

    texts: list[bytes | None]
    lengths: list[int]
    needs: npt.NDArray[np.int32]
    plain: Flags
    short: Flags
    longest: int
    plain_lengths: list[int]

    @classmethod
    def of(cls, size: int, text_of: Callable[[int], bytes | None]) -> TokenTexts:
        """Reads the texts.

        Args:
            size: The number of tokens.
            text_of: A function to the text of a token.
        """
        texts = [text_of(token) for token in range(size)]
        lengths = [_plain_length(text) for text in texts]
        # [tokens]: the characters that a string must have room for
        needs = [own or _needs_of(text) for own, text in zip(lengths, texts, strict=True)]
        counts = np.array(lengths, np.int32)
        longest = max((len(text or b"") for text in texts), default=0)
        short = (counts > 0) & (counts <= MOST_CHARACTERS)
        # JSON has no control characters in strings
        admitted = {
            length
            for text, length in zip(texts, lengths, strict=True)
            if length and text and min(text) >= 32 and 127 not in text
        }
        return cls(
            texts, lengths, np.array(needs, np.int32), counts > 0, short, longest, sorted(admitted)
        )

    def fitting(self, characters: int, words: int) -> npt.NDArray[np.int32]:
        """The tokens that a string of JSON admits which ends after a number of characters at the latest.

        Args:
            characters: The number.
            words: The number of words of the result, one bit per token.
        """
        bits = np.zeros(words * 32, np.bool_)
        bits[: len(self.needs)] = self.needs <= characters
        return np.packbits(bits, bitorder="little").view(np.int32)


def _plain_length(text: bytes | None) -> int:
    if text is None:
        return 0
    if _BACKSLASH in text:
        # as one character, so that what is left of both begins or ends something
        text = _SIMPLE_ESCAPE.sub(b".", text)
    if _QUOTE in text or _BACKSLASH in text:
        return 0
    try:
        return len(text.decode())
    except UnicodeDecodeError:
        return 0


def _needs_of(text: bytes | None) -> int:
    """The number of characters of a text up to a quote that ends a string, also of those that it only begins."""
    if text is None:
        return 0
    inside, _, _ = _BEGUN_ESCAPE.sub(b".", text).partition(b'"')
    # all bytes but those that continue a character of UTF-8
    return sum(byte & 0xC0 != 0x80 for byte in inside)


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
        self._near: dict[Place, _NearMask] = {}

    @property
    def plain(self) -> Flags:
        """The tokens after which a known mask is the same, bool ``[tokens]``."""
        bounds = self._rules.bounds
        is_free = not bounds or self._characters > bounds[-1]
        return self._tokens.plain if is_free else self._tokens.short

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
        plain = self.plain
        for token in tokens:
            length = lengths[token] if 0 <= token < len(lengths) else 0
            if not length or not plain.item(token) or not mask.item(token >> 5) >> (token & 31) & 1:
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
            # the first byte of UTF-8 tells how many follow: 0xC0 one, 0xE0 two, 0xF0 three
            self._following = 0 if byte < 0xC0 else 1 + (byte >= 0xE0) + (byte >= 0xF0)

    def _place(self) -> tuple[Place, int] | None:
        """The place, and the number of characters to the next bound, -1 without one; None where no mask is known."""
        if not self._inside or self._is_lost:
            return None
        if self._is_escape or self._following or self._uncertain:
            return None
        # it may still become one of the texts that the schema names
        if self._characters <= self._rules.longest_name:
            return None
        bounds = self._rules.bounds
        passed = bisect_left(bounds, self._characters)
        place = self._string, passed
        return place, -1 if passed == len(bounds) else bounds[passed] - self._characters

    def mask(self, steps: int = 0) -> npt.NDArray[np.int32] | None:
        """The mask of the next token, one bit per token; None if it is not known.

        Args:
            steps: The number of plain tokens after which it must be the same.
        """
        found = self._place()
        if found is None:
            return None
        place, left = found
        # no token of the next steps can reach the bound
        if left < 0 or left - self._tokens.longest > steps * MOST_CHARACTERS:
            return self._known.get(place)
        near = self._near.get(place)
        return None if steps or near is None else near.mask(left)

    def learn(self, mask: npt.NDArray[np.int32]) -> None:
        """Keeps the mask of the next token, in place of the one before, if the text is at a place where it is known.

        Args:
            mask: The mask, one bit per token.
        """
        found = self._place()
        if found is None:
            return
        place, left = found
        if left < 0 or left > self._tokens.longest:
            if place not in self._known:
                self._known.clear()
                self._known[place] = mask.copy()
        elif place not in self._near and self._rules.bounds[place[1]] in self._rules.greatest:
            bounds = self._rules.bounds[place[1] : place[1] + 2]
            others = bounds[1] - self._characters if len(bounds) > 1 else self._tokens.longest
            near = _NearMask.of(self._tokens, mask, left, others)
            if near is not None:
                self._near.clear()
                self._near[place] = near


class _NearMask:
    """The masks of a string that ends after a number of characters at the latest, from one of them.

    Args:
        tokens: The texts of tokens.
        mask: The mask where `left` characters may follow.
        left: That number.
    """

    def __init__(self, tokens: TokenTexts, mask: npt.NDArray[np.int32], left: int) -> None:
        self._tokens, self._first, self._left = tokens, mask, left
        self._last = left, mask

    @classmethod
    def of(
        cls, tokens: TokenTexts, mask: npt.NDArray[np.int32], left: int, others: int
    ) -> _NearMask | None:
        """None if the mask does not show that the string ends there.

        Args:
            tokens: The texts of tokens.
            mask: The mask.
            left: The number of characters that may follow if the string ends at the next bound.
            others: That number for the bound after it, which may be that of the string or of an alternative.
        """
        place = bisect_right(tokens.plain_lengths, left)
        if place == len(tokens.plain_lengths) or tokens.plain_lengths[place] > others:
            return None
        admits_longer = (mask & ~tokens.fitting(left, len(mask))).any()
        return None if admits_longer else cls(tokens, mask.copy(), left)

    def mask(self, left: int) -> npt.NDArray[np.int32] | None:
        """The mask where a number of characters may follow; None where it is not known, or only the end may follow."""
        if not 0 < left <= self._left:
            return None
        last = self._last  # other threads may replace it
        if last[0] != left:
            last = left, self._first & self._tokens.fitting(left, len(self._first))
            self._last = last
        return last[1]
