"""`max perplexity`: how well a model predicts a text."""

from __future__ import annotations

from typing import Any

import click

from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.options import GroupedCommand, config_options, given, text_of


@click.command(
    "perplexity", cls=GroupedCommand, short_help="Measure how well a model predicts a text."
)
@click.argument("model", metavar="MODEL")
@click.argument("text", metavar="TEXT_FILE", type=click.Path(exists=True, dir_okay=False))
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
def perplexity(model: str, text: str, window: int, windows: int | None, **options: Any) -> None:
    """Measure how well a model predicts a text: its perplexity, smaller is better.

    MODEL is a folder, a GGUF file or a name on the hub. All tokens of a window but the first are predicted.
    """
    from max.pipelines.perplexity import perplexity as measure

    values = {**given(options), "model_path": model}
    for name in ("max_length", "max_batch_size", "enable_echo"):
        if values.pop(name, None) is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is set by --window")
    result = measure(text_of(text), window, windows, **values)
    click.echo(f"perplexity {result.value:.4f}")
    click.echo(f"{result.windows} windows of {window} tokens, {result.tokens} predicted", err=True)
