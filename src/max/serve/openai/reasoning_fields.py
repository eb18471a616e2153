"""The fields that turn reasoning on and off, limit it, and show it, by the names that servers have for them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from max.serve.chat.reasoning import Effort, thinking_options
from max.serve.openai.fields import StrictBody

_Budget = Annotated[int, Field(ge=-1, lt=2**31)]


class ThinkingField(StrictBody):
    """As the APIs of DeepSeek and GLM turn reasoning on and off."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: _Budget | None = None


class ReasoningField(StrictBody):
    """As OpenRouter's API sets reasoning."""

    effort: Effort | None = None
    max_tokens: _Budget | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ReasoningFields(StrictBody):
    """The fields of a request."""

    reasoning_effort: Effort | None = None
    thinking: ThinkingField | None = None
    # of Qwen's API
    enable_thinking: bool | None = None
    thinking_budget: _Budget | None = None
    reasoning: ReasoningField | None = None
    # vLLM's: the maximum number of tokens of reasoning; -1: no limit
    thinking_token_budget: _Budget | None = None
    # vLLM's: whether the answer has the reasoning
    include_reasoning: bool | None = None

    @property
    def shows_reasoning(self) -> bool:
        """Whether the answer has the reasoning."""
        excluded = self.reasoning is not None and self.reasoning.exclude
        return self.include_reasoning is not False and not excluded

    @property
    def reasoning_limit(self) -> int | None:
        """The maximum number of tokens of reasoning; None: no limit."""
        # several may be given: the one of this server's own API first
        limit = self.thinking_token_budget
        if limit is None:
            limit = self.thinking_budget
        if limit is None and self.thinking is not None and self.thinking.type != "disabled":
            limit = self.thinking.budget_tokens
        if limit is None and self.reasoning is not None:
            limit = self.reasoning.max_tokens
        return None if limit == -1 else limit

    @property
    def reasoning_options(self) -> dict[str, Any]:
        """The variables of the chat template that they set."""
        # `auto` leaves the choice to the template, as no field does
        form = self.reasoning or ReasoningField()
        thinks = self.enable_thinking
        if thinks is None and self.thinking is not None and self.thinking.type != "auto":
            thinks = self.thinking.type != "disabled"
        if thinks is None:
            thinks = form.enabled
        return thinking_options(thinks, self.reasoning_effort or form.effort)
