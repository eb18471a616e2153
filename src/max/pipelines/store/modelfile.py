"""Ollama's Modelfiles: what a model is made of, as text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from max._spelling import did_you_mean
from max.pipelines.core.exceptions import InputError

__all__ = ["Modelfile", "modelfile_text", "parameters_text", "read_modelfile"]

_MOST_CHARACTERS = 4 << 20
_COMMANDS = ("FROM", "ADAPTER", "TEMPLATE", "SYSTEM", "PARAMETER", "MESSAGE", "LICENSE")
_QUOTES = '"""'
_FIRST_WORD = re.compile(r"\S+")


@dataclass
class Modelfile:
    """The commands of a Modelfile.

    Attributes:
        base: The model or the path after FROM.
        adapter: The path after ADAPTER; empty: none.
        template: The text of TEMPLATE; None: none.
        system: The text of SYSTEM.
        parameters: The parameters, by name.
        messages: The messages, with role and content.
        license: The texts of LICENSE.
    """

    base: str = ""
    adapter: str = ""
    template: str | None = None
    system: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    license: list[str] = field(default_factory=list)


def read_modelfile(text: str) -> Modelfile:
    """Reads a Modelfile.

    Args:
        text: Its text.

    Raises:
        InputError: It is no Modelfile; the message has the number of the line.
    """
    if len(text) > _MOST_CHARACTERS:
        raise InputError(f"the Modelfile has {len(text)} characters, more than {_MOST_CHARACTERS}")
    found = Modelfile()
    for line, command, value in _commands(text.removeprefix("\ufeff")):
        match command:
            case "FROM":
                if found.base:
                    raise InputError(f"line {line}: FROM is given twice")
                found.base = value
            case "ADAPTER":
                if found.adapter:
                    raise InputError(
                        f"line {line}: ADAPTER is given twice; a model has one at most"
                    )
                found.adapter = value
            case "TEMPLATE":
                found.template = value
            case "SYSTEM":
                found.system = value
            case "LICENSE":
                found.license.append(value)
            case "MESSAGE":
                role, rest = _split(value, line, command)
                found.messages.append({"role": role, "content": rest})
            case _:
                name, rest = _split(value, line, command)
                if name == "stop":
                    found.parameters.setdefault("stop", []).append(rest)
                else:
                    found.parameters[name] = _value(rest)
    if not found.base:
        raise InputError("the Modelfile has no FROM")
    return found


def _commands(text: str) -> Iterator[tuple[int, str, str]]:
    """The commands of a text, each with the number of its line and its value without quotes."""
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        number, line = at + 1, lines[at].strip()
        at += 1
        if not line or line.startswith("#"):
            continue
        word, _, value = line.partition(" ")
        command, value = word.upper(), value.strip()
        if command not in _COMMANDS:
            hint = did_you_mean(command, _COMMANDS)
            raise InputError(f"line {number}: {word[:40]!r} is no command of a Modelfile{hint}")
        begin = value.find(_QUOTES)
        # a name may stand before the text: MESSAGE user three quotes
        if begin >= 0 and len(value[:begin].split()) <= (command in ("MESSAGE", "PARAMETER")):
            head, body = value[:begin], value[begin + len(_QUOTES) :]
            parts = [body]
            while _QUOTES not in parts[-1]:
                if at == len(lines):
                    raise InputError(f"line {number}: the text of {command} has no end")
                parts.append(lines[at])
                at += 1
            whole, _, after = "\n".join(parts).partition(_QUOTES)
            if after.strip():
                raise InputError(f"line {at}: there is text after the end of {command}")
            yield number, command, f"{head}{_QUOTES}{whole}" if head else whole
            continue
        if not value:
            raise InputError(f"line {number}: {command} has no value")
        yield (
            number,
            command,
            value if command in ("MESSAGE", "PARAMETER") else _without_quotes(value),
        )


def _split(value: str, line: int, command: str) -> tuple[str, str]:
    """The first word of a value, and the rest of it."""
    first = _FIRST_WORD.match(value)
    rest = value[first.end() :].strip(" \t") if first else ""
    if first is None or not rest:
        raise InputError(f"line {line}: {command} needs a name and a value")
    if rest.startswith(_QUOTES):
        return first[0], rest[len(_QUOTES) :]
    return first[0], _without_quotes(rest)


def _without_quotes(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _value(text: str) -> Any:
    """The number or the truth value that a text stands for."""
    lower = text.strip().lower()
    if lower in ("true", "false"):
        return lower == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parameters_text(parameters: dict[str, Any]) -> str:
    """Parameters as lines of a name and a value.

    Args:
        parameters: The parameters by name.
    """
    lines = [
        f"{name:<30} {json.dumps(each, ensure_ascii=False)}"
        for name, value in parameters.items()
        for each in (value if isinstance(value, list) else [value])
    ]
    return "\n".join(lines)


def modelfile_text(modelfile: Modelfile) -> str:
    """The text of a Modelfile.

    Args:
        modelfile: Its commands.
    """
    lines = [f"FROM {modelfile.base}"]
    if modelfile.adapter:
        lines.append(f"ADAPTER {modelfile.adapter}")
    if modelfile.template is not None:
        lines.append(f"TEMPLATE {_QUOTES}{modelfile.template}{_QUOTES}")
    if modelfile.system:
        lines.append(f"SYSTEM {_QUOTES}{modelfile.system}{_QUOTES}")
    for name, value in modelfile.parameters.items():
        for each in value if isinstance(value, list) else [value]:
            text = f"{_QUOTES}{each}{_QUOTES}" if isinstance(each, str) else json.dumps(each)
            lines.append(f"PARAMETER {name} {text}")
    for message in modelfile.messages:
        lines.append(f"MESSAGE {message['role']} {_QUOTES}{message['content']}{_QUOTES}")
    lines += [f"LICENSE {_QUOTES}{text}{_QUOTES}" for text in modelfile.license]
    return "\n".join(lines) + "\n"
