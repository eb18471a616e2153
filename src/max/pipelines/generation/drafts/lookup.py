"""Drafts by look-up in the request's own text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from max._dataclass import dataclass
from max.interfaces import RequestID
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.drafts.drafter import Drafter

__all__ = ["LookupDrafter"]

LONGEST_MATCH = 4
"""The number of last tokens that a look-up compares at most."""
SHORTEST_MATCH = 2
"""A match of fewer tokens proposes nothing."""
LONGEST_PAUSE = 32
"""The number of steps without a draft after a request's drafts were wrong several times in a row, at most."""


@dataclass
class _Record:
    """What the drafts of a request have shown.

    Args:
        length: The number of tokens of the next draft.
        wrong: The number of drafts in a row whose first token was wrong.
        pause: The number of steps until the next draft.
    """

    length: int
    wrong: int = 0
    pause: int = 0


class LookupDrafter(Drafter):
    """Looks up the last tokens of a request in its own text, and proposes what followed them there.

    That is right where an answer repeats its prompt: edits, extractions, code. Drafts get longer while they are right.
    After wrong ones a request pauses, for twice as long each time, so that other texts take few needless rows.

    Args:
        most: The maximum number of tokens of a draft.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._records: dict[RequestID, _Record] = {}

    def propose(self, context: TextContext, most: int) -> Sequence[int]:
        """What followed the last occurrence of the longest run of tokens that ends the text.

        Args:
            context: The request.
            most: The maximum number of tokens.
        """
        record = self._records.get(context.request_id)
        if record is None:
            record = self._records[context.request_id] = _Record(max(1, self._most // 2))
        if record.pause:
            record.pause -= 1
            return ()
        tokens = context.all_tokens
        # the ends of earlier runs that are equal to the last tokens, for longer and longer runs
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        best, length = ends[:0], 1
        while ends.size and length <= LONGEST_MATCH:
            if length >= SHORTEST_MATCH:
                best = ends
            # ends are at most len(tokens) - 2, so those that are left have tokens[-1 - length] too
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[-1 - length]]
            length += 1
        if not best.size:
            return ()
        # the latest occurrence is the likeliest to go on alike
        begin = int(best[-1]) + 1
        return tokens[begin : begin + min(most, record.length)].tolist()

    def observe(self, context: TextContext, drafted: int, accepted: int) -> None:
        """Lengthens the drafts of a request that are right, and pauses after wrong ones.

        Args:
            context: The request.
            drafted: The number of drafted tokens.
            accepted: How many of them were right.
        """
        record = self._records.get(context.request_id)
        if record is None:  # another drafter proposed the tokens, or the request has ended
            return
        if accepted == drafted:
            record.length = min(self._most, 2 * record.length)
        else:
            record.length = max(1, accepted)
        record.wrong = 0 if accepted else record.wrong + 1
        if record.wrong > 1:
            # longer after each wrong draft, as a draft that is not right makes its step slower
            record.pause = min(2**record.wrong, LONGEST_PAUSE)

    def rewind(self, context: TextContext) -> None:
        """Does nothing: each look-up reads the text as it is.

        Args:
            context: The request.
        """

    def forget(self, request_id: RequestID) -> None:
        """Forgets what the drafts of a request have shown."""
        self._records.pop(request_id, None)
