"""Tools and structured answers by OpenAI's client."""

from __future__ import annotations

import json
import re

import httpx
import openai
import pydantic
import pytest

from max.serve.chat.run import ToolCall

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 10},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "description": "The time."}}
ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]
OPTIONS = {"model": "tiny", "messages": ASK, "tools": [WEATHER, TIME], "max_tokens": 200}


def check_call(call) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert set(arguments) == {"city", "days"} and len(arguments["city"]) <= 10
        assert 1 <= arguments["days"] <= 9
    else:
        assert call.function.name == "get_time" and isinstance(arguments, dict)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_named_tool_is_called(client, temperature) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(
        **OPTIONS, tool_choice=choice, temperature=temperature, seed=3
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.id.startswith("call_") and call.function.name == "get_weather"
    check_call(call)
    assert answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == "tool_calls"


def test_streamed_calls_are_those_of_the_whole_answer(client) -> None:
    options = {**OPTIONS, "tool_choice": "required", "temperature": 1.0, "seed": 4}
    options["parallel_tool_calls"] = False
    whole = client.chat.completions.create(**options).choices[0]
    calls: dict[int, list[str]] = {}
    reasons = []
    for chunk in client.chat.completions.create(**options, stream=True):
        reasons.append(chunk.choices[0].finish_reason)
        for part in chunk.choices[0].delta.tool_calls or []:
            if part.id:
                calls[part.index] = [part.function.name, ""]
            calls[part.index][1] += part.function.arguments
    assert list(calls.values()) == [
        [call.function.name, call.function.arguments] for call in whole.message.tool_calls
    ]
    assert reasons[-1] == whole.finish_reason == "tool_calls"
    for call in whole.message.tool_calls:
        check_call(call)


def test_auto_and_none(client) -> None:
    auto = client.chat.completions.create(**OPTIONS, temperature=0)
    for call in auto.choices[0].message.tool_calls or []:
        check_call(call)
    none = client.chat.completions.create(**OPTIONS, temperature=0, tool_choice="none")
    assert none.choices[0].message.tool_calls is None and none.choices[0].message.content


def test_the_result_of_a_call_goes_on(client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    answer = client.chat.completions.create(**{**OPTIONS, "messages": messages}, temperature=0)
    assert answer.usage.prompt_tokens > 40
    bad = {**call, "function": {"name": "get_time", "arguments": "{"}}
    messages[1] = {"role": "assistant", "tool_calls": [bad]}
    with pytest.raises(openai.BadRequestError, match="expected JSON text of an object"):
        client.chat.completions.create(**{**OPTIONS, "messages": messages})


@pytest.mark.parametrize(
    ("text", "arguments"), [('{"a": [1]}', {"a": [1]}), ('{"a": [1', {}), ("", {}), ("3", {})]
)
def test_arguments_that_the_length_cuts_off_are_empty(text, arguments) -> None:
    assert ToolCall("call_1", "f", text).parsed_arguments() == arguments


class City(pydantic.BaseModel):
    """A city."""

    name: str = pydantic.Field(max_length=10)
    capital: bool


def test_an_answer_of_a_class(client) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=ASK, response_format=City, temperature=2.0, seed=1, max_tokens=150
    )
    assert isinstance(answer.choices[0].message.parsed, City)


@pytest.mark.parametrize(
    ("extra", "fits"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"response_format": {"type": "regex", "regex": "[a-c]{5}"}}, re.compile("[a-c]{5}").fullmatch),
        ({"guided_choice": ["Oslo", "Rome"]}, {"Oslo", "Rome"}.__contains__),
        ({"structured_outputs": {"regex": "[0-9]{1,4}!"}}, re.compile("[0-9]{1,4}!").fullmatch),
        ({"guided_grammar": 'root ::= "x" | "y"'}, {"x", "y"}.__contains__),
        ({"guided_json": {"enum": [1, "two"]}}, lambda text: json.loads(text) in (1, "two")),
    ],
)  # fmt: skip
def test_structures(http: httpx.Client, extra, fits) -> None:
    schema = {"type": "object", "maxProperties": 1, "additionalProperties": {"type": "integer"}}
    if extra.get("response_format", {}).get("type") == "json_object":
        extra["response_format"]["schema"] = schema
    body = {"messages": ASK, "max_tokens": 120, "temperature": 1.5, "seed": 2, **extra}
    for stream in (False, True):
        answer = http.post("/v1/chat/completions", json={**body, "stream": stream})
        assert answer.status_code == 200, answer.text
        if not stream:
            text = answer.json()["choices"][0]["message"]["content"]
            assert fits(text), text
            continue
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
        assert "".join(deltas) == text


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "u"}}}},
            "response_format.json_schema.schema",
            "JSON schema is invalid",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "text"),
        ({"guided_regex": "("}, "guided_regex", "regular expression is invalid"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "give one"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [TIME, TIME]}, "tools", "two tools"),
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "the tools are get_time",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "u"}}}]},
            "tools.0.function.parameters",
            "JSON schema is invalid",
        ),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "grammar"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "cannot set tools"),
    ],
)  # fmt: skip
def test_structures_that_do_not_fit(http: httpx.Client, change, param, says) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": ASK, **change})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], says in error["message"]) == (param, True), error
