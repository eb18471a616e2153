"""Pythonic, DeepSeek and harmony formats: parsed answers, for all ways to cut the text into pieces."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import pytest
from transformers import AutoTokenizer

from max.pipelines.structured.grammar import of_json_schema
from max.serve.chat.tools.definitions import ChoiceKind, Tool, ToolChoice
from max.serve.chat.tools.formats import FORMATS, GENERIC, format_of_template
from max.serve.chat.tools.grammars import answer_grammar
from max.serve.chat.tools.parser import parser_of
from max.serve.requests.parts import (
    AnswerPart,
    ArgumentsPart,
    ContentPart,
    ReasoningPart,
    ToolCallPart,
)
from tests.serve.conftest import TINY

WEATHER = '{"city": "Oslo (N)", "days": 3, "tags": ["a\\"]", {"b": null}]}'
VALUES = json.loads(WEATHER)
V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    "```json\n{W}\n```<｜tool▁call▁end｜>"
)
V31 = "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{W}<｜tool▁call▁end｜>"
CALL = ("get_weather", VALUES)
NONE = ("get_time", {})

# format, answer, reasoning, content, calls
CASES = [
    ("deepseek", "Let me see.\n\n" + V3 + "<｜tool▁calls▁end｜>", "", "Let me see.", [CALL]),
    ("deepseek", "<｜tool▁calls▁begin｜>" + V31 + "\n" + V31.replace("{W}", "{}").replace("weather", "time")
     + "<｜tool▁calls▁end｜>", "", "", [CALL, NONE]),
    ("deepseek", "no <｜call, {just} text <｜tool", "", "no <｜call, {just} text <｜tool", []),
    ("pythonic", 'get_weather(city="x") is text', "", 'get_weather(city="x") is text', []),
    ("pythonic", '[get_weather(city="Oslo (N)", days=3, tags=[\'a"]\', {"b": None}]), get_time()]', "", "",
        [CALL, NONE]),
    ("pythonic", ' <|python_start|>[get_weather(city="Oslo (N)", days=3, tags=["a\\"]", {"b": null}])]<|python_end|>',
     "", "", [CALL]),
    ("pythonic", "[1, 2, 3] is a list", "", "[1, 2, 3] is a list", []),
    ("pythonic", "[get_weather(1)] has no keyword", "", "[get_weather(1)] has no keyword", []),
    ("pythonic", "[get_weather(city=", "", "[get_weather(city=", []),
    ("pythonic", "", "", "", []),
    ("harmony", "<|channel|>analysis<|message|>Think < it.<|end|><|start|>assistant<|channel|>final<|message|>Hi.\n"
     "<|return|>", "Think < it.", "Hi.\n", []),
    ("harmony",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
     "<|constrain|>json<|message|>{W}<|call|>", "Hm", "", [CALL]),
    ("harmony", "<|start|>assistant to=functions.get_time<|channel|>commentary<|message|>{}<|call|>", "", "", [NONE]),
    ("harmony", "<|channel|>commentary<|message|>I call it.<|end|><|start|>assistant<|channel|>commentary "
     "to=functions.get_time <|constrain|>json<|message|>{}", "", "I call it.", [NONE]),
    ("harmony", " to=functions.get_time<|channel|>commentary json<|message|>{}", "", "", [NONE]),
    ("harmony", "to=functions.x is text", "", "to=functions.x is text", []),
    ("harmony", " to=", "", " to=", []),
    ("harmony", "plain < text", "", "plain < text", []),
]  # fmt: skip
CASES = [(f, answer.replace("{W}", WEATHER), *others) for f, answer, *others in CASES]


def collected(pieces: Sequence[str], name: str) -> tuple[str, str, list]:
    """Reasoning, content and calls of an answer that is parsed in pieces."""
    parser = parser_of(FORMATS[name])
    parts: list[AnswerPart] = []
    for piece in pieces:
        parts += parser.push(piece)
    parts += parser.finish()
    reasoning, content, calls = "", "", list[list[str]]()
    for part in parts:
        match part:
            case ReasoningPart(text):
                reasoning += text
            case ContentPart(text):
                content += text
            case ToolCallPart(index, _, tool):
                assert index == len(calls)
                calls.append([tool, ""])
            case ArgumentsPart(index, text):
                assert index == len(calls) - 1
                calls[index][1] += text
    return reasoning, content, calls


@pytest.mark.parametrize(("name", "answer", "reasoning", "content", "calls"), CASES)
def test_answers_cut_at_every_place(name, answer, reasoning, content, calls) -> None:
    whole = collected([answer], name)
    found = [(tool, json.loads(arguments)) for tool, arguments in whole[2]]
    assert (whole[0], whole[1], found) == (reasoning, content, calls)
    for at in range(len(answer) + 1):
        assert collected([answer[:at], answer[at:]], name) == whole, at
    assert collected(list(answer), name) == whole
    numbers = random.Random(0)
    for _ in range(40):
        places = sorted(numbers.choices(range(len(answer) + 1), k=5))
        ends = [0, *places, len(answer)]
        pieces = [answer[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        assert collected(pieces, name) == whole, pieces


@pytest.mark.parametrize("name", ["deepseek", "pythonic", "harmony"])
def test_random_texts_are_cut_alike(name) -> None:
    """Random texts of marks, braces and letters: no error, and equal results for all pieces."""
    numbers = random.Random(name)
    words = [*FORMATS[name].marks, FORMATS[name].trigger, "[", "]", "(", ")", "{", "}", '"', "\\", "f(", "a=1",
             ", ", "\n", " ", "to=functions.f", "analysis", "json", "```json", "x", "{}"]  # fmt: skip
    for _ in range(400):
        answer = "".join(numbers.choices(words, k=numbers.randint(1, 12)))
        whole = collected([answer], name)
        assert collected(list(answer), name) == whole, answer
        at = numbers.randint(0, len(answer))
        assert collected([answer[:at], answer[at:]], name) == whole, (answer, at)


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "deep": {"type": "object"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (
    Tool("get_weather", "", SCHEMA),
    Tool("get_time", "", {"type": "object", "properties": {}, "additionalProperties": False}),
)


def tokenizer_with(marks: Sequence[str]) -> tuple[Any, dict[str, int]]:
    """A tokenizer with special tokens for the marks, and their numbers."""
    tokenizer, _, numbers = vocabulary_with(tuple(marks))
    return tokenizer, numbers


@cache
def vocabulary_with(marks: tuple[str, ...]) -> tuple[Any, Any, dict[str, int]]:
    """A tokenizer with special tokens for the marks, llguidance's form of it, and the tokens' numbers."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    numbers = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in marks}
    return tokenizer, llguidance.hf.from_tokenizer(tokenizer), numbers


