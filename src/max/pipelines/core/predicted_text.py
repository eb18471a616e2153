"""The text that a client expects as the answer of a request: drafts come from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from max.pipelines.core.exceptions import InputError

__all__ = ["PredictedText"]


_REJECTED, _ACCEPTED = 1, 2


class PredictedText:
    """The tokens that an answer may have, and how many of them were drafted and right, and how many only wrong.

    Each token counts once, however often it is drafted: one that was wrong at first may be right later.

    Args:
        tokens: The tokens; each is one of the model's.

    Raises:
        InputError: They are not in one dimension, or one is negative.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: npt.NDArray[np.int64] = np.array(tokens, np.int64)
        """The tokens, ``[tokens]``."""
        if self.tokens.ndim != 1:
            raise InputError(
                f"the tokens of the prediction have shape {self.tokens.shape}; expected one dimension"
            )
        if (self.tokens < 0).any():
            raise InputError(
                f"the prediction has the token {self.tokens.min()}; tokens are 0 or greater"
            )
        self._verified = np.zeros(len(self.tokens), np.uint8)  # what is known of each token
        self._accepted = self._rejected = 0

    def count(self, right_places: Iterable[int], wrong_places: Iterable[int]) -> None:
        """Counts drafted tokens.

        Args:
            right_places: The places of right ones in the text; those below 0 are of no token.
            wrong_places: Those of the others.
        """
        known = self._verified
        for place in right_places:
            if place >= 0 and known[place] != _ACCEPTED:
                self._accepted += 1
                self._rejected -= int(known[place] == _REJECTED)
                known[place] = _ACCEPTED
        for place in wrong_places:
            if place >= 0 and not known[place]:
                self._rejected += 1
                known[place] = _REJECTED

    def take_counts(self) -> tuple[int, int]:
        """How many more tokens were right since the last call, and how many more only wrong: below 0 if some of those
        were right after all.
        """
        counts = self._accepted, self._rejected
        self._accepted = self._rejected = 0
        return counts
