"""Ollama's ``/api/blobs``: files that clients upload before they create a model of them."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import time
import uuid
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from max.pipelines.store.local import ModelStore
from max.serve.errors import ApiError, short_text
from max.serve.http.state import state_of
from max.serve.http.streaming import ClientLeftError
from max.serve.ollama.library import store_of

router = APIRouter(prefix="/api", tags=["Ollama"])
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_FOLDER = ".blobs"
_KEPT_S = 24 * 3600
"""Seconds after which a blob of which no model was made is deleted, when the next one comes."""
RESERVE = 1 << 30
"""The bytes of the disk that stay free."""
_MOST_AT_ONCE = 4
_WRITE = 1 << 20
# each upload holds a thread while it writes
_uploads = asyncio.Semaphore(_MOST_AT_ONCE)


def blob_path(store: ModelStore, digest: str) -> Path:
    """Where the file of a digest lies, or will lie.

    Args:
        store: The models.
        digest: Its digest, ``sha256:`` and 64 hexadecimal digits.

    Raises:
        ApiError: It is no digest.
    """
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise ApiError(
            f"{short_text(digest)} is no digest: expected sha256: and 64 hexadecimal digits"
        )
    return store.root / _FOLDER / f"sha256-{match[1]}"


@router.get("/blobs/{digest}")
async def has_blob(digest: str, request: Request) -> Response:
    """Says by its status whether a blob was uploaded.

    Args:
        digest: Its digest.
        request: The connection.
    """
    path = blob_path(store_of(request, state_of(request)), digest)
    if not await asyncio.to_thread(path.is_file):
        raise ApiError(f"there is no blob {short_text(digest)}", status=404)
    return Response(status_code=200)


@router.post("/blobs/{digest}")
async def take_blob(digest: str, request: Request) -> Response:
    """Stores a blob, whose bytes must have its digest.

    Args:
        digest: Its digest.
        request: The connection; the body is the blob.
    """
    store = store_of(request, state_of(request))
    path = blob_path(store, digest)
    if _uploads.locked():
        raise ApiError(
            f"{_MOST_AT_ONCE} blobs are uploaded already", status=503, headers={"Retry-After": "1"}
        )
    async with _uploads:
        return await _store_body(request, path)


async def _store_body(request: Request, path: Path) -> Response:
    await asyncio.to_thread(_make_room, path.parent)
    free = shutil.disk_usage(path.parent).free - RESERVE
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > free:
        raise _no_space(path.parent)
    # two clients may upload the same blob at once
    part = path.parent / f"{uuid.uuid4().hex}.part"
    total, size = hashlib.sha256(), 0
    try:
        with open(part, "xb") as file:
            waiting = bytearray()

            # in a thread: a MiB takes milliseconds to hash and to write
            def write() -> None:
                total.update(waiting)
                file.write(waiting)
                waiting.clear()

            async for block in request.stream():
                waiting += block
                size += len(block)
                # bodies sent in chunks have no length
                if size > free:
                    raise _no_space(path.parent)
                if len(waiting) >= _WRITE:
                    await asyncio.to_thread(write)
            await asyncio.to_thread(write)
        if total.hexdigest() != path.name.removeprefix("sha256-"):
            raise ApiError(f"the body has the digest sha256:{total.hexdigest()}")
        # in one step: a blob is whole, or not there
        part.replace(path)
    except ClientDisconnect:
        raise ClientLeftError from None
    except OSError as error:
        raise ApiError(f"the blob cannot be written: {error}", status=507) from error
    finally:
        part.unlink(missing_ok=True)
    return Response(status_code=201)


def _no_space(folder: Path) -> ApiError:
    return ApiError(f"the disk of {folder} has no room for the blob", status=507)


def _make_room(folder: Path) -> None:
    """Makes the folder, and deletes blobs that nobody has used for long."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if time.time() - old.stat().st_mtime > _KEPT_S:
            old.unlink(missing_ok=True)
