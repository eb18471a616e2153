"""The texts of custom tools arrive as they are written, whole or cut, in linear time."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from max.serve.requests import text_inputs
from max.serve.requests.parts import AnswerPart, ArgumentsPart, ContentPart, ToolCallPart
from max.serve.requests.text_inputs import TextInputs

CHARACTERS = 'ab "\\\n\t/{}é漢🙂\u0001'


def pieces_of(text: str, draw: random.Random) -> list[str]:
    cuts = sorted(draw.sample(range(len(text) + 1), min(draw.randint(0, 12), len(text))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read(pieces: list[str], finish: bool = True) -> list[str]:
    inputs = TextInputs(frozenset({"t"}))
    parts: list[AnswerPart] = [*inputs.texts([ToolCallPart(0, "c", "t")])]
    assert parts == [ToolCallPart(0, "c", "t")]
    found = [part for piece in pieces for part in inputs.texts([ArgumentsPart(0, piece)])]
    found += inputs.finish() if finish else []
    assert all(isinstance(part, ArgumentsPart) and part.index == 0 for part in found)
    return [part.text for part in found if isinstance(part, ArgumentsPart)]


@pytest.mark.parametrize("seed", range(8))
def test_texts_in_any_pieces(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        text = "".join(draw.choices(CHARACTERS, k=draw.randint(0, 30)))
        values: list[dict[str, Any]] = [
            {"input": text},
            {"input": text, "more": 1},
            {"a": {}, "input": text},
        ]
        value = json.dumps(
            draw.choice(values), ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 1])
        )
        assert "".join(read(pieces_of(value, draw))) == text


@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_cut_text_is_what_came(ascii_only: bool) -> None:
    text = 'say "x"\n\\ é🙂 end'
    value = json.dumps({"input": text}, ensure_ascii=ascii_only)
    longest = 0
    for end in range(len(value) + 1):
        got = "".join(read([*value[:end]]))
        assert text.startswith(got) and len(got) >= longest
        longest = len(got)
    assert longest == len(text)
    # all but the escape that was cut
    assert "".join(read(['{"input": "a\\nbc\\u00'])) == "a\nbc"


def test_a_text_arrives_as_it_is_written() -> None:
    assert read(['{"inp', 'ut": "ab', "c\\", 'nd", "x"', ": 1}"], finish=False) == [
        "ab",
        "c",
        "\nd",
    ]


def test_other_arguments_are_read_at_their_end() -> None:
    long = {"more": "x" * 500, "input": "y"}
    assert read([*json.dumps(long)]) == ["y"] and read([*json.dumps(long)], finish=False) == []
    for bad in (
        "",
        "{",
        "[1]",
        '{"input": 3}',
        '{"output": "x"}',
        "no JSON",
        '{"a": ' + "[" * 9999,
    ):
        assert read([bad]) == []
    assert read(['{"input": "a\\xb"}']) == ["a"]
    assert read(['{"input": "a\\ud800b"}']) == ["a?b"]


def test_calls_of_other_tools_and_parts_between() -> None:
    inputs = TextInputs(frozenset({"t"}))
    given: list[AnswerPart] = [
        ContentPart("so"), ToolCallPart(0, "a", "t"), ArgumentsPart(0, '{"x": 1, "input": "1"}'),
        ToolCallPart(1, "b", "u"), ArgumentsPart(1, '{"input": "2"}'),
    ]  # fmt: skip
    assert [*inputs.texts(given), *inputs.finish()] == [
        ContentPart("so"), ToolCallPart(0, "a", "t"), ArgumentsPart(0, "1"),
        ToolCallPart(1, "b", "u"), ArgumentsPart(1, '{"input": "2"}'),
    ]  # fmt: skip


def test_each_character_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    total = 0
    real = json.loads

    def loads(text: str, **options: Any) -> Any:
        nonlocal total
        total += len(text)
        return real(text, **options)

    monkeypatch.setattr(text_inputs.json, "loads", loads)
    value = json.dumps({"input": "word \\ " * 500})
    assert len("".join(read([*value]))) == 3500
    assert total < 5 * len(value)
