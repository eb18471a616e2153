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
        ({"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}, {"x", "y"}.__contains__),
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
            {"response_format": {"type": "json_schema",
                                 "json_schema": {"name": "x", "strict": True, "schema": {"type": "u"}}}},
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
            {"tools": [{"type": "function", "function": {"name": "x", "strict": True, "parameters":
                {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}}}]},
            "tools.0.function.parameters",
            "the tool x is strict, and the JSON schema is invalid: a grammar does not hold properties.a: uniqueItems",
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


ODD = {
    "type": "object",
    "properties": {
        "a": {
            "type": "array",
            "items": {"type": "integer", "maximum": 9},
            "uniqueItems": True,
            "maxItems": 2,
        },
        "b": {"type": "string", "format": "binary", "pattern": r"(x)\1"},
    },
    "required": ["a"],
    "if": {"required": ["b"]},
    "then": {"properties": {"b": {"not": {"pattern": "y"}}}},
}
HELD_NOT = ("f: ", "properties.a: uniqueItems", "properties.b: pattern")


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}]
)
def test_a_tool_whose_schema_a_grammar_does_not_hold_is_taken_with_a_warning(http, choice) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": ODD}}
    for odd in (
        tool,
        {"type": "function", "function": {"name": "f", "parameters": {"type": "strange"}}},
    ):
        body = {"messages": ASK, "tools": [odd], "tool_choice": choice, "max_tokens": 90, "seed": 1}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        warning = answer.headers["warning"]
        assert all(text in warning for text in (HELD_NOT if odd is tool else ("f: ", "strange"))), (
            warning
        )
        for call in answer.json()["choices"][0]["message"].get("tool_calls") or ():
            if odd is tool and answer.json()["choices"][0]["finish_reason"] == "tool_calls":
                assert set(json.loads(call["function"]["arguments"])) <= {"a", "b"}


def test_all_apis_take_schemas_that_grammars_do_not_hold(http) -> None:
    messages = [{"role": "user", "content": "x"}]
    common = {"model": "tiny", "messages": messages}
    function = {"name": "f", "description": "", "parameters": ODD}
    requests = {
        "/v1/chat/completions": {
            **common,
            "max_tokens": 30,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ODD}},
        },
        "/v1/responses": {
            "model": "tiny",
            "input": "x",
            "max_output_tokens": 30,
            "tools": [{"type": "function", **function}],
        },
        "/v1/messages": {
            **common,
            "max_tokens": 30,
            "tools": [{"name": "f", "input_schema": ODD}],
            "tool_choice": {"type": "any"},
        },
        "/api/chat": {**common, "stream": False, "options": {"num_predict": 30}, "format": ODD},
    }
    for path, body in requests.items():
        answer = http.post(path, json=body)
        assert answer.status_code == 200, (path, answer.text)
        assert "uniqueItems" in answer.headers["warning"], path


def test_a_function_without_parameters_gets_an_empty_object(http) -> None:
    for parameters in (
        {},
        {"parameters": None},
        {"parameters": {"type": "object", "properties": {}}},
    ):
        tool = {"type": "function", "function": {"name": "now", **parameters}}
        body = {
            "messages": ASK,
            "tools": [tool],
            "tool_choice": "required",
            "seed": 3,
            "temperature": 2.0,
            "max_tokens": 60,
            "parallel_tool_calls": False,
        }
        message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == ["{}"]


def test_whole_answers_are_checked(http) -> None:
    twice = {
        "type": "array",
        "items": {"type": "integer", "minimum": 1, "maximum": 1},
        "minItems": 2,
        "maxItems": 2,
        "uniqueItems": True,
    }
    schema = {"type": "object", "properties": {"a": twice}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = {
        "messages": ASK,
        "tools": [tool],
        "tool_choice": "required",
        "max_tokens": 60,
        "parallel_tool_calls": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for fields, name in (
        (body, "f: "),
        ({"messages": ASK, "max_tokens": 60, "response_format": form}, ""),
    ):
        answer = http.post("/v1/chat/completions", json=fields)
        assert answer.status_code == 200, answer.text
        assert f"what does not fit in it: {name}a: uniqueItems" in answer.headers["warning"]


NEVER = {
    "uniqueItems": {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "uniqueItems": True},
    "back reference": {"type": "string", "maxLength": 1, "pattern": r"^(a)\1$"},
    "boundary": {"type": "string", "maxLength": 3, "pattern": r"^x\bx"},
}  # fmt: skip
"""What no text of the relaxed grammar fits."""


@pytest.mark.parametrize("kind", NEVER)
def test_all_apis_check_whole_answers(http, kind: str) -> None:
    schema = {"type": "object", "properties": {"a": NEVER[kind]}, "required": ["a"]}
    messages = [{"role": "user", "content": "x"}]
    form = {"type": "json_schema", "name": "x", "schema": schema}
    tool = {"name": "f", "description": "", "input_schema": schema}
    requests = {
        "/v1/chat/completions": {
            "messages": messages, "max_tokens": 60,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        },
        "/v1/responses": {"input": "x", "max_output_tokens": 60, "text": {"format": form}},
        "/v1/messages": {
            "messages": messages, "max_tokens": 60, "tools": [tool], "tool_choice": {"type": "any"},
        },
        "/api/chat": {
            "messages": messages, "stream": False, "options": {"num_predict": 60}, "format": schema,
        },
    }  # fmt: skip
    says = "a: uniqueItems" if kind == "uniqueItems" else "a: pattern"
    for path, body in requests.items():
        answer = http.post(path, json={"model": "tiny", **body})
        assert answer.status_code == 200, (path, answer.text)
        _, found, misfit = answer.headers["warning"].partition("what does not fit in it: ")
        assert found and says in misfit, (path, answer.headers["warning"])
    for strict in (
        ("/v1/messages", {**requests["/v1/messages"], "tools": [{**tool, "strict": True}]}),
        ("/v1/responses", {**requests["/v1/responses"], "text": {"format": {**form, "strict": True}}}),
    ):  # fmt: skip
        answer = http.post(strict[0], json={"model": "tiny", **strict[1]})
        assert answer.status_code == 400, (strict[0], answer.text)
        assert f"properties.{says}" in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_strict_schema_that_a_grammar_does_not_hold_is_an_error(http, choice) -> None:
    function = {"name": "find_all", "description": "", "parameters": ODD, "strict": True}
    chat = {"type": "function", "function": function}
    messages = [{"role": "user", "content": "x"}]
    form = {"name": "x", "schema": ODD, "strict": True}
    requests = [
        ("/v1/chat/completions", {"messages": messages, "tools": [chat], "tool_choice": choice}, "find_all"),
        ("/v1/responses",
         {"input": "x", "tools": [{"type": "function", **function}], "tool_choice": choice}, "find_all"),
        ("/v1/chat/completions",
         {"messages": messages, "response_format": {"type": "json_schema", "json_schema": form}}, "response_format"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", **form}}}, "format"),
    ]  # fmt: skip
    for path, body, where in requests:
        answer = http.post(path, json={"model": "tiny", **body})
        error = answer.json()["error"]
        assert answer.status_code == 400, (path, answer.text)
        assert where in f"{error['message']} {error['param']}", error
        assert "properties.a: uniqueItems" in error["message"], error
    held = {
        **function,
        "parameters": {"type": "object", "properties": {"a": {"not": {"const": 1}}}},
    }
    body = {
        "messages": messages,
        "tools": [{"type": "function", "function": held}],
        "max_tokens": 1,
    }
    assert http.post("/v1/chat/completions", json=body).status_code == 200
