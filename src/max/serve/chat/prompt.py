"""Turns a conversation into a request for the engine: template, tools, grammar, parser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from max._dataclass import replace_fields
from max._lazy import lazy_module
from max.interfaces import RequestID, SamplingParams, TextGenerationRequest
from max.pipelines.core.reasoning import UNLIMITED, ReasoningBudget
from max.pipelines.core.text import utf8_size
from max.serve.chat.channel_parser import ChannelParser
from max.serve.chat.conversation_text import conversation_text
from max.serve.chat.reasoning import ReasoningParser
from max.serve.chat.reasoning_marks import THINK
from max.serve.chat.replies import check_replies
from max.serve.chat.tools import harmony
from max.serve.chat.tools.definitions import ChoiceKind, Tool, ToolChoice, check_tools
from max.serve.chat.tools.harmony import HarmonyParser
from max.serve.chat.tools.parser import parser_of
from max.serve.chat.tools.schemas import tool_grammar
from max.serve.errors import CONTEXT_LENGTH_EXCEEDED, ApiError
from max.serve.limits import MAX_SEQUENCE_TOKENS
from max.serve.models.model import ServedModel
from max.serve.requests.generation import ChatJob, PlainParser, TextSequence, choices_of
from max.serve.requests.parts import AnswerParser
from max.serve.requests.request_context import current_request
from max.serve.requests.steps import next_step
from max.serve.requests.threads import by_size, in_grammar_thread

if TYPE_CHECKING:
    from max.serve.chat import prediction
else:
    prediction = lazy_module("max.serve.chat.prediction")


@dataclass(frozen=True)
class Conversation:
    """A conversation to answer, of any API.

    Args:
        request_id: Identifies the request.
        messages: The messages, with OpenAI's fields.
        sampling: How tokens are chosen.
        tools: The tools that may be called.
        tool_choice: Whether they are called.
        grammar: The grammar of an answer without calls.
        stops: Texts that end an answer.
        include_stop: Whether the stop text is part of it.
        count: The number of answers.
        log_probabilities: The number of likeliest tokens; 0: no log-probabilities.
        prompt_logs: Whether the prompt has log-probabilities too.
        template_options: More variables of the chat template.
        reasoning_tokens: The maximum number of tokens of reasoning; None: no limit.
        thinking_temperature: The temperature of tokens of reasoning; None: the server's default.
        continues: Whether the answer goes on with the last message, which is the assistant's.
        kept_tokens: The number of the prompt's last tokens that are kept; None: all.
        with_tokens: Whether the tokens of answers are wanted.
        prediction: The text that the answer may have; empty: nothing is known of it.
        field: The field of the request with the messages.
    """

    request_id: str
    messages: Sequence[dict[str, Any]]
    sampling: SamplingParams
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    grammar: str | None = None
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    count: int = 1
    log_probabilities: int = 0
    prompt_logs: bool = False
    template_options: dict[str, Any] = field(default_factory=dict)
    reasoning_tokens: int | None = None
    thinking_temperature: float | None = None
    continues: bool = False
    kept_tokens: int | None = None
    with_tokens: bool = False
    prediction: str = ""
    field: str = "messages"


async def prepare(model: ServedModel, conversation: Conversation) -> ChatJob:
    """Makes a conversation ready to run.

    Args:
        model: The model.
        conversation: The conversation.

    Raises:
        ApiError: It does not fit the model.
    """
    # of a created model: a Modelfile's system text, messages and stop texts
    recipe = model.recipe
    if recipe.system or recipe.messages or recipe.stops:
        conversation = replace_fields(
            conversation,
            messages=recipe.before(conversation.messages),
            stops=conversation.stops or recipe.stops,
        )
    # checks that cost little come before the grammar, which may take seconds
    check_tools(conversation.tools, conversation.tool_choice)
    check_replies(conversation.messages, conversation.field)
    may_call = bool(conversation.tools) and conversation.tool_choice.kind is not ChoiceKind.NONE
    tools = conversation.tools if may_call else ()
    # with `--tool-parser none` the template still shows the tools
    parsed_tools = tools if model.parses_tools else ()
    grammar = await _answer_grammar(model, conversation, parsed_tools)
    if grammar is not None and (
        conversation.sampling.ignore_eos or conversation.sampling.min_new_tokens
    ):
        raise ApiError(
            "ignore_eos and min_tokens do not fit an answer with a grammar, which says where it ends",
            param="ignore_eos" if conversation.sampling.ignore_eos else "min_tokens",
        )
    # a message takes at least one token: too many are refused before they are formatted
    if 0 < model.max_length < len(conversation.messages):
        raise ApiError(
            f"messages has {len(conversation.messages)} entries, and the context holds "
            f"{model.max_length} tokens; give fewer",
            param="messages",
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    _note_unread(model, conversation.template_options)
    await next_step()
    text = await conversation_text(
        model,
        conversation.messages,
        tools,
        conversation.template_options,
        conversation.continues,
    )
    # the template begins the reasoning itself
    thinks = model.reasons and text.rstrip().endswith(model.reasoning_marks[0])
    if not conversation.continues:
        text += answer_opening(model, conversation, thinks)
    await next_step()
    tokens = await _prompt(model, text, conversation.kept_tokens)
    request = await model.engine_request(
        TextGenerationRequest(
            request_id=RequestID(conversation.request_id),
            model_name=model.name,
            prompt=tokens,
            logprobs=conversation.log_probabilities,
            echo=conversation.prompt_logs,
            stop=list(conversation.stops),
            sampling_params=conversation.sampling,
        ),
        param="messages",
    )
    # after the request is made, as both fields are the engine's only
    budget = reasoning_budget(model, conversation, thinks, bool(parsed_tools))
    if (grammar, budget) != (request.grammar, request.reasoning_budget):
        request = replace_fields(request, grammar=grammar, reasoning_budget=budget)
    if conversation.prediction:
        # each sequence is sent with it, and an answer has no more tokens
        most = min(request.max_length - len(tokens), MAX_SEQUENCE_TOKENS // conversation.count)
        predicted = await prediction.predicted_tokens(model, text, conversation.prediction, most)
        request = replace_fields(request, predicted_tokens=predicted)
    sequence = TextSequence(
        request,
        conversation.stops,
        conversation.include_stop,
        _visible_tokens(model, conversation, parsed_tools),
        conversation.with_tokens,
    )

    custom = frozenset(tool.name for tool in tools if tool.custom)
    new_parser = partial(_new_parser, model, conversation, parsed_tools, thinks)
    return ChatJob(model, tuple(choices_of(sequence, conversation.count)), new_parser, custom)


def _note_unread(model: ServedModel, options: dict[str, Any]) -> None:
    """Notes hints on reasoning that the chat template does not read, for a header of the response."""
    template, unread = model.template, current_request().unread
    thinks = options.get("enable_thinking")
    switches = "enable_thinking" in template or "thinking" in template
    # a model that does not mark reasoning need not be told to leave it out
    if not switches and (thinks is True or (thinks is False and model.marks_reasoning)):
        unread.append("thinking")
    effort = options.get("reasoning_effort")
    if effort not in (None, "none") and "reasoning_effort" not in template:
        unread.append("reasoning_effort")


async def _answer_grammar(
    model: ServedModel, conversation: Conversation, parsed_tools: tuple[Tool, ...]
) -> str | None:
    """The grammar of an answer that may call the parsed tools; notes what of their schemas it does not hold."""
    if not parsed_tools:
        return conversation.grammar
    found = await in_grammar_thread(
        tool_grammar,
        parsed_tools,
        conversation.tool_choice,
        model.tool_format,
        model.special_token_ids,
        conversation.grammar,
        model.text_marks,
    )
    current_request().hints += found.hints
    if found.hints:
        current_request().schemas.update({tool.name: tool.parameters for tool in parsed_tools})
    return found.grammar


def _visible_tokens(
    model: ServedModel, conversation: Conversation, parsed_tools: tuple[Tool, ...]
) -> frozenset[int]:
    """The special tokens that stay in the text of an answer, as the parsers look for them."""
    # in harmony all answers have marks
    marked = bool(parsed_tools) or model.tool_format.syntax == "harmony"
    marks = tuple(model.tool_format.visible(model.special_token_ids)) if marked else ()
    if (model.reasons and may_reason(conversation)) or model.channels is not None:
        marks = (*marks, *model.text_marks)
    return frozenset(model.special_token_ids[m] for m in marks if m in model.special_token_ids)


def _new_parser(
    model: ServedModel, conversation: Conversation, parsed_tools: tuple[Tool, ...], thinks: bool
) -> AnswerParser:
    """The parser of one answer; `thinks`: the prompt ends in the mark that begins reasoning."""
    tool_format, channels = model.tool_format, model.channels
    # an answer with a grammar of the request may begin without a channel or a recipient
    if conversation.grammar is None and tool_format.syntax == "harmony":
        return HarmonyParser()
    if conversation.grammar is None and tool_format.syntax == "functionary":
        return parser_of(tool_format, parsed_tools)
    # reasoning and channels wrap the parser of calls: calls stand in the text after them
    parser: AnswerParser = parser_of(tool_format, parsed_tools) if parsed_tools else PlainParser()
    parses_reasoning = model.reasons and may_reason(conversation)
    if conversation.grammar is None and channels is not None:
        return ChannelParser(parser, thinks and parses_reasoning, channels)
    return ReasoningParser(parser, thinks, model.reasoning_marks) if parses_reasoning else parser


def answer_opening(model: ServedModel, conversation: Conversation, thinks: bool) -> str:
    """What the prompt lacks of the begin of an answer that a grammar describes: the end of reasoning, a header.

    Args:
        model: The model.
        conversation: The conversation.
        thinks: Whether the prompt ends in the mark that begins reasoning.
    """
    if may_reason(conversation):
        return ""
    channels = model.channels
    if channels is None:
        return f"\n{model.reasoning_marks[1]}\n\n" if thinks else ""
    # the template has begun reasoning, which a grammar does not have
    closed = channels.turn if thinks else ""
    # the grammar of calls that must come has its own header
    return closed + (
        channels.answer if conversation.grammar is not None or not channels.call else ""
    )


async def _prompt(model: ServedModel, text: str, kept_tokens: int | None) -> list[int]:
    """The tokens of a prompt, or the last of them."""
    if kept_tokens is None:
        return await model.encode_template(text)
    model.check_text(utf8_size(text), "messages")
    tokens = await by_size(model.all_tokens, text, special=False)
    return tokens[-kept_tokens:]


def reasoning_budget(
    model: ServedModel, conversation: Conversation, begun: bool, may_call: bool
) -> ReasoningBudget | None:
    """The limit on the reasoning of an answer; None: no limit.

    Args:
        model: The model.
        conversation: The conversation.
        begun: Whether the prompt ends in the mark that begins reasoning.
        may_call: Whether the answer may call a tool.

    Raises:
        ApiError: There is a limit, and the model's chat template has no marks of reasoning.
    """
    limit, temperature = conversation.reasoning_tokens, conversation.thinking_temperature
    if temperature is None:
        temperature = model.answers.thinking_temperature
    if limit is None and (temperature is None or not model.marks_reasoning):
        return None
    if model.tool_format.syntax == "harmony":
        if conversation.grammar is not None:
            return None
        # the model chooses the channel of a call
        begin, end, closing = harmony.REASONING, harmony.END, harmony.END + harmony.NEXT
        closing += "" if may_call else harmony.ANSWER
    elif model.reasons:
        if not may_reason(conversation):
            return None
        begin, end = model.reasoning_marks
        closing = end
        if model.channels is not None:
            closing = model.channels.turn + ("" if may_call else model.channels.answer)
    else:
        raise ApiError(
            f"{model.name} does not mark its reasoning: its chat template has no {THINK[0]}, so there is "
            "nothing to limit; leave the budget out, or limit the answer with max_tokens",
            param="thinking_token_budget",
            code="unsupported_parameter",
        )

    def tokens(text: str) -> list[int]:
        return model.all_tokens(text, special=False)

    # without a limit, but with a temperature of its own: the engine follows the marks for it
    most = UNLIMITED if limit is None else limit
    ends = tuple(tokens(closing))
    return ReasoningBudget(most, begin, end, begun, len(tokens(begin)), ends, temperature)


def may_reason(conversation: Conversation) -> bool:
    """Whether an answer may begin with reasoning: no grammar says how it begins."""
    must_call = conversation.tool_choice.kind in (ChoiceKind.REQUIRED, ChoiceKind.NAMED)
    return conversation.grammar is None and not (must_call and conversation.tools)