def accepts(grammar: str, text: str, marks: Sequence[str] = ()) -> bool:
    """Whether a grammar accepts a text, token by token; marks may be special tokens."""
    tokenizer, vocabulary, _ = vocabulary_with(tuple(marks))
    matcher = llguidance.LLMatcher(vocabulary, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("name", ["deepseek", "pythonic", "harmony"])
def test_grammars_accept_calls_that_fit(name) -> None:
    required = ToolChoice(ChoiceKind.REQUIRED)
    grammar = answer_grammar(TOOLS, required, FORMATS[name], {}).text
    assert grammar is not None

    def call(arguments: str, tool: str = "get_weather") -> str:
        text = FORMATS[name].render_call(tool, arguments)
        return text.removesuffix("<|call|>")

    for arguments in ('{"city": "Oslo"}', '{"city": "a", "days": 3}'):
        text = call(arguments).replace("'", '"')
        assert accepts(grammar, text), text
        (found,) = collected([text], name)[2]
        assert found[0] == "get_weather" and json.loads(found[1]) == json.loads(arguments)
    assert accepts(grammar, call("{}", "get_time"))
    for wrong in ('{"days": 3}', '{"city": 3}', '{"city": "a", "more": 1}'):
        assert not accepts(grammar, call(wrong).replace("'", '"')), wrong
    assert not accepts(grammar, call("{}", "get_other"))
    named = answer_grammar(TOOLS, ToolChoice(ChoiceKind.NAMED, "get_time"), FORMATS[name], {}).text
    assert named is not None and not accepts(named, call('{"city": "a"}').replace("'", '"'))


FREE = {
    "pythonic": [
        "",
        "Hello [there] (you).",
        "[1, 2] is a list",
        " [get_weather] is the name",
        '[get_weather(city="Oslo", days=2)]',
        ' [get_time(), get_weather(city="a")]',
        '<|python_start|>[get_time()]<|python_end|>',
    ],
    "harmony": [
        "plain < text",
        "<|channel|>final<|message|>Hi <|x|>.",
        "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary<|message|>I call"
        "<|end|><|start|>assistant<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}",
        '<|channel|>commentary to=functions.get_weather<|message|>{"city": "a"}',
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "a"}',
    ],
}  # fmt: skip
WRONG = {
    "pythonic": [
        "[get_weather(days=3)]",
        '[get_weather(city="a"',
        "[get_other()] is no tool",
        " [ get_other(",
        '<|python_start|>[get_weather(city=3)]<|python_end|>',
    ],
    "harmony": [
        "<|channel|>analysis<|message|>Hm<|call|>",
        "<|channel|>commentary to=functions.get_other <|constrain|>json<|message|>{}",
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": 3}',
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>text",
        "<|channel|>elsewhere<|message|>text",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "special"), [("pythonic", False), ("pythonic", True), ("harmony", True)]
)
def test_with_auto_an_answer_is_free_until_a_call_begins(name, special) -> None:
    marks = FORMATS[name].marks if special else ()
    grammar = answer_grammar(TOOLS, ToolChoice(), FORMATS[name], tokenizer_with(marks)[1]).text
    assert grammar is not None
    for text in FREE[name]:
        assert accepts(grammar, text, marks), text
    for text in WRONG[name]:
        assert not accepts(grammar, text, marks), text


