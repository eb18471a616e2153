"""The files of ours that a chunk of a streamed chat passes; `docs/pipelines.md` lists them.

In the server, a file counts if any code of it is entered between the frame of the worker and the bytes for the client,
in the thread that reads the worker's channel or in that of the event loop. In the worker, where the scheduler and the
cache work between a step's result and the write too, it counts if a function of it takes or returns the tokens.

Application, HTTP server and the worker's loop are those of `max serve`. The worker is a thread here, and its pipeline
has no tensors: it begins a step when the test says so.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest

from max.interfaces import TextGenerationOutput
from max.pipelines.generation.batch_pipeline import StepResult
from max.pipelines.generation.process.channel import ConnectionChannel, MessageCodec
from max.pipelines.generation.process.events import TokensGenerated
from max.pipelines.generation.process.service import serve
from max.pipelines.scheduler import SchedulerLimits
from max.serve.http.app import build_app
from max.serve.http.state import ServerState
from max.serve.metrics import ServerMetrics
from max.serve.models.loading import load_model
from max.serve.models.pool import ModelPool
from max.serve.models.pool_entry import PoolLimits
from max.serve.process.running import http_server
from max.serve.process.settings import ServerSettings, WorkerSettings
from max.serve.worker.queued_channel import QueuedChannel
from tests.pipelines import counting_pipeline
from tests.pipelines.counting_pipeline import CountingPipeline
from tests.serve.conftest import TINY

OURS = str(Path(__file__).parents[2] / "src" / "max")
WORD = 509
"""A token of tiny-chat that is a whole text."""
IN_SERVER = {
    "pipelines/generation/process/channel.py",
    "serve/worker/subscription.py",
    "serve/requests/generation.py",
    "pipelines/tokenization/text_stream.py",
    "serve/openai/chat.py",
    "serve/http/streaming.py",
}
IN_WORKER = {
    "interfaces/text_generation.py",
    "pipelines/generation/engine.py",
    "pipelines/generation/process/service.py",
    "pipelines/generation/process/events.py",
    "pipelines/generation/process/worker_loop.py",
    "pipelines/generation/process/channel.py",
}


def file_of(frame: FrameType | None) -> str:
    """The file of a frame, from the package; empty: it is not ours."""
    name = "" if frame is None else frame.f_code.co_filename
    return name[len(OURS) + 1 :] if name.startswith(OURS) else ""


def has_tokens(value: object) -> bool:
    """Whether a value is, or contains, what a request gets of a step."""
    if isinstance(value, (list, tuple, dict)):
        return any(map(has_tokens, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (TextGenerationOutput, TokensGenerated, bytes))


class Trace:
    """The files that a chunk passes, of the calls while it is on."""

    def __init__(self) -> None:
        self.server: set[str] = set()
        self.worker: set[str] = set()
        self.on = self.has_result = False

    def in_thread(self, frame: FrameType, event: str, argument: object) -> None:
        """A hook of ``sys.setprofile`` for each new thread."""
        match threading.current_thread().name:
            case "worker":
                self.in_worker(frame, event, argument)
            case "engine events":
                self.in_server(frame, event, argument)
            case _:
                sys.setprofile(None)

    def in_server(self, frame: FrameType, event: str, argument: object) -> None:
        """A hook for the threads of the server."""
        if self.on and event == "call":
            self.server.add(file_of(frame))

    def in_worker(self, frame: FrameType, event: str, argument: object) -> None:
        """A hook for the loop of the worker."""
        if (
            not (self.on and self.has_result)
            or event not in ("call", "return")
            or not file_of(frame)
        ):
            return
        code = frame.f_code
        taken = [frame.f_locals[name] for name in code.co_varnames[: code.co_argcount]]
        if has_tokens(taken if event == "call" else argument):
            self.worker |= {file_of(frame), file_of(frame.f_back)}


class Steps(CountingPipeline):
    """A pipeline whose steps the test begins; the trace of the worker is on between two of them."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(400)
        self._trace, self.begins = trace, threading.Semaphore(0)

    def execute(self, inputs: Any) -> StepResult:
        self._trace.has_result = False
        self.begins.acquire()
        result = StepResult(super().execute(inputs), 1)
        self._trace.has_result = True
        return result


class Worker:
    """A worker that is a thread."""

    exit_reason, pid, signs = "", 1, None

    def __init__(self, pipeline: CountingPipeline) -> None:
        # on Windows a pipe has a class of its own, with the same methods
        here, there = cast("tuple[Connection, Connection]", multiprocessing.Pipe())
        self.channel = QueuedChannel(ConnectionChannel(here, MessageCodec()))
        limits = SchedulerLimits(max_batch_size=8, max_num_steps=1)
        channel = ConnectionChannel[Any, Any](there, MessageCodec())
        arguments = (pipeline, limits, channel, 60.0)
        self._thread = threading.Thread(target=serve, args=arguments, name="worker")
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def kill(self) -> None:
        self.channel.end_sends()


async def texts(reader: asyncio.StreamReader, count: int) -> list[str]:
    """The texts of the next chunks of an answer."""
    found: list[str] = []
    while len(found) < count:
        line = await reader.readline()
        if line.startswith(b"data: {"):
            found.append(json.loads(line[6:])["choices"][0]["delta"]["content"])
        assert line and b"error" not in line
    return found


@contextmanager
def hooked(hook: Any) -> Iterator[None]:
    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(None)


async def stream(trace: Trace) -> None:
    """Streams a chat, and notes the files of chunks after the first."""
    pipeline = Steps(trace)
    settings, metrics = ServerSettings(check_answers_s=0), ServerMetrics()
    config = WorkerSettings({"model_path": str(TINY)})
    model = await load_model("tiny", settings, config, lambda _: Worker(pipeline))
    pool = ModelPool(dict, None, PoolLimits())  # type: ignore[arg-type]
    pool.pin(model)
    listener = socket.create_server(("127.0.0.1", 0))
    app = build_app(ServerState(settings, metrics, pool))
    server = http_server(settings, app, listener)
    serving = asyncio.ensure_future(server.serve([listener]))
    await server.begun.wait()
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    messages = [{"role": "user", "content": "a"}]
    body = json.dumps({"stream": True, "max_tokens": 9, "messages": messages}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    pipeline.begins.release()
    assert (await texts(reader, 2))[0] == ""  # the first event has the role
    word = model.tokenizer.delegate.decode([WORD])
    trace.on = True
    with hooked(trace.in_server):
        for _ in range(3):
            pipeline.begins.release()
            assert await texts(reader, 1) == [word]
    trace.on = False
    pipeline.begins.release(9)
    writer.close()
    server.stop()
    await serving
    await model.engine.close(finish=False, timeout=20)


def test_a_chunk_passes_six_files_of_the_server_and_six_of_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counting_pipeline, "next_token", lambda sequence, seed: WORD)
    trace = Trace()
    threading.setprofile(trace.in_thread)
    try:
        asyncio.run(asyncio.wait_for(stream(trace), 60))
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    assert trace.server - {""} == IN_SERVER
    assert trace.worker - {""} == IN_WORKER
