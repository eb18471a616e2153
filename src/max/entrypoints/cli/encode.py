"""`max encode` and `max rank`: vectors of texts, and texts in the order of their scores for a query."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from max._lazy import lazy_module
from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.options.config_options import GroupedCommand, config_options, set_values
from max.entrypoints.cli.options.model_names import model_argument, set_model
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import InputError

# loaded when a command runs, not for its help or for completions of a shell
if TYPE_CHECKING:
    from max.pipelines.encoders import text_encoder
else:
    text_encoder = lazy_module("max.pipelines.encoders.text_encoder")


@click.command("encode", cls=GroupedCommand, short_help="Make vectors of texts.")
@model_argument
@click.option(
    "--prompt",
    "prompts",
    required=True,
    multiple=True,
    metavar="TEXT",
    help="A text; may be given more than once. - reads one text per line from stdin.",
)
@click.option(
    "--prompt-name",
    default=None,
    metavar="NAME",
    help="A prompt of the model that is put before each text, such as query.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print an object with index, text and embedding a line."
)
@click.option(
    "--num-warmups",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Runs before the one whose vectors are printed.",
)
@config_options
@log_level_option
def encode(
    model: str | None,
    prompts: tuple[str, ...],
    prompt_name: str | None,
    as_json: bool,
    num_warmups: int,
    **options: object,
) -> None:
    """Make vectors of texts.

    The vector of each text is printed on a line of its own, as a JSON list.
    """
    texts = _texts(prompts)
    encoder = _load(set_values(options), model, "encode")
    for _ in range(num_warmups):
        encoder.encode(texts, prompt_name)
    for index, (text, vector) in enumerate(
        zip(texts, encoder.encode(texts, prompt_name), strict=True)
    ):
        values = vector.tolist()
        entry = {"index": index, "text": text, "embedding": values}
        click.echo(json.dumps(entry if as_json else values, ensure_ascii=False))


@click.command("rank", cls=GroupedCommand, short_help="Order texts by their scores for a query.")
@click.option("--query", required=True, metavar="TEXT", help="The query.")
@click.option("--top", type=click.IntRange(min=1), default=None, help="Print only the best texts.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print an object with index, text and score a line."
)
@click.argument("texts", nargs=-1, required=True)
@config_options
@log_level_option
def rank(
    query: str, top: int | None, as_json: bool, texts: tuple[str, ...], **options: object
) -> None:
    """Order texts by their scores for a query; - reads one text per line from stdin.

    Each line has a score and a text, the best first.
    """
    candidates = _texts(texts)
    scores = _load(set_values(options), None, "rank --model").rank(query, candidates)
    best = sorted(range(len(candidates)), key=lambda index: -scores[index])
    for index in best[:top]:
        score = float(scores[index])
        if as_json:
            entry = {"index": index, "text": candidates[index], "score": score}
            click.echo(json.dumps(entry, ensure_ascii=False))
        else:
            click.echo(f"{score:.4f}\t{candidates[index]}")


def _texts(values: tuple[str, ...]) -> list[str]:
    """The texts of arguments; - stands for the lines of stdin."""
    texts: list[str] = []
    for value in values:
        if value != "-":
            texts.append(value)
            continue
        if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise click.UsageError("- reads texts from stdin, which is closed")
        data = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
        texts += [line for line in data.splitlines() if line]
    if not texts:
        raise InputError("there are no texts", "Give at least one.")
    return texts


def _load(values: dict[str, Any], model: str | None, command: str) -> text_encoder.TextEncoder:
    """The model of the argument, or of the options' values."""
    set_model(values, model, command)
    return text_encoder.TextEncoder(PipelineConfig(**values))
