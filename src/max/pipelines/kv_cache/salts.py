"""Salts of pages, and the key of those of a folder with cached prefixes: the same for all engines that share it."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import tempfile
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Salt:
    """What the pages of a request depend on besides its tokens.

    Args:
        adapter: The name of its adapter; empty: none.
        scale: The factor of the adapter's weights.
        text: Separates clients that share no pages, by their key and tenant; empty: all share them.
    """

    adapter: str = ""
    scale: float = 1.0
    text: str = ""

    @property
    def needs_key(self) -> bool:
        """Whether the digest depends on a key: pages of an adapter alone are the same for all engines."""
        return bool(self.text)

    def digest(self, key: bytes) -> bytes:
        """The digest that the first page's hash depends on; empty: pages depend on tokens only.

        Args:
            key: The key of salts, which hides API keys and texts.
        """
        adapter = self.adapter
        if adapter and self.scale != 1.0:
            adapter = f"{adapter}*{self.scale!r}"
        if not (adapter or self.text):
            return b""
        # JSON can hold lone surrogates
        name = adapter.encode("utf-8", "surrogatepass")
        # the length tells where the adapter ends and the text begins
        data = len(name).to_bytes(8, "little") + name + self.text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, digest_size=32, key=key if self.needs_key else b"").digest()


NO_SALT = Salt()
"""Of requests whose pages depend on their tokens only."""


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
