"""`max serve`: serves a model over HTTP."""

from __future__ import annotations

import errno
import faulthandler
import importlib.util
import json
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import click

from max._config import flags
from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.errors import CommandError, StoppedError
from max.entrypoints.cli.options.answer_options import answer_settings
from max.entrypoints.cli.options.config_options import GroupedCommand, config_options, set_values
from max.entrypoints.cli.options.env_file import read_env_file
from max.entrypoints.cli.options.model_names import MODEL_FIELDS, ModelType, set_model
from max.entrypoints.cli.options.models_file import deployed_models, read_models_file
from max.entrypoints.cli.options.serve_options import PREFIX, server_options
from max.entrypoints.cli.progress import Progress, is_live
from max.serve.process.settings import (
    API_TYPES,
    DeployedModel,
    LogSettings,
    RaySettings,
    ServerSettings,
    WatchLimits,
    WorkerSettings,
)

_STEP_S = 1.0
"""A step that is seen twice at this interval is printed."""
_NEEDED = ("fastapi", "uvicorn", "pydantic", "msgspec", "prometheus_client")


class ServeCommand(GroupedCommand):
    """`max serve`: its variables may be in the file `.env` of the current folder."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: object,
    ) -> click.Context:
        """Reads the file, then the arguments.

        Args:
            info_name: The command's name.
            args: The arguments.
            parent: The call of ``max``.
            extra: As for ``click.Command``.
        """
        if not extra.get("resilient_parsing"):  # not while a shell completes a line
            read_env_file(Path(".env"))
        return super().make_context(info_name, args, parent, **extra)


@click.command("serve", cls=ServeCommand, short_help="Serve a model over HTTP.")
@click.argument(
    "model",
    required=False,
    metavar="[MODEL | FILE.yaml]",
    type=ModelType(),
    is_eager=True,
    callback=read_models_file,
)
@server_options
@config_options
@partial(log_level_option, envvar=PREFIX + "LOGS_CONSOLE_LEVEL")
@click.pass_context
def serve(context: click.Context, model: str | None, **options: Any) -> None:
    """Serve a model over HTTP.

    MODEL is a folder, a GGUF file, or a name: of `max ls`, a short name, or one on the hub. Without one, models
    are loaded on their first request and unloaded when they are idle. OpenAI's API is at /v1; /health, /metrics
    and /version beside it. FILE.yaml has options, and several models under `models`.
    """
    check_packages("serve")
    _say_what_ends_it()
    if model is not None or options.get("model_path"):
        named = set_values({key: options[key] for key in MODEL_FIELDS})
        set_model(named, model, "serve")
        options |= named
    settings = _settings(options)
    models_dir = options.pop("models_dir")
    limits = (options.pop("max_loaded_models"), options.pop("idle_timeout"))
    shows_settings = options.pop("pretty_print_config")
    config = set_values(options)
    # drafting by look-up pays by itself, or is not done
    config.setdefault("speculative_method", "auto")
    if shows_settings:
        values = {**asdict(settings), "api_types": sorted(settings.api_types)}
        # they are secret
        del values["api_keys"]
        click.echo(json.dumps({"server": values, "model": config}, indent=1, default=str))
    level = context.find_root().meta.get("log_level") or flags.MAX_LOG_LEVEL
    worker_settings = WorkerSettings(config, level, settings.logs, settings.watch.unhealthy_s)
    deployed = deployed_models(context, worker_settings, settings.ray is not None)
    if deployed is not None:
        _check_several(config, models_dir, settings)
    elif not config.get("model_path"):
        _check_router(config, settings)
    elif models_dir is not None:
        raise CommandError("--model and --models-dir are given", "Give one of them.")
    if settings.routers > 1:
        _check_routers(settings, deployed, bool(deployed or config.get("model_path")))
        doors = tempfile.mkdtemp(prefix="supremum-")
        context.call_on_close(partial(shutil.rmtree, doors, ignore_errors=True))
        worker_settings = replace(worker_settings, doors=doors)
        if deployed is not None:
            deployed = [replace(m, worker=replace(m.worker, doors=doors)) for m in deployed]
    if settings.logs != LogSettings() or level != "warning":
        from max.serve.process.logs import set_up_logs

        try:
            set_up_logs(level, settings.logs)
        except OSError as error:
            raise CommandError(
                f"cannot write the log {settings.logs.file}: {error.strerror or error}",
                "Give another --log-file.",
            ) from error
    # each of these imports takes a while: the worker process starts before the last one, and loads beside it
    from max.serve.process.listener import open_socket

    try:
        listener = open_socket(settings)
    except OSError as error:
        wrong_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        raise CommandError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}",
            "Give another --host: an address of this machine, 127.0.0.1 or 0.0.0.0."
            if wrong_host
            else "Give another --port; 0 takes one that is free.",
        ) from error
    if deployed is not None:
        from max.serve.models.deployment import Deployment
        from max.serve.process.server import run_server

        engines = sum(model.replicas for model in deployed)
        cluster = _cluster(settings, engines)
        number = run_server(settings, Deployment(deployed), listener, cluster)
        if number is not None:
            raise _stop_error(number)
        return
    if not config.get("model_path"):
        from max.serve.models.pool_entry import PoolLimits
        from max.serve.process.server import RouterSettings, run_server

        root = None if models_dir is None else Path(models_dir)
        models = RouterSettings(root, PoolLimits(*limits), worker_settings)
        run_server(settings, models, listener, _cluster(settings))
        return
    from max.serve.worker.placement import replica_settings
    from max.serve.worker.process import WorkerProcess

    cluster = _cluster(settings)
    try:
        if cluster is None:
            worker = WorkerProcess(replica_settings(worker_settings, settings.replicas)[0])
        else:
            worker = cluster.start_worker(worker_settings)
    except OSError as error:
        raise CommandError(
            f"the worker process cannot be started: {error.strerror or error}",
            "Check the free memory, and the limits of processes and open files (`ulimit -a`).",
        ) from error
    progress = _ServeProgress(config.get("served_model_name") or config["model_path"], worker.signs)
    try:
        from max.serve.process.server import FirstModel, run_server

        models = FirstModel(worker_settings, worker, progress.close)
        number = run_server(settings, models, listener, cluster)
        if number is not None:
            raise _stop_error(number)
    finally:
        progress.close()
        worker.kill()


def _cluster(settings: ServerSettings, replicas: int | None = None) -> Any:
    """The cluster, a ``RayCluster``, whose machines run the engines; None: this machine does.

    Args:
        settings: The settings of the server.
        replicas: The engines of all models; None: those of the one model.
    """
    if settings.ray is None:
        return None
    from max.serve.remote.ray_cluster import RayCluster

    return RayCluster(settings.ray, replicas or settings.replicas)


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
            if step == seen != printed:
                printed = step
                click.echo(f"loading {self._model}: {step}", err=True)
            seen = step

    def close(self) -> None:
        """Ends the line."""
        self._ended.set()
        self._progress.close()


def _stop_error(number: int) -> StoppedError:
    name = signal.Signals(number).name
    return StoppedError(f"stopped by {name} before the server was ready", 128 + number)


def _say_what_ends_it() -> None:
    """Names the signal that ends the process before the server handles signals, and prints the stacks after a crash."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _stop_error(number)

    signal.signal(signal.SIGTERM, stop)
    try:
        faulthandler.enable()
    except (AttributeError, ValueError, OSError):
        pass  # stderr is closed or no file


