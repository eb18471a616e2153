"""Options of commands, made from the fields of configurations and of sampling parameters."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from max._config import flags
from max.entrypoints.cli.options.model_names import ModelType
from max.interfaces import SamplingParamsInput
from max.pipelines.config.draft_options import DRAFT, DRAFT_HELP
from max.pipelines.config.model_config import MAXModelConfig
from max.pipelines.config.options import options_of, type_hints
from max.pipelines.config.pipeline_config import PipelineConfig

# options whose names differ from their fields
_NAMES = {
    "model_path": ("--model", "--model-path"),
    "device_specs": ("--devices",),
    "prefill_chunk_size": ("--prefill-chunk-size", "--max-batch-input-tokens"),
    "max_batch_context_length": ("--max-batch-context-length", "--max-batch-total-tokens"),
    "max_num_loras": ("--max-num-loras", "--max-loras"),
    "enable_penalties": ("--enable-penalties", "--do-penalties"),
    "draft_model_path": ("--draft-model", "--draft-model-path"),
    "draft_device_specs": ("--draft-devices",),
}
_NOT_OPTIONS = {"in_dtype", "out_dtype", "zmq_endpoint_base"}

_GROUPS = {
    "_model_config": "Model",
    "_kv_cache_config": "KV cache",
    "_sampling_config": "Sampling",
    "_profiling_config": "Profiling",
    "_lora_config": "Adapters",
}
"""The headings of the help for the parts of a configuration; its own fields are under ``_OWN_GROUP``."""
_OWN_GROUP = "Lengths and batches"
_DRAFT_GROUP = "Draft model"
_REQUIRED, _OWN, _OTHERS = "Required options", "Options", "Other options"
_GENERAL = {"--log-level", "--verbose", "--quiet", "--help"}
"""Options that every command has, which stand last in its help."""


_PAIRS = ("--lora-paths",)
"""Options that take several pairs ``name=value`` after one name."""


def _with_repeated_names(args: list[str]) -> list[str]:
    """Arguments in which each pair of `_PAIRS` has the name of its option before it."""
    result: list[str] = []
    name: str | None = None
    for arg in args:
        is_pair = "=" in arg and not arg.startswith("-")
        # the first value follows its name
        if name is not None and is_pair and result[-1] != name:
            result.append(name)
        elif not is_pair:
            name = arg if arg in _PAIRS else None
        result.append(arg)
    return result


class GroupedOption(click.Option):
    """An option that has its place in the help under a heading.

    Args:
        group: The heading.
        attributes: As for ``click.Option``.
    """

    def __init__(self, *attributes: Any, group: str = "", **more: Any) -> None:
        super().__init__(*attributes, **more)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help lists its options under their headings, the others last.

    ``--help=WORD`` lists only those whose names, texts or headings have the word.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses arguments; ``--help=WORD`` ends the call.

        Args:
            ctx: The call.
            args: The arguments.
        """
        args = _with_repeated_names(args)
        before = args[: args.index("--")] if "--" in args else args
        for arg in before:
            if arg.startswith("--help=") and not ctx.resilient_parsing:
                click.echo(self._matching_help(ctx, arg.removeprefix("--help=")))
                ctx.exit()
        return super().parse_args(ctx, args)

    def _matching_help(self, ctx: click.Context, word: str) -> str:
        """The help of the options that have a word.

        Raises:
            click.UsageError: None has it.
        """
        formatter = ctx.make_formatter()
        searched_word = word.lower().lstrip("-").replace("_", "-")
        if not self._write_options(ctx, formatter, searched_word):
            raise click.UsageError(
                f"no option of `{ctx.command_path}` has {word!r} in its name, text or heading", ctx
            )
        return formatter.getvalue().rstrip("\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options.

        Args:
            ctx: The call.
            formatter: Receives the text.
        """
        self._write_options(ctx, formatter, "")

    def _write_options(self, ctx: click.Context, formatter: click.HelpFormatter, word: str) -> bool:
        """Writes the options that contain a word, or all if it is empty; returns whether there were any."""
        first = {_REQUIRED: [], _OWN: [], _GROUPS["_model_config"]: []}
        groups: dict[str, list[tuple[str, str]]] = first
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            # arguments stand in the line of usage, and in the text
            if record is not None and isinstance(parameter, click.Option):
                group = parameter.group if isinstance(parameter, GroupedOption) else _OWN
                if parameter.required:
                    group = _REQUIRED
                elif not _GENERAL.isdisjoint(parameter.opts):
                    group = _OTHERS
                text = f"{record[0]} {getattr(parameter, 'help', '')} {group}"
                if word not in text.lower().replace("_", "-"):
                    continue
                groups.setdefault(group, []).append(record)
        others = groups.pop(_OTHERS, [])
        shown = {group: records for group, records in groups.items() if records}
        if others:
            shown[_OTHERS if shown else _OWN] = others
        for group, records in shown.items():
            with formatter.section(group):
                formatter.write_dl(records)
        return bool(shown)


_SAMPLING_HELP = {
    "top_k": "Sample among the k likeliest tokens; 1 is greedy.",
    "top_p": "Sample among the likeliest tokens that together reach this probability.",
    "min_p": "Drop tokens below this share of the likeliest one's probability.",
    "temperature": "Divide the logits; higher is more varied, 0 is greedy.",
    "frequency_penalty": "Penalty for each time a token was generated.",
    "presence_penalty": "Penalty for a token that was generated.",
    "repetition_penalty": "Divide the logit of a token that was generated; 1 is none.",
    "max_new_tokens": "The most new tokens of an answer.",
    "min_new_tokens": "The fewest new tokens of an answer.",
    "ignore_eos": "Go on after an end-of-sequence token.",
    "stop": "Stop at this text; may be given more than once.",
    "stop_token_ids": "Stop at these tokens, numbers with commas between.",
    "seed": "Of the random numbers.",
}


def _bare(hint: object) -> tuple[Any, bool]:
    """A type without None, and whether it is the item type of a list."""
    args = [a for a in typing.get_args(hint) if a is not types.NoneType]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return _bare(args[0])
    if typing.get_origin(hint) is list:
        return args[0], True
    return hint, False


def _option(
    name: str, hint: object, help: str, default: object, group: str, hidden: bool = False
) -> Callable[[Any], Any]:
    words = _NAMES.get(name, ("--" + name.replace("_", "-"),))
    kind, several = _bare(hint)
    shown = _default_text(default)
    text = f"{help} [default: {shown}]" if shown else help
    if kind is bool:
        return click.option(
            *(f"{word}/--no-{word[2:]}" for word in words),
            name,
            cls=GroupedOption,
            group=group,
            default=None,
            help=text,
            hidden=hidden,
        )
    click_type: Any = {int: click.INT, float: click.FLOAT}.get(kind, click.STRING)
    if name in ("model_path", f"{DRAFT}model_path"):
        click_type = ModelType()
    elif kind is Path:
        click_type = click.Path()
    # None, not an empty tuple: the option is not set
    return click.option(
        *words,
        name,
        cls=GroupedOption,
        group=group,
        type=click_type,
        default=None,
        multiple=several,
        help=text,
        metavar=_meta(kind),
        hidden=hidden,
    )


def _meta(value_type: object) -> str:
    return {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(value_type, "TEXT")


def _default_text(default: object) -> str:
    """A default for the help; empty if the help's text states it."""
    if default is None or default is dataclasses.MISSING or default in ("", -1):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default)


