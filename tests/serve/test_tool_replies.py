"""Calls of tools and their results in conversations, on all APIs; calls that a stop text cuts."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from max.serve.chat.replies import check_replies
from max.serve.errors import ApiError

USER = {"role": "user", "content": "What time is it?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
        },
    },
}


def calls(*names: str | None) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {}, **({"id": name} if name else {})} for name in names],
    }


def result(name: str | None) -> dict[str, Any]:
    return {"role": "tool", "content": "x", **({"tool_call_id": name} if name else {})}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([USER, result(None)], "messages.1 is the result of a tool, and no call"),
        ([calls(None, None), result(None), USER], "messages.0 has a tool call, and no result"),
        ([calls(None), result(None), result(None)], "messages.2 is the result of a tool"),
        ([calls("a", "b"), result(None)], "messages.0 has the tool call 'b'"),
        ([calls("a", None), result("a")], "messages.0 has a tool call"),
        ([calls("a"), result("a"), result("b")], "the tool call 'b'"),
    ],
)
def test_what_does_not_belong_together(messages: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ApiError, match=says):
        check_replies(messages)
    with pytest.raises(ApiError, match="^input: a message ") as caught:
        check_replies(messages, "input")
    assert caught.value.param == "input"


def test_what_belongs_together() -> None:
    draw = random.Random(3)
    for _ in range(100):
        messages: list[dict[str, Any]] = []
        for turn in range(draw.randint(1, 4)):
            names = [f"{turn}-{i}" if draw.random() < 0.5 else None for i in range(3)]
            # an identifier in a result may also stand for a call without one
            replies = [name or draw.choice([None, "of the client"]) for name in names]
            draw.shuffle(replies)
            messages += [USER, calls(*names), *map(result, replies)]
        check_replies(messages)
        last = messages.pop()
        with pytest.raises(ApiError, match="no result of it"):
            check_replies(messages)
        with pytest.raises(ApiError, match="is the result of"):
            check_replies([*messages, last, result(None)])
    check_replies([calls("a", "a"), result("a"), result("a")])


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/responses", {"input": [USER, {"type": "function_call", "call_id": "c", "name": "x", "arguments": "{}"}]},
         "input"),
        ("/v1/messages", {"max_tokens": 5, "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "tool_use", "id": f"t{i}", "name": "x", "input": {}}
                                              for i in range(2)]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "y"}]},
        ]}, "t0"),
        ("/api/chat", {"stream": False, "messages": [
            USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}] * 2},
            {"role": "tool", "content": "r", "tool_name": "f"},
        ]}, "tool call"),
        ("/api/chat", {"stream": False, "messages": [USER, {"role": "tool", "content": "r"}]}, "tool"),
    ],
)  # fmt: skip
def test_all_apis_want_whole_replies(http, path: str, body: dict[str, Any], name: str) -> None:
    answer = http.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 400 and name in answer.text, answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_stop_text_cuts_is_no_call_to_run(http, stream: bool) -> None:
    body = {"model": "tiny", "messages": [USER], "tools": [TOOL], "tool_choice": "required", "max_tokens": 120,
            "temperature": 0, "parallel_tool_calls": False, "stream": stream}  # fmt: skip

    def ends(stop: str) -> tuple[str, str]:
        text = http.post("/v1/chat/completions", json={**body, "stop": [stop]}).text
        lines = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        choices = [each["choices"][0] for each in lines or [json.loads(text)]]
        shown = [choice.get("message") or choice["delta"] for choice in choices]
        arguments = [call["function"].get("arguments") or ""
                     for each in shown for call in each.get("tool_calls") or ()]  # fmt: skip
        return choices[-1]["finish_reason"], "".join(arguments)

    reason, arguments = ends("city")
    assert reason == "stop" and "city" not in arguments
    reason, arguments = ends("there is no such text")
    assert reason == "tool_calls" and list(json.loads(arguments)) == ["city"]
    # the end of the call itself
    assert ends("</tool_call>")[0] == "tool_calls"
