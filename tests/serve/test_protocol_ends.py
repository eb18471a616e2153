"""How a connection ends: garbage behind requests, clients that end their half or leave, clients of HTTP/1.0."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from max.serve.http.connections import protocol
from max.serve.http.connections.protocol import MAX_HEAD_BYTES, PROBES_S
from tests.serve import test_protocol_times
from tests.serve.test_protocol_times import GARBAGE, GET, Connection, chunked, post

loop = test_protocol_times.loop
SLOW = b"GET /9 HTTP/1.1\r\nHost: x\r\n\r\n"
BEGUN = b"GET /9/begun HTTP/1.1\r\nHost: x\r\n\r\n"


class Halves(Connection):
    """A connection whose client ends its half, or both."""

    scheme = "http"
    error = 0
    """The error of the socket, after the client has refused bytes."""
    aborted = False

    def end_half(self, at: float | None = None) -> None:
        """The client sends nothing more; what the server's loop does then."""
        self.wait_until(self.loop.time() if at is None else at)
        if not self.protocol.eof_received():
            self.close()
        self.wait_until(self.loop.time())

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sslcontext":
            return self.scheme == "https" or None
        if name != "socket":
            return default
        return SimpleNamespace(
            family=socket.AF_INET6,
            getsockopt=lambda *wanted: (
                self.error if wanted == (socket.SOL_SOCKET, socket.SO_ERROR) else 0
            ),
            getsockname=lambda: ("::1", 1),
            getpeername=lambda: ("::1", 2),
        )

    def abort(self) -> None:
        self.aborted = True
        self.close()

    def requests(self) -> int:
        """The requests that run."""
        return len(self.state.tasks)


