"""The command line `max`."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem, get_completion_class

from max._spelling import similar_names
from max._version import __version__
from max.entrypoints.cli.errors import CommandError, report, set_up_logging

# name -> the command's module and its line in `max --help`; a command is imported when it runs
COMMANDS = {
    "generate": ("max.entrypoints.cli.generate:generate", "Generate text from a prompt."),
    "explain": (
        "max.entrypoints.cli.explain:explain",
        "Show what the compiler makes of a graph or model.",
    ),
    "chat": ("max.entrypoints.cli.chat:chat", "Talk with a model in the terminal."),
    "benchmark": ("max.entrypoints.cli.benchmark:benchmark", "Measure a server under load."),
    "serve": ("max.entrypoints.cli.serve:serve", "Serve a model over HTTP."),
    "encode": ("max.entrypoints.cli.encode:encode", "Make vectors of texts."),
    "rank": ("max.entrypoints.cli.encode:rank", "Order texts by their scores for a query."),
    "perplexity": (
        "max.entrypoints.cli.perplexity:perplexity",
        "Measure how well a model predicts a text.",
    ),
    "quantize": (
        "max.entrypoints.cli.quantize:quantize",
        "Write a model as a quantized GGUF file.",
    ),
    "pull": ("max.entrypoints.cli.models:pull", "Get a model."),
    "cp": ("max.entrypoints.cli.models:cp", "Copy a model."),
    "create": ("max.entrypoints.cli.models:create", "Create a model from a Modelfile."),
    "ls": ("max.entrypoints.cli.models:ls", "List the models on this machine."),
    "show": ("max.entrypoints.cli.models:show", "Show a model."),
    "rm": ("max.entrypoints.cli.models:rm", "Delete a model."),
    "ps": ("max.entrypoints.cli.models:ps", "List the models that a server has loaded."),
    "run": ("max.entrypoints.cli.chat:run", "Run a model: a prompt or a chat, or an ONNX file."),
    "import": ("max.entrypoints.cli.imported:import_file", "Save an ONNX model as a graph."),
    "compare": (
        "max.entrypoints.cli.imported:compare",
        "Compare an ONNX model's results and speed with another engine.",
    ),
    "launch": (
        "max.entrypoints.cli.agents.launch:launch",
        "Start a coding agent with a model of this machine.",
    ),
    "run-batch": ("max.entrypoints.cli.run_batch:run_batch", "Answer a file of requests."),
    "doctor": ("max.entrypoints.cli.doctor:doctor", "Check this machine."),
    "cache": (
        "max.entrypoints.cli.cache:cache",
        "Show or empty the cache of compiled code.",
    ),
    "cluster": (
        "max.entrypoints.cli.cluster:cluster",
        "Show or change the replicas of a running server.",
    ),
    "warm-cache": (
        "max.entrypoints.cli.cache:warm_cache",
        "Compile a model into the cache.",
    ),
    "list": (
        "max.entrypoints.cli.architectures:list_architectures",
        "Show the architectures that can run.",
    ),
}
# the headings of `max --help`, and the commands under them in their order
GROUPS = {
    "Text": ("generate", "chat", "run", "encode", "rank"),
    "Server": ("serve", "launch", "ps", "cluster", "run-batch", "benchmark"),
    "Models": ("pull", "create", "ls", "show", "cp", "rm", "list", "quantize", "perplexity"),
    "Models of other frameworks": ("import", "compare"),
    "Machine and compiler": ("doctor", "cache", "warm-cache", "explain"),
}
# commands of MAX and of Ollama that are not in this release, and their replacements
ABSENT = {
    "warm-interpreter-cache": "`max warm-cache` fills the cache of compiled code.",
    "stop": "A server frees models that are not used: `max serve --idle-timeout 300`; Ctrl-C ends it.",
}
# what the same is called in other programs
COMMANDS_ELSEWHERE = {
    "help": "--help", "version": "--version", "start": "serve", "server": "serve", "complete": "generate",
    "remove": "rm", "delete": "rm", "copy": "cp", "models": "ls", "download": "pull", "get": "pull",
    "info": "show", "inspect": "show", "bench": "benchmark", "convert": "quantize", "embed": "encode", "rerank": "rank",
}  # fmt: skip
_PATHS_IN_BASH = """compopt -o filenames 2> /dev/null
            while IFS= read -r path; do COMPREPLY+=("$path"); done < <(compgen -f -- "$value")"""
_NEAR = 0.6
"""The similarity of a command that is suggested."""
LEVELS = click.Choice(["debug", "info", "warning", "error", "critical"], case_sensitive=False)


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands' names.

        Args:
            ctx: The call.
        """
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command by its name.

        Args:
            ctx: The call.
            cmd_name: The name.
        """
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands without importing them.

        Args:
            ctx: The call.
            formatter: Receives the text.
        """
        for group, names in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(name, COMMANDS[name][1]) for name in names])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands and options that begin with a text; no command is imported for it.

        Args:
            ctx: The call.
            incomplete: The text.
        """
        names = [name for name in sorted(COMMANDS) if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [CompletionItem(name, help=COMMANDS[name][1]) for name in names] + options

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolves the command; an unknown name is an error with the nearest name.

        Args:
            ctx: The call.
            args: The command's name and its arguments.
        """
        if args and args[0] in ABSENT:
            raise CommandError(f"`max {args[0]}` is not in this release", ABSENT[args[0]])
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            # a prompt or a model in the place of a command
            if " " in args[0] or "/" in args[0] or args[0].endswith(".gguf"):
                raise CommandError(
                    f"{args[0]!r} is no command",
                    f"`max run MODEL [PROMPT]`; `{ctx.command_path} --help` lists commands.",
                )
            near = [*filter(None, [COMMANDS_ELSEWHERE.get(args[0].lower())])]
            near = near or similar_names(args[0], COMMANDS, cutoff=_NEAR)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)


