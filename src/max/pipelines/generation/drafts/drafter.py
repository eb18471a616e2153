"""The interface of drafters, which guess the next tokens of requests; one step of the model verifies them together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from max.interfaces import RequestID
from max.pipelines.core.text_context import TextContext

__all__ = ["KINDS", "BatchDrafter", "Drafter", "DraftersInTurn", "TextDrafter"]

Place = TypeVar("Place")

KINDS = 8
"""The number of kinds of drafts that are told apart for a drafter among others."""


class Drafter(ABC):
    """Proposes the next tokens of requests. The engine's thread calls all methods, between two steps."""

    takes_steps = False
    """Whether each drafted token takes a step of a model, so that the length of a draft is chosen before it is made."""

    @property
    def parts(self) -> Sequence[tuple[int, Drafter]]:
        """The drafters that are asked in turn, each for the requests that the ones before have no guess for, with the
        first number of the kinds of its drafts.
        """
        return ((0, self),)

    def drafted_by(self, request_id: RequestID, drafter: Drafter) -> None:  # noqa: B027  optional
        """Tells which of `parts` has drafted tokens of a request.

        Args:
            request_id: The request.
            drafter: The drafter.
        """

    @abstractmethod
    def propose(self, context: TextContext, most: int) -> Sequence[int]:
        """Tokens that may follow those of a request.

        Args:
            context: The request.
            most: The maximum number of tokens, at least 1.

        Returns:
            The tokens; none if there is no good guess.
        """

    def alternatives(self, context: TextContext, most: int) -> list[Sequence[int]]:
        """Other continuations than the one that was proposed last for a request, the likeliest first: a step may verify
        them as branches of a tree.

        Args:
            context: The request.
            most: The maximum number of tokens of each.
        """
        return []

    def match(self, context: TextContext, tokens: npt.NDArray[np.integer[Any]]) -> int | None:
        """The kind of the draft that would be proposed after tokens; None, as by default, if there is none or if that
        is not known without a step. Nothing is kept of it. The thread that reads the steps of a call calls it.

        Args:
            context: The request.
            tokens: Its text with the tokens of steps that run, which the request does not have yet.
        """
        return None

    def kind(self, context: TextContext, more: int = 0) -> int:
        """A number for the kind of the last draft of a request: how many tokens are right is estimated for each kind.

        Args:
            context: The request.
            more: The number of tokens of `text` that followed since; the kind is that of the draft after these.
        """
        return 0

    def text(self, context: TextContext, most: int) -> Sequence[int]:
        """The last draft of a request, and what follows it in the text where it was found; none, as by default, if it
        was not found in a text.

        Args:
            context: The request, as it was when the draft was made.
            most: The maximum number of tokens.
        """
        return ()

    def propose_all(
        self, contexts: Sequence[TextContext], most: Sequence[int]
    ) -> list[Sequence[int]]:
        """Tokens that may follow those of several requests; a drafter that is a model computes them together.

        Args:
            contexts: The requests.
            most: The maximum number of tokens of each, at least 1.

        Returns:
            The tokens of each request.
        """
        return [self.propose(context, n) for context, n in zip(contexts, most, strict=True)]

    def read(self, contexts: Sequence[TextContext]) -> None:  # noqa: B027  optional
        """Tells that a step has read chunks of prompts; a drafter that is a model reads them too.

        Args:
            contexts: The requests.
        """

    @abstractmethod
    def observe(self, context: TextContext, right_tokens: Sequence[int], more: int = 0) -> None:
        """Tells which tokens of a draft were right; a drafter with a cache of its own goes back to these there.

        Args:
            context: The request, before its new tokens, with its draft.
            right_tokens: The indices of the right ones among its drafted tokens, in order.
            more: The number of tokens of `text` that followed since; the draft is as long, and comes after these.
        """

    @abstractmethod
    def rewind(self, context: TextContext) -> None:
        """Tells that the last tokens of a request were removed; a drafter with a cache of its own goes back there.

        Called before the next `propose`.

        Args:
            context: The request; its text may have new tokens already.
        """

    @abstractmethod
    def forget(self, request_id: RequestID) -> None:
        """Forgets a request that has ended; nothing happens if it is unknown.

        Args:
            request_id: The request.
        """

    def learn(self, context: TextContext) -> None:  # noqa: B027  optional
        """Tells that a request has ended, before `forget`; a drafter may keep its answer for others.

        Args:
            context: The request, with its whole text.
        """

    def forget_answers(self) -> None:  # noqa: B027  optional
        """Forgets the answers of ended requests."""


