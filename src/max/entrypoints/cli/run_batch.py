"""`max run-batch`: answers a file of requests, without a server."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from max._lazy import lazy_module
from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.errors import CommandError
from max.entrypoints.cli.options.config_options import config_options, given
from max.entrypoints.cli.options.model_names import model_argument, set_model
from max.entrypoints.cli.serve import check_packages
from max.serve.process.settings import ServerSettings, WorkerSettings

if TYPE_CHECKING:
    from max.serve import batch
else:
    # needs the extra `serve`
    batch = lazy_module("max.serve.batch")


@click.command("run-batch", short_help="Answer a file of requests.")
@click.option(
    "-i",
    "--input-file",
    required=True,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="The requests, in OpenAI's batch format: one JSON object a line; - for stdin.",
)
@click.option(
    "-o",
    "--output-file",
    required=True,
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Receives a line for each, as they end; - for stdout.",
)
@model_argument
@config_options
@log_level_option
@click.pass_context
def run_batch(
    context: click.Context,
    model: str | None,
    input_file: str,
    output_file: str,
    **options: object,
) -> None:
    """Answer a file of requests in OpenAI's batch format, without a server.

    A line is {"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}. The exit
    code is 1 where a request failed; its line says why.
    """
    check_packages("run-batch")
    config = given(options)
    set_model(config, model, "run-batch")
    with ExitStack() as stack:
        lines = (
            sys.stdin
            if input_file == "-"
            else stack.enter_context(open(input_file, encoding="utf-8"))
        )
        try:
            requests = batch.read_requests(lines)
        except (batch.BatchLineError, UnicodeDecodeError) as error:
            raise CommandError(
                f"{input_file}: {error}", "OpenAI's batch format is expected."
            ) from error
        output = (
            sys.stdout
            if output_file == "-"
            else stack.enter_context(open(output_file, "w", encoding="utf-8"))
        )

        def write(line: str) -> None:
            output.write(line)
            output.flush()

        settings = ServerSettings(
            max_queue=len(requests),
            served_model_name=config.get("served_model_name"),
            web_page=False,
        )
        worker = WorkerSettings(config, context.find_root().meta.get("log_level", "warning"))
        begin = time.perf_counter()
        failed = asyncio.run(batch.run_batch(settings, worker, requests, write))
    seconds = time.perf_counter() - begin
    click.echo(f"{len(requests)} requests, {failed} failed, {seconds:.1f} s", err=True)
    if failed:
        raise click.exceptions.Exit(1)
