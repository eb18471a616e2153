"""Bytes that are no clear HTTP, or come too slowly: an error, a closed connection, and the others go on; no engine."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from max.serve.http.app import _add_error_handlers
from max.serve.http.connections import protocol
from max.serve.http.connections.protocol import BoundedProtocol
from max.serve.http.connections.quiet_server import QuietServer

H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
BODY = b'{"prompt": "The", "n": 1}'


async def echo(scope, receive, send) -> None:
    """Answers with what it got."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    text = json.dumps([scope["method"], scope["path"], body.decode("latin-1")]).encode()
    await send({
        "type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(text)).encode())],
    })  # fmt: skip
    await send({"type": "http.response.body", "body": text})


@contextmanager
def serving(app: Any) -> Iterator[tuple[str, int]]:
    """The address at which an application is served meanwhile."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=BoundedProtocol, ws="none", lifespan="off", log_config=None, date_header=False, access_log=False
    )  # fmt: skip
    server = QuietServer(config)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve([listener])))
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join(30)
        loop.close()


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    patch = pytest.MonkeyPatch()
    patch.setattr(protocol, "HEAD_S", 1.0)
    patch.setattr(protocol, "BODY_S", 1.0)
    with serving(echo) as found:
        yield found
    patch.undo()


def post(more: bytes = b"", body: bytes = BODY, length: bool = True) -> bytes:
    size = b"Content-Length: %d\r\n" % len(body) if length else b""
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + size + more + b"\r\n" + body


def chunks(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts,)) + b"0\r\n\r\n"


def exchange(
    address: tuple[str, int], *parts: bytes, answers: int = 1
) -> tuple[list[int], bytes, bool]:
    """The statuses and the bytes that come, and whether the connection was closed, after some parts were sent."""
    received = b""
    with closing(socket.create_connection(address, timeout=30)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(0.02)
            while received.count(b"HTTP/1.1 ") < answers or received.endswith(b"\r\n\r\n"):
                if not (data := connection.recv(65536)):
                    return (
                        [int(n) for n in re.findall(rb"HTTP/1.1 (\d+)", received)],
                        received,
                        True,
                    )
                received += data
        except ConnectionError:
            return [int(n) for n in re.findall(rb"HTTP/1.1 (\d+)", received)], received, True
    return [int(n) for n in re.findall(rb"HTTP/1.1 (\d+)", received)], received, False


@pytest.mark.parametrize(
    "parts",
    [
        (post(H2C),),
        (post(H2C)[:-10], BODY[-10:]),
        (post(H2C)[:30], post(H2C)[30:90], post(H2C)[90:-1], BODY[-1:]),
        (post(H2C + CHUNKED, b"", length=False) + chunks(BODY[:7], BODY[7:]),),
        (post(H2C + CHUNKED, b"", length=False), chunks(BODY[:7]), chunks(BODY[7:]))[:1]
        + (b"19\r\n" + BODY + b"\r\n", b"0\r\n\r\n"),
        (post(b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"),),
        (post(),),
        (post(CHUNKED, b"", length=False) + chunks(BODY),),
    ],
)  # fmt: skip
def test_bodies_of_requests_that_offer_another_protocol(address, parts) -> None:
    statuses, received, closed = exchange(address, *parts)
    assert statuses == [200] and not closed
    assert json.loads(received.partition(b"\r\n\r\n")[2]) == [
        "POST",
        "/v1/completions",
        BODY.decode(),
    ]


def test_requests_after_such_a_one(address) -> None:
    """They were sent together; each has its own answer, in their order."""
    get = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
    statuses, received, _ = exchange(
        address, post(H2C) + get + post(H2C, b"{}") + get.replace(b"/a", b"/b"), answers=4
    )
    assert statuses == [200] * 4
    paths = re.findall(rb'\["(\w+)", "(\S+)"', received)
    assert paths == [
        (b"POST", b"/v1/completions"),
        (b"GET", b"/a"),
        (b"POST", b"/v1/completions"),
        (b"GET", b"/b"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        post(CHUNKED, chunks(BODY)),
        post(b"Content-Length: 3\r\n"),
        post(b"Content-Length: +3\r\n", length=False),
        post(b"Transfer-Encoding: chunked, identity\r\n", chunks(BODY), length=False),
        post(b"Transfer-Encoding : chunked\r\n", chunks(BODY), length=False),
        post(CHUNKED, b"fffffffffffffffffff\r\n", length=False),
        post(CHUNKED, b"zz\r\n", length=False),
        post(b"X: a\r\n b\r\n"),
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/7.0\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
    ],
)
def test_what_is_no_clear_request(address, text) -> None:
    statuses, received, closed = exchange(address, text, answers=2)
    assert statuses == [400] and closed
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize(
    "begin", [b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 30]
)
def test_heads_without_an_end(address, begin) -> None:
    statuses, received, closed = exchange(address, begin, *[b"a" * 50_000] * 8, answers=2)
    # the rest that is sent meanwhile may reset the connection before its answer was read
    assert closed and statuses in ([431], [])
    assert len(received) < 500


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ((), []),
        ((b"POST / HT",), [408]),
        ((post()[:-4],), [408]),
        ((post(CHUNKED, b"5\r\nab", False),), [408]),
    ],
)
def test_what_never_comes(address, parts, status) -> None:
    begin = time.monotonic()
    statuses, _, closed = exchange(address, *parts, answers=2)
    assert closed and statuses == status and time.monotonic() - begin > 0.9


def test_a_slow_body_that_goes_on(address) -> None:
    text = post()
    parts = [text[:-20], *(BODY[-20 + i : -19 + i or None] for i in range(20))]
    for _ in range(20):
        times = [time.monotonic()]
        with closing(socket.create_connection(address, timeout=30)) as connection:
            answer = b""
            # a connection whose parts come too late is closed
            with suppress(BrokenPipeError, ConnectionResetError):
                for part in parts:
                    connection.sendall(part)
                    times.append(time.monotonic())
                    time.sleep(0.08)
                answer = connection.recv(100)
            times.append(time.monotonic())
        # on a busy machine this test itself may be late with a part
        if max(b - a for a, b in pairwise(times)) < 0.5:
            break
    assert answer.startswith(b"HTTP/1.1 200") and time.monotonic() - times[0] > 1.2


def test_an_answer_under_way_is_not_cut(address) -> None:
    """A connection that is kept has no time limit of heads between two requests."""
    with httpx.Client(base_url=f"http://{address[0]}:{address[1]}") as client:
        assert client.get("/a").status_code == 200
        time.sleep(1.3)
        assert client.get("/b").json()[1] == "/b"


def test_an_answer_after_which_the_connection_ends_says_so() -> None:
    """An unexpected error: a client that keeps connections does not send its next request on this one."""
    app = FastAPI()
    _add_error_handlers(app)

    @app.get("/fails")
    def fails() -> None:
        raise ZeroDivisionError

    @app.get("/waits")
    def waits() -> None:
        raise TimeoutError("too late")

    with serving(app) as address:
        statuses, received, closed = exchange(address, b"GET /fails HTTP/1.1\r\nHost: x\r\n\r\n")
        assert statuses == [500] and b"connection: close" in received.lower()
        assert b"internal_error" in received
        with httpx.Client(base_url="http://{}:{}".format(*address)) as client:
            answers = [client.get(path) for path in ("/waits", "/fails", "/waits", "/fails")]
        assert [each.status_code for each in answers] == [504, 500] * 2
        assert [each.headers.get("connection") for each in answers] == [None, "close"] * 2
