"""Runs a server: worker, models, HTTP, signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from max.interfaces import PipelineTask
from max.pipelines.core.exceptions import ConfigError
from max.serve.admission import Admission
from max.serve.http.app import build_app
from max.serve.http.metrics_listener import start_metrics_listener
from max.serve.http.state import ServerState
from max.serve.metrics import ServerMetrics
from max.serve.model import ServedModel
from max.serve.settings import ServerSettings, WorkerSettings
from max.serve.worker.client import EngineClient
from max.serve.worker.config import served_config
from max.serve.worker.process import WorkerProcess

logger = logging.getLogger("max.serve")


def _say(line: str) -> None:
    """Writes a line to stdout at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class _Server(uvicorn.Server):
    """A server of uvicorn whose signals are handled here, and which tells that it listens."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles no signals."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen, and prints the line that scripts wait for.

        Args:
            sockets: Sockets that listen already.
        """
        await super().startup(sockets)
        if self.started and sockets:
            scheme = "https" if self.config.is_ssl else "http"
            host, port = sockets[0].getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            _say(f"Server ready on {scheme}://{host}:{port} (Press CTRL+C to quit)")


def run_server(
    settings: ServerSettings,
    worker_settings: WorkerSettings,
    listener: socket.socket,
    worker: WorkerProcess,
) -> None:
    """Serves a model until a signal comes.

    Args:
        settings: The settings of the server.
        worker_settings: Those of its worker.
        listener: The socket.
        worker: The first worker, which loads the model meanwhile.

    Raises:
        UserError: The model cannot be loaded, for a reason that the user can correct.
        RuntimeError: The model cannot be loaded.
    """
    try:
        runner = asyncio.Runner(loop_factory=_loop_factory())
        with runner:
            runner.run(_serve(settings, worker_settings, listener, worker))
    finally:
        worker.kill()
        listener.close()


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


async def _serve(
    settings: ServerSettings,
    worker_settings: WorkerSettings,
    listener: socket.socket,
    worker: WorkerProcess,
) -> None:
    stop = asyncio.Event()
    _on_signals(stop)
    engine = EngineClient(lambda: WorkerProcess(worker_settings), worker)
    engine.start()
    try:
        metrics = ServerMetrics()
        state = ServerState(settings, metrics)
        # the worker loads the weights meanwhile
        config, task = await asyncio.to_thread(served_config, worker_settings.config)
        if settings.task not in (None, task.value):
            raise ConfigError(
                f"{config.model_config.model_name} is for {task.value}, not for {settings.task}",
                "Leave out --task, or give another --model.",
            )
        admission = Admission(1, settings.max_queue)
        name = settings.served_model_name or config.model_config.model_name
        model = await asyncio.to_thread(
            ServedModel, name, config, engine, admission, settings.tool_parser
        )
        model.encodes = task is PipelineTask.EMBEDDINGS_GENERATION
        state.models[name] = model
        _add_gauges(state, model)
        app = build_app(state)
        ready = asyncio.ensure_future(engine.wait_ready())
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            return
        admission.running = ready.result().max_batch_size
        await _listen(settings, app, listener, stop, engine, metrics)
    finally:
        await engine.close(finish=False, timeout=2.0)


async def _listen(
    settings: ServerSettings,
    app: ASGIApp,
    listener: socket.socket,
    stop: asyncio.Event,
    engine: EngineClient,
    metrics: ServerMetrics,
) -> None:
    """Takes connections until a signal comes; then open requests get some time to end."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=max(1, round(settings.graceful_timeout_s)),
        timeout_keep_alive=30,
    )
    server = _Server(config)
    with start_metrics_listener(settings, metrics):
        serving = asyncio.ensure_future(server.serve([listener]))
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if engine.open_requests:
            logger.warning("waiting for %d open requests to end", engine.open_requests)
        server.should_exit = True
        stop.clear()
        again = asyncio.ensure_future(stop.wait())
        await asyncio.wait({serving, again}, return_when=asyncio.FIRST_COMPLETED)
        server.force_exit = True
        again.cancel()
        await serving


def _on_signals(stop: asyncio.Event) -> None:
    """Lets SIGINT and SIGTERM end the server gracefully, and at once where they come twice."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stop.set)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop.set))


def _add_gauges(state: ServerState, model: ServedModel) -> None:
    admission, engine, gauge = model.admission, model.engine, state.metrics.gauge
    gauge(
        "num_requests_running",
        "Sequences that run.",
        lambda: min(admission.open, admission.running),
    )
    gauge("num_requests_queued", "Sequences that wait.", lambda: admission.waiting)
    gauge("batch_size", "Sequences that generate.", lambda: engine.stats.running)
    gauge(
        "cache_num_used_blocks",
        "Pages of the KV cache that sequences hold.",
        lambda: engine.stats.used_pages,
    )
    gauge(
        "cache_num_total_blocks",
        "Pages of the KV cache.",
        lambda: 0 if engine.ready is None else engine.ready.total_pages,
    )
    gauge(
        "cache_preemption_count",
        "Times that a sequence has lost its pages.",
        lambda: engine.stats.preemptions,
    )
    gauge(
        "cache_hit_rate",
        "Tokens of prompts that were in the cache, of all.",
        lambda: engine.stats.reused_tokens / max(engine.stats.prompt_tokens, 1),
    )
    gauge("worker_restarts", "Workers that died.", lambda: engine.restarts)
