"""Packed weights on disk: the results of load-time computations are written to a file, which later loads map.

Packing 538 MB takes longer than the rest of a start, mostly because the system clears as many bytes of fresh memory. A
mapped file needs no such memory, and all processes share it.

A copy is valid for one program, for weight files of one inode, size, modification and change time, and until the
machine restarts: the file is not flushed and its bytes are not checked, so after a restart it is written again. Copies
exist on Linux only, for models whose weights are all mapped from files.

Processes that load the same model at the same time pack it once: one claims the copy (`max._host.claims`) and writes it
immediately, the others wait and map the file. All of them share one copy in memory.

The key does not depend on the machine: where several machines read the same weight files, a machine without a copy
fetches it from another one (`max._host.disk_cache.RemoteCache`).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import mmap
import os
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from max._backends.backend import HOST
from max._compiler.program.code import Compiled
from max._config import flags
from max._host import host_memory, machine
from max._host.cache_folders import cache_dir
from max._host.claims import Claim, claim_entry
from max._host.disk_cache import WEIGHTS_FOLDER, content_key, default_cache
from max._host.reentry import reentrant_lock
from max._host.threads import DaemonThread
from max._lazy import lazy_module
from max._load_steps import STEPS
from max.driver import Tensor
from max.engine.load.load_time_results import inputs_of

if TYPE_CHECKING:
    from max.graph import weights as weight_files
else:
    # the graph layer is imported by callers that stage graphs
    weight_files = lazy_module("max.graph.weights")

__all__ = ["PackedCopy", "open_copy", "write_now"]

logger = logging.getLogger("max.engine")

Array = np.ndarray[Any, np.dtype[Any]]

LEAST_BYTES = 32 << 20
"""The least size of a copy: packing less takes little time."""
MOST_HASHED = 16 << 20
"""The most bytes of a packed constant whose contents are part of the key; others lie in a mapped file."""
LEAST_IN_FILE = 1 << 12
"""The least bytes of a constant that is looked for in mapped files: the contents of fewer take less time."""
WAIT_SECONDS = 10.0
"""The delay between a load and the writing of its copy; copies still waiting are written when the process ends."""
EXIT_SECONDS = 30.0
"""The longest time that the end of a process takes to write copies; those not written by then are dropped."""
WAITS = "waiting for another process, which packs the weights"
"""The load step that is shown while another process packs."""
CHUNK = 64 << 20
"""The bytes that are written between two looks at the deadline."""
_MAGIC = b"SUPREMUM PACKED 2 "


class PackedCopy:
    """The packed copy of one model.

    Args:
        path: Its file.
        num_bytes: The size of the packed weights.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path = path
        self._num_bytes = num_bytes

    @classmethod
    def of(
        cls,
        program: str | None,
        compiled: Compiled,
        num_bytes: int,
        weights: Mapping[str, Tensor | weight_files.LaterCast],
        constants: Mapping[int, Array],
    ) -> PackedCopy | None:
        """The copy of a model; None if it is not to be kept.

        Args:
            program: The program's key on the disk.
            compiled: The program.
            num_bytes: The size of the results that it computes once.
            weights: The values of its weights.
            constants: Its constants.
        """
        limit = flags.MAX_WEIGHT_CACHE_SIZE << 20
        if program is None or compiled.guarded or not LEAST_BYTES <= num_bytes <= limit:
            return None
        if len(compiled.once) != 1 or compiled.once[0].device != HOST:
            return None
        sources = _sources(compiled, weights, constants)
        if sources is None or machine.boot_id() is None:
            return None
        key = content_key(program, str(num_bytes), *sources)
        return cls(cache_dir() / WEIGHTS_FOLDER / key, num_bytes)

    def map_file(self) -> Array | None:
        """Maps the packed weights, read-only; None if neither this nor a remote machine has them."""
        file = self._open()
        if file is None and self._fetch():
            file = self._open()
        if file is None:
            return None
        with file:
            data = mmap.mmap(file.fileno(), self._num_bytes, access=mmap.ACCESS_READ)
        # the system reads the file ahead
        data.madvise(mmap.MADV_WILLNEED)
        return np.frombuffer(data, np.uint8)

    def claim(self) -> AbstractContextManager[Claim]:
        """Claims the copy, or waits until another process has written it; no claim if the disk has no room for it."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not _has_room(self._path.parent, self._num_bytes):
                return contextlib.nullcontext(Claim(None))
        except OSError:
            return contextlib.nullcontext(Claim(None))
        key = self._path.name
        return claim_entry(cache_dir(), key, self._is_there, lambda: STEPS.at(WAITS))

    def _is_there(self) -> bool:
        if (file := self._open()) is None:
            return False
        file.close()
        return True

    def _open(self) -> BufferedReader | None:
        if (found := open_copy(self._path)) is None:
            return None
        file, num_bytes = found
        if num_bytes == self._num_bytes:
            return file
        file.close()
        return None

    def _fetch(self) -> bool:
        """Fetches the copy from a remote cache; returns whether it succeeded."""
        cache = default_cache()
        remote = cache.remote
        if remote is None:
            return False
        STEPS.at("fetching packed weights")

        def fetch(file: BinaryIO) -> None:
            if not remote.weights(self._path.name, self._num_bytes, file.fileno()):
                raise OSError("no other machine has them")
            file.seek(self._num_bytes)

        if not self._make(fetch):
            return False
        cache.stats.num_fetched += 1
        cache.stats.fetched_bytes += self._num_bytes
        return True

    def keep(self, packed: Array, claim: Claim) -> None:
        """Writes the copy of weights that this process has packed: immediately if others wait for it, else later.

        Args:
            packed: The packed weights.
            claim: The claim from :meth:`claim`.
        """
        default_cache().stats.num_packed += 1
        if not claim.is_awaited:
            self.write_later(packed)
            return

        def is_expired() -> bool:
            claim.heartbeat()
            return False

        self.write(packed, is_expired)

    def write_later(self, packed: Array) -> None:
        """Writes the copy after `WAIT_SECONDS`, or when the process ends, unless the weights are freed before.

        Args:
            packed: The packed weights.
        """
        _writer.add(self, packed)

    def write(self, packed: Array, is_expired: Callable[[], bool] = lambda: False) -> bool:
        """Writes the copy; returns whether that succeeded.

        Args:
            packed: The packed weights.
            is_expired: Called before each part is written; returns whether to give up.
        """

        def write(file: BinaryIO) -> None:
            for start in range(0, self._num_bytes, CHUNK):
                if is_expired():
                    raise TimeoutError(f"{start} of {self._num_bytes} bytes in time")
                file.write(packed.data[start : min(start + CHUNK, self._num_bytes)])

        return self._make(write)

    def _make(self, write: Callable[[BinaryIO], None]) -> bool:
        """Creates the file of the copy atomically; returns whether that succeeded.

        Args:
            write: Writes the packed weights to a file.
        """
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._make_room():
                return False
            with open(temporary, "wb") as file:
                write(file)
                # last: a file without the footer is incomplete
                file.write(_footer(self._path.name))
            os.replace(temporary, self._path)
        except OSError as error:
            logger.debug("packed weights are not kept: %s", error)
            return False
        finally:
            # also if Ctrl-C interrupts the writing
            with contextlib.suppress(OSError):
                temporary.unlink()
        return True

    def _make_room(self) -> bool:
        """Removes the least recently used copies beyond the limit; returns whether the disk has room for this one."""
        folder = self._path.parent
        total, limit = self._num_bytes, flags.MAX_WEIGHT_CACHE_SIZE << 20
        entries = [(path, path.stat()) for path in folder.iterdir()]
        for path, stat in sorted(entries, key=lambda entry: -entry[1].st_mtime):
            total += stat.st_size
            if total > limit:
                path.unlink(missing_ok=True)
        return _has_room(folder, self._num_bytes)


def _has_room(folder: Path, num_bytes: int) -> bool:
    """Whether a file would take at most half of the free disk space.

    Raises:
        OSError: The free space is unknown.
    """
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize > 2 * num_bytes


def _footer(key: str) -> bytes:
    """The last bytes of a copy's file; they change with each boot of the machine."""
    return _MAGIC + f"{key} {machine.boot_id()}".encode()


