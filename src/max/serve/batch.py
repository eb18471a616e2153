"""Runs a file of requests, in OpenAI's batch format, through the application without a socket."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from max.pipelines.core.text import json_value
from max.serve.http.app import build_app
from max.serve.http.state import ServerState
from max.serve.metrics import ServerMetrics
from max.serve.models.loading import load_model
from max.serve.models.pool import ModelPool
from max.serve.models.pool_entry import PoolLimits
from max.serve.process.settings import ServerSettings, WorkerSettings
from max.serve.worker.client import EngineState
from max.serve.worker.process import WorkerProcess
from max.serve.worker.started_worker import Worker

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/rerank",
    "/v1/score",
)


class BatchLineError(ValueError):
    """A line of a batch file that is not a request."""


class BatchStoppedError(RuntimeError):
    """No engine runs any more, so that the requests without an answer cannot be run."""


@dataclass(frozen=True)
class BatchRequest:
    """A request of a batch file.

    Args:
        custom_id: The name that its answer has.
        url: The route.
        body: The body.
    """

    custom_id: str
    url: str
    body: dict[str, Any]


def read_requests(lines: Iterable[str]) -> list[BatchRequest]:
    """The requests of a batch file.

    Args:
        lines: Its lines; empty ones are skipped.

    Raises:
        BatchLineError: A line is not a request, or a ``custom_id`` occurs twice.
    """
    requests: list[BatchRequest] = []
    custom_ids: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json_value(line)
        except ValueError as error:
            raise BatchLineError(f"line {number} is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise BatchLineError(f"line {number} is no object")
        custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
        if not isinstance(custom_id, str) or custom_id in custom_ids:
            problem = "occurs twice" if custom_id in custom_ids else "is no text"
            raise BatchLineError(f"line {number}: custom_id is {custom_id!r}, which {problem}")
        if value.get("method", "POST") != "POST" or url not in URLS:
            raise BatchLineError(
                f"line {number}: {value.get('method', 'POST')} {url}; expected POST and one of {', '.join(URLS)}"
            )
        if not isinstance(body, dict) or body.get("stream"):
            raise BatchLineError(f"line {number}: body must be an object without stream")
        custom_ids.add(custom_id)
        requests.append(BatchRequest(custom_id, url, body))
    return requests


async def call(app: ASGIApp, url: str, body: dict[str, Any]) -> tuple[int, str, Any]:
    """Sends a request to an application, and waits for its answer.

    Args:
        app: The application.
        url: The route.
        body: The body.

    Returns:
        The status, the identifier of the request, and the body.
    """
    data = json.dumps(body).encode()
    sent = False
    status, request_id, parts = 500, "", list[bytes]()

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": data, "more_body": False}
        await asyncio.Event().wait()  # never: the client does not disconnect
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {name.lower(): value for name, value in message["headers"]}
            request_id = headers.get(b"x-request-id", b"").decode()
        else:
            parts.append(message.get("body", b""))

    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
        # HTTP/1.1 wants one
        (b"host", b"batch"),
    ]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": url, "raw_path": url.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 0), "server": ("batch", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    return status, request_id, json.loads(b"".join(parts))


async def run_requests(
    app: ASGIApp,
    requests: Sequence[BatchRequest],
    at_once: int,
    write: Callable[[str, str], None],
    is_stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Runs requests, and writes a line for each as it ends.

    Args:
        app: The application.
        requests: The requests.
        at_once: The maximum number of open requests.
        write: Writes a line, given the ``custom_id`` of its request.
        is_stopped: Whether no engine runs any more; then nothing is written for the requests that fail.

    Returns:
        The number of those that failed.

    Raises:
        BatchStoppedError: No engine runs any more.
    """
    # one iterator for all tasks
    waiting = iter(requests)
    failed = 0

    async def run_next() -> None:
        nonlocal failed
        # each takes the next one: a task for every request of a large file would need much memory
        for request in waiting:
            status, request_id, body = await call(app, request.url, request.body)
            # its answer is no answer of the model: a later run tries the request again
            if status != 200 and is_stopped():
                raise BatchStoppedError(json.dumps(body, ensure_ascii=False))
            failed += status != 200
            answer = {
                "id": f"batch_req_{secrets.token_hex(12)}",
                "custom_id": request.custom_id,
                "response": {"status_code": status, "request_id": request_id, "body": body},
                "error": None,
            }
            write(request.custom_id, json.dumps(answer, ensure_ascii=False) + "\n")

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(requests))):
                group.create_task(run_next())
    except* BatchStoppedError as stopped:
        raise stopped.exceptions[0] from None
    return failed


async def run_batch(
    settings: ServerSettings,
    worker: WorkerSettings,
    requests: Sequence[BatchRequest],
    write: Callable[[str, str], None],
    start_worker: Callable[[WorkerSettings], Worker] = WorkerProcess,
) -> int:
    """Loads a model, and runs the requests of a batch file on its replicas.

    A request goes on with another replica if its own is lost; this process alone writes the lines.

    Args:
        settings: The settings of the server.
        worker: Those of the worker.
        requests: The requests.
        write: Writes a line of the answers, given the ``custom_id`` of its request.
        start_worker: Starts an engine.

    Returns:
        The number of requests that failed.

    Raises:
        UserError: The model cannot be loaded.
        BatchStoppedError: No engine runs any more.
    """

    async def load_nothing(stored_model: object) -> Any:
        raise RuntimeError("a batch has one model")

    model = await load_model(settings.served_model_name, settings, worker, start_worker)
    pool = ModelPool(dict, load_nothing, PoolLimits())
    pool.pin(model)
    try:
        app = build_app(ServerState(settings, ServerMetrics(), pool))
        # twice as many as run at once: the next prompts are tokenized meanwhile
        at_once = 2 * model.admission.running
        return await run_requests(
            app, requests, at_once, write, lambda: model.engine.state is EngineState.STOPPED
        )
    finally:
        await pool.close()
