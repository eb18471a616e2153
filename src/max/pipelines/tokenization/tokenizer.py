"""Tokenizers of pipelines: text to tokens and back, and requests to contexts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from max._lazy import lazy_module
from max.interfaces import (
    PipelineTokenizer,
    SamplingParams,
    TextGenerationRequest,
    TextGenerationRequestMessage,
    TextGenerationRequestTool,
)
from max.pipelines.checkpoints.chat_templates import DEFAULT, choose_template
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.hub import HuggingFaceRepo
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core import TextContext
from max.pipelines.core.exceptions import InputError, ModelFilesError, PromptTooLongError
from max.pipelines.core.reasoning import UNLIMITED, ReasoningBudget
from max.pipelines.core.text import shortened_repr, utf8
from max.pipelines.tokenization.base_tokenizers import Tokens
from max.pipelines.tokenization.hf_tokenizer import (
    HFTokenizer,
    active_tokenizer,
    render_for_transformers,
)

if TYPE_CHECKING:
    import asyncio

    from max.pipelines.structured import grammar as grammars
else:
    asyncio = lazy_module("asyncio")
    grammars = lazy_module("max.pipelines.structured.grammar")

logger = logging.getLogger("max.pipelines")

_LONG = 4096
"""The characters of a text that takes milliseconds, for which the event loop does not wait."""
_AFTER_MARK = 4
"""Tokens of space that may follow the mark of reasoning at the end of a prompt."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


