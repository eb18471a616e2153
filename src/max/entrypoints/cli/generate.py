"""`max generate`: streams the text of a prompt, then prints the timing."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from max._lazy import lazy_module
from max.entrypoints.cli import log_level_option
from max.entrypoints.cli.errors import CommandError
from max.entrypoints.cli.generation.runner import Runner
from max.entrypoints.cli.options.config_options import (
    GroupedCommand,
    config_options,
    sampling_input,
    sampling_options,
    set_values,
)
from max.entrypoints.cli.options.model_names import model_argument, set_model
from max.entrypoints.cli.progress import Progress
from max.pipelines.config.lora_config import MOST_SCALE, named_path
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.sampling.defaults import sampling_params_for

# loaded when a command runs, not for its help or for completions of a shell
if TYPE_CHECKING:
    from max.entrypoints.cli.generation import torch_engine
    from max.pipelines.structured import grammar as grammars
else:
    grammars = lazy_module("max.pipelines.structured.grammar")
    torch_engine = lazy_module("max.entrypoints.cli.generation.torch_engine")


@click.command("generate", cls=GroupedCommand, short_help="Generate text from a prompt.")
@model_argument
@click.argument("text", required=False, metavar="[PROMPT]")
@click.option("--prompt", metavar="TEXT", help="The prompt; - reads it from stdin.")
@click.option(
    "--chat/--no-chat-template",
    "chat",
    default=True,
    help="Apply the model's chat template, if it has one, or continue bare text.",
)
@click.option(
    "--num-warmups",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Runs before the timed one, without output, so that the timing has no first-time costs.",
)
@click.option("--stats/--no-stats", default=True, help="Print the timing on stderr at the end.")
@click.option(
    "--json-schema", metavar="TEXT", help="The text is JSON of this schema; @FILE reads it."
)
@click.option("--regex", metavar="TEXT", help="The text matches this regular expression.")
@click.option(
    "--grammar", metavar="TEXT", help="The text matches this Lark or GBNF grammar; @FILE."
)
@click.option(
    "--lora", metavar="[NAME=]PATH", help="Use this adapter: a folder of PEFT, or a GGUF file."
)
@click.option(
    "--lora-scale", type=float, default=1.0, show_default=True, help="The factor of its weights."
)
@click.option(
    "--engine",
    type=click.Choice(["max", "torch"]),
    default="max",
    show_default=True,
    help="torch: a model of transformers that `max list` lacks, exported by torch.export.",
)
@sampling_options
@config_options
@log_level_option
def generate(
    model: str | None,
    text: str | None,
    prompt: str | None,
    chat: bool,
    engine: str,
    num_warmups: int,
    stats: bool,
    lora: str | None,
    lora_scale: float,
    **options: Any,
) -> None:
    """Generate text from a prompt.

    MODEL is a folder, a GGUF file, or a name: of `max ls`, a short name, or one on the hub. The text goes to
    stdout as it is generated; progress and timing go to stderr.
    """
    rules = {name: options.pop(name) for name in ("json_schema", "regex", "grammar")}
    grammar = _grammar(*rules.values())
    values = set_values(options)
    prompt = _prompt(values, model, text, prompt)
    sampling = sampling_input(values)
    if values.pop("enable_echo", False):
        click.echo(
            "max: warning: --enable-echo has no effect: the text is all that is printed", err=True
        )
    if prompt == "-":
        prompt = _from_stdin()
    begin = time.perf_counter()
    progress = Progress()
    values.setdefault("max_batch_size", 1)  # one prompt, so the cache holds one sequence
    given = [*values, *set_values({**rules, "lora": lora})]
    adapter = _chosen_adapter(values, lora)
    if lora_scale != 1 and not adapter:
        raise click.UsageError("--lora-scale is given, and no adapter; give one with --lora")
    # NaN is not within it either
    if not abs(lora_scale) <= MOST_SCALE:
        raise click.UsageError(
            f"--lora-scale is {lora_scale:g}, expected a number of at most {MOST_SCALE:g}"
        )
    with progress.stage("reading the configuration"):
        # whatever torch exports: the registry does not know it
        config = PipelineConfig(**values, defer_resolve=engine == "torch")
        defaults = config.model_config.sampling_params_defaults
        try:
            params = sampling_params_for(sampling, defaults)
        except ValueError as error:
            raise click.UsageError(str(error).removeprefix("SamplingParams: ")) from error
    if grammar is not None and (params.ignore_eos or params.min_new_tokens):
        raise click.UsageError(
            "--ignore-eos and --min-new-tokens do not fit an answer with a grammar, which says where it ends"
        )
    config_of_model = config.model_config
    if engine == "torch":
        runner = torch_engine.TorchRunner(config, params, given)
    else:
        runner = Runner(config, params, grammar, (adapter, lora_scale))
    # reports a prompt that is too long before the model is loaded
    context = runner.prompt_context(prompt, chat)
    encoding = config_of_model.quantization_encoding
    shown = "" if encoding is None else f" ({encoding.value})"
    with progress.stage(f"loading {config_of_model.model_name}{shown}"):
        runner.load()
    ready = time.perf_counter() - begin
    for i in range(num_warmups):
        with progress.stage(f"warm-up {i + 1} of {num_warmups}"):
            for _ in runner.run(runner.prompt_context(prompt, chat)):
                pass
            runner.forget()  # else the timed run finds the prompt cached
    progress.close()
    timing = _Timing(ready, context.current_length)
    timing.start()
    for piece in runner.run(context, timing.tokens):
        click.echo(piece, nl=False)
    click.echo()
    if stats:
        click.echo(timing.summary(), err=True)


def _chosen_adapter(values: dict[str, Any], lora: str | None) -> str:
    """The name of the adapter of ``--lora``, which is added to the values; else the only one of ``--lora-paths``."""
    if lora is not None:
        values["enable_lora"] = True
        values["lora_paths"] = [*values.get("lora_paths", ()), lora]
        values.setdefault("max_num_loras", 1)
        return named_path(lora)[0]
    paths = values.get("lora_paths", ())
    return named_path(paths[0])[0] if len(paths) == 1 else ""


def _prompt(values: dict[str, Any], model: str | None, text: str | None, prompt: str | None) -> str:
    """The prompt of a call; the model of its arguments is set in the values."""
    if model is not None and text is None and "model_path" in values:
        model, text = None, model  # --model names the model
    if model is not None and " " in model.strip() and "model_path" not in values:
        raise CommandError(
            f"no model is given, and {model!r} is none",
            "`max generate MODEL PROMPT`; `max ls` lists models.",
        )
    if text is not None and prompt is not None:
        raise CommandError(
            f"two prompts are given: {text!r} and --prompt {prompt!r}",
            "Give one of them; put a text with spaces in quotes.",
        )
    prompt = text if prompt is None else prompt
    if prompt is None:
        raise click.UsageError("Missing option '--prompt'.")
    set_model(values, model, "generate")
    return prompt


def _grammar(json_schema: str | None, regex: str | None, text: str | None) -> str | None:
    """The grammar of the options; None without one."""
    options = {
        # grammars are loaded when one is given
        "--json-schema": (lambda value: grammars.of_json_schema(value), json_schema),
        "--regex": (lambda value: grammars.of_regex(value), regex),
        "--grammar": (lambda value: grammars.of_grammar(value), text),
    }
    chosen = [(name, *option) for name, option in options.items() if option[1] is not None]
    if len(chosen) > 1:
        raise click.UsageError(f"{chosen[0][0]} and {chosen[1][0]} are given; give one")
    for name, make, value in chosen:
        if name != "--regex" and value is not None and value.startswith("@"):
            try:
                value = Path(value[1:]).read_text(encoding="utf-8")
            except OSError as error:
                raise click.UsageError(f"{name} {value}: {error.strerror}") from error
        return make(value or "")
    return None


def _from_stdin() -> str:
    """All of stdin; the tokenizer reports bytes that are not UTF-8."""
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise click.UsageError("--prompt - reads the prompt from stdin, which is closed")
    return sys.stdin.buffer.read().decode("utf-8", "surrogateescape")


@dataclass
class _Timing:
    """The times of a generation.

    Args:
        ready: Seconds until the model is ready.
        prompt_tokens: The number of the prompt's tokens.
    """

    ready: float
    prompt_tokens: int
    begin: float = 0.0
    first: float = 0.0
    last: float = 0.0
    generated: int = 0

    def start(self) -> None:
        """Records the start of the prompt."""
        self.begin = time.perf_counter()

    def tokens(self, count: int) -> None:
        """Records new tokens.

        Args:
            count: The number of tokens.
        """
        self.last = time.perf_counter()
        if not self.generated and count:
            self.first = self.last
        self.generated += count

    def summary(self) -> str:
        """The timing in a few lines."""
        to_first = self.first - self.begin
        lines = [
            "",
            f"Startup:             {self.ready:.2f} s",
            f"Prompt:              {self.prompt_tokens} tokens",
            f"Generated:           {self.generated} tokens",
        ]
        if self.generated:
            lines += [
                f"Time to first token: {to_first * 1e3:.1f} ms",
                f"Prompt speed:        {self.prompt_tokens / max(to_first, 1e-9):.1f} tokens/s",
            ]
        if self.generated > 1:
            # the first token belongs to the prompt's step
            speed = (self.generated - 1) / max(self.last - self.first, 1e-9)
            lines.append(f"Generation speed:    {speed:.1f} tokens/s")
        return "\n".join(lines)
