"""Runs a server: worker, models, HTTP, signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from max._lazy import lazy_module
from max.pipelines.core.exceptions import UserError
from max.pipelines.generation.process.events import StepTimes
from max.pipelines.store.creation import config_values, with_adapter
from max.pipelines.store.local import ModelStore, StoredModel
from max.serve.http.app import build_app
from max.serve.http.connections.hosts import HostRule
from max.serve.http.connections.metrics_listener import metrics_listener
from max.serve.http.connections.quiet_server import QuietServer
from max.serve.http.state import ServerState
from max.serve.metrics import ServerMetrics
from max.serve.models.canaries import Canary
from max.serve.models.deployment import Deployment
from max.serve.models.loading import load_model
from max.serve.models.model import ServedModel
from max.serve.models.pool import ModelPool
from max.serve.models.pool_entry import PoolLimits
from max.serve.process.process_end import end_soon
from max.serve.process.running import (
    BACKLOG,
    LAST_WRITES_S,
    Stop,
    end_gracefully,
    http_server,
    keep_heap,
    loop_factory,
    say,
    until_stopped,
    wait_started,
)
from max.serve.process.settings import ServerSettings, WorkerSettings
from max.serve.remote.cluster import Cluster
from max.serve.requests.request_context import name_requests_in_logs
from max.serve.routers.adopted import adopt_here
from max.serve.routers.forwarding import BehindRouters
from max.serve.routers.guardian import Guarded
from max.serve.routers.handover import Handover, KnownModel
from max.serve.routers.messages import RoutedModel
from max.serve.tracing import Tracing
from max.serve.worker.process import WorkerProcess
from max.serve.worker.started_worker import Worker

if TYPE_CHECKING:
    from max.serve.routers import supervisor as routers
    from max.serve.routers.supervisor import Supervisor
else:
    # most servers have no routers, and some systems have not what these need
    routers = lazy_module("max.serve.routers.supervisor")

logger = logging.getLogger("max.serve")


def _address(settings: ServerSettings, listener: socket.socket) -> str:
    """The URL of a server."""
    scheme = "https" if settings.tls_certificate else "http"
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{port}"


@dataclass(frozen=True)
class FirstModel:
    """The model that a server is started with.

    Args:
        settings: The settings of its worker.
        worker: The worker, which loads the model already.
        on_loaded: Called when the load has ended, also by an error or a signal.
    """

    settings: WorkerSettings
    worker: Worker
    on_loaded: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class RouterSettings:
    """How a server that was started without a model loads models.

    Args:
        models_dir: The folder of the models; None: the default.
        limits: How many are loaded, and for how long.
        worker: The settings of their workers; the model is set for each.
    """

    models_dir: Path | None
    limits: PoolLimits
    worker: WorkerSettings


def run_server(
    settings: ServerSettings,
    models: FirstModel | RouterSettings | Deployment,
    listener: socket.socket,
    cluster: Cluster | None = None,
    guard: Guarded | None = None,
) -> int | None:
    """Serves one model, several, or as a router the models of a folder, until a signal comes; then ends the process.

    Args:
        settings: The settings of the server.
        models: The model, the models, or where models are.
        listener: The socket.
        cluster: The machines of the engines; None: this one.
        guard: The process that starts another owner of the engines if this one is lost; None: there is none.

    Returns:
        The signal that came before the server was ready; None if it was ready.

    Raises:
        UserError: The model cannot be loaded, for a reason that the user can correct.
        RuntimeError: The model cannot be loaded, or the server ended without a signal.
    """
    try:
        # before the loop, as a missing package is an early error
        tracing = Tracing(settings.otlp_endpoint) if settings.otlp_endpoint else None
        runner = asyncio.Runner(loop_factory=loop_factory())
        with runner:
            number = runner.run(_serve(settings, models, listener, tracing, cluster, guard))
        if tracing is not None:
            tracing.close()
        if number is None:
            if cluster is not None:
                cluster.close()
            end_soon()
        return number
    finally:
        if isinstance(models, FirstModel):
            models.worker.kill()
        if cluster is not None:
            cluster.close()
        listener.close()


async def _serve(
    settings: ServerSettings,
    models: FirstModel | RouterSettings | Deployment,
    listener: socket.socket,
    tracing: Tracing | None,
    cluster: Cluster | None,
    guard: Guarded | None,
) -> int | None:
    name_requests_in_logs(logger)
    # a guard hands its signals on
    stop = Stop(settings.graceful_timeout_s, () if guard is None else [signal.SIGTERM])
    last = None if guard is None else guard.last
    store = ModelStore(models.models_dir) if isinstance(models, RouterSettings) else None
    start_worker = WorkerProcess if cluster is None else cluster.start_worker
    pool = _pool(settings, models, store, start_worker)
    loading = _begin_load(settings, models, cluster, last, pool)
    supervisor = None
    try:
        metrics = ServerMetrics()
        hosts = HostRule.of(settings, listener.getsockname()[0])
        state = ServerState(settings, metrics, pool, store, cluster=cluster)
        add_gauges(metrics, pool)
        if settings.routers > 1 and not isinstance(models, RouterSettings):
            # before there are routers: clients wait in its queue, and are not refused
            listener.listen(BACKLOG)
            supervisor = _supervisor(settings, models, listener, last)
            if last is not None:
                state.epochs.set_all(*last.epochs)
            if cluster is not None:
                supervisor.excluded = lambda: cluster.excluded_nodes
            state = replace(state, shared_counts=supervisor.counts, routers=supervisor)
            metrics.others = supervisor.others
            # routers end TLS; between processes of a machine there is none
            plain = replace(settings, tls_certificate=None, tls_key=None)
            # routers listen on the port; this process answers what they hand on
            own = supervisor.owner
            app = BehindRouters(build_app(state, tracing, hosts))
            server = http_server(plain, app, own)
        else:
            own = listener
            server = http_server(settings, build_app(state, tracing, hosts), listener)
        async with metrics_listener(settings, metrics):
            # it answers /health and refuses requests while the model loads
            serving = asyncio.ensure_future(server.serve([own]))
            await wait_started(server, serving)
            if supervisor is not None:
                await supervisor.start()
            if loading is not None and not isinstance(models, RouterSettings):
                say(f"Listening on {_address(settings, listener)} while the model loads")
                if not await _first_load(models, loading, server, serving, stop, pool, supervisor):
                    # ended by a signal before it was ready
                    return stop.number
            if guard is not None:
                # from now on another owner takes over if this one is lost
                guard.ready()
            # after the load: what it has made stays for good
            keep_heap()
            say(f"Server ready on {_address(settings, listener)} (Press CTRL+C to quit)")
            if store is not None and not await asyncio.to_thread(store.models):
                say(f"{store.root} has no models yet; `max pull qwen3:0.6b` gets one meanwhile")
            with _logged_load(settings, pool):
                await until_stopped(serving, stop)
                assert stop.number is not None
                say(f"Server stops: {signal.Signals(stop.number).name}")
                if supervisor is not None:
                    # a second signal ends the wait for the routers
                    stop.clear()
                    await supervisor.stop(settings.graceful_timeout_s, stop)
                    # nobody is left to send requests
                    stop.graceful_s = 0.0
                await end_gracefully(server, serving, stop, pool)
        return None
    finally:
        if loading is not None and not loading.done():
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        if supervisor is not None:
            await supervisor.close()
        await pool.close()


def _begin_load(
    settings: ServerSettings,
    models: FirstModel | RouterSettings | Deployment,
    cluster: Cluster | None,
    last: Handover | None,
    pool: ModelPool,
) -> asyncio.Future[list[ServedModel]] | None:
    """Begins to load the models that the server is started with, of which the pool tells meanwhile; None: none."""
    known = () if last is None else last.models
    if isinstance(models, FirstModel):
        loading = asyncio.ensure_future(
            _load_first(settings, models, cluster, known[0] if known else None)
        )
        name = settings.served_model_name or str(models.settings.config["model_path"])
        pool.announce(name, loading, lambda: _loading(models.worker))
        return loading
    if isinstance(models, Deployment):
        loading = asyncio.ensure_future(models.load(settings, cluster, known))
        pool.announce(models.name, loading, lambda: models.step)
        return loading
    return None


def _supervisor(
    settings: ServerSettings,
    models: FirstModel | Deployment,
    listener: socket.socket,
    last: Handover | None,
) -> Supervisor:
    """Starts and watches the routers of a server."""
    if isinstance(models, FirstModel):
        worker = models.settings
        single = settings.replicas == 1 and settings.max_replicas is None
        routed = [RoutedModel(settings.served_model_name, worker.config, single)]
    else:
        worker = models.models[0].worker
        routed = [
            RoutedModel(
                m.name,
                m.worker.config,
                m.replicas == 1 and m.max_replicas is None,
                m.canary_of,
                m.share,
                m.by,
            )
            for m in models.models
        ]
    return routers.Supervisor(settings, routed, worker.doors, listener, worker.log_level, last)


async def _load_first(
    settings: ServerSettings,
    first: FirstModel,
    cluster: Cluster | None,
    last: KnownModel | None,
) -> list[ServedModel]:
    name, worker = settings.served_model_name, first.worker
    start, adopt = WorkerProcess, adopt_here
    if cluster is not None:
        start, adopt = cluster.start_worker, cluster.adopt
    return [await load_model(name, settings, first.settings, start, worker, last=last, adopt=adopt)]


async def _first_load(
    first: FirstModel | Deployment,
    loading: asyncio.Future[list[ServedModel]],
    server: QuietServer,
    serving: asyncio.Future[None],
    stop: Stop,
    pool: ModelPool,
    supervisor: Supervisor | None,
) -> bool:
    """Waits for the server's models, and its routers; requests that need them are refused meanwhile.

    Returns:
        Whether they are loaded; False: a signal came before.
    """
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({loading, serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        # ends the display of the load, whatever has happened
        first.on_loaded()
        if serving.done():
            await serving
        if not loading.done():
            return False
        if supervisor is not None:
            # before the models are pinned, so that no request is counted in another tally
            supervisor.follow(loading.result())
        for model in loading.result():
            pool.pin(model)
        if isinstance(first, Deployment):
            for each in first.models:
                if each.canary_of:
                    pool.set_canary(each.canary_of, Canary(each.name, each.share, each.by))
        if supervisor is not None:
            routed = asyncio.ensure_future(supervisor.wait_ready())
            await asyncio.wait({routed, serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
            routed.cancel()
            if serving.done():
                await serving
            return stop.number is None
        return True
    finally:
        stopped.cancel()
        # no model was pinned: the load has failed, or a signal came first
        if pool.is_starting:
            server.stop()
            await server.close_connections(LAST_WRITES_S)
            await asyncio.gather(serving, return_exceptions=True)


def _pool(
    settings: ServerSettings,
    models: FirstModel | RouterSettings | Deployment,
    store: ModelStore | None,
    start_worker: Callable[[WorkerSettings], Worker],
) -> ModelPool:
    """The models of a server: those of a folder and of the hub's cache for a router, else none yet."""
    if not isinstance(models, RouterSettings) or store is None:
        return ModelPool(dict, _load_nothing, PoolLimits())
    shared = models.worker

    def catalog() -> dict[str, StoredModel]:
        return {model.name: model for model in store.models()}

    workers: dict[str, Worker] = {}  # the one that was started last for each model

    async def load(stored_model: StoredModel) -> ServedModel:
        own, recipe = await asyncio.to_thread(config_values, store, stored_model)
        # the options of the command hold for each model of the folder
        worker = replace(shared, config=with_adapter({**shared.config}, own))

        def start(worker_settings: WorkerSettings) -> Worker:
            workers[stored_model.name] = start_worker(worker_settings)
            return workers[stored_model.name]

        model = await load_model(stored_model.name, settings, worker, start)
        model.set_recipe(recipe)
        return model

    def alias(name: str) -> str | None:
        try:
            return store.find(name).name
        except UserError:
            return None

    def step(name: str) -> str:
        return _loading(workers[name]) if name in workers else ""

    return ModelPool(catalog, load, models.limits, alias=alias, step=step)


