"""No body holds up a server: over every route, the loop and the GIL are soon free, and memory is bounded.

Times are CPU times of single steps, which other programs on a machine do not change.
"""

from __future__ import annotations

import asyncio
import json
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from fastapi.routing import APIRoute

from max.pipelines.generation.process.channel import MessageCodec
from max.pipelines.generation.process.encoder_messages import EncodeRequest, TextsEncoded
from max.serve import limits
from max.serve.http.app import build_app
from max.serve.http.bodies.body import BodyRoute
from max.serve.http.state import ServerState
from max.serve.metrics import ServerMetrics
from max.serve.models.admission import Admission
from max.serve.models.model import ServedModel
from max.serve.models.pool import ModelPool
from max.serve.models.pool_entry import PoolLimits
from max.serve.process.settings import ServerSettings
from max.serve.requests import generation
from max.serve.worker.client import EngineState, EngineUnavailableError
from max.serve.worker.config import served_config
from tests.serve.conftest import TINY
from tests.serve.hostile_bodies import REFUSED, VALUES, body, drawn
from tests.serve.stretches import Stretches, measured

STEP_S = 0.05
ALLOWANCE = 32 << 20
METHODS = {"POST", "PUT", "PATCH", "DELETE"}


class NoEngine:
    """Encodes requests for a worker, and has none: vectors are random."""

    open_requests, state, responds = 0, EngineState.READY, True

    async def forget_prefixes(self) -> None:
        """There are none."""

    @contextmanager
    def open(self, requests: Any, *_: Any, **__: Any) -> Iterator[Any]:
        for request in requests:
            MessageCodec().encode([request])
        if not hasattr(requests[0], "texts"):
            raise EngineUnavailableError("there is no worker")
        shape = (len(requests[0].texts), *([64] if isinstance(requests[0], EncodeRequest) else []))
        values = np.random.default_rng(1).random(shape, np.float32)

        class Events:
            async def next_events(self) -> Any:
                return [(0, TextsEncoded("", values))]

        yield Events()


async def no_model(_: Any) -> Any:
    raise AssertionError("no model is loaded")


@pytest.fixture(scope="module")
def apps() -> list[Any]:
    """The application with a model of text, and with one of vectors."""
    config, _ = served_config({"model_path": str(TINY)})
    made: list[Any] = []
    for encodes in (False, True):
        model = ServedModel("tiny", config, NoEngine(), Admission(4, 512))  # type: ignore[arg-type]
        model.encodes = encodes
        model.warm_up()
        pool = ModelPool(dict, no_model, PoolLimits())
        pool.pin(model)
        made.append(build_app(ServerState(ServerSettings(), ServerMetrics(), pool)))
    return made


def paths_of(app: Any) -> list[tuple[str, str]]:
    """The methods and paths of all routes that take a body, from the application."""
    listed: list[Any] = []
    for each in app._app._app._app.routes:
        included = getattr(each, "original_router", None)  # of newer releases of FastAPI
        listed += [each] if included is None else included.routes
    routes = [route for route in listed if isinstance(route, APIRoute)]
    found = {
        (method, route.path)
        for route in routes
        for method in METHODS & set(route.methods or ())
        if "{" not in route.path
    }
    assert {
        ("POST", "/v1/chat/completions"),
        ("POST", "/api/chat"),
        ("DELETE", "/api/delete"),
    } <= found
    # whatever declares a body reads it by the one reader
    assert all(isinstance(route, BodyRoute) for route in routes if route.body_field is not None)
    return sorted(found)


async def send(
    app: Any, method: str, path: str, sent: bytes, has_length: bool = True
) -> tuple[int, bytes]:
    """Sends a request as a socket would, in parts of 64 KiB; the client stays."""
    parts = [sent[at : at + 65536] for at in range(0, len(sent), 65536)] or [b""]
    status, answer = 0, b""
    parts.reverse()

    async def receive() -> Any:
        if not parts:
            await asyncio.Event().wait()
        await asyncio.sleep(0)  # as from a socket
        part = parts.pop()
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def take(message: Any) -> None:
        nonlocal status, answer
        status = message.get("status", status)
        answer += message.get("body", b"")

    headers = [(b"content-type", b"application/json")]
    if has_length:
        headers.append((b"content-length", str(len(sent)).encode()))
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    await app(scope, receive, take)
    return status, answer


async def send_beside_health(app: Any, method: str, path: str, sent: bytes) -> tuple[int, bytes]:
    """Sends a request; ``/health`` answers meanwhile."""
    request = asyncio.ensure_future(send(app, method, path, sent))
    while not request.done():
        assert (await send(app, "GET", "/health", b""))[0] == 200
        await asyncio.sleep(0.001)
    return request.result()


def check(name: str, answer: tuple[int, bytes]) -> None:
    status, text = answer
    assert status in (200, 400, 404, 413, 501, 503), (name, answer)
    assert status == 200 or len(text) < 3000, name


