"""The messages that the process of an engine receives; the conversation is described in `events`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from max._dataclass import dataclass, replace_fields
from max._lazy import lazy_module
from max.interfaces import (
    RequestID,
    SamplingParams,
)
from max.pipelines.core.exceptions import check_prompt
from max.pipelines.core.reasoning import ReasoningBudget
from max.pipelines.core.text_context import TextContext
from max.pipelines.core.vision_context import TextAndVisionContext

if TYPE_CHECKING:
    from max.pipelines.core import predicted_text
else:
    predicted_text = lazy_module("max.pipelines.core.predicted_text")


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are chosen; the fields are those of ``SamplingParams``."""

    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    ignore_eos: bool = False
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, params: SamplingParams) -> Sampling:
        """Extracts the fields of sampling parameters that an engine reads.

        Args:
            params: The parameters.

        Raises:
            ValueError: The parameters have logits processors, which are callables of this process.
        """
        if params.logits_processors:
            raise ValueError("logits processors cannot be sent to the process of an engine")
        return cls(*_sampling_values(params), logit_bias=tuple((params.logit_bias or {}).items()))

    def to_params(self) -> SamplingParams:
        """Creates sampling parameters with these fields."""
        return SamplingParams(**{**asdict(self), "logit_bias": dict(self.logit_bias) or None})


# all but the last one, logit_bias, whose form differs
_sampling_values = attrgetter(*(field.name for field in fields(Sampling)[:-1]))


@dataclass(frozen=True)
class GenerationRequest:
    """Requests tokens; the fields are those of ``TextContext``.

    Args:
        request_id: Identifies the request; no open request may have the same identifier.
        tokens: The prompt.
        max_length: The maximum number of tokens of the sequence, including the prompt.
        eos_token_ids: Tokens that end the sequence.
        eos_sequences: Token sequences that end the sequence.
        log_probabilities: The number of top log-probabilities per token; 0: none are returned.
        log_probabilities_echo: Whether log-probabilities of the prompt are returned too.
        ignore_eos: Whether the sequence continues after one of ``eos_token_ids``.
        json_schema: The JSON schema that the text must match; None: any text.
        grammar: The grammar that the text must match; None: any text.
        reasoning_budget: The limit of the reasoning; None: no limit.
        model_name: The requested model.
        sampling: How tokens are chosen.
        priority: Requests with lower values come first.
        client: The client that sent it; clients share the engine equally.
        cache_salt: Requests share cached prefixes only if theirs are equal.
        adapter: The name of the adapter whose weights are added to the model's; empty: none.
        adapter_scale: The factor of these weights.
        logged_tokens: Tokens whose log-probabilities are returned besides the top ones.
        reusable_tokens: The number of first tokens that later requests may find in the cache; None: all.
        generated_tokens: Tokens of the answer that another engine has returned; the answer goes on after them.
        predicted_tokens: Tokens that the answer may have, a source of drafts.
    """

    request_id: str
    tokens: tuple[int, ...]
    max_length: int
    eos_token_ids: tuple[int, ...] = ()
    eos_sequences: tuple[tuple[int, ...], ...] = ()
    log_probabilities: int = 0
    log_probabilities_echo: bool = False
    ignore_eos: bool = False
    json_schema: str | None = None
    grammar: str | None = None
    reasoning_budget: ReasoningBudget | None = None
    model_name: str = ""
    sampling: Sampling = Sampling()
    priority: int = 0
    client: str = ""
    cache_salt: str = ""
    adapter: str = ""
    adapter_scale: float = 1.0
    logged_tokens: tuple[int, ...] = ()
    reusable_tokens: int | None = None
    generated_tokens: tuple[int, ...] = ()
    predicted_tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, context: TextContext) -> GenerationRequest:
        """The request that corresponds to a new context.

        Args:
            context: The context, for which nothing was generated yet.

        Raises:
            ValueError: The context has generated tokens, images or logits processors.
        """
        if len(context.generated_tokens):
            raise ValueError(
                f"request {context.request_id} has {len(context.generated_tokens)} generated "
                "tokens; only a new request can be sent to an engine"
            )
        if isinstance(context, TextAndVisionContext):
            raise ValueError(
                f"request {context.request_id} has images, which cannot be sent to an engine"
            )
        return cls(
            request_id=context.request_id.value,
            tokens=tuple(context.all_tokens.tolist()),
            max_length=context.max_length,
            eos_token_ids=tuple(sorted(context.eos_token_ids)),
            eos_sequences=tuple(map(tuple, context.eos_sequences)),
            log_probabilities=context.log_probabilities,
            log_probabilities_echo=context.log_probabilities_echo,
            ignore_eos=context.ignore_eos,
            json_schema=context.json_schema,
            grammar=context.grammar,
            reasoning_budget=context.reasoning_budget,
            model_name=context.model_name,
            sampling=Sampling.of(context.sampling_params),
            cache_salt=context.cache_salt,
            adapter=context.adapter,
            adapter_scale=context.adapter_scale,
            logged_tokens=context.logged_tokens,
            reusable_tokens=context.reusable_tokens,
            predicted_tokens=()
            if context.prediction is None
            else tuple(context.prediction.tokens.tolist()),
        )

    @classmethod
    def of_arguments(cls, arguments: Mapping[str, Any], **values: Any) -> GenerationRequest:
        """The request that corresponds to a new context, which is not made.

        Args:
            arguments: The arguments of the context, with a list of tokens.
            values: Further fields of the request.

        Raises:
            InputError: The prompt is empty, or leaves no room for a token.
        """
        tokens: list[int] = arguments["tokens"]
        check_prompt(len(tokens), arguments["max_length"])
        # cheaper than the constructor, which sets each field anew
        return replace_fields(
            _NO_REQUEST,
            tokens=tuple(tokens),
            max_length=arguments["max_length"],
            eos_token_ids=tuple(sorted(arguments["eos_token_ids"])),
            eos_sequences=tuple(map(tuple, arguments["eos_sequences"])),
            log_probabilities=arguments["log_probabilities"],
            log_probabilities_echo=arguments["log_probabilities_echo"],
            ignore_eos=arguments["ignore_eos"],
            json_schema=arguments["json_schema"],
            reasoning_budget=arguments["reasoning_budget"],
            model_name=arguments["model_name"],
            sampling=Sampling.of(arguments["sampling_params"]),
            **values,
        )

    def with_grammar(self, grammar: str | None) -> GenerationRequest:
        """A copy of the request with a grammar.

        Args:
            grammar: The grammar; None: any text.
        """
        return self if grammar == self.grammar else replace_fields(self, grammar=grammar)

    def resumed_request(self, tokens: Sequence[int]) -> GenerationRequest:
        """The request for the rest of the answer, after the engine that ran it was lost.

        The next engine reads prompt and tokens, and chooses the later ones as the first engine would have: seeds
        depend on positions only.

        Args:
            tokens: The tokens of the answer that were received since this request was sent.
        """
        if not tokens:
            return self
        # the first tokens came with the prompt's log-probabilities
        return replace_fields(
            self, generated_tokens=(*self.generated_tokens, *tokens), log_probabilities_echo=False
        )

    def ending_with(self, tokens: Iterable[int]) -> GenerationRequest:
        """A copy of the request with additional end tokens."""
        return replace_fields(self, eos_token_ids=tuple(sorted({*self.eos_token_ids, *tokens})))

    def to_context(self) -> TextContext:
        """Creates a new context from this request.

        Raises:
            InputError: The prompt is empty, or leaves no room for a token.
            ValueError: A sampling parameter is out of range, or the generated tokens end the answer.
        """
        context = TextContext(
            request_id=RequestID(self.request_id),
            tokens=np.array(self.tokens, np.int64),
            max_length=self.max_length,
            eos_token_ids=set(self.eos_token_ids),
            eos_sequences=[list(run) for run in self.eos_sequences],
            log_probabilities=self.log_probabilities,
            log_probabilities_echo=self.log_probabilities_echo,
            ignore_eos=self.ignore_eos,
            json_schema=self.json_schema,
            grammar=self.grammar,
            reasoning_budget=self.reasoning_budget,
            model_name=self.model_name,
            sampling_params=self.sampling.to_params(),
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            adapter_scale=self.adapter_scale,
            logged_tokens=self.logged_tokens,
            reusable_tokens=self.reusable_tokens,
            prediction=predicted_text.PredictedText(self.predicted_tokens)
            if self.predicted_tokens
            else None,
        )
        context.resume(self.generated_tokens)
        return context


