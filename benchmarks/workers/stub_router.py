"""A router process before engines that answer at once: `python -m benchmarks.workers.stub_router MODEL PORT CORE`.

The router is the one of `max serve --routers`: HTTP, keys and their limits in a shared file, templates, tokens, the
choice among four engines by prefixes, metrics. The engines are threads of another process, on another core: they read
each request's frame and send its answer as one frame.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from max.interfaces import GenerationStatus
from max.pipelines.generation.process.channel import ConnectionChannel, MessageCodec
from max.pipelines.generation.process.commands import GenerationRequest
from max.pipelines.generation.process.events import EngineReady, PromptStarted, TokensGenerated
from max.pipelines.store.local import StoredModel
from max.serve.http.app import build_app, error_body
from max.serve.http.connections.hosts import HostRule
from max.serve.http.state import ServerState
from max.serve.metrics import ServerMetrics
from max.serve.models.loading import model_of
from max.serve.models.model import ServedModel
from max.serve.models.pool import ModelPool
from max.serve.models.pool_entry import PoolLimits
from max.serve.process.running import http_server, keep_heap, loop_factory
from max.serve.process.settings import ServerSettings
from max.serve.routers.count_file import counts_of
from max.serve.routers.forwarding import Forwarder
from max.serve.worker.client import EngineClient
from max.serve.worker.queued_channel import QueuedChannel

KEY = "first-key"
ENGINES, ANSWER = 4, tuple(range(300, 316))
"""The number of engines, and the tokens of each answer."""


def run_engines(ends: list[Connection]) -> None:
    """Answers the requests of connections, until they are closed.

    Args:
        ends: The connections, one an engine.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def run(end: Connection) -> None:
        channel: ConnectionChannel[Any, Any] = ConnectionChannel(end, MessageCodec())
        channel.send(EngineReady(256, 128, 4096))
        while True:
            try:
                requests = channel.receive_all()
            except EOFError:
                return
            events: list[Any] = []
            for request in requests:
                if isinstance(request, GenerationRequest):
                    events.append(PromptStarted(request.request_id, time.time()))
                    status = GenerationStatus.MAXIMUM_LENGTH
                    events.append(TokensGenerated(request.request_id, ANSWER, status))
            channel.send_all(events)

    threads = [threading.Thread(target=run, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class StubWorker:
    """The worker of an engine that is a thread of another process."""

    signs, pid, exit_reason = None, None, "it has ended"

    def __init__(self, end: Connection) -> None:
        self.channel = QueuedChannel(ConnectionChannel(end, MessageCodec()))

    def join(self, timeout: float | None = None) -> None:
        """Waits for nothing."""

    def kill(self) -> None:
        """Ends the sends."""
        self.channel.end_sends()


async def run_router(model: str, port: int, cores: set[int]) -> None:
    """Routes requests until the process is ended.

    Args:
        model: The model's folder, for its tokenizer and its chat template.
        port: The port.
        cores: The cores of the engines.
    """
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(ENGINES)]
    engines = context.Process(
        target=run_engines, args=([there for _, there in pairs],), daemon=True
    )
    engines.start()
    os.sched_setaffinity(engines.pid or 0, cores)
    for _, there in pairs:
        there.close()
    workers = [StubWorker(here) for here, _ in pairs]  # pyright: ignore[reportArgumentType]

    def no_more() -> StubWorker:
        raise OSError("engines are not started again")

    client = EngineClient(no_more, workers[0])
    for worker in workers[1:]:
        client.add_replica(no_more, worker)
    client.start()
    settings = ServerSettings(
        port=port,
        api_keys=(KEY, "second-key"),
        max_queue=4096,
        max_key_requests=1000,
        key_requests_per_minute=1e9,
    )
    served = await model_of("m", settings, {"model_path": model, "max_length": 2048}, client)
    await client.wait_ready()
    with tempfile.TemporaryDirectory() as folder:
        counts = counts_of(settings, folder, rows=4, row=1, models=1)
        served.admission.tally = counts.model(0)
        pool = ModelPool(dict, _load_nothing, PoolLimits())
        pool.pin(served)
        state = ServerState(settings, ServerMetrics(), pool, shared_counts=counts)
        app = build_app(state, None, HostRule.of(settings, "127.0.0.1"))
        listener = socket.create_server(("127.0.0.1", port))
        forwarder = Forwarder(app, os.path.join(folder, "owner"), lambda: True, error_body)
        server = http_server(settings, forwarder, listener)
        serving = asyncio.ensure_future(server.serve([listener]))
        await server.begun.wait()
        keep_heap()
        print("ready", flush=True)
        await serving


async def _load_nothing(stored: StoredModel) -> ServedModel:
    raise RuntimeError(f"{stored.name}: this router has one model")


if __name__ == "__main__":
    core = int(sys.argv[3])
    os.sched_setaffinity(0, {core})
    others = set(range(os.cpu_count() or 1)) - {core}
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run_router(sys.argv[1], int(sys.argv[2]), others or {core}))
