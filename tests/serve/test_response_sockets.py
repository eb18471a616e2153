"""Responses over WebSockets, by OpenAI's client and by plain ones."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

websockets = pytest.importorskip("websockets")
from websockets.sync.client import connect  # noqa: E402

from tests.serve.conftest import TINY, RunningServer  # noqa: E402

WAIT_S = 120


def url_of(server: RunningServer, path: str = "/v1/responses") -> str:
    return server.url.replace("http://", "ws://") + path


def ask(socket: Any, **fields: Any) -> list[dict[str, Any]]:
    """Sends a message; returns its events up to the last one."""
    socket.send(
        json.dumps({"type": "response.create", "model": "tiny", "temperature": 0, **fields})
    )
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in (
        "response.completed",
        "response.incomplete",
        "error",
    ):
        events.append(json.loads(socket.recv(timeout=WAIT_S)))
    return events


@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")
def test_openai_client(server: RunningServer, client: openai.OpenAI) -> None:
    whole = client.responses.create(
        model="tiny", input="Hello!", temperature=0, max_output_tokens=8
    )
    with client.responses.connect() as connection:
        for _ in range(2):
            connection.response.create(
                model="tiny", input="Hello!", temperature=0, max_output_tokens=8
            )
            text, last = "", None
            while last is None:
                event = connection.recv()
                if event.type == "response.output_text.delta":
                    text += event.delta
                elif event.type in ("response.completed", "response.incomplete"):
                    last = event.response
            assert (
                text == whole.output_text and last.usage.output_tokens == whole.usage.output_tokens
            )


def test_a_connection_goes_on_with_its_responses(
    server: RunningServer, client: openai.OpenAI
) -> None:
    options = {"max_output_tokens": 6, "store": False}
    with connect(url_of(server), open_timeout=WAIT_S) as socket:
        first = ask(socket, input="What is the capital of Norway?", **options)
        numbers = [event["sequence_number"] for event in first]
        assert numbers == list(range(len(first))) and first[0]["type"] == "response.created"
        response = first[-1]["response"]
        assert response["store"] is False
        second = ask(socket, input="And of Italy?", previous_response_id=response["id"], **options)
        assert (
            second[-1]["response"]["usage"]["input_tokens"] > response["usage"]["input_tokens"] + 5
        )
        # a bad message is an error, and the connection goes on
        (error,) = ask(socket, input="x", previous_response_id="resp-unknown")
        assert error["status"] == 400 and error["error"]["code"] == "previous_response_not_found"
        (error,) = ask(socket, input="x", temperature=-3)
        assert error["status"] == 400 and error["error"]["param"] == "temperature"
        for text, says in (
            ("{", "no JSON"),
            ('{"type": "other"}', "response.create"),
            ("[1]", "no JSON"),
        ):
            socket.send(text)
            error = json.loads(socket.recv(timeout=WAIT_S))
            assert error["type"] == "error" and says in error["error"]["message"]
        assert ask(socket, input="x", **options)[-1]["type"].startswith("response.")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response["id"])
    with connect(url_of(server), open_timeout=WAIT_S) as socket:
        (error,) = ask(socket, input="x", previous_response_id=response["id"])
        assert error["error"]["code"] == "previous_response_not_found", "another connection"


def test_streams_of_a_connection_run_at_the_same_time(server: RunningServer) -> None:
    def message(stream: str | None, tokens: int, text: str = "Hello!") -> str:
        fields = {"stream_id": stream} if stream is not None else {}
        body = {
            "input": text,
            "max_output_tokens": tokens,
            "temperature": 0,
            "store": False,
            **fields,
        }
        return json.dumps({"type": "response.create", "model": "tiny", **body})

    with connect(url_of(server), open_timeout=WAIT_S) as socket:
        # the first stream has two requests, and the second stream need not wait for them
        for stream, tokens in (("a", 60), ("a", 3), ("b", 3), (None, 3)):
            socket.send(message(stream, tokens, f"Tell me {tokens} words"))
        events: list[dict[str, Any]] = []
        ends: list[tuple[str | None, str]] = []
        while len(ends) < 4:
            events.append(json.loads(socket.recv(timeout=WAIT_S)))
            if "output_text" not in events[-1]["type"] and "usage" in events[-1].get(
                "response", {}
            ):
                if events[-1]["response"]["usage"]:
                    ends.append((events[-1].get("stream_id"), events[-1]["response"]["id"]))
        ids: dict[str | None, list[str]] = {}
        for event in events:
            if event["type"] == "response.created":
                ids.setdefault(event.get("stream_id"), []).append(event["response"]["id"])
        assert {stream: len(each) for stream, each in ids.items()} == {"a": 2, "b": 1, None: 1}
        assert [each for stream, each in ends if stream == "a"] == ids["a"]
        # in its stream the second request begins after the end of the first
        of_a = [event for event in events if event.get("stream_id") == "a"]
        begins = [at for at, event in enumerate(of_a) if event["sequence_number"] == 0]
        assert len(begins) == 2 and of_a[begins[1] - 1]["response"]["id"] == ids["a"][0]
        # one stream goes on with the response of another
        body = json.loads(message("c", 3, "And?")) | {"previous_response_id": ids["a"][0]}
        socket.send(json.dumps(body))
        last: dict[str, Any] = {}
        while last.get("type") not in ("response.completed", "response.incomplete"):
            last = json.loads(socket.recv(timeout=WAIT_S))
            assert last["stream_id"] == "c"
        for bad in ("", 3, "x" * 257):
            socket.send(json.dumps({**json.loads(message(None, 2)), "stream_id": bad}))
            error = json.loads(socket.recv(timeout=WAIT_S))
            assert (error["status"], error["error"]["param"]) == (400, "stream_id")
        # too many at once; the errors of a stream name it
        for number in range(70):
            socket.send(message("many" if number else "first", 2))
        statuses = []
        while len([each for each in statuses if each]) < 70:
            event = json.loads(socket.recv(timeout=WAIT_S))
            assert event["stream_id"] in ("many", "first")
            statuses.append(
                event.get("status") or (event.get("response") or {}).get("usage") and 200
            )
        assert set(filter(None, statuses)) == {200, 429}


def test_what_is_refused(server: RunningServer) -> None:
    for path, origin, status in (
        ("/v1/models", None, 200),
        ("/v1/responses", "http://evil.example", 403),
    ):
        with pytest.raises(websockets.exceptions.InvalidStatus) as caught:
            connect(url_of(server, path), origin=origin, open_timeout=WAIT_S)
        assert caught.value.response.status_code == status
    with connect(url_of(server), origin=server.url, open_timeout=WAIT_S) as socket:
        assert ask(socket, input="x", max_output_tokens=2)
        socket.send("x" * 300_000)
        with pytest.raises(websockets.exceptions.ConnectionClosed):
            socket.recv(timeout=WAIT_S)


def test_a_client_that_leaves_ends_its_request(server: RunningServer, http: httpx.Client) -> None:
    with connect(url_of(server), open_timeout=WAIT_S) as socket:
        message = {
            "type": "response.create",
            "input": "Hello!",
            "max_output_tokens": 400,
            "temperature": 2,
        }
        socket.send(json.dumps(message))
        socket.recv(timeout=WAIT_S)
    for _ in range(600):
        if http.get("/load").json() in ({"server_load": 0}, {"load": 0}):
            break
    else:
        pytest.fail(http.get("/load").text)


def test_keys_are_needed(start_server) -> None:
    server = start_server(
        "--model", str(TINY), "--served-model-name", "tiny", "--max-length", "256", "--api-key", "sesame",
        "--quantization-encoding", "float32",
    ).wait_ready()  # fmt: skip
    with pytest.raises(websockets.exceptions.InvalidStatus) as caught:
        connect(url_of(server), open_timeout=WAIT_S)
    assert caught.value.response.status_code == 401
    headers = {"Authorization": "Bearer sesame"}
    with connect(url_of(server), additional_headers=headers, open_timeout=WAIT_S) as socket:
        assert ask(socket, input="x", max_output_tokens=2)[-1]["type"].startswith("response.")
        assert server.stop() == 0
        with pytest.raises(websockets.exceptions.ConnectionClosed):
            socket.recv(timeout=WAIT_S)
