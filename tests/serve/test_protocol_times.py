"""How long a connection waits, and what it answers: the protocol on a transport of the test and a clock that jumps."""

from __future__ import annotations

import asyncio
import gc
import json
import selectors
import weakref
from collections.abc import Iterator
from typing import Any

import httptools
import pytest
import uvicorn
from uvicorn.server import ServerState

from max.serve.http.connections.protocol import BODY_S, HEAD_S, MAX_HEAD_BYTES, BoundedProtocol

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
GARBAGE = b"\x16\x03\x01\x02\x00\x01"


class Clock(selectors.SelectSelector):
    """Jumps to the next timer instead of waiting for it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list:
        assert timeout is not None, "no timer is set"
        self.now += timeout
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


async def app(scope: dict, receive: Any, send: Any) -> None:
    """``/N`` answers after N seconds, ``/N/begun`` begins its answer at once; with what it got."""
    _, seconds, *begun = scope["path"].split("/")
    start = {"type": "http.response.start", "status": 200, "headers": []}
    if begun:
        await send(start)
        body = b""
    else:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
    if seconds.isdigit():
        await asyncio.sleep(int(seconds))
    if not begun:
        await send(start)
    headers = [[name.decode(), value.decode()] for name, value in scope["headers"]]
    got = [scope["method"], scope["http_version"], headers, body.decode()]
    await send({"type": "http.response.body", "body": json.dumps(got).encode()})


class Connection(asyncio.Transport):
    """A connection to the server: the client's end, and the transport of the other."""

    def __init__(self, loop: Loop, keep_alive: int = 10_000) -> None:
        super().__init__()
        self.loop, self.received, self.closed_at = loop, b"", None
        self.written_late = b""  # after the server has closed it
        self.writes: list[bytes] = []
        self.lingers, self.state = False, ServerState()
        config = uvicorn.Config(
            app, ws="none", lifespan="off", log_config=None, access_log=False, timeout_keep_alive=keep_alive
        )  # fmt: skip
        self.protocol = BoundedProtocol(config, self.state, {}, loop)
        self.protocol.connection_made(self)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: bytes) -> None:
        if self.closed_at is None:
            self.received += data
            self.writes.append(data)
        else:
            self.written_late += data

    def is_closing(self) -> bool:
        return self.closed_at is not None

    def close(self) -> None:
        if self.closed_at is None:
            self.closed_at = self.loop.time()
            if not self.lingers:
                self.loop.call_soon(self.protocol.connection_lost, None)

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    # the client's

    def send(self, data: bytes, at: float | None = None) -> None:
        """Sends bytes, at a time."""
        self.wait_until(self.loop.time() if at is None else at)
        assert self.closed_at is None
        self.protocol.data_received(data)
        self.wait_until(self.loop.time())

    def wait_until(self, time: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(time - self.loop.time()))
        self.loop.run_until_complete(asyncio.sleep(0))
        assert not self.written_late

    def closes(self) -> float:
        """When the server closes the connection."""
        self.wait_until(self.loop.time() + 5000)
        assert self.closed_at is not None
        return self.closed_at

    def answers(self) -> list[tuple[int, dict[str, str], Any]]:
        """Status, headers and body of each answer; only the first line of one that is not complete."""
        answers = []
        rest = self.received
        while rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            line, *lines = head.decode().split("\r\n")
            headers = dict(text.split(": ", 1) for text in lines if text)
            if status_of(line) == 100:
                answers.append((100, headers, None))
                continue
            if headers.get("transfer-encoding") == "chunked":
                size, _, rest = rest.partition(b"\r\n")
                count = int(size or b"0", 16)
                body, rest = rest[:count], rest[count + 2 :].removeprefix(b"0\r\n\r\n")
            elif "content-length" in headers:
                count = int(headers["content-length"])
                body, rest = rest[:count], rest[count:]
                assert len(body) == count
            else:
                assert headers["connection"] == "close"
                body, rest = rest, b""
            answers.append((status_of(line), headers, json.loads(body) if body else None))
        return answers

    def statuses(self) -> list[int]:
        return [status for status, _, _ in self.answers()]


def status_of(line: str) -> int:
    """The status of the first line of an answer."""
    version, status, _ = line.split(" ", 2)
    assert version == "HTTP/1.1"
    return int(status)


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    asyncio.set_event_loop(loop)
    yield loop
    for task in (tasks := asyncio.all_tasks(loop)):  # answers that no client waits for
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    asyncio.set_event_loop(None)
    loop.close()


def post(path: str, body: bytes, size: int) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (
        path.encode(), size, body,
    )  # fmt: skip


def chunked(path: str, body: bytes) -> bytes:
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head % path.encode() + body


