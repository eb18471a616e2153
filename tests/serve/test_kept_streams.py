"""Answers that outlive their connection: read again by their identifiers, stopped, bounded, apart by client."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from max.serve.errors import ApiError
from max.serve.http import kept_streams
from max.serve.http.kept_streams import KeptStream, KeptStreams, StreamKeeper
from max.serve.http.streaming import BODY_SEND
from max.serve.requests.request_context import CURRENT_REQUEST, RequestContext, current_request

ID = "a-stream-of-a-test"
BODY = {
    "messages": [{"role": "user", "content": "Tell a story about Norway."}],
    "max_tokens": 120, "temperature": 1, "seed": 3, "ignore_eos": True, "stream": True,
}  # fmt: skip


def test_a_stream_is_read_again(http: httpx.Client) -> None:
    header = {"X-Stream-Id": ID}
    whole = http.post("/v1/chat/completions", json=BODY).text
    with http.stream("POST", "/v1/chat/completions", json=BODY, headers=header) as response:
        begin = next(response.iter_raw())
    # the connection is closed, the answer goes on
    for _ in range(2):
        again = http.get(f"/v1/streams/{ID}")
        assert again.headers["content-type"].startswith("text/event-stream")
        assert again.content.startswith(begin)
        assert _texts(again.text) == _texts(whole) and again.text.endswith("data: [DONE]\n\n")
    used = http.post("/v1/chat/completions", json=BODY, headers=header)
    assert used.status_code == 409
    assert http.delete(f"/v1/streams/{ID}").json()["deleted"] is True
    gone = http.get(f"/v1/streams/{ID}")
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "stream_not_found"
    assert http.delete(f"/v1/streams/{ID}").status_code == 404


def test_a_stream_is_stopped(http: httpx.Client) -> None:
    header = {"X-Stream-Id": f"{ID}-2"}
    body = {**BODY, "max_tokens": 400}
    with http.stream("POST", "/v1/chat/completions", json=body, headers=header) as response:
        lines = response.iter_lines()
        next(lines)
        assert http.delete(f"/v1/streams/{ID}-2").status_code == 200
        rest = list(lines)
    assert "data: [DONE]" not in rest
    for _ in range(100):
        if http.get("/load").json()["server_load"] == 0:
            break
    assert http.get("/load").json()["server_load"] == 0


def test_whole_answers_and_errors_are_kept(http: httpx.Client) -> None:
    answer = http.post(
        "/v1/chat/completions", json={**BODY, "stream": False}, headers={"X-Stream-Id": f"{ID}-3"}
    )
    again = http.get(f"/v1/streams/{ID}-3")
    assert again.json() == answer.json() and again.headers["content-type"] == "application/json"
    wrong = http.post(
        "/v1/chat/completions", json={**BODY, "top_p": 7}, headers={"X-Stream-Id": f"{ID}-4"}
    )
    again = http.get(f"/v1/streams/{ID}-4")
    assert (
        (again.status_code, again.json())
        == (wrong.status_code, wrong.json())
        == (400, wrong.json())
    )
    for bad in ("short", "a" * 65, "with a space in it", "ü" * 20):
        header = {"X-Stream-Id": bad.encode()}
        refused = http.post("/v1/chat/completions", json=BODY, headers=header)
        assert refused.status_code == 400 and "16 to 64" in refused.json()["error"]["message"]


def _texts(stream: str) -> list[str]:
    """The events of a stream without identifiers and times."""
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return [
        "".join(choice["delta"].get("content", "") for each in events for choice in each["choices"])
    ]


class _Client:
    """A connection to an application without a network.

    Args:
        app: The application.
        client: Who asks.
        identifier: The header.
    """

    def __init__(self, app: Any, client: str = "a", identifier: str = ID) -> None:
        self.sent: list[Message] = []
        self.left = asyncio.Event()
        self._body_read = False
        scope = {
            "type": "http", "method": "POST", "path": "/", "headers": [(b"x-stream-id", identifier.encode())],
            "state": {},
        }  # fmt: skip

        async def run() -> None:
            CURRENT_REQUEST.set(RequestContext(client=client, receive=self.receive))
            await app(scope, self.receive, self.send)

        self.task = asyncio.ensure_future(run())

    async def receive(self) -> Message:
        if not self._body_read:
            self._body_read = True
            return {"type": "http.request", "body": b"{}", "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(each.get("body", b"") for each in self.sent)


def _app(
    streams: KeptStreams, parts: list[bytes], gate: asyncio.Event | None = None
) -> StreamKeeper:
    """Sends parts, the last ones after a gate is open; ends when its client leaves."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

        async def produce() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for number, part in enumerate(parts):
                if gate is not None and number == 1:
                    await gate.wait()
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.ensure_future(produce()), asyncio.ensure_future(left())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert not any(isinstance(each, TypeError) for each in results)

    return StreamKeeper(app, streams)


