"""A model that is served: its tokenizer, its limits, its engine."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from max._dataclass import replace_fields
from max._lazy import lazy_module
from max.interfaces import SamplingParams, SamplingParamsInput, TextGenerationRequest
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import PromptTooLongError
from max.pipelines.core.text import utf8, utf8_size
from max.pipelines.generation.process.commands import GenerationRequest
from max.pipelines.gguf.tokenizer import INFILL_TOKENS
from max.pipelines.store.created import Recipe, sampling_of
from max.pipelines.store.creation import ADAPTER_NAME
from max.pipelines.tokenization.hf_tokenizer import HFTokenizer
from max.pipelines.tokenization.tokenizer import TextTokenizer
from max.serve.chat.reasoning_marks import THINK
from max.serve.chat.tools.channels import Channels
from max.serve.chat.tools.formats import ALIASES, FORMATS, ToolFormat
from max.serve.chat.tools.layouts.layout import special_in
from max.serve.chat.tools.layouts.probe import TemplateUse
from max.serve.chat.tools.layouts.recognition import TemplateTools, tools_of_template
from max.serve.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, of_user_error
from max.serve.limits import MAX_TEXT
from max.serve.models.admission import Admission
from max.serve.models.vocabulary import Vocabulary
from max.serve.process.settings import AnswerSettings
from max.serve.requests.infill import Infill
from max.serve.requests.request_context import current_request
from max.serve.requests.steps import next_step
from max.serve.worker.client import EngineClient

if TYPE_CHECKING:
    from max.pipelines.registry import registry
else:
    # it loads the model's classes
    registry = lazy_module("max.pipelines.registry.registry")

logger = logging.getLogger("max.serve")

_MOST_SAMPLINGS = 256
"""The sets of sampling parameters that are kept."""
_sampling_values = attrgetter(
    "top_k", "top_p", "min_p", "temperature", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "max_new_tokens", "min_new_tokens", "ignore_eos",
)  # fmt: skip


class ServedModel:
    """A model with a running engine.

    Args:
        name: The name by which clients ask for it.
        config: Its configuration, resolved.
        engine: The client of its engine.
        admission: Its queue.
        tool_parser: The name of the format of its tool calls; None: found by architecture and template; ``none``: they
            stay text.
        answers: What answers are where requests do not say; None: nothing is set.
    """

    def __init__(
        self,
        name: str,
        config: PipelineConfig,
        engine: EngineClient,
        admission: Admission,
        tool_parser: str | None = None,
        answers: AnswerSettings | None = None,
    ) -> None:
        tokenizer = registry.PIPELINE_REGISTRY.retrieve_tokenizer(config)
        if not isinstance(tokenizer, TextTokenizer):
            raise TypeError(f"{name}: {type(tokenizer).__name__} is no TextTokenizer")
        self.name, self.config, self.engine, self.admission = name, config, engine, admission
        self.tokenizer, self.tool_parser = tokenizer, tool_parser
        self.answers = answers or AnswerSettings()
        self.created = int(time.time())
        # its files may be deleted while it is loaded, so what later requests need is read now
        self.size = config.model_config.weights_size()
        """The bytes of its weights."""
        _ = self.template, config.model_config.sampling_params_defaults
        lora = config.lora_config
        self.adapters = {} if lora is None else {n: str(p) for n, p in lora.paths.items()}
        """The paths of the adapters that are loaded, by name."""
        self.recipe = Recipe()
        """What it was created with; empty: it has only its files."""
        self._sampling: dict[tuple[Any, ...], SamplingParams] = {}
        self.encodes = False
        """Whether it makes vectors and scores of texts; else it generates text."""

    def set_recipe(self, recipe: Recipe) -> None:
        """Sets what a created model adds to its requests.

        Args:
            recipe: The recipe of the model.
        """
        self.recipe = recipe
        # requests use it without naming it
        self.adapters.pop(ADAPTER_NAME, None)

    def warm_up(self) -> None:
        """Computes what requests need of the tokenizer, so that the first one does not hold up the event loop.

        Call it in a thread: for a large vocabulary it takes hundreds of milliseconds.
        """

        def conversation() -> str:
            return self.apply_template([{"role": "user", "content": ""}], None, {})

        def long_text() -> int:
            return self.count_tokens("a " * 4096, special=True)

        def cached_properties() -> object:
            return (
                self.tool_format, self.reasons, self.vocabulary_size, self.special_tokens, self.special_token_ids,
                self.vocabulary, self.infill,
            )  # fmt: skip

        def fewest() -> object:
            # the longest token of the vocabulary, which the first long text looks for
            delegate = self.tokenizer.delegate
            return isinstance(delegate, HFTokenizer) and delegate.fewest_tokens("a " * 4096)

        for compute in (conversation, long_text, cached_properties, fewest):
            # a request that needs it raises the error again
            with contextlib.suppress(Exception):
                compute()

    @property
    def max_length(self) -> int:
        """The longest sequence, prompt included."""
        return self.config.max_length or 0

    @cached_property
    def vocabulary_size(self) -> int:
        """The number of tokens."""
        return len(self.tokenizer.delegate)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of its tokens."""
        return Vocabulary(self.tokenizer.delegate)

    @cached_property
    def special_tokens(self) -> frozenset[int]:
        """The special tokens, which have no text."""
        return frozenset(self.tokenizer.delegate.all_special_ids)

    @cached_property
    def special_token_ids(self) -> dict[str, int]:
        """The special tokens by their texts."""
        added = self.tokenizer.delegate.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @cached_property
    def infill(self) -> Infill | None:
        """How it fills in the middle of a text; None where it does not."""
        delegate = self.tokenizer.delegate
        vocabulary = (
            delegate.vocabulary()
            if isinstance(delegate, HFTokenizer)
            else delegate.backend_tokenizer.get_vocab(with_added_tokens=True)
        )
        # transformers' tokenizers have none
        config = getattr(self.tokenizer.delegate, "config", {})
        return Infill.of(vocabulary, self.all_tokens, config.get(INFILL_TOKENS) or {})

    @cached_property
    def template(self) -> str:
        """The text of the chat template; empty where the model has none."""
        own = self.config.retrieve_chat_template()
        return own or getattr(self.tokenizer.delegate, "chat_template", None) or ""

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How it calls tools: by the server's option, else by its architecture, else by its template."""
        if self.tool_parser not in (None, "none"):
            return FORMATS[ALIASES.get(self.tool_parser, self.tool_parser)]
        # architectures of programs that use this package may name one, or choose by the model's files
        declared = registry.PIPELINE_REGISTRY.architecture_of(self.config).tool_parser
        if callable(declared):
            declared = declared(self.config.model_config.huggingface_model_repo)
        if declared is not None and (own := FORMATS.get(ALIASES.get(declared, declared))):
            return own
        if declared is not None:
            logger.warning(
                "the architecture names the tool parser %s, which is none of %s; the chat template says how tools are "
                "called",
                declared,
                ", ".join(sorted({*FORMATS, *ALIASES})),
            )
        return self._template_tools.format

    @cached_property
    def template_use(self) -> TemplateUse:
        """The form in which its chat template takes tools and calls."""
        return self._template_tools.use

    @cached_property
    def _template_tools(self) -> TemplateTools:
        def render(messages: list[Any], tools: list[Any] | None, begins: bool) -> str:
            options = {"add_generation_prompt": begins}
            return self.tokenizer.apply_chat_template(messages, tools, options)

        eos, special = self.tokenizer.eos_token_ids, self.special_token_ids
        # what ends an answer is no part of the format of calls
        ends = [text for text, number in special.items() if number in eos]
        return tools_of_template(render, self.template, ends)

    @property
    def parses_tools(self) -> bool:
        """Whether calls of tools are separated from the text."""
        return self.tool_parser != "none"

    @cached_property
    def reasons(self) -> bool:
        """Whether its answers may begin with reasoning, which is separated from them."""
        if self.answers.reasoning_parser == "none" or self.tool_format.syntax == "harmony":
            return False
        return self._template_tools.reasoning is not None

    @property
    def reasoning_marks(self) -> tuple[str, str]:
        """The marks before and after its reasoning."""
        return self._template_tools.reasoning or THINK

    @property
    def channels(self) -> Channels | None:
        """The marks between the messages of its answers, where they are lists of messages."""
        if self.answers.reasoning_parser == "none" or self.tool_format.syntax == "harmony":
            return None
        return self._template_tools.use.channels

    @cached_property
    def text_marks(self) -> tuple[str, ...]:
        """The special tokens around reasoning and between the messages of an answer."""
        marks = self.channels.marks if self.channels is not None else ""
        if self.reasons:
            marks += "".join(self.reasoning_marks)
        return tuple(special_in(marks, self.special_token_ids))

    @property
    def marks_reasoning(self) -> bool:
        """Whether its reasoning can be separated from its answers."""
        return self.reasons or self.tool_format.syntax == "harmony"

    def apply_template(
        self,
        messages: list[Any],
        tools: list[Any] | None,
        options: dict[str, Any],
    ) -> str:
        """The text of a conversation.

        Args:
            messages: The messages, as templates expect them.
            tools: The tools, with OpenAI's fields.
            options: More variables of the template.

        Raises:
            ApiError: The model has no template, or the template refuses the conversation.
        """
        reserved = {"chat_template", "tokenize", "messages", "conversation", "tools"}
        if reserved_options := sorted(reserved & options.keys()):
            raise ApiError(
                f"chat_template_kwargs cannot set {reserved_options[0]}",
                param="chat_template_kwargs",
            )
        try:
            return self.tokenizer.apply_chat_template(messages, tools, options)
        except ValueError as error:
            raise of_user_error(error, "messages") from error

    def all_tokens(self, text: str, special: bool, most: int | None = None) -> list[int]:
        """The tokens of a text, however long it is.

        Args:
            text: The text.
            special: Whether begin and end tokens are added.
            most: The maximum number of tokens; None: no limit.

        Raises:
            InputError: It is not UTF-8, or has more tokens.
        """
        delegate = self.tokenizer.delegate
        if isinstance(delegate, HFTokenizer):
            return delegate.encode(utf8(text), special, most)
        tokens = delegate.encode(utf8(text), add_special_tokens=special)
        if most is not None and len(tokens) > most:
            raise PromptTooLongError(len(tokens), most)
        return tokens

    def tokens_of_texts(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        """The tokens of each of several texts, as :meth:`all_tokens`.

        Args:
            texts: The texts.
            special: Whether begin and end tokens are added.

        Raises:
            InputError: One of them is not UTF-8.
        """
        delegate = self.tokenizer.delegate
        if isinstance(delegate, HFTokenizer):
            return delegate.encode_all([utf8(text) for text in texts], special)
        return [self.all_tokens(text, special) for text in texts]

    def count_tokens(self, text: str, special: bool) -> int:
        """The number of a text's tokens.

        Args:
            text: The text.
            special: Whether begin and end tokens are added.

        Raises:
            InputError: It is not UTF-8.
        """
        delegate = self.tokenizer.delegate
        if isinstance(delegate, HFTokenizer):
            return delegate.count_tokens(utf8(text), special)
        return len(self.all_tokens(text, special))

    @property
    def most_text(self) -> int:
        """The most bytes of the texts of a request: eight for each token of the context, or more."""
        return max(MAX_TEXT, 8 * self.max_length)

    def check_text(self, size: int, param: str) -> None:
        """Refuses texts that are too long to be formatted and encoded, whatever their tokens are.

        Args:
            size: Their bytes in UTF-8.
            param: The parameter that has them.

        Raises:
            ApiError: They are too long.
        """
        if size > self.most_text:
            raise ApiError(
                f"{param} has {size} bytes of text; at most {self.most_text} are read for {self.name}",
                param=param,
                code=CONTEXT_LENGTH_EXCEEDED,
            )

    async def encode_template(self, text: str) -> list[int]:
        """The tokens of a text that a chat template has made.

        Args:
            text: The text; it has its special tokens.

        Raises:
            ApiError: It is longer than the context.
        """
        self.check_text(utf8_size(text), "messages")
        try:
            # with whom its pages in the caches are shared
            salt = current_request().prefix_salt
            return await self.tokenizer.encode_ids(text, special=False, salt=salt)
        except ValueError as error:
            raise of_user_error(error, "messages") from error

    def decoder(self, visible: frozenset[int] = frozenset()) -> Callable[[Sequence[int]], str]:
        """A function that decodes tokens without special tokens.

        Args:
            visible: Special tokens that it decodes too.
        """
        hidden = self.special_tokens - visible
        if not visible & self.special_tokens:
            return self.tokenizer.decoder(skip_special_tokens=True)
        decode = self.tokenizer.decoder()
        return lambda tokens: decode([token for token in tokens if token not in hidden])

    def sampling_params(self, fields: SamplingParamsInput) -> SamplingParams:
        """A client's sampling parameters, completed by the model's and by the defaults.

        Args:
            fields: What the client has set.

        Raises:
            ApiError: A value does not fit.
        """
        defaults = self.config.model_config.sampling_params_defaults
        fields = sampling_of(self.recipe, fields)
        # the client's fields come first, then the recipe's, then the server's options, then the model's defaults
        if fields.temperature is None and self.answers.temperature is not None:
            fields = replace(fields, temperature=self.answers.temperature)
        if fields.top_k is None and self.answers.top_k is not None:
            fields = replace(fields, top_k=self.answers.top_k)
        try:
            if fields.logit_bias or fields.stop_token_ids:
                return SamplingParams.from_input_and_generation_config(fields, defaults)
            # most requests have one of a few sets of values, besides their seeds
            values = _sampling_values(fields)
            if (known := self._sampling.get(values)) is None:
                # any seed: the drawn one or the client's takes its place below
                plain = replace(fields, seed=0)
                known = SamplingParams.from_input_and_generation_config(plain, defaults)
                if len(self._sampling) >= _MOST_SAMPLINGS:
                    self._sampling.clear()
                self._sampling[values] = known
            # by default as in `SamplingParams`
            seed = secrets.randbits(32) if fields.seed is None else fields.seed
            return replace_fields(known, seed=seed)
        except (ValueError, TypeError) as error:
            text = str(error).removeprefix("SamplingParams: ")
            raise ApiError(text, param=text.split(" ", 1)[0]) from error

    def _check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Refuses numbers that are not tokens: in the engine they would make a whole batch fail."""
        last = self.vocabulary_size - 1
        if not tokens or (min(tokens) >= 0 and max(tokens) <= last):
            return
        for index, token in enumerate(tokens):
            if not 0 <= token <= last:
                raise ApiError(
                    f"the prompt has the token {token} at index {index}; the model's tokens are 0 to {last}",
                    param=param,
                )

    async def engine_request(self, request: TextGenerationRequest, param: str) -> GenerationRequest:
        """A request with its prompt in tokens.

        Args:
            request: The request.
            param: The parameter that holds the prompt, for errors.

        Raises:
            ApiError: It does not fit the model.
        """
        if self.encodes:
            raise ApiError(
                f"{self.name} makes vectors and scores; ask for /v1/embeddings, /rerank or /score",
                param="model",
            )
        try:
            if isinstance(request.prompt, str):
                self.check_text(utf8_size(request.prompt), param)
            elif request.prompt is not None:
                # before its tokens are looked at, as it may have many
                if 0 < self.max_length < len(request.prompt):
                    raise PromptTooLongError(len(request.prompt), self.max_length)
                self._check_tokens(request.prompt, param)
            # the worker's log has the same identifiers as the server's
            name = request.request_id.value
            current = current_request()
            values: dict[str, Any] = {
                "request_id": f"{current.request_id}/{name}" if current.request_id else name,
                "priority": current.priority,
                "client": current.client,
                "cache_salt": current.prefix_salt,
                "adapter": current.adapter,
                "adapter_scale": current.adapter_scale,
            }
            # an architecture that checks contexts gets a whole one; others skip an object that nobody needs
            if self.tokenizer.validates_contexts:
                context = await self.tokenizer.new_context(request)
                return replace_fields(GenerationRequest.of(context), **values)
            arguments = await self.tokenizer.new_arguments(request)
            await next_step()
            return GenerationRequest.of_arguments(arguments, **values)
        except ValueError as error:
            raise of_user_error(error, param) from error
