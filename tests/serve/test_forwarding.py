"""What routers share and hand on: requests for the owner of the engines, counts in a file, metrics."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from max.pipelines.generation.process.commands import GenerationRequest
from max.serve.http.prefix_epochs import PrefixEpochs
from max.serve.metrics import ServerMetrics
from max.serve.process.running import http_server
from max.serve.process.settings import ServerSettings
from max.serve.routers.forwarding import PEER, BehindRouters, Forwarder, tunnel
from max.serve.worker.subscription import Mailbox, OpenRequest
from max.serve.worker.suspects import AGAIN_S, Suspects


class Echo:
    """An owner that answers with what it got, in parts; ``/wait`` answers when the client has left."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/refuse":
            await send({"type": "http.response.start", "status": 413, "headers": []})
            await send({"type": "http.response.body", "body": b"too long"})
            return
        body, message = b"", await receive()
        while message["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
            message = await receive()
        headers = [(b"x-of", b"a"), (b"x-of", b"b"), (b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 207, "headers": headers})
        if scope["path"] == "/wait":
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            leaving = asyncio.ensure_future(receive())
            while not leaving.done():  # as a stream of tokens: what is sent finds that nobody reads
                await send({"type": "http.response.body", "body": b"more", "more_body": True})
                await asyncio.wait({leaving}, timeout=0.02)
            self.left.set()
            return
        got = {
            "method": scope["method"],
            "path": scope["path"],
            "query": scope["query_string"].decode("latin-1"),
            "headers": [[n.decode("latin-1"), v.decode("latin-1")] for n, v in scope["headers"]],
            "client": scope["client"],
            "server": scope["server"],
            "scheme": scope["scheme"],
            "size": len(body),
            "sum": sum(body),
        }
        data = json.dumps(got).encode()
        for begin in range(0, len(data), 100):
            part = data[begin : begin + 100]
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def own(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"own"})


def run(test: Callable[[str, Echo, list[bool], Any], Awaitable[None]]) -> None:
    async def whole() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path, ready, echo = f"{folder}/owner", [True], Echo()
            settings = ServerSettings()
            there = socket.socket(socket.AF_UNIX)
            there.bind(path)
            here = socket.create_server(("127.0.0.1", 0))
            forwarder = Forwarder(own, path, lambda: ready[0])
            servers = [
                (http_server(settings, BehindRouters(echo), there), there),
                (http_server(settings, forwarder, here, tunnel(path)), here),
            ]
            tasks = [asyncio.ensure_future(s.serve([each])) for s, each in servers]
            try:
                async with asyncio.timeout(30):
                    for server, _ in servers:
                        await server.begun.wait()
                    url = f"http://127.0.0.1:{here.getsockname()[1]}"
                    await test(url, echo, ready, servers[0][0])
                    assert forwarder.open == 0
            finally:
                for server, _ in servers:
                    server.stop()
                    await server.close_connections(1)
                await asyncio.gather(*tasks)

    asyncio.run(whole())


def test_requests_arrive_as_they_were_sent() -> None:
    draw = random.Random(0)

    async def test(url: str, echo: Echo, ready: list[bool], owner: Any) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            for _ in range(40):
                method = draw.choice(["GET", "POST", "DELETE", "PUT"])
                path = draw.choice(["/v1/responses", "/a%20b/c", "/v1/streams/x"])
                query = draw.choice(["", "?a=1&b=%C3%BC"])
                size = 0 if method == "GET" else draw.choice([0, 1, 5000, 300_000])
                body = draw.randbytes(size)
                sent = {"x-own": "val\u00fce".encode("latin-1"), PEER.decode(): b"{}"}

                async def parts(body: bytes = body) -> Any:
                    for begin in range(0, len(body), 70_000):
                        yield body[begin : begin + 70_000]

                content = parts() if size and draw.random() < 0.5 else body
                answer = await client.request(method, path + query, content=content, headers=sent)
                assert answer.status_code == 207
                assert answer.headers.get_list("x-of") == ["a", "b"]
                got = answer.json()
                headers = dict(got["headers"])
                assert (got["method"], got["query"]) == (method, query[1:])
                assert got["path"] == path.replace("%20", " ")
                assert (got["size"], got["sum"]) == (size, sum(body))
                assert headers["x-own"] == "val\u00fce" and PEER.decode() not in headers
                assert got["client"][0] == "127.0.0.1" and got["scheme"] == "http"
                assert got["server"] == ["127.0.0.1", int(url.rpartition(":")[2])]
            # HEAD has no body
            assert (await client.head("/v1/models")).status_code == 207

    run(test)


def test_what_a_router_answers_itself() -> None:
    async def test(url: str, echo: Echo, ready: list[bool], owner: Any) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:

            async def is_own(method: str, path: str, **headers: str) -> bool:
                answer = await client.request(method, path, headers=headers)
                return answer.text == "own"

            for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/tokenize"):
                assert await is_own("POST", path)
                assert not await is_own("GET", path)
                assert not await is_own("POST", path, **{"X-Stream-Id": "a" * 20})
            assert await is_own("GET", "/health")
            for path in ("/v1/responses", "/cluster/drain", "/v1/load_lora_adapter"):
                assert not await is_own("POST", path)
            for path in ("/metrics", "/cluster", "/v1/models", "/load", "/"):
                assert not await is_own("GET", path)
            ready[0] = False
            assert not await is_own("POST", "/v1/chat/completions")

    run(test)


