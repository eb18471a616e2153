"""Folders whose files this process runs: nobody else may write to them."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

__all__ = ["is_private", "make_private", "private_folder"]

_OTHERS_WRITE = 0o022


def is_private(stat: os.stat_result) -> bool:
    """Whether a file or folder is this user's, or the administrator's, and no other user can write to it."""
    if not hasattr(os, "geteuid"):
        return True  # Windows: the profile's folders are protected by access lists
    return stat.st_uid in (0, os.geteuid()) and not stat.st_mode & _OTHERS_WRITE


def private_folder(folder: Path) -> Path:
    """A folder that is private, or does not exist yet; else a new one, for this process, after a warning.

    Args:
        folder: The folder.
    """
    try:
        stat = folder.stat()
    except OSError:
        return folder
    if is_private(stat):
        return folder
    if stat.st_uid in (0, os.geteuid()):
        fault, remedy = "can be written by other users", f"chmod go-w {folder}"
    else:
        fault, remedy = (
            f"belongs to user {stat.st_uid}, not to user {os.geteuid()}",
            f"chown {folder}",
        )
    import logging

    logging.getLogger("max.runtime").warning(
        "the cache folder %s %s, and it holds code that would run here: it is not used, and code is compiled anew in "
        "each process; change that (%s), or name another folder in MAX_CACHE_DIR",
        folder, fault, remedy,
    )  # fmt: skip
    return _temporary()


def _temporary() -> Path:
    import shutil
    import tempfile

    folder, process = tempfile.mkdtemp(prefix="supremum-cache-"), os.getpid()

    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)


def make_private(folder: Path, top: Path) -> None:
    """Makes a folder, and those above it up to `top`, for this user only; existing ones stay as they are.

    Args:
        folder: The folder.
        top: It or a folder above it. Folders above `top` are made as the umask has it.

    Raises:
        OSError: It cannot be made.
    """
    if folder.is_dir():
        return
    top.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in (*reversed(folder.relative_to(top).parents), folder.relative_to(top)):
        (top / each).mkdir(mode=0o700, exist_ok=True)
