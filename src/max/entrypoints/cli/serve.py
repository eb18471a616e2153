"""`max serve`: serves a model over HTTP."""

from __future__ import annotations

import errno
import faulthandler
import importlib.util
import json
import signal
import socket
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import click

from max._config import flags
from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.config_file import read_config
from max.entrypoints.cli.env_file import read_env_file
from max.entrypoints.cli.errors import CommandError, StoppedError
from max.entrypoints.cli.options import GroupedCommand, GroupedOption, config_options, given
from max.serve.settings import API_TYPES, LogSettings, ServerSettings, WorkerSettings

TOOL_PARSERS = [
    "hermes",
    "qwen",
    "llama3_json",
    "llama3",
    "llama",
    "mistral",
    "granite",
    "pythonic",
    "deepseek",
    "harmony",
    "generic",
]
_PREFIX = "MAX_SERVE_"
_NEEDED = ("fastapi", "uvicorn", "pydantic", "msgspec", "prometheus_client")


_SERVER, _CLIENTS, _ROUTER, _LOG = "Server", "Clients", "Several models", "Logs and traces"


def _option(*names: str, env: str | list[str], group: str = _SERVER, **attributes: object) -> Any:
    """An option of the server, with its variable of the environment, or several."""
    return click.option(
        *names,
        cls=GroupedOption,
        group=group,
        envvar=_PREFIX + env if isinstance(env, str) else env,
        show_envvar=True,
        show_default=True,
        **attributes,
    )


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


