"""A file to which a running engine appends cached pages, so that a killed engine loses only what it was about to write.

Format: a magic line, the length and digest of the header, the header as JSON (key, bytes of a page of each group), then
a record for each page: its group, its digest, the length of its hash, the hash, and the content. Each record is written
by one call: the last one may be cut off, and is ignored then. The engine that writes holds a lock on the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from max._dataclass import dataclass

try:
    import fcntl
except ImportError:  # Windows: engines do not share a folder there
    fcntl = None

__all__ = ["Journal", "JournalPage", "is_in_use", "is_journal", "read_journal"]

_MAGIC = b"max prefix journal 1\n"
_LENGTH = struct.Struct("<Q")
_RECORD = struct.Struct("<I16sH")
"""Group, digest, length of the hash."""
_DIGEST_BYTES = 16
_MOST_HEADER_BYTES = 1 << 16
_MOST_HASH_BYTES = 256


@dataclass(frozen=True)
class JournalPage:
    """A page of a journal.

    Args:
        group: The group of layers.
        hash: The hash of its tokens.
        content: Its bytes.
        end: The place behind its record in the file.
    """

    group: int
    hash: bytes
    content: bytes
    end: int


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

    def append(self, group: int, page_hash: bytes, content: bytes) -> None:
        """Appends a page.

        Args:
            group: The group of layers.
            page_hash: The hash of its tokens.
            content: Its bytes.

        Raises:
            OSError: The file cannot be written.
        """
        digest = _record_digest(group, page_hash, content)
        self._write(_RECORD.pack(group, digest, len(page_hash)) + page_hash + content)

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
) -> Iterator[JournalPage]:
    """Yields the sound pages of a journal, up to a record that is cut off; none if it is absent or has another key.

    Args:
        path: The file, which an engine may be writing.
        key: The key.
        page_bytes: The bytes of a page of each group.
        begin: The end of the last page that was read; 0: all pages are read.
    """
    try:
        with path.open("rb") as file:
            if not _has_header(file, key, page_bytes):
                return
            if begin:
                file.seek(begin)
            while (page := _next_page(file, page_bytes)) is not None:
                if page.hash:
                    yield page
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


def _next_page(file: BinaryIO, page_bytes: Sequence[int]) -> JournalPage | None:
    """The next page, without a hash if it is damaged; None at the end, and where no record can be told from others."""
    head = file.read(_RECORD.size)
    if len(head) < _RECORD.size:
        return None
    group, digest, length = _RECORD.unpack(head)
    if group >= len(page_bytes) or not 0 < length <= _MOST_HASH_BYTES:
        return None
    page_hash, content = file.read(length), file.read(page_bytes[group])
    if len(content) < page_bytes[group]:
        return None
    sound = _record_digest(group, page_hash, content) == digest
    return JournalPage(group, page_hash if sound else b"", content, file.tell())


def _record_digest(group: int, page_hash: bytes, content: bytes) -> bytes:
    digest = hashlib.blake2b(_LENGTH.pack(group) + page_hash, digest_size=_DIGEST_BYTES)
    digest.update(content)
    return digest.digest()


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