def _set_weight_cache(ctx: click.Context, param: click.Parameter, value: bool | None) -> None:
    """Turns the cache of packed weights off by its environment variable, which a server's processes inherit."""
    if value is False:
        flags.export("MAX_WEIGHT_CACHE_SIZE", 0)


def _set_threads(ctx: click.Context, param: click.Parameter, value: int | None) -> None:
    """Sets the number of threads by its environment variable, which a server's processes inherit."""
    if value is not None:
        flags.export("MAX_NUM_THREADS", value)


def config_options(command: Any) -> Any:
    """Adds an option for each field of a pipeline's configuration, and those of loading a model.

    Args:
        command: The command; receives the set values by field.
    """
    command = click.option(
        "--threads",
        cls=GroupedOption,
        group=_GROUPS["_model_config"],
        type=click.IntRange(1, 4096),
        expose_value=False,
        callback=_set_threads,
        help="The threads that compute, as MAX_NUM_THREADS. [default: one for each core that this process may use]",
    )(command)
    command = click.option(
        "--weight-cache/--no-weight-cache",
        cls=GroupedOption,
        group=_GROUPS["_model_config"],
        default=None,
        expose_value=False,
        callback=_set_weight_cache,
        help="Keep packed weights on the disk, where later starts map them; --no-weight-cache neither writes nor reads "
        "them, as MAX_WEIGHT_CACHE_SIZE=0. [default: on]",
    )(command)
    decorators: list[Callable[[Any], Any]] = []
    parts = [*PipelineConfig.PARTS.items(), ("", PipelineConfig)]
    for part, cls in parts:
        group = _GROUPS.get(part, _OWN_GROUP)
        hints = type_hints(cls)
        for name, f in options_of(cls).items():
            if name not in _NOT_OPTIONS:
                hint = str if name == "device_specs" else hints[name]
                # options without effect, and unsupported ones, are accepted for scripts but hidden
                hidden = bool(f.metadata["no_effect"] or f.metadata["unsupported"])
                decorators.append(_option(name, hint, f.metadata["help"], f.default, group, hidden))
    hints = type_hints(MAXModelConfig)
    for name, f in options_of(MAXModelConfig).items():
        hint = str if name == "device_specs" else hints[name]
        hidden = bool(f.metadata["no_effect"] or f.metadata["unsupported"])
        own, text = f"{DRAFT}{name}", DRAFT_HELP[f"{DRAFT}{name}"]
        decorators.append(_option(own, hint, text, f.default, _DRAFT_GROUP, hidden))
    # the decorator that is applied last stands first in the help
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def sampling_options(command: Any) -> Any:
    """Adds an option for each sampling parameter.

    Args:
        command: The command; receives the set values by field.
    """
    hints = typing.get_type_hints(
        SamplingParamsInput, localns={"ProcessorInputs": object, "Sequence": list}
    )
    for name in reversed(_SAMPLING_HELP):
        hint = str if name == "stop_token_ids" else hints[name]
        command = _option(name, hint, _SAMPLING_HELP[name], None, "Sampling")(command)
    return command


def set_values(values: dict[str, Any]) -> dict[str, Any]:
    """The values that are set.

    Args:
        values: All options' values; None and empty tuples stand for "not set".
    """
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value is not None and value != ()
    }


def sampling_input(values: dict[str, Any]) -> SamplingParamsInput:
    """Extracts the sampling parameters from options' values.

    Args:
        values: The set values; sampling parameters are removed.

    Raises:
        click.BadParameter: A value does not fit.
    """
    mine = {name: values.pop(name) for name in _SAMPLING_HELP if name in values}
    if (ids := mine.get("stop_token_ids")) is not None:
        try:
            mine["stop_token_ids"] = [int(part) for part in str(ids).split(",") if part.strip()]
        except ValueError:
            raise click.BadParameter(
                f"{ids!r} are not numbers with commas between", param_hint="--stop-token-ids"
            ) from None
    return SamplingParamsInput(**mine)


def text_of(path: str) -> str:
    """The text of a file.

    Args:
        path: The file.

    Raises:
        click.UsageError: It cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{path} is no UTF-8 text: {error}") from error
    except OSError as error:
        raise click.UsageError(f"{path} cannot be read: {error.strerror}") from error
