"""Parsers of answers: tool calls and reasoning, for all ways to cut the text into pieces."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from max.interfaces import SamplingParams
from max.pipelines.structured import grammar
from max.serve.chat.prompt import Conversation, may_reason
from max.serve.chat.reasoning import ReasoningParser
from max.serve.chat.tools.definitions import ChoiceKind, Tool, ToolChoice
from max.serve.chat.tools.formats import (
    FORMATS,
    GENERIC,
    HERMES,
    LLAMA3,
    MISTRAL,
    format_of_template,
)
from max.serve.chat.tools.grammars import answer_grammar
from max.serve.chat.tools.parser import ToolParser
from max.serve.requests.generation import PlainParser
from max.serve.requests.parts import ArgumentsPart, ContentPart, ReasoningPart, ToolCallPart
from tests.serve.conftest import TINY

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 999) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.text(max_size=5), JSON, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(["get_weather", "f"]), ARGUMENTS), max_size=3)
TEXT = st.text(st.sampled_from("ab <>{}[]\n\"'"), max_size=12)


def parse(parser, text: str, data: st.DataObject):
    """Content, reasoning and calls of a text that is parsed in pieces."""
    content, reasoning, calls = "", "", []
    parts: list = []
    while text:
        count = data.draw(st.integers(1, len(text)))
        parts += parser.push(text[:count])
        text = text[count:]
    for part in [*parts, *parser.finish()]:
        match part:
            case ContentPart(new):
                content += new
            case ReasoningPart(new):
                reasoning += new
            case ToolCallPart(index, _, name):
                assert index == len(calls)
                calls.append([name, ""])
            case ArgumentsPart(index, new):
                assert index == len(calls) - 1
                calls[index][1] += new
    return content, reasoning, [(name, json.loads(arguments)) for name, arguments in calls]


def written(tool_format, calls, indent=None, order=False) -> str:
    """The text of calls, as models write it."""
    objects = []
    for name, arguments in calls:
        pairs = {"name": name, tool_format.arguments_key: arguments}
        if order:
            pairs = dict(reversed(pairs.items()))
        objects.append(json.dumps(pairs, indent=indent, ensure_ascii=False))
    if tool_format.separator is None:
        return "\n".join(
            f"{tool_format.trigger}{tool_format.before}{each}{tool_format.after}"
            for each in objects
        )
    if not objects:
        return ""
    joined = tool_format.separator.join(objects)
    return f"{tool_format.trigger}{tool_format.before}{joined}{tool_format.after}"


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if each.syntax == "json"])
@given(
    calls=CALLS, before=TEXT, indent=st.sampled_from([None, 2]), order=st.booleans(), data=st.data()
)
def test_calls_and_the_text_before_them(name, calls, before, indent, order, data) -> None:
    tool_format = FORMATS[name]
    if not tool_format.trigger:
        before = ""
    text = before + written(tool_format, calls, indent, order)
    content, _, parsed = parse(ToolParser(tool_format), text, data)
    assert parsed == calls
    assert content == (before.rstrip() if calls else text)


@given(text=TEXT, data=st.data())
def test_text_without_calls_is_content(text, data) -> None:
    for tool_format in FORMATS.values():
        assert parse(ToolParser(tool_format), text, data) == (text, "", [])


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call> done', " done", [("f", {})]),
        ("hermes", '<tool_call>\nno call', "<tool_call>\nno call", []),
        ("hermes", '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
        ("hermes", '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', "",
            [("f", {"a": 1})]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": "}"}}', "", [("f", {"a": "}"})]),
        ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
        ("llama3_json", 'Use {"name": "f", "parameters": {}}', 'Use {"name": "f", "parameters": {}}', []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": null}]', "", [("f", {})]),
    ],
)  # fmt: skip
@given(data=st.data())
def test_odd_answers(name, text, content, calls, data) -> None:
    assert parse(ToolParser(FORMATS[name]), text, data) == (content, "", calls)


def test_arguments_are_given_out_while_they_arrive() -> None:
    parser = ToolParser(HERMES)
    parser.push('<tool_call>\n{"name": "f", "arguments": ')
    (call, first) = parser.push('{"city": "O')
    assert isinstance(call, ToolCallPart) and first == ArgumentsPart(0, '{"city": "O')
    assert parser.push('slo"') == [ArgumentsPart(0, 'slo"')]
    assert parser.push("}") == [ArgumentsPart(0, "}")]
    assert parser.push("}\n</tool_call>") == []


@given(
    reasoning=st.text(st.sampled_from("ab <>/k"), max_size=12),
    answer=st.text(st.sampled_from("ab <>\n"), max_size=8),
    begun=st.booleans(),
    data=st.data(),
)
def test_reasoning(reasoning, answer, begun, data) -> None:
    text = f"{'' if begun else '<think>'}\n{reasoning}\n</think>\n\n{answer}"
    content, thought, _ = parse(ReasoningParser(PlainParser(), begun), text, data)
    assert (thought, content) == (reasoning.strip(), answer.lstrip())


@given(text=st.text(st.sampled_from("ab <think>/\n"), max_size=16), data=st.data())
def test_an_answer_without_reasoning(text, data) -> None:
    if text.lstrip().startswith("<think>"):
        return
    assert parse(ReasoningParser(PlainParser(), False), text, data) == (text, "", [])


def test_unterminated_reasoning(data=None) -> None:
    parser = ReasoningParser(ToolParser(HERMES), True)
    assert parser.push("still <tool_call>") == [ReasoningPart("still <tool_call>")]
    assert parser.finish() == []


def test_answers_whose_begin_a_grammar_says_have_no_reasoning() -> None:
    plain = Conversation("r", [], SamplingParams(), tools=TOOLS)
    assert may_reason(plain) and may_reason(replace(plain, tool_choice=ToolChoice()))
    for choice in (ToolChoice(ChoiceKind.REQUIRED), ToolChoice(ChoiceKind.NAMED, "f")):
        assert not may_reason(replace(plain, tool_choice=choice))
        assert may_reason(replace(plain, tool_choice=choice, tools=()))
    assert not may_reason(replace(plain, grammar="start: /a/"))


def test_formats_of_templates() -> None:
    texts = {
        "{{ '[TOOL_CALLS]' }}": "mistral",
        "<|python_tag|>": "llama3_json",
        'role == \'ipython\' {"name": x, "parameters": y}': "llama3_json",
        "<|tool_call|>": "granite",
        "<tools>": "hermes",
        "{{ messages }}": "generic",
    }
    assert {text: format_of_template(text).name for text in texts} == texts
    assert format_of_template(None) is GENERIC


TOOLS = (
    Tool("f", "", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                   "additionalProperties": False}),
    Tool("g", "", {"type": "object", "properties": {}, "additionalProperties": False}),
)  # fmt: skip


def accepts(text_grammar: str, text: str) -> bool:
    """Whether a grammar accepts a complete text."""
    tokenizer = LLTokenizer((TINY / "tokenizer.json").read_text(), n_vocab=4096, eos_token=[2])
    matcher = LLMatcher(tokenizer, text_grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA3, MISTRAL], ids=lambda each: each.name)
def test_grammars_allow_calls_that_fit_and_no_others(tool_format) -> None:
    one, two, wrong = [("f", {"a": 1})], [("f", {"a": 1}), ("g", {})], [("f", {"a": "x"})]
    unknown, text = [("h", {})], "some text"

    def allowed(choice: ToolChoice, content: str | None = None) -> list[bool]:
        made = answer_grammar(TOOLS, choice, tool_format, {}, content).text
        assert made is not None
        cases = [written(tool_format, each) for each in (one, two, wrong, unknown)]
        return [accepts(made, case) for case in [*cases, text]]

    required = ToolChoice(ChoiceKind.REQUIRED)
    assert allowed(required) == [True, True, False, False, False]
    assert allowed(ToolChoice(ChoiceKind.REQUIRED, parallel=False)) == [
        True,
        False,
        False,
        False,
        False,
    ]
    assert allowed(ToolChoice(ChoiceKind.NAMED, "f")) == [True, False, False, False, False]
    assert allowed(ToolChoice(ChoiceKind.NAMED, "g")) == [False] * 5
    either = allowed(ToolChoice(), grammar.of_choices([text]))
    assert either == [True, True, False, False, True]
    if tool_format.trigger:
        assert allowed(ToolChoice()) == [True, True, False, False, True]
    else:
        assert answer_grammar(TOOLS, ToolChoice(), tool_format, {}).text is None