def test_the_ends_of_both_sides() -> None:
    async def test(url: str, echo: Echo, ready: list[bool], owner: Any) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            async with client.stream("GET", "/wait") as stream:
                async for part in stream.aiter_raw():
                    assert part.startswith(b"first")
                    break
            await asyncio.wait_for(echo.left.wait(), 10)
            # the answer to a body that the owner does not read
            refused = await client.post("/refuse", content=b"x" * 3_000_000)
            assert (refused.status_code, refused.text) == (413, "too long")
            # a malformed head is answered here
            port = int(url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
            assert b" 400 " in await reader.readline()
            writer.close()
            owner.stop()
            await owner.close_connections(1)
            for server in owner.servers:
                await server.wait_closed()
            lost = await client.get("/v1/models")
            assert lost.status_code == 503 and lost.headers["retry-after"] == "1"

    run(test)


def test_a_websocket_goes_on_as_it_comes() -> None:
    async def test(url: str, echo: Echo, ready: list[bool], owner: Any) -> None:
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            "GET /v1/responses HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"{PEER.decode()}: forged\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        writer.write(head.encode())
        # the owner's application takes no WebSockets here, which its server answers
        line = await reader.readline()
        assert line.startswith(b"HTTP/1.1 ") and b" 101 " not in line
        writer.close()

    run(test)


def test_a_websocket_whose_client_does_not_read_fills_no_memory(tmp_path: Path) -> None:
    part, parts, sent = b"x" * (1 << 20), 32, [0]

    async def write(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(parts):
            writer.write(part)
            await writer.drain()
            sent[0] += 1
        writer.close()

    async def test() -> None:
        state = SimpleNamespace(connections=set[Any]())
        path = str(tmp_path / "owner")
        protocol: Any = tunnel(path)
        loop = asyncio.get_running_loop()
        owner = await asyncio.start_unix_server(write, path)
        router = await loop.create_server(lambda: protocol(None, state, None), "127.0.0.1", 0)
        client = await asyncio.open_connection(*router.sockets[0].getsockname())
        client[1].write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        before = -1
        while before != sent[0] or not before:
            before = sent[0]
            await asyncio.sleep(0.2)
        assert before < parts // 2, "the router holds what its client does not read"
        assert len(await client[0].read()) == parts * len(part)
        client[1].close()
        owner.close()
        router.close()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_metrics_of_several_processes() -> None:
    owner, routers = ServerMetrics(), [ServerMetrics() for _ in range(2)]
    owner.gauge("models_loaded", "Models.", lambda: 5)
    owner.requests.labels("/a", "200").inc()
    for number, router in enumerate(routers):
        router.requests.labels("/a", "200").inc(10)
        router.requests.labels(f"/{number}", "404").inc()
        router.output_tokens.inc(100)
        for value in (3, 700, 1e9):
            router.queue_time.observe(value)

    def others() -> Any:
        total: dict[Any, float] = {}
        for router in routers:
            for key, value in router.counts().items():
                total[key] = total.get(key, 0) + value
        return total

    owner.others = others
    lines = owner.text().decode().splitlines()
    for line in (
        'maxserve_request_count_total{code="200",path="/a"} 21.0',
        'maxserve_request_count_total{code="404",path="/0"} 1.0',
        'maxserve_request_count_total{code="404",path="/1"} 1.0',
        "maxserve_num_output_tokens_total 200.0",
        'maxserve_queue_time_milliseconds_bucket{le="5.0"} 2.0',
        'maxserve_queue_time_milliseconds_bucket{le="1000.0"} 4.0',
        'maxserve_queue_time_milliseconds_bucket{le="+Inf"} 6.0',
        "maxserve_queue_time_milliseconds_count 6.0",
        "maxserve_models_loaded 5.0",
    ):
        assert lines.count(line) == 1, line
    assert lines == owner.text().decode().splitlines()  # a look changes nothing


def test_epochs_of_another_process() -> None:
    owner, router = PrefixEpochs(), PrefixEpochs()
    owner.drop("a")
    owner.drop("a")
    owner.drop("b")
    router.set_all(*owner.all())
    assert [router.of(name) for name in "abc"] == [2, 1, 0]
    owner.drop("c")
    assert router.of("c") == 0


class OthersTurn:
    """A turn that another process has, or not."""

    def __init__(self) -> None:
        self.is_taken = True
        self.left: list[bool] = []

    def take(self) -> bool:
        return not self.is_taken

    def leave(self, has_lost: bool = False) -> None:
        self.left.append(has_lost)


def test_the_requests_of_a_process_without_the_turn_are_not_blamed() -> None:
    async def whole() -> None:
        turn, sent = OthersTurn(), list[str]()
        requests = [
            OpenRequest(GenerationRequest(name, (1,), 9), number, Mailbox())
            for number, name in enumerate("abc")
        ]
        suspects = Suspects(
            lambda entry: True, lambda entry: sent.append(entry.request.request_id), lambda: turn
        )
        for _ in range(5):
            assert suspects.blame(requests, False) == []
        assert [entry.losses for entry in requests] == [0, 0, 0] and not turn.left
        assert all(entry.is_suspect for entry in requests)
        for entry in requests:
            suspects.run(entry)
        await asyncio.sleep(3 * AGAIN_S)
        assert sent == []
        turn.is_taken = False
        async with asyncio.timeout(10):
            while sent != ["a"]:
                await asyncio.sleep(0.005)
        suspects.clear("a")
        assert sent == ["a", "b"] and turn.left == [False]
        # it has the turn itself: the one that was tried is blamed
        turn.is_taken = True
        assert suspects.blame(requests[1:], False) == []
        assert [entry.losses for entry in requests] == [0, 1, 0] and turn.left == [False, True]

    asyncio.run(whole())
