"""Responses that go on without their connection, by OpenAI's client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import httpx
import openai
import pytest

from max.serve.errors import ApiError
from max.serve.openai.responses import background
from max.serve.openai.responses.background import BackgroundResponse, BackgroundResponses
from max.serve.requests.request_context import CURRENT_REQUEST, RequestContext, current_request

OPTIONS: dict[str, Any] = {"model": "tiny", "temperature": 0, "background": True}
WAIT_S = 120.0


def until_ended(client: openai.OpenAI, identifier: str) -> Any:
    end = time.monotonic() + WAIT_S
    while (found := client.responses.retrieve(identifier)).status in ("queued", "in_progress"):
        assert found.background is True and time.monotonic() < end
        time.sleep(0.02)
    return found


def test_a_response_is_polled(client: openai.OpenAI) -> None:
    whole = client.responses.create(
        model="tiny", input="Hello!", temperature=0, max_output_tokens=8
    )
    begun = client.responses.create(input="Hello!", max_output_tokens=8, **OPTIONS)
    assert (begun.status, begun.output, begun.background) == ("queued", [], True)
    assert whole.background is False
    made = until_ended(client, begun.id)
    assert (made.status, made.output_text) == (whole.status, whole.output_text)
    assert made.usage.output_tokens == whole.usage.output_tokens
    # one that has ended stays as it is, and the next goes on with it
    assert client.responses.cancel(begun.id).status == whole.status
    following = client.responses.create(
        input="And?", previous_response_id=begun.id, max_output_tokens=4, **OPTIONS
    )
    assert until_ended(client, following.id).usage.input_tokens > made.usage.input_tokens
    client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)


def running(client: openai.OpenAI, http: httpx.Client) -> str:
    """A long response that runs; other answers may end by themselves before it is looked at."""
    body = {
        **OPTIONS,
        "input": "Hi",
        "temperature": 1.5,
        "max_output_tokens": 450,
        "tool_choice": "none",
    }
    return http.post("/v1/responses", json=body).json()["id"]


def test_a_response_is_cancelled(client: openai.OpenAI, http: httpx.Client) -> None:
    for _ in range(20):
        identifier = running(client, http)
        ended = client.responses.cancel(identifier)
        if ended.status == "cancelled":
            break
    assert ended.status == "cancelled" and ended.background is True
    assert client.responses.retrieve(identifier).status == "cancelled"
    assert http.get("/load").json() == {"server_load": 0}
    assert client.responses.cancel(identifier).status == "cancelled"
    # one that is deleted meanwhile does not come back
    identifier = running(client, http)
    client.responses.delete(identifier)
    time.sleep(0.2)
    assert http.get(f"/v1/responses/{identifier}").status_code == 404
    assert http.post(f"/v1/responses/{identifier}/cancel").status_code == 404


def test_a_stream_goes_on_after_its_connection(client: openai.OpenAI) -> None:
    options = {**OPTIONS, "input": "Count to ten", "max_output_tokens": 40}
    begun: list[Any] = []
    with client.responses.create(stream=True, **options) as stream:
        for event in stream:
            begun.append(event)
            if event.type == "response.output_text.delta":
                break
    assert [each.type for each in begun[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    identifier = begun[0].response.id
    rest = list(
        client.responses.retrieve(identifier, stream=True, starting_after=begun[-1].sequence_number)
    )
    numbers = [event.sequence_number for event in (*begun, *rest)]
    assert numbers == list(range(len(numbers)))
    ended = until_ended(client, identifier)
    assert rest[-1].response.id == identifier and rest[-1].type == f"response.{ended.status}"
    text = "".join(e.delta for e in (*begun, *rest) if e.type == "response.output_text.delta")
    assert text == ended.output_text
    again = list(client.responses.retrieve(identifier, stream=True))
    assert [event.sequence_number for event in again] == numbers


def test_what_is_refused(client: openai.OpenAI, http: httpx.Client) -> None:
    for field, value in (("store", False), ("temperature", 9), ("tools", [{"type": "function"}])):
        answer = http.post("/v1/responses", json={**OPTIONS, "input": "x", field: value})
        assert answer.status_code == 400 and field in answer.json()["error"]["param"], field
    whole = client.responses.create(model="tiny", input="Hello!", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError, match="not made in the background"):
        client.responses.cancel(whole.id)
    answer = http.get(f"/v1/responses/{whole.id}", params={"stream": True})
    assert answer.status_code == 400 and "no events" in answer.json()["error"]["message"]
    assert http.post("/v1/responses/resp_none/cancel").status_code == 404
    bad = http.get(f"/v1/responses/{whole.id}", params={"starting_after": -1})
    assert bad.status_code == 400


def test_responses_are_of_their_client_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "MOST_RUNNING_OF_CLIENT", 2)
    monkeypatch.setattr(background, "MOST_RESPONSES", 3)
    responses = BackgroundResponses()

    def add(name: str, client: str, status: str) -> BackgroundResponse:
        response = BackgroundResponse(client, lambda status: {"status": status})
        response.status = status
        responses._responses[name] = response
        return response

    first = add("1", "a", "queued")
    responses.check("a")
    add("2", "a", "in_progress")
    with pytest.raises(ApiError) as many:
        responses.check("a")
    assert many.value.status == 429
    responses.check("b")
    first.status = "completed"
    responses.check("a")
    assert responses.find("1", "b") is None and responses.find("1", "a") is first
    for name in ("3", "4"):
        add(name, "b", "in_progress")
    responses._trim()
    assert set(responses._responses) == {"2", "3", "4"}  # those that run stay
    add("5", "b", "failed").size = 1
    monkeypatch.setattr(background, "MOST_RESPONSES", 10)
    monkeypatch.setattr(background, "MOST_BYTES", 0)
    responses._trim()
    assert set(responses._responses) == {"2", "3", "4"}


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        CURRENT_REQUEST.set(RequestContext(client="a"))
        await asyncio.wait_for(test(), 20)

    asyncio.run(bounded())


def event(number: int) -> bytes:
    return f"event: x\ndata: {number}\n\n".encode()


def made(
    responses: BackgroundResponses, name: str, gate: asyncio.Event, fails: bool = False
) -> tuple[BackgroundResponse, list[dict[str, Any]], list[str]]:
    """A response of events of which the last ones wait for a gate, what is kept of it, and what it has released."""
    kept: list[dict[str, Any]] = []
    released: list[str] = []

    async def parts() -> AsyncGenerator[bytes, None]:
        yield event(0) + event(1) + b": a comment\n\n"
        await gate.wait()
        if fails:
            raise ApiError("no engine", status=503)
        yield event(2)
        for _ in range(5):  # those that read have the last event, and wait for the end
            await asyncio.sleep(0)

    response = BackgroundResponse("a", lambda status: {"status": status})
    current_request().cleanups.append(lambda: released.append(name))
    responses.begin(
        name, response, parts(), lambda error: f"data: {error.status}\n\n".encode(), kept.append
    )
    assert current_request().cleanups == []  # they are the response's now
    return response, kept, released


async def read(response: BackgroundResponse, after: int = -1) -> list[bytes]:
    return [data async for data in response.read(after)]


@pytest.mark.parametrize("fails", [False, True])
def test_events_are_read_at_any_time(fails: bool) -> None:
    async def test() -> None:
        responses, gate = BackgroundResponses(), asyncio.Event()
        response, kept, released = made(responses, "x", gate, fails)
        assert response.response() == {"status": "queued"} and not response.ended
        early = asyncio.ensure_future(read(response))
        later = asyncio.ensure_future(read(response, 1))
        for _ in range(5):
            await asyncio.sleep(0)
        assert response.response() == {"status": "in_progress"} and response.size == 2 * len(
            event(0)
        )
        assert not early.done() and not released
        last = b"data: 503\n\n" if fails else event(2)
        gate.set()
        assert await early == [event(0) + event(1), last] and await later == [last]
        assert await read(response, 0) == [event(1) + last] and await read(response, 2) == []
        await response.task  # type: ignore[misc]
        status = "failed" if fails else "completed"
        assert response.response() == {"status": status} and response.ended and released == ["x"]
        # its events' maker keeps what ends well
        assert kept == ([{"status": "failed"}] if fails else [])
        assert response.size == 2 * len(event(0)) + len(last)

    run(test)


def test_a_response_that_is_cancelled_is_kept_and_one_that_is_deleted_is_not() -> None:
    async def test() -> None:
        responses, gate = BackgroundResponses(), asyncio.Event()
        for deletes in (False, True):
            response, kept, released = made(responses, "x", gate)
            await asyncio.sleep(0)
            responses.delete("x", "b")  # of another client
            assert responses.find("x", "a") is response
            assert response.task is not None
            if deletes:
                responses.delete("x", "a")
                assert responses.find("x", "a") is None
            else:
                response.task.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
            assert response.task.done()
            assert response.status == "cancelled" and released == ["x"]
            assert kept == ([] if deletes else [{"status": "cancelled"}])
        ended = BackgroundResponse("a", lambda status: {"status": status})
        responses._responses["y"] = ended  # without a task
        responses.delete("y", "a")
        assert ended.is_deleted and responses.find("y", "a") is None

    run(test)


def test_the_oldest_that_have_ended_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        responses, gate = BackgroundResponses(), asyncio.Event()
        gate.set()
        size = 3 * len(event(0))
        monkeypatch.setattr(background, "MOST_BYTES", 2 * size)
        for name in "abcd":
            response, _, _ = made(responses, name, gate)
            await response.task  # type: ignore[misc]
        # two fit beside the one that begins
        assert list(responses._responses) == ["b", "c", "d"]
        monkeypatch.setattr(background, "MOST_BYTES", 1 << 20)
        monkeypatch.setattr(background, "MOST_RESPONSES", 2)
        responses._trim()
        assert list(responses._responses) == ["c", "d"]
        assert await read(responses._responses["d"]) == [event(0) + event(1) + event(2)]

    run(test)
