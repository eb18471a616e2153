"""Answers that are lists of messages: reasoning, text and calls are told apart as the chat template writes them."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from max.interfaces import SamplingParams
from max.serve.chat.channel_parser import ChannelParser
from max.serve.chat.prompt import Conversation, answer_opening
from max.serve.chat.tools.channels import Channels
from max.serve.chat.tools.definitions import ChoiceKind, ToolChoice
from max.serve.chat.tools.grammars import answer_grammar
from max.serve.chat.tools.layouts.derive import call_text
from max.serve.chat.tools.layouts.layout import NAME
from max.serve.chat.tools.layouts.recognition import TemplateTools
from max.serve.chat.tools.parser import parser_of
from max.serve.requests.parts import ArgumentsPart, ContentPart, ReasoningPart, ToolCallPart
from tests.serve.test_template_formats import (
    NAMES,
    TOOLS,
    arguments,
    found_of,
    pieces_of,
    renderer,
    schemas,
)
from tests.serve.test_tool_formats import accepts, tokenizer_with

_INVOKE = (
    '<calls>\n<invoke name="{{ f.name }}">\n{% for k, v in f.arguments | items %}<parameter name="{{ k }}">'
    "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n</calls>"
)
_JSON = "<|call|>{{ f.name }}<|args|>{{ f.arguments | tojson }}<|call_end|>"
_LOOP = "{% for call in m.tool_calls or [] %}{% set f = call.function %}"
_HEAD = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role != 'assistant' %}"
STYLES = {
    "recipients": _HEAD + "<|start|>{{ m.role }}<|message|>{{ m.content }}<|eot|>{% else %}"
        "{% if m.reasoning_content %}<|start|>assistant to=self<|message|>{{ m.reasoning_content }}<|eom|>{% endif %}"
        "{% if m.content %}<|start|>assistant to=user<|message|>{{ m.content }}"
        "{{ '<|eom|>' if m.tool_calls else '<|eot|>' }}{% endif %}"
        + _LOOP + "<|start|>assistant to={{ f.name }}<|message|>" + _INVOKE
        + "{{ '<|eot|>' if loop.last else '<|eom|>' }}{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    "kinds": _HEAD + "<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{% else %}"
        "{% if m.reasoning_content %}<|begin|>assistant<|think|>{{ m.reasoning_content }}<|end|>{% endif %}"
        "{% if m.content %}<|begin|>assistant<|content|>{{ m.content }}<|end|>{% endif %}"
        "{% if m.tool_calls %}<|begin|>assistant<|tools|>" + _LOOP + _JSON + "{% endfor %}<|done|>{% endif %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|begin|>assistant{% endif %}",
    "elements": _HEAD + "<|open|>{{ m.role }}<|sep|>{{ m.content }}<|close|>{{ m.role }}<|sep|>{% else %}"
        "<|open|>assistant<|sep|><|open|>think<|sep|>{{ m.reasoning_content or '' }}<|close|>think<|sep|>"
        "<|open|>response<|sep|>{{ m.content }}<|close|>response<|sep|>"
        "{% if m.tool_calls %}<|open|>tools<|sep|>" + _LOOP + _JSON + "{% endfor %}<|close|>tools<|sep|>{% endif %}"
        "<|close|>assistant<|sep|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|open|>assistant<|sep|><|open|>think<|sep|>{% endif %}",
    "announced": _HEAD + "<|{{ m.role }}|>\n{{ m.content }}\n{% else %}<|assistant|>\n"
        "{% if m.reasoning_content %}{{ m.reasoning_content }}\n[FINAL ANSWER]\n{% endif %}{{ m.content }}"
        + _LOOP + _JSON + "{% endfor %}<|end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\nHere are my steps:\n{% endif %}",
}  # fmt: skip
MARKS = {
    "recipients": (" to=self<|message|>", "<|eom|>", "<|start|>assistant", " to=user<|message|>", ""),
    "kinds": ("<|think|>", "<|end|>", "<|begin|>assistant", "<|content|>", ""),
    "elements": ("<|open|>think<|sep|>", "<|close|>think<|sep|>", "", "<|open|>response<|sep|>",
                 "<|close|>response<|sep|>"),
    "announced": ("Here are my steps:", "[FINAL ANSWER]", "", "", ""),
}  # fmt: skip
BEGUN = ("elements", "announced")
TOKENS = ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>", "<|think|>", "<|end|>", "<|begin|>", "<|content|>",
          "<|open|>", "<|close|>", "<|sep|>", "<|tools|>", "<|call|>"]  # fmt: skip
THOUGHTS = ["", "Hm < 3, so.\n\nYes <|", "one\ntwo <b>", "to=user, maybe"]


def answer_of(
    style: str, reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> str:
    """What the template writes for an answer, from the end of the prompt on."""
    render = renderer(STYLES[style])
    question = {"role": "user", "content": "Q"}
    message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [
        {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": values}}
        for at, (name, values) in enumerate(calls)
    ], "reasoning_content": reasoning}  # fmt: skip
    prompt = render([question], schemas(NAMES), True)
    text = render([question, message], schemas(NAMES), False)
    if style == "announced" and not text.startswith(prompt):
        prompt = prompt.removesuffix("Here are my steps:\n")
    assert text.startswith(prompt)
    text = text[len(prompt) :]
    for end in (
        "<|eot|>",
        "<|close|>assistant<|sep|>",
        "<|end|>\n",
    ):  # of the turn, no part of the answer
        text = text.removesuffix(end)
    return text


def parse(
    tools: TemplateTools, pieces: list[str], begun: bool, cut: bool = False
) -> tuple[str, str, list[list[str]]]:
    assert tools.use.channels is not None
    parser = ChannelParser(parser_of(tools.format, TOOLS), begun, tools.use.channels)
    parts = [part for piece in pieces for part in parser.push(piece)]
    thought, content, calls = "", "", list[list[str]]()
    for part in [*parts, *parser.finish(cut)]:
        match part:
            case ReasoningPart(text):
                thought += text
            case ContentPart(text):
                content += text
            case ToolCallPart(_, _, name):
                calls.append([name, ""])
            case ArgumentsPart(_, text):
                calls[-1][1] += text
    return thought, content, calls


@pytest.mark.parametrize("style", STYLES)
def test_messages_of_an_answer_are_told_apart(style: str) -> None:
    tools = found_of(STYLES[style])
    channels = tools.use.channels
    assert channels is not None and tools.format.name == "template"
    assert (
        channels.begin,
        channels.end,
        channels.header,
        channels.answer,
        channels.answer_end,
    ) == MARKS[style]
    assert tools.reasoning == (channels.begin, channels.end)
    numbers = random.Random(style)
    for round_number in range(12):
        reasoning = numbers.choice(THOUGHTS[1:] if style in BEGUN else THOUGHTS)
        content = numbers.choice(["Yes, [x] {y} 1 < 2.", "to=nobody\n\nis text"])
        calls = [(numbers.choice(NAMES), arguments(numbers, True)) for _ in range(round_number % 3)]
        if calls and style == "kinds":
            content = ""
        answer = answer_of(style, reasoning, content, calls)
        expected = (reasoning.rstrip(), content, calls)
        for pieces in ([answer], list(answer), *(pieces_of(numbers, answer) for _ in range(3))):
            thought, said, found = parse(tools, pieces, style in BEGUN)
            made = [(name, json.loads(text)) for name, text in found]
            assert (thought, said.strip(), made) == expected, answer
        # no mark reaches the reasoning or the content of an answer that is cut off
        place = numbers.randint(0, len(answer))
        thought, said, _ = parse(
            tools, pieces_of(numbers, answer[:place]), style in BEGUN, cut=True
        )
        assert reasoning.startswith(thought[:-2]) and content.startswith(said.strip()[:-2]), answer[
            :place
        ]


@pytest.mark.parametrize("style", STYLES)
def test_grammars_hold_the_messages_of_an_answer(style: str) -> None:
    tools = found_of(STYLES[style])
    channels = tools.use.channels
    assert channels is not None
    for marks in ((), tuple(TOKENS)):
        special = tokenizer_with(marks)[1]
        text_marks = [mark for mark in marks if mark in channels.marks]
        must = answer_grammar(TOOLS, ToolChoice(ChoiceKind.REQUIRED), tools.format, special).text
        free = answer_grammar(TOOLS, ToolChoice(), tools.format, special, None, text_marks).text
        assert must is not None and free is not None
        calls = [("get_weather", {"city": "Oslo", "days": 3}), ("alarm.set-2", {"city": "x"})]
        for count in (1, 2):
            if channels.call:
                whole = answer_of(style, "", "", calls[:count])
            else:
                rendered = call_text(
                    renderer(STYLES[style]), tools.use, calls[:count], "", schemas(NAMES)
                )
                assert rendered is not None
                whole = rendered[0].strip()
            assert accepts(must, whole, marks), whole
            assert not accepts(must, whole.replace("get_weather", "get_other"), marks)
            if channels.call:  # the head names the tool that is called
                other = whole.replace("to=get_weather", "to=alarm.set-2")
                assert not accepts(must, other, marks)
        thinking = answer_of(style, "Hm < 3.", "", calls[:1])
        assert accepts(free, thinking, marks), thinking
        said = answer_of(style, "Hm < 3.", "Yes.", [])
        assert accepts(free, said, marks), said


@pytest.mark.parametrize("style", STYLES)
def test_a_prompt_ends_where_the_grammar_of_an_answer_begins(style: str) -> None:
    """A grammar describes the text for the user or calls, so the prompt has what stands before these."""
    tools = found_of(STYLES[style])
    channels, begun = tools.use.channels, style in BEGUN
    model: Any = SimpleNamespace(channels=channels, reasoning_marks=tools.reasoning)

    def opening(grammar: str | None, kind: ChoiceKind) -> str:
        conversation = Conversation(
            "id", [], SamplingParams(), TOOLS, ToolChoice(kind), grammar=grammar
        )
        return answer_opening(model, conversation, begun)

    assert channels is not None
    assert opening(None, ChoiceKind.AUTO) == ""
    closed = channels.turn if begun else ""
    assert opening("start: /x/", ChoiceKind.NONE) == closed + channels.answer
    assert opening(None, ChoiceKind.REQUIRED) == (
        closed + channels.answer if not channels.call else ""
    )
    model.channels, model.reasoning_marks = None, ("<think>", "</think>")
    assert opening("start: /x/", ChoiceKind.NONE) == ("\n</think>\n\n" if begun else "")


class _Plain:
    """Takes texts as they are."""

    def push(self, text: str) -> list[ContentPart]:
        return [ContentPart(text)]

    def finish(self, cut: bool = False) -> list[ContentPart]:
        return []


def _split(
    channels: Channels, pieces: list[str], begun: bool = False, cut: bool = False
) -> tuple[str, str]:
    """The reasoning and the content of an answer in pieces."""
    parser = ChannelParser(_Plain(), begun, channels)
    parts = [part for piece in pieces for part in parser.push(piece)] + [*parser.finish(cut)]
    thought = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    return thought, "".join(part.text for part in parts if isinstance(part, ContentPart))


_CALLED = Channels(" to=self<m>", "<e>", "<s>assistant", " to=user<m>", call=f" to={NAME}<m>")
_BARE = Channels("<think>", "</think>")


@pytest.mark.parametrize(
    ("channels", "pieces", "begun", "cut", "thought", "said"),
    [
        # space at the begin of each message is dropped, also where it comes alone, and stays within it
        (_CALLED, [" to=user<m>", " ", " \n", "a", "\n", " b"], False, False, "", "a\n b"),
        (_CALLED, [" to=self<m>", " ", "a ", " b ", "<e><s>assistant to=user<m> ", " c"], False, False, "a  b", "c"),
        (_CALLED, [" to=run<m> ", " {}"], False, False, "", "{}"),
        (_BARE, [" \n", "a b"], False, False, "", "a b"),
        (_BARE, ["  ", "a </think>", "  b"], True, False, "a", "b"),
        # the first part of a mark of three characters is no text of an answer that was cut off
        (_BARE, ["a</t"], True, True, "a", ""),
        (_BARE, ["a</"], True, True, "a</", ""),
        (_BARE, ["a</t"], True, False, "a</t", ""),
        (_BARE, ["a<"], True, True, "a<", ""),
        (_BARE, ["a</th"], False, True, "", "a"),
        (_BARE, ["ab"], False, True, "", "ab"),
        # so is that of a mark that begins a message; two characters are text
        (_BARE, ["<thi"], False, False, "", ""),
        (_BARE, ["<t"], False, False, "", "<t"),
        (_BARE, ["<th"], False, False, "", ""),
        (_BARE, ["<x"], False, False, "", "<x"),
        # a name may come in pieces, and a text may begin like it
        (_CALLED, [" t", "o=r", "un", "<", "m", ">{}"], False, False, "", "{}"),
        (_CALLED, [" to=run<x> a"], False, False, "", " to=run<x> a"[1:]),
        (_CALLED, [" to", " a"], False, False, "", "to a"),
        (_CALLED, [" to=a b"], False, False, "", "to=a b"),
        # what stands between messages, whole, in pieces, or absent
        (_CALLED, [" to=self<m>a<e><s>assi", "stant", " to=user<m>b"], False, False, "a", "b"),
        (_CALLED, [" to=self<m>a<e>", " to=user<m>b"], False, False, "a", "b"),
        (_CALLED, [" to=self<m>a<e><s>ass"], False, True, "a", ""),
    ],
)  # fmt: skip
def test_pieces_and_ends_of_messages(
    channels: Channels, pieces: list[str], begun: bool, cut: bool, thought: str, said: str
) -> None:
    assert _split(channels, pieces, begun, cut) == (thought, said)
    if not cut:
        assert _split(channels, list("".join(pieces)), begun) == (thought, said)
