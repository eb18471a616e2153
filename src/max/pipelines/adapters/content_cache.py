"""An LRU cache of the packed contents of adapters that have no slot, in an unnamed temporary file.

It avoids reading, validating and packing an adapter again. Only this process can open the file, and the kernel frees it
when the process ends. Its pages are in the page cache, which the kernel reclaims under memory pressure.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import BinaryIO

from max._dataclass import dataclass
from max._host.cache_folders import cache_dir

__all__ = ["ContentCache"]

_AT_ONCE = 512
"""The maximum number of buffers per system call; systems support at least 1024."""


@dataclass(frozen=True)
class _Span:
    """The byte range of an entry in the file."""

    begin: int
    end: int


class ContentCache:
    """A thread-safe cache keyed by digest; it evicts the least recently used entries.

    Entries that cannot be written, for example on a full disk or on Windows (no ``pwritev``), are not stored.

    Args:
        limit: The maximum total size in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        # least recently used first
        self._spans: OrderedDict[str, _Span] = OrderedDict()

    def has(self, digest: str) -> bool:
        """Whether an entry is stored; if so, the kernel starts to read it ahead."""
        with self._lock:
            span = self._spans.get(digest)
            if span is None or self._file is None:
                return False
            # not all systems have it
            if hasattr(os, "posix_fadvise"):
                size = span.end - span.begin
                os.posix_fadvise(self._file.fileno(), span.begin, size, os.POSIX_FADV_WILLNEED)
            return True

    def keep(self, digest: str, pieces: Sequence[memoryview]) -> None:
        """Stores an entry, unless it exists.

        Args:
            digest: Its digest.
            pieces: Its bytes.
        """
        if not hasattr(os, "pwritev"):
            return
        size = sum(piece.nbytes for piece in pieces)
        with self._lock:
            if digest in self._spans:
                self._spans.move_to_end(digest)
                return
            begin = self._room(size)
            if begin is None:
                return
            try:
                if self._file is None:
                    folder = cache_dir()
                    folder.mkdir(parents=True, exist_ok=True)
                    self._file = tempfile.TemporaryFile(dir=folder)
                    weakref.finalize(self, self._file.close)
                if not _moved(os.pwritev, self._file.fileno(), pieces, begin):
                    return
            except OSError:
                return
            self._spans[digest] = _Span(begin, begin + size)

    def restore(self, digest: str, pieces: Sequence[memoryview]) -> bool:
        """Reads an entry into buffers; returns whether it succeeded. On failure the buffers are undefined.

        Args:
            digest: Its digest.
            pieces: Buffers of the total size that was stored.
        """
        with self._lock:
            span = self._spans.get(digest)
            if span is None or self._file is None:
                return False
            self._spans.move_to_end(digest)
            try:
                if _moved(os.preadv, self._file.fileno(), pieces, span.begin):
                    return True
            except OSError:
                pass
            del self._spans[digest]
            return False

    def forget(self, digest: str) -> None:
        """Removes an entry, if it exists."""
        with self._lock:
            self._spans.pop(digest, None)

    def _room(self, size: int) -> int | None:
        """The offset of `size` free bytes, evicting entries if necessary; None if `size` exceeds the limit."""
        if size > self._limit:
            return None
        while True:
            last = 0
            for span in sorted(self._spans.values(), key=lambda span: span.begin):
                if span.begin - last >= size:
                    return last
                last = span.end
            if last + size <= self._limit:
                return last
            self._spans.popitem(last=False)


def _moved(
    move: Callable[[int, Sequence[memoryview], int], int],
    file: int,
    pieces: Sequence[memoryview],
    at: int,
) -> bool:
    """Reads or writes buffers at an offset of a file; returns whether all bytes were transferred."""
    for first in range(0, len(pieces), _AT_ONCE):
        part = pieces[first : first + _AT_ONCE]
        size = sum(piece.nbytes for piece in part)
        if move(file, part, at) != size:
            return False
        at += size
    return True
