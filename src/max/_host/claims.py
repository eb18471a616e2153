"""File locks that let one of several processes build a missing cache entry while the others wait for it.

A claim is an exclusive `flock` on a file in the cache folder, which the kernel releases when the process ends. It only
avoids duplicate work: without file locks (Windows, a read-only folder, some network file systems) each process builds
its own entry.

A process that holds a claim never waits for another one, so processes cannot deadlock. A waiting process builds the
entry itself when the holder's heartbeat stops for `HEARTBEAT_TIMEOUT_S`, after `WAIT_LIMIT_S`, or when the holder
releases its claim without an entry (some entries are not stored). After that it does not wait for any claim.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path

from max._host.private_folder import make_private

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["CLAIMS_FOLDER", "Claim", "claim_entry"]

CLAIMS_FOLDER = "claims"
"""The subfolder of the cache folder for lock files; a file outlives its claim only if the holder was killed."""
POLL_S = 0.02
"""Seconds between two checks of a claim."""
HEARTBEAT_TIMEOUT_S = 10.0
"""Seconds without a heartbeat after which a waiting process builds the entry itself."""
WAIT_LIMIT_S = 60.0
"""The maximum wait in seconds."""


class _Process:
    """The number of claims that this process holds, and whether it still waits for those of others."""

    def __init__(self) -> None:
        self.claims = 0
        self.is_patient = True


_process = _Process()


class Claim:
    """The outcome of an attempt to claim an entry.

    Args:
        file: The descriptor of the locked file; None: this process does not hold the claim.
        is_made: Whether another process has built the entry.
    """

    def __init__(self, file: int | None, is_made: bool = False) -> None:
        self._file = file
        self.is_made = is_made
        """Whether another process has built the entry; otherwise the caller builds it."""

    @property
    def is_awaited(self) -> bool:
        """Whether another process waits for this claim."""
        try:
            return self._file is not None and os.fstat(self._file).st_size > 0
        except OSError:
            return False

    def heartbeat(self, *_: object) -> None:
        """Signals waiting processes that the holder makes progress."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.utime(self._file)


@contextlib.contextmanager
def claim_entry(
    folder: Path,
    name: str,
    is_made: Callable[[], bool],
    on_wait: Callable[[], object] = lambda: None,
) -> Generator[Claim]:
    """Claims a missing entry for the duration of a ``with`` block, or waits until another process has built it.

    Args:
        folder: The cache folder.
        name: A file name that identifies the entry.
        is_made: Returns whether the entry exists.
        on_wait: Called before a wait.
    """
    path = folder / CLAIMS_FOLDER / name
    # a waiting thread may hold a resource that the claim's holder needs
    file = None if _process.claims else _open(path, folder)
    if file is None:
        yield Claim(None)
        return
    try:
        is_ours = _is_ours(file, is_made, on_wait)
        if is_ours and not is_made():
            _process.claims += 1
            try:
                yield Claim(file)
            finally:
                _process.claims -= 1
                _end(file, path)
            return
        if is_ours:
            _end(file, path)
        yield Claim(None, is_made())
    finally:
        os.close(file)


def _open(path: Path, folder: Path) -> int | None:
    """Opens a claim's lock file; None if it cannot be created."""
    if fcntl is None:
        return None
    try:
        make_private(path.parent, folder)
        # a symbolic link could point to a file that another program locks
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None


def _is_ours(file: int, is_made: Callable[[], bool], on_wait: Callable[[], object]) -> bool:
    """Takes the claim, waiting for its holder if necessary; returns whether this process now holds it."""
    try:
        if _lock(file):
            return True
        if not _process.is_patient:
            return False
        on_wait()
        return _wait(file, is_made)
    except OSError:  # the file system has no locks, or is gone
        return False


def _lock(file: int) -> bool:
    """Tries to lock a file; returns whether it succeeded.

    Raises:
        OSError: The file system has no locks.
    """
    assert fcntl is not None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(file: int, is_made: Callable[[], bool]) -> bool:
    """Waits until a claim is released or its entry exists; returns whether this process now holds the claim."""
    begin = last_heartbeat = time.monotonic()
    # a size of 1 tells the holder that a process waits
    os.ftruncate(file, 1)
    heartbeat = os.fstat(file).st_mtime_ns
    while not is_made():
        time.sleep(POLL_S)
        is_ours, stat, now = _lock(file), os.fstat(file), time.monotonic()
        if stat.st_mtime_ns != heartbeat:
            heartbeat, last_heartbeat = stat.st_mtime_ns, now
        # a holder unlinks the file on release, but not if it is killed
        if stat.st_nlink == 0:
            break
        if is_ours:
            return True
        if now - last_heartbeat > HEARTBEAT_TIMEOUT_S or now - begin > WAIT_LIMIT_S:
            break
    _process.is_patient = is_made()
    return False


def _end(file: int, path: Path) -> None:
    """Releases a claim."""
    assert fcntl is not None
    with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(OSError):
        # a forked child may hold a copy of the descriptor
        fcntl.flock(file, fcntl.LOCK_UN)