class TextDrafter(Drafter, Generic[Place]):
    """A drafter that looks up the last tokens of requests in texts; of a request it keeps what it has found last."""

    def __init__(self) -> None:
        self._lengths: dict[RequestID, int] = {}  # of the runs of tokens that were found
        self._found: dict[RequestID, Place] = {}  # what follows them
        self._others: dict[RequestID, list[Place]] = {}  # where else they are, the likeliest first

    def observe(self, context: TextContext, right_tokens: Sequence[int], more: int = 0) -> None:
        """Does nothing: each look-up reads the text as it is."""

    def rewind(self, context: TextContext) -> None:
        """Does nothing: each look-up reads the text as it is."""

    def forget(self, request_id: RequestID) -> None:
        """Forgets the drafts of a request."""
        self._lengths.pop(request_id, None)
        self._found.pop(request_id, None)
        self._others.pop(request_id, None)


class BatchDrafter(Drafter):
    """A drafter that proposes the tokens of several requests together."""

    def propose(self, context: TextContext, most: int) -> Sequence[int]:
        """See `Drafter.propose`."""
        (tokens,) = self.propose_all([context], [most])
        return tokens

    @abstractmethod
    def propose_all(
        self, contexts: Sequence[TextContext], most: Sequence[int]
    ) -> list[Sequence[int]]:
        """See `Drafter.propose_all`."""


class DraftersInTurn(BatchDrafter):
    """Asks several drafters in turn: the first one with a guess drafts, and is told how much of it was right.

    Args:
        drafters: The drafters, the cheapest or most reliable one first.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = list(drafters)
        self._proposed: dict[RequestID, Drafter] = {}

    @property
    def parts(self) -> Sequence[tuple[int, Drafter]]:
        """The drafters; see `Drafter.parts`."""
        return [(KINDS * index, drafter) for index, drafter in enumerate(self._drafters)]

    def drafted_by(self, request_id: RequestID, drafter: Drafter) -> None:
        """See `Drafter.drafted_by`."""
        self._proposed[request_id] = drafter

    def propose_all(
        self, contexts: Sequence[TextContext], most: Sequence[int]
    ) -> list[Sequence[int]]:
        """The guess of the first drafter that has one, for each request.

        Args:
            contexts: The requests.
            most: The maximum number of tokens of each.
        """
        tokens: list[Sequence[int]] = [()] * len(contexts)
        open_rows = list(range(len(contexts)))
        for drafter in self._drafters:
            if not open_rows:
                break
            proposed = drafter.propose_all(
                [contexts[row] for row in open_rows], [most[row] for row in open_rows]
            )
            for row, own in zip(open_rows, proposed, strict=True):
                tokens[row] = own
                if own:
                    self.drafted_by(contexts[row].request_id, drafter)
            open_rows = [row for row in open_rows if not tokens[row]]
        return tokens

    def kind(self, context: TextContext, more: int = 0) -> int:
        """The kind of the last draft, of the drafter that made it."""
        drafter = self._proposed.get(context.request_id)
        if drafter is None:
            return 0
        return KINDS * self._drafters.index(drafter) + min(drafter.kind(context, more), KINDS - 1)

    def text(self, context: TextContext, most: int) -> Sequence[int]:
        """The text of the drafter that made the last draft."""
        drafter = self._proposed.get(context.request_id)
        return () if drafter is None else drafter.text(context, most)

    def read(self, contexts: Sequence[TextContext]) -> None:
        """Tells all drafters."""
        for drafter in self._drafters:
            drafter.read(contexts)

    def observe(self, context: TextContext, right_tokens: Sequence[int], more: int = 0) -> None:
        """Tells the drafter that made the draft."""
        drafter = self._proposed.get(context.request_id)
        if drafter is not None:
            drafter.observe(context, right_tokens, more)

    def rewind(self, context: TextContext) -> None:
        """Tells all drafters."""
        for drafter in self._drafters:
            drafter.rewind(context)

    def forget(self, request_id: RequestID) -> None:
        """Tells all drafters."""
        self._proposed.pop(request_id, None)
        for drafter in self._drafters:
            drafter.forget(request_id)

    def learn(self, context: TextContext) -> None:
        """Tells all drafters."""
        for drafter in self._drafters:
            drafter.learn(context)

    def forget_answers(self) -> None:
        """Tells all drafters."""
        for drafter in self._drafters:
            drafter.forget_answers()
