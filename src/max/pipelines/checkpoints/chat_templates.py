"""Chat templates in files: a Jinja file, or a JSON file as Hugging Face's chat_template.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from max.pipelines.core.exceptions import ConfigError

__all__ = ["DEFAULT", "choose_template", "named_templates", "read_template_file"]

DEFAULT = "default"
_TOOL_USE = "tool_use"
_REMEDY = (
    'A JSON file holds {"chat_template": "…"}, or a list of objects with name and template there; '
    "any other file is the template."
)


def named_templates(value: object) -> dict[str, str] | None:
    """The templates of a list of objects with name and template, or of an object of templates by name.

    Args:
        value: The parsed JSON.

    Returns:
        The templates by name; None if the value is something else.
    """
    if isinstance(value, list):
        if not all(
            isinstance(each, dict) and {"name", "template"} <= each.keys() for each in value
        ):
            return None
        value = {each["name"]: each["template"] for each in value}
    if not isinstance(value, dict):
        return None
    texts = all(isinstance(text, str) for pair in value.items() for text in pair)
    return {**value} if texts else None


def choose_template(templates: dict[str, str], tools: object) -> str | None:
    """The template of a conversation; None if there is none.

    Args:
        templates: The templates by name.
        tools: The tools of the conversation; with any, a template named ``tool_use`` applies.
    """
    return templates.get(_TOOL_USE if tools and _TOOL_USE in templates else DEFAULT)


def read_template_file(path: Path) -> dict[str, str]:
    """Reads the user's file with chat templates.

    Args:
        path: The file.

    Returns:
        The templates by name, ``default`` among them.

    Raises:
        ConfigError: The file cannot be read, or is JSON without a template.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat template {path} cannot be read: {error}",
            "Give the path of a template file with --chat-template.",
        ) from error
    is_json = path.suffix.lower() == ".json"
    try:
        value: Any = json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        if is_json:
            raise ConfigError(f"chat template {path} is no JSON: {error}", _REMEDY) from error
        return {DEFAULT: text}
    # a template such as `[1]` is JSON too; an object with this key is none
    if not is_json and not (isinstance(value, dict) and "chat_template" in value):
        return {DEFAULT: text}
    return _templates_of(path, value)


def _templates_of(path: Path, value: object) -> dict[str, str]:
    """The templates in a JSON file's value."""
    inside = value.get("chat_template") if isinstance(value, dict) else None
    if isinstance(inside, str):
        return {DEFAULT: inside}
    templates = named_templates(inside)
    if not templates:
        problem = "has no chat_template"
        if inside is not None:
            problem = "has a chat_template that is neither a text nor a list of objects with name and template"
        raise ConfigError(f"chat template {path} {problem}", _REMEDY)
    if len(templates) == 1:
        return {DEFAULT: next(iter(templates.values()))}
    if DEFAULT not in templates:
        names = ", ".join(map(repr, templates))
        raise ConfigError(
            f"chat template {path} has the templates {names}, and none named {DEFAULT!r}", _REMEDY
        )
    return templates
