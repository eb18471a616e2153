"""Drafts by look-up in the request's own text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.drafts.drafter import TextDrafter

__all__ = ["LookupDrafter", "longest_runs"]

LONGEST_MATCH = 6
"""The number of last tokens that a look-up compares at most."""
WINDOW = 16
"""The number of tokens before two places of equal runs that tell which place is more like the end of the text."""
MOST_PLACES = 32
"""The number of places of the longest run that are compared, the latest ones."""
MOST_OTHERS = 3
"""The number of other continuations of a look-up."""


class LookupDrafter(TextDrafter[int]):
    """Looks up the last tokens of a request in its own text, and proposes what followed them there.

    That is right where an answer repeats its prompt: edits, extractions, code. The longer the run of tokens that is
    found again, the likelier is what followed it: its length is the kind of the draft.
    """

    def kind(self, context: TextContext, more: int = 0) -> int:
        """The number of last tokens that were found again."""
        return min(self._lengths.get(context.request_id, 0) + more, LONGEST_MATCH)

    def text(self, context: TextContext, most: int) -> Sequence[int]:
        """What follows the place that was found; see `Drafter.text`. At the end of the text it goes on with itself."""
        begin = self._found.get(context.request_id)
        if begin is None:
            return ()
        return np.resize(context.all_tokens[begin : begin + most], most).tolist()

    def propose(self, context: TextContext, most: int) -> Sequence[int]:
        """What followed the longest run of tokens that ends the text, at an earlier place.

        Of several places it is the one whose last tokens are most often among the last tokens of the text, in any
        order: in records, a value between two equal keys may have any length. Of equal ones it is the latest.

        Args:
            context: The request.
            most: The maximum number of tokens.
        """
        tokens = context.all_tokens
        length, best, shorter = longest_runs(tokens, tokens, LONGEST_MATCH)
        if not length:
            return ()
        self._lengths[context.request_id] = length
        places = _by_likeness(tokens, best[-MOST_PLACES:])
        # after them those of the runs that are shorter by a token
        rest = shorter[~np.isin(shorter, best)][-MOST_PLACES:]
        self._others[context.request_id] = [*(places[1:] + 1), *(_by_likeness(tokens, rest) + 1)]
        begin = self._found[context.request_id] = int(places[0]) + 1
        return tokens[begin : begin + most].tolist()

    def match(self, context: TextContext, tokens: npt.NDArray[np.integer[Any]]) -> int | None:
        """The number of last tokens that are found again; see `Drafter.match`."""
        return longest_runs(tokens, tokens, LONGEST_MATCH)[0] or None

    def alternatives(self, context: TextContext, most: int) -> list[Sequence[int]]:
        """What followed the last tokens at other places; see `Drafter.alternatives`."""
        tokens, found = context.all_tokens, list[Sequence[int]]()
        for begin in self._others.get(context.request_id, ()):
            other = tokens[begin : begin + most].tolist()
            if other not in found:
                found.append(other)
            if len(found) == MOST_OTHERS:
                break
        return found


def longest_runs(
    text: npt.NDArray[Any], tokens: npt.NDArray[Any], most: int
) -> tuple[int, npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The runs of tokens of a text that are equal to the last ones of a sequence, and end before the text's last token.

    Args:
        text: The text; it may be the sequence itself.
        tokens: The sequence, at least one token.
        most: The number of last tokens that are compared at most.

    Returns:
        The length of the longest run; the indices of the last tokens of the runs of this length, and of those that are
        shorter by a token, the former among them.
    """
    ends = np.flatnonzero(text[:-1] == tokens[-1])  # [places]: ends of runs of one token
    best, shorter, length = ends, ends[:0], 0
    while ends.size and length < most:
        best, shorter, length = ends, best, length + 1
        if length == len(tokens):
            break
        ends = ends[ends >= length]
        ends = ends[text[ends - length] == tokens[-1 - length]]
    return length, best, shorter


def _by_likeness(tokens: npt.NDArray[Any], ends: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Places by how many of their last tokens are among the last tokens of a text, most first; of equal ones the latest
    first.

    Args:
        tokens: The text.
        ends: The places, in order.
    """
    if len(ends) < 2:
        return ends
    # [places, WINDOW]: before the start of the text there is no token
    places = ends[:, None] - np.arange(WINDOW)
    equal = np.isin(tokens[np.maximum(places, 0)], tokens[-WINDOW:]) & (places >= 0)
    # lexsort: by the last key first, ascending
    return ends[np.lexsort((ends, equal.sum(1)))[::-1]]