def _run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(bounded())


async def _settled(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def _body(stream: KeptStream) -> bytes:
    return b"".join([part async for part in stream.body()])


@pytest.mark.parametrize("seed", range(5))
def test_readers_at_any_time_get_the_whole(seed: int) -> None:
    async def test() -> None:
        draw = random.Random(seed)
        parts = [draw.randbytes(draw.randrange(1, 50)) for _ in range(30)]
        streams, gate = KeptStreams(), asyncio.Event()
        client = _Client(_app(streams, parts, gate))
        await _settled(lambda: len(client.sent) == 2)
        stream = streams.find(ID, "a")
        readers: list[Awaitable[bytes]] = [asyncio.ensure_future(_body(stream))]
        if draw.random() < 0.7:
            client.left.set()
        gate.set()
        for _ in range(draw.randrange(5)):
            await asyncio.sleep(0)
            readers.append(asyncio.ensure_future(_body(stream)))
        assert set(await asyncio.gather(*readers)) == {b"".join(parts)}
        await client.task
        assert stream.ended and await _body(stream) == b"".join(parts)
        if not client.left.is_set():
            assert client.body == b"".join(parts)
        with pytest.raises(ApiError):
            streams.find(ID, "b")

    _run(test)


def test_an_answer_that_nobody_reads_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_streams, "ABANDONED_S", 0.05)
    monkeypatch.setattr(kept_streams, "KEPT_S", 0.05)

    async def test() -> None:
        streams, gate = KeptStreams(), asyncio.Event()
        client = _Client(_app(streams, [b"a", b"b"], gate))
        await _settled(lambda: len(client.sent) == 2)
        stream = streams.find(ID, "a")
        client.left.set()
        await _settled(lambda: not stream.readers)
        # one that reads it keeps it
        streams.attach(stream)
        await asyncio.sleep(0.15)
        assert not stream.ended
        streams.detach(stream)
        await client.task
        assert stream.ended and await _body(stream) == b"a"
        await _settled(lambda: not streams._streams)
        assert streams._bytes == 0 and not stream.parts

    _run(test)


def test_a_stopped_answer_ends_its_connection_well() -> None:
    async def test() -> None:
        streams, gate = KeptStreams(), asyncio.Event()
        client = _Client(_app(streams, [b"a", b"b"], gate))
        await _settled(lambda: len(client.sent) == 2)
        streams.stop(streams.find(ID, "a"))
        await client.task
        assert client.body == b"a" and client.sent[-1]["more_body"] is False

    _run(test)


def test_a_client_that_leaves_within_its_body() -> None:
    async def test() -> None:
        streams = KeptStreams()
        client = _Client(_app(streams, [b"a"]))
        client._body_read = True
        client.left.set()
        await client.task
        # there is no answer that could be made again
        again = _Client(_app(streams, [b"a"]))
        await again.task
        assert again.sent[0]["status"] == 409

    _run(test)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_streams, "MOST_BYTES", 1000)
    monkeypatch.setattr(kept_streams, "MOST_BYTES_OF_ONE", 500)
    monkeypatch.setattr(kept_streams, "MOST_STREAMS", 12)
    monkeypatch.setattr(kept_streams, "MOST_RUNNING_OF_CLIENT", 3)

    async def test() -> None:
        draw, streams = random.Random(1), KeptStreams()
        for number in range(60):
            length = draw.choice([10, 100, 400, 700])
            parts = [b"x" * (length // 10)] * 10
            client = _Client(_app(streams, parts), identifier=f"{ID}-{number}")
            await client.task
            assert client.body == b"".join(parts)
            held = sum(sum(map(len, each.parts)) for each in streams._streams.values())
            assert held == streams._bytes <= 1000 and len(streams._streams) <= 12
            if length == 700:
                with pytest.raises(ApiError, match="too much memory"):
                    streams.find(f"{ID}-{number}", "a")
            else:
                assert await _body(streams.find(f"{ID}-{number}", "a")) == b"".join(parts)
        # those that run are not removed for others, and a client has few of them
        gate = asyncio.Event()
        running = [_Client(_app(streams, [b"a", b"b"], gate), "c", f"{ID}-r{n}") for n in range(4)]
        await running[3].task
        assert running[3].sent[0]["status"] == 429
        other = _Client(_app(streams, [b"a"]), "d")
        await other.task
        assert other.sent[0]["status"] == 200
        gate.set()
        await asyncio.gather(*(each.task for each in running))
        assert [each.body for each in running[:3]] == [b"ab"] * 3

    _run(test)


def test_readers_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_streams, "ABANDONED_S", 0.05)
    monkeypatch.setattr(kept_streams, "KEPT_S", 0.3)

    async def test() -> None:
        streams, gate = KeptStreams(), asyncio.Event()
        client = _Client(_app(streams, [b"a", b"b"], gate))
        await _settled(lambda: len(client.sent) == 2)
        stream = streams.find(ID, "a")
        streams.attach(stream)
        streams.detach(stream)  # its own connection is open still
        await asyncio.sleep(0.15)
        assert not stream.stop_event.is_set()
        gate.set()
        await client.task
        assert not stream.readers
        streams.attach(stream)
        streams.detach(stream)  # a complete answer stays as long as ever
        await asyncio.sleep(0.1)
        assert streams.find(ID, "a") is stream and not stream.stop_event.is_set()
        await _settled(lambda: not streams._streams)

    _run(test)


def test_a_reader_of_an_answer_that_grows_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_streams, "MOST_BYTES_OF_ONE", 10)

    async def test() -> None:
        streams, gate = KeptStreams(), asyncio.Event()
        parts = [b"a" * 6, b"b" * 6, b"c" * 6]
        client = _Client(_app(streams, parts, gate))
        await _settled(lambda: len(client.sent) == 2)
        stream = streams.find(ID, "a")
        reader = asyncio.ensure_future(_body(stream))
        await asyncio.sleep(0)
        gate.set()
        await client.task
        # its text would look complete
        with pytest.raises(ApiError, match="not kept") as told:
            await reader
        assert told.value.status == 410 and client.body == b"".join(parts)
        assert stream.dropped and not stream.parts and streams._bytes == 0

    _run(test)


