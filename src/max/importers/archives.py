"""Zip archives of models, as untrusted input."""

from __future__ import annotations

import zipfile
from pathlib import Path

from max.importers.errors import ModelFileError

__all__ = ["check_entries"]

_MOST_ENTRIES = 100_000
_ALIGNMENT = 64 << 10
"""Bytes of padding and headers that an entry may have."""


def check_entries(path: Path, archive: zipfile.ZipFile) -> None:
    """Checks that an archive unpacks to little more than it holds, and only inside of the folder that it unpacks to.

    Raises:
        ModelFileError: It does not.
    """
    size = path.stat().st_size
    entries = archive.infolist()
    if len(entries) > _MOST_ENTRIES:
        raise ModelFileError(f"{path} has {len(entries)} entries, more than {_MOST_ENTRIES}")
    total = 0
    for info in entries:
        total += info.file_size
        if total > size + len(entries) * _ALIGNMENT and info.compress_type == zipfile.ZIP_STORED:
            raise ModelFileError(f"{path} is damaged: its entries are larger than the file")
        if info.file_size > 200 * max(info.compress_size, _ALIGNMENT):
            raise ModelFileError(f"{path}: {info.filename!r} unpacks to {info.file_size} bytes")
        if info.filename.startswith("/") or ".." in info.filename.split("/"):
            raise ModelFileError(f"{path}: the entry {info.filename!r} is outside of the archive")
