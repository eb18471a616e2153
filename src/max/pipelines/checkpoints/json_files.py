"""JSON files of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from max.pipelines.checkpoints.damaged_files import remedy_for
from max.pipelines.core.exceptions import ModelFilesError

_JSON_NAMES: dict[type, str] = {
    list: "an array",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Args:
        path: The file.

    Raises:
        ModelFilesError: The file cannot be read, or does not contain an object.
    """
    value = _read(path)
    if not isinstance(value, dict):
        raise _holds_other(path, value, "object")
    return value


def read_json_objects(path: Path) -> list[dict[str, Any]]:
    """Reads a JSON file that holds an array of objects.

    Args:
        path: The file.

    Raises:
        ModelFilesError: The file cannot be read, or does not contain an array of objects.
    """
    value = _read(path)
    if not isinstance(value, list):
        raise _holds_other(path, value, "array")
    for entry in value:
        if not isinstance(entry, dict):
            raise _holds_other(path, entry, "array of objects", "an array with ")
    return value


def _holds_other(path: Path, value: object, expected: str, where: str = "") -> ModelFilesError:
    kind = _JSON_NAMES.get(type(value), "an object")
    return ModelFilesError(
        f"{path} holds {where}{kind}; expected a JSON {expected}",
        remedy_for(path),
    )


def _read(path: Path) -> Any:
    """The parsed contents of a JSON file."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # accepts a byte order mark
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # raises for unpaired surrogates
    except OSError as error:
        raise ModelFilesError(
            f"{path} cannot be read: {error.strerror or error}", "Check the model's folder."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} is no JSON: {error}", remedy_for(path)) from error
    return value