def open_copy(path: Path) -> tuple[BufferedReader, int] | None:
    """Opens a complete copy; returns the file and the size of its packed weights, or None if there is none.

    Args:
        path: Its path.
    """
    footer = _footer(path.name)
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open(path, "rb"))
            size = os.fstat(file.fileno()).st_size - len(footer)
            if size < 0:
                return None
            file.seek(size)
            if file.read() != footer:
                return None
            os.utime(path)
            stack.pop_all()
            return file, size
    except OSError:
        return None


class _Writer:
    """Writes copies, on a timer or at exit."""

    def __init__(self) -> None:
        self._deadline = math.inf
        self._jobs: list[tuple[PackedCopy, weakref.ref[Array]]] = []
        self._lock = reentrant_lock()

    def add(self, copy: PackedCopy, packed: Array) -> None:
        """Schedules the writing of a copy: after `WAIT_SECONDS`, or at the end of the process."""
        with self._lock:
            if not self._jobs:
                atexit.register(self.at_exit)
            # weak: a copy that waits does not keep the weights alive
            self._jobs.append((copy, weakref.ref(packed)))
        with contextlib.suppress(RuntimeError):  # the system refused a thread: written at exit
            DaemonThread(self._run_later, name="max packing").start()

    def _run_later(self) -> None:
        time.sleep(WAIT_SECONDS)
        self.run()

    def run(self) -> None:
        """Writes all waiting copies; waits for a thread that is writing."""
        with self._lock:
            while self._jobs:
                copy, packed = self._jobs.pop()
                if (array := packed()) is not None:
                    copy.write(array, lambda: time.monotonic() > self._deadline)

    def at_exit(self) -> None:
        """Writes all waiting copies within `EXIT_SECONDS`, including the one that a thread is writing."""
        self._deadline = time.monotonic() + EXIT_SECONDS
        self.run()


_writer = _Writer()


def write_now() -> None:
    """Writes the waiting copies now."""
    _writer.run()


def _sources(
    compiled: Compiled,
    weights: Mapping[str, Tensor | weight_files.LaterCast],
    constants: Mapping[int, Array],
) -> list[str] | None:
    """The identities of all that is packed: weights by place in a file, constants too or by contents; None without a
    file.
    """
    files = host_memory.MappedFiles()
    parts: list[str] = []
    for index in sorted(inputs_of(compiled)):
        item = compiled.fixed_buffers[index]
        if item.kind == "constant":
            array = constants[index]
            known = None
            if array.flags.c_contiguous and array.nbytes > LEAST_IN_FILE:
                known = files.identity(array.ctypes.data, array.nbytes)
            if known is None:
                if array.nbytes > MOST_HASHED:
                    return None
                known = content_key(array.tobytes())
            parts.append(f"{index} {array.dtype} {known}")
        elif item.kind == "weight":
            value = weights[item.name]
            stored = value.source if isinstance(value, weight_files.LaterCast) else value
            size = stored.num_elements * stored.dtype.size_in_bytes
            file_identity = files.identity(stored._ptr, size)  # pyright: ignore[reportPrivateUsage]
            if file_identity is None:
                return None
            parts.append(f"{index} {stored.dtype.name} {file_identity}")
    return parts