@pytest.mark.parametrize("num_read", [1, 2])
def test_a_reader_whose_answer_is_removed_is_told_what_it_lacks(num_read: int) -> None:
    async def test() -> None:
        streams = KeptStreams()
        await _Client(_app(streams, [b"a", b"b"])).task
        stream = streams.find(ID, "a")
        reader = stream.body()
        assert [await anext(reader) for _ in range(num_read)] == [b"a", b"b"][:num_read]
        streams.stop(stream)
        with pytest.raises(StopAsyncIteration if num_read == 2 else ApiError):
            await anext(reader)

    _run(test)


def test_identifiers_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_streams, "MOST_STREAMS", 2)

    async def test() -> None:
        streams = KeptStreams()
        for bad in ("", "a" * 15, "a" * 65, "a b" * 8, "a" * 20 + "\n"):
            with pytest.raises(ApiError, match="16 to 64"):
                streams.begin(bad, "a")
        first = streams.begin("a" * 16, "a")
        with pytest.raises(ApiError) as used:
            streams.begin("a" * 16, "a")
        assert used.value.status == 409
        streams.begin("a" * 16, "b")  # another client's
        with pytest.raises(ApiError) as full:
            streams.begin("c" * 64, "c")
        assert full.value.status == 503
        streams.end(first)
        streams.begin("c" * 64, "c")
        # one that was refused for the moment may come again, once it has ended
        for status in (503, 429, 200, 400):
            one = KeptStreams()
            refused = one.begin("d" * 16, "d")
            one.add(refused, {"type": "http.response.start", "status": status, "headers": []})
            with pytest.raises(ApiError, match="already"):
                one.begin("d" * 16, "d")
            one.end(refused)
            if status in (503, 429):
                assert one.begin("d" * 16, "d") is not refused
            else:
                with pytest.raises(ApiError, match="already"):
                    one.begin("d" * 16, "d")
        # the oldest complete answer makes room, those that run do not
        streams.end(streams.find("c" * 64, "c"))
        assert [key[0] for key in streams._streams] == ["b", "c"]

    _run(test)


