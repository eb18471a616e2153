"""`max warm-cache`: compiles a model before it is needed."""

from __future__ import annotations

import time

import click

from max._config import cache_dir
from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.options.config_options import GroupedCommand, config_options, given
from max.entrypoints.cli.options.model_names import model_argument, set_model
from max.entrypoints.llm import LLM
from max.interfaces import PipelineTask
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.encoders.text_encoder import TextEncoder


@click.command("warm-cache", cls=GroupedCommand, short_help="Compile a model into the cache.")
@model_argument
@config_options
@log_level_option
def warm_cache(model: str | None, **options: object) -> None:
    """Compile a model, and fill the caches of code and of packed weights.

    A later `max serve` or `max generate` with the same options compiles nothing.
    """
    values = given(options)
    set_model(values, model, "warm-cache")
    begin = time.perf_counter()
    config = PipelineConfig(**values)
    task = PIPELINE_REGISTRY.retrieve_pipeline_task(config)
    if task is PipelineTask.EMBEDDINGS_GENERATION:
        TextEncoder(config).encode(["a"])
    else:
        # the steps of prompts and of decoding, and the loop over several
        LLM(config).generate(["a"], max_new_tokens=4, use_tqdm=False)
    seconds = time.perf_counter() - begin
    click.echo(
        f"{config.model_config.model_name} is in the cache {cache_dir()} after {seconds:.1f} s"
    )
