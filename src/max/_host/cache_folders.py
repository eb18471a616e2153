"""The folders of the cache: where they are, their sizes, and files that killed processes left in them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from max._config import named_cache_dir
from max._host.private_folder import private_folder
from max._host.process_caches import process_cache

__all__ = [
    "QUANTIZED_FOLDER",
    "CacheFolder",
    "cache_dir",
    "cache_folders",
    "clear_folder",
    "left_behind",
    "remove_left_behind",
]

QUANTIZED_FOLDER = "quantized"
"""The folder of weights that were quantized when they were loaded; see `max.pipelines.checkpoints.quantize`."""

_TEMPORARY = re.compile(r"\.([0-9]+)(?:\.[0-9]+)?\.(?:tmp|part)$")
"""The end of the name of a file that is being written, with the number of the process that writes it."""
_WRITES_WITHIN_S = 10.0
"""A process writes to its file at least this often: a process of another container has a number that says nothing."""
_LONGEST_WRITE_S = 3600.0
"""An older file is left behind, whatever process has its number now."""


_private_folders: dict[Path, Path] = process_cache({})


def cache_dir() -> Path:
    """The folder of all caches: ``MAX_CACHE_DIR``, else ``supremum`` in the user's cache folder.

    If other users may write to it, it is a temporary folder of this process, as the caches hold code.
    """
    folder = named_cache_dir()
    private = _private_folders.get(folder)
    if private is None:
        private = _private_folders[folder] = private_folder(folder)
    return private


@dataclass(frozen=True)
class CacheFolder:
    """A folder of the cache.

    Args:
        name: Its name, the kind of its entries.
        files: The number of its files.
        size: Their bytes.
    """

    name: str
    files: int
    size: int


def cache_folders(root: Path) -> list[CacheFolder]:
    """The folders of the cache by name; temporary files count too.

    Args:
        root: The folder of all caches.
    """
    folders: list[CacheFolder] = []
    with contextlib.suppress(OSError):
        for entry in sorted(root.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                sizes = list(_sizes(entry))
                folders.append(CacheFolder(entry.name, len(sizes), sum(sizes)))
    return folders


def clear_folder(root: Path, name: str) -> None:
    """Deletes a folder of the cache; processes that use its files go on with them.

    Args:
        root: The folder of all caches.
        name: The folder's name.

    Raises:
        OSError: A file cannot be deleted.
        ValueError: The cache has no folder of this name.
    """
    if name not in {folder.name for folder in cache_folders(root)}:
        raise ValueError(f"{name!r} is no folder of the cache")
    shutil.rmtree(root / name)


def left_behind(folders: Iterable[Path]) -> list[Path]:
    """The files that processes were writing when they were killed.

    Args:
        folders: Where files are looked for; folders in them are not.
    """
    return [path for folder in folders for path in _temporaries(folder) if _is_left_behind(path)]


def remove_left_behind(folders: Iterable[Path]) -> int:
    """Deletes these files.

    Args:
        folders: Where files are looked for; folders in them are not.

    Returns:
        The bytes that are free now.
    """
    freed = 0
    for path in left_behind(folders):
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            freed += size
    return freed


def _sizes(folder: Path) -> Iterator[int]:
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.stat(os.path.join(parent, name)).st_size


def _temporaries(folder: Path) -> Iterator[Path]:
    try:
        entries = list(folder.iterdir())
    except OSError:
        return
    yield from (entry for entry in entries if _TEMPORARY.search(entry.name))


def _is_left_behind(path: Path) -> bool:
    match = _TEMPORARY.search(path.name)
    assert match is not None
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:
        return False
    if age > _LONGEST_WRITE_S:
        return True
    return age > _WRITES_WITHIN_S and not _runs(int(match[1]))


def _runs(process: int) -> bool:
    """Whether a process of this number runs; True where the system does not tell."""
    if sys.platform == "win32":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
