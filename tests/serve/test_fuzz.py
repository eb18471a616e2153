"""Random requests by the schema of the server, and invalid bodies: no status 500, no hang."""

from __future__ import annotations

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
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
    "guided_json", "tokens", "text", "max_tokens", "input_prefix", "input_suffix", "input_extra",
)  # fmt: skip
PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/api/chat", "/api/generate", "/api/show", "/tokenize", "/detokenize", "/apply-template",
    "/invocations", "/infill", "/v1/responses/input_tokens",
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
    with httpx.Client(base_url=server.url, timeout=300) as client:
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
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00 no HTTP",
    ],
)
def test_invalid_http(server: RunningServer, http, request_text) -> None:
    """Other connections are not affected, and an incomplete request does not block."""
    host, port = server.url.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)), timeout=300)) as connection:
        try:
            connection.sendall(request_text)
            assert http.get("/health").status_code == 200
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(1000)
        except (ConnectionError, OSError):
            answer = b""
    assert b" 500 " not in answer
    assert http.get("/health").status_code == 200


CHAIN = "start: r0\n" + "\n".join(f'r{i}: "t" r{i + 1}' for i in range(6000)) + '\nr6000: "z"'
"""Rules that name rules: llguidance recurses over them, beyond the stack of a thread."""
REFERENCES = {
    "$ref": "#/$defs/0",
    "$defs": {
        **{str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}]} for i in range(3000)},
        "3000": {"const": "x"},
    },
}
USER = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"guided_grammar": "start: " + " | ".join(f'r{i} "x"' for i in range(2200)) + "\n"
          + "\n".join(f'r{i}: "a"' for i in range(2200))},
         None, "grammar cannot be followed: .*items"),
        ({"guided_regex": "\udc00"}, "guided_regex", "not UTF-8"),
        ({"guided_choice": ["\udc00"]}, "guided_choice", "not UTF-8"),
        ({"stop": "\udc00"}, "stop", "unicode string"),
        ({"stop": "x" * 5000}, "stop", "at most 4096"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias", "the model's tokens are 0 to 4095"),
        ({"messages": USER * 513}, "messages", "513 entries, and the context holds 512"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "content is missing"),
        ({"messages": [{"role": "user", "content": "ab " * 40_000}]}, "messages", "at least [0-9]+ tokens"),
    ],
)  # fmt: skip
def test_requests_that_do_not_fit(http: httpx.Client, fields, param, says) -> None:
    answer = http.post(
        "/v1/chat/completions",
        content=json.dumps({"messages": USER, "max_tokens": 2, **fields}),
        headers={"Content-Type": "application/json"},
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert re.search(says, error["message"]) and len(error["message"]) < 800


@pytest.mark.parametrize("fields", [{"guided_grammar": CHAIN}, {"guided_json": REFERENCES}])
def test_grammars_that_recurse_deeply(http: httpx.Client, fields) -> None:
    """They are compiled on a stack that is deep enough, in the server and in its worker."""
    answer = http.post(
        "/v1/chat/completions",
        json={"messages": USER, "max_tokens": 2, "temperature": 0, **fields},
    )
    assert answer.status_code == 200, answer.text[:500]
    text = answer.json()["choices"][0]["message"]["content"]
    assert re.fullmatch("t+" if "guided_grammar" in fields else '"x?"?', text)


@pytest.mark.parametrize("prompt", [[4096], [1, 10**9], [[1], [2, 4096]]])
def test_numbers_that_are_no_tokens(http: httpx.Client, prompt) -> None:
    """They are no error of the engine, which would fail the other requests of a batch."""
    answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 400
    assert re.search(
        "has the token [0-9]+ at index [01]; the model's tokens are 0 to 4095",
        answer.json()["error"]["message"],
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[" * 100_000, "begins with"),
        ('{"prompt": "x", "max_tokens": 1' + "0" * 5000 + "}", "too many digits"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 0xff at byte 12"),
        ('{"prompt": ', "Expecting value at character 11"),
    ],
)
def test_bodies_that_are_no_json(http: httpx.Client, content, says) -> None:
    answer = http.post(
        "/v1/completions", content=content, headers={"Content-Type": "application/json"}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_json")
    assert says in error["message"]


@pytest.mark.parametrize("content", ["{", "", "[1]", "null", "[" * 1000, '{"model": "\xff'])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed", "/api/show"])
def test_bodies_of_ollama_that_are_no_json(http: httpx.Client, path: str, content: str) -> None:
    answer = http.post(path, content=content.encode("latin-1"))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"].startswith("the body ")


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


DEEP_CALL = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "a", "arguments": '{"a":' * 2000 + "1" + "}" * 2000}}
    ]},
]  # fmt: skip


