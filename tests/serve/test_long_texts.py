"""What a token of a long answer takes does not grow with the answer: nothing copies or reads what came before it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from max.pipelines.core.reasoning import ReasoningBudget, ReasoningLimit
from max.serve.chat.reasoning import ReasoningParser
from max.serve.chat.run import Answer, ToolCall
from max.serve.chat.tools import formats
from max.serve.chat.tools.definitions import Tool
from max.serve.chat.tools.layouts.layout import IDENTIFIER, KEY, NAME, CallLayout, Style
from max.serve.chat.tools.layouts.parser import LayoutParser
from max.serve.chat.tools.marks import BufferedParser
from max.serve.chat.tools.parser import parser_of
from max.serve.requests.generation import AnswerDelta, PlainParser
from max.serve.requests.parts import (
    AnswerPart,
    ArgumentsPart,
    ContentPart,
    GrowingText,
    ReasoningPart,
    ToolCallPart,
)
from tests.serve import test_call_layouts as layouts
from tests.serve.test_responses import events_in, writer_of

FORMATS = [each for each in vars(formats).values() if isinstance(each, formats.ToolFormat)]
LAYOUTS = [each for each in vars(layouts).values() if isinstance(each, CallLayout)]
TOOL = Tool("f", parameters={"type": "object", "properties": {"a": {"type": "string"}}})
MOST = 4
"""The most copies of each character in a parser's buffer."""


def pieces(text: str, size: int = 4) -> Iterator[str]:
    return (text[at : at + size] for at in range(0, len(text), size))


def answer_of(parser: Any, text: str) -> Answer:
    """The answer, after a look at what the parser copied."""
    answer, copied = Answer(), 0
    for piece in pieces(text):
        before = parser._buffer
        parts = parser.push(piece)
        copied += len(parser._buffer) if parser._buffer is not before else 0
        answer.add(AnswerDelta(0, tuple(parts), (), 1))
    answer.add(AnswerDelta(0, tuple(parser.finish()), (), 1))
    assert copied <= MOST * len(text)
    return answer


@pytest.mark.parametrize("piece", ["word", "    ", "\n", "x \n"])
@pytest.mark.parametrize("own", FORMATS, ids=lambda each: each.name)
def test_content(own: formats.ToolFormat, piece: str) -> None:
    given = "x" + piece * 500
    answer = answer_of(parser_of(own), given)
    assert answer.content == given and not answer.tool_calls


@pytest.mark.parametrize("value", ["word", "    ", "({})", "\n", "</"])
@pytest.mark.parametrize("own", FORMATS, ids=lambda each: each.name)
def test_calls_of_formats(own: formats.ToolFormat, value: str) -> None:
    arguments = {"a": value * 500}
    answer = answer_of(parser_of(own, [TOOL]), own.render_call("f", json.dumps(arguments)))
    (call,) = answer.tool_calls
    assert call.name == "f" and json.loads(call.arguments) == arguments


@pytest.mark.parametrize("value", ["", "word", "    ", "({})", "<<"])
@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_calls_of_layouts(number: int, value: str) -> None:
    layout, text = LAYOUTS[number], value * 500
    arguments = {
        Style.JSON: json.dumps({"a": text}),
        Style.TAGGED: f"{layout.key}a{layout.key_end}{text}{layout.value_end.replace(KEY, 'a')}",
        Style.PYTHON: f"a={text!r})",
        Style.BARE: f"a:{layout.value_end}{text}{layout.value_end}}}",
    }[layout.style]
    head = layout.section + layout.head.replace(NAME, "f").replace(IDENTIFIER, "x1")
    tail = layout.tail.replace(IDENTIFIER, "x1") + layout.section_end
    answer = answer_of(LayoutParser(layout, [TOOL]), f"{head}{arguments}{tail} ok")
    (call,) = answer.tool_calls
    assert call.name == "f" and json.loads(call.arguments) == {"a": text}


@pytest.mark.parametrize("after", ["x", " x", "\n" * 9 + "x", "   "])
@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_marks_that_do_not_end_a_value(number: int, after: str) -> None:
    """A value may have its own end mark within, with something else behind it than what follows a value."""
    layout = LAYOUTS[number]
    if layout.style is not Style.TAGGED or not (layout.tail or layout.section_end):
        return
    close = layout.value_end.replace(KEY, "a")
    parser = LayoutParser(layout, [TOOL])
    value = f"begin{f'word{close.strip()}{after}' * 300}end"
    head = layout.section + layout.head.replace(NAME, "f").replace(IDENTIFIER, "x1")
    tail = layout.tail.replace(IDENTIFIER, "x1") + layout.section_end
    answer = answer_of(parser, f"{head}{layout.key}a{layout.key_end}{value}{close}{tail} ok")
    (call,) = answer.tool_calls
    assert call.name == "f" and json.loads(call.arguments) == {"a": value}
    assert answer.content.strip() == "ok"


