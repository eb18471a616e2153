"""Claims of what processes that start at the same time would each make for themselves: one makes it, the others wait.

A claim is the lock of a file, which the system frees with its process, however that ends. It decides only who
makes an entry of the cache: where there are no locks (Windows, a folder that cannot be written, a network file system
without them) each process makes its own.

A process that has a claim waits for no other one, so that no two wait for each other. One that waits goes on alone when
the holder has told no step for `SILENCE_S`, after `MOST_S`, or when the holder ends its claim and the entry is not
there, as some are not kept. From then on it waits for none.
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
"""The folder of the files in the cache folder; a file is there while its claim is, or if its process was killed."""
LOOK_S = 0.02
"""Seconds between two looks at a claim."""
SILENCE_S = 10.0
"""Seconds without a step: on a machine that is so busy, the same step would take the process that waits as long."""
MOST_S = 60.0
"""The longest wait in seconds."""


class _Process:
    """What this process has claimed, and whether it waits for others."""

    def __init__(self) -> None:
        self.claims = 0
        self.is_patient = True


_process = _Process()


class Claim:
    """A claim, or that there is none to be had.

    Args:
        file: The descriptor of the locked file; None: this process has not claimed the entry.
        is_made: Whether another process has made the entry.
    """

    def __init__(self, file: int | None, is_made: bool = False) -> None:
        self._file = file
        self.is_made = is_made
        """Whether another process has made the entry meanwhile; else it is for this one to make."""

    @property
    def is_awaited(self) -> bool:
        """Whether another process has begun to wait for this one."""
        try:
            return self._file is not None and os.fstat(self._file).st_size > 0
        except OSError:
            return False

    def tell_step(self, *_: object) -> None:
        """Tells those who wait that the work goes on."""
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
    """Claims an entry that is absent for the time of a block, or waits until another process has made it.

    Args:
        folder: The cache folder.
        name: A plain file name that stands for the entry.
        is_made: Returns whether the entry is there.
        on_wait: Is called before a wait.
    """
    path = folder / CLAIMS_FOLDER / name
    # a thread that waited might have what the one that holds a claim needs
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
    """The descriptor of a claim's file; None where it cannot be made."""
    if fcntl is None:
        return None
    try:
        make_private(path.parent, folder)
        # no link: it could name a file whose lock another program waits for
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None


def _is_ours(file: int, is_made: Callable[[], bool], on_wait: Callable[[], object]) -> bool:
    """Whether this process has a claim from now on; waits for the one that has it."""
    try:
        if _lock(file):
            return True
        if not _process.is_patient:
            return False
        on_wait()
        return _wait(file, is_made)
    except OSError:  # a file system without locks, or one that is lost
        return False


def _lock(file: int) -> bool:
    """Takes a claim; returns whether no other process has it.

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
    """Waits for the end of a claim, or for its entry; returns whether this process has the claim now."""
    begin = heard = time.monotonic()
    # the size says that somebody waits
    os.ftruncate(file, 1)
    step = os.fstat(file).st_mtime_ns
    while not is_made():
        time.sleep(LOOK_S)
        is_ours, stat, now = _lock(file), os.fstat(file), time.monotonic()
        if stat.st_mtime_ns != step:
            step, heard = stat.st_mtime_ns, now
        # a holder removes the file at its end, but not if it is killed
        if stat.st_nlink == 0:
            break
        if is_ours:
            return True
        if now - heard > SILENCE_S or now - begin > MOST_S:
            break
    _process.is_patient = is_made()
    return False


def _end(file: int, path: Path) -> None:
    """Ends a claim."""
    assert fcntl is not None
    with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(OSError):
        # a child of a fork may have the descriptor, too
        fcntl.flock(file, fcntl.LOCK_UN)
