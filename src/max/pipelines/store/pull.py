"""Gets models: resumed where an earlier pull ended, checked, and there as a whole or not at all."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import time
import urllib.error
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from max.pipelines.core.exceptions import InputError, ModelFilesError
from max.pipelines.store.local import MANIFEST, PARTIAL, ModelStore, StoredModel, checked_name
from max.pipelines.store.sources import Source, SourceFile, http_request, unreachable_error

ATTEMPTS = 4
"""Connections for one file that may break in a row without a new byte."""
_DELAY_S = 0.2
_BLOCK = 1 << 20
_RESERVE = 64 << 20
"""Bytes of the disk that stay free."""

Progress = Callable[[str, int, "int | None"], None]
"""Is told the name of a file, its bytes so far, and its size where it is known."""


@dataclass(frozen=True)
class PulledFile:
    """A file of a pulled model, as its manifest has it."""

    name: str
    size: int
    sha256: str


def pull(
    source: Source,
    store: ModelStore,
    name: str | None = None,
    max_bytes: int | None = None,
    progress: Progress = lambda name, at, size: None,
) -> StoredModel:
    """Copies a model into a store. A pull that was interrupted goes on where it ended.

    Args:
        source: The model.
        store: The store.
        name: The name it gets; None: the source's.
        max_bytes: The most bytes that it may have; None: as many as the disk holds.
        progress: Is told how far it is.

    Raises:
        ModelFilesError: A file is missing, its checksum differs, or the disk has no room.
        InputError: The name does not fit, or is taken.
    """
    name = checked_name(name or source.name)
    target = store.folder_of(name)
    if target.exists():
        raise InputError(f"{target} exists already", f"`max rm {name}` deletes it; or give --name.")
    partial = store.root / PARTIAL / target.relative_to(store.root)
    partial.mkdir(parents=True, exist_ok=True)
    _check_room(source, partial, max_bytes)
    files: list[PulledFile] = []
    budget = max_bytes
    for file in source.files:
        pulled = _pull_file(file, partial, budget, progress)
        if pulled is None:
            continue
        files.append(pulled)
        budget = None if budget is None else budget - pulled.size
    manifest = {"source": source.address, "files": [asdict(file) for file in files]}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for extra in partial.iterdir():  # of another version of the source
        if extra.name != MANIFEST and extra.name not in {file.name for file in files}:
            extra.unlink()
    _move(partial, target)
    _remove_empty(partial.parent, store.root)
    return store.find(name)


def _move(partial: Path, target: Path) -> None:
    """Moves a folder into place; the folder around it may go with the last other model in it."""
    while True:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.rename(target)
        except FileNotFoundError:
            if not partial.exists():
                raise
        else:
            return


def verify(model: StoredModel) -> list[str]:
    """Compares a model's files with the checksums of its manifest.

    Args:
        model: The model.

    Returns:
        What differs, a line each; one line where it has no manifest.
    """
    files = model.manifest().get("files")
    if not isinstance(files, list):
        return [f"{model.name} has no checksums: it was not pulled"]
    folder = model.path if model.path.is_dir() else model.path.parent
    lines: list[str] = []
    for file in files:
        path = folder / str(file["name"])
        if not path.is_file():
            lines.append(f"{path} is missing")
        elif _digest(path).hexdigest() != file["sha256"]:
            lines.append(f"{path} differs from what was pulled")
    return lines


def _check_room(source: Source, partial: Path, max_bytes: int | None) -> None:
    """Raises ModelFilesError if a model exceeds the allowed size or the free space of the disk."""
    total_bytes = sum(file.size or 0 for file in source.files)
    if max_bytes is not None and total_bytes > max_bytes:
        raise ModelFilesError(
            f"{source.address} has {total_bytes} bytes, and {max_bytes} are allowed",
            "Raise --max-size.",
        )
    present = sum(path.stat().st_size for path in partial.iterdir() if path.is_file())
    free_bytes = shutil.disk_usage(partial).free
    if total_bytes - present > free_bytes - _RESERVE:
        raise ModelFilesError(
            f"{source.address} needs {total_bytes - present} more bytes, and the disk of {partial} has {free_bytes}",
            "Free some (`max rm`), or set MAX_MODELS_DIR to another disk.",
        )


def _pull_file(
    file: SourceFile, partial: Path, budget: int | None, progress: Progress
) -> PulledFile | None:
    """Gets one file; None where it is optional and missing."""
    if set(file.name) & set("/\\\0") or file.name in ("", ".", "..", MANIFEST):
        raise ModelFilesError(f"{file.name!r} is no name of a file", "Give another source.")
    path = partial / file.name
    part = partial / f"{file.name}.part"
    if not path.exists():
        remote = file.address.startswith(("http://", "https://"))
        fetch = _fetch if remote else _copy
        if not fetch(file, part, budget, progress):
            return None
        digest = _digest(part)
        if not remote and file.sha256 is None:
            # the part of an earlier pull may be of another version
            file = replace(file, sha256=_digest(Path(file.address)).hexdigest())
        _check_sum(file, part, digest.hexdigest())
        part.with_name(f"{part.name}.etag").unlink(missing_ok=True)
        part.rename(path)
    else:
        digest = _digest(path)
        _check_sum(file, path, digest.hexdigest())
    return PulledFile(file.name, path.stat().st_size, digest.hexdigest())


def _check_sum(file: SourceFile, path: Path, sha256: str) -> None:
    """Deletes a file with another checksum than expected, and raises ModelFilesError."""
    if file.sha256 is not None and sha256 != file.sha256.lower():
        path.unlink()
        raise ModelFilesError(
            f"{file.name} has the SHA-256 {sha256}; {file.sha256} is expected",
            "Pull it again; where it differs again, the source is damaged.",
        )


def _copy(file: SourceFile, part: Path, budget: int | None, progress: Progress) -> bool:
    """Copies a local file, from where an earlier copy stopped; returns True."""
    try:
        with open(file.address, "rb") as reader, _resumed_file(part) as writer:
            reader.seek(writer.tell())
            while block := reader.read(_BLOCK):
                _write(file, writer, block, budget)
                progress(file.name, writer.tell(), file.size)
    except OSError as error:
        raise ModelFilesError(
            f"{file.address}: {error.strerror or error}", "Give another source."
        ) from error
    return True


def _resumed_file(part: Path) -> Any:
    """The file of a pull, open at its end."""
    writer = open(part, "ab")
    writer.seek(0, os.SEEK_END)
    return writer


def _write(file: SourceFile, writer: Any, block: bytes, budget: int | None) -> None:
    """Appends a block; more than the source announced, or than is allowed, is an error."""
    end = writer.tell() + len(block)
    if (file.size is not None and end > file.size) or (budget is not None and end > budget):
        limit = min(size for size in (file.size, budget) if size is not None)
        raise ModelFilesError(
            f"{file.name} has more than the {limit} bytes that it may have",
            "Raise --max-size, or give another source.",
        )
    if shutil.disk_usage(Path(writer.name).parent).free < _RESERVE + len(block):
        raise ModelFilesError(
            f"the disk of {Path(writer.name).parent} is full",
            "Free some, and pull again: it goes on.",
        )
    writer.write(block)


def _fetch(file: SourceFile, part: Path, budget: int | None, progress: Progress) -> bool:
    """Downloads a file, over several connections where they break; whether it exists."""
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            return _fetch_once(file, part, budget, progress)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404 and file.optional:
                return False
            if error.code == 416:  # the part is longer than the file, which has changed
                part.unlink()
            elif error.code < 500:
                raise ModelFilesError(
                    f"{file.address}: status {error.code}", "Give another source, or HF_TOKEN."
                ) from error
            problem: OSError = error
        except (OSError, http.client.HTTPException) as error:
            problem = error if isinstance(error, OSError) else ConnectionError(str(error))
        after = part.stat().st_size if part.exists() else 0
        failures = 1 if after > before else failures + 1
        if failures >= ATTEMPTS:
            raise unreachable_error(file.address, problem) from problem
        time.sleep(_DELAY_S * 2**failures)


def _fetch_once(file: SourceFile, part: Path, budget: int | None, progress: Progress) -> bool:
    """Downloads a file, from where an earlier download stopped if it has not changed; returns True."""
    tag = part.with_name(f"{part.name}.etag")
    begin = part.stat().st_size if part.exists() else 0
    headers: dict[str, str] = {}
    if begin and tag.exists():
        # another version of the file is sent whole
        headers = {"Range": f"bytes={begin}-", "If-Range": tag.read_text(encoding="utf-8")}
    # the checksum tells whether the parts belong together
    elif begin and file.sha256 is not None:
        headers = {"Range": f"bytes={begin}-"}
    if begin and begin == file.size:
        return True
    with http_request(file.address, headers) as response:
        resumed = response.status == 206
        if not resumed:
            part.unlink(missing_ok=True)
        if etag := response.headers.get("ETag"):
            tag.write_text(etag, encoding="utf-8")
        length = response.headers.get("Content-Length")
        end = None if length is None else int(length) + (begin if resumed else 0)
        with _resumed_file(part) as writer:
            while block := response.read(_BLOCK):
                _write(file, writer, block, budget)
                progress(file.name, writer.tell(), file.size or end)
            if end is not None and writer.tell() < end:
                raise ConnectionError(f"the connection broke at {writer.tell()} of {end} bytes")
    return True


def _digest(path: Path) -> Any:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256")


def _remove_empty(folder: Path, root: Path) -> None:
    """Removes a folder and those around it, up to the root, where they are empty."""
    while folder != root and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