def bodies(app: Any, seed: int, size: int, count: int) -> Iterator[tuple[str, str, str, bytes]]:
    for method, path in paths_of(app):
        rng = random.Random(f"{seed} {path}")
        for name, sent in drawn(rng, path, size, count):
            yield name, method, path, sent


def run_all(apps: list[Any], found: Stretches, seed: int, size: int, count: int) -> None:
    for app in apps:
        for name, method, path, sent in bodies(app, seed, size, count):
            found.loop = found.thread = (0.0, "")
            check(name, asyncio.run(send_beside_health(app, method, path, sent)))
            assert max(found.loop[0], found.thread[0]) < STEP_S, f"{name}: {found}"


def test_steps(apps: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with measured(monkeypatch) as found:
        run_all(apps, found, seed=1, size=200_000, count=1)


AT_LIMITS = [
    ("/v1/completions", "prompt", "empty lists", 300_000, "more than 65536 arrays"),
    ("/v1/completions", "prompt", "empty lists", 180_000, "prompt.0 is"),
    ("/v1/chat/completions", "messages", "empty objects", 1_000_000, "more than 65536 objects"),
    ("/v1/chat/completions", "messages", "messages", 600_000, "at most 16384"),
    ("/v1/chat/completions", "messages", "long arguments", 1_900_000, "context length"),
    ("/v1/chat/completions", "logit_bias", "biases", 2_000_000, "the model has 4096 tokens"),
    ("/v1/chat/completions", "unknown", "a text", 2_000_000, "'unknown' is unknown, and"),
    ("/v1/responses", "metadata", "names", 2_500_000, "more than 131072 texts"),
    ("/api/chat", "tools", "tools", 40_000, "at most 512"),
    ("/detokenize", "tokens", "tokens", 1_000_000, ""),
]
"""Bodies that held up servers for seconds to minutes, within and beyond the limits, and what the answers say."""
LARGER = [
    ("/v1/completions", "prompt", "tokens", 4_000_000, "1000000 tokens"),
    ("/v1/chat/completions", "messages", "an image", 3_000_000, "a part of type 'image_url'"),
    ("/v1/chat/completions", "messages", "long arguments", 3_000_000, "at most 2097152 are read"),
    ("/v1/chat/completions", "logit_bias", "biases", 4_000_000, "more than 262144 entries"),
    ("/v1/messages", "messages", "blocks", 2_000_000, "more than 131072 texts"),
    ("/detokenize", "tokens", "tokens", 5_000_000, "more than 1048576 values"),
    ("/detokenize", "tokens", "tokens", 1_200_000, "at most 262144 are decoded at once"),
    ("/tokenize", "prompt", "words", 5_000_000, "at most 2097152 are read"),
    ("/api/generate", "prompt", "quotes", 9_000_000, "at most 2097152 are read"),
    ("/v1/completions", "prompt", "empty lists", 30_000_000, "more than 65536 arrays"),
    ("/v1/chat/completions", "messages", "an image", 30_000_000, "a part of type 'image_url'"),
    ("/v1/chat/completions", "user", "one emoji", 30_000_000, "characters beyond ASCII"),
    ("/v1/chat/completions", "unknown", "a text", 23_000_000, "'unknown' is unknown, and"),
    ("/v1/chat/completions", "messages", "empty objects", 30_000_000, "more than 65536 objects"),
    ("/api/generate", "prompt", "quotes", 30_000_000, "at most 2097152 are read"),
    ("/detokenize", "tokens", "tokens", 30_000_000, "more than 1048576 values"),
]


def check_case(
    apps: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[str, str, str, int, str],
    most: int,
) -> None:
    path, field, kind, size, says = case
    sent = body(random.Random(1), path, field, VALUES[kind](size))
    for _ in range(3):
        with measured(monkeypatch) as found:
            answer = asyncio.run(send_beside_health(apps[0], "POST", path, sent))
        check(path, answer)
        assert answer[0] == (400 if says else 200) and says in answer[1].decode(), answer[1][:500]
        longest = max(found.loop[0], found.thread[0])
        # CPU time grows while other programs empty the caches; a step that is long is so each time
        if longest < STEP_S:
            break
    assert longest < STEP_S, str(found)
    if size <= most:
        check_memory_of(apps[0], "POST", path, sent)


@pytest.mark.parametrize("case", AT_LIMITS, ids=lambda case: f"{case[1]}: {case[2]} of {case[3]}")
def test_bodies_at_the_limits(
    apps: list[Any], monkeypatch: pytest.MonkeyPatch, case: tuple[str, str, str, int, str]
) -> None:
    check_case(apps, monkeypatch, case, most=700_000)


@pytest.mark.parametrize("path", [path for path in REFUSED if path != "/infill"])
def test_bodies_that_are_not_hostile_are_taken(apps: list[Any], path: str) -> None:
    """Else a hostile field would be in a request that another one ends. The application has no worker."""
    sent = body(random.Random(1), path, "model", '"tiny"')
    answer = asyncio.run(send_beside_health(apps[0], "POST", path, sent))
    assert answer[0] == 503 and b"there is no worker" in answer[1], answer[1][:500]


@pytest.mark.long
@pytest.mark.parametrize("case", [*AT_LIMITS, *LARGER])
def test_larger_bodies(
    apps: list[Any], monkeypatch: pytest.MonkeyPatch, case: tuple[str, str, str, int, str]
) -> None:
    check_case(apps, monkeypatch, case, most=1 << 30)


def test_limits_of_all_sequences(apps: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What each sequence is sent with counts as often as there are sequences."""

    def refusal(**fields: Any) -> Any:
        sent = json.dumps({"prompt": "some words", "max_tokens": 1, **fields}).encode()
        status, answer = asyncio.run(send(apps[0], "POST", "/v1/completions", sent))
        return status, json.loads(answer)["error"]["param"]

    biases = {"1": 1, "2": 1, "3": 1}
    assert refusal(n=64, logit_bias=biases) == (503, None)  # the engine is asked
    monkeypatch.setattr(limits, "MAX_SEQUENCE_BIASES", 191)
    assert refusal(n=63, logit_bias=biases) == (503, None)
    assert refusal(n=64, logit_bias=biases) == (400, "logit_bias")
    assert refusal(n=32, prompt=["a", "b"], logit_bias=biases) == (400, "logit_bias")
    monkeypatch.setattr(generation, "MAX_SEQUENCE_TOKENS", 128)
    assert refusal(n=64, prompt=[1, 2]) == (503, None)
    assert refusal(n=65, prompt=[1, 2]) == (400, "n")
    assert refusal(n=64, prompt=[1, 2, 3]) == (400, "n")


def test_halves_of_characters(apps: list[Any]) -> None:
    """JSON may have them, and no text that a worker is sent."""
    bodies_of = {
        "/v1/score": {"text_1": "a", "text_2": "\ud800"},
        "/rerank": {"query": "\udc00", "documents": ["a"]},
        "/v1/embeddings": {"input": ["a", "b\ud800"]},
        "/api/embed": {"model": "tiny", "input": "\ud800"},
    }
    for path, fields in bodies_of.items():
        sent = json.dumps(fields).encode()
        status, answer = asyncio.run(send(apps[1], "POST", path, sent))
        assert status == 400 and b"not UTF-8" in answer, (path, answer)
    tool = {"type": "function", "name": "f", "description": "\ud800"}
    sent = json.dumps({"input": "a", "tools": [tool]}).encode()
    status, answer = asyncio.run(send(apps[0], "POST", "/v1/responses", sent))
    assert status == 400 and b"surrogate U+D800" in answer, answer


def check_memory_of(app: Any, method: str, path: str, sent: bytes) -> tuple[int, bytes]:
    tracemalloc.start()
    try:
        answer = asyncio.run(send(app, method, path, sent))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * len(sent) + ALLOWANCE, f"{path}: {peak >> 20} MiB of {len(sent)} bytes"
    return answer


def check_memory(apps: list[Any], seed: int, size: int, count: int) -> None:
    for app in apps:
        for name, method, path, sent in bodies(app, seed, size, count):
            check(name, check_memory_of(app, method, path, sent))


@pytest.mark.long
@pytest.mark.parametrize("size", [1_000_000, 10_000_000])
def test_memory_of_many_bodies(apps: list[Any], size: int) -> None:
    check_memory(apps, seed=size, size=size, count=6)


def test_a_body_without_a_length_gets_the_same_error() -> None:
    """On every route, so in the form of each API: whether its header or its bytes show that it is too long."""
    settings = ServerSettings(max_request_bytes=100_000)
    app = build_app(ServerState(settings, ServerMetrics(), ModelPool(dict, no_model, PoolLimits())))
    sent = b'{"model": "' + b"x" * 200_000 + b'"}'

    compared = set[str]()

    async def run() -> None:
        for method, path in paths_of(app):
            told = await send(app, method, path, sent)
            found = await send(app, method, path, sent, has_length=False)
            assert told[0] == 413, path
            if found[0] in (200, 501):  # a route that reads no body
                continue
            compared.add(path)
            assert found == told, path
            error = json.loads(found[1])["error"]
            if path.startswith("/v1/messages"):
                assert error["type"] == "request_too_large"
            elif path.startswith("/api/"):
                assert "100000 bytes" in error
            else:
                assert error["code"] == "request_too_large" and "100000 bytes" in error["message"]

    asyncio.run(run())
    assert {"/v1/responses", "/v1/messages", "/api/chat", "/infill"} <= compared
