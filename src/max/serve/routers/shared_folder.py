"""The folder that the processes of a server share: socket files, and counts."""

from __future__ import annotations

from pathlib import Path

from max.serve.http.middleware import key_digest
from max.serve.process.settings import ServerSettings
from max.serve.routers.count_file import CountFile

OWNER = "owner"
"""The name of the owner's socket file."""


def counts_of(settings: ServerSettings, folder: str, rows: int, row: int, models: int) -> CountFile:
    """The counts of a server, for one of its processes.

    Args:
        settings: The settings of the server.
        folder: Its folder.
        rows: The rows of the file.
        row: That of the process.
        models: The number of models.
    """
    # without keys, and on paths that need none, all clients share one limit
    keys = ["", *map(key_digest, dict.fromkeys(settings.api_keys))]
    return CountFile(Path(folder) / "counts", rows, row, models, keys)