def test_the_limits_are_as_documented() -> None:
    assert (HEAD_S, BODY_S, MAX_HEAD_BYTES) == (30, 60, 65536)


def test_a_connection_on_which_nothing_comes(loop) -> None:
    connection = Connection(loop)
    assert connection.closes() == 30 and connection.received == b""


def test_a_head_has_one_time_for_all_its_parts(loop) -> None:
    connection = Connection(loop)
    connection.send(b"GET /a HT", at=20)
    connection.send(b"TP/1.1\r\nHost: ", at=40)
    connection.send(b"x", at=49)
    assert connection.closes() == 50
    ((status, headers, body),) = connection.answers()
    assert status == 408 and body["error"]["message"] == "the request did not come in time"
    assert headers["content-type"] == "application/json" and headers["connection"] == "close"
    assert connection.received.startswith(b"HTTP/1.1 408 Request Timeout\r\n")


def test_a_second_head_has_its_own_time(loop) -> None:
    connection = Connection(loop)
    connection.send(GET)
    assert connection.statuses() == [200]
    connection.send(GET[:10], at=100)
    assert connection.closes() == 130 and connection.statuses() == [200, 408]


def test_a_head_after_a_body_has_its_own_time(loop) -> None:
    """The end of a body and the begin of the next head come together."""
    connection = Connection(loop)
    connection.send(post("/a", b"12", 3))
    connection.send(b"3" + GET[:10], at=50)
    assert connection.closes() == 80 and connection.statuses() == [200, 408]


def test_a_part_of_a_head_ends_the_time_of_a_kept_connection(loop) -> None:
    connection = Connection(loop, keep_alive=5)
    connection.send(GET)
    connection.send(GET[:10], at=4)
    connection.send(GET[10:], at=20)
    assert connection.statuses() == [200, 200]
    assert connection.closes() == 25


def test_each_part_of_a_body_has_its_time(loop) -> None:
    connection = Connection(loop)
    connection.send(post("/a", b"", 4))
    for at in (59, 118, 177):
        connection.send(b"x", at)
    assert connection.closes() == 237 and connection.statuses() == [408]


@pytest.mark.parametrize("begin", [0, 10])
def test_a_whole_request_has_all_the_time(loop, begin) -> None:
    connection = Connection(loop)
    request = post("/700", b"abc", 3)
    if begin:
        connection.send(request[:begin])
    connection.send(request[begin:])
    connection.wait_until(699)
    assert connection.received == b"" and connection.closed_at is None
    connection.wait_until(701)
    ((status, _, got),) = connection.answers()
    assert status == 200 and got[3] == "abc"


def test_a_late_body_after_the_answer_has_begun(loop) -> None:
    """An error would be read as a part of the answer."""
    connection = Connection(loop)
    connection.send(post("/500/begun", b"", 4))
    assert connection.closes() == 60 and connection.statuses() == [200]


def test_a_head_beside_an_answer_waits_for_it(loop) -> None:
    connection = Connection(loop)
    connection.send(b"GET /45 HTTP/1.1\r\nHost: x\r\n\r\n")
    connection.send(GET[:10], at=10)
    assert connection.closes() == 70 and connection.statuses() == [200, 408]


def test_a_body_beside_an_answer_waits_for_it(loop) -> None:
    connection = Connection(loop)
    connection.send(b"GET /500 HTTP/1.1\r\nHost: x\r\n\r\n")
    connection.send(post("/a", b"1", 3), at=10)
    assert connection.closes() == 10 + 60 + 15 * 30 and connection.statuses() == [200, 408]


def test_requests_in_a_row_have_their_answers_before_a_late_head_has_its_error(loop) -> None:
    connection = Connection(loop)
    connection.send(b"GET /100 HTTP/1.1\r\nHost: x\r\n\r\n" * 2 + GET[:10])
    assert connection.closes() == 210 and connection.statuses() == [200, 200, 408]