def test_an_answer_that_is_only_space_is_decoded_once() -> None:
    """Whether it begins with reasoning is open until a text comes, also for the temperature of reasoning."""
    for temperature in (None, 0.5):
        budget = ReasoningBudget(3, "<think>", "</think>", False, 1, (90, 91), temperature)
        limit, tokens, decoded = ReasoningLimit(budget), list[int](), 0

        def decode(part: Sequence[int]) -> str:
            nonlocal decoded
            decoded += len(part)
            return "".join({1: " \n", 2: "<thi", 3: "nk>"}.get(token, "word") for token in part)

        for _ in range(1000):
            tokens.append(1)
            limit.observe(tokens, decode)
            assert limit.forced_token(tokens, decode) is None and limit.temperature is None
        assert decoded <= 2 * len(tokens)
        limit.rewind(500)
        del tokens[500:]
        tokens += [2, 3, 4]
        limit.observe(tokens, decode)
        assert limit.temperature == temperature
        assert limit.forced_token(tokens, decode) == 90


@pytest.mark.parametrize("piece", ["word", "    ", "</th"])
def test_reasoning(piece: str) -> None:
    given = "x" + piece * 500 + "x"
    answer = answer_of(ReasoningParser(PlainParser(), begun=True), f"{given}</think>ok")
    assert (answer.reasoning, answer.content) == (given, "ok")


@pytest.mark.parametrize("own", FORMATS, ids=lambda each: each.name)
def test_space_after_a_mark(own: formats.ToolFormat) -> None:
    answer = answer_of(parser_of(own), (own.trigger or own.optional_trigger) + "  " * 500)
    assert not answer.tool_calls


class Waiting(BufferedParser):
    """Takes text up to a mark, which it waits for; counts how often it looks."""

    looks = 0

    def _step(self, parts: list[AnswerPart], last: bool) -> bool:
        self.looks += 1
        text, mark, rest = self._buffer.partition("<end>")
        if not mark:
            self._await("<end>")
            return False
        parts.append(ContentPart(text))
        self._buffer = rest
        return bool(rest)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100])
def test_a_mark_is_found_however_it_is_cut(size: int) -> None:
    parser, parts = Waiting(), list[AnswerPart]()
    for piece in pieces("one <en two<end>three <end> four<end", size):
        parts += parser.push(piece)
    assert parts == [ContentPart("one <en two"), ContentPart("three ")]
    assert parser.looks <= 5
    parser.push(">")
    assert parser._take(last=True) == [] and parser._buffer == ""


def test_texts_are_joined_when_they_are_read() -> None:
    text = GrowingText("a")
    for piece in ("b", "", "c"):
        text.add(piece)
    assert len(text._pieces) == 4
    assert text.text == "abc" and text.text is text.text and len(text._pieces) == 1
    call = ToolCall("1", "f", "{")
    call.add("}")
    assert (call.arguments, call.parsed_arguments()) == ("{}", {})
    answer = Answer()
    for number in range(50):
        parts = (ContentPart("a"), ReasoningPart("b"), ToolCallPart(number, "1", "f"))
        answer.add(AnswerDelta(0, (*parts, ArgumentsPart(0, "c")), (), 1))
    kept = answer._content, answer._reasoning, answer.tool_calls[0]._arguments
    assert [len(each._pieces) for each in kept] == [51] * 3
    assert (answer.content, answer.reasoning) == ("a" * 50, "b" * 50)
    assert answer.tool_calls[0].arguments == "c" * 50


@pytest.mark.parametrize(
    ("parts", "texts_of"),
    [
        ([ContentPart("ab")], lambda item: item["content"][0]),
        ([ReasoningPart("ab")], lambda item: item["content"][0]),
        ([ToolCallPart(0, "1", "f"), ArgumentsPart(0, "ab")], lambda item: item),
        ([ToolCallPart(0, "1", "own"), ArgumentsPart(0, "ab")], lambda item: item),
    ],
    ids=["text", "reasoning", "arguments", "input"],
)
def test_a_response_has_its_text_when_it_is_asked_for(
    parts: list[AnswerPart], texts_of: Any
) -> None:
    """While it is made, also after an earlier item, and at its end."""
    writer = writer_of()
    writer._job.custom_tools = frozenset({"own"})  # type: ignore[misc]
    writer.begin()
    first: AnswerPart = ReasoningPart("why")
    if isinstance(parts[0], ReasoningPart):
        first = ContentPart("said")
    writer.write(first)
    for part in [*parts, *parts[-1:] * 99]:
        writer.write(part)
    assert len(writer._text._pieces) == 101

    def texts(item: dict[str, Any]) -> list[str]:
        values = texts_of(item)
        return [values[name] for name in ("text", "arguments", "input") if name in values]

    for status in ("in_progress", "cancelled"):
        before, item = writer.current_response(status)["output"]
        assert before["content"][0]["text"] in ("why", "said")
        assert texts(item) == ["ab" * 100]
    writer.write(parts[-1])
    events = events_in(writer.end_item("stop"))
    assert texts(events[-1]["item"]) == texts(writer.current_response("completed")["output"][1])
    assert texts(events[-1]["item"]) == ["ab" * 101]