def test_harmony_without_its_special_tokens_is_not_guided() -> None:
    assert answer_grammar(TOOLS, ToolChoice(), FORMATS["harmony"], {}).text is None


LETTERS = {"type": "string", "maxLength": 4}
SMALL = (
    Tool("f", "", {"type": "object", "properties": {"a": LETTERS, "b": {"type": "boolean"}},
                   "required": ["a"], "additionalProperties": False}),
    Tool("g.h", "", {"type": "object", "properties": {}, "additionalProperties": False}),
)  # fmt: skip
OPENINGS = {
    "pythonic": ["[f(", "[g.h()", "<|python_start|>[", " [f(a="],
    "harmony": [
        "<|channel|>commentary to=functions.f",
        " to=functions.g.h<|channel|>commentary",
        "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>commentary to=",
    ],
}


@pytest.mark.parametrize("name", ["pythonic", "harmony"])
def test_guided_calls_always_parse(name) -> None:
    """Random tokens among those that the grammar allows."""
    tokenizer, special = tokenizer_with(FORMATS[name].marks)
    vocabulary = llguidance.hf.from_tokenizer(tokenizer)
    grammar = answer_grammar(SMALL, ToolChoice(), FORMATS[name], special).text
    numbers = random.Random(name)
    ended = 0
    for round_number in range(40):
        opening = OPENINGS[name][round_number % len(OPENINGS[name])]
        tokens = tokenizer.encode(opening, add_special_tokens=False)
        matcher = llguidance.LLMatcher(vocabulary, grammar)
        assert matcher.try_consume_tokens(tokens) == len(tokens)
        for _ in range(200):
            if matcher.is_accepting():
                break
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            tokens.append(int(numbers.choice(allowed)))
            assert matcher.consume_token(tokens[-1])
        if not matcher.is_accepting():
            continue
        ended += 1
        _, content, calls = collected([tokenizer.decode(tokens)], name)
        assert calls and not content.strip()
        for tool, arguments in calls:
            values = json.loads(arguments)
            assert tool in ("f", "g.h") and set(values) <= {"a", "b"}
            assert len(values.get("a", "")) <= 4 and (tool != "f" or "a" in values)
    assert ended >= 20


def test_templates_tell_the_format() -> None:
    assert format_of_template("x <|channel|> y").name == "harmony"
    assert format_of_template("{{ '<｜tool▁calls▁begin｜>' }}").name == "deepseek"
    assert format_of_template("<|python_start|>").name == "pythonic"
    assert format_of_template(None) is GENERIC
    assert of_json_schema(SCHEMA)
