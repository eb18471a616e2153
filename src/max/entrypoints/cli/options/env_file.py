"""Variables from the file `.env` of the current folder: `max serve`."""

from __future__ import annotations

import re
from pathlib import Path

from max._config import set_missing_variables
from max.entrypoints.cli.errors import CommandError

PREFIXES = ("MAX_", "MODULAR_", "HF_", "OTEL_")
"""What is taken from the file; its other lines are of other programs."""
_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=[ \t]*(.*)", re.DOTALL)
_QUOTED = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


def read_env_file(path: Path) -> None:
    """Sets the variables of a file that the environment lacks; does nothing if the file does not exist.

    A line is ``NAME=value``, with ``export`` before it or not. A value in single quotes is taken as it is; in
    double quotes ``\\n``, ``\\t`` and ``\\"`` are characters; without quotes it ends before `` #``. Names with
    other beginnings than ``PREFIXES`` are left alone.

    Args:
        path: The file.

    Raises:
        CommandError: The file cannot be read, a value has an opening quote alone, or a zero byte.
    """
    if not path.is_file():
        return
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(
            f"cannot read {path}: {' '.join(str(error).split())}",
            "Give it UTF-8 text, or remove it.",
        ) from error
    variables: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is not None and match[1].startswith(PREFIXES):
            value = _value(match[2], f"{path}:{number}")
            if "\0" in value:
                raise CommandError(
                    f"{path}:{number}: the value of {match[1]} has a zero byte",
                    "Give it text: no variable can hold one.",
                )
            variables[match[1]] = value
    set_missing_variables(variables)


def _value(text: str, where: str) -> str:
    if text[:1] not in ("'", '"'):
        return re.split(r"(?:^|\s)#", text, maxsplit=1)[0].strip()
    match = _QUOTED.match(text)
    if match is None or not re.fullmatch(r"\s*(#.*)?", text[match.end() :]):
        raise CommandError(
            f"{where}: a value begins with a quote and does not end with it",
            "Close the quote, or write the value without quotes.",
        )
    if match[1] is not None:
        return match[1]
    return re.sub(r"\\(.)", lambda each: _ESCAPES.get(each[1], each[1]), match[2])
