"""`max chat`: a conversation in the terminal, with a model of this process or of a server; `max run` by a name."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import click

from max import pipelines
from max._lazy import lazy_module
from max._spelling import similar_names
from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.errors import CommandError
from max.entrypoints.cli.options.config_options import (
    GroupedCommand,
    config_options,
    sampling_input,
    sampling_options,
    set_values,
)
from max.entrypoints.cli.options.model_names import ModelType, model_argument, set_model
from max.entrypoints.cli.options.server_options import base_url, key_option
from max.entrypoints.cli.progress import Progress
from max.interfaces import SamplingParamsInput
from max.pipelines.core.exceptions import UserError
from max.pipelines.sampling.defaults import sampling_params_for

# with --url no model runs in this process
if TYPE_CHECKING:
    import shlex

    from max.entrypoints.cli import generate as generating
    from max.entrypoints.cli import imported
    from max.entrypoints.cli.generation import runner as model_runs
else:
    shlex = lazy_module("shlex")
    generating = lazy_module("max.entrypoints.cli.generate")
    model_runs = lazy_module("max.entrypoints.cli.generation.runner")
    imported = lazy_module("max.entrypoints.cli.imported")

Message = dict[str, Any]

_HELP = """\
/help            this list
/new             begin a new conversation
/system TEXT     set the system message; without a text none
/set NAME VALUE  set temperature, top_p, top_k, max_new_tokens, seed, …; without a value unset it
/undo            take back the last message and its answer
/again           answer the last message anew
/stats           show or hide the timing after each answer
/quit            leave; so do Ctrl-D and /bye
\"\"\"             begins and ends a message of several lines
Ctrl-C           ends an answer"""


class Answerer(Protocol):
    """Answers conversations."""

    def stream(self, messages: list[Message], sampling: SamplingParamsInput) -> Iterator[str]:
        """The answer to a conversation, in pieces.

        Args:
            messages: The messages.
            sampling: How tokens are chosen.
        """
        ...


class _ModelAnswerer:
    """A model of this process.

    Args:
        values: The fields of its configuration that are set.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        values.setdefault("max_batch_size", 1)
        progress = Progress()
        with progress.stage("reading the configuration"):
            self._config = pipelines.PipelineConfig(**values)
            defaults = self._config.model_config.sampling_params_defaults
            self._runner = model_runs.Runner(
                self._config, sampling_params_for(SamplingParamsInput(), defaults)
            )
        with progress.stage(f"loading {self._config.model_config.model_name}"):
            self._runner.load()
        progress.close()

    def stream(self, messages: list[Message], sampling: SamplingParamsInput) -> Iterator[str]:
        """The answer to a conversation, in pieces.

        Args:
            messages: The messages.
            sampling: How tokens are chosen.
        """
        defaults = self._config.model_config.sampling_params_defaults
        self._runner.params = sampling_params_for(sampling, defaults)
        yield from self._runner.run(self._runner.context(messages=messages))


class _ServerAnswerer:
    """A server with OpenAI's API.

    Args:
        url: Its address.
        model: The model; None: the server's first.
        key: The key; None: none.
    """

    def __init__(self, url: str, model: str | None, key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise CommandError(
                f"--url {url} is no address", "Give one such as http://127.0.0.1:8000."
            )
        self._url = base_url(url)
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._model = model
        if model is None:
            with self._open("/v1/models", None) as response:
                listed = json.load(response)["data"]
            if not listed:
                raise CommandError(f"{url} has no model", "Start one with `max serve MODEL`.")
            self._model = listed[0]["id"]

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=600)
        except urllib.error.HTTPError as error:
            with error:
                try:
                    message = json.load(error)["error"]["message"]
                except (ValueError, KeyError, TypeError):
                    message = f"status {error.code}"
            raise CommandError(f"{self._url} refuses: {message}", "Change the request.") from error
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise CommandError(
                f"{self._url} cannot be reached: {reason}", "Start it with `max serve MODEL`."
            ) from error

    def stream(self, messages: list[Message], sampling: SamplingParamsInput) -> Iterator[str]:
        """The answer to a conversation, in pieces.

        Args:
            messages: The messages.
            sampling: How tokens are chosen.
        """
        names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
        chosen = {names.get(k, k): v for k, v in vars(sampling).items() if v is not None}
        body = {"model": self._model, "messages": messages, "stream": True, **chosen}
        with self._open("/v1/chat/completions", body) as response:
            for line in response:
                text = line.decode().strip()
                # the last line, [DONE], holds no object
                if not text.startswith("data: {"):
                    continue
                data = json.loads(text[6:])
                if "error" in data:
                    raise CommandError(data["error"]["message"], "Ask again.")
                for choice in data["choices"]:
                    if piece := choice["delta"].get("content"):
                        yield piece


