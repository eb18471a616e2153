"""The options of ``max serve`` that describe the server and not its model."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import click

from max.entrypoints.cli.options.answer_options import ANSWER_OPTIONS, PREFIX, serve_option
from max.entrypoints.cli.options.config_file import read_config
from max.serve.process.host_names import checked_host
from max.serve.process.settings import API_TYPES, WatchLimits

Function = TypeVar("Function", bound=Callable[..., Any])
_SERVER, _CLIENTS, _ROUTER, _LOG = "Server", "Clients", "Several models", "Logs and traces"
_CLUSTER = "Several machines"


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
    try:
        return tuple(map(checked_host, names))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


_OPTIONS = (
    serve_option(
        "--config-file",
        env="CONFIG_FILE",
        type=click.Path(exists=True, dir_okay=False),
        is_eager=True,
        expose_value=False,
        callback=read_config,
        help="A YAML or JSON file with values of options; the command line and variables come before it.",
    ),
    serve_option("--host", env="HOST", default="127.0.0.1", help="The address to listen on."),
    serve_option(
        "--port",
        env="PORT",
        type=click.IntRange(0, 65535),
        default=8000,
        help="The port; 0: one that is free.",
    ),
    serve_option(
        "--metrics-port",
        env="METRICS_ENDPOINT_PORT",
        type=click.IntRange(0, 65535),
        default=8001,
        help="The port that has /metrics alone; 0: none.",
    ),
    serve_option(
        "--replicas",
        env="REPLICAS",
        type=click.IntRange(min=1),
        default=1,
        help="Engines of each model, which divide the cores and the memory of the machine.",
    ),
    serve_option(
        "--routers",
        "--api-server-count",
        env="ROUTERS",
        type=click.IntRange(min=1, max=64),
        default=1,
        help="Processes that share the port, each with HTTP, tokens and the choice of a replica.",
    ),
    serve_option(
        "--check-answers",
        env="CHECK_ANSWERS_S",
        type=click.FloatRange(min=0),
        default=30.0,
        help="Seconds between two comparisons of the logits of replicas; one that differs gets a new worker; 0: never.",
    ),
    serve_option(
        "--ray",
        group=_CLUSTER,
        env="RAY",
        is_flag=True,
        help="Run the engines on the machines of a Ray cluster; one is started if none is running.",
    ),
    serve_option(
        "--ray-address",
        group=_CLUSTER,
        env="RAY_ADDRESS",
        help="The address of the cluster; by default that of RAY_ADDRESS.",
    ),
    serve_option(
        "--ray-cpus",
        group=_CLUSTER,
        env="RAY_CPUS",
        type=click.IntRange(min=1),
        help="The cores of a replica; by default all cores, divided among the replicas.",
    ),
    serve_option(
        "--max-replicas",
        group=_CLUSTER,
        env="MAX_REPLICAS",
        type=click.IntRange(min=1),
        help="The number of replicas follows the load, from --replicas to this number.",
    ),
    serve_option(
        "--api-key",
        group=_CLIENTS,
        env="API_KEY",
        multiple=True,
        help="A key that clients must give; may be given more than once.",
    ),
    serve_option(
        "--api-key-file",
        group=_CLIENTS,
        env="API_KEY_FILE",
        type=click.Path(exists=True, dir_okay=False),
        help="A file with one key a line.",
    ),
    serve_option(
        "--max-queue",
        "--max-queue-size",
        group=_CLIENTS,
        env="MAX_QUEUE",
        type=click.IntRange(min=0),
        default=512,
        help="Requests that may wait; more get status 429.",
    ),
    serve_option(
        "--max-key-requests",
        group=_CLIENTS,
        env="MAX_KEY_REQUESTS",
        type=click.IntRange(min=1),
        help="Open requests of one API key; more get status 429.",
    ),
    serve_option(
        "--key-requests-per-minute",
        group=_CLIENTS,
        env="KEY_REQUESTS_PER_MINUTE",
        type=click.FloatRange(min=0, min_open=True),
        help="Requests a minute of one API key; more get status 429.",
    ),
    serve_option(
        "--max-request-bytes",
        group=_CLIENTS,
        env="MAX_REQUEST_BYTES",
        type=click.IntRange(min=1),
        default=32 << 20,
        help="The longest body of a request.",
    ),
    serve_option(
        "--max-open-request-bytes",
        group=_CLIENTS,
        env="MAX_OPEN_REQUEST_BYTES",
        type=click.IntRange(min=1),
        default=256 << 20,
        help="Bytes of the bodies of all open requests; more get status 503.",
    ),
    serve_option(
        "--request-timeout",
        group=_CLIENTS,
        env="REQUEST_TIMEOUT_S",
        type=click.FloatRange(min=0, min_open=True),
        help="Seconds that a request may take.",
    ),
    serve_option(
        "--graceful-shutdown-timeout",
        env="GRACEFUL_SHUTDOWN_TIMEOUT_S",
        type=click.FloatRange(min=0),
        default=5.0,
        help="Seconds that open requests get to end after SIGTERM.",
    ),
    serve_option(
        "--unhealthy-after",
        env="UNHEALTHY_AFTER_S",
        type=click.FloatRange(min=0.05),
        default=WatchLimits.unhealthy_s,
        help="Seconds without a sign of life of the worker process after which /health is 503.",
    ),
    serve_option(
        "--restart-after",
        env="RESTART_AFTER_S",
        type=click.FloatRange(min=0),
        default=WatchLimits.restart_s,
        help="Seconds without a sign of life after which the worker process is replaced; 0: never.",
    ),
    serve_option(
        "--step-timeout",
        env="STEP_TIMEOUT_S",
        type=click.FloatRange(min=0),
        default=WatchLimits.step_s,
        help="Seconds of one step of the engine after which the worker process is replaced; 0: never.",
    ),
    serve_option(
        "--restart-wait",
        env="RESTART_WAIT_S",
        type=click.FloatRange(min=0),
        default=WatchLimits.wait_s,
        help="Seconds for which requests wait for the next worker process; then they get status 503; 0: no limit.",
    ),
    serve_option(
        "--ssl-certfile",
        env="SSL_CERTFILE",
        type=click.Path(exists=True, dir_okay=False),
        help="The certificate, in a PEM file.",
    ),
    serve_option(
        "--ssl-keyfile",
        env="SSL_KEYFILE",
        type=click.Path(exists=True, dir_okay=False),
        help="The key of the certificate.",
    ),
    serve_option(
        "--cors-origin",
        group=_CLIENTS,
        env="CORS_ORIGINS",
        multiple=True,
        help="An origin of web pages that may use the server; may be given more than once.",
    ),
    serve_option(
        "--allowed-hosts",
        group=_CLIENTS,
        env="ALLOWED_HOSTS",
        multiple=True,
        callback=_hosts,
        help="Hosts to answer besides those of this machine, with commas between; *.example.com: all names below it.",
    ),
    serve_option(
        "--share-prefixes/--no-share-prefixes",
        group=_CLIENTS,
        env="SHAREPREFIXES",
        help="Let API keys and tenants share cached prefixes, whose times tell what others have asked.",
    ),
    serve_option(
        "--tenant-header",
        group=_CLIENTS,
        env="TENANT_HEADER",
        default="X-Tenant-Id",
        help="The header that names the tenant of a request; tenants share no cached prefixes.",
    ),
    serve_option(
        "--task",
        env="TASK",
        type=click.Choice(["text_generation", "embeddings_generation"]),
        help="What the model does; an error where its architecture does something else.",
    ),
    serve_option(
        "--models-dir",
        group=_ROUTER,
        env="MODELS_DIR",
        type=click.Path(file_okay=False, exists=True),
        help="Without --model: the folder of the models that requests may name. Not set: as `max ls`.",
    ),
    serve_option(
        "--max-loaded-models",
        "--models-max",
        group=_ROUTER,
        env="MAX_LOADED_MODELS",
        type=click.IntRange(min=1),
        default=4,
        help="Without --model: the most models that are loaded at once.",
    ),
    serve_option(
        "--idle-timeout",
        "--sleep-idle-seconds",
        group=_ROUTER,
        env="IDLE_TIMEOUT_S",
        type=float,
        default=300.0,
        help="Without --model: seconds after which a model without requests is unloaded; negative: never.",
    ),
    serve_option(
        "--api-types",
        env="API_TYPES",
        callback=_json_names,
        help='The APIs to serve, a JSON array such as ["openai", "responses"]. Not set: all.',
    ),
    serve_option("--ui/--no-ui", env="UI", default=True, help="Have the chat page at /."),
    serve_option(
        "--log-requests/--no-log-requests", group=_LOG, env="LOG_REQUESTS", help="Log each request."
    ),
    serve_option(
        "--log-prefix",
        group=_LOG,
        env="LOG_PREFIX",
        default="",
        help="Begins each line of the log.",
    ),
    serve_option(
        "--log-file",
        group=_LOG,
        env="LOGS_FILE_PATH",
        type=click.Path(dir_okay=False, writable=True),
        help="A file that gets each line of the log besides the console.",
    ),
    serve_option(
        "--structured-logging/--no-structured-logging",
        group=_LOG,
        env=["MODULAR_STRUCTURED_LOGGING"],
        help="Write each line of the log as a JSON object.",
    ),
    serve_option(
        "--load-log-interval",
        group=_LOG,
        env="SCHEDULER_STATS_LOG_INTERVAL_S",
        type=click.FloatRange(min=0),
        default=3.0,
        help="Seconds between two lines with the load of a busy engine, of level info; 0: none.",
    ),
    serve_option(
        "--otlp-endpoint",
        group=_LOG,
        env=[PREFIX + "OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"],
        help="Send traces to this collector, by OTLP over HTTP. Not set: nothing is traced or sent.",
    ),
    serve_option(
        "--pretty-print-config/--no-pretty-print-config",
        env="PRETTY_PRINT_CONFIG",
        group=_LOG,
        help="Print the settings as JSON before the start.",
    ),
)


def server_options(function: Function) -> Function:
    """Adds the options of the server to a command, in their order.

    Args:
        function: The command.
    """
    for add in reversed((*_OPTIONS, *ANSWER_OPTIONS)):
        function = add(function)
    return function