def _loading(worker: Worker) -> str:
    """The step that a worker's load is at; empty: unknown."""
    return "" if worker.signs is None else worker.signs.loading


async def _load_nothing(stored_model: StoredModel) -> ServedModel:
    raise RuntimeError(f"{stored_model.name}: a server of one model loads no other")


@contextlib.contextmanager
def _logged_load(settings: ServerSettings, pool: ModelPool) -> Iterator[None]:
    """Logs the load of busy engines at intervals, if the log level shows it."""
    interval = settings.logs.load_interval_s
    if not interval or not logger.isEnabledFor(logging.INFO):
        yield
        return

    async def log_load() -> None:
        while True:
            await asyncio.sleep(interval)
            for model in pool.loaded_models():
                if (engine := model.engine).open_requests:
                    stats = engine.stats
                    logger.info(
                        "%s: %d running, %d waiting, %d pages used, %d preemptions, %d of %d prompt "
                        "tokens from the cache",
                        model.name,
                        stats.running,
                        stats.waiting,
                        stats.used_pages,
                        stats.preemptions,
                        stats.reused_tokens,
                        stats.prompt_tokens,
                    )

    task = asyncio.ensure_future(log_load())
    try:
        yield
    finally:
        task.cancel()


def add_gauges(metrics: ServerMetrics, pool: ModelPool) -> None:
    """Adds the metrics of the engines: sums over the models that are loaded.

    Args:
        metrics: Receives them.
        pool: The models.
    """

    def total(value: Callable[[ServedModel], float]) -> Callable[[], float]:
        return lambda: sum(value(model) for model in pool.loaded_models())

    def of_starts(name: str) -> Callable[[ServedModel], float]:
        return lambda m: sum(getattr(r.ready.start, name) for r in m.engine.replicas if r.ready)

    def hit_rate() -> float:
        stats = [model.engine.stats for model in pool.loaded_models()]
        return sum(s.reused_tokens for s in stats) / max(sum(s.prompt_tokens for s in stats), 1)

    def step_times() -> dict[str, StepTimes]:
        engines = [model.engine for model in pool.loaded_models()]
        return {
            "prompt": sum((engine.prompt_steps for engine in engines), StepTimes()),
            "decode": sum((engine.decode_steps for engine in engines), StepTimes()),
        }

    metrics.steps(step_times)
    gauge = metrics.gauge
    gauge(
        "num_requests_running",
        "Sequences that run.",
        total(lambda m: min(m.admission.open, m.admission.running)),
    )
    gauge("num_requests_queued", "Sequences that wait.", total(lambda m: m.admission.waiting))
    gauge("batch_size", "Sequences that generate.", total(lambda m: m.engine.stats.running))
    gauge(
        "cache_num_used_blocks",
        "Pages of the KV cache that sequences hold.",
        total(lambda m: m.engine.stats.used_pages),
    )
    gauge(
        "cache_num_total_blocks",
        "Pages of the KV cache.",
        total(lambda m: 0 if m.engine.ready is None else m.engine.ready.total_pages),
    )
    gauge(
        "cache_preemption_count",
        "Times that a sequence has lost its pages.",
        total(lambda m: m.engine.stats.preemptions),
    )
    gauge(
        "drafted_tokens",
        "Tokens that were drafted.",
        total(lambda m: m.engine.stats.drafted_tokens),
    )
    gauge(
        "accepted_tokens",
        "Drafted tokens that were right.",
        total(lambda m: m.engine.stats.accepted_tokens),
    )
    gauge("cache_hit_rate", "Tokens of prompts that were in the cache, of all.", hit_rate)
    gauge("worker_restarts", "Workers that died.", total(lambda m: m.engine.restarts))
    for name, text in (
        ("compiled_parts", "Programs and kernels that running engines have compiled to start."),
        ("packed_weights", "Programs whose weights running engines have packed to start."),
        (
            "fetched_entries",
            "Cache entries that running engines have taken from other machines to start.",
        ),
        ("fetched_bytes", "Bytes of these entries."),
    ):
        gauge(f"start_{name}", text, total(of_starts(name)))
    gauge("models_loaded", "Models that are loaded.", lambda: len(pool.loaded_models()))
    gauge("model_loads", "Models that were loaded since the start.", lambda: pool.loads)