def _json_names(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> frozenset[str] | None:
    """A set of names from a JSON array, or from a text with commas between."""
    if value is None or not value.strip():
        return None
    try:
        names = json.loads(value) if value.lstrip().startswith(("[", '"')) else value.split(",")
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no JSON array: {error}") from error
    if not isinstance(names, list) or not names:
        raise click.BadParameter(f'{value!r} is no list of names, such as ["openai", "responses"]')
    given_names = frozenset(str(name).strip().lower() for name in cast("list[Any]", names))
    if unknown := sorted(given_names - API_TYPES):
        raise click.BadParameter(
            f"there is no API {unknown[0]!r}; there are {', '.join(sorted(API_TYPES))}"
        )
    return given_names


def _hosts(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    """The hosts of values that have one each, or several with commas between."""
    names = [name for value in values for name in value.split(",") if name.strip()]
    if not names:
        return ()
    from max.serve.http.hosts import checked_host

    try:
        return tuple(map(checked_host, names))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command("serve", cls=ServeCommand, short_help="Serve a model over HTTP.")
@_option(
    "--config-file",
    env="CONFIG_FILE",
    type=click.Path(exists=True, dir_okay=False),
    is_eager=True,
    expose_value=False,
    callback=read_config,
    help="A YAML or JSON file with values of options; the command line and variables come before it.",
)
@_option("--host", env="HOST", default="127.0.0.1", help="The address to listen on.")
@_option(
    "--port",
    env="PORT",
    type=click.IntRange(0, 65535),
    default=8000,
    help="The port; 0: one that is free.",
)
@_option(
    "--metrics-port",
    env="METRICS_ENDPOINT_PORT",
    type=click.IntRange(0, 65535),
    default=8001,
    help="The port that has /metrics alone; 0: none.",
)
@_option(
    "--api-key",
    group=_CLIENTS,
    env="API_KEY",
    multiple=True,
    help="A key that clients must give; may be given more than once.",
)
@_option(
    "--api-key-file",
    group=_CLIENTS,
    env="API_KEY_FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="A file with one key a line.",
)
@_option(
    "--max-queue",
    group=_CLIENTS,
    env="MAX_QUEUE",
    type=click.IntRange(min=0),
    default=512,
    help="Requests that may wait; more get status 429.",
)
@_option(
    "--max-key-requests",
    group=_CLIENTS,
    env="MAX_KEY_REQUESTS",
    type=click.IntRange(min=1),
    help="Open requests of one API key; more get status 429.",
)
@_option(
    "--key-requests-per-minute",
    group=_CLIENTS,
    env="KEY_REQUESTS_PER_MINUTE",
    type=click.FloatRange(min=0, min_open=True),
    help="Requests a minute of one API key; more get status 429.",
)
@_option(
    "--max-request-bytes",
    group=_CLIENTS,
    env="MAX_REQUEST_BYTES",
    type=click.IntRange(min=1),
    default=32 << 20,
    help="The longest body of a request.",
)
@_option(
    "--request-timeout",
    group=_CLIENTS,
    env="REQUEST_TIMEOUT_S",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds that a request may take.",
)
@_option(
    "--graceful-shutdown-timeout",
    env="GRACEFUL_SHUTDOWN_TIMEOUT_S",
    type=click.FloatRange(min=0),
    default=5.0,
    help="Seconds that open requests get to end after SIGTERM.",
)
@_option(
    "--ssl-certfile",
    env="SSL_CERTFILE",
    type=click.Path(exists=True, dir_okay=False),
    help="The certificate, in a PEM file.",
)
@_option(
    "--ssl-keyfile",
    env="SSL_KEYFILE",
    type=click.Path(exists=True, dir_okay=False),
    help="The key of the certificate.",
)
@_option(
    "--cors-origin",
    group=_CLIENTS,
    env="CORS_ORIGINS",
    multiple=True,
    help="An origin of web pages that may use the server; may be given more than once.",
)
@_option(
    "--allowed-hosts",
    group=_CLIENTS,
    env="ALLOWED_HOSTS",
    multiple=True,
    callback=_hosts,
    help="Hosts to answer besides those of this machine, with commas between; *.example.com: all names below it.",
)
@_option(
    "--share-prefixes/--no-share-prefixes",
    group=_CLIENTS,
    env="SHARE_PREFIXES",
    help="Let API keys and tenants share cached prefixes, whose times tell what others have asked.",
)
@_option(
    "--tenant-header",
    group=_CLIENTS,
    env="TENANT_HEADER",
    default="X-Tenant-Id",
    help="The header that names the tenant of a request; tenants share no cached prefixes.",
)
@_option(
    "--tool-parser",
    env="TOOL_PARSER",
    type=click.Choice(TOOL_PARSERS),
    help="How the model writes calls of tools. Not set: as its chat template teaches.",
)
@_option(
    "--task",
    env="TASK",
    type=click.Choice(["text_generation", "embeddings_generation"]),
    help="What the model does; an error where its architecture does something else.",
)
@_option(
    "--models-dir",
    group=_ROUTER,
    env="MODELS_DIR",
    type=click.Path(file_okay=False, exists=True),
    help="Without --model: the folder of the models that requests may name. Not set: as `max ls`.",
)
@_option(
    "--max-loaded-models",
    "--models-max",
    group=_ROUTER,
    env="MAX_LOADED_MODELS",
    type=click.IntRange(min=1),
    default=4,
    help="Without --model: the most models that are loaded at once.",
)
@_option(
    "--idle-timeout",
    "--sleep-idle-seconds",
    group=_ROUTER,
    env="IDLE_TIMEOUT_S",
    type=float,
    default=300.0,
    help="Without --model: seconds after which a model without requests is unloaded; negative: never.",
)
@_option(
    "--api-types",
    env="API_TYPES",
    callback=_json_names,
    help='The APIs to serve, a JSON array such as ["openai", "responses"]. Not set: all.',
)
@_option("--ui/--no-ui", env="UI", default=True, help="Have the chat page at /.")
@_option(
    "--log-requests/--no-log-requests", group=_LOG, env="LOG_REQUESTS", help="Log each request."
)
@_option(
    "--log-prefix", group=_LOG, env="LOG_PREFIX", default="", help="Begins each line of the log."
)
@_option(
    "--log-file",
    group=_LOG,
    env="LOGS_FILE_PATH",
    type=click.Path(dir_okay=False, writable=True),
    help="A file that gets each line of the log besides the console.",
)
@_option(
    "--structured-logging/--no-structured-logging",
    group=_LOG,
    env=["MODULAR_STRUCTURED_LOGGING"],
    help="Write each line of the log as a JSON object.",
)
@_option(
    "--load-log-interval",
    group=_LOG,
    env="SCHEDULER_STATS_LOG_INTERVAL_S",
    type=click.FloatRange(min=0),
    default=3.0,
    help="Seconds between two lines with the load of a busy engine, of level info; 0: none.",
)
@_option(
    "--otlp-endpoint",
    group=_LOG,
    env=[_PREFIX + "OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"],
    help="Send traces to this collector, by OTLP over HTTP. Not set: nothing is traced or sent.",
)
@_option(
    "--pretty-print-config/--no-pretty-print-config",
    env="PRETTY_PRINT_CONFIG",
    group=_LOG,
    help="Print the settings as JSON before the start.",
)
@config_options
@partial(log_level_option, envvar=_PREFIX + "LOGS_CONSOLE_LEVEL")
@click.pass_context
def serve(context: click.Context, **options: Any) -> None:
    """Serve a model over HTTP.

    OpenAI's API at /v1; /health, /metrics and /version beside it. Without --model, models are loaded
    on their first request and unloaded when they are idle.
    """
    check_packages("serve")
    _say_what_ends_it()
    settings = _settings(options)
    models_dir = options.pop("models_dir")
    limits = (options.pop("max_loaded_models"), options.pop("idle_timeout"))
    shows_settings = options.pop("pretty_print_config")
    config = given(options)
    if shows_settings:
        values = {**asdict(settings), "api_types": sorted(settings.api_types)}
        del values["api_keys"]
        click.echo(json.dumps({"server": values, "model": config}, indent=1, default=str))
    if not config.get("model_path"):
        _check_router(config, settings)
    elif models_dir is not None:
        raise CommandError("--model and --models-dir are given", "Give one of them.")
    level = context.find_root().meta.get("log_level") or flags.MAX_LOG_LEVEL
    worker_settings = WorkerSettings(config, level, settings.logs)
    if settings.logs != LogSettings() or level != "warning":
        from max.serve.logs import set_up_logs

        try:
            set_up_logs(level, settings.logs)
        except OSError as error:
            raise CommandError(
                f"cannot write the log {settings.logs.file}: {error.strerror or error}",
                "Give another --log-file.",
            ) from error
    # each of these imports takes a while: the worker process starts before the last one, and loads beside it
    from max.serve.listener import open_socket

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
    if not config.get("model_path"):
        from max.serve.pool_entry import PoolLimits
        from max.serve.server import RouterSettings, run_server

        root = None if models_dir is None else Path(models_dir)
        run_server(settings, RouterSettings(root, PoolLimits(*limits), worker_settings), listener)
        return
    from max.serve.worker.process import WorkerProcess

    try:
        worker = WorkerProcess(worker_settings)
    except OSError as error:
        raise CommandError(
            f"the worker process cannot be started: {error.strerror or error}",
            "Check the free memory, and the limits of processes and open files (`ulimit -a`).",
        ) from error
    try:
        from max.serve.server import FirstModel, run_server

        number = run_server(settings, FirstModel(worker_settings, worker), listener)
        if number is not None:
            raise _stopped(number)
    finally:
        worker.kill()


def _stopped(number: int) -> StoppedError:
    name = signal.Signals(number).name
    return StoppedError(f"stopped by {name} before the server was ready", 128 + number)


def _say_what_ends_it() -> None:
    """Names the signal that ends the process before the server handles signals, and prints the stacks after a crash."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _stopped(number)

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
    return ServerSettings(
        host=options.pop("host"),
        port=options.pop("port"),
        metrics_port=options.pop("metrics_port") or None,
        api_keys=tuple(keys),
        max_queue=options.pop("max_queue"),
        max_key_requests=options.pop("max_key_requests"),
        key_requests_per_minute=options.pop("key_requests_per_minute"),
        max_request_bytes=options.pop("max_request_bytes"),
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
