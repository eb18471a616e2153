"""Options from a file: ``--config-file`` of `max serve` and `max benchmark`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import click

from max._spelling import similar_names
from max.entrypoints.cli.errors import CommandError


def read_config(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> str | None:
    """Reads the file of ``--config-file``, as the callback of the option.

    Args:
        context: The call.
        parameter: The option.
        value: The file; None: none.

    Raises:
        CommandError: The file cannot be read, or a key is no option of the command.
    """
    if value is not None:
        read_config_file(context, Path(value))
    return value


def read_config_file(context: click.Context, path: Path) -> None:
    """Reads options from a file if neither the command line nor an environment variable sets them.

    The file is a YAML mapping, so JSON fits too: the names of options, with or without dashes before
    them, and their values; a list for an option that may be given more than once.

    Args:
        context: The call.
        path: The file.

    Raises:
        CommandError: The file cannot be read, or a key is no option of the command.
    """
    content = read_mapping(path)
    options = options_by_name(context.command.params)
    values = option_values(path, content, options, command=context.command_path)
    context.default_map = {**(context.default_map or {}), **values}


def read_mapping(path: Path) -> dict[Any, Any]:
    """The mapping of a YAML or JSON file.

    Args:
        path: The file.

    Raises:
        CommandError: The file cannot be read, or has no mapping.
    """
    try:
        import yaml
    except ImportError as error:
        raise CommandError(
            f"{path} cannot be read: PyYAML is not installed", 'pip install "supremum[serve]"'
        ) from error
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, ValueError, yaml.YAMLError) as error:
        raise CommandError(
            f"cannot read {path}: {' '.join(str(error).split())}", "Give a file with YAML or JSON."
        ) from error
    if not isinstance(content, dict):
        raise CommandError(
            f"{path} has no mapping", "Write one line an option, such as `max-length: 512`."
        )
    return cast("dict[Any, Any]", content)


def options_by_name(parameters: Iterable[click.Parameter]) -> dict[str, click.Option]:
    """The options among parameters of a command that a file may set, by their names without dashes before them.

    Args:
        parameters: The parameters.
    """
    return {
        plain_name(text): parameter
        for parameter in parameters
        if isinstance(parameter, click.Option)
        and parameter.name not in (None, "config_file", "help")
        for text in parameter.opts
    }


def option_values(
    path: Path,
    content: dict[Any, Any],
    options: dict[str, click.Option],
    where: str = "",
    more: Iterable[str] = (),
    command: str = "max serve",
) -> dict[str, Any]:
    """The values of options that a mapping sets, by the names of their parameters.

    Args:
        path: The file that has the mapping.
        content: The mapping.
        options: The options that it may set.
        where: The place of the mapping in the file, for errors; empty: it is the whole file.
        more: Other keys that are known, to be suggested for a wrong one.
        command: The command whose options they are.

    Raises:
        CommandError: A key is no option, or its value is none of an option.
    """
    of = f" of {where}" if where else ""
    values: dict[str, Any] = {}
    for key, value in content.items():
        option = options.get(plain_name(str(key)))
        if option is None or option.name is None:
            near = similar_names(plain_name(str(key)), [*options, *more])
            hint = f"Did you mean {near[0]}?" if near else f"`{command} --help` lists the options."
            raise CommandError(f"{path} sets {key}{of}, which is no option", hint)
        if isinstance(value, dict) or (isinstance(value, list) and not option.multiple):
            kind = "mapping" if isinstance(value, dict) else "list"
            raise CommandError(f"{path} sets {key}{of} to a {kind}", "Give one value.")
        if value is not None:
            # one value of an option with several
            listed = option.multiple and not isinstance(value, list)
            values[option.name] = [value] if listed else value
    return values


def plain_name(name: str) -> str:
    """The name of an option as a file may write it: without dashes before it, with dashes within.

    Args:
        name: The name.
    """
    return name.lstrip("-").replace("_", "-")