def set_log_level(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Sets the level of the loggers, and stores it in the outermost context for errors.

    Args:
        ctx: The call.
        param: The option.
        value: The level; None if it is not set.
    """
    of_environment = param.name is not None and (
        ctx.get_parameter_source(param.name) is ParameterSource.ENVIRONMENT
    )
    if of_environment and "log_level" in ctx.find_root().meta:
        return value  # an option before the command comes first
    if value is not None:
        ctx.find_root().meta["log_level"] = value.lower()
        set_up_logging(value)
    return value


def _set_level_by_flag(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Sets the level that ``--verbose`` and ``--quiet`` stand for."""
    if value:
        set_log_level(ctx, param, _LEVEL_FLAGS[f"--{param.name}"])


_LEVEL_FLAGS = {"--verbose": "info", "--quiet": "error"}


def log_level_option(command: Any, envvar: str | None = None) -> Any:
    """Adds ``--log-level`` to a command, and ``--verbose`` and ``--quiet``, which stand for two of its values.

    Args:
        command: The command.
        envvar: A variable of the environment that sets it too.
    """
    for name, level in _LEVEL_FLAGS.items():
        command = click.option(
            name,
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=_set_level_by_flag,
            help=f"As --log-level {level}.",
        )(command)
    return click.option(
        "--log-level",
        envvar=envvar,
        show_envvar=envvar is not None,
        type=LEVELS,
        expose_value=False,
        is_eager=True,
        callback=set_log_level,
        help="What is logged on stderr; debug also shows tracebacks.",
    )(command)


def print_completion(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Prints the script that completes commands and options in a shell, and ends the call.

    Args:
        ctx: The call.
        param: The option.
        value: The shell; None if it is not set.
    """
    if value is None or ctx.resilient_parsing:
        return
    kind = get_completion_class(value)
    assert kind is not None
    script = kind(ctx.command, {}, "max", "_MAX_COMPLETE")
    text = script.source_template % script.source_vars()
    # click's script forgets the names that came before where paths fit too
    text = text.replace(
        "complete -o nosort", "COMP_WORDBREAKS=${COMP_WORDBREAKS//:}\n    complete -o nosort"
    )
    click.echo(re.sub(r"COMPREPLY=\(\)\s*compopt -o default", _PATHS_IN_BASH, text))
    ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="MAX", message="%(prog)s %(version)s")
@click.option(
    "--completion",
    type=click.Choice(["bash", "zsh", "fish"]),
    expose_value=False,
    is_eager=True,
    callback=print_completion,
    help='Print what completes commands and options in a shell: eval "$(max --completion bash)".',
)
@log_level_option
def cli() -> None:
    """Run language models on this machine."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line, and exits: 0, or 2 for errors that the user can correct.

    Args:
        arguments: The arguments; by default the process's.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(report(cli, words))
