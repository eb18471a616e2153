"""Cores of a machine for engines that do not know of each other: a locked file stands for each core."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from max._host.machine import logical_cpus


class ClaimedCores:
    """Cores that no other holder on this machine has; they are free again when the process ends.

    Args:
        count: The number of cores; 0: none are claimed.
        folder: The folder of the locks; None: one of this user.
    """

    def __init__(self, count: int, folder: Path | None = None) -> None:
        self.cores: tuple[int, ...] = ()
        """The cores; empty: fewer are free, so that the engine shares all of them."""
        self._files: list[int] = []
        if not count:
            return
        folder = folder or Path(tempfile.gettempdir()) / f"supremum-cores-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            return  # another user's: what it locks is not to be trusted
        cores: list[int] = []
        for core in sorted(logical_cpus()):
            if len(cores) == count:
                break
            # no link: it could name a file whose lock another program waits for
            file = os.open(folder / str(core), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
                continue
            self._files.append(file)
            cores.append(core)
        if len(cores) == count:
            self.cores = tuple(cores)
        else:
            self.release()

    def release(self) -> None:
        """Gives the cores back."""
        # the end of a file is the end of its lock
        for file in self._files:
            os.close(file)
        self._files.clear()
