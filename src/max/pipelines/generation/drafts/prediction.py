"""Drafts by look-up in the text that a client expects as the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from max.interfaces import RequestID
from max.pipelines.core.draft_tree import branch_of
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.drafts.drafter import Drafter
from max.pipelines.generation.drafts.edits import Alignment

__all__ = ["PredictionDrafter"]

MOST_OTHERS = 3
"""The number of other continuations."""


class PredictionDrafter(Drafter):
    """Follows the prediction of a request as far as the answer does, and proposes what comes next in it.

    After other tokens it looks up the last ones: the longest run of equal tokens counts, of equal ones the first from
    the place on that the answer has reached, or from the beginning. A short change of the text is made again at all
    equal tokens, until the answer leaves one of them as it is.
    """

    def __init__(self) -> None:
        self._alignments: dict[RequestID, Alignment] = {}

    def propose(self, context: TextContext, most: int) -> Sequence[int]:
        """What follows the answer in its prediction.

        Args:
            context: The request.
            most: The maximum number of tokens.
        """
        prediction = context.prediction
        if prediction is None:
            return ()
        alignment = self._alignment(context).follow(prediction.tokens, context.generated_tokens)
        self._alignments[context.request_id] = alignment
        return alignment.continuation(prediction.tokens, most)

    def match(self, context: TextContext, tokens: npt.NDArray[np.integer[Any]]) -> int | None:
        """The kind of the draft after the last tokens; see `Drafter.match`."""
        prediction = context.prediction
        if prediction is None:
            return None
        answer = tokens[len(context.prompt_tokens) :]
        alignment = self._alignment(context).follow(prediction.tokens, answer)
        return alignment.kind if alignment.continuation(prediction.tokens, 1) else None

    def alternatives(self, context: TextContext, most: int) -> list[Sequence[int]]:
        """What follows other places of the prediction; see `Drafter.alternatives`."""
        found = list[Sequence[int]]()
        if (prediction := context.prediction) is None:
            return found
        alignment = self._alignment(context)
        for place in alignment.others:
            other = alignment.continuation_at(prediction.tokens, place, most)
            if other and other not in found:
                found.append(other)
            if len(found) == MOST_OTHERS:
                break
        return found

    def kind(self, context: TextContext, more: int = 0) -> int:
        """How long the run of last tokens is that the prediction has too; see `Alignment.kind_after`."""
        return self._alignment(context).kind_after(more)

    def text(self, context: TextContext, most: int) -> Sequence[int]:
        """What follows the answer in its prediction, with the known changes; see `Drafter.text`."""
        prediction = context.prediction
        if prediction is None:
            return ()
        return self._alignment(context).continuation(prediction.tokens, most)

    def observe(self, context: TextContext, right_tokens: Sequence[int], more: int = 0) -> None:
        """Counts the tokens of a draft for the usage of the request: those that were right, and the others after these
        in the same branch of a tree.
        """
        if context.prediction is None:
            return
        places = self._followed_places(context, right_tokens, more)
        right = len(right_tokens)
        context.prediction.count(places[:right], places[right:])

    def _followed_places(
        self, context: TextContext, right_tokens: Sequence[int], more: int
    ) -> list[int]:
        """The places in the prediction of the right tokens of a draft, and of those after them in the same branch."""
        prediction, alignment = context.prediction, self._alignment(context)
        assert prediction is not None
        text = prediction.tokens
        if more:
            return alignment.places(text, more + context.draft_length)[more:]
        branch = branch_of(context.draft_parents, right_tokens)
        tokens = [context.draft_tokens[index] for index in branch]
        if alignment.continuation(text, len(tokens)) == tokens:
            return alignment.places(text, len(tokens))
        # one of the other places that a tree has
        return next(
            alignment.places_at(text, place, len(tokens))
            for place in alignment.others
            if alignment.continuation_at(text, place, len(tokens)) == tokens
        )

    def rewind(self, context: TextContext) -> None:
        """Does nothing: a shorter answer is followed anew."""

    def forget(self, request_id: RequestID) -> None:
        """Forgets how far the prediction of a request was followed."""
        self._alignments.pop(request_id, None)

    def _alignment(self, context: TextContext) -> Alignment:
        return self._alignments.get(context.request_id, _BEGIN)


_BEGIN = Alignment()
"""The beginning of an answer, and of its prediction."""
