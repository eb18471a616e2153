"""`max cache` and `max warm-cache`: what the cache holds, and how it is emptied and filled."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from max._host import cache_folders
from max._host.cache_folders import cache_dir
from max._host.machine import byte_size
from max._lazy import lazy_module
from max._spelling import did_you_mean
from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.errors import CommandError
from max.entrypoints.cli.options.config_options import GroupedCommand, config_options, set_values
from max.entrypoints.cli.options.model_names import model_argument, set_model
from max.interfaces import PipelineTask

# loaded when a model is compiled
if TYPE_CHECKING:
    from max import pipelines
    from max.entrypoints import llm
    from max.pipelines.encoders import text_encoder
else:
    pipelines = lazy_module("max.pipelines")
    llm = lazy_module("max.entrypoints.llm")
    text_encoder = lazy_module("max.pipelines.encoders.text_encoder")


_HOLDS = {
    "object": "compiled kernels",
    "program": "compiled graphs",
    "recipe": "how models were staged",
    "weights": "packed weights",
    "quantized": "weights that were quantized at a load",
    "limits": "measured thresholds of kernels",
}
"""What the folders of the cache hold."""


@click.group(
    "cache",
    short_help="Show or empty the cache of compiled code and weights.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
def cache() -> None:
    """Show or empty the cache of compiled code and packed weights.

    Nothing in it is lost: the next start of a model makes it anew. MAX_CACHE_DIR names its folder,
    MAX_CACHE_SIZE and MAX_WEIGHT_CACHE_SIZE limit it.
    """


@cache.command("ls", short_help="List what the cache holds.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@log_level_option
def ls(as_json: bool) -> None:
    """List what the cache holds, by kind."""
    folders = cache_folders.cache_folders(cache_dir())
    if as_json:
        click.echo(json.dumps([asdict(folder) for folder in folders], indent=1))
        return
    if not folders:
        click.echo(f"the cache {cache_dir()} is empty", err=True)
    for folder in folders:
        holds = _HOLDS.get(folder.name, "")
        size = byte_size(folder.size)
        click.echo(f"{folder.name:<11}{size:>11}{folder.files:>8} files  {holds}".rstrip())


@cache.command("clear", short_help="Empty the cache.")
@click.argument("kinds", metavar="[KIND]...", nargs=-1)
@log_level_option
def clear(kinds: tuple[str, ...]) -> None:
    """Empty the cache, or only some kinds of `max cache ls`. Models that run go on."""
    folders = {folder.name: folder for folder in cache_folders.cache_folders(cache_dir())}
    for kind in kinds:
        if kind not in folders and kind not in _HOLDS:
            hint = did_you_mean(kind, [*folders, *_HOLDS])
            raise CommandError(
                f"the cache has no kind {kind!r}{hint}", "`max cache ls` lists the kinds."
            )
    for name in kinds or folders:
        if name in folders:
            cache_folders.clear_folder(cache_dir(), name)
            click.echo(f"deleted {name} ({byte_size(folders[name].size)})")


@click.command("warm-cache", cls=GroupedCommand, short_help="Compile a model into the cache.")
@model_argument
@config_options
@log_level_option
def warm_cache(model: str | None, **options: object) -> None:
    """Compile a model, and fill the caches of code and of packed weights.

    A later `max serve` or `max generate` with the same options compiles nothing.
    """
    values = set_values(options)
    set_model(values, model, "warm-cache")
    begin = time.perf_counter()
    config = pipelines.PipelineConfig(**values)
    task = pipelines.PIPELINE_REGISTRY.retrieve_pipeline_task(config)
    if task is PipelineTask.EMBEDDINGS_GENERATION:
        text_encoder.TextEncoder(config).encode(["a"])
    else:
        # the steps of prompts and of decoding, and the loop over several
        llm.LLM(config).generate(["a"], max_new_tokens=4, use_tqdm=False)
    seconds = time.perf_counter() - begin
    click.echo(
        f"{config.model_config.model_name} is in the cache {cache_dir()} after {seconds:.1f} s"
    )
