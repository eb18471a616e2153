"""The text that a client expects as the answer of a request: drafts come from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from max.pipelines.core.exceptions import InputError

__all__ = ["PredictedText"]


class PredictedText:
    """The tokens that an answer may have, and how many drafts of them were right and wrong.

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
        self._accepted = self._rejected = 0

    def count(self, num_accepted: int, num_rejected: int) -> None:
        """Counts drafted tokens.

        Args:
            num_accepted: The number of right ones.
            num_rejected: The number of the others.
        """
        self._accepted += num_accepted
        self._rejected += num_rejected

    def take_counts(self) -> tuple[int, int]:
        """The number of right and of other drafted tokens since the last call."""
        counts = self._accepted, self._rejected
        self._accepted = self._rejected = 0
        return counts
