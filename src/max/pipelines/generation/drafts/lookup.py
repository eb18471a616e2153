"""Drafts by look-up in the request's own text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from max.interfaces import RequestID
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.drafts.drafter import Drafter

__all__ = ["LookupDrafter"]

LONGEST_MATCH = 6
"""The number of last tokens that a look-up compares at most."""
WINDOW = 16
"""The number of tokens before two places of equal runs that tell which place is more like the end of the text."""
MOST_PLACES = 32
"""The number of places of the longest run that are compared, the latest ones."""


class LookupDrafter(Drafter):
    """Looks up the last tokens of a request in its own text, and proposes what followed them there.

    That is right where an answer repeats its prompt: edits, extractions, code. The longer the run of tokens that is
    found again, the likelier is what followed it: its length is the kind of the draft.
    """

    def __init__(self) -> None:
        self._lengths: dict[RequestID, int] = {}  # of the runs of the last drafts

    def kind(self, context: TextContext) -> int:
        """The number of last tokens that were found again."""
        return self._lengths.get(context.request_id, 0)

    def propose(self, context: TextContext, most: int) -> Sequence[int]:
        """What followed the longest run of tokens that ends the text, at an earlier place.

        Of several places it is the one whose last tokens are most often among the last tokens of the text, in any
        order: in records, a value between two equal keys may have any length. Of equal ones it is the latest.

        Args:
            context: The request.
            most: The maximum number of tokens.
        """
        tokens = context.all_tokens
        # the ends of earlier runs that are equal to the last tokens, for longer and longer runs
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        best, length = ends, 0
        while ends.size and length < LONGEST_MATCH:
            best, length = ends, length + 1
            # ends are at most len(tokens) - 2, so those that are left have tokens[-1 - length] too
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[-1 - length]]
        if not best.size:
            return ()
        self._lengths[context.request_id] = length
        begin = _likest(tokens, best[-MOST_PLACES:]) + 1
        return tokens[begin : begin + most].tolist()

    def observe(self, context: TextContext, num_drafted: int, num_accepted: int) -> None:
        """Does nothing: each look-up reads the text as it is."""

    def rewind(self, context: TextContext) -> None:
        """Does nothing: each look-up reads the text as it is.

        Args:
            context: The request.
        """

    def forget(self, request_id: RequestID) -> None:
        """Forgets the kind of a request's drafts."""
        self._lengths.pop(request_id, None)


def _likest(tokens: npt.NDArray[Any], ends: npt.NDArray[np.intp]) -> int:
    """The place whose last tokens are most often among the last tokens of a text; of equal ones the latest.

    Args:
        tokens: The text.
        ends: The places, in order.
    """
    if len(ends) == 1:
        return int(ends[0])
    # [places, WINDOW]: before the start of the text there is no token
    places = ends[:, None] - np.arange(WINDOW)
    equal = np.isin(tokens[np.maximum(places, 0)], tokens[-WINDOW:]) & (places >= 0)
    counts = equal.sum(1)
    return int(ends[len(ends) - 1 - counts[::-1].argmax()])