def test_a_request_with_several_parts_and_its_own_way_of_sending() -> None:
    """The body comes in parts, and its answer goes the way that its routes use; a client may leave within it."""

    async def test() -> None:
        streams = KeptStreams()
        parts = [b"one", b"two"]
        bodies: list[Message] = []
        seen: list[Message] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            # by the request's context, as routes do
            asked = current_request().receive
            assert asked is not None
            for _ in range(len(parts)):
                seen.append(await asked())
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await scope["state"][BODY_SEND](
                {"type": "http.response.body", "body": b"x", "more_body": False}
            )
            await send({"type": "http.response.debug"})

        heads: list[Message] = []

        async def receive() -> Message:
            number = len(seen)
            return {"type": "http.request", "body": parts[number], "more_body": number == 0}

        async def send(message: Message) -> None:
            heads.append(message)

        async def send_body(message: Message) -> None:
            bodies.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/", "headers": [(b"x-stream-id", ID.encode())],
            "state": {BODY_SEND: send_body},
        }  # fmt: skip
        CURRENT_REQUEST.set(RequestContext(client="a", receive=receive))
        await StreamKeeper(app, streams)(scope, receive, send)
        assert [each["body"] for each in seen] == parts
        assert [each["type"] for each in heads] == ["http.response.start", "http.response.debug"]
        # one end, as the answer is whole
        assert [each["body"] for each in bodies] == [b"x"]
        assert await _body(streams.find(ID, "a")) == b"x"

    _run(test)


def test_a_client_that_leaves_before_its_body_is_whole_is_told_of() -> None:
    async def test() -> None:
        streams = KeptStreams()
        seen: list[str] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            seen.extend([(await receive())["type"] for _ in range(2)])

        messages = iter(
            [{"type": "http.request", "body": b"a", "more_body": True}, {"type": "http.disconnect"}]
        )

        async def receive() -> Message:
            return next(messages)

        async def send(message: Message) -> None:
            raise AssertionError(message)

        scope = {
            "type": "http", "method": "POST", "path": "/", "headers": [(b"x-stream-id", ID.encode())],
        }  # fmt: skip
        CURRENT_REQUEST.set(RequestContext(client="a"))
        await StreamKeeper(app, streams)(scope, receive, send)
        assert seen == ["http.request", "http.disconnect"]
        assert current_request().receive is None  # a context without a client stays so

    _run(test)


def test_a_body_without_a_word_on_more_is_whole() -> None:
    async def test() -> None:
        streams = KeptStreams()
        seen: list[str] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append((await receive())["type"])
            waiting = asyncio.ensure_future(receive())
            for _ in range(20):
                await asyncio.sleep(0)
            assert not waiting.done()  # the client has left, and the answer is made for its return
            streams.stop(streams.find(ID, "a"))
            seen.append((await waiting)["type"])

        messages = iter([{"type": "http.request", "body": b"a"}, {"type": "http.disconnect"}])

        async def receive() -> Message:
            return next(messages)

        async def send(message: Message) -> None:
            raise AssertionError(message)

        scope = {
            "type": "http", "method": "POST", "path": "/", "headers": [(b"x-stream-id", ID.encode())],
        }  # fmt: skip
        CURRENT_REQUEST.set(RequestContext(client="a"))
        await StreamKeeper(app, streams)(scope, receive, send)
        assert seen == ["http.request", "http.disconnect"]

    _run(test)


def test_the_largest_answers_that_run_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_streams, "MOST_BYTES", 100)

    async def test() -> None:
        streams, gate = KeptStreams(), asyncio.Event()
        sizes = (30, 60, 40)
        clients = [
            _Client(_app(streams, [b"x" * size, b"y"], gate), identifier=f"{ID}-{size}")
            for size in sizes
        ]
        await _settled(lambda: all(len(each.sent) == 2 for each in clients))
        assert streams._bytes == 70
        with pytest.raises(ApiError, match="too much memory"):
            streams.find(f"{ID}-60", "a")
        gate.set()
        await asyncio.gather(*(each.task for each in clients))
        assert [each.body for each in clients] == [b"x" * size + b"y" for size in sizes]
        assert await _body(streams.find(f"{ID}-40", "a")) == b"x" * 40 + b"y"

    _run(test)


def test_an_answer_that_runs_or_was_well_is_not_begun_again() -> None:
    async def test() -> None:
        streams, gate = KeptStreams(), asyncio.Event()
        first = _Client(_app(streams, [b"a", b"b"], gate))
        await _settled(lambda: first.sent)
        for _ in range(2):
            again = _Client(_app(streams, [b"c"]))
            await again.task
            assert again.sent[0]["status"] == 409
            gate.set()
            await first.task

        async def busy(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await gate.wait()
            await send({"type": "http.response.body", "body": b"later", "more_body": False})

        gate.clear()
        early = _Client(StreamKeeper(busy, streams), identifier=f"{ID}-e")
        await _settled(lambda: early.sent)
        refused = _Client(_app(streams, [b"c"]), identifier=f"{ID}-e")
        await refused.task
        assert refused.sent[0]["status"] == 409  # it runs still
        gate.set()
        await early.task
        taken = _Client(_app(streams, [b"c"]), identifier=f"{ID}-e")
        await taken.task
        assert taken.sent[0]["status"] == 200 and taken.body == b"c"

    _run(test)
