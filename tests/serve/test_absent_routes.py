"""Routes of other servers that this one lacks, unknown routes, and wrong methods; without an engine."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import httpx

from max.serve.http.app import build_app
from max.serve.http.state import ServerState
from max.serve.metrics import ServerMetrics
from max.serve.models.pool import ModelPool
from max.serve.models.pool_entry import PoolLimits
from max.serve.process.settings import ServerSettings
from tests.serve.conftest import RunningServer

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
ABSENT = {
    "/lora-adapters": "/v1/models",
    "/v1/audio/speech": "later", "/v1/audio/transcriptions": "later", "/v1/audio/translations": "later",
    "/v1/realtime": "later", "/v1/images/generations": "later", "/v1/images/edits": "later",
    "/v1/batches": "max run-batch", "/v1/batches/batch_1": "max run-batch",
    "/v1/batches/batch_1/cancel": "max run-batch", "/v1/files": "max run-batch",
    "/v1/files/file-1/content": "max run-batch", "/v1/uploads": "max run-batch",
    "/v1/chat/completions/batch": "max run-batch",
    "/v2/embed": "/v1/embeddings", "/embedding": "/v1/embeddings", "/embeddings": "/v1/embeddings",
    "/pooling": "/v1/embeddings", "/classify": "choice", "/v1/systemone": "/v1/decisions", "/v1/moderations": "choice",
    "/generative_scoring": "logprobs", "/completion": "/v1/completions", "/generate": "/v1/completions",
    "/generate_stream": "/v1/completions", "/v1/completions/render": "/apply-template",
    "/v1/chat/completions/render": "/apply-template", "/v1/chat/completions/input_tokens": "/tokenize",
    "/v1/chat/completions/control": "close", "/sleep": "/models/unload", "/wake_up": "/models/load",
    "/is_sleeping": "--idle-timeout", "/pause": "SIGTERM", "/resume": "SIGTERM", "/server_info": "/version",
    "/collective_rpc": "/models/load", "/update_weights": "/models/load", "/props": "/v1/models",
    "/slots": "/metrics", "/models/sse": "/v1/models", "/tools": "tools",
    "/api/push": "max pull",
    "/v1/assistants": "/v1/responses", "/v1/fine_tuning/jobs": "folder",
}  # fmt: skip
"""A route, and a word of what its error says to use instead."""


async def _nothing(_: Any) -> Any:
    raise AssertionError("no model is loaded")


def ask(*requests: tuple[str, str], **settings: Any) -> list[httpx.Response]:
    """The answers of a server without models."""
    pool = ModelPool(dict, _nothing, PoolLimits())
    app = build_app(ServerState(ServerSettings(**settings), ServerMetrics(), pool))

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [await client.request(method, path) for method, path in requests]

    return asyncio.run(run())


def test_absent_routes_name_what_to_use() -> None:
    pairs = [(method, path) for path in ABSENT for method in METHODS]
    for (method, path), answer in zip(pairs, ask(*pairs), strict=True):
        assert answer.status_code == 501, (method, path)
        if method == "HEAD":  # without a body
            continue
        error = answer.json()["error"]
        if path.startswith("/api/"):  # Ollama's clients read a text
            message = error
        else:
            message = error["message"]
            assert (error["type"], error["code"]) == ("not_supported_error", "not_supported")
        assert message.startswith(f"{path} is not supported: ") and ABSENT[path] in message


def test_absent_routes_need_the_key() -> None:
    (answer,) = ask(("GET", "/v1/batches"), api_keys=("secret",))
    assert answer.status_code == 401


def test_unknown_routes_and_wrong_methods() -> None:
    batch, nothing, wrong, model, long = ask(
        ("GET", "/v1/chat/completion"), ("GET", "/v1/nothing/of/it"), ("DELETE", "/v1/embeddings"),
        ("PATCH", "/v1/models"), ("GET", "/" + "x" * 5000),
    )  # fmt: skip
    assert batch.status_code == 404 and "/v1/chat/completions" in batch.json()["error"]["message"]
    assert nothing.status_code == 404 and nothing.json()["error"]["type"] == "not_found_error"
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["message"].endswith("does not take DELETE; it takes POST")
    assert model.status_code == 405 and model.headers["allow"] == "GET"
    assert long.status_code == 404 and len(long.content) < 500


def test_head_is_get_without_a_body() -> None:
    paths = (
        "/",
        "/health",
        "/version",
        "/api/version",
        "/v1/models",
        "/docs",
        "/openapi.json",
        "/metrics",
    )
    for path, answer in zip(paths, ask(*(("HEAD", path) for path in paths)), strict=True):
        assert answer.status_code == 200 and not answer.content, path
    (answer,) = ask(("HEAD", "/v1/completions"))
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"


def test_a_websocket_is_told_so_too(server: RunningServer) -> None:
    host, port = server.wait_ready().url.removeprefix("http://").split(":")
    headers = {
        "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }  # fmt: skip
    with closing(HTTPConnection(host, int(port), timeout=300)) as connection:
        connection.request("GET", "/v1/realtime?model=tiny", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 501 and json.load(answer)["error"]["code"] == "not_supported"
