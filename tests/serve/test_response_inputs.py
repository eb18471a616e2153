"""Histories of Responses as messages: which items are one message, and what they lack."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from max.serve.chat.conversation_text import SUMMARY
from max.serve.errors import ApiError
from max.serve.openai.responses.hosted_calls import function_items
from max.serve.openai.responses.input import items_of, messages_of, packed_summary
from max.serve.openai.responses.store import ResponseStore
from max.serve.openai.responses.stored import keeper
from max.serve.requests.request_context import current_request

ASK = {"role": "user", "content": "What is in it?"}


def call(number: int, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "look", "arguments": "{}", **more}  # fmt: skip


def thought(*texts: str) -> dict[str, Any]:
    parts = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "summary": [], "content": parts}


def function(number: int, name: str = "look", arguments: str = "{}") -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}  # fmt: skip


def test_a_text_is_a_message_of_the_user() -> None:
    assert messages_of("Hi") == [{"role": "user", "content": "Hi"}]
    assert items_of("Hi") == [{"type": "message", "role": "user", "content": "Hi"}]
    assert items_of([ASK]) == [ASK] == messages_of([ASK])


def test_calls_after_a_text_are_of_its_message() -> None:
    said = {"role": "assistant", "content": "I look."}
    result = {"type": "function_call_output", "call_id": "c1", "output": "a"}
    answered = {"role": "tool", "tool_call_id": "c1", "content": "a"}
    assert messages_of([ASK, said, call(1), call(2), result, call(3)]) == [
        ASK,
        {**said, "tool_calls": [function(1), function(2)]},
        answered,
        {"role": "assistant", "content": "", "tool_calls": [function(3)]},
    ]
    # calls at the begin, and after the user
    assert messages_of([call(1), ASK, call(2)]) == [
        {"role": "assistant", "content": "", "tool_calls": [function(1)]},
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [function(2)]},
    ]


def test_reasoning_belongs_to_what_follows() -> None:
    items = [thought("I", "see"), thought("more"), call(1), thought("then"), call(2), thought()]
    assert messages_of([ASK, *items, call(3)]) == [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [function(1)], "reasoning_content": "I\nsee\nmore"},
        {"role": "assistant", "content": "", "tool_calls": [function(2), function(3)], "reasoning_content": "then"},
    ]  # fmt: skip
    # none of the user, and not of a later answer
    said = {"role": "assistant", "content": "Done."}
    assert messages_of([thought("lost"), ASK, said]) == [ASK, said]
    other = {"type": "reasoning", "summary": [], "content": [{"text": 3}, 4, {"text": "t"}]}
    assert messages_of([other, said]) == [{**said, "reasoning_content": "t"}]
    for content in (None, []):
        assert messages_of([{"type": "reasoning", "content": content}, said]) == [said]
    with pytest.raises(
        ApiError, match="input.1.content is 'x'; expected a list of parts"
    ) as raised:
        messages_of([ASK, {"type": "reasoning", "content": "x"}])
    assert raised.value.param == "input.1.content"


def test_custom_tools_and_namespaces() -> None:
    custom = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'ö "x"'}
    parts = [{"type": "input_text", "text": "a"}]
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": parts}
    assert messages_of([custom, output, call(2, namespace="files")]) == [
        {"role": "assistant", "content": "", "tool_calls": [function(1, "patch", '{"input": "ö \\"x\\""}')]},
        {"role": "tool", "tool_call_id": "c1", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [function(2, "files.look")]},
    ]  # fmt: skip
    (message,) = messages_of([call(1, name=None), call(2, namespace="")])
    names = [each["function"]["name"] for each in message["tool_calls"]]
    assert names == [None, "look"]


def test_texts_of_parts() -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": "b"},
        {"type": "text", "text": "c"},
        {"type": "refusal", "refusal": "d"},
    ]
    assert messages_of([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb\nc\nd"}]  # fmt: skip
    for content, text in (
        ([{"type": "input_image", "text": "x"}], "a part of type 'input_image'"),
        ([parts[0], "b"], "a part of type None"),
        ([{"type": "input_text", "text": None}], "a part of type 'input_text'"),
        (None, "is None; expected a text"),
        ({"type": "input_text", "text": "a"}, "expected a text, or a list of parts"),
    ):
        with pytest.raises(ApiError, match=text) as raised:
            messages_of([ASK, {"type": "message", "role": "user", "content": content}])
        assert raised.value.param == "input.1.content"


def test_a_compaction_stands_for_answers_and_results() -> None:
    system = {"role": "system", "content": "Be brief."}
    developer = {"role": "developer", "content": "Be right."}
    result = {"type": "function_call_output", "call_id": "c1", "output": "a"}
    summary = {"type": "compaction", "encrypted_content": packed_summary("looked: ö")}
    last = {"role": "user", "content": "And now?"}
    said = {"role": "assistant", "content": "It is empty."}
    items = [system, ASK, call(1), result, said, developer, last, summary, said, ASK]
    text = f"What is in it?\n\nAnd now?\n\n{SUMMARY}looked: ö"
    assert messages_of(items) == [system, developer, {"role": "user", "content": text}, said, ASK]
    assert messages_of([summary]) == [{"role": "user", "content": f"{SUMMARY}looked: ö"}]


@pytest.mark.parametrize(
    "content",
    [
        None, "", "x", 3, base64.b64encode(b"\xff").decode(), base64.b64encode(b"{}").decode(),
        base64.b64encode(msgspec.json.encode("other:x")).decode(), packed_summary("x") + "?",
    ],
)  # fmt: skip
def test_summaries_of_others_are_refused(content: Any) -> None:
    with pytest.raises(
        ApiError, match="is not from /v1/responses/compact of this server"
    ) as raised:
        messages_of([ASK, {"type": "compaction", "encrypted_content": content}])
    assert raised.value.param == "input.1.encrypted_content"


def test_calls_that_others_run() -> None:
    search = {"type": "file_search_call", "id": "f", "queries": ["ö"], "results": []}
    assert function_items(search, "input.0") == [
        {"type": "function_call", "call_id": "f", "name": "file_search", "arguments": '{"queries": ["ö"]}'},
        {"type": "function_call_output", "call_id": "f", "output": "[]"},
    ]  # fmt: skip
    for remote, name, arguments, text in (
        ({"name": "look", "arguments": '{"a": 1}', "output": "x", "error": "y"}, "look", '{"a": 1}', "x"),
        ({"name": "", "arguments": "", "error": "failed"}, "mcp", "{}", "failed"),
        ({}, "mcp", "{}", ""),
        ({"name": "look", "error": {"code": "ö"}}, "look", "{}", '{"code": "ö"}'),
    ):  # fmt: skip
        called, wrote = function_items({"type": "mcp_call", "id": "m", **remote}, "input.0")
        assert (called["name"], called["arguments"], wrote["output"]) == (name, arguments, text)
        assert called["call_id"] == wrote["call_id"] == "m"
    shell = {"type": "shell_call", "id": "s", "call_id": "c", "action": {"commands": ["ö"]}}
    (called,) = function_items(shell, "input.0")
    assert called["call_id"] == "c" and json.loads(called["arguments"]) == {"commands": ["ö"]}
    assert "ö" in called["arguments"]


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("a", "a"),
        (None, "completed"),
        ([], ""),
        ([{"stdout": "a", "stderr": "b"}, {"stdout": None}], "a\nb"),
        ([{"stdout": "a", "outcome": {"type": "exit", "exit_code": 2}}], "a\nexit code 2"),
        ([{"outcome": {"type": "timeout", "exit_code": 2}}, {"outcome": "gone"}], "timeout"),
    ],
)
def test_what_shells_wrote(output: Any, text: str) -> None:
    item = {"type": "shell_call_output", "call_id": "c", "status": "completed", "output": output}
    assert function_items(item, "input.0") == [
        {"type": "function_call_output", "call_id": "c", "output": text}
    ]
    without = {"type": "shell_call_output", "call_id": "c"}
    assert function_items(without, "input.0")[0]["output"] == ""
    for wrong in (3, {"stdout": "a"}, ["a"], [{}, "a"]):
        with pytest.raises(ApiError, match="expected a text, or a list of objects") as raised:
            function_items({**without, "output": wrong}, "input.7")
        assert raised.value.param == "input.7.output"


def test_each_item_that_is_kept_has_an_identifier() -> None:
    """Clients send None for an identifier that they do not have."""
    state: Any = SimpleNamespace(responses=ResponseStore())
    items = [{**ASK, "id": "msg_1"}, {**ASK, "id": None}, {**ASK, "id": ""}, ASK]
    keeper(state, None, items)({"id": "resp_1", "output": []})
    kept = state.responses.find("resp_1", current_request().client)
    assert (
        kept is not None and [{**each, "id": 0} for each in kept.inputs] == [{**ASK, "id": 0}] * 4
    )
    identifiers = [each["id"] for each in kept.inputs]
    assert identifiers[0] == "msg_1" and len({*identifiers}) == 4
    assert all(isinstance(each, str) and each for each in identifiers)
