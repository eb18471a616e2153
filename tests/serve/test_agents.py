"""What agents send beyond plain conversations: choices of tools, tools that take a text, prefill, replies of tools."""

from __future__ import annotations

import json
import re

import anthropic
import httpx
import openai
import pytest

from tests.serve.test_tools import ASK

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
SHELL = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command."}}
CODE = {
    "type": "custom",
    "custom": {
        "name": "code",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-c]{3,5}"}},
    },
}
USER = {"role": "user", "content": "x"}


def post(http: httpx.Client, path: str, body: dict, status: int = 200, **headers: str):
    answer = http.post(path, json=body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_only_allowed_tools_are_called(http, mode) -> None:
    tools = [WEATHER, NOW]
    allowed = [{"type": "function", "function": {"name": "now"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    body = {
        "messages": ASK,
        "tools": tools,
        "tool_choice": choice,
        "max_tokens": 60,
        "seed": 1,
        "temperature": 2.0,
    }
    message = post(http, "/v1/chat/completions", body)["choices"][0]["message"]
    names = {call["function"]["name"] for call in message.get("tool_calls") or ()}
    assert names == ({"now"} if mode == "required" else names & {"now"})
    flat = [{**tool["function"], "type": "function"} for tool in tools]
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "now"}]}
    body = {
        "model": "tiny",
        "input": "x",
        "tools": flat,
        "tool_choice": choice,
        "max_output_tokens": 60,
    }
    items = post(http, "/v1/responses", body)["output"]
    assert {item["name"] for item in items if item["type"] == "function_call"} <= {"now"}
    wrong = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": "y"}}]},
    }
    error = post(
        http, "/v1/chat/completions", {"messages": ASK, "tools": tools, "tool_choice": wrong}, 400
    )
    assert error["error"]["param"] == "tool_choice"


def test_custom_tools_take_a_text(client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "messages": ASK, "tools": [SHELL, CODE], "max_tokens": 90, "seed": 4}
    choice = {"type": "custom", "custom": {"name": "code"}}
    answer = client.chat.completions.create(**ask, tool_choice=choice)  # type: ignore[call-overload]
    (call,) = answer.choices[0].message.tool_calls
    assert call.type == "custom" and call.custom.name == "code"
    assert re.fullmatch("[a-c]{3,5}", call.custom.input)
    stream = client.chat.completions.create(**ask, tool_choice=choice, stream=True)  # type: ignore[call-overload]
    pieces = [
        each.model_dump() for chunk in stream for each in chunk.choices[0].delta.tool_calls or ()
    ]
    assert pieces[0]["type"] == "custom" and pieces[0]["custom"]["name"] == "code"
    assert "".join(piece["custom"].get("input") or "" for piece in pieces) == call.custom.input
    history = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    assert client.chat.completions.create(model="tiny", messages=history, max_tokens=3)


def test_a_cut_input_of_a_custom_tool_is_what_came(client: openai.OpenAI) -> None:
    words = {"syntax": "regex", "definition": "([a-c]{3} ){40,}[.]"}
    tool = {
        "type": "custom",
        "custom": {"name": "code", "format": {"type": "grammar", "grammar": words}},
    }
    choice = {"type": "custom", "custom": {"name": "code"}}
    ask = {"model": "tiny", "messages": ASK, "tools": [tool], "max_tokens": 60, "seed": 4}
    (answer,) = client.chat.completions.create(**ask, tool_choice=choice).choices  # type: ignore[call-overload]
    assert answer.finish_reason == "length"
    (call,) = answer.message.tool_calls
    assert re.fullmatch("([a-c]{3} )+[a-c]{0,3}", call.custom.input)


