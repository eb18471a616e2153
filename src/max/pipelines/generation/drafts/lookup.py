"""Drafts by look-up in the request's own text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from max.interfaces import RequestID
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.drafts.drafter import Drafter

__all__ = ["LookupDrafter"]

LONGEST_MATCH = 6
"""The number of last tokens that a look-up compares at most."""
SHORTEST_MATCH = 2
"""A match of fewer tokens proposes nothing."""


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
        """What followed the last occurrence of the longest run of tokens that ends the text.

        Args:
            context: The request.
            most: The maximum number of tokens.
        """
        tokens = context.all_tokens
        # the ends of earlier runs that are equal to the last tokens, for longer and longer runs
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        best, length = ends[:0], 1
        while ends.size and length <= LONGEST_MATCH:
            if length >= SHORTEST_MATCH:
                best = ends
                self._lengths[context.request_id] = length
            # ends are at most len(tokens) - 2, so those that are left have tokens[-1 - length] too
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[-1 - length]]
            length += 1
        if not best.size:
            return ()
        # the latest occurrence is the likeliest to go on alike
        begin = int(best[-1]) + 1
        return tokens[begin : begin + most].tolist()

    def observe(self, context: TextContext, drafted: int, accepted: int) -> None:
        """Does nothing: each look-up reads the text as it is."""

    def rewind(self, context: TextContext) -> None:
        """Does nothing: each look-up reads the text as it is.

        Args:
            context: The request.
        """

    def forget(self, request_id: RequestID) -> None:
        """Forgets the kind of a request's drafts."""
        self._lengths.pop(request_id, None)