class Session:
    """One conversation with its commands.

    Args:
        answerer: Answers it.
        sampling: How tokens are chosen.
        system: The system message; empty: none.
        stats: Whether the timing is shown after each answer.
        write: Writes text to the user.
    """

    def __init__(
        self,
        answerer: Answerer,
        sampling: SamplingParamsInput,
        system: str = "",
        stats: bool = False,
        write: Callable[[str], None] | None = None,
    ) -> None:
        self._answerer, self._sampling = answerer, sampling
        self._system, self._stats = system, stats
        self._write = write or _write
        self.messages: list[Message] = []
        """The conversation without the system message."""

    def take(self, text: str) -> bool:
        """Carries out a command, or answers a message.

        Args:
            text: What the user has written.

        Returns:
            Whether the session goes on.
        """
        text = text.strip()
        if not text:
            return True
        if not text.startswith("/"):
            self.messages.append({"role": "user", "content": text})
            self._answer()
            return True
        name, _, arguments = text[1:].partition(" ")
        if name in ("quit", "bye", "exit"):
            return False
        command = getattr(self, f"_do_{name}", None)
        if command is None:
            command_names = ["quit", *(each[4:] for each in dir(self) if each.startswith("_do_"))]
            near = similar_names(name, command_names)
            hint = f"did you mean /{near[0]}? " if near else ""
            self._write(f"/{name} is no command; {hint}/help lists them\n")
        else:
            command(arguments.strip())
        return True

    def _do_help(self, argument: str) -> None:
        self._write(_HELP + "\n")

    def _do_new(self, argument: str) -> None:
        self.messages.clear()

    def _do_system(self, argument: str) -> None:
        self._system = argument

    def _do_stats(self, argument: str) -> None:
        self._stats = not self._stats

    def _do_undo(self, argument: str) -> None:
        while self.messages and self.messages.pop()["role"] != "user":
            pass

    def _do_again(self, argument: str) -> None:
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if self.messages:
            self._answer()

    def _do_set(self, argument: str) -> None:
        name, _, text = argument.partition(" ")
        kinds = {"temperature": float, "top_p": float, "min_p": float, "repetition_penalty": float}
        kinds |= {"frequency_penalty": float, "presence_penalty": float, "top_k": int, "seed": int}
        kinds |= {"max_new_tokens": int, "min_new_tokens": int}
        if name not in kinds:
            self._write(f"{name or 'nothing'} cannot be set; there are {', '.join(kinds)}\n")
            return
        try:
            setattr(self._sampling, name, kinds[name](text) if text else None)
        except ValueError:
            self._write(f"{name} is {text!r}; it must be a number\n")

    def _answer(self) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        pieces: list[str] = []
        begin = first = time.perf_counter()
        stream = self._answerer.stream([*system, *self.messages], self._sampling)
        try:
            for piece in stream:
                if not pieces:
                    first = time.perf_counter()
                pieces.append(piece)
                self._write(piece)
        except KeyboardInterrupt:
            # what has come stays in the conversation
            self._write(" …")
        except (UserError, CommandError) as error:
            self._write(f"max: error: {error.problem}")
            # as if it had not been asked
            self.messages.pop()
            pieces = []
        finally:
            # ends the request of the model or server, also after Ctrl-C
            close = getattr(stream, "close", None)
            if close is not None:
                close()
        self._write("\n")
        if pieces:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
        if self._stats and pieces:
            total = time.perf_counter() - begin
            self._write(f"[first text after {first - begin:.3f} s, all after {total:.3f} s]\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _messages() -> Iterator[str]:
    """Yields the user's messages: lines, or blocks between lines of three quotes; ends with the input."""
    terminal = sys.stdin.isatty()
    if terminal:
        try:
            # `input` then edits lines, and has a history
            import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]
        except ImportError:  # Windows
            pass
        click.echo("/help lists the commands, Ctrl-C ends an answer, Ctrl-D the chat.", err=True)
    block: list[str] | None = None
    while True:
        try:
            line = input((">>> " if block is None else "... ") if terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            # leaves a block of lines, not the chat
            _write("\n")
            block = None
            continue
        if line.strip() == '"""':
            if block is None:
                block = []
            else:
                yield "\n".join(block)
                block = None
        elif block is not None:
            block.append(line)
        else:
            yield line


@click.command("chat", cls=GroupedCommand, short_help="Talk with a model in the terminal.")
@model_argument
@click.option(
    "--url", metavar="URL", help="A server with OpenAI's API; without it the model runs here."
)
@key_option("The key of that server.")
@click.option("--system", default="", metavar="TEXT", help="The system message.")
@click.option("--stats/--no-stats", default=False, help="Show the timing after each answer.")
@sampling_options
@config_options
@log_level_option
def chat(
    model: str | None,
    url: str | None,
    api_key: str | None,
    system: str,
    stats: bool,
    **options: object,
) -> None:
    """Talk with a model in the terminal. /help lists the commands.

    MODEL is a folder, a GGUF file, or a name: of `max ls`, a short name, or one on the hub. With --url it is the
    server's name of a model.
    """
    values = set_values(options)
    sampling = sampling_input(values)
    answerer: Answerer
    if url is not None:
        answerer = _ServerAnswerer(url, values.pop("model_path", model), api_key)
        if values:
            name = next(iter(values)).replace("_", "-")
            raise CommandError(f"--{name} is the server's with --url", "Leave it out.")
    else:
        if model is None and "model_path" not in values:
            raise CommandError(
                "no model is given",
                "`max chat MODEL`, or `max chat --url URL` of a server; `max ls` lists models.",
            )
        set_model(values, model, "chat")
        answerer = _ModelAnswerer(values)
    session = Session(answerer, sampling, system, stats)
    for text in _messages():
        if not session.take(text):
            break


_RUN_OPTIONS = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": ["-h", "--help"],
}


