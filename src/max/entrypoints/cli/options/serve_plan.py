"""What `max serve` runs when its options are read: in its own process, or in one that a first process watches."""

from __future__ import annotations

import faulthandler
import re
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import click

from max.entrypoints.cli.errors import StoppedError, report
from max.entrypoints.cli.progress import Progress, is_live
from max.serve.process.settings import DeployedModel, ServerSettings, WorkerSettings

_STEP_S = 1.0
"""A step that is seen twice at this interval is printed."""


@dataclass(frozen=True)
class ServePlan:
    """What the options say.

    Args:
        settings: The settings of the server.
        worker: Those of a worker.
        deployed_models: Several models; None: there is one, or none.
        models_dir: The folder of models that requests ask for; None: the default.
        limits: How many of them are loaded, and for how long.
    """

    settings: ServerSettings
    worker: WorkerSettings
    deployed_models: list[DeployedModel] | None
    models_dir: str | None
    limits: tuple[Any, ...]


def run_owner(plan: ServePlan, listener: socket.socket, guard: Any) -> int:
    """Runs a server that another process watches; errors are shown as those of a command.

    Args:
        plan: What the options say.
        listener: The socket of the server.
        guard: What is known of that process, a ``Guarded``.

    Returns:
        The exit code.
    """
    from max.serve.process.logs import set_up_logs

    def serve() -> None:
        say_what_ends_it()
        set_up_logs(plan.worker.log_level, plan.settings.logs)
        run_plan(plan, listener, guard)

    return report(click.Command("serve", callback=serve), [])


def run_plan(plan: ServePlan, listener: socket.socket, guard: Any = None) -> None:
    """Runs a server until a signal ends it.

    Args:
        plan: What the options say.
        listener: Its socket.
        guard: What is known of the process that starts another one if this one is lost, a ``Guarded``; None: none does.

    Raises:
        Exception: It cannot run.
    """
    settings, config = plan.settings, plan.worker.config
    if plan.deployed_models is not None:
        from max.serve.models.deployment import Deployment
        from max.serve.process.server import run_server

        engines = sum(model.replicas for model in plan.deployed_models)
        cluster = _cluster(plan, guard, engines)
        number = run_server(settings, Deployment(plan.deployed_models), listener, cluster, guard)
        if number is not None:
            raise stop_error(number)
        return
    if not config.get("model_path"):
        from max.serve.models.pool_entry import PoolLimits
        from max.serve.process.server import RouterSettings, run_server

        root = None if plan.models_dir is None else Path(plan.models_dir)
        models = RouterSettings(root, PoolLimits(*plan.limits), plan.worker)
        run_server(settings, models, listener, _cluster(plan))
        return
    # the next imports take a while: the worker process starts before them, and loads beside them
    cluster = _cluster(plan, guard)
    try:
        worker = _first_worker(plan, cluster, guard)
    except OSError as error:
        from max.serve.worker.started_worker import refused_start

        raise refused_start(error) from error
    progress = _ServeProgress(config.get("served_model_name") or config["model_path"], worker.signs)
    try:
        from max.serve.process.server import FirstModel, run_server

        models = FirstModel(plan.worker, worker, progress.close)
        number = run_server(settings, models, listener, cluster, guard)
        if number is not None:
            raise stop_error(number)
    finally:
        progress.close()
        worker.kill()


def _first_worker(plan: ServePlan, cluster: Any, guard: Any) -> Any:
    """The worker of the first replica: that of an earlier owner, or a new one."""
    from max.serve.worker.placement import replica_settings
    from max.serve.worker.process import WorkerProcess
    from max.serve.worker.started_worker import StartOf

    if cluster is not None:
        start = StartOf(cluster.start_worker, plan.worker)
    else:
        start = StartOf(WorkerProcess, replica_settings(plan.worker, plan.settings.replicas)[0])
    if guard is None or guard.last is None or not guard.last.models:
        return start()
    from max.serve.routers.adopted import adopt_here, start_known

    adopt = adopt_here if cluster is None else cluster.adopt
    return start_known(guard.last.models[0].engines[0], start, adopt)


def _cluster(plan: ServePlan, guard: Any = None, replicas: int | None = None) -> Any:
    """The cluster, a ``RayCluster``, whose machines run the engines; None: this machine does.

    Args:
        plan: What the options say.
        guard: What is known of the process that watches this one; None: none does.
        replicas: The engines of all models; None: those of the one model.
    """
    settings = plan.settings
    if settings.ray is None:
        return None
    from max.serve.remote.ray_cluster import RayCluster

    folder = plan.worker.doors if guard is not None else ""
    cluster = RayCluster(settings.ray, replicas or settings.replicas, folder)
    # engines come and go: all of them of models on demand, else those that the load needs
    if plan.deployed_models is None and not plan.worker.config.get("model_path"):
        cluster.keep_spares(settings.replicas)
    elif (settings.max_replicas or 0) > settings.replicas:
        cluster.keep_spares(1)
    if guard is not None and guard.last is not None:
        for node in guard.last.excluded_nodes:
            cluster.exclude(node)
    return cluster


class _ServeProgress:
    """The load of the server's model: a changing line on a terminal, else a line for each step.

    Args:
        model: The model's name.
        signs: The signs of the worker that loads it.
    """

    def __init__(self, model: str, signs: Any) -> None:
        self._progress, self._signs = Progress(), signs
        self._progress.show(f"loading {model}", lambda: signs.loading)
        self._ended = threading.Event()
        if not is_live():
            self._model = model
            threading.Thread(target=self._print_steps, name="progress", daemon=True).start()

    def _print_steps(self) -> None:
        """Prints the steps that take longer than a moment."""
        printed, seen = "", ""
        while not self._ended.wait(_STEP_S):
            step = re.sub(r" [0-9]+/[0-9]+$", "", self._signs.loading)
            if step == seen != printed:  # since the last look, and not printed yet
                printed = step
                click.echo(f"loading {self._model}: {step}", err=True)
            seen = step

    def close(self) -> None:
        """Ends the line."""
        self._ended.set()
        self._progress.close()


def stop_error(signal_number: int) -> StoppedError:
    """The error of a signal that came before the server was ready.

    Args:
        signal_number: The signal.
    """
    name = signal.Signals(signal_number).name
    return StoppedError(f"stopped by {name} before the server was ready", 128 + signal_number)


def say_what_ends_it() -> None:
    """Names the signal that ends the process before the server handles signals, and prints the stacks after a crash."""

    def stop(signal_number: int, frame: FrameType | None) -> None:
        raise stop_error(signal_number)

    signal.signal(signal.SIGTERM, stop)
    try:
        faulthandler.enable()
    except (AttributeError, ValueError, OSError):
        pass  # stderr is closed or no file
