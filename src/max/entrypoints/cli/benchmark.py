"""`max benchmark`: measures a server with OpenAI's API under load."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import click

from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.errors import CommandError
from max.entrypoints.load_test.http_client import Target
from max.entrypoints.load_test.measure import Workload, measure, summary
from max.entrypoints.load_test.report import plot, table

_SAMPLE_WORDS = 64


def _rates(context: click.Context, parameter: click.Parameter, value: str) -> list[float]:
    try:
        rates = [float(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} are not numbers with commas between") from None
    if not all(rate > 0 for rate in rates):
        raise click.BadParameter("a rate must be over 0; inf sends all at once")
    return rates


@click.command("benchmark", short_help="Measure a server under load.")
@click.option(
    "--url", "--base-url", metavar="URL", help="The server. [default: from --host and --port]"
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The server's host.")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Its port."
)
@click.option("--api-key", envvar="MAX_SERVE_API_KEY", help="Its key.")
@click.option("--model", help="The model. [default: the server's first]")
@click.option(
    "--endpoint",
    type=click.Choice(["/v1/chat/completions", "/v1/completions"]),
    default="/v1/chat/completions",
    show_default=True,
    help="What is asked for.",
)
@click.option(
    "--num-prompts", type=click.IntRange(min=1), default=64, show_default=True, help="Requests."
)
@click.option(
    "--input-len",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Tokens of a prompt, about.",
)
@click.option(
    "--prefix-len",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Tokens that all prompts begin with, about.",
)
@click.option(
    "--output-len",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Tokens of an answer.",
)
@click.option(
    "--request-rate",
    default="inf",
    show_default=True,
    callback=_rates,
    help="Requests a second; several with commas are measured in turn.",
)
@click.option("--max-concurrency", type=click.IntRange(min=1), help="The most requests at once.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of the words and of the times."
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), help="Write the numbers to this file."
)
@click.option(
    "--plot",
    "plot_file",
    type=click.Path(dir_okay=False),
    help="Write a plot of throughput and latency, an SVG.",
)
@log_level_option
def benchmark(**options: Any) -> None:
    """Measure a server under load, with prompts of random words."""
    url = options["url"] or f"http://{options['host']}:{options['port']}"
    target = Target(url.rstrip("/").removesuffix("/v1"), options["api_key"])
    runs = asyncio.run(_run(target, options))
    if options["json_file"]:
        Path(options["json_file"]).write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    if options["plot_file"]:
        Path(options["plot_file"]).write_text(plot(runs, runs[0]["model"]), encoding="utf-8")
    if not any(run["completed"] for run in runs):
        raise CommandError("no request was answered", "The lines above say why.")


async def _run(target: Target, options: dict[str, Any]) -> list[dict[str, Any]]:
    model = options["model"]
    try:
        if model is None:
            listed = (await target.json("/v1/models"))["data"]
            if not listed:
                raise CommandError(f"{target.url} has no model", "Give one with --model.")
            model = listed[0]["id"]
    except OSError as error:
        raise CommandError(
            f"{target.url} cannot be asked: {error}", "Start it with `max serve`, or give --url."
        ) from error
    chat = options["endpoint"].endswith("chat/completions")
    tokens_a_word = await _tokens_a_word(target, model)
    runs: list[dict[str, Any]] = []
    for rate in options["request_rate"]:
        workload = Workload(
            model,
            chat,
            options["num_prompts"],
            max(round(options["input_len"] / tokens_a_word), 1),
            round(options["prefix_len"] / tokens_a_word),
            options["output_len"],
            # each rate gets prompts of its own, which no cache has
            options["seed"] + len(runs),
        )
        samples = await measure(target, workload, rate, options["max_concurrency"])
        run = {"model": model, "endpoint": options["endpoint"], **summary(samples, rate)}
        runs.append(run)
        click.echo(table(run) + "\n")
    return runs


async def _tokens_a_word(target: Target, model: str) -> float:
    """The tokens of a random word; an estimate where the server does not tell."""
    workload = Workload(model, False, 1, _SAMPLE_WORDS, 0, 1, seed=-1)
    (body,) = workload.bodies()
    try:
        answer = await target.json("/tokenize", {"model": model, "prompt": body["prompt"]})
        return max(answer["count"], 1) / _SAMPLE_WORDS
    except (OSError, ValueError, KeyError, TypeError):
        return 2.5
