"""Masks of the next step of a batch, computed before the step begins, while nothing waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max.interfaces import TextGenerationContext
from max.pipelines.structured.step_masks import Mask, StepMasks


class KnownMasks:
    """Masks that are computed already, as `StepMasks`.

    Args:
        masks: int32 ``[batch, words]``.
    """

    def __init__(self, masks: Mask) -> None:
        self._masks = masks

    def wait(self, seconds: float) -> bool:
        """Waits for nothing."""
        return True

    def result(self) -> Mask:
        """The masks."""
        return self._masks


class GrammarPlace:
    """A place in the text of a request, with a matcher of its own, as a request for `StepMasks`.

    Args:
        matcher: The grammar there; None: the request has none.
    """

    def __init__(self, matcher: Any) -> None:
        self.matcher: Any = matcher
        self.active_idx = self.end_idx = 0

    def set_matcher(self, matcher: object) -> None:
        """Sets the matcher, of a mask that could not be computed."""
        self.matcher = matcher


class NextMasks:
    """The masks of the next step of a batch, which are computed before the step begins.

    Args:
        batch: The requests.
        places: Their places: copies of their matchers, so that the requests may change meanwhile.
        masks: The masks of the places.
    """

    def __init__(
        self,
        batch: Sequence[TextGenerationContext],
        places: Sequence[GrammarPlace],
        masks: StepMasks | KnownMasks,
    ) -> None:
        self._places, self._masks = places, masks
        self._requests = [(context, context.end_idx, context.matcher) for context in batch]

    def fit(self, batch: Sequence[TextGenerationContext]) -> bool:
        """Whether a batch has the same requests, none of which has changed.

        Args:
            batch: The requests.
        """
        return len(batch) == len(self._requests) and all(
            context is own and context.end_idx == end and context.matcher is matcher
            for context, (own, end, matcher) in zip(batch, self._requests, strict=True)
        )

    def wait(self, seconds: float) -> bool:
        """As `StepMasks.wait`."""
        return self._masks.wait(seconds)

    def result(self) -> Mask:
        """As `StepMasks.result`; a request whose mask takes too long gets a matcher that refuses its next token."""
        before = [place.matcher for place in self._places]
        masks = self._masks.result()
        for (context, _, _), place, matcher in zip(
            self._requests, self._places, before, strict=True
        ):
            if place.matcher is not matcher:
                context.set_matcher(place.matcher)
        return masks

    def discard(self) -> None:
        """Waits for masks that nobody needs, so that a slow one does not hold up those after it."""
        self._masks.result()