_NO_REQUEST = GenerationRequest("", (), 0)


@dataclass(frozen=True)
class CancelRequest:
    """Ends a request.

    Args:
        request_id: The request; nothing happens if it has ended.
    """

    request_id: str


@dataclass(frozen=True)
class ForgetPrefixes:
    """Empties the prefix cache; running requests keep their pages.

    Args:
        number: Identifies the answer to this command.
    """

    number: int


@dataclass(frozen=True)
class KeepPrefixes:
    """Saves the cached prefixes to a file, restores those of a file, or removes a file.

    Args:
        number: Identifies the answer to this command.
        action: ``save``, ``restore`` or ``erase``.
        name: The name of the file in the folder of prefixes.
    """

    number: int
    action: str
    name: str


@dataclass(frozen=True)
class LoadAdapter:
    """Loads an adapter; requests that are sent after it may name it.

    Args:
        number: Identifies the answer to this command.
        name: Its name.
        path: Its folder or file.
    """

    number: int
    name: str
    path: str


@dataclass(frozen=True)
class UnloadAdapter:
    """Unloads an adapter; the answer comes when its requests have ended.

    Args:
        number: Identifies the answer to this command.
        name: Its name.
    """

    number: int
    name: str


@dataclass(frozen=True)
class Shutdown:
    """Stops the engine.

    Args:
        finish: Whether open requests are finished first; if not, they are cancelled.
    """

    finish: bool = False


Command: TypeAlias = (
    GenerationRequest
    | CancelRequest
    | ForgetPrefixes
    | KeepPrefixes
    | LoadAdapter
    | UnloadAdapter
    | Shutdown
)
"""The messages that an engine receives."""
