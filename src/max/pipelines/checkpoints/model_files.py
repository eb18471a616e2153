"""JSON files of models, and the advice for files that cannot be read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from max.pipelines.core.exceptions import ModelFilesError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_JSON_NAMES: dict[type, str] = {
    list: "an array",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def state_of_files(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """The names, sizes and times of the files in a folder, by which a cache notices that one has changed.

    Args:
        folder: The folder; without it, or without the right to read it, there are none.
    """
    try:
        with os.scandir(folder) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except OSError:
        return ()
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))


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


def remedy_for(*paths: str | Path) -> str:
    """The advice for a set of files of which one cannot be read, as the second line of an error.

    A clone made without Git LFS contains small text files (pointers) instead of the weights; the advice then names the
    command that downloads them.

    Args:
        paths: The files.
    """
    if any(_is_lfs_pointer(path) for path in paths):
        return "The file is a pointer of Git LFS: run `git lfs pull` in the model's folder."
    return "Copy or download the model's files again."


def _is_lfs_pointer(path: str | Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return False
