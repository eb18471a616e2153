"""The disk cache: blobs by content hash, shared by all processes of the user.

An entry is a file ``<cache folder>/<kind>/<two digits>/<key>``: a header with a checksum, then the payload. `put`
writes a temporary file and renames it, so a reader never reads a partial entry. An invalid entry (damaged, truncated,
written in another version of the format) counts as absent, and the next `put` replaces it. A folder that cannot be
written is not an error: the process logs one warning and works without the cache.

Entries that are missing locally are fetched from the caches of other machines, if `Cache.remote` is set, and stored as
by `put`. Keys do not depend on the machine, only on the target processor.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from max._config import flags
from max._dataclass import dataclass
from max._host.cache_folders import QUANTIZED_FOLDER, cache_dir, remove_left_behind
from max._host.private_folder import is_private, make_private
from max._host.process_caches import cached_results, process_cache
from max._host.reentry import reentrant_lock

logger = logging.getLogger("max.runtime")

_MAGIC = b"SUPREMUM"
_FORMAT = 1
_HEADER = struct.Struct("<8sII Q 16s")  # magic, format, length of the key, of the payload, checksum
WEIGHTS_FOLDER = "weights"
"""The folder of packed weights in the cache folder; see `max.engine.load.packed_weights`."""
SHARED_KINDS = ("object", "program", "recipe")
"""The kinds of entries that machines share; measurements and checks are valid for one machine only."""
_SOURCES = "sources"
"""The kind of entries with hashes of source files, keyed by their sizes and modification times."""
_TOUCH_SECONDS = 3600.0  # a hit updates an entry's modification time at most once an hour
_STALE_TEMPORARY_SECONDS = (
    3600.0  # older temporary files are of processes that ended while they wrote
)


def content_key(*parts: str | bytes) -> str:
    """A key for `Cache`: the hash of the parts and their boundaries."""
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        # lengths keep parts apart: "ab", "c" is not "a", "bc"
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.hexdigest()


@cached_results()
def source_fingerprint(package: str) -> str:
    """A hash of the contents of a package's source files, equal on all machines with the same sources.

    Keys of code that a package generates include it, so that a changed code generator misses old entries. The files are
    read once; later calls find the hash in the disk cache by the files' names, sizes and modification times.

    Args:
        package: A folder below ``max``, such as ``"kernel"``.
    """
    root = str(Path(__file__).parents[1])
    # generated code depends on the layouts in _abi.py
    files = [os.path.join(root, "_abi.py"), *sorted(_sources(os.path.join(root, package)))]
    seen = hashlib.blake2b(digest_size=20)
    for path in files:
        stat = os.stat(path)
        seen.update(f"{path}:{stat.st_size}:{stat.st_mtime_ns};".encode())
    key = seen.hexdigest()
    if (known := default_cache().get(_SOURCES, key)) is not None:
        return known.decode()
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        content = Path(path).read_bytes()
        digest.update(f"{path[len(root) :]}:{len(content)};".encode() + content)
    default_cache().put(_SOURCES, key, digest.hexdigest().encode())
    return digest.hexdigest()


def _sources(folder: str) -> Iterator[str]:
    """The Python files below a folder; a third of the time of `Path.rglob`."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                yield entry.path
            elif entry.name != "__pycache__" and entry.is_dir(follow_symlinks=False):
                yield from _sources(entry.path)


def _checksum(key: bytes, payload: bytes) -> bytes:
    digest = hashlib.blake2b(key, digest_size=16)
    digest.update(payload)
    return digest.digest()


@dataclass
class CacheStats:
    """Counts of one cache since it was opened: entries read that were damaged, written, and evicted.

    ``num_made`` counts new entries of `SHARED_KINDS`, which were compiled here. ``num_fetched`` counts entries fetched
    from remote caches, including packed weights, and ``fetched_bytes`` their sizes. ``num_packed`` counts models whose
    weights were packed because no copy existed.
    """

    num_damaged: int = 0
    num_written: int = 0
    num_evicted: int = 0
    num_made: int = 0
    num_fetched: int = 0
    fetched_bytes: int = 0
    num_packed: int = 0


