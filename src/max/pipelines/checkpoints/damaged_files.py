"""Advice for model files that cannot be read."""

from __future__ import annotations

from pathlib import Path

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


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