@pytest.mark.parametrize(
    ("parts", "statuses", "at"),
    [
        ([SLOW, GARBAGE], [200, 400], 9),
        ([SLOW + GARBAGE], [200, 400], 9),
        ([SLOW + SLOW + GARBAGE], [200, 200, 400], 18),
        ([SLOW, chunked("/a", b"2\r\nab\r\n"), b"zz\r\n"], [200, 400], 9),
        ([SLOW + chunked("/a", b"2\r\nab\r\nzz\r\n")], [200, 400], 9),
        ([SLOW + SLOW + chunked("/a", b"zz\r\n")], [200, 200, 400], 18),
        ([BEGUN, GARBAGE], [200, 400], 9),
        ([BEGUN, b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n"], [200, 400], 9),
        ([SLOW, GET[:20], b"X: " + b"a" * MAX_HEAD_BYTES], [200, 431], 9),
        # the answer takes longer than a head may
        ([b"GET /40 HTTP/1.1\r\nHost: x\r\n\r\n", GET[:9], GARBAGE], [200, 400], 40),
    ],
)
def test_garbage_behind_requests_comes_after_their_answers(loop, parts, statuses, at) -> None:
    connection = Halves(loop)
    for part in parts:
        connection.send(part)
    assert connection.closed_at is None
    assert connection.closes() == at and connection.statuses() == statuses
    assert connection.answers()[-1][1]["connection"] == "close"
    assert not connection.requests()


def test_nothing_is_read_after_garbage(loop) -> None:
    connection = Halves(loop)
    connection.send(SLOW + GARBAGE)
    for at in (1, 2, 8):
        connection.send(GET * 3, at)
    assert connection.closes() == 9 and connection.statuses() == [200, 400]


def test_the_rest_of_a_head_that_is_too_long_is_no_request(loop) -> None:
    connection = Halves(loop)
    for part in (SLOW, GET[:20], b"X: " + b"a" * MAX_HEAD_BYTES, b"\r\n\r\n", GET):
        connection.send(part)
    assert connection.closes() == 9 and connection.statuses() == [200, 431]


def test_garbage_behind_a_last_request(loop) -> None:
    """Its client wants nothing more."""
    connection = Halves(loop)
    connection.send(b"GET /9 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    connection.send(GARBAGE)
    assert connection.closes() == 9 and connection.statuses() == [200]


@pytest.mark.parametrize(
    ("parts", "statuses", "at"),
    [
        ([SLOW], [100, 200], 9),
        ([SLOW + SLOW], [100, 200, 200], 18),
        ([BEGUN], [200], 9),
        ([BEGUN + SLOW], [200, 200], 18),
        ([post("/9", b"ab", 3), b"c"], [100, 200], 9),
        # what is not whole has no answer
        ([SLOW + GET[:9]], [100, 200], 9),
        ([SLOW + post("/0", b"ab", 3)], [100, 200], 9),
        ([SLOW + SLOW + chunked("/0", b"2\r\nab\r\n")], [100, 200, 200], 18),
        # garbage has one
        ([SLOW + GARBAGE], [100, 200, 400], 9),
        ([SLOW + chunked("/0", b"zz\r\n")], [100, 200, 400], 9),
    ],
)
def test_a_client_that_ends_its_half_gets_its_answers(loop, parts, statuses, at) -> None:
    connection = Halves(loop)
    for part in parts:
        connection.send(part)
    connection.end_half()
    assert connection.closes() == at and connection.statuses() == statuses
    assert not connection.requests()


@pytest.mark.parametrize(
    "parts",
    [[], [GET], [GET, GET[:9]], [post("/9", b"ab", 3)], [b"GET /9 HTTP/1.0\r\nHost: x\r\n\r\n"]],
)
def test_a_client_that_ends_its_half_and_has_no_answer_to_wait_for(loop, parts) -> None:
    """Of HTTP/1.0 it has left: a proxy closes its connection so."""
    connection = Halves(loop)
    for part in parts:
        connection.send(part)
    connection.end_half(at=3)
    assert connection.closed_at == 3
    assert connection.statuses() == [200] * connection.received.count(b"200 OK")
    connection.wait_until(100)
    assert not connection.requests()


def test_a_client_of_tls_that_ends_its_half(loop) -> None:
    connection = Halves.__new__(Halves)
    connection.scheme = "https"
    Connection.__init__(connection, loop)
    connection.send(SLOW)
    connection.end_half(at=3)
    assert connection.closed_at == 3 and connection.received == b""


def test_a_client_that_ends_its_half_on_windows(loop, monkeypatch) -> None:
    monkeypatch.setattr(protocol, "sys", SimpleNamespace(platform="win32"))
    connection = Halves(loop)
    connection.send(SLOW)
    connection.end_half(at=3)
    assert connection.closed_at == 3 and connection.received == b""


class Failed(Halves):
    """It fails, and has no socket from then on; uvloop says so to the protocol only later."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default if self.is_closing() else super().get_extra_info(name, default)


def test_a_connection_that_has_failed_is_not_looked_at(loop) -> None:
    errors: list[Any] = []
    loop.set_exception_handler(lambda _, context: errors.append(context))
    connection = Failed(loop)
    connection.lingers = True
    connection.send(SLOW)
    connection.end_half()
    connection.close()
    connection.wait_until(sum(PROBES_S) + 1)
    assert not errors


@pytest.mark.parametrize("request_bytes", [SLOW * 2, BEGUN])
@pytest.mark.parametrize("look", range(len(PROBES_S)))
def test_a_client_that_has_left_refuses_what_is_sent(loop, request_bytes, look) -> None:
    """Its request ends then, and no other one begins."""
    connection = Halves(loop)
    connection.send(request_bytes)
    connection.end_half()
    connection.wait_until(sum(PROBES_S[:look]) + 0.01)
    assert connection.closed_at is None and connection.requests() == 1
    connection.error = 32
    assert connection.closes() == pytest.approx(sum(PROBES_S[: look + 1]))
    assert connection.aborted and not connection.requests()
    assert connection.statuses() == ([100] if request_bytes == SLOW * 2 else [200])


def test_a_client_that_leaves_amid_several_requests(loop) -> None:
    """The first one, which runs, hears of it; the others do not begin."""
    heard: list[str] = []

    async def listening(scope: dict, receive: Any, send: Any) -> None:
        message = await receive()
        while message["type"] != "http.disconnect":
            message = await receive()
        heard.append(scope["path"])

    connection = Halves(loop)
    connection.protocol.app = listening
    connection.send(b"GET /1 HTTP/1.1\r\n\r\nGET /2 HTTP/1.1\r\n\r\nGET /3 HTTP/1.1\r\n\r\n")
    assert connection.requests() == 1
    connection.protocol.connection_lost(ConnectionResetError())
    connection.closed_at = 0.0
    connection.wait_until(1)
    assert heard == ["/1"] and not connection.requests()


class Parts:
    """An application that sends the parts of an answer a second apart."""

    def __init__(self, *parts: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.parts, self.headers = parts, headers

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        for number, part in enumerate(self.parts, 1):
            await asyncio.sleep(1)
            more = number < len(self.parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})


@pytest.mark.parametrize("parts", [(b"ab", b"c", b""), (b"", b"abc"), (b"abc",)])
@pytest.mark.parametrize("kept", [b"", b"Connection: keep-alive\r\n"])
def test_a_stream_to_a_client_of_http_1_0_ends_with_the_connection(loop, parts, kept) -> None:
    connection = Halves(loop)
    connection.protocol.app = Parts(*parts, headers=[(b"X-A", b"b")])
    connection.send(b"GET / HTTP/1.0\r\n" + kept + b"\r\n")
    assert connection.closes() == len(parts)
    head, _, body = connection.received.partition(b"\r\n\r\n")
    assert head == b"HTTP/1.1 200 OK\r\nx-a: b\r\nconnection: close" and body == b"abc"


def test_an_answer_of_known_length_to_a_client_of_http_1_0(loop) -> None:
    connection = Halves(loop)
    connection.protocol.app = Parts(b"ab", b"c", headers=[(b"Content-Length", b"3")])
    connection.send(b"GET / HTTP/1.0\r\n\r\n")
    assert connection.closes() == 2
    assert connection.received.endswith(b"content-length: 3\r\nconnection: close\r\n\r\nabc")


def test_an_answer_to_head_of_http_1_0_has_no_body(loop) -> None:
    connection = Halves(loop)
    connection.protocol.app = Parts(b"abc", headers=[])
    connection.send(b"HEAD / HTTP/1.0\r\n\r\n")
    assert connection.closes() == 1
    assert connection.received == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"


def test_a_stream_to_a_client_of_http_1_1_has_chunks(loop) -> None:
    connection = Halves(loop)
    connection.protocol.app = Parts(b"[1", b"]", headers=[])
    connection.send(GET)
    connection.wait_until(3)
    assert connection.closed_at is None
    assert connection.received.endswith(b"2\r\n[1\r\n1\r\n]\r\n0\r\n\r\n")
