"""Parsers of named formats, whose text arrives in pieces, against readers of whole answers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from max.serve.chat.tools.deepseek import DeepSeekParser
from max.serve.chat.tools.definitions import Tool
from max.serve.chat.tools.functionary import FunctionaryParser
from max.serve.chat.tools.harmony import HarmonyParser
from max.serve.chat.tools.marks import BufferedParser, first_mark, held_length
from max.serve.requests.parts import ArgumentsPart, ContentPart, ReasoningPart, ToolCallPart

Item = tuple[str, str]
"""The kind of a part of an answer, or ``call`` and its name or its arguments, and the text."""


def object_length(text: str) -> int | None:
    """The length of the object at the start of a text; None: it goes on."""
    depth = 0
    for token in re.finditer(r'"(?:\\[\s\S]|[^"\\])*(?:"|\\?\Z)|[{}\[\]]', text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token[0], 0)
        if depth == 0 and token[0] in "}]":
            return token.end()
    return None


def without_start_of(marks: Sequence[str], text: str, least: int = 1) -> str:
    """A text without the start of a mark at its end."""
    starts = [mark[:size] for mark in marks for size in range(least, len(mark))]
    return text[
        : len(text) - max((len(start) for start in starts if text.endswith(start)), default=0)
    ]


def call_items(name: str, text: str) -> tuple[list[Item], str | None]:
    """A call whose arguments begin a text, and what follows; None: they go on."""
    end = object_length(text)
    return [("call", name), ("arguments", text[:end])], None if end is None else text[end:]


def deepseek(answer: str, cut: bool) -> Iterator[Item]:
    begin, end, separator = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    marks = (begin, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    left: str | None = answer
    while left is not None:
        found = re.search("|".join(marks), left)
        if found is None:
            yield "content", without_start_of(marks, left) if cut else left
            return
        yield "content", left[: found.start()]
        left = left[found.end() :]
        if found[0] != begin:
            continue
        head = re.match(rf"([\s\S]*?){separator}([^{{]*)(?={{)", left)
        if head is None:
            return
        name = head[2].split("```json")[0] if "```json" in head[2] else head[1]
        items, left = call_items(name.strip(), left[head.end() :])
        yield from items
        left = left.partition(end)[2] if left is not None and end in left else None


NAMES = ("all", "f", "g.h")


def functionary(answer: str, cut: bool) -> Iterator[Item]:
    left, begins, is_first = answer, True, True
    while True:
        if not begins:
            text, mark, left = left.partition(">>>")
            yield "content", without_start_of([">>>"], text) if cut and not mark else text
            if not mark:
                return
        line, end, rest = left.lstrip().removeprefix(">>>").partition("\n")
        if not end and (
            line.strip() in NAMES
            or any(name.startswith(line.lstrip()) for name in NAMES)
            or ">>>".startswith(left.lstrip())
        ):
            # a recipient that has not come
            if is_first and not cut:
                yield "content", left
            return
        is_first = begins = False
        if not end or line.strip() not in NAMES:
            continue
        left = rest
        if line.strip() == "all":
            continue
        bare = left.lstrip()
        if not bare.startswith("{"):
            yield "call", line.strip()
            yield "arguments", "{}" if bare else ""
            after: str | None = bare
        else:
            items, after = call_items(line.strip(), bare)
            yield from items
        if after is None or ">>>".startswith(bare := after.lstrip()) and bare != ">>>":
            return
        begins, left = bare.startswith(">>>"), bare.removeprefix(">>>")


def harmony(answer: str, cut: bool) -> Iterator[Item]:
    ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
    pattern = "|".join(map(re.escape, ends))
    first = re.search(pattern, answer)
    in_header = bool(
        first
        and first[0] == "<|channel|>"
        and re.fullmatch(r"\s*to=[^\s<]+\s*", answer[: first.start()])
    )
    kind, left = "content", answer
    while True:
        if in_header:
            header, mark, left = left.partition("<|message|>")
            if not mark:
                return
            recipient = re.search(r"to=(?:functions\.)?([^\s<]+)", header)
            channel = header.split("<|channel|>")[-1].split("<|constrain|>")[0].strip()
            kind = "reasoning" if channel == "analysis" else "content"
            if recipient is not None:
                yield "call", recipient[1]
                kind = "arguments"
        found = re.search(pattern, left)
        if found is None:
            # the start of a mark has three characters at least
            yield kind, without_start_of(ends, left, 3) if cut else left
            return
        yield kind, left[: found.start()]
        keeps = found[0] in ("<|start|>", "<|channel|>")
        left, in_header = left[found.start() if keeps else found.end() :], True


def joined(items: Iterator[Item], trims: bool) -> tuple[str, str, list[list[str]]]:
    """Reasoning, content and calls; content of some formats has no space before and after calls."""
    texts, reasoning, calls = [""], "", list[list[str]]()
    for kind, text in items:
        match kind:
            case "content":
                texts[-1] += text
            case "reasoning":
                reasoning += text
            case "call":
                calls.append([text, ""])
                texts.append("")
            case _:
                calls[-1][1] += text
    content = "".join(text.rstrip() if trims and calls else text for text in texts)
    return reasoning, content, calls


def collected(parser: Any, pieces: Sequence[str], cut: bool) -> tuple[str, str, list[list[str]]]:
    parts = [part for piece in pieces for part in parser.push(piece)]
    reasoning, content, calls = "", "", list[list[str]]()
    for part in [*parts, *parser.finish(cut)]:
        match part:
            case ReasoningPart(text):
                reasoning += text
            case ContentPart(text):
                content += text
            case ToolCallPart(index, key, name):
                assert index == len(calls) and key.startswith("call_")
                calls.append([name, ""])
            case ArgumentsPart(index, text):
                assert index == len(calls) - 1 and text
                calls[index][1] += text
            case _:
                raise AssertionError(part)
    return reasoning, content, calls


OBJECTS = ["{", "}", "[", "]", '"', "\\", "{}", '{"a": "}\\""}', "x", " ", "\n"]
FORMATS: dict[str, tuple[Callable[[], Any], Callable[[str, bool], Iterator[Item]], list[str]]] = {
    "deepseek": (
        DeepSeekParser, deepseek,
        ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", *["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"] * 4,
         *["<｜tool▁call▁end｜>"] * 2, "<｜tool▁", "<｜", "```json", "f", "g.h\n",
         *["<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"] * 3, *OBJECTS],
    ),
    "functionary": (
        lambda: FunctionaryParser([Tool("f", "", {}), Tool("g.h", "", {})]), functionary,
        [*[">>>"] * 3, ">", ">>", *["all\n", "f\n", "g.h\n"] * 3, "all", "al", "f", "f \n", ">>>\n",
         *[">>>f\n{", "g.h\n{"] * 2, *OBJECTS],
    ),
    "harmony": (
        HarmonyParser, harmony,
        ["<|start|>", *["<|channel|>", "<|message|>"] * 4, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>", "<|",
         "<", "<|en", "<|m", "assistant", "analysis", "analysis ", "final", " to=functions.f", "to=g.h", "to=", "t",
         "<|e", "<|channel|>x to=f<|message|>", "<|channel|>analysis<|constrain|>json<|message|>",
         "json", *OBJECTS],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_answers_in_pieces_are_read_as_whole_ones(name: str) -> None:
    make, read, words = FORMATS[name]
    draw, num_calls, num_texts = random.Random(name), 0, 0
    for _ in range(600):
        answer = "".join(draw.choices(words, k=draw.randint(0, 14)))
        cut = draw.random() < 0.5
        expected = joined(read(answer, cut), name != "harmony")
        places = sorted(draw.choices(range(len(answer) + 1), k=draw.randint(0, 4)))
        ends = [0, *places, len(answer)]
        few = [answer[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        for pieces in ([answer], few, list(answer)):
            assert collected(make(), pieces, cut) == expected, (pieces, cut)
        num_calls, num_texts = num_calls + len(expected[2]), num_texts + bool(expected[1])
    assert num_calls > 50 and num_texts > 50, (num_calls, num_texts)


def test_parts_are_returned_when_they_are_certain() -> None:
    """Nothing waits for the end that is no start of a mark."""
    for name, text, expected in (
        ("deepseek", "ab <｜to", "ab"), ("deepseek", "ab <｜tool▁call▁end", "ab <｜tool▁call▁end"),
        ("functionary", "all\nab>>", "ab"), ("functionary", "abc", "abc"), ("functionary", "al", ""),
        ("functionary", ">>", ""), ("harmony", "ab<|en", "ab"), ("harmony", "to=f", ""), ("harmony", "to me", "to me"),
        ("harmony", "<|channel|>final<|message|>ab<|", "ab"),
    ):  # fmt: skip
        found = FORMATS[name][0]().push(text)
        assert "".join(part.text for part in found) == expected, text
    for name, text in (
        ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1'),
        ("functionary", 'f\n {"a": 1'),
        ("harmony", '<|channel|>x to=f<|message|>{"a": 1'),
    ):
        begun, arguments = FORMATS[name][0]().push(text)
        assert (begun.name, arguments.text) == ("f", '{"a": 1'), name


def test_marks_in_texts() -> None:
    marks = ("<a>", "<ab>", "<<")
    for text, held in (
        ("", 0), ("x", 0), ("<", 1), ("x<a", 2), ("<a", 2), ("x<ab", 3), ("a>", 0), ("xab<", 1), ("<ab<", 1),
    ):  # fmt: skip
        assert held_length(text, marks) == held, text
    for text, found in (
        ("x", None), ("x<a>", (1, "<a>")), ("<<a>", (0, "<<")), ("y<ab><a>", (1, "<ab>")), ("<ab", None),
    ):  # fmt: skip
        assert first_mark(text, marks) == found, text


class AwaitingParser(BufferedParser):
    """Returns what comes before a mark once the mark is whole."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark, self.steps = mark, 0

    def _step(self, parts: list[Any], last: bool) -> bool:
        self.steps += 1
        before, mark, after = self._buffer.partition(self.mark)
        if not mark and not last:
            self._await(self.mark)
            return False
        parts += [ContentPart(before)] if before else []
        self._buffer = after
        return bool(mark)


def test_text_before_an_awaited_mark_is_left_alone() -> None:
    """The buffer is looked at when the mark is whole, in whatever pieces it comes."""
    draw = random.Random(2)
    for mark in ("<a>", "|", "aab"):
        for _ in range(200):
            answer = "".join(draw.choices(["a", "b", "<", ">", "|", " ", mark], k=12))
            parser, found = AwaitingParser(mark), list[str]()
            at = seen = 0
            while at < len(answer):
                piece = answer[at : at + draw.randint(1, 4)]
                at += len(piece)
                before = parser.steps
                parts: Any = parser.push(piece)
                found += [part.text for part in parts]
                count = answer[:at].count(mark)
                # after the first look only whole marks need another
                assert count > seen or parser.steps - before <= (before == 0)
                seen = count
            rest: list[Any] = parser._take(last=True)
            found += [part.text for part in rest]
            assert found == [part for part in answer.split(mark) if part]