@pytest.mark.parametrize(
    ("parts", "statuses"),
    [
        ([GARBAGE], [400]),
        ([GET, GARBAGE], [200, 400]),
        ([GET[:10], b"\x00\x00"], [400]),
        ([b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n"], [400]),
        ([chunked("/a", b"zz\r\n")], [400]),
        ([chunked("/a", b"2\r\nab\r\n"), b"zz\r\n"], [400]),
        # an answer is under way: the error would be taken for that
        ([chunked("/9/begun", b"2\r\nab\r\n"), b"zz\r\n"], [200]),
    ],
)  # fmt: skip
def test_what_is_no_http_closes_the_connection(loop, parts, statuses) -> None:
    connection = Connection(loop)
    for part in parts:
        connection.send(part)
    assert connection.closed_at == 0 and connection.statuses() == statuses


def test_heads_in_parts_are_bounded(loop) -> None:
    connection = Connection(loop)
    for _ in range(2):  # each head has the whole length
        begin = b"GET /a HTTP/1.1\r\nHost: x\r\nX: "
        connection.send(begin)
        connection.send(b"a" * 40_000)
        connection.send(b"a" * (65536 - 40_000 - len(begin)))
        connection.send(b"\r\n\r\n")
    assert connection.statuses() == [200, 200] and connection.closed_at is None
    connection.send(begin)
    connection.send(b"a" * (65536 - len(begin)))
    assert connection.closed_at is None
    connection.send(b"a")
    assert connection.closed_at == 0 and connection.statuses() == [200, 200, 431]
    assert (
        connection.answers()[-1][2]["error"]["message"] == "the headers are longer than 65536 bytes"
    )


@pytest.mark.parametrize(
    ("connection_header", "kept"),
    [
        (b"Upgrade, HTTP2-Settings", None),
        (b"keep-alive, Upgrade", "keep-alive"),
        (b"HTTP2-Settings,Upgrade , x,TE", "x, te"),
    ],
)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_the_request_behind_an_offer_of_another_protocol(
    loop, connection_header, kept, version
) -> None:
    """The application gets the request as if nothing had been offered; its other headers stay in order."""
    request = (
        b"POST /a HTTP/%s\r\nHost: x\r\nAccept: */*\r\nConnection: %s\r\nUpgrade: h2c\r\nHTTP2-Settings: AAM\r\n"
        b"X-Empty:\r\nContent-Length: 5\r\nX-Last: 1\r\n\r\nab" % (version.encode(), connection_header)
    )  # fmt: skip
    connection = Connection(loop)
    connection.send(request)
    connection.send(b"cde", at=59)
    ((status, _, got),) = connection.answers()
    middle = [["connection", kept]] if kept else []
    assert status == 200 and got == [
        "POST",
        version,
        [
            ["host", "x"],
            ["accept", "*/*"],
            *middle,
            ["x-empty", ""],
            ["content-length", "5"],
            ["x-last", "1"],
        ],  # fmt: skip
        "abcde",
    ]


def test_a_late_body_behind_an_offer(loop) -> None:
    connection = Connection(loop)
    connection.send(
        b"POST /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\n\r\nab",
        at=10,
    )
    assert connection.closes() == 70 and connection.statuses() == [408]


def test_a_connection_that_is_lost_leaves_nothing_behind(loop) -> None:
    connection = Connection(loop)
    connection.send(GET[:10])
    protocol = weakref.ref(connection.protocol)
    connection.lingers = True
    connection.protocol.connection_lost(ConnectionResetError())
    del connection
    gc.collect()
    assert protocol() is None, "a timer holds it"


def test_the_application_hears_of_a_lost_connection(loop) -> None:
    connection = Connection(loop)
    connection.send(post("/a", b"1", 3))
    assert connection.state.connections == {connection.protocol} and connection.state.tasks
    connection.protocol.connection_lost(None)
    connection.wait_until(1)
    assert not connection.state.connections and not connection.state.tasks, "its request has ended"


def test_a_request_to_a_proxy_is_read_once(loop, monkeypatch) -> None:
    parsers = []
    make = httptools.HttpRequestParser
    monkeypatch.setattr(httptools, "HttpRequestParser", lambda of: parsers.append(of) or make(of))
    connection = Connection(loop)
    connection.send(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n")
    assert connection.statuses() == [400] and len(parsers) == 1


def test_a_connection_that_is_closing_is_left_alone(loop) -> None:
    """The rest of an answer is still being sent when the time of a body ends."""
    connection = Connection(loop)
    connection.lingers = True
    connection.send(
        b"POST /9/begun HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 4\r\n\r\nab"
    )
    assert connection.closes() == 9 and connection.statuses() == [200]


def test_a_head_is_sent_with_its_body(loop: Loop) -> None:
    """But it does not wait for a body that comes later."""
    connection = Connection(loop)
    for request, parts in ((GET, 1), (GET, 1), (GET.replace(b"/a", b"/5/begun"), 2), (GET, 1)):
        connection.writes.clear()
        connection.send(request)
        assert len(connection.writes) == 1 and connection.writes[0].startswith(b"HTTP/1.1 200")
        connection.wait_until(loop.time() + 6)
        written = b"".join(connection.writes)
        assert written.count(b"HTTP/1.1") == 1
        # the end of a body of unknown length comes with the body
        assert len(connection.writes) == parts and written.endswith(b"\r\n0\r\n\r\n")