def _check_router(config: dict[str, Any], settings: ServerSettings) -> None:
    """Refuses options that name or describe one model where none is given."""
    for name in ("weight_path", "served_model_name", "chat_template"):
        if config.get(name):
            option = "--" + name.replace("_", "-")
            raise CommandError(
                f"{option} is of one model, and no model is given", "Give one with --model."
            )
    if settings.task is not None:
        raise CommandError("--task is of one model", "Give one with --model.")


def _check_routers(
    settings: ServerSettings, deployed: Sequence[DeployedModel] | None, has_model: bool
) -> None:
    """Refuses what several server processes do not do."""
    if sys.platform == "win32":
        raise CommandError("--routers needs sockets that Windows has not", "Leave it out.")
    if not has_model:
        raise CommandError(
            "--routers needs a model: one process loads models on their first request",
            "Give one with --model, or a file with several.",
        )
    numbers = [settings.max_replicas, *(model.max_replicas for model in deployed or ())]
    if any(number is not None for number in numbers):
        raise CommandError(
            "--routers and a number of replicas that follows the load (--max-replicas) are given",
            "Give one of them.",
        )


def _check_several(
    config: dict[str, Any], models_dir: str | None, settings: ServerSettings
) -> None:
    """Refuses options of one model, or of none, where a file has several."""
    for name in (*MODEL_FIELDS[:2], "weight_path", "models_dir"):
        if config.get(name) or (name == "models_dir" and models_dir):
            option = "--model" if name == "model_path" else "--" + name.replace("_", "-")
            raise CommandError(f"{option} is given, and the file has models", "Give one of them.")
    if settings.replicas > 1 or settings.max_replicas is not None:
        raise CommandError(
            "--replicas is of one model, and the file has several", "Give each its `replicas`."
        )


