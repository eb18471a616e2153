"""A model and one request at a time, for commands that generate text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import click

from max._lazy import lazy_module
from max.interfaces import (
    PipelineTask,
    RequestID,
    SamplingParams,
    TextGenerationContext,
    TextGenerationRequest,
)
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import InputError
from max.pipelines.generation.coroutines import run_async

# loaded when a command runs, not for its help or for completions of a shell
if TYPE_CHECKING:
    from max.pipelines.generation import generation
    from max.pipelines.registry import registry
    from max.pipelines.tokenization import text_stream
    from max.pipelines.tokenization import tokenizer as text_tokenizer
else:
    generation = lazy_module("max.pipelines.generation.generation")
    text_stream = lazy_module("max.pipelines.tokenization.text_stream")
    registry = lazy_module("max.pipelines.registry.registry")
    text_tokenizer = lazy_module("max.pipelines.tokenization.tokenizer")

__all__ = ["Runner", "model_name"]


class Runner:
    """A model and one request at a time."""

    _alive: ClassVar[list[object]] = []
    """Models live until the process ends: their packed weights are then written for the next start (`max.engine`)."""

    def __init__(
        self,
        config: PipelineConfig,
        params: SamplingParams,
        grammar: str | None = None,
        adapter: tuple[str, float] = ("", 1.0),
    ) -> None:
        self.config, self.params, self._grammar = config, params, grammar
        self._adapter = adapter
        tokenizer, self._factory = registry.PIPELINE_REGISTRY.retrieve_factory(
            config, PipelineTask.TEXT_GENERATION
        )
        if not isinstance(tokenizer, text_tokenizer.TextTokenizer):
            raise click.ClickException(f"{model_name(config)} is no model of text")
        self.tokenizer = tokenizer

    def load(self) -> None:
        """Loads and compiles the model."""
        self.pipeline: Any = self._factory()
        self._alive.append(self.pipeline)
        self.generation = generation.Generation.of(self.pipeline)

    def prompt_context(self, prompt: str, chat: bool) -> TextGenerationContext:
        """The initial state of a request to continue a text, or to answer it.

        Args:
            prompt: The text.
            chat: Whether it is a user's message, where the model has a chat template.
        """
        if not prompt:
            raise InputError("the prompt is empty", "Give a text with --prompt.")
        if chat and self.tokenizer.has_chat_template:
            return self.context(messages=[{"role": "user", "content": prompt}])
        return self.context(prompt)

    def context(
        self, prompt: str | None = None, messages: list[Any] | None = None
    ) -> TextGenerationContext:
        """The initial state of a request.

        Args:
            prompt: The text to continue.
            messages: The conversation to answer instead, each message with role and content.
        """
        request = TextGenerationRequest(
            request_id=RequestID(),
            model_name=self.config.model_config.model_name,
            prompt=prompt,
            messages=messages,
            sampling_params=self.params,
        )
        context = run_async(self.tokenizer.new_context(request))
        context.grammar = self._grammar
        context.adapter, context.adapter_scale = self._adapter
        return context

    def run(
        self, context: TextGenerationContext, count: Callable[[int], None] | None = None
    ) -> Iterator[str]:
        """The text of a request, in pieces.

        Args:
            context: The request.
            count: Is told the number of tokens of each step.
        """
        text = text_stream.GeneratedText(
            lambda tokens: self.tokenizer.decode_now(tokens, skip_special_tokens=True),
            context.eos_token_ids,
            self.params.stop or (),
        )
        outputs = self.generation.stream([context])
        try:
            for output in outputs:
                if count is not None:
                    count(len(output.tokens))
                piece = text.push(output.tokens, output.final_status)
                if piece.text:
                    yield piece.text
                if piece.stop is not None:
                    return
        finally:
            outputs.close()

    def forget(self) -> None:
        """Drops cached prefixes, so that the next prompt is computed."""
        for manager in self.pipeline.kv_managers:
            manager.forget_prefixes()


def model_name(config: PipelineConfig) -> str:
    """The model's name for messages.

    Args:
        config: The configuration.
    """
    return config.model_config.model_name
