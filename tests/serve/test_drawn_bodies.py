"""Bodies with one odd value: on no API an error of the server, and what a model is not shown is said."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import httpx
import pytest

ODD: list[Any] = [
    None, True, 1.5, "", "x", [], [3], {"a": None}, [{"type": "text"}], [{"type": "text", "text": 3}],
]  # fmt: skip
TOOL = {"name": "f", "input_schema": {}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
    {"type": "reasoning", "summary": [], "content": []},
    {"type": "compaction", "encrypted_content": "x"},
]
BLOCKS: list[dict[str, Any]] = [
    {"type": "text", "text": "x", "cache_control": {}},
    {"type": "thinking", "thinking": "a", "signature": "b"},
    {"type": "redacted_thinking", "data": "a"},
    {"type": "tool_use", "id": "t", "name": "f", "input": {}},
    {"type": "tool_result", "tool_use_id": "t", "content": "x"},
    {"type": "document", "source": {"type": "text", "data": "d"}, "title": "t", "citations": {}},
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "x"}]},
    {"role": "assistant", "content": "a", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "x"},
]


def odd_bodies(kind: str) -> list[tuple[str, dict[str, Any]]]:
    """Bodies of an API for routes that generate nothing."""
    found: list[tuple[str, dict[str, Any]]] = []
    given = {"responses": ITEMS, "anthropic": BLOCKS, "chat": MESSAGES}[kind]
    for item, value in itertools.product(given, ODD):
        for field in dict.fromkeys([*item, "type", "role", "content", "name"]):
            odd = {**copy.deepcopy(item), field: value}
            match kind:
                case "responses":
                    body = {"input": [{"role": "user", "content": "a"}, odd]}
                    found.append(("/v1/responses/input_tokens", body))
                case "anthropic":
                    role = "assistant" if item["type"] in ("thinking", "tool_use") else "user"
                    body = {"messages": [{"role": role, "content": [odd]}], "tools": [TOOL]}
                    found.append(("/v1/messages/count_tokens", body))
                case _:
                    found.append(("/apply-template", {"messages": [MESSAGES[0], odd]}))
    return found


@pytest.mark.parametrize("kind", ["responses", "anthropic", "chat"])
def test_an_odd_value_is_no_error_of_the_server(http: httpx.Client, kind: str) -> None:
    statuses: set[int] = set()
    for path, body in odd_bodies(kind):
        answer = http.post(path, json=body)
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400), (body, answer.text)
    assert statuses == {200, 400}


def test_a_summary_of_an_odd_role_is_an_error_of_the_request(http: httpx.Client) -> None:
    for role in ({"a": 1}, ["user"], 3):
        body = {"model": "tiny", "input": [{"role": role, "content": "x"}]}
        error = http.post("/v1/responses/compact", json=body)
        assert error.status_code == 400 and "role" in error.json()["error"]["message"]


def count(http: httpx.Client, *blocks: dict[str, Any], role: str = "user") -> httpx.Response:
    messages = [{"role": "user", "content": "x"}, {"role": role, "content": list(blocks)}]
    return http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": messages})


def test_documents_of_text_are_shown_to_the_model(http: httpx.Client) -> None:
    text = "The harbor of Oslo opens at nine."
    source = {"type": "text", "media_type": "text/plain", "data": text}
    plain = count(http, {"type": "text", "text": f"Harbors\nfrom a guide\n{text}"})
    document = {"type": "document", "source": source, "title": "Harbors", "context": "from a guide"}
    assert count(http, document).json() == plain.json()
    parts = {"type": "content", "content": [{"type": "text", "text": text}]}
    assert count(http, {**document, "source": parts}).json() == plain.json()
    for wrong in (
        {**document, "citations": {"enabled": True}},
        {**document, "source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}},
        {**document, "source": {"type": "url", "url": "http://127.0.0.1/a"}},
        {"type": "document"},
    ):
        error = count(http, wrong)
        assert error.status_code == 400 and "document" in error.json()["error"]["message"], wrong
    assert count(http, {**document, "citations": {"enabled": False}}).status_code == 200


def test_a_message_of_reasoning_alone_is_kept(http: httpx.Client) -> None:
    """It may be the last one, which an answer goes on with."""
    thinking = {"type": "thinking", "thinking": "hm", "signature": ""}
    assert count(http, thinking, role="assistant").status_code == 200
    alone = {"model": "tiny", "messages": [{"role": "assistant", "content": []}]}
    error = http.post("/v1/messages/count_tokens", json=alone)
    assert error.status_code == 400 and error.json()["type"] == "error"
