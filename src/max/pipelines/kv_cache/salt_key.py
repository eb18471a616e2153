"""The key of the salts of a folder with cached prefixes: the same for all engines that share the folder."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import tempfile
from pathlib import Path

logger = logging.getLogger("max.pipelines")
SALT_KEY_BYTES = 32
KEY_FILE = "salts.key"
"""The file in the folder; only its owner may read it."""


def salt_key_of(folder: Path) -> bytes:
    """The key of a folder, made at the first call.

    Without it the salts of pages, and so the API keys and texts behind them, could be guessed from the hashes that the
    folder holds. If the folder cannot be written, the key is of this process only, and a warning says so.

    Args:
        folder: The folder.
    """
    path = folder / KEY_FILE
    try:
        if (key := _read(path)) is None:
            _write(path, secrets.token_bytes(SALT_KEY_BYTES))
            key = _read(path)
        if key is not None:
            return key
        reason = "another program has changed it"
    except OSError as error:
        reason = error.strerror or str(error)
    logger.warning("cached prefixes with a salt are not kept: %s: %s", path, reason)
    return secrets.token_bytes(SALT_KEY_BYTES)


def salt_of(adapter: str, scale: float, text: str, key: bytes) -> bytes:
    """The digest of what the pages of a request depend on besides its tokens.

    Args:
        adapter: The name of its adapter; empty: none.
        scale: The factor of the adapter's weights.
        text: Separates clients that share no pages, by their key and tenant; empty: all share them.
        key: The key of salts; pages of an adapter alone do not depend on it.
    """
    if adapter and scale != 1.0:
        adapter = f"{adapter}*{scale!r}"
    if not (adapter or text):
        return b""
    # JSON can hold lone surrogates
    name = adapter.encode("utf-8", "surrogatepass")
    # the length tells where the adapter ends and the text begins
    data = len(name).to_bytes(8, "little") + name + text.encode("utf-8", "surrogatepass")
    # the key hides API keys and texts; pages of an adapter alone are the same for all engines
    return hashlib.blake2b(data, digest_size=32, key=key if text else b"").digest()


def _read(path: Path) -> bytes | None:
    """The key; None if the file is absent or damaged."""
    if not path.is_file():  # opening a pipe would block until a writer opens it
        return None
    with path.open("rb") as file:
        key = file.read(SALT_KEY_BYTES + 1)
    return key if len(key) == SALT_KEY_BYTES else None


def _write(path: Path, key: bytes) -> None:
    """Writes the key, whole or not at all; the key of another process that was first stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # mode 600 (of mkstemp)
    descriptor, part = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
        try:
            os.link(part, path)
        except FileExistsError:
            if _read(path) is None:  # damaged
                Path(part).replace(path)
        except OSError:  # a file system without links
            Path(part).replace(path)
    finally:
        Path(part).unlink(missing_ok=True)
