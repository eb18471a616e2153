"""`max serve`: serves a model over HTTP."""

from __future__ import annotations

import errno
import importlib.util
import json
import shutil
import socket
import sys
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from max._config import flags
from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.errors import CommandError
from max.entrypoints.cli.options.answer_options import answer_settings
from max.entrypoints.cli.options.config_options import GroupedCommand, config_options, set_values
from max.entrypoints.cli.options.env_file import read_env_file
from max.entrypoints.cli.options.model_names import MODEL_FIELDS, ModelType, set_model
from max.entrypoints.cli.options.models_file import deployed_models, read_models_file
from max.entrypoints.cli.options.serve_options import PREFIX, server_options
from max.entrypoints.cli.options.serve_plan import ServePlan, run_owner, run_plan, say_what_ends_it
from max.serve.process.settings import (
    API_TYPES,
    LogSettings,
    RaySettings,
    ServerSettings,
    WatchLimits,
    WorkerSettings,
)

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
    say_what_ends_it()
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
        _check_routers(bool(deployed or config.get("model_path")))
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
    from max.serve.process.listener import open_socket

    # before the model is loaded, so that a taken port is told at once
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
    from max.serve.routers.lifeline import can_be_taken_over

    plan = ServePlan(settings, worker_settings, deployed, models_dir, limits)
    if settings.routers > 1 and can_be_taken_over():
        from max.serve.routers.guardian import Guardian

        code = Guardian(
            run_owner, (plan, listener), worker_settings.doors, settings.watch.restart_s
        ).run()
        context.exit(code)
    run_plan(plan, listener)


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


def _check_routers(has_model: bool) -> None:
    """Refuses what several server processes do not do."""
    if sys.platform == "win32":
        raise CommandError("--routers needs sockets that Windows has not", "Leave it out.")
    if not has_model:
        raise CommandError(
            "--routers needs a model: one process loads models on their first request",
            "Give one with --model, or a file with several.",
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
