"""JSON files of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
        ModelFilesError: It cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # raises for half a pair
    except OSError as error:
        raise ModelFilesError(
            f"{path} cannot be read: {error.strerror or error}", "Check the model's folder."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(
            f"{path} is no JSON: {error}", "Copy or download the model's files again."
        ) from error
    if not isinstance(value, dict):
        raise ModelFilesError(
            f"{path} holds {_JSON_NAMES[type(value)]}; expected a JSON object",
            "Copy or download the model's files again.",
        )
    return value
