"""Clients of a real server that end their half of a connection, or speak HTTP/1.0."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import pytest

from tests.serve.conftest import RunningServer

WAIT_S = 300
BODY = {"prompt": "import os", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
LEFT = 'maxserve_request_count_total{code="499",path="/v1/completions"}'


def connected(server: RunningServer, body: dict[str, Any], version: str = "1.1") -> socket.socket:
    """A connection on which a request was sent."""
    url = httpx.URL(server.wait_ready().url)
    data = json.dumps(body).encode()
    connection = socket.create_connection((url.host, url.port or 80), timeout=WAIT_S)
    connection.sendall(
        b"POST /v1/completions HTTP/%b\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (version.encode(), len(data), data)
    )
    return connection


def received(connection: socket.socket) -> bytes:
    """All that comes."""
    parts = b""
    while part := connection.recv(65536):
        parts += part
    return parts


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def count_of(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


def test_a_whole_answer_for_a_client_that_has_ended_its_half(server, http) -> None:
    expected = http.post("/v1/completions", json=BODY).json()["choices"]
    with closing(connected(server, BODY)) as connection:
        connection.shutdown(socket.SHUT_WR)
        answer = received(connection)
    while answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
        answer = answer.partition(b"\r\n\r\n")[2]
    head, _, text = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and json.loads(text)["choices"] == expected


def test_a_stream_for_a_client_that_has_ended_its_half(server, http) -> None:
    with closing(connected(server, {**BODY, "stream": True})) as connection:
        first = connection.recv(65536)
        connection.shutdown(socket.SHUT_WR)
        answer = first + received(connection)
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"0\r\n\r\n")
    assert answer.count(b"data: ") >= 3 and b"data: [DONE]" in answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_connection_has_left(server, http, stream) -> None:
    """Of the answer that it waits for no more is generated than until it is noticed."""
    left, written = count_of(http, LEFT), count_of(http, "maxserve_num_output_tokens_total")
    body = {**BODY, "n": 8, "max_tokens": 480, "stream": stream}
    with closing(connected(server, body)) as connection:
        if stream:
            assert connection.recv(1)
        else:
            until(lambda: http.get("/load").json()["server_load"] == 8)
    until(lambda: http.get("/load").json()["server_load"] == 0)
    if not stream:
        until(lambda: count_of(http, LEFT) == left + 1)
    assert count_of(http, "maxserve_num_output_tokens_total") < written + 8 * 480


def test_a_stream_for_a_client_of_http_1_0(server, http) -> None:
    with closing(connected(server, {**BODY, "stream": True}, "1.0")) as connection:
        head, _, text = received(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"transfer-encoding" not in head.lower()
    events = [line for line in text.split(b"\n\n") if line]
    assert events[-1] == b"data: [DONE]" and all(each.startswith(b"data: ") for each in events)
    pieces = [json.loads(each[6:])["choices"][0]["text"] for each in events[:-1]]
    assert "".join(pieces) == http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]


def test_a_client_of_another_address_does_not_wait_for_all_of_one(server, http) -> None:
    """Without keys, addresses share the engine."""
    body = {**BODY, "max_tokens": 40}
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.Client(
            base_url=server.url,
            transport=httpx.HTTPTransport(local_address="127.0.0.2"),
            timeout=WAIT_S,
        ) as other,
    ):
        try:
            other.get("/health")
        except httpx.ConnectError:
            pytest.skip("this machine has one address")
        many = pool.submit(http.post, "/v1/completions", json={**body, "n": 32})
        until(lambda: http.get("/load").json()["server_load"] == 32)
        answer = other.post("/v1/completions", json=body)
        assert answer.status_code == 200 and not many.done()
        assert many.result().status_code == 200
