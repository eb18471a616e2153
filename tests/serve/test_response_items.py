"""Items of histories of other servers, references to items that are kept, and log-probabilities of responses."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from max.serve.errors import ApiError
from max.serve.openai.messages import plain_messages
from max.serve.openai.responses.input import messages_of
from max.serve.openai.responses.store import ResponseStore, StoredResponse

ASK = {"role": "user", "content": "What is the capital of Norway?"}
SHELL = {
    "type": "shell_call",
    "call_id": "c1",
    "action": {"commands": ["ls"]},
    "status": "completed",
}
WROTE = {
    "type": "shell_call_output",
    "call_id": "c1",
    "output": [
        {"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
        {"stdout": "", "stderr": "slow", "outcome": {"type": "timeout"}},
    ],
}  # fmt: skip
PATCH = {
    "type": "apply_patch_call",
    "call_id": "p",
    "operation": {"type": "delete_file", "path": "a"},
}


def called(items: list[dict[str, Any]]) -> list[tuple[str, Any, str]]:
    """The name, the arguments and the result of each call."""
    messages = messages_of(items)
    calls = [call for each in messages for call in each.get("tool_calls", ())]
    results = {each["tool_call_id"]: each["content"] for each in messages if each["role"] == "tool"}
    return [
        (
            call["function"]["name"],
            json.loads(call["function"]["arguments"]),
            results.pop(call["id"]),
        )
        for call in calls
    ]


def test_calls_of_shells_and_patches() -> None:
    local = {
        "type": "local_shell_call",
        "id": "i",
        "call_id": "l",
        "action": {"type": "exec", "command": ["pwd"]},
    }
    # their outputs name the call by `id`
    where = {"type": "local_shell_call_output", "id": "l", "output": "/home"}
    done = {"type": "apply_patch_call_output", "call_id": "p", "status": "failed"}
    assert called([ASK, SHELL, PATCH, WROTE, done, local, where]) == [
        ("shell", {"commands": ["ls"]}, "a.txt\nexit code 0\nslow\ntimeout"),
        ("apply_patch", {"type": "delete_file", "path": "a"}, "failed"),
        ("local_shell", {"type": "exec", "command": ["pwd"]}, "/home"),
    ]
    # a result of a function, as Codex sends it
    output = {"type": "function_call_output", "call_id": "c1", "output": "ok"}
    assert called([SHELL, output]) == [("shell", {"commands": ["ls"]}, "ok")]


def test_calls_with_their_results() -> None:
    items = [
        {"type": "mcp_call", "id": "m", "name": "look", "arguments": '{"a": 1}', "output": "x"},
        {"type": "code_interpreter_call", "id": "k", "code": "1+1", "outputs": [{"type": "logs", "logs": "2"}]},
        {"type": "file_search_call", "id": "f", "queries": ["q"], "results": [{"text": "r"}]},
    ]  # fmt: skip
    assert called([ASK, *items]) == [
        ("look", {"a": 1}, "x"),
        ("code_interpreter", {"code": "1+1"}, '[{"type": "logs", "logs": "2"}]'),
        ("file_search", {"queries": ["q"]}, '[{"text": "r"}]'),
    ]


def test_searches_without_text_are_skipped() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]}
    skipped = [
        {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "q"}},
        {"type": "file_search_call", "id": "f", "queries": ["q"], "results": None},
        {"type": "mcp_list_tools", "tools": []},
    ]
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert messages_of([ASK, thought, *skipped, said]) == [
        ASK,
        {"role": "assistant", "content": "No.", "reasoning_content": "t"},
    ]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({**SHELL, "action": "ls"}, "input.0.action"),
        ({"type": "apply_patch_call", "call_id": "p"}, "input.0.operation"),
        ({**WROTE, "output": ["x"]}, "input.0.output"),
        ({"type": "computer_call", "call_id": "c"}, "input.0.type"),
        ({"type": ["x"]}, "input.0.type"),
        ({"role": "user", "content": [{"type": ["x"]}]}, "input.0.content"),
        ({"role": "user", "content": [{"type": "refusal", "text": "x"}]}, "input.0.content"),
    ],
)
def test_items_that_lack_a_field(item: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        messages_of([item])
    assert caught.value.param == param


def test_refusals_in_chats_are_texts() -> None:
    refused = {"role": "assistant", "refusal": "No.", "content": None}
    parts = [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "Sorry."}]
    answered = {"role": "assistant", "content": "Yes.", "refusal": None}
    found = plain_messages([refused, {"role": "assistant", "content": parts}, answered])  # type: ignore[list-item]
    assert found == [
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": [{"type": "text", "text": "No."}, parts[1]]},
        {"role": "assistant", "content": "Yes."},
    ]


def test_histories_are_answered(http, client: openai.OpenAI) -> None:
    answer = http.post(
        "/v1/responses",
        json={"model": "tiny", "input": [SHELL, PATCH, WROTE, {**WROTE, "type": "apply_patch_call_output",
                                                               "call_id": "p"}, ASK], "max_output_tokens": 16},
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    messages: list[Any] = [
        ASK,
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        ASK,
    ]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
    assert chat.choices[0].message.content


def test_references_to_items(http) -> None:
    def post(items: list[Any], path: str = "", **more: Any) -> Any:
        body = {"model": "tiny", "input": items, **more}
        return http.post(f"/v1/responses{path}", json=body)

    limits = {"max_output_tokens": 16, "temperature": 0}
    first = post([ASK], **limits).json()
    (said,) = first["output"]
    listed = http.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    again = {"role": "user", "content": "And of Italy?"}
    whole = post([ASK, said, again], **limits).json()
    for reference in ({"type": "item_reference"}, {}):
        ids = [{**reference, "id": each["id"]} for each in (*listed, said)]
        by_name = post([*ids, again], **limits).json()
        assert by_name["output"][0]["content"] == whole["output"][0]["content"]
        assert by_name["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        counted = post([*ids, again], "/input_tokens").json()
        assert counted["input_tokens"] == whole["usage"]["input_tokens"]
    # the items of a response with references are those of its input
    follows = post([again], previous_response_id=by_name["id"], **limits)
    assert follows.status_code == 200
    for ids, why in (
        (["msg-no"], "no such item"),
        ([said["id"]] * 2, "given twice"),
        ([5], "no such item"),
    ):
        refused = post([*({"type": "item_reference", "id": each} for each in ids), again])
        assert refused.status_code == 400 and why in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == f"input.{len(ids) - 1}.id"


def test_items_are_found_while_they_are_kept() -> None:
    store = ResponseStore(most_bytes=100)

    def stored(client: str, *items: dict[str, Any]) -> StoredResponse:
        return StoredResponse(client, None, items, {"output": [{"id": "shared", "of": client}]}, 40)

    store.put("a", stored("x", {"id": "one"}))
    store.put("b", stored("y", {"id": 5}, {}))
    assert store.find_item("one", "x") == {"id": "one"} and store.find_item("one", "y") is None
    assert store.find_item("shared", "y") == {"id": "shared", "of": "y"}
    store.put("c", stored("x", {"id": "two"}))
    # the oldest was dropped; its name is also that of a newer item
    assert store.find_item("one", "x") is None and store.find_item("shared", "x") is not None
    assert store.delete("c", "x") and store.find_item("two", "x") is None
    assert store.find_item("shared", "x") is None


@pytest.mark.parametrize(
    "more", [{"top_logprobs": 3}, {"include": ["message.output_text.logprobs"]}]
)
def test_log_probabilities_of_responses(http, client: openai.OpenAI, more: dict[str, Any]) -> None:
    body = {"model": "tiny", "max_output_tokens": 16, "temperature": 0, **more}
    (item,) = http.post("/v1/responses", json={**body, "input": [ASK]}).json()["output"]
    (part,) = item["content"]
    chat = client.chat.completions.create(
        model="tiny", messages=[ASK], max_tokens=16, temperature=0, logprobs=True,
        top_logprobs=more.get("top_logprobs", 0),
    ).choices[0]  # fmt: skip
    assert chat.logprobs is not None and chat.logprobs.content
    expected = [each.model_dump() for each in chat.logprobs.content]
    assert part["text"] == chat.message.content

    def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
        """The last bits depend on how much of the prompt is cached."""
        names = [
            ([each["token"], *(top["token"] for top in each["top_logprobs"])]) for each in found
        ]
        values = [
            [each["logprob"], *(t["logprob"] for t in each["top_logprobs"])] for each in found
        ]
        for each, token, numbers in zip(wanted, names, values, strict=True):
            assert token == [each["token"], *(top["token"] for top in each["top_logprobs"])]
            tops = (top["logprob"] for top in each["top_logprobs"])
            assert numbers == pytest.approx([each["logprob"], *tops], abs=1e-3)

    logs = part["logprobs"]
    same(logs, expected[: len(logs)])
    assert "".join(each["token"] for each in logs).startswith(part["text"])
    with client.responses.stream(input=[ASK], **body) as stream:  # type: ignore[call-overload]
        events = list(stream)
        final = stream.get_final_response()
    streamed = [
        log.model_dump()
        for event in events
        if event.type == "response.output_text.delta"
        for log in event.logprobs
    ]
    same(streamed, logs)
    same(final.output[0].model_dump()["content"][0]["logprobs"], logs)
    assert final.top_logprobs == more.get("top_logprobs", 0)
