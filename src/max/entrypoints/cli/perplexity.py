"""`max perplexity`: how well a model predicts a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from max._lazy import lazy_module
from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.options.config_options import (
    GroupedCommand,
    config_options,
    set_values,
    text_of,
)
from max.entrypoints.cli.options.model_names import ModelType, set_model

# loaded when the command runs, not for its help or for completions of a shell
if TYPE_CHECKING:
    from max.pipelines import perplexity as measured
else:
    measured = lazy_module("max.pipelines.perplexity")


@click.command(
    "perplexity", cls=GroupedCommand, short_help="Measure how well a model predicts a text."
)
@click.argument("paths", metavar="MODEL TEXT_FILE", nargs=-1, required=True, type=ModelType())
@click.option(
    "--window",
    type=click.IntRange(min=2),
    default=512,
    show_default=True,
    help="Tokens of a window; each window begins anew.",
)
@click.option(
    "--windows", type=click.IntRange(min=1), help="The maximum number of windows that are read."
)
@config_options
@log_level_option
def perplexity(paths: tuple[str, ...], window: int, windows: int | None, **options: object) -> None:
    """Measure how well a model predicts a text: its perplexity, smaller is better.

    MODEL is a folder, a GGUF file or a name on the hub; --model names it too. All tokens of a window but the first
    are predicted.
    """
    values = set_values(options)
    if "model_path" in values:
        paths = (values["model_path"], *paths)
    if len(paths) != 2:
        raise click.UsageError(f"got {' '.join(paths)!r}; expected a model and a text file")
    values["model_path"], text = paths
    set_model(values, None, "perplexity")
    for name in ("max_length", "max_batch_size", "enable_echo"):
        if values.pop(name, None) is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is set by --window")
    result = measured.perplexity(text_of(text), window, windows, **values)
    click.echo(f"perplexity {result.value:.4f}")
    click.echo(f"{result.windows} windows of {window} tokens, {result.tokens} predicted", err=True)
