"""A file to which a running engine appends cached pages, so that a killed engine loses only what it was about to write.

Format: a magic line, the length and digest of the header, the header as JSON (key, bytes of a page of each group), then
a record for each page: its group, whose highest bit marks the first record of a batch, its digest, the length of its
hash, the hash, and the content. Each record is written by one call: the last one may be cut off, and is ignored then.
The first pages of sequences come first in a batch: those behind a cut are of no use without them. The engine that
writes holds a lock on the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from max._dataclass import dataclass
from max.pipelines.kv_cache.prefix_file import PageGroup

try:
    import fcntl
except ImportError:  # Windows: engines do not share a folder there
    fcntl = None

__all__ = ["Journal", "JournalRecord", "is_in_use", "is_journal", "pages_in_order", "read_journal"]

_MAGIC = b"max prefix journal 2\n"
_LENGTH = struct.Struct("<Q")
_RECORD = struct.Struct("<I16sH")
"""Group and mark, digest, length of the hash."""
_FIRST = 1 << 31
"""The mark of the first record of a batch."""
_DIGEST_BYTES = 16
_MOST_HEADER_BYTES = 1 << 16
_MOST_HASH_BYTES = 256


@dataclass(frozen=True)
class JournalRecord:
    """A page of a journal, or damage.

    Args:
        group: The group of layers.
        hash: The hash of its tokens; empty if the record is damaged.
        content: Its bytes.
        begin: The place of the record in the file.
        end: The place behind it; `sys.maxsize` if damage hides where the next one begins.
        is_first: Whether it is the first one of a batch.
    """

    group: int
    hash: bytes
    content: bytes
    begin: int
    end: int
    is_first: bool = False


class Journal:
    """The file that this engine writes.

    Args:
        path: The file, which must not exist; its folder is created if needed.
        key: Identifies everything besides tokens on which pages depend.
        page_bytes: The bytes of a page of each group.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: Path, key: str, page_bytes: Sequence[int]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # mode 600, as the contents depend on prompts
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_BINARY", 0)
        self._file = os.open(path, flags, 0o600)
        if fcntl is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        text = json.dumps({"key": key, "page_bytes": list(page_bytes)}).encode()
        self._write(_MAGIC + _LENGTH.pack(len(text)) + _digest(text) + text)

    @property
    def is_removed(self) -> bool:
        """Whether the file was deleted meanwhile."""
        return os.fstat(self._file).st_nlink == 0

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return os.fstat(self._file).st_size

    def append(self, group: int, page_hash: bytes, content: bytes, is_first: bool = False) -> None:
        """Appends a page.

        Args:
            group: The group of layers.
            page_hash: The hash of its tokens.
            content: Its bytes.
            is_first: Whether a batch begins with it.

        Raises:
            OSError: The file cannot be written.
        """
        mark = group | _FIRST if is_first else group
        digest = _record_digest(mark, page_hash, content)
        self._write(_RECORD.pack(mark, digest, len(page_hash)) + page_hash + content)

    def close(self) -> None:
        """Releases the file."""
        os.close(self._file)

    def _write(self, record: bytes) -> None:
        size = self.num_bytes
        try:
            written = os.write(self._file, record)
            while written < len(record):
                written += os.write(self._file, record[written:])
        except OSError:
            # a record that is cut off would hide those behind it
            os.ftruncate(self._file, size)
            raise


def pages_in_order(groups: Sequence[PageGroup]) -> Iterator[tuple[int, int]]:
    """The pages of a batch in the order of a journal, as numbers of groups and places in them.

    The pages that were used last come first, the first ones of a sequence before its later ones, and pages of the same
    tokens side by side: whatever is written before a cut serves a request.

    Args:
        groups: The pages of each group, the most recently used last.
    """
    places = [{page_hash: at for at, page_hash in enumerate(each.hashes)} for each in groups]
    # the groups of layers with a window have few pages of a sequence, in no order that says which ones are its first
    by_size = sorted(groups, key=lambda group: len(group.hashes), reverse=True)
    for page_hash in dict.fromkeys(h for group in by_size for h in reversed(group.hashes)):
        for number, of_group in enumerate(places):
            if page_hash in of_group:
                yield number, of_group[page_hash]


def journal_path(folder: Path, key: str, suffix: str) -> Path:
    """The path of a new journal; journals are sorted by their time of creation."""
    return folder / f"{key}.{time.time_ns()}-{os.getpid()}{suffix}"


def is_journal(path: Path) -> bool:
    """Whether a file is a journal, by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def is_in_use(path: Path) -> bool:
    """Whether a running engine writes a journal."""
    if fcntl is None:
        return False
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # it is gone
    return False


def read_journal(
    path: Path, key: str, page_bytes: Sequence[int], begin: int = 0
) -> Iterator[JournalRecord]:
    """Yields the records of a journal, damaged ones without a hash, up to one that is cut off; none if it is absent.

    Args:
        path: The file, which an engine may be writing.
        key: The key; a file with another one is damaged.
        page_bytes: The bytes of a page of each group.
        begin: The end of the last record that was read; 0: all records are read.
    """
    try:
        with path.open("rb") as file:
            if not _has_header(file, key, page_bytes):
                yield _unreadable(0)
                return
            if begin:
                file.seek(begin)
            while (record := _next_record(file, page_bytes)) is not None:
                yield record
                if record.end == sys.maxsize:
                    return
    except OSError:
        return


def _has_header(file: BinaryIO, key: str, page_bytes: Sequence[int]) -> bool:
    if file.read(len(_MAGIC)) != _MAGIC:
        return False
    # padded: a file that ends here fails by its digest
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size).ljust(_LENGTH.size, b"\0"))
    digest = file.read(_DIGEST_BYTES)
    text = file.read(length) if length <= _MOST_HEADER_BYTES else b""
    if _digest(text) != digest:
        return False
    return json.loads(text) == {"key": key, "page_bytes": list(page_bytes)}


def _next_record(file: BinaryIO, page_bytes: Sequence[int]) -> JournalRecord | None:
    """The next record; None at the end, and at one that is cut off."""
    begin = file.tell()
    head = file.read(_RECORD.size)
    if len(head) < _RECORD.size:
        return None
    mark, digest, length = _RECORD.unpack(head)
    group = mark & ~_FIRST
    if group >= len(page_bytes) or not 0 < length <= _MOST_HASH_BYTES:
        return _unreadable(begin)
    page_hash, content = file.read(length), file.read(page_bytes[group])
    if len(content) < page_bytes[group]:
        return None
    if _record_digest(mark, page_hash, content) != digest:
        page_hash = content = b""
    return JournalRecord(group, page_hash, content, begin, file.tell(), mark != group)


def _unreadable(begin: int) -> JournalRecord:
    """Damage from a place on."""
    return JournalRecord(0, b"", b"", begin, sys.maxsize)


def _record_digest(mark: int, page_hash: bytes, content: bytes) -> bytes:
    digest = hashlib.blake2b(_LENGTH.pack(mark) + page_hash, digest_size=_DIGEST_BYTES)
    digest.update(content)
    return digest.digest()


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