async def run_with_default_executor(
    fn: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
) -> _R:
    """Runs a function in the event loop's thread pool.

    Args:
        fn: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, lambda: fn(*args, **kwargs))


def max_tokens_to_generate(
    prompt_size: int, max_length: int | None, max_new_tokens: int | None = None
) -> int | None:
    """The number of tokens that a request may generate.

    Args:
        prompt_size: The tokens of its prompt.
        max_length: The longest sequence; None: no bound.
        max_new_tokens: The request's maximum; None: as many as fit.

    Returns:
        The number; None: no bound.
    """
    if max_length is None:
        return max_new_tokens
    room = max(max_length - prompt_size, 0)
    return room if max_new_tokens is None else min(room, max_new_tokens)


def _eos_ids(pipeline_config: PipelineConfig | None, tokenizer_eos: int | None) -> set[int]:
    """The tokens that end a sequence, from the tokenizer, config.json and generation_config.json."""
    ids: set[int] = set() if tokenizer_eos is None else {tokenizer_eos}
    if pipeline_config is not None:
        model = pipeline_config.model_config
        config = ConfigKeys(model.huggingface_config)
        # a composite model may have its tokens in text_config only
        for keys in (config, config.object("text_config"), model.generation_keys):
            ids |= set() if keys is None else set(keys.token_ids("eos_token_id"))
    return ids


def _vocabulary_size(pipeline_config: PipelineConfig | None) -> int | None:
    """The number of tokens that a model has embeddings for; None where its config.json does not say."""
    if pipeline_config is None:
        return None
    config = ConfigKeys(pipeline_config.model_config.huggingface_config)
    # config.json of a composite model has a text_config
    parts = (config, config.object("text_config"))
    sizes = [part.value("vocab_size") for part in parts if part is not None]
    return max((size for size in sizes if type(size) is int and size > 0), default=None)


def _given_tokens(prompt: Sequence[int]) -> Tokens:
    """The tokens of a prompt that a caller has encoded, int64 ``[n]``.

    Raises:
        InputError: It is not a sequence of integers.
    """
    try:
        tokens = np.asarray(prompt)
    except ValueError:  # nested lists of different lengths
        tokens = np.array(None)
    if tokens.shape == (0,):
        return np.zeros(0, np.int64)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InputError(
            f"the prompt is {shortened_repr(prompt)}, expected a text or a list of tokens",
            "Give a text, or integers.",
        )
    return tokens.astype(np.int64)


def text_of_content(content: str | list[dict[str, Any]] | None) -> str | None:
    """The text of a message; parts are joined by line breaks.

    Args:
        content: The text, or OpenAI's list of parts.

    Raises:
        InputError: A part is not text, or not UTF-8.
    """
    if content is None or isinstance(content, str):
        return content if content is None else utf8(content)
    other = [part.get("type") for part in content if part.get("type") != "text"]
    if other:
        raise InputError(
            f"the model takes text, and a message has a part of type {other[0]!r}",
            "Give messages of text.",
        )
    return utf8("\n".join(str(part.get("text", part.get("content", ""))) for part in content))


class TextTokenizer(PipelineTokenizer[TextContext, Tokens, TextGenerationRequest]):
    """The tokenizer of a model of text.

    Args:
        model_path: The model's folder, or its name on the hub.
        revision: The branch, tag or commit on the hub.
        max_length: The longest sequence; by default the tokenizer's bound.
        trust_remote_code: Whether code of the model may run.
        enable_llama_whitespace_fix: Keep the space before a single decoded word, which tokenizers of
            the Llama 2 family drop.
        pipeline_config: The pipeline's configuration; its files name further end tokens.
        chat_template: A template that replaces the model's, or several by name, ``default`` among them.
        context_validators: Check each new context.
        unused_kwargs: Arguments for other tokenizers.

    Raises:
        ModelFilesError: The model has no tokenizer.
    """

    _vocabulary_size: int | None = None

    def __init__(
        self,
        model_path: str,
        *,
        revision: str | None = None,
        max_length: int | None = None,
        trust_remote_code: bool = False,
        enable_llama_whitespace_fix: bool = False,
        pipeline_config: PipelineConfig | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        context_validators: list[Callable[[TextContext], None]] | None = None,
        **unused_kwargs: object,
    ) -> None:
        self.model_path = model_path
        repo = HuggingFaceRepo(model_path, revision or "main", trust_remote_code)
        self.delegate = active_tokenizer(repo)
        self.max_length = max_length or getattr(self.delegate, "model_max_length", None)
        self._chat_templates = (
            {DEFAULT: chat_template}
            if isinstance(chat_template, str)
            else dict(chat_template or {})
        )
        self._validators = list(context_validators or [])
        self._whitespace_fix = enable_llama_whitespace_fix
        tokenizer_eos = self.delegate.eos_token_id
        self._eos_token_ids = _eos_ids(pipeline_config, tokenizer_eos)
        self._eos = (
            tokenizer_eos if tokenizer_eos is not None else min(self._eos_token_ids, default=-1)
        )
        self._vocabulary_size = _vocabulary_size(pipeline_config)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All tokens that end a sequence: the tokenizer's own, and those that the model's configs name."""
        return frozenset(self._eos_token_ids)

    @property
    def eos(self) -> int:
        """The token that ends a sequence; -1 if the model has none."""
        return self._eos

    @property
    def expects_content_wrapping(self) -> bool:
        """False: parts of messages have OpenAI's form."""
        return False

    @property
    def has_chat_template(self) -> bool:
        """Whether the model or the user gives a chat template."""
        return bool(self._chat_templates or getattr(self.delegate, "chat_template", None))

    def apply_chat_template(
        self,
        messages: list[TextGenerationRequestMessage],
        tools: list[TextGenerationRequestTool] | None,
        chat_template_options: dict[str, Any] | None = None,
    ) -> str:
        """Formats a conversation with the model's chat template.

        Args:
            messages: The conversation.
            tools: The functions that the model may call.
            chat_template_options: More variables of the template; ``add_generation_prompt`` is True by
                default.

        Raises:
            InputError: The model has no template, or the template rejects the conversation.
        """
        options = {"add_generation_prompt": True, **(chat_template_options or {})}
        plain = [{**m, "content": text_of_content(m.get("content"))} for m in messages]
        if own := choose_template(self._chat_templates, tools):
            options["chat_template"] = own
        if type(self.delegate).__module__.startswith("transformers"):
            return render_for_transformers(self.delegate, plain, tools, options)
        return str(self.delegate.apply_chat_template(plain, tools=tools, **options))

    def encode_now(self, prompt: str | Sequence[int], add_special_tokens: bool = True) -> Tokens:
        """Encodes a prompt, in this thread.

        Args:
            prompt: The text, or its tokens.
            add_special_tokens: Whether to add begin and end tokens.

        Raises:
            InputError: It is longer than the model's context, or is not UTF-8.
        """
        if isinstance(prompt, str):
            return np.array(self.ids_now(prompt, add_special_tokens), np.int64)
        self._check_length(len(prompt))
        tokens = _given_tokens(prompt)
        self.check_tokens(tokens, of_text=False)
        return tokens

    def ids_now(self, prompt: str, special: bool = True, salt: str | None = None) -> list[int]:
        """Encodes a text as :meth:`encode_now` does.

        Args:
            prompt: The text.
            special: Whether to add begin and end tokens.
            salt: As for :meth:`HFTokenizer.encode`.

        Raises:
            InputError: It is longer than the model's context, or is not UTF-8.
        """
        if isinstance(self.delegate, HFTokenizer):
            # a text that cannot fit is refused before it is encoded, which may take a minute
            self._check_length(self.delegate.fewest_tokens(prompt), at_least=True)
            ids = self.delegate.encode(utf8(prompt), special, self.max_length, salt)
        else:
            ids = self._ids(prompt, special)
        self._check_length(len(ids))
        self._check_ids(ids, of_text=True)
        return ids

    def _check_ids(self, ids: list[int], of_text: bool) -> None:
        """As :meth:`check_tokens`, for a list."""
        size = self._vocabulary_size
        if ids and (min(ids) < 0 or (size is not None and max(ids) >= size)):
            self.check_tokens(np.array(ids), of_text)

    def check_tokens(self, tokens: Tokens, of_text: bool) -> None:
        """Checks that the model has all tokens.

        Args:
            tokens: The tokens, int64 ``[n]``.
            of_text: Whether the tokenizer made them of a text.

        Raises:
            InputError: The model lacks one of the caller's tokens.
            ModelFilesError: The model lacks one of the tokenizer's tokens.
        """
        size = self._vocabulary_size
        if not len(tokens) or (tokens.min() >= 0 and (size is None or tokens.max() < size)):
            return
        token = int(tokens.min() if tokens.min() < 0 else tokens.max())
        highest = "" if size is None else f" to {size - 1}"
        if of_text:
            raise ModelFilesError(
                f"the tokenizer of {self.model_path} gives the token {token}; the model's tokens are 0{highest}",
                "Check that tokenizer.json and config.json belong together.",
            )
        raise InputError(
            f"a token of the prompt is {token}; the model's tokens are 0{highest}",
            "Give numbers of the model's tokens.",
        )

    def _check_length(self, count: int, at_least: bool = False) -> None:
        if self.max_length is not None and count > self.max_length:
            raise PromptTooLongError(count, self.max_length, at_least)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.delegate.encode(utf8(text), add_special_tokens=add_special_tokens)

    async def encode(self, prompt: str | Sequence[int], add_special_tokens: bool = True) -> Tokens:
        """Encodes a prompt.

        Args:
            prompt: The text, or its tokens.
            add_special_tokens: Whether to add begin and end tokens.

        Raises:
            InputError: It is longer than the model's context.
        """
        if isinstance(prompt, str) and len(prompt) > _LONG:
            return await run_with_default_executor(self.encode_now, prompt, add_special_tokens)
        return self.encode_now(prompt, add_special_tokens)

    async def encode_ids(
        self, prompt: str, special: bool = True, salt: str | None = None
    ) -> list[int]:
        """Encodes a text as :meth:`ids_now` does, a long one in a thread.

        Raises:
            InputError: It is longer than the model's context.
        """
        if len(prompt) > _LONG:
            return await run_with_default_executor(self.ids_now, prompt, special, salt)
        return self.ids_now(prompt, special, salt)

    def decode_now(self, tokens: Sequence[int] | Tokens, **kwargs: object) -> str:
        """Decodes tokens, in this thread.

        Args:
            tokens: The tokens.
            kwargs: Arguments of the tokenizer, for example ``skip_special_tokens``.
        """
        plain = type(tokens) is list and bool(tokens) and type(tokens[0]) is int
        # streams decode a few tokens per step: without NumPy this takes half the time
        ids = tokens if plain else np.atleast_1d(np.asarray(tokens)).tolist()
        if self._whitespace_fix and len(ids) == 1:
            # after another token it keeps its space
            before = self.delegate.encode("x", add_special_tokens=False)
            alone = self.delegate.decode(before, **kwargs)
            return str(self.delegate.decode([*before, *ids], **kwargs))[len(alone) :]
        return str(self.delegate.decode(ids, **kwargs))

    def decoder(self, **kwargs: Any) -> Callable[[Sequence[int]], str]:
        """A function that decodes lists of tokens as :meth:`decode_now` does, for streams, which call it at each step.

        Args:
            kwargs: Arguments of the tokenizer, for example ``skip_special_tokens``.
        """
        if self._whitespace_fix:
            return partial(self.decode_now, **kwargs)
        if isinstance(self.delegate, HFTokenizer):
            return self.delegate.decoder(**kwargs)
        return partial(self.delegate.decode, **kwargs)

    async def decode(self, encoded: Tokens, **kwargs: object) -> str:
        """Decodes tokens.

        Args:
            encoded: The tokens.
            kwargs: Arguments of the tokenizer, for example ``skip_special_tokens``.
        """
        return self.decode_now(encoded, **kwargs)

    async def new_context(self, request: TextGenerationRequest) -> TextContext:
        """The initial state of a request.

        Args:
            request: The request: a prompt, or messages.

        Raises:
            InputError: It has neither, or it does not fit the model.
        """
        tokens = await self._prompt_tokens(request)
        context = TextContext(**self._context_arguments(request, tokens))
        for validate in self._validators:
            validate(context)
        return context

    @property
    def validates_contexts(self) -> bool:
        """Whether new contexts are checked by functions of the model's architecture."""
        return bool(self._validators)

    async def new_arguments(self, request: TextGenerationRequest) -> dict[str, Any]:
        """The arguments of the context of a request that another process makes, with its tokens in a list.

        Args:
            request: The request: a prompt, a list of tokens, or messages.

        Raises:
            InputError: It has none of them, or it does not fit the model.
        """
        prompt = request.prompt
        if type(prompt) is list:
            self._check_length(len(prompt))
            self._check_ids(prompt, of_text=False)
            tokens = prompt
        elif isinstance(prompt, str):
            tokens = await self.encode_ids(prompt)
        else:
            tokens = (await self._prompt_tokens(request)).tolist()
        return self._context_arguments(request, tokens)

    async def _prompt_tokens(self, request: TextGenerationRequest) -> Tokens:
        """The tokens of the prompt or of the messages."""
        if request.prompt is not None:
            return await self.encode(request.prompt, add_special_tokens=True)
        if request.messages:
            text = self.apply_chat_template(
                request.messages, request.tools, request.chat_template_options
            )
            # the template adds the special tokens
            return await self.encode(text, add_special_tokens=False)
        raise InputError("the request has neither a prompt nor messages", "Give one of them.")

    def _reasoning(
        self, params: SamplingParams, tokens: Tokens | list[int]
    ) -> ReasoningBudget | None:
        """How the answer reasons, if its reasoning has a temperature of its own, and the chat template marks it."""
        temperature = params.thinking_temperature
        begin, end = "<think>", "</think>"
        templates = self._chat_templates or getattr(self.delegate, "chat_template", None)
        if temperature is None or begin not in str(templates):
            return None
        opening = self._ids(begin, add_special_tokens=False)
        # the prompt may end with the mark, and space after it
        last = self.decode_now(tokens[-(len(opening) + _AFTER_MARK) :])
        closing = tuple(self._ids(end, add_special_tokens=False))
        return ReasoningBudget(
            UNLIMITED, begin, end, last.rstrip().endswith(begin), len(opening), closing, temperature
        )

    def _context_arguments(
        self, request: TextGenerationRequest, tokens: Tokens | list[int]
    ) -> dict[str, Any]:
        """The arguments of the context of a request; raises InputError for invalid ones."""
        params = request.sampling_params
        stops = [request.stop] if isinstance(request.stop, str) else list(request.stop or [])
        stops += params.stop or []
        for token in params.stop_token_ids or ():
            if token >= len(self.delegate):
                raise InputError(
                    f"stop_token_ids has {token}; the model's tokens are 0 to "
                    f"{len(self.delegate) - 1}",
                    "Give numbers of the model's tokens.",
                    "stop_token_ids",
                )
        room = max_tokens_to_generate(len(tokens), self.max_length, params.max_new_tokens)
        response = request.response_format
        schema = None
        if response is not None and response.get("type") in ("json_schema", "json_object"):
            schema = json.dumps(response.get("json_schema") or {"type": "object"})
            grammars.of_json_schema(schema)  # a bad schema is an error now, and not in a batch
        return {
            "request_id": request.request_id,
            "tokens": tokens,
            # without room, the context raises the error that names the bound
            "max_length": len(tokens) + (room or 0),
            "eos_token_ids": set(self._eos_token_ids),
            "eos_sequences": [
                *([token] for token in params.stop_token_ids or []),
                *(self._ids(stop, add_special_tokens=False) for stop in stops),
            ],
            "log_probabilities": request.logprobs,
            "log_probabilities_echo": request.echo,
            "ignore_eos": params.ignore_eos,
            "json_schema": schema,
            "sampling_params": params,
            "reasoning_budget": None if schema else self._reasoning(params, tokens),
            "model_name": request.model_name,
            "target_endpoint": request.target_endpoint,
        }
