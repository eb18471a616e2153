"""Ollama's routes that change what is on this machine: ``/api/pull`` and ``/api/delete``."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from max._lazy import lazy_module
from max.pipelines.core.exceptions import ModelFilesError, UserError
from max.pipelines.store.local import ModelStore, checked_name
from max.serve.errors import ApiError
from max.serve.http.bodies.body import read_body
from max.serve.http.error_responses import as_api_error
from max.serve.http.state import ServerState, refuse_foreign_pages, state_of
from max.serve.http.streaming import event_stream, unless_disconnected
from max.serve.ollama.routes import json_line
from max.serve.ollama.schemas import DeleteBody, PullBody
from max.serve.openai.fields import StrictBody

if TYPE_CHECKING:
    from max.pipelines.store import pull as downloads
    from max.pipelines.store import sources
else:
    # they load the client of the hub
    downloads = lazy_module("max.pipelines.store.pull")
    sources = lazy_module("max.pipelines.store.sources")

BodyT = TypeVar("BodyT", bound=StrictBody)

router = APIRouter(prefix="/api", tags=["Ollama"])


class _ClientLeftError(Exception):
    """Ends the thread of a pull whose client has disconnected; the next pull resumes it."""


@router.post("/pull")
async def pull(request: Request) -> Response:
    """Downloads a model from the Hugging Face hub into the models folder, unless it is there.

    Args:
        request: The connection.
    """
    body, state, store = await read_order(request, PullBody)
    name = name_of(body.model or body.name)
    lines = _pull_lines(name, store)
    if body.stream is not False:
        return await event_stream(request, lines, _pull_error, "application/x-ndjson")

    async def last_line() -> bytes:
        async with aclosing(lines):
            return [line async for line in lines][-1]

    try:
        return Response(
            await unless_disconnected(request, last_line()), 200, None, "application/json"
        )
    except UserError as error:
        return Response(_pull_error(as_api_error(error)), 500, None, "application/json")


@router.delete("/delete")
async def delete(request: Request) -> Response:
    """Deletes a model from this machine, after it was unloaded.

    Args:
        request: The connection.
    """
    body, state, store = await read_order(request, DeleteBody)
    name = name_of(body.model or body.name)
    try:
        await state.pool.delete(name, lambda: store.remove(name))
    except ModelFilesError as error:
        raise ApiError(f"model {name!r} not found: {error}", status=404) from error
    except OSError as error:
        raise ApiError(f"model {name!r} cannot be deleted: {error}", status=500) from error
    return Response(status_code=200)


async def read_order(
    request: Request, schema: type[BodyT]
) -> tuple[BodyT, ServerState, ModelStore]:
    """The body of a request to change what is on this machine, the server and its models.

    Args:
        request: The connection.
        schema: The schema of the body.

    Raises:
        ApiError: The body does not fit, the page is foreign, or the server has no folder.
    """
    body = await read_body(request, schema)
    state = state_of(request, body)
    return body, state, store_of(request, state)


def store_of(request: Request, state: ServerState) -> ModelStore:
    """The models folder of a router; requests of foreign web pages are refused.

    Args:
        request: The connection.
        state: The server.

    Raises:
        ApiError: The page is foreign, or the server has no folder.
    """
    refuse_foreign_pages(request, state)
    if state.store is None:
        raise ApiError(
            "this server was started with one model; `max serve` without --model has a models folder"
        )
    return state.store


def name_of(name: str | None) -> str:
    """The name of a model of a request, checked.

    Args:
        name: The name; ``:latest`` at its end is ignored.

    Raises:
        ApiError: It is missing, or no name.
    """
    if not name:
        raise ApiError("model is missing", param="model")
    try:
        # Ollama's clients add the tag of names without one
        return checked_name(name.removesuffix(":latest"))
    except UserError as error:
        raise ApiError(f"invalid model name: {error}", param="model") from error


def _pull_error(error: ApiError) -> bytes:
    return json_line({"error": f"pull model manifest: {error.message}"})


async def _pull_lines(name: str, store: ModelStore) -> AsyncGenerator[bytes, None]:
    """The lines of a pull, as Ollama has them: the manifest, each file's progress, the end."""
    yield json_line({"status": "pulling manifest"})
    if await asyncio.to_thread(_is_stored, name, store):
        yield json_line({"status": "success"})
        return
    # outside of the lock, as it asks the hub only
    source = await asyncio.wrap_future(_PULL_THREADS.submit(_hub_source, name))
    progress: dict[str, tuple[int, int | None]] = {}
    left = threading.Event()

    def note(file: str, at: int, size: int | None) -> None:
        # called for each block, which is where the thread can end
        if left.is_set():
            raise _ClientLeftError
        progress[file] = (at, size)

    async with _pulling(name):
        # another request may have finished it
        if not await asyncio.to_thread(_is_stored, name, store):
            pulling = _PULL_THREADS.submit(downloads.pull, source, store, name, None, note)
            task = asyncio.wrap_future(pulling)
            sums = {file.name: file.sha256 for file in source.files}
            try:
                while not task.done():
                    await asyncio.wait([task], timeout=_REPORT_S)
                    # a copy: the thread adds to it meanwhile
                    for file, (at, size) in list(progress.items()):
                        digest = f"sha256:{sums.get(file) or file}"
                        line = {"status": f"pulling {file}", "digest": digest, "completed": at}
                        yield json_line(line if size is None else {**line, "total": size})
                        # a file that is complete is reported once
                        if at == size:
                            del progress[file]
                task.result()
            finally:
                left.set()
                pulling.cancel()  # if no thread has started it
                # the thread ends after its current block; the partial file stays for the next pull
                await asyncio.wait({task})
                # read, so that asyncio does not log an error that nobody awaited
                if not task.cancelled():
                    task.exception()
    yield json_line({"status": "verifying sha256 digest"})
    yield json_line({"status": "writing manifest"})
    yield json_line({"status": "success"})


_REPORT_S = 0.2
_PULL_THREADS = ThreadPoolExecutor(8, "pull")
"""Pulls take hours, and would occupy the event loop's threads, which serve loads, prompts and stops."""
_PULLS: dict[str, tuple[asyncio.Lock, int]] = {}


@contextlib.asynccontextmanager
async def _pulling(name: str) -> AsyncGenerator[None, None]:
    """Lets one request at a time pull a model."""
    lock, users = _PULLS.get(name, (asyncio.Lock(), 0))
    _PULLS[name] = (lock, users + 1)
    try:
        async with lock:
            yield
    finally:
        users = _PULLS[name][1] - 1
        if users:
            _PULLS[name] = (lock, users)
        else:
            del _PULLS[name]


def _is_stored(name: str, store: ModelStore) -> bool:
    return any(model.name == name for model in store.models())


def _hub_source(name: str) -> sources.Source:
    """The files of a model of the hub; names that are paths or addresses are refused."""
    if "/" not in name:
        raise ModelFilesError(f"{name!r} is no name on the hub", "Names there are owner/model.")
    return sources.of_hub(name)
