"""Watches the tokens of a call of several steps for those after which a draft pays."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.drafts.drafter import KINDS, Drafter
from max.pipelines.generation.drafts.lengths import DraftLengths

__all__ = ["CallWatch"]


class CallWatch:
    """Looks up the last tokens of requests while a call runs, in the thread that reads its steps.

    A call so has as many steps as without drafts, and ends when a draft is expected to give more tokens in a time.

    Args:
        requests: The requests in the order of the batch; None: one that is not drafted.
        parts: The drafters, as :attr:`Drafter.parts`.
        lengths: Chooses the lengths of drafts.
        instead_of: The kind of the drafts that the call makes, which others have to be preferred to; None: it makes
            none.
    """

    def __init__(
        self,
        requests: Sequence[TextContext | None],
        parts: Sequence[tuple[int, Drafter]],
        lengths: DraftLengths,
        instead_of: int | None = None,
    ) -> None:
        self._requests, self._parts, self._lengths = requests, parts, lengths
        self._instead_of = instead_of
        self.seconds = 0.0
        """What the look-ups have taken."""

    def pays(self, tokens: Sequence[Sequence[int]]) -> bool:
        """Whether a draft of one of the requests pays.

        Args:
            tokens: The tokens of the call of each request so far.
        """
        begin = time.perf_counter()
        found = any(
            context is not None and self._pays(context, own)
            for context, own in zip(self._requests, tokens, strict=True)
        )
        self.seconds += time.perf_counter() - begin
        return found

    def _pays(self, context: TextContext, new: Sequence[int]) -> bool:
        text = np.concatenate([context.all_tokens, np.asarray(new, np.int64)])
        # the step that runs meanwhile gives a token, and a step with a draft one more than it drafts
        room = context.max_length - len(text) - 2
        for first_kind, drafter in self._parts if room > 0 else ():
            kind = drafter.match(context, text)
            if kind is None:
                continue
            number, key = first_kind + min(kind, KINDS - 1), context.request_id
            count, other = len(self._requests), self._instead_of
            # where it does not pay, the next drafter is asked, as for drafts
            if self._lengths.length(key, count, 0, room, number) and (
                other is None or self._lengths.prefers(key, count, room, number, other)
            ):
                return True
        return False
