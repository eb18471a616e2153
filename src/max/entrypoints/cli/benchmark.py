"""`max benchmark`: measures a server with OpenAI's API under load."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from max._lazy import lazy_module
from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.errors import CommandError
from max.entrypoints.cli.options.config_file import read_config
from max.entrypoints.cli.options.model_names import set_model
from max.entrypoints.cli.options.server_options import base_url, key_option
from max.entrypoints.load_test.http_client import Target
from max.entrypoints.load_test.measure import Workload, measure, summary
from max.entrypoints.load_test.replicas import Routing
from max.entrypoints.load_test.report import plot, table
from max.entrypoints.load_test.simulated import SimulatedLoad, run_simulated
from max.entrypoints.load_test.traces import read_trace
from max.pipelines.scheduler.limits import SchedulerLimits
from max.pipelines.scheduler.measured_costs import MeasuredCosts, read_steps
from max.pipelines.scheduler.simulation import CostModel, Machine

if TYPE_CHECKING:
    from max.entrypoints.load_test import bandwidth, drafts
else:
    bandwidth = lazy_module("max.entrypoints.load_test.bandwidth")
    drafts = lazy_module("max.entrypoints.load_test.drafts")

_SAMPLE_WORDS = 64
_FORMATS = "formats"
_WORKLOADS = ("edit", "summary", "chat", "json")  # of `max.entrypoints.load_test.drafts`


def _rates(context: click.Context, parameter: click.Parameter, value: str) -> list[float]:
    try:
        rates = [float(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} are not numbers with commas between") from None
    if not all(rate > 0 for rate in rates):
        raise click.BadParameter("a rate must be over 0; inf sends all at once")
    return rates


def _costs(
    context: click.Context, parameter: click.Parameter, value: str
) -> CostModel | MeasuredCosts:
    try:
        costs = [float(part) / 1e3 for part in value.split(",")]  # seconds
    except ValueError:
        if (path := Path(value)).exists():
            return MeasuredCosts(read_steps(path))
        raise click.BadParameter(f"{value!r} is no file, nor numbers with commas between") from None
    if len(costs) != 4 or min(costs) < 0 or costs[0] <= 0:
        raise click.BadParameter("give four numbers from 0 on, the first over 0")
    return CostModel(*costs)


@click.command("benchmark", short_help="Measure a server under load.")
@click.option(
    "--config-file",
    type=click.Path(exists=True, dir_okay=False),
    is_eager=True,
    expose_value=False,
    callback=read_config,
    help="A YAML or JSON file with values of options; the command line comes before it.",
)
@click.option(
    "--backend",
    type=click.Choice(["modular", "vllm", "openai"]),
    help="What the server is, as MAX names it: all are asked by OpenAI's API.",
)
@click.option(
    "--dataset-name",
    type=click.Choice(["random", "sonnet"]),
    help="The prompts, as MAX names them: both are of random words here.",
)
@click.option(
    "--url", "--base-url", metavar="URL", help="The server. [default: from --host and --port]"
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The server's host.")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Its port."
)
@key_option()
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
    "--random-input-len",
    "--sonnet-input-len",
    "input_len",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Tokens of a prompt, about.",
)
@click.option(
    "--prefix-len",
    "--random-prefix-len",
    "--sonnet-prefix-len",
    "prefix_len",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Tokens that all prompts begin with, about.",
)
@click.option(
    "--output-len",
    "--output-lengths",
    "--random-output-len",
    "--sonnet-output-len",
    "output_len",
    metavar="N",
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
@click.option(
    "--workload",
    type=click.Choice([*_WORKLOADS, _FORMATS]),
    help="Load --model here, and answer --num-prompts of this kind with and without drafts in turn; "
    "formats: how fast weights of each format are read, without a model.",
)
@click.option(
    "--draft-model", metavar="MODEL", help="With --workload: a smaller model that drafts."
)
@click.option(
    "--quantization-encoding", metavar="NAME", help="With --workload: as of `max generate`."
)
@click.option("--quantize", metavar="KIND", help="With --workload: as of `max generate`.")
@click.option(
    "--simulate",
    is_flag=True,
    help="Measure the scheduler on a model of the costs, without a server.",
)
@click.option(
    "--costs",
    default="10,0.2,0.5,0.0002",
    show_default=True,
    callback=_costs,
    metavar="FILE|MS,MS,MS,MS",
    help="With --simulate: the log of a server that ran with MAX_STEP_LOG=FILE, or milliseconds of a step, a prompt "
    "token, a sequence, a cached token.",
)
@click.option(
    "--clients",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="With --simulate: clients that share the server.",
)
@click.option(
    "--max-batch-size",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="With --simulate: sequences that run at once.",
)
@click.option(
    "--prefill-chunk-size",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="With --simulate: prompt tokens of a step.",
)
@click.option(
    "--enable-in-flight-batching/--no-enable-in-flight-batching",
    default=True,
    show_default=True,
    help="With --simulate: sequences generate in steps that read prompts.",
)
@click.option(
    "--kv-cache-pages",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="With --simulate: pages of the KV cache, of 128 tokens.",
)
@click.option(
    "--replicas",
    type=click.IntRange(min=1, max=4096),
    default=1,
    show_default=True,
    help="With --simulate: engines, each with such a cache.",
)
@click.option(
    "--routing",
    type=click.Choice(get_args(Routing)),
    default="prefix",
    show_default=True,
    help="With --simulate: how requests are routed to the replicas.",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --simulate: the requests of a file, as those of Mooncake, Azure and BurstGPT.",
)
@log_level_option
def benchmark(**options: Any) -> None:
    """Measure a server under load, with prompts of random words."""
    if options["simulate"]:
        _write(_simulate(options), options)
        return
    if options["workload"] == _FORMATS:
        _measure_formats(options)
        return
    if options["workload"] is not None:
        _measure_drafts(options)
        return
    if options["dataset_name"] == "sonnet":
        click.echo("The prompts are of random words, not of sonnets.", err=True)
    url = options["url"] or f"http://{options['host']}:{options['port']}"
    target = Target(base_url(url), options["api_key"])
    runs = asyncio.run(_run(target, options))
    _write(runs, options)
    if not any(run["completed"] for run in runs):
        raise CommandError("no request was answered", "The lines above say why.")


def _measure_drafts(options: dict[str, Any]) -> None:
    """Measures what drafts save for a kind of prompts."""
    if options["model"] is None:
        raise CommandError("no model is given", "Give one with --model.")
    config_options = ("draft_model", "quantization_encoding", "quantize")
    values = {name: options[name] for name in config_options if options[name] is not None}
    set_model(values, options["model"], "benchmark")
    workload = options["workload"]
    run = drafts.measure_drafts(
        values, workload, options["num_prompts"], options["output_len"], options["seed"]
    )
    click.echo(drafts.draft_table(workload, run))
    if options["json_file"]:
        content = {"model": options["model"], "workload": workload, **run.numbers()}
        text = json.dumps(content, indent=1) + "\n"
        Path(options["json_file"]).write_text(text, encoding="utf-8")


def _measure_formats(options: dict[str, Any]) -> None:
    """Measures how fast products of one row read weights of each format."""
    reads = bandwidth.Reads()
    speeds = dict[str, bandwidth.FormatSpeed]()
    click.echo(bandwidth.FORMAT_HEADER)
    for encoding, speed in bandwidth.measure_formats(reads, bandwidth.FORMATS):
        speeds[encoding] = speed
        click.echo(speed.row(encoding))
    if options["json_file"]:
        content = [{"format": name, **speed._asdict()} for name, speed in speeds.items()]
        Path(options["json_file"]).write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _write(runs: list[dict[str, Any]], options: dict[str, Any]) -> None:
    """Writes the files that are asked for."""
    if options["json_file"]:
        Path(options["json_file"]).write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    if options["plot_file"]:
        Path(options["plot_file"]).write_text(plot(runs, runs[0]["model"]), encoding="utf-8")


def _simulate(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs the scheduler on the cost model at each rate."""
    limits = SchedulerLimits(
        max_batch_size=options["max_batch_size"],
        prefill_chunk_size=options["prefill_chunk_size"],
        enable_in_flight_batching=options["enable_in_flight_batching"],
    )
    machine = Machine(limits, options["kv_cache_pages"], cost=options["costs"])
    load = SimulatedLoad(
        options["num_prompts"],
        options["input_len"],
        options["prefix_len"],
        options["output_len"],
        options["clients"],
        options["seed"],
        options["trace"] and read_trace(options["trace"], options["num_prompts"]),
    )
    runs: list[dict[str, Any]] = []
    for rate in options["request_rate"]:
        numbers = run_simulated(
            machine, load, rate, options["replicas"], options["routing"], options["max_concurrency"]
        )
        run = {"model": "simulated", **numbers}
        runs.append(run)
        click.echo(table(run))
        click.echo(
            f"{'preemptions':<36}{run['preemptions']:>12}\n"
            f"{'prompt tokens cached':<36}{run['cached_share']:>12.1%}\n"
            f"{'simulated in, s':<36}{run['simulated_in_s']:>12.2f}\n"
        )
    return runs


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
            f"{target.url} cannot be asked: {error}",
            "Start it with `max serve MODEL`, or give --url.",
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
