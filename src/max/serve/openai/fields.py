"""The fields that requests of OpenAI's API share."""

from __future__ import annotations

import re
from collections.abc import Collection
from heapq import nsmallest
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainValidator
from pydantic_core import PydanticCustomError

from max.interfaces import SamplingParams, SamplingParamsInput
from max.serve import limits
from max.serve.errors import ApiError, short_text
from max.serve.models.model import ServedModel
from max.serve.models.vocabulary import Vocabulary


class StrictBody(BaseModel):
    """A body whose values have the types of the schema; unknown fields are kept for a warning."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    @property
    def unknown_fields(self) -> str:
        """The unknown fields, separated by commas; the first ones if they are many."""
        extra = self._unknown_names()
        # a body may have thousands of them
        names = nsmallest(8, extra)
        shortened = [name if len(name) <= 60 else f"{name[:60]}..." for name in names]
        more = [f"and {len(extra) - 8} more"] if len(extra) > 8 else []
        return ", ".join(shortened + more)

    def _unknown_names(self) -> Collection[str]:
        names = [*(self.model_extra or {})]
        # of objects within, with their place; messages stay dictionaries, whose further fields the template gets
        # of those that the body gives: a route has some seventy
        for field in self.model_fields_set:
            value = self.__dict__.get(field)
            items = value if isinstance(value, list) else (value,)
            # of thousands of tokens the first one tells
            if items and not isinstance(items[0], int):
                for index, item in enumerate(items):
                    if isinstance(item, StrictBody):
                        place = f"{field}.{index}" if items is value else field
                        names += [f"{place}.{name}" for name in item._unknown_names()]
        return names


class StreamOptions(StrictBody):
    """The content of a stream besides text."""

    include_usage: bool | None = None
    """Whether a last event has the numbers of tokens."""
    continuous_usage_stats: bool | None = None
    """Whether each event has them."""


class _FirstError(FailFast):
    """Ends the check of a list at its first error."""

    def __hash__(self) -> int:  # unions of annotated types need it
        return id(self)


FIRST_ERROR = _FirstError()
_TOKENS_AT_ONCE = 16384
_TOKEN_LIMIT = 2**31


def _tokens(value: object) -> list[int]:
    """Checks a list of tokens, part by part, so that other threads run meanwhile."""
    if not isinstance(value, list) or not value:
        kind = "is empty" if value == [] else "is no list"
        raise PydanticCustomError("tokens_type", f"Input should be a list of tokens, and {kind}")
    for begin in range(0, len(value), _TOKENS_AT_ONCE):
        part = value[begin : begin + _TOKENS_AT_ONCE]
        # an item is looked for only in a part that does not fit
        if set(map(type, part)) == {int} and 0 <= min(part) and max(part) < _TOKEN_LIMIT:
            continue
        index, item = next(
            (index, item)
            for index, item in enumerate(part, begin)
            if type(item) is not int or not 0 <= item < _TOKEN_LIMIT
        )
        raise PydanticCustomError(
            "token" if type(item) is int else "token_type",
            "Input should be a list of tokens, and item {index} is {item}; tokens are 0 to 2147483647",
            {"index": index, "item": short_text(item)},
        )
    return value


Token = Annotated[int, Field(ge=0, lt=_TOKEN_LIMIT)]
TokenList = Annotated[list[Token], PlainValidator(_tokens, json_schema_input_type=list[Token])]
"""One token or more."""
CacheSalt = Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME)]
"""vLLM's ``cache_salt``: only requests with the same text share cached prefixes."""
Name = Annotated[str, Field(max_length=limits.MAX_NAME)]
StopText = Annotated[str, Field(max_length=limits.MAX_STOP)]
StopTexts = Annotated[list[StopText], Field(max_length=limits.MAX_STOPS), FIRST_ERROR]
Stop = StopText | StopTexts | None
Objects = Annotated[list[dict[str, Any]], FIRST_ERROR]
_TOKEN_NUMBER = re.compile("[0-9]{1,10}")


def _is_bias(value: object) -> bool:
    return type(value) in (int, float) and -100 <= value <= 100  # pyright: ignore[reportOperatorIssue]


def _biases(value: object) -> dict[str, float]:
    """Checks ``logit_bias``, entry by entry, so that other threads run meanwhile."""
    if not isinstance(value, dict):
        raise PydanticCustomError("dict_type", "Input should be a valid dictionary")
    if len(value) > limits.MAX_BIASES:
        raise PydanticCustomError(
            "too_long",
            "Dictionary should have at most {most} items",
            {"most": limits.MAX_BIASES},
        )
    for key, bias in value.items():
        if not _is_bias(bias):
            raise PydanticCustomError(
                "bias",
                "Input should have numbers from -100 to 100, and that of {key} is {bias}",
                {"key": short_text(key), "bias": short_text(bias)},
            )
    return value


