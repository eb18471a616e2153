"""`max run-batch`: answers a file of requests, without a server."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from max._lazy import lazy_module
from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.errors import CommandError
from max.entrypoints.cli.options.config_options import GroupedCommand, config_options, set_values
from max.entrypoints.cli.options.model_names import ModelType, set_model
from max.entrypoints.cli.serve import check_packages, ray_settings
from max.serve.process.settings import ServerSettings, WatchLimits, WorkerSettings

if TYPE_CHECKING:
    from max.serve import batch, batch_output
    from max.serve.remote import ray_cluster
else:
    # they need the extras `serve` and `ray`
    batch = lazy_module("max.serve.batch")
    batch_output = lazy_module("max.serve.batch_output")
    ray_cluster = lazy_module("max.serve.remote.ray_cluster")


@click.command("run-batch", cls=GroupedCommand, short_help="Answer a file of requests.")
@click.argument("names", nargs=-1, metavar="[MODEL] [INPUT OUTPUT]", type=ModelType())
@click.option(
    "-i",
    "--input-file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="The requests, in OpenAI's batch format: one JSON object a line; - for stdin.",
)
@click.option(
    "-o",
    "--output-file",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Receives a line for each, as they end; - for stdout.",
)
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    help="Engines, which divide the cores; by default 1, with --ray one for each machine.",
)
@click.option("--ray", is_flag=True, help="Run the engines on the machines of a Ray cluster.")
@click.option("--ray-address", envvar="MAX_SERVE_RAY_ADDRESS", help="The address of the cluster.")
@click.option("--ray-cpus", type=click.IntRange(min=1), help="The cores of a replica.")
@config_options
@log_level_option
@click.pass_context
def run_batch(
    context: click.Context,
    names: tuple[str, ...],
    input_file: str | None,
    output_file: str | None,
    replicas: int | None,
    **options: Any,
) -> None:
    """Answer a file of requests in OpenAI's batch format, without a server.

    A line is {"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}. INPUT and OUTPUT are
    files, or - for stdin and stdout; -i and -o name them too. Without MODEL each request names its own. A run that
    was cut off goes on with the same command: OUTPUT has one line for each request in the end. The exit code is 1
    where a request failed; its line says why.
    """
    check_packages("run-batch")
    model, input_file, output_file = _names(names, input_file, output_file)
    settings = ServerSettings(
        web_page=False,
        # a batch has time: requests wait for an engine as long as one can be started
        watch=WatchLimits(wait_s=0),
        ray=ray_settings(options),
    )
    config = set_values(options)
    requests = _requests(input_file)
    runs = _runs(config, model, requests)
    begin = time.perf_counter()
    level = context.find_root().meta.get("log_level", "warning")
    with ExitStack() as stack:
        output: Any = None
        left, answered, failed = list(requests), 0, 0
        if output_file != "-":
            # without one model, the bodies name them
            of_all = runs[0][0]["model_path"] if model or "model_path" in config else ""
            output = stack.enter_context(_open_output(Path(output_file), requests, of_all))
            left, answered, failed = output.unanswered_requests, len(output.answered), output.failed
        if answered:
            click.echo(f"{answered} of {len(requests)} requests have an answer already", err=True)

        def write(custom_id: str, line: str) -> None:
            if output is not None:
                output.write(custom_id, line)
            else:
                sys.stdout.write(line)
                sys.stdout.flush()

        cluster = None
        if settings.ray is not None and left:
            cluster = ray_cluster.RayCluster(settings.ray, replicas)
            stack.callback(cluster.close)
            replicas = cluster.replicas
        missing = {request.custom_id for request in left}
        for run_config, run_requests in runs:
            todo = [request for request in run_requests if request.custom_id in missing]
            if not todo:
                continue
            failed += _run(
                settings, WorkerSettings(run_config, level), todo, write, cluster, replicas or 1
            )
    seconds = time.perf_counter() - begin
    click.echo(f"{len(requests)} requests, {failed} failed, {seconds:.1f} s", err=True)
    if failed:
        raise click.exceptions.Exit(1)


def _names(
    names: Sequence[str], input_file: str | None, output_file: str | None
) -> tuple[str | None, str, str]:
    """The model, None: not given, and the files."""
    most = 1 if input_file and output_file else 3
    if (input_file is None) != (output_file is None) or len(names) > most:
        raise CommandError(
            f"{len(names)} names are given, and one file or none by -i and -o"
            if most == 3
            else f"{len(names)} models are given",
            "`max run-batch [MODEL] INPUT OUTPUT`, or `max run-batch [MODEL] -i INPUT -o OUTPUT`.",
        )
    if input_file and output_file:
        return (names[0] if names else None), input_file, output_file
    if len(names) < 2:
        raise CommandError(
            "no files are given", "`max run-batch [MODEL] INPUT OUTPUT`; - is stdin or stdout."
        )
    *models, source, target = names
    if source != "-" and not Path(source).is_file():
        raise CommandError(f"there is no file {source!r}", "INPUT is a file of requests.")
    if target != "-" and Path(target).is_dir():
        raise CommandError(f"{target!r} is a folder", "OUTPUT is a file.")
    return (models[0] if models else None), source, target


def _requests(input_file: str) -> list[batch.BatchRequest]:
    """The requests of a file."""
    try:
        if input_file == "-":
            return batch.read_requests(sys.stdin)
        with open(input_file, encoding="utf-8") as lines:
            return batch.read_requests(lines)
    except (batch.BatchLineError, UnicodeDecodeError) as error:
        raise CommandError(
            f"{input_file}: {error}", "OpenAI's batch format is expected."
        ) from error


def _runs(
    config: dict[str, Any], model: str | None, requests: Sequence[batch.BatchRequest]
) -> list[tuple[dict[str, Any], list[batch.BatchRequest]]]:
    """The requests of each model, one model after another, with the configurations of the models."""
    if model is not None or config.get("model_path"):
        set_model(config, model, "run-batch")
        return [(config, list(requests))]
    by_name: dict[str, list[batch.BatchRequest]] = {}
    for request in requests:
        name = request.body.get("model")
        if not isinstance(name, str) or not name:
            raise CommandError(
                f"no model is given, and the request {request.custom_id!r} names none",
                "Give a MODEL, or have one in each body.",
            )
        by_name.setdefault(name, []).append(request)
    runs: list[tuple[dict[str, Any], list[batch.BatchRequest]]] = []
    for name, of_model in by_name.items():
        own = {**config, "served_model_name": name}
        set_model(own, name, "run-batch")
        runs.append((own, of_model))
    return runs


def _open_output(
    path: Path, requests: Sequence[batch.BatchRequest], model: str
) -> batch_output.BatchOutput:
    try:
        return batch_output.BatchOutput(path, requests, model)
    except OSError as error:
        raise CommandError(
            f"cannot write {path}: {error.strerror or error}", "Give another OUTPUT."
        ) from error


def _run(
    settings: ServerSettings,
    worker: WorkerSettings,
    requests: Sequence[batch.BatchRequest],
    write: Any,
    cluster: Any,
    replicas: int,
) -> int:
    """Runs the requests of one model; returns how many failed."""
    values = {
        "max_queue": len(requests),  # none is refused
        "served_model_name": worker.config.get("served_model_name"),
        "replicas": replicas,
    }
    settings = replace(settings, **values)
    start = {} if cluster is None else {"start_worker": cluster.start_worker}
    try:
        return asyncio.run(batch.run_batch(settings, worker, requests, write, **start))
    except batch.BatchStoppedError as error:
        raise CommandError(
            f"no engine runs any more: {error}", "The same command goes on with what is left."
        ) from error
