"""Random requests by the schema of the server, and invalid bodies: no status 500, no hang."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.conftest import RunningServer

LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
ALLOWED = {200, 204, 400, 404, 405, 413, 415}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
FIELDS = (
    "messages", "prompt", "model", "n", "stop", "temperature", "tools", "tool_choice", "response_format", "stream",
    "logprobs", "top_logprobs", "logit_bias", "seed", "stream_options", "input", "system", "options", "format",
    "guided_json", "tokens", "text", "max_tokens",
)  # fmt: skip
PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/api/chat", "/api/generate", "/api/show", "/tokenize", "/detokenize", "/apply-template",
    "/invocations",
)  # fmt: skip


def short(body: Any) -> Any:
    """Limits the tokens to generate: the test is about requests, not the engine."""
    if isinstance(body, dict):
        body = {**body, **{name: 1 for name in LIMITS if isinstance(body.get(name), int)}}
        body.setdefault("max_tokens", 1)
        if isinstance(body.get("n"), int):
            body["n"] = min(body["n"], 2)
    return body


def check(answer: httpx.Response) -> None:
    assert answer.status_code in ALLOWED, (answer.status_code, answer.text[:500])
    if answer.status_code >= 400 and answer.status_code != 405:
        assert answer.json()["error"]


def test_requests_by_the_schema(server: RunningServer) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {"/v1/chat/completions", "/v1/messages", "/tokenize"} <= {o.path for o in operations}
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for operation in operations:
            if operation.method.upper() == "POST":
                send_random(client, operation)


def send_random(client: httpx.Client, operation: Any) -> None:
    """Sends random requests of one operation."""

    @settings(max_examples=6, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def test(case: Any) -> None:
        try:
            body = json.dumps(short(case.body))
        except TypeError:  # bytes, or no body
            return
        kind = {"Content-Type": "application/json"}
        check(client.post(operation.path, content=body, headers=kind))

    test()


@pytest.mark.parametrize("path", PATHS)
def test_random_fields(http: httpx.Client, path: str) -> None:
    @settings(max_examples=12, suppress_health_check=list(HealthCheck))
    @given(
        fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5),
        whole=JSON,
        bare=st.booleans(),
    )
    def test(fields: dict[str, Any], whole: Any, bare: bool) -> None:
        body = whole if bare else short({"model": "tiny", **fields})
        # NaN and infinity are not JSON, but Python's reader accepts them
        check(
            http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        )

    test()


@pytest.mark.parametrize(
    "request_text",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00 no HTTP",
    ],
)
def test_invalid_http(server: RunningServer, http, request_text) -> None:
    """Other connections are not affected, and an incomplete request does not block."""
    host, port = server.url.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)), timeout=60)) as connection:
        try:
            connection.sendall(request_text)
            assert http.get("/health").status_code == 200
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(1000)
        except (ConnectionError, OSError):
            answer = b""
    assert b" 500 " not in answer
    assert http.get("/health").status_code == 200