Biases = Annotated[
    dict[str, float], PlainValidator(_biases, json_schema_input_type=dict[str, float])
]


class SamplingFields(StrictBody):
    """How the tokens are chosen. Fields beyond OpenAI's are those of MAX and of vLLM."""

    model: Name | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: Biases | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=256), FIRST_ERROR] | None = None
    include_stop_str_in_output: bool | None = None
    user: str | None = None
    # vLLM's: a lower value comes first
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: CacheSalt | None = None
    # vLLM's: the last tokens of the prompt that are kept
    truncate_prompt_tokens: Annotated[int, Field(ge=1, lt=_TOKEN_LIMIT)] | None = None
    # vLLM's: the likeliest tokens at each place of the prompt
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # vLLM's: whether the answer has the tokens of the prompt and its own
    return_token_ids: bool | None = None
    # vLLM's: whether log-probabilities name tokens by their numbers, which no two tokens share
    return_tokens_as_token_ids: bool | None = None
    # the name of an adapter, or an object with name and scale
    lora: Any = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts."""
        if self.stop is None:
            return ()
        # an empty text would end each answer before its first token
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if any(not stop for stop in stops):
            raise ApiError("a stop text is empty; give texts with a character", param="stop")
        return stops

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        options = self.stream_options
        if options is not None and not self.stream:
            raise ApiError("stream_options needs stream to be true", param="stream_options")
        return bool(options is not None and options.include_usage)

    @property
    def wants_prompt_logs(self) -> bool:
        """Whether the answer has vLLM's log-probabilities of the prompt."""
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(
                "prompt_logprobs needs stream to be false; echo and logprobs of /v1/completions can be streamed",
                param="prompt_logprobs",
            )
        return self.prompt_logprobs is not None

    def named_tokens(self, vocabulary: Vocabulary) -> Vocabulary:
        """The tokens as log-probabilities name them.

        Args:
            vocabulary: The tokens of the model.
        """
        return vocabulary.by_numbers() if self.return_tokens_as_token_ids else vocabulary

    @property
    def wants_each_usage(self) -> bool:
        """Whether each event of a stream has the numbers of tokens."""
        options = self.stream_options
        return bool(self.stream and options is not None and options.continuous_usage_stats)

    def sampling_input(self, model: ServedModel, max_tokens: int | None) -> SamplingParamsInput:
        """The sampling parameters that are set.

        Args:
            model: The model.
            max_tokens: The maximum number of new tokens.

        Raises:
            ApiError: A value does not fit the model.
        """
        return SamplingParamsInput(
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            temperature=self.temperature,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            max_new_tokens=max_tokens,
            min_new_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            # the engine's seeds have 64 bits without a sign, and clients send negative ones
            seed=None if self.seed is None else self.seed % 2**64,
            logit_bias=bias_of(self.logit_bias, model.vocabulary_size),
        )


def sampling_of(
    body: SamplingFields, model: ServedModel, max_tokens: int | None, sequences: int
) -> SamplingParams:
    """The sampling parameters of a request.

    Args:
        body: The request.
        model: The model.
        max_tokens: The maximum number of new tokens.
        sequences: The number of sequences, each of which has them.

    Raises:
        ApiError: A value does not fit.
    """
    biases = len(body.logit_bias or ())
    if biases * sequences > limits.MAX_SEQUENCE_BIASES:
        raise ApiError(
            f"logit_bias has {biases} entries, for {sequences} sequences; at most "
            f"{limits.MAX_SEQUENCE_BIASES} in all are supported",
            param="logit_bias",
        )
    return model.sampling_params(body.sampling_input(model, max_tokens))


def bias_of(field: dict[str, float] | None, vocabulary_size: int) -> dict[int, float] | None:
    """Checks ``logit_bias``.

    Args:
        field: What is added to the logits of tokens, by their numbers as text.
        vocabulary_size: The number of tokens.

    Raises:
        ApiError: A key is not a token.
    """
    if not field:
        return None
    if len(field) > vocabulary_size:
        raise ApiError(
            f"logit_bias has {len(field)} entries; the model has {vocabulary_size} tokens",
            param="logit_bias",
        )
    biases: dict[int, float] = {}
    for key, value in field.items():
        # other keys, such as those with signs, count as beyond the vocabulary
        number = int(key) if _TOKEN_NUMBER.fullmatch(key) else vocabulary_size
        if number >= vocabulary_size:
            raise ApiError(
                f"logit_bias has the key {short_text(key)}; the model's tokens are 0 to "
                f"{vocabulary_size - 1}",
                param="logit_bias",
            )
        biases[number] = value
    return biases
