"""Events of responses against the types of OpenAI's client, and shortened conversations."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from max.serve.anthropic import messages as anthropic_messages
from max.serve.errors import ApiError
from max.serve.http import streaming
from max.serve.openai.responses.body import ResponsesBody
from max.serve.openai.responses.events import ResponseWriter
from max.serve.openai.responses.input import messages_of, packed_summary
from max.serve.requests.parts import ArgumentsPart, ContentPart, ReasoningPart, ToolCallPart
from tests.serve.test_waiting_streams import SHORT_S, _Client

EVENTS = TypeAdapter(ResponseStreamEvent)
OPEN_RESPONSES = {
    "error", "response.created", "response.queued", "response.in_progress", "response.completed",
    "response.failed", "response.incomplete", "response.output_item.added", "response.output_item.done",
    "response.content_part.added", "response.content_part.done", "response.output_text.delta",
    "response.output_text.done", "response.function_call_arguments.delta",
    "response.function_call_arguments.done", "response.reasoning_text.delta", "response.reasoning_text.done",
    "response.reasoning_summary_part.added", "response.reasoning_summary_part.done",
    "response.reasoning_summary_text.delta", "response.reasoning_summary_text.done",
}  # fmt: skip
"""The events of Open Responses but those of refusals and annotations, which no model here writes."""


def writer_of(**fields: Any) -> ResponseWriter:
    body = ResponsesBody(**{"input": "x", **fields})
    job = SimpleNamespace(
        prompt_tokens=3, custom_tools=frozenset(), model=SimpleNamespace(name="m")
    )
    return ResponseWriter(body, job)  # type: ignore[arg-type]


def events_in(data: bytes) -> list[dict[str, Any]]:
    lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines]


def write(writer: ResponseWriter, finish_reason: str = "stop") -> bytes:
    data = writer.begin()
    parts = [
        ReasoningPart("because "), ReasoningPart("so"), ContentPart("An "), ContentPart("answer"),
        ToolCallPart(0, "call_1", "now"), ArgumentsPart(0, '{"a":'), ArgumentsPart(0, "1}"),
    ]  # fmt: skip
    data += b"".join(map(writer.write, parts)) + writer.end_item(finish_reason)
    response = writer.response(finish_reason, 7)
    return data + writer.event(f"response.{response['status']}", response=response)


def test_events_are_those_of_open_responses() -> None:
    seen: set[str] = set()
    streams = [
        write(writer_of()),
        write(writer_of(reasoning={"summary": "auto"}), "length"),
        (waits := writer_of()).waiting() + waits.waiting() + write(waits),
        writer_of().error_event(ApiError("no", code="a", param="b")),
        (fails := writer_of()).begin() + fails.error_event(ApiError("no", status=503, code="full")),
    ]
    for data in streams:
        events = events_in(data)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        for event in events:
            parsed = EVENTS.validate_python(event)
            assert parsed.type == event["type"]
            seen.add(event["type"])
    assert seen == OPEN_RESPONSES
    texts = [
        event["delta"] for event in events_in(streams[1]) if "summary_text.delta" in event["type"]
    ]
    assert texts == ["because ", "so"]
    final = events_in(streams[1])[-1]["response"]
    assert final["status"] == "incomplete"
    assert final["output"][0]["summary"] == [{"type": "summary_text", "text": "because so"}]
    kinds = [event["type"] for event in events_in(streams[2])]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds.count("response.created") == 1
    failed = events_in(streams[4])[-1]["response"]
    assert failed["status"] == "failed" and failed["error"] == {
        "code": "server_error",
        "message": "no",
    }


@pytest.mark.parametrize("api", ["responses", "anthropic"])
def test_streams_that_wait_say_so(monkeypatch, api: str) -> None:
    """A long prompt: events come before the first token, and not only comments."""
    import asyncio

    from starlette.requests import Request

    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", SHORT_S)
    waiting = writer_of().waiting if api == "responses" else anthropic_messages._ping
    expected = b"event: response.queued" if api == "responses" else b"event: ping"

    async def run() -> list[bytes]:
        client, go = _Client(), asyncio.Event()

        async def events():
            await go.wait()
            yield b"first"

        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "state": {}}
        response = await streaming.event_stream(
            Request(scope, client.receive), events(), lambda error: b"", waiting=waiting
        )
        sending = asyncio.ensure_future(response(scope, client.receive, client.send))
        while len(client.sent) < 4:
            await asyncio.sleep(SHORT_S / 4)
        go.set()
        await sending
        return client.sent

    sent = asyncio.run(run())
    assert expected in sent[1] and b"first" in sent
    later = sent[2 : sent.index(b"first")]
    assert later and all(
        each == (b": waiting\n\n" if api == "responses" else sent[1]) for each in later
    )


def test_a_conversation_is_shortened(client: openai.OpenAI, http) -> None:
    items = [
        {"role": "user", "content": "What is the capital of Norway?"},
        {"role": "assistant", "content": "The capital of Norway is Oslo."},
        {"role": "user", "content": "And of Italy?"},
    ]
    short = client.responses.compact(model="tiny", input=items)
    assert short.object == "response.compaction" and short.usage.output_tokens > 0
    *messages, summary = short.output
    assert [m.content[0].text for m in messages] == [items[0]["content"], items[2]["content"]]
    assert summary.type == "compaction" and summary.encrypted_content
    again = [item.model_dump(exclude_none=True, warnings=False) for item in short.output]
    answer = client.responses.create(
        model="tiny", input=[*again, {"role": "user", "content": "Go on."}], max_output_tokens=4
    )
    assert answer.usage.input_tokens > 10
    kept = client.responses.create(model="tiny", input="What is 1 and 1?", max_output_tokens=4)
    from_kept = client.responses.compact(model="tiny", previous_response_id=kept.id)
    assert from_kept.output[0].content[0].text == "What is 1 and 1?"
    for body, param in (
        ({"model": "tiny"}, "input"),
        (
            {"model": "tiny", "input": [{"type": "compaction", "encrypted_content": "x"}]},
            "input.0.encrypted_content",
        ),
    ):
        error = http.post("/v1/responses/compact", json=body)
        assert error.status_code == 400 and error.json()["error"]["param"] == param


def test_the_messages_of_the_user_and_a_summary_are_one() -> None:
    items = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"type": "compaction", "encrypted_content": packed_summary("done: ö")},
        {"role": "assistant", "content": "c"},
    ]
    system, user, said = messages_of(items)
    assert (system["content"], said["content"]) == ("s", "c")
    assert (
        user["role"] == "user"
        and user["content"].startswith("a\n\nb\n\n")
        and user["content"].endswith("done: ö")
    )
    thought = {
        "type": "reasoning",
        "id": "r",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "t"}],
    }
    (asked, answered) = messages_of(
        [{"role": "user", "content": "q"}, thought, {"role": "assistant", "content": "d"}]
    )
    assert answered["reasoning_content"] == "t" and "reasoning_content" not in asked
