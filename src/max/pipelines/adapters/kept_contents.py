"""The contents of adapters that are in no slot, in a file without a name: what was read and checked is not read again.

Only this process reaches the file, and the system frees it when the process ends, however it ends. Its pages are in
the system's cache of files, which gives them up when others need memory.
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

__all__ = ["KeptContents"]

_AT_ONCE = 512
"""The most pieces of a system call; systems take at least 1024."""


@dataclass(frozen=True)
class _Span:
    """Where contents are in the file."""

    begin: int
    end: int


class KeptContents:
    """Contents by their digests, up to some bytes: those that were used least recently go first. It is thread-safe.

    What cannot be written, as on a full disk or where the system writes no pieces (Windows), is not kept.

    Args:
        limit: The most bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        # the least recently used ones first
        self._spans: OrderedDict[str, _Span] = OrderedDict()

    def has(self, digest: str) -> bool:
        """Whether contents are kept; then the system is asked to have them in memory."""
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
        """Writes contents, unless they are there.

        Args:
            digest: Their digest.
            pieces: Their bytes.
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
        """Reads contents into memory; gives whether they are there, else the memory may have a part of them.

        Args:
            digest: Their digest.
            pieces: Memory for as many bytes as were kept.
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
        """Gives up contents, if they are kept."""
        with self._lock:
            self._spans.pop(digest, None)

    def _room(self, size: int) -> int | None:
        """The begin of a gap of `size` bytes; gives up others for it. None: there cannot be one."""
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
    """Moves pieces from or to a place of a file; gives whether all bytes were."""
    for first in range(0, len(pieces), _AT_ONCE):
        part = pieces[first : first + _AT_ONCE]
        size = sum(piece.nbytes for piece in part)
        if move(file, part, at) != size:
            return False
        at += size
    return True