def test_custom_tools_of_responses(client: openai.OpenAI) -> None:
    tools = [
        {
            "type": "custom",
            **CODE["custom"],
            "format": {"type": "grammar", "syntax": "regex", "definition": "[a-c]{3,5}"},
        }
    ]
    ask = {
        "model": "tiny",
        "input": "x",
        "tools": tools,
        "max_output_tokens": 90,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    answer = client.responses.create(**ask)
    call = next(item for item in answer.output if item.type == "custom_tool_call")
    assert call.name == "code" and re.fullmatch("[a-c]{3,5}", call.input)
    events = list(client.responses.create(**ask, stream=True))
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    done = [e.input for e in events if e.type == "response.custom_tool_call_input.done"]
    assert ["".join(deltas)] == done and re.fullmatch("[a-c]{3,5}", done[0])
    again = [
        USER,
        call.model_dump(exclude={"id", "status"}),
        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"},
    ]
    assert client.responses.create(model="tiny", input=again, max_output_tokens=3)


def test_an_answer_goes_on_with_the_last_message(http) -> None:
    """The prompt ends within the assistant's turn, so that its tokens are those of the two texts together."""
    prefix = "The capital of Norway"
    whole = {
        "messages": [*ASK, {"role": "assistant", "content": prefix}],
        "max_tokens": 4,
        "temperature": 0,
    }
    go_on = {"continue_final_message": True, "add_generation_prompt": False}
    chat = post(http, "/v1/chat/completions", {**whole, **go_on})
    text = chat["choices"][0]["message"]["content"]
    fresh = {"messages": ASK, "add_generation_prompt": True}
    prompt = post(http, "/apply-template", fresh)["prompt"] + prefix
    raw = post(http, "/v1/completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0})
    assert chat["usage"]["prompt_tokens"] == raw["usage"]["prompt_tokens"]
    assert raw["choices"][0]["text"] == text
    claude = {"model": "tiny", "messages": whole["messages"], "max_tokens": 4, "temperature": 0}
    message = post(http, "/v1/messages", claude)
    assert message["content"][0]["text"] == text
    counted = post(
        http, "/v1/messages/count_tokens", {"model": "tiny", "messages": whole["messages"]}
    )
    assert counted["input_tokens"] == raw["usage"]["prompt_tokens"]
    both = {**whole, "continue_final_message": True, "add_generation_prompt": True}
    assert (
        post(http, "/v1/chat/completions", both, 400)["error"]["param"] == "continue_final_message"
    )
    user = {"messages": ASK, "continue_final_message": True}
    assert (
        "no text of the assistant"
        in post(http, "/v1/chat/completions", user, 400)["error"]["message"]
    )


def call(identifier: str) -> dict:
    return {"id": identifier, "type": "function", "function": {"name": "now", "arguments": "{}"}}


def result(identifier: str) -> dict:
    return {"role": "tool", "tool_call_id": identifier, "content": "12:00"}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([USER, result("a")], "no message before it has such a call"),
        ([USER, {"role": "assistant", "tool_calls": [call("a")]}], "no result of it comes"),
        (
            [USER, {"role": "assistant", "tool_calls": [call("a"), call("b")]}, result("a"), USER],
            "'b'",
        ),
        ([USER, {"role": "assistant", "tool_calls": [call("a")]}, result("b")], "'b'"),
    ],
)
def test_calls_and_results_belong_together(http, messages, says) -> None:
    error = post(http, "/v1/chat/completions", {"messages": messages}, 400)["error"]
    assert says in error["message"], error


def test_calls_with_all_results_are_taken(http) -> None:
    calls = {"role": "assistant", "tool_calls": [call("a"), call("b")]}
    for messages in (
        [USER, calls, result("b"), result("a")],
        [USER, calls, result("a"), result("b"), USER],
    ):
        post(http, "/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    items = [USER, {"type": "function_call", "call_id": "a", "name": "now", "arguments": "{}"}]
    post(http, "/v1/responses", {"model": "tiny", "input": items}, 400)
    blocks = [{"type": "tool_use", "id": "t", "name": "now", "input": {}}]
    talk = [USER, {"role": "assistant", "content": blocks}]
    post(http, "/v1/messages", {"model": "tiny", "max_tokens": 2, "messages": talk}, 400)
    talk.append(
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]}
    )
    post(http, "/v1/messages", {"model": "tiny", "max_tokens": 2, "messages": talk})


def test_names_have_64_letters_at_most(http) -> None:
    for size, status in ((64, 200), (65, 400)):
        tool = {"type": "function", "function": {"name": "n" * size}}
        post(
            http,
            "/v1/chat/completions",
            {"messages": ASK, "tools": [tool], "max_tokens": 2},
            status,
        )
        claude = {
            "model": "tiny",
            "max_tokens": 2,
            "messages": ASK,
            "tools": [{"name": "n" * size, "input_schema": {}}],
        }
        post(http, "/v1/messages", claude, status)


