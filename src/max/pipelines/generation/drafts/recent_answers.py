"""Drafts by look-up in recent answers of the same server to the same clients."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.drafts.drafter import TextDrafter

__all__ = ["RecentAnswersDrafter"]

MATCH = 4
"""The number of last tokens that an answer must have in a row."""
LONGEST_MATCH = 32
"""The number of last tokens that are compared at most, to find the likeliest continuation."""
PLACES = 4
"""The number of places of a run of tokens that are kept, the latest ones."""
MOST_TOKENS = 1 << 17
"""The number of tokens of all kept answers; one takes about 200 bytes."""
LONGEST_ANSWER = 4096
"""The number of tokens of an answer that are kept, the last ones."""

Key: TypeAlias = tuple[str, str, int, int, int, int]
Answer: TypeAlias = npt.NDArray[np.integer[Any]]


class RecentAnswersDrafter(TextDrafter[tuple[Answer, int]]):
    """Looks up the last tokens of a request in answers that requests of the same salt got, and proposes what followed
    them there.

    A salt is of an API key, and so is its part of the answers; requests of other weights have their own, too.

    Args:
        most_tokens: The number of tokens of all kept answers; the oldest ones go first.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        super().__init__()
        self._most = most_tokens
        self._answers: deque[tuple[str, str, Answer]] = deque()
        self._places: dict[Key, list[tuple[Answer, int]]] = {}
        self.tokens = 0
        """The number of tokens of all kept answers."""

    def propose(self, context: TextContext, most: int) -> Sequence[int]:
        """What followed the place of the longest run of tokens that ends the text; the latest of equal ones.

        Args:
            context: The request.
            most: The maximum number of tokens.
        """
        found = self._find(context, context.all_tokens)
        if not found:
            return ()
        (length, place), *others = found
        answer, end = self._found[context.request_id] = place
        self._lengths[context.request_id] = length
        self._others[context.request_id] = [place for _, place in others]
        return answer[end : end + most].tolist()

    def match(self, context: TextContext, tokens: Answer) -> int | None:
        """How long the run of last tokens is that is found again, as `kind`; see `Drafter.match`."""
        found = self._find(context, tokens)
        return found[0][0].bit_length() if found else None

    def _find(self, context: TextContext, tokens: Answer) -> list[tuple[int, tuple[Answer, int]]]:
        """The runs of tokens that end a text: their lengths and places, the longest first, of equal ones the latest."""
        if len(tokens) < MATCH:
            return []
        # of the same salt and adapter only: answers of others would leak through times
        places = self._places.get(
            _key(context.cache_salt, context.adapter, tokens, len(tokens)), ()
        )
        last = tokens[-LONGEST_MATCH:][::-1]
        found = [(_match(last, *place), place) for place in reversed(places)]
        # stable: the latest ones stay first
        return sorted(found, key=lambda each: -each[0])

    def alternatives(self, context: TextContext, most: int) -> list[Sequence[int]]:
        """What followed at the other places; see `Drafter.alternatives`."""
        others = self._others.get(context.request_id, ())
        return [answer[end : end + most].tolist() for answer, end in others]

    def kind(self, context: TextContext, more: int = 0) -> int:
        """How long the run of last tokens is that was found again: the power of two below its length."""
        length = self._lengths.get(context.request_id, 0)
        return min(length + more, LONGEST_MATCH).bit_length()

    def text(self, context: TextContext, most: int) -> Sequence[int]:
        """What follows the place that was found in an answer; see `Drafter.text`."""
        found = self._found.get(context.request_id)
        if found is None:
            return ()
        answer, end = found
        return answer[end : end + most].tolist()

    def learn(self, context: TextContext) -> None:
        """Keeps the answer of a request that has ended.

        Args:
            context: The request.
        """
        answer = np.array(context.generated_tokens[-LONGEST_ANSWER:], np.int32)
        if not MATCH < len(answer) <= self._most:
            return
        self._answers.append((context.cache_salt, context.adapter, answer))
        self.tokens += len(answer)
        while self.tokens > self._most:
            self._drop(*self._answers.popleft())
        # not after the last token, which nothing follows
        for end in range(MATCH, len(answer)):
            places = self._places.setdefault(
                _key(context.cache_salt, context.adapter, answer, end), []
            )
            places.append((answer, end))
            del places[:-PLACES]

    def _drop(self, salt: str, adapter: str, answer: Answer) -> None:
        """Forgets an answer."""
        self.tokens -= len(answer)
        for end in range(MATCH, len(answer)):
            key = _key(salt, adapter, answer, end)
            # later answers may have the same run
            places = [place for place in self._places.get(key, ()) if place[0] is not answer]
            if places:
                self._places[key] = places
            else:
                self._places.pop(key, None)

    def forget_answers(self) -> None:
        """Forgets all answers."""
        self._answers.clear()
        self._places.clear()
        self.tokens = 0


def _key(salt: str, adapter: str, tokens: Answer, end: int) -> Key:
    """What the places of a run of tokens are kept under."""
    first, second, third, fourth = tokens[end - MATCH : end].tolist()
    return salt, adapter, first, second, third, fourth


def _match(last: Answer, answer: Answer, end: int) -> int:
    """The number of tokens before a place of an answer that are equal to the last ones, which are given backward."""
    before = answer[max(0, end - len(last)) : end][::-1]
    different = (before != last[: len(before)]).nonzero()[0]
    return int(different[0]) if different.size else len(before)