def check_packages(command: str) -> None:
    """Checks that the packages of the extra ``serve`` are installed.

    Args:
        command: The command that needs them.

    Raises:
        CommandError: Some are not.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(
            f"`max {command}` needs packages that are not installed: {', '.join(missing)}",
            'Install them with: pip install "supremum[serve]"',
        )


def ray_settings(options: dict[str, Any]) -> RaySettings | None:
    """How a Ray cluster is joined; None: none is. Its options are removed.

    Args:
        options: All options of a command.

    Raises:
        CommandError: An option of a cluster is given, and ``--ray`` is not.
    """
    is_ray, address, cpus = (options.pop(name) for name in ("ray", "ray_address", "ray_cpus"))
    for name, value in (("--ray-address", address), ("--ray-cpus", cpus)):
        if value is not None and not is_ray:
            raise CommandError(f"{name} is of a Ray cluster", "Give --ray too.")
    if options.get("max_replicas") is not None and not is_ray:
        raise CommandError(
            "--max-replicas needs a cluster: on one machine, replicas divide the cores",
            "Give --ray too, or only --replicas.",
        )
    return RaySettings(address, cpus) if is_ray else None


def _max_replicas(options: dict[str, Any]) -> int | None:
    """The greatest number of replicas; the options of both numbers are removed."""
    least, most = options.pop("replicas"), options.pop("max_replicas")
    if most is not None and most < least:
        raise CommandError(
            f"--max-replicas is {most}, less than --replicas, {least}",
            "Give a greater --max-replicas.",
        )
    return most


def _endpoint(address: str | None) -> str | None:
    """The address of a collector; None where it is empty."""
    if address and not address.startswith(("http://", "https://")):
        raise CommandError(
            f"--otlp-endpoint is {address!r}", "Give a URL such as http://127.0.0.1:4318."
        )
    return address or None


def _settings(options: dict[str, Any]) -> ServerSettings:
    """The settings of the server; their options are removed."""
    keys = list(options.pop("api_key"))
    if (file := options.pop("api_key_file")) is not None:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        keys += [line.strip() for line in lines if line.strip()]
        if not keys:
            raise CommandError(f"{file} has no key", "Write one key a line.")
    certificate, key = options.pop("ssl_certfile"), options.pop("ssl_keyfile")
    if (certificate is None) != (key is None):
        raise CommandError(
            "TLS needs a certificate and its key", "Give --ssl-certfile and --ssl-keyfile."
        )
    watch = WatchLimits(
        options.pop("unhealthy_after"),
        options.pop("restart_after"),
        options.pop("step_timeout"),
        options.pop("restart_wait"),
    )
    if 0 < watch.restart_s < watch.unhealthy_s:
        raise CommandError(
            f"--restart-after is {watch.restart_s:g}, less than --unhealthy-after, {watch.unhealthy_s:g}",
            "Give a greater --restart-after; 0: never.",
        )
    return ServerSettings(
        watch=watch,
        replicas=options["replicas"],
        routers=options.pop("routers"),
        check_answers_s=options.pop("check_answers"),
        ray=ray_settings(options),
        max_replicas=_max_replicas(options),
        host=options.pop("host"),
        port=options.pop("port"),
        metrics_port=options.pop("metrics_port") or None,
        api_keys=tuple(keys),
        max_queue=options.pop("max_queue"),
        max_key_requests=options.pop("max_key_requests"),
        key_requests_per_minute=options.pop("key_requests_per_minute"),
        max_request_bytes=options.pop("max_request_bytes"),
        max_open_request_bytes=options.pop("max_open_request_bytes"),
        request_timeout_s=options.pop("request_timeout"),
        graceful_timeout_s=options.pop("graceful_shutdown_timeout"),
        served_model_name=options.get("served_model_name"),
        tls_certificate=certificate,
        tls_key=key,
        cors_origins=tuple(options.pop("cors_origin")),
        allowed_hosts=options.pop("allowed_hosts"),
        share_prefixes=bool(options.pop("share_prefixes")),
        tenant_header=options.pop("tenant_header"),
        tool_parser=options.pop("tool_parser"),
        answers=answer_settings(options),
        task=options.pop("task"),
        web_page=options.pop("ui"),
        api_types=options.pop("api_types") or API_TYPES,
        log_requests=bool(options.pop("log_requests")),
        otlp_endpoint=_endpoint(options.pop("otlp_endpoint")),
        logs=LogSettings(
            file=options.pop("log_file"),
            prefix=options.pop("log_prefix"),
            structured=bool(options.pop("structured_logging")),
            load_interval_s=options.pop("load_log_interval"),
        ),
    )