@pytest.mark.parametrize("depth", [100, 600, 850])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", lambda deep: {"chat_template_kwargs": {"x": deep}}),
        ("/v1/chat/completions", lambda deep: {"messages": [{"role": "user", "content": "a", "x": deep}]}),
        ("/apply-template", lambda deep: {"chat_template_kwargs": {"x": deep}}),
        ("/tokenize", lambda deep: {"chat_template_kwargs": {"x": deep}}),
        ("/v1/chat/completions", lambda deep: {"messages": DEEP_CALL}),
        ("/v1/responses", lambda deep: {"input": [
            {"type": "function_call", "call_id": "1", "name": "a", "arguments": json.dumps(deep)},
            {"type": "function_call_output", "call_id": "1", "output": "a"}]}),
        ("/api/chat", lambda deep: {"model": "tiny", "stream": False, "options": {"x": deep}}),
    ],
)  # fmt: skip
def test_values_that_are_nested_deeply(http: httpx.Client, path: str, fields, depth: int) -> None:
    """An answer, or an error of the request: values that the reader takes may be too deep for what comes after it."""
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
        **fields(nested(depth)),
    }
    if path in ("/v1/responses", "/api/chat"):
        del body["max_tokens"]  # theirs has another name
    if path == "/v1/responses":
        del body["messages"]
    answer = http.post(path, json=body)
    assert answer.status_code in (200, 400), answer.text
    if depth == 100 and body.get("messages") is not DEEP_CALL:
        assert answer.status_code == 200, answer.text


def test_fields_and_routes_that_do_not_exist(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 1, **{f"field{i:04}": 1 for i in range(2000)}}
    warning = http.post("/v1/completions", json=body).headers["Warning"]
    assert "field0007, and 1992 more" in warning and len(warning) < 300
    answer = http.post("/v1/chat/completion", json={})
    assert answer.status_code == 404
    assert "did you mean '/v1/chat/completions'?" in answer.json()["error"]["message"]
    answer = http.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["message"].endswith("does not take GET; it takes POST")
    answer = http.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415
    assert "send the header Content-Type: application/json" in answer.json()["error"]["message"]
    answer = http.post("/v1/completions", json={"prompt": ["a"] * 129})
    assert "at most 128 items, not 129" in answer.json()["error"]["message"]


def test_others_go_on_while_a_long_text_is_encoded(
    http: httpx.Client, server: RunningServer
) -> None:
    """The GIL is free meanwhile. Else they would wait for most of the time, however often it is tried."""

    def longest_wait() -> float:
        """As a fraction of the time that the text took."""
        begin = time.monotonic()
        encoding = pool.submit(other.post, "/tokenize", json={"prompt": "ab " * 60_000})
        waits: list[float] = []
        while not encoding.done():
            start = time.monotonic()
            assert http.get("/health").status_code == 200
            waits.append(time.monotonic() - start)
        assert encoding.result().json()["count"] >= 60_000
        return max(waits) / (time.monotonic() - begin)

    with httpx.Client(base_url=server.url, timeout=300) as other, ThreadPoolExecutor(1) as pool:
        shares = (longest_wait() for _ in range(9))
        assert any(share < 0.5 for share in shares), (
            "on a busy machine a request may wait once for other programs"
        )
