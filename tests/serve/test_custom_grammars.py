"""Grammars in Lark's syntax of custom tools, by OpenAI's client."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from max.serve.openai.tools import CustomField, custom_tool
from tests.serve.test_tools import ASK

LARK = """
start: item ("," item)* ";"
item: WORD | "<" item ">"
WORD: /[a-c]{2,3}/
"""


@pytest.mark.parametrize("seed", range(3))
def test_the_text_of_a_custom_tool_fits_a_grammar(client: openai.OpenAI, seed: int) -> None:
    grammar = {"syntax": "lark", "definition": LARK.replace(' | "<" item ">"', "")}
    custom = {"name": "code", "format": {"type": "grammar", "grammar": grammar}}
    ask: Any = {
        "model": "tiny",
        "messages": ASK,
        "tools": [{"type": "custom", "custom": custom}],
        "seed": seed,
    }
    choice: Any = {"type": "custom", "custom": {"name": "code"}}
    raw = client.chat.completions.with_raw_response.create(
        **ask, tool_choice=choice, temperature=1.0, max_tokens=300
    )
    answer = raw.parse().choices[0]
    assert "warning" not in raw.headers
    (call,) = answer.message.tool_calls
    whole = "[a-c]{2,3}(,[a-c]{2,3})*;"
    assert re.fullmatch(
        whole if answer.finish_reason != "length" else "[a-c,;]*", call.custom.input
    )
    tool: Any = {"type": "custom", "name": "code", "format": {"type": "grammar", **grammar}}
    response = client.responses.create(
        model="tiny",
        input="x",
        tools=[tool],
        tool_choice="required",
        max_output_tokens=300,
        parallel_tool_calls=False,
    )
    item = next(item for item in response.output if item.type == "custom_tool_call")
    assert re.fullmatch(whole if response.status == "completed" else "[a-c,;]*", item.input)


def test_what_is_not_held_of_a_grammar_is_named(http) -> None:
    def ask(definition: str, status: int = 200) -> httpx.Response:
        grammar = {"syntax": "lark", "definition": definition}
        custom = {"name": "code", "format": {"type": "grammar", "grammar": grammar}}
        body = {
            "messages": ASK, "tools": [{"type": "custom", "custom": custom}], "max_tokens": 40, "seed": 1,
            "tool_choice": "required",
        }  # fmt: skip
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == status, answer.text
        return answer

    nested = ask(LARK)
    assert "code: its grammar below 4 levels of the same rule" in nested.headers["warning"]
    (call,) = nested.json()["choices"][0]["message"]["tool_calls"]
    assert re.fullmatch("[a-c,;<>]+", call["custom"]["input"])
    assert (
        "code: its grammar (it has templates)" in ask('start: a{"x"}\na{x}: x').headers["warning"]
    )
    error = ask("start: missing", 400).json()["error"]
    assert error["param"] == "tools.0.custom.format.grammar.definition"
    assert "missing" in error["message"]


def test_the_model_sees_a_grammar_and_not_its_expression() -> None:
    field = {
        "name": "code",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'},
    }
    tool = custom_tool(CustomField.model_validate(field), "tools.0")
    function = tool.as_openai()["function"]
    assert function["description"] == 'start: "a"+' and "pattern" not in json.dumps(function)
    assert tool.parameters["properties"]["input"]["pattern"] == "^(?:(?:a)+)$"
