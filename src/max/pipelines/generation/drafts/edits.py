"""How an answer follows a text that it is an edit of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from max.pipelines.generation.drafts.lookup import longest_runs

__all__ = ["LONGEST_CHANGE", "LONGEST_RUN", "Alignment"]

LONGEST_RUN = 32
"""The number of last tokens of an answer that are compared at most."""
LONGEST_CHANGE = 4
"""The number of tokens of a change at most, in the text and in the answer."""
MOST_CHANGES = 64
"""The number of changes that are known at most, the latest ones."""
MOST_PLACES = 32
"""The number of other places at most."""

Tokens = npt.NDArray[np.integer[Any]]
Change = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Alignment:
    """The place of a text that an answer has reached, and the changes that it has made on its way.

    Args:
        place: The index of the next token of the text.
        length: The number of tokens of the answer that the text was followed for.
        run: How many of the last ones of these are those of the text, or a known change of them; at most `LONGEST_RUN`.
        changes: By their first token the tokens of the text that were changed, and what the answer has in their place.
        rest: The number of tokens of the answer after these.
        is_change: Whether the rest is the beginning of a known change.
        others: Other places that the answer may have reached.
    """

    place: int = 0
    length: int = 0
    run: int = 0
    changes: dict[int, Change] = field(default_factory=dict)
    rest: int = 0
    is_change: bool = False
    others: tuple[int, ...] = ()

    @property
    def kind(self) -> int:
        """How long the run is: the number of bits of its length; 0: the next place of the text is a guess."""
        return self.kind_after(0)

    def kind_after(self, more: int) -> int:
        """The kind after further tokens of the text.

        Args:
            more: The number of tokens, with the known changes.
        """
        run = 0 if self.rest and not self.is_change else self.run
        return min(run + more, LONGEST_RUN).bit_length()

    def continuation(self, text: Tokens, most: int) -> list[int]:
        """The tokens of the text that follow, with the known changes; none if the answer is another text by now.

        Args:
            text: The text.
            most: The maximum number of tokens.
        """
        place, skipped = self._begin(text)
        return self.continuation_at(text, place, most + skipped)[skipped:]

    def continuation_at(self, text: Tokens, place: int, most: int) -> list[int]:
        """The tokens of the text from a place on, with the known changes.

        Args:
            text: The text.
            place: The place.
            most: The maximum number of tokens.
        """
        if not self.changes:
            return text[place : place + most].tolist()
        return [token for token, _ in self._tokens_and_places(text, place, most)]

    def places(self, text: Tokens, most: int) -> list[int]:
        """The place in the text of each token of `continuation`; -1 for those of a known change.

        Args:
            text: The text.
            most: The maximum number of tokens.
        """
        place, skipped = self._begin(text)
        return self.places_at(text, place, most + skipped)[skipped:]

    def places_at(self, text: Tokens, place: int, most: int) -> list[int]:
        """The place in the text of each token of `continuation_at`; -1 for those of a known change.

        Args:
            text: The text.
            place: The place.
            most: The maximum number of tokens.
        """
        return [own for _, own in self._tokens_and_places(text, place, most)]

    def _begin(self, text: Tokens) -> tuple[int, int]:
        """The place that the continuation is looked up from, and how many of its first tokens the answer has."""
        if self.is_change:
            return self.place, self.rest
        # as if the new tokens stood for as many of the text; of another text nothing follows
        return (self.place + self.rest if self.rest < LONGEST_CHANGE else len(text)), 0

    def _tokens_and_places(self, text: Tokens, place: int, most: int) -> list[tuple[int, int]]:
        """The tokens of the text from a place on, with the known changes, and the place of each, -1 within a change."""
        found = list[tuple[int, int]]()
        while len(found) < most and place < len(text):
            change = _change_at(self.changes, text, place)
            if change is None:
                found.append((text.item(place), place))
                place += 1
            else:
                old, new = change
                found += [(token, -1) for token in new]
                place += len(old)
        return found[:most]

    def follow(self, text: Tokens, answer: Tokens) -> Alignment:
        """The alignment of a longer answer, or of one whose last tokens were removed.

        Args:
            text: The text.
            answer: The answer.
        """
        size, here = len(answer), self
        if size < self.length:
            here = Alignment(max(self.place - self.length + size, 0), size, changes=self.changes)
        here = here._walk(text, answer)
        if here.is_change:
            return here
        # the last tokens may be a changed word, which is in no run
        for end in range(size, max(size - LONGEST_CHANGE, here.length), -1):
            run, ends, shorter = longest_runs(text, answer[:end], LONGEST_RUN)
            if not run:
                continue
            place, *others = _from(here.place, ends + 1)
            others += _from(here.place, shorter[~np.isin(shorter, ends)] + 1)
            changes = here._with_change(text, answer, place, end, run)
            found = Alignment(place, end, run, changes, others=tuple(others))
            return found._walk(text, answer) if end < size else found
        return here

    def _walk(self, text: Tokens, answer: Tokens) -> Alignment:
        """Follows the text as long as the answer has its tokens, or the known changes of them."""
        place, length, changes, is_change = self.place, self.length, self.changes, False
        while length < len(answer) and place < len(text):
            change = _change_at(changes, text, place)
            if answer.item(length) == text.item(place):
                if change is not None:
                    # it was no change of all such tokens
                    changes = {key: each for key, each in changes.items() if each is not change}
                length, place = length + 1, place + 1
                continue
            if change is None:
                break
            old, new = change
            own = answer[length : length + len(new)].tolist()
            if own != new:
                is_change = own == new[: len(own)]
                break
            length, place = length + len(new), place + len(old)
        run = min(self.run + length - self.length, LONGEST_RUN)
        rest = len(answer) - length
        others = list[int]()
        if rest and not is_change:
            # the new tokens may stand for fewer of the text, or for more
            others = [place + count for count in range(LONGEST_CHANGE) if count != rest]
        return Alignment(place, length, run, changes, rest, is_change, tuple(others))

    def _with_change(
        self, text: Tokens, answer: Tokens, place: int, end: int, run: int
    ) -> dict[int, Change]:
        """The known changes, and the one between this alignment and a run of equal tokens after it."""
        # both go on from here with tokens that differ; of a place before this one, or near it, no token was changed
        equal = min(run, end - self.length)
        old = text[self.place : place - equal].tolist()
        new = answer[self.length : end - equal].tolist()
        if not 0 < len(old) <= LONGEST_CHANGE or len(new) > LONGEST_CHANGE:
            return self.changes
        # a new entry is the last one, also of a key that was there
        changes = {key: each for key, each in self.changes.items() if key != old[0]}
        if len(changes) == MOST_CHANGES:
            del changes[next(iter(changes))]
        return {**changes, old[0]: (old, new)}


def _change_at(changes: dict[int, Change], text: Tokens, place: int) -> Change | None:
    """The known change of the tokens at a place."""
    change = changes.get(text.item(place)) if changes else None
    if change is None or text[place : place + len(change[0])].tolist() != change[0]:
        return None
    return change


def _from(first: int, places: npt.NDArray[np.intp]) -> list[int]:
    """Places in order from one on, then those before it; not more than are compared."""
    begin = int(np.searchsorted(places, first))
    following = places[begin : begin + MOST_PLACES].tolist()
    return following + places[: min(begin, MOST_PLACES - len(following))].tolist()