class _Run(click.Command):
    """A command whose ``--help`` after a model is that of what runs the model."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-"):
            ctx.help_option_names = []
        return super().parse_args(ctx, args)


@click.command(
    "run", cls=_Run, short_help="Run a model: a prompt or a chat.", context_settings=_RUN_OPTIONS
)
@click.argument("name", metavar="MODEL", type=ModelType())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(name: str, arguments: tuple[str, ...]) -> None:
    """Run a model: answer a prompt, or talk with it where none is given.

    MODEL is a folder, a GGUF file, or a name: of `max ls`, a short name, or one on the hub. An argument that is
    no option is the prompt; - reads it from stdin, and so does a pipe. Options are those of `max generate` with
    a prompt, else those of `max chat`. An ONNX file is run on arrays: `max run model.onnx --help`.
    """
    words = list(arguments)
    if imported.is_imported(name):
        # errors print it as a command that can be typed in
        typed = f"max run {shlex.quote(name)}"
        # not standalone: errors are for the outermost command
        imported.run_file.main([name, *words], prog_name=typed, standalone_mode=False)
        return
    command: click.Command = chat
    if _has_prompt(words):
        command = generating.generate
    elif not sys.stdin.isatty() and not {"-h", "--help"} & set(words):
        command, words = generating.generate, ["--prompt", "-", *words]
    command.main([name, *words], prog_name=f"max {command.name}", standalone_mode=False)


def _has_prompt(words: list[str]) -> bool:
    """Whether arguments of `max run` have a prompt: a text that is no option and no value of one."""
    context = click.Context(
        generating.generate, resilient_parsing=True, ignore_unknown_options=True
    )
    values, _, _ = generating.generate.make_parser(context).parse_args(list(words))
    # the parser takes the first text for the model, which is named before; what is not given is no text
    return any(isinstance(values.get(name), str) for name in ("model", "prompt"))
