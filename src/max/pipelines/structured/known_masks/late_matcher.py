"""A matcher that follows tokens within strings of JSON later, several at once.

What it does right after a step of the model is slow, as the step has replaced what the processor's caches had. Within a
string, the tokens that may follow are known without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max.pipelines.structured.known_masks.string_run import StringRun

MOST_UNREAD = 32
"""The number of tokens that are followed at once, so that the last step of a string is not much slower than others."""


class LateMatcher:
    """Follows a text as llguidance's matcher does; what it lacks here is of that matcher.

    Args:
        matcher: llguidance's matcher.
        run: Where the text is.
    """

    def __init__(self, matcher: Any, run: StringRun) -> None:
        self._matcher, self.run = matcher, run
        self._unread: list[int] = []
        """The last tokens, which the matcher has not followed: each was allowed, and nothing is forced after it."""

    def __getattr__(self, name: str) -> Any:
        # whatever else is asked of the matcher needs it at its place
        self._follow()
        return getattr(self._matcher, name)

    def _follow(self) -> bool:
        unread, self._unread = self._unread, []
        return not unread or self._matcher.consume_tokens(unread)

    def consume_token(self, token: int) -> bool:
        """Follows a token; returns whether the text may go on with it.

        Args:
            token: The token.
        """
        if self.take_plain([token]):
            return True
        self.run.advance(token)
        self._unread.append(token)
        return self._follow()

    def take_plain(self, tokens: Sequence[int]) -> bool:
        """Follows tokens within a string; returns False, and follows none, if more is to be done for one of them.

        Args:
            tokens: The tokens.
        """
        if len(self._unread) + len(tokens) >= MOST_UNREAD or not self.run.advance_plain(tokens):
            return False
        self._unread += tokens
        return True

    def is_error(self) -> bool:
        """Whether the grammar cannot be followed."""
        return not self._unread and self._matcher.is_error()

    def compute_ff_tokens(self) -> list[int]:
        """The tokens that are forced next: none within a string."""
        return [] if self._unread else self._matcher.compute_ff_tokens()

    def deep_copy(self) -> LateMatcher:
        """Another matcher at the same place."""
        copy = LateMatcher(self._matcher.deep_copy(), self.run.copy())
        copy._unread = [*self._unread]
        return copy