def test_anthropic_clients_list_models_and_get_schemas(http) -> None:
    with anthropic.Anthropic(base_url=str(http.base_url), api_key="x", max_retries=0) as client:
        (model,) = client.models.list().data
        assert (model.id, model.type) == ("tiny", "model") and model.created_at.year > 2000
        assert client.models.retrieve("tiny").display_name == "tiny"
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.batches.list()
        assert caught.value.status_code == 501
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    form = {"type": "json_schema", "schema": schema}
    body = {"model": "tiny", "max_tokens": 40, "messages": ASK}
    for more in ({"output_format": form}, {"output_config": {"format": form, "effort": "low"}}):
        answer = post(http, "/v1/messages", {**body, **more})
        assert json.loads(answer["content"][0]["text"]) in ({"n": 1}, {"n": 2})


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/chat/completions", {"bad_words": ["a"]}, "bad_words"),
        ("/v1/completions", {"bad_words": ["a"]}, "bad_words"),
        ("/v1/chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        (
            "/v1/chat/completions",
            {"chat_template_kwargs": {"max_tokens": 3}},
            "chat_template_kwargs",
        ),
        (
            "/v1/chat/completions",
            {"chat_template_kwargs": {"truncation": True}},
            "chat_template_kwargs",
        ),
        ("/v1/chat/completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_fields_that_are_not_obeyed_are_errors(http, path, more, param) -> None:
    body = {
        "max_tokens": 2,
        **({"prompt": "x"} if path == "/v1/completions" else {"messages": ASK}),
        **more,
    }
    assert post(http, path, body, 400)["error"]["param"] == param


def test_unknown_variables_of_templates_are_taken(http) -> None:
    for more in ({"enable_thinking": False}, {"anything": 1}, {"reasoning_effort": "low"}):
        post(
            http,
            "/v1/chat/completions",
            {"messages": ASK, "max_tokens": 2, "chat_template_kwargs": more},
        )
    post(http, "/v1/chat/completions", {"messages": ASK, "max_tokens": 2, "bad_words": []})


def test_the_last_tokens_of_a_prompt(http) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "one two three four five six"}),
        ("/v1/chat/completions", {"messages": ASK}),
    ):
        usage = post(http, path, {**body, "max_tokens": 2, "truncate_prompt_tokens": 3})["usage"]
        assert usage["prompt_tokens"] == 3
    tokens = post(http, "/tokenize", {"content": "one two three four five six"})["tokens"][-3:]
    cut = {
        "prompt": "one two three four five six",
        "truncate_prompt_tokens": 3,
        "temperature": 0,
        "max_tokens": 5,
    }
    same = {"prompt": tokens, "temperature": 0, "max_tokens": 5}
    texts = [post(http, "/v1/completions", body)["choices"][0]["text"] for body in (cut, same)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_event_has_the_usage(http, path) -> None:
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": ASK}
    options = {"include_usage": True, "continuous_usage_stats": True}
    whole = {**body, "max_tokens": 6, "stream": True, "stream_options": options, "ignore_eos": True}
    lines = http.post(path, json=whole).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    counts = [each["usage"]["completion_tokens"] for each in events]
    assert counts == sorted(counts) and counts[-1] == 6 and len(set(counts)) > 1
    assert {each["usage"]["prompt_tokens"] for each in events} == {
        events[-1]["usage"]["prompt_tokens"]
    }


def test_log_probabilities_of_ollama(http) -> None:
    options = {"num_predict": 4, "temperature": 0}
    for path, more in (
        ("/api/chat", {"messages": ASK}),
        ("/api/generate", {"prompt": "x"}),
        ("/api/generate", {"prompt": "x", "raw": True}),
    ):
        body = {"model": "tiny", "options": options, "logprobs": True, "top_logprobs": 2, **more}
        whole = post(http, path, {**body, "stream": False})
        logs = whole["logprobs"]
        assert len(logs) == whole["eval_count"] and all(
            len(each["top_logprobs"]) == 2 for each in logs
        )
        lines = [json.loads(line) for line in http.post(path, json=body).text.splitlines()]
        assert [log["token"] for line in lines for log in line.get("logprobs", ())] == [
            log["token"] for log in logs
        ]
    post(http, "/api/generate", {"model": "tiny", "prompt": "x", "context": [1, 2]}, 400)
    post(http, "/api/generate", {"model": "tiny", "prompt": "x", "top_logprobs": 2}, 400)


def test_responses_go_on_with_earlier_ones(client: openai.OpenAI, http) -> None:
    options = {"model": "tiny", "temperature": 0, "max_output_tokens": 8}
    first = client.responses.create(**options, input="What is the capital of Norway?")
    assert first.store
    second = client.responses.create(
        **options, input="And of Italy?", previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    said = {"role": "assistant", "content": first.output_text}
    items = [
        {"role": "user", "content": "What is the capital of Norway?"},
        said,
        {"role": "user", "content": "And of Italy?"},
    ]
    whole = client.responses.create(**options, input=items, store=False)
    assert (whole.output_text, whole.usage.input_tokens) == (
        second.output_text,
        second.usage.input_tokens,
    )
    more = {**options, "input": "x", "previous_response_id": second.id}
    *_, last = client.responses.create(**more, stream=True)
    third = last.response
    assert client.responses.retrieve(third.id).output_text == third.output_text
    listed = client.responses.input_items.list(third.id, order="asc", limit=2)
    texts = [item.content[0].text for item in listed]
    assert texts == [
        items[0]["content"],
        first.output_text,
        items[2]["content"],
        second.output_text,
        "x",
    ]
    newest = client.responses.input_items.list(third.id, limit=1).data
    assert newest[0].content[0].text == "x"
    for identifier in (whole.id, "resp-unknown"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(identifier)
        with pytest.raises(openai.BadRequestError, match="is not kept"):
            client.responses.create(**options, input="x", previous_response_id=identifier)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert (
        client.responses.create(**options, input="y", previous_response_id=third.id).output_text
        is not None
    )
    body = {"model": "tiny", "input": "x", "background": True, "store": False}
    post(http, "/v1/responses", body, 400)


def test_responses_with_calls_go_on(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "name": "now", "parameters": {}}]
    options = {
        "model": "tiny",
        "tools": tools,
        "max_output_tokens": 40,
        "parallel_tool_calls": False,
    }
    first = client.responses.create(**options, input="x", tool_choice="required")
    call = next(item for item in first.output if item.type == "function_call")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
    second = client.responses.create(
        **options, input=[output], previous_response_id=first.id, tool_choice="none"
    )
    assert second.status in ("completed", "incomplete")
    with pytest.raises(openai.BadRequestError, match="no result of it"):
        client.responses.create(**options, input="y", previous_response_id=first.id)


@pytest.mark.parametrize("thinking", [None, {"type": "adaptive"}, {"type": "disabled"}])
def test_counted_tokens_are_those_of_the_prompt(http, thinking) -> None:
    """What Claude Code sends: headers of betas, tools, blocks with cache_control, effort and adaptive thinking."""
    block = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    body = {
        "model": "tiny",
        "system": [block],
        "messages": [{"role": "user", "content": [{**block, "text": "Hello"}]}],
        "tools": [
            {
                "name": "now",
                "description": "The time.",
                "input_schema": {"type": "object", "properties": {}},
            }
        ],
        "output_config": {"effort": "medium"},
        **({"thinking": thinking} if thinking else {}),
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,effort-2025-11-24",
    }
    counted = post(http, "/v1/messages/count_tokens", body, **headers)["input_tokens"]
    more = {"max_tokens": 3, "metadata": {"user_id": "x"}}
    usage = post(http, "/v1/messages?beta=true", {**body, **more}, **headers)["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_headers_and_fields_of_claude_code(http) -> None:
    """Beta headers, adaptive thinking and effort are accepted, and the count is that of the prompt."""
    text = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    options = {
        "model": "tiny", "messages": ASK, "system": text, "thinking": {"type": "adaptive"},
        "tools": [{"name": "now", "description": "The time.", "input_schema": {"type": "object", "properties": {}}}],
    }  # fmt: skip
    with anthropic.Anthropic(base_url=str(http.base_url), api_key="x", max_retries=0) as client:
        betas = ["interleaved-thinking-2025-05-14", "fine-grained-tool-streaming-2025-05-14"]
        effort = {"output_config": {"effort": "low"}}
        counted = client.beta.messages.count_tokens(**options, betas=betas, extra_body=effort)
        answer = client.beta.messages.create(
            **options, max_tokens=4, betas=betas, extra_body=effort
        )
        usage = answer.usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        with client.beta.messages.stream(**options, max_tokens=4, betas=betas) as stream:
            kinds = [event.type for event in stream]
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
