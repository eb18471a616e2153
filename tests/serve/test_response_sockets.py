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
