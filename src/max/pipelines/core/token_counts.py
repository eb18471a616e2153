"""How often each token stands in an answer, counted as the answer grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int32]
_FIRST_SIZE = 64


class TokenCounts:
    """Counts the tokens of one answer; each is read once."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        """Of each token its place in the arrays."""
        self._tokens, self._counts = np.zeros((2, _FIRST_SIZE), np.int32)
        self._read = self._truncations = 0

    def follow(self, answer: npt.NDArray[np.integer[Any]], truncations: int) -> None:
        """Counts the tokens that are new since the last call.

        Args:
            answer: All tokens of the answer, ``[tokens]``.
            truncations: How often tokens were removed from its end: after that all are counted anew.
        """
        # removed tokens may be any of the counted ones: all are counted anew
        if truncations != self._truncations:
            self._places.clear()
            self._read, self._truncations = 0, truncations
        self._add(answer[self._read :].tolist())
        self._read = len(answer)

    def _add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            place = self._places.get(token)
            if place is None:
                place = self._places[token] = len(self._places)
                # doubled, so that growing costs a constant time a token
                if place == len(self._tokens):
                    self._tokens, self._counts = (
                        np.concatenate([old, np.zeros_like(old)])
                        for old in (self._tokens, self._counts)
                    )
                self._tokens[place], self._counts[place] = token, 0
            self._counts[place] += 1

    def after(self, tokens: Sequence[int] = ()) -> tuple[Counts, Counts]:
        """The distinct tokens and their counts, each int32 ``[distinct]``, in the order of their first places.

        Args:
            tokens: Tokens that may follow the answer, which are counted too.
        """
        size = len(self._places)
        if not tokens:
            return self._tokens[:size], self._counts[:size]
        more = TokenCounts()
        more._places = dict(self._places)
        more._tokens, more._counts = self._tokens.copy(), self._counts.copy()
        more._add(tokens)
        return more.after()
