"""`max run`: a model of this machine by its name, for one prompt or a conversation."""

from __future__ import annotations

import sys

import click

from max.entrypoints.cli.chat import chat
from max.entrypoints.cli.generate import generate
from max.pipelines.store.local import ModelStore

_OPTIONS = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": ["-h", "--help"],
}


@click.command("run", short_help="Run a model of `max ls`.", context_settings=_OPTIONS)
@click.argument("name")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(name: str, arguments: tuple[str, ...]) -> None:
    """Run a model of `max ls`: answer a prompt, or talk with it where none is given.

    NAME is the model's name or its path. A first argument that is no option is the prompt; - reads it from stdin,
    and so does a pipe. Options are those of `max generate` with a prompt, else those of `max chat`.
    """
    path = str(ModelStore().find_or_open(name).path)
    words = list(arguments)
    prompt = None
    if words and (words[0] == "-" or not words[0].startswith("-")):
        prompt = words.pop(0)
    elif not sys.stdin.isatty():
        prompt = "-"
    command, options = (chat, []) if prompt is None else (generate, ["--prompt", prompt])
    command.main(
        ["--model", path, *options, *words], prog_name=f"max run {name}", standalone_mode=False
    )
