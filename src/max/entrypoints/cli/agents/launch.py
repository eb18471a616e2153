"""`max launch`: writes the configuration of a coding agent for a server of ours, and starts the agent."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.agents.configurations import AGENTS, Agent, Endpoint, written_files
from max.entrypoints.cli.errors import CommandError
from max.entrypoints.cli.options.model_names import ModelType
from max.entrypoints.cli.options.server_options import base_url, key_option
from max.entrypoints.cli.progress import Progress
from max.entrypoints.load_test.http_client import Target

_DEFAULT_URL = "http://127.0.0.1:8000"
_LEAST_CONTEXT = 16_384
"""Tokens below which the instructions of an agent, which are some ten thousand, leave no room to work."""
_OF_AGENT = "max.entrypoints.cli.agents.launch.arguments"
_MAX = [sys.executable, "-c", "from max.entrypoints.cli import main; main()"]


class LaunchCommand(click.Command):
    """`max launch`: what follows ``--`` are arguments of the agent."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the arguments before ``--``.

        Args:
            ctx: The call.
            args: The arguments.
        """
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[_OF_AGENT] = args[end + 1 :]
        return super().parse_args(ctx, args[:end])


@click.command(
    "launch", cls=LaunchCommand, short_help="Start a coding agent with a model of this machine."
)
@click.argument("agent", type=click.Choice(list(AGENTS)))
@click.argument("model", required=False, metavar="[MODEL]", type=ModelType())
@click.option(
    "--url", metavar="URL", help=f"A running server. [default: {_DEFAULT_URL}, else a new one]"
)
@key_option("The key of the server.")
@click.option(
    "--print", "shows", is_flag=True, help="Print the configuration; write and start nothing."
)
@click.option("--no-start", is_flag=True, help="Write the configuration, and start no agent.")
@log_level_option
@click.pass_context
def launch(
    context: click.Context,
    agent: str,
    model: str | None,
    url: str | None,
    api_key: str | None,
    shows: bool,
    no_start: bool,
) -> None:
    """Start a coding agent with a model of this machine.

    AGENT is opencode, codex, claude, cline or aider. MODEL is the model of the server at --url; where no server
    runs, `max serve MODEL` is started for the agent, and stopped with it. Arguments after -- are the agent's.

    The server is added to the agent's configuration; a file that is changed is kept beside the new one, with
    .before-max at the end of its name.
    """
    chosen = AGENTS[agent]
    program = shutil.which(chosen.command)
    if program is None and not (shows or no_start):
        words = ["max", "launch", agent, model or "MODEL", *(["--url", url] if url else [])]
        raise CommandError(
            f"{chosen.command} is not installed",
            f"`{chosen.install}`; `{shlex.join(words)} --print` shows its configuration.",
        )
    with _endpoint(url, model, api_key, shows or no_start) as endpoint:
        if shows:
            click.echo(_describe_client(chosen, endpoint))
            return
        for path, kept in written_files(chosen, endpoint):
            click.echo(f"{path}" + (f" (was kept as {kept.name})" if kept else ""), err=True)
        if endpoint.context < _LEAST_CONTEXT:
            click.echo(
                f"max: warning: the context of {endpoint.model} has {endpoint.context} tokens; agents need "
                f"{_LEAST_CONTEXT} or more",
                err=True,
            )
        if no_start or program is None:
            return
        words = [program, *chosen.arguments(endpoint), *context.meta[_OF_AGENT]]
        # Ctrl-C is the agent's; a handler is none in the processes that are started, unlike an ignored signal
        before = signal.signal(signal.SIGINT, lambda number, frame: None)
        try:
            done = subprocess.run(words, env=chosen.environment_of(endpoint))
        finally:
            signal.signal(signal.SIGINT, before)
    raise click.exceptions.Exit(done.returncode)


def _describe_client(agent: Agent, endpoint: Endpoint) -> str:
    """The files, variables and arguments of an agent, as text."""
    lines: list[str] = []
    for file in agent.files(endpoint):
        lines += [f"# {file.path}", file.own_text.rstrip("\n"), ""]
    lines += [f"export {name}={value}" for name, value in agent.variables(endpoint).items()]
    lines.append(" ".join([agent.command, *agent.arguments(endpoint)]))
    return "\n".join(lines)


@contextmanager
def _endpoint(
    url: str | None, model: str | None, key: str | None, only_running: bool
) -> Iterator[Endpoint]:
    """A server with the model: a running one, else one that is started and stopped here."""
    base = base_url(url or _DEFAULT_URL)
    models = _models_at(base, key)
    if models is None and url is not None:
        raise CommandError(
            f"{url} does not answer as a server does", "`max serve MODEL` starts one."
        )
    entry = _entry(models or [], model)
    if entry is not None:
        yield Endpoint(base, entry["id"], int(entry.get("max_model_len") or 0), key)
        return
    if models and (url is not None or model is None):
        names = ", ".join(each["id"] for each in models)
        raise CommandError(f"{base} has no model {model!r}", f"It has: {names}")
    if model is None:
        raise CommandError(
            f"no model is given, and no server answers at {base}",
            "`max launch AGENT MODEL`; `max ls` lists models.",
        )
    if only_running:
        # what the server will say is not known: the file is that of its default port
        yield Endpoint(base, model, 0, key)
        return
    with _running_server(model, key) as started:
        entry = _entry(_models_at(started, key) or [], None)
        if entry is None:
            raise CommandError(f"the server at {started} has no model", "Try `max serve MODEL`.")
        yield Endpoint(started, entry["id"], int(entry.get("max_model_len") or 0), key)


def _models_at(base: str, key: str | None) -> list[dict[str, Any]] | None:
    """The models of a server; None where none answers."""
    try:
        models = asyncio.run(Target(base, key).json("/v1/models"))["data"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return [each for each in models if isinstance(each, dict) and isinstance(each.get("id"), str)]


def _entry(models: list[dict[str, Any]], model: str | None) -> dict[str, Any] | None:
    """The entry of a model; without a name the first that is loaded."""
    if model is not None:
        return next((each for each in models if each["id"] == model), None)
    loaded = [m for m in models if m.get("status", {}).get("value", "loaded") == "loaded"]
    return next(iter(loaded or models), None)


@contextmanager
def _running_server(model: str, key: str | None) -> Iterator[str]:
    """The address of a server of a model, which is stopped at the end."""
    words = [*_MAX, "serve", model, "--port", "0", "--metrics-port", "0", "--no-ui"]
    if key:
        words += ["--api-key", key]
    # Ctrl-C in the agent's terminal must not stop it
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert server.stdout is not None
    progress = Progress()
    try:
        with progress.stage(f"starting a server of {model}"):
            address = _ready(server.stdout)
            if address is None:
                progress.close()
                raise click.exceptions.Exit(server.wait() or 1)
        progress.close()
        # what it says later is not for the agent's screen
        threading.Thread(target=server.stdout.read, name="server output", daemon=True).start()
        yield address
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def _ready(lines: IO[str]) -> str | None:
    """The address in the line that says that a server is ready; None where it ends before."""
    for line in lines:
        if match := re.search(r"Server ready on (https?://\S+)", line):
            return match[1]
    return None
