"""Options from a file: ``--config-file`` of `max serve` and `max benchmark`."""

from __future__ import annotations

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
    try:
        import yaml
    except ImportError as error:
        raise CommandError(
            f"{path} cannot be read: PyYAML is not installed", 'pip install "supremum[serve]"'
        ) from error
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CommandError(
            f"cannot read {path}: {' '.join(str(error).split())}", "Give a file with YAML or JSON."
        ) from error
    if not isinstance(content, dict):
        raise CommandError(
            f"{path} has no mapping", "Write one line an option, such as `max-length: 512`."
        )
    options = {
        _plain(text): parameter
        for parameter in context.command.params
        for text in parameter.opts
        if isinstance(parameter, click.Option)
    }
    values: dict[str, Any] = {}
    for key, value in cast("dict[Any, Any]", content).items():
        option = options.get(_plain(str(key)))
        if option is None or option.name is None or option.name == "config_file":
            near = similar_names(_plain(str(key)), options)
            hint = (
                f"Did you mean {near[0]}?"
                if near
                else f"`{context.command_path} --help` lists the options."
            )
            raise CommandError(f"{path} sets {key}, which is no option", hint)
        if isinstance(value, dict) or (isinstance(value, list) and not option.multiple):
            kind = "mapping" if isinstance(value, dict) else "list"
            raise CommandError(f"{path} sets {key} to a {kind}", "Give one value.")
        if value is not None:
            listed = option.multiple and not isinstance(value, list)
            values[option.name] = [value] if listed else value
    context.default_map = {**(context.default_map or {}), **values}


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-")