class RemoteCache(Protocol):
    """The caches of other machines. Its methods raise nothing and take a bounded time."""

    def entry(self, kind: str, key: str) -> bytes | None:
        """Fetches the file of an entry; None if no machine has it.

        Args:
            kind: One of `SHARED_KINDS`.
            key: The key.
        """
        ...

    def weights(self, key: str, num_bytes: int, file: int) -> bool:
        """Fetches packed weights into a file; returns whether they are complete.

        Args:
            key: Their key.
            num_bytes: Their size.
            file: The descriptor of the file, written from offset 0.
        """
        ...


class Cache:
    """Blobs on disk by kind and key.

    Args:
        folder: The folder of the entries; created with the first entry.
        limit_bytes: The largest total size; beyond it the least recently used entries are evicted.
    """

    def __init__(self, folder: Path, limit_bytes: int = 4 << 30) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.stats = CacheStats()
        self.remote: RemoteCache | None = None
        """The source of entries that are missing locally; None: none."""
        self._warned = False
        self._lock = reentrant_lock()
        # unknown until the folder is first scanned
        self._estimated_bytes: int | None = None

    def path(self, kind: str, key: str) -> Path:
        """The file of an entry.

        Raises:
            ValueError: The kind or key is not a plain file name.
        """
        for word in (kind, key):
            if (
                not word
                or len(word) > 120
                or not all(c.isalnum() or c in "._-" for c in word)
                or word[0] == "."
            ):
                raise ValueError(
                    f"cache: {word!r} is no name of an entry; "
                    "letters, digits, '_', '-' and '.' would fit"
                )
        return self.folder / kind / key[:2] / key

    def get(self, kind: str, key: str) -> bytes | None:
        """The payload, or None if there is no valid entry, local or remote."""
        data = self.file(kind, key)
        if data is not None:
            payload = self._payload(f"{kind}/{key}".encode(), data)
            if payload is not None:
                return payload
            self.stats.num_damaged += 1
            logger.debug("cache: entry %s/%s is damaged or foreign, ignored", kind, key)
        return self._fetch(kind, key)

    def file(self, kind: str, key: str) -> bytes | None:
        """The file of a local entry, valid or not; None if it is absent or another user could have written it."""
        path = self.path(kind, key)
        try:
            with open(path, "rb") as file:
                stat = os.fstat(file.fileno())
                # entries become code of this process: only this user may have written them
                if not is_private(stat):
                    logger.debug("cache: other users may have written %s, ignored", path)
                    return None
                data = file.read()
        except OSError:
            return None
        if time.time() - stat.st_mtime > _TOUCH_SECONDS:
            with contextlib.suppress(OSError):
                os.utime(path)
        return data

    def has(self, kind: str, key: str) -> bool:
        """Whether there is an entry, valid or not; a remote one is fetched."""
        return self.path(kind, key).exists() or self._fetch(kind, key) is not None

    def _fetch(self, kind: str, key: str) -> bytes | None:
        """Fetches an entry from the remote cache and stores it; returns its payload."""
        if self.remote is None or kind not in SHARED_KINDS:
            return None
        data = self.remote.entry(kind, key)
        if data is None:
            return None
        payload = self._payload(f"{kind}/{key}".encode(), data)
        if payload is None:
            self.stats.num_damaged += 1
            logger.debug("cache: entry %s/%s is damaged remotely, ignored", kind, key)
            return None
        self._write(kind, key, [data])
        self.stats.num_fetched += 1
        self.stats.fetched_bytes += len(data)
        return payload

    @staticmethod
    def _payload(name: bytes, data: bytes) -> bytes | None:
        """The payload of an entry's file; None if the file is not a valid entry of that name."""
        if len(data) < _HEADER.size:
            return None
        magic, version, name_length, length, checksum = _HEADER.unpack_from(data)
        if (
            magic != _MAGIC
            or version != _FORMAT
            or len(data) != _HEADER.size + name_length + length
        ):
            return None
        start = _HEADER.size + name_length
        payload = data[start:]
        # the name too: a file that was renamed is no entry
        if data[_HEADER.size : start] != name or _checksum(name[-64:], payload) != checksum:
            return None
        return payload

    def put(self, kind: str, key: str, payload: bytes) -> bool:
        """Writes an entry, or replaces it; returns whether that succeeded."""
        name = f"{kind}/{key}".encode()
        header = _HEADER.pack(
            _MAGIC, _FORMAT, len(name), len(payload), _checksum(name[-64:], payload)
        )
        is_written = self._write(kind, key, [header + name, payload])
        self.stats.num_written += is_written
        self.stats.num_made += kind in SHARED_KINDS
        return is_written

    def _write(self, kind: str, key: str, parts: Sequence[bytes]) -> bool:
        """Writes the file of an entry; returns whether that succeeded."""
        path = self.path(kind, key)
        # two writers of one key have temporary files of their own
        temporary = path.with_name(f".{key[:40]}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            make_private(path.parent, self.folder)
            with open(temporary, "wb", opener=_own_file) as file:
                for part in parts:
                    file.write(part)
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._warn(error)
            return False
        self._account(sum(map(len, parts)))
        return True

    def _warn(self, error: OSError) -> None:
        """Logs once that the folder cannot be written."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "the cache folder %s cannot be written (%s): code is compiled anew in each "
                "process; MAX_CACHE_DIR names another folder",
                self.folder,
                error.strerror or error,
            )

    def _account(self, num_bytes: int) -> None:
        """Updates the estimated total size, and evicts entries when it exceeds the limit."""
        with self._lock:
            if self._estimated_bytes is None:
                self._estimated_bytes = sum(size for _, size, _ in self._entries())
            else:
                self._estimated_bytes += num_bytes
            if self._estimated_bytes > self.limit_bytes:
                self._estimated_bytes = self._evict()

    def _entries(self) -> list[tuple[float, int, str]]:
        """The time of the last use, size and path of each file."""
        entries: list[tuple[float, int, str]] = []
        for folder, inner, names in os.walk(self.folder):
            if WEIGHTS_FOLDER in inner:
                inner.remove(WEIGHTS_FOLDER)  # packed weights have a separate limit
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    stat = os.stat(path)
                    entries.append((stat.st_mtime, stat.st_size, path))
        return entries

    def _evict(self) -> int:
        """Removes the least recently used entries until the total is at most 90 % of the limit; returns the total."""
        entries = sorted(self._entries())
        total, now = sum(size for _, size, _ in entries), time.time()
        for used, size, path in entries:
            temporary = path.endswith(".tmp")
            if total <= self.limit_bytes * 9 // 10 and not temporary:
                continue
            if temporary and now - used < _STALE_TEMPORARY_SECONDS:
                continue
            with contextlib.suppress(OSError):
                os.unlink(path)
                total -= size
                self.stats.num_evicted += 1
        return total


def _own_file(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


_open: dict[Path, Cache] = process_cache({})


def default_cache() -> Cache:
    """The cache in ``MAX_CACHE_DIR``, or in the user's cache folder; one object per folder."""
    folder = cache_dir()
    if folder not in _open:
        _open[folder] = Cache(folder, flags.MAX_CACHE_SIZE << 20)
        # a process that is killed while it packs leaves a file as large as the model
        freed = remove_left_behind([folder / WEIGHTS_FOLDER, folder / QUANTIZED_FOLDER])
        if freed:
            logger.info("%d bytes that killed processes left in %s are deleted", freed, folder)
    return _open[folder]
