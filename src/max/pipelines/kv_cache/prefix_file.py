"""A file of cached pages, from which an engine restores the prefixes of an earlier engine.

Format: a magic line, the length and digest of the header, the header as JSON, then the pages. The header contains the
key and, for each group of layers, the bytes of a page and the hash and digest of each page. The file is used only if
its key matches, and a page only if its digest matches.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from max._dataclass import dataclass

logger = logging.getLogger("max.pipelines")
_MAGIC = b"max cached prefixes 1\n"
_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 16
_MOST_HEADER_BYTES = 64 << 20
_PART_SUFFIX = ".part"
_PART_AGE_S = 600.0


@dataclass(frozen=True)
class PageGroup:
    """The pages of a group of layers to write.

    Args:
        page_bytes: The bytes of one page.
        hashes: The hashes of the pages' tokens, in order of use, the most recent last.
        content: Returns the bytes of a page by its index in ``hashes``; None if it is no longer cached.
    """

    page_bytes: int
    hashes: Sequence[bytes]
    content: Callable[[int], bytes | None]


def write_pages(path: Path, key: str, groups: Sequence[PageGroup]) -> int:
    """Replaces the contents of the file atomically: a reader sees the old file or the whole new one.

    Args:
        path: The file; its folder is created if needed.
        key: Identifies everything besides tokens on which the contents of pages depend.
        groups: The pages.

    Returns:
        The number of written pages.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # mode 600 (of mkstemp), as the contents depend on prompts
    descriptor, part = tempfile.mkstemp(prefix=path.name, suffix=_PART_SUFFIX, dir=path.parent)
    count = 0
    try:
        with os.fdopen(descriptor, "wb") as file:
            entries = [
                {
                    "page_bytes": group.page_bytes,
                    "pages": [(h.hex(), "0" * 32) for h in group.hashes],
                }
                for group in groups
            ]
            header = _header(key, entries)
            # room for the header, whose digests are known after the pages
            file.seek(len(header))
            for entry, group in zip(entries, groups, strict=True):
                for place, page_hash in enumerate(group.hashes):
                    content = group.content(place)
                    if content is None:  # its digest stays 0, which no content has
                        file.seek(group.page_bytes, os.SEEK_CUR)
                        continue
                    file.write(content)
                    entry["pages"][place] = (page_hash.hex(), _digest(content).hex())
                    count += 1
            file.seek(0)
            # same length as the placeholder header, now with the digests
            file.write(_header(key, entries))
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    return count


def remove_abandoned_parts(folder: Path) -> None:
    """Deletes unfinished files of killed writers: those not written to for ten minutes.

    Args:
        folder: The folder of the files.
    """
    oldest = time.time() - _PART_AGE_S
    for part in folder.glob("*" + _PART_SUFFIX):
        try:
            if part.stat().st_mtime < oldest:
                part.unlink()
        except OSError:
            pass  # another process deleted it first


def read_pages(
    path: Path, key: str, page_bytes: Sequence[int]
) -> Iterator[tuple[int, bytes, bytes]]:
    """Yields the valid pages of a file; none if the file is absent, damaged, or has another key. If the file exists, a
    warning states what was left out.

    Args:
        path: The file.
        key: The key given to :func:`write_pages`.
        page_bytes: The bytes of one page of each group.

    Yields:
        The group, the hash, and the content.
    """
    entries: list[tuple[int, str, str]] | None = None
    sound = 0
    reason = "the file is damaged, or not of this model"
    try:
        if not path.is_file():  # opening a pipe would block until a writer opens it
            if os.path.lexists(path):
                logger.warning("cached prefixes: %s is no file", path)
            return
        with path.open("rb") as file:
            entries = _entries(_read_header(file), key, page_bytes)
            for number, page_hash, digest in entries or ():
                content = file.read(page_bytes[number])
                if len(content) < page_bytes[number]:
                    break
                if _digest(content).hex() == digest:
                    yield number, bytes.fromhex(page_hash), content
                    sound += 1
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError:
        pass  # a hash is not hexadecimal: nothing after it is read
    if entries is None:
        logger.warning("cached prefixes of %s are not used: %s", path, reason)
    elif sound < len(entries):
        logger.warning(
            "cached prefixes: %d of %d pages of %s are damaged",
            len(entries) - sound,
            len(entries),
            path,
        )


def _entries(
    header: object, key: str, page_bytes: Sequence[int]
) -> list[tuple[int, str, str]] | None:
    """Group, hash and digest of each page that a header names; None if the header does not match this key and these
    page sizes.
    """
    if not isinstance(header, dict) or header.get("key") != key:
        return None
    groups: Any = header.get("groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return None
    if [group.get("page_bytes") for group in groups] != list(page_bytes):
        return None
    entries: list[tuple[int, str, str]] = []
    for number, group in enumerate(groups):
        pages: Any = group.get("pages")
        for page in pages if isinstance(pages, list) else []:
            match page:
                case [str() as page_hash, str() as digest]:
                    entries.append((number, page_hash, digest))
                case _:
                    return None
    return entries


def _header(key: str, groups: list[dict[str, Any]]) -> bytes:
    text = json.dumps({"key": key, "groups": groups}).encode()
    return _MAGIC + _LENGTH.pack(len(text)) + _digest(text) + text


def _read_header(file: BinaryIO) -> Any:
    """The header; None if the file does not contain a complete one."""
    if file.read(len(_MAGIC)) != _MAGIC:
        return None
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size).ljust(_LENGTH.size, b"\0"))
    digest = file.read(_DIGEST_BYTES)
    # a damaged file may state any length
    text = file.read(length) if length <= _MOST_HEADER_BYTES else b""
    try:
        return json.loads(text) if _digest(text) == digest else None
    except RecursionError:
        return None


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
