"""How a model thinks before it answers: for how many tokens, and at which temperature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

UNLIMITED = 1 << 40
"""A budget that no answer uses up."""
_LAST = 8
"""The tokens before the end's own that are looked at, as letters of the mark may be split in several ways."""


@dataclass(frozen=True)
class ReasoningBudget:
    """How long an answer may reason, and at which temperature.

    Args:
        tokens: The most tokens of reasoning.
        begin: The text that begins reasoning, at the begin of an answer.
        end: The text that ends it.
        begun: Whether the prompt ends within reasoning.
        begin_length: The number of tokens of ``begin``.
        closing_tokens: The tokens that end the reasoning once the budget is used up; their text contains ``end``.
        temperature: The temperature of tokens of reasoning; None: that of the answer.
    """

    tokens: int
    begin: str
    end: str
    begun: bool
    begin_length: int
    closing_tokens: tuple[int, ...]
    temperature: float | None = None


class ReasoningLimit:
    """Follows one answer, and names the tokens that end its reasoning.

    Marks may be several tokens, and their letters may be split in several ways: the text is looked at,
    once, when the budget is used up.

    Args:
        budget: The budget.
    """

    def __init__(self, budget: ReasoningBudget) -> None:
        self._budget = budget
        opening = 0 if budget.begun else budget.begin_length
        self._first_check = budget.tokens + opening  # tokens of the answer
        self._check_at: int | None = self._first_check
        self._closed_at: int | None = None
        # within reasoning; None: it may still begin
        self._thinks: bool | None = True if budget.begun else None
        self._blank = 0
        """The number of first tokens that are only space: they are not decoded again."""

    def rewind(self, num_generated: int) -> None:
        """Goes back to an earlier state of the answer.

        Args:
            num_generated: The number of tokens that are left.
        """
        if self._closed_at is None or num_generated <= self._closed_at:
            self._check_at, self._closed_at = self._first_check, None
        self._thinks = None  # found from the whole text
        self._blank = min(self._blank, num_generated)

    @property
    def sets_temperature(self) -> bool:
        """Whether tokens of reasoning have a temperature of their own."""
        return self._budget.temperature is not None

    @property
    def temperature(self) -> float | None:
        """The temperature of the next token; None: that of the answer."""
        return self._budget.temperature if self._thinks else None

    def observe(
        self, generated_tokens: Sequence[int], decode: Callable[[Sequence[int]], str]
    ) -> None:
        """Follows the answer, for its temperature; called before each step.

        Args:
            generated_tokens: The tokens of the answer.
            decode: Makes text of tokens, marks included.
        """
        if not self.sets_temperature or self._thinks is False:
            return
        if self._thinks is None:
            self._thinks = self._reasons(generated_tokens, decode)
        # only the last tokens, as each step decodes them
        elif self._budget.end in decode(
            generated_tokens[-len(self._budget.closing_tokens) - _LAST :]
        ):
            self._thinks = False

    def bounded_steps(self, steps: int, num_generated: int) -> int:
        """The steps until a token may have to be forced; 1 where the next one may.

        Args:
            steps: The most steps.
            num_generated: The number of tokens of the answer.
        """
        # the temperature may change with any token
        if self.sets_temperature and self._thinks is not False:
            return 1
        if self._closed_at is not None:
            return (
                1 if num_generated - self._closed_at < len(self._budget.closing_tokens) else steps
            )
        if self._check_at is None:
            return steps
        return min(steps, max(1, self._check_at - num_generated))

    def forced_token(
        self, generated_tokens: Sequence[int], decode: Callable[[Sequence[int]], str]
    ) -> int | None:
        """The token that must follow; None: any.

        Args:
            generated_tokens: The tokens of the answer.
            decode: Makes text of tokens, marks included.
        """
        count, closing = len(generated_tokens), self._budget.closing_tokens
        if self._closed_at is None:
            if self._check_at is None or count < self._check_at:
                return None
            reasons = self._reasons(generated_tokens, decode)
            # only space so far, or a part of the mark: the next token tells
            self._check_at = count + 1 if reasons is None else None
            if not reasons:
                return None
            self._closed_at = count
        at = count - self._closed_at
        return closing[at] if at < len(closing) else None

    def _reasons(
        self, generated_tokens: Sequence[int], decode: Callable[[Sequence[int]], str]
    ) -> bool | None:
        """Whether an answer is within reasoning; None: its text may still begin it."""
        budget = self._budget
        if budget.begun:
            return budget.end not in decode(generated_tokens)
        text = decode(generated_tokens[self._blank :]).lstrip()
        if not text:
            self._blank = len(generated_tokens)
        if text.startswith(budget.begin):
            return budget.end not in text
        return None if budget.begin.startswith(text) else False
