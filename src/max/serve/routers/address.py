"""Where server processes connect to an engine, and for what."""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass

from max.serve.remote.connections import KEY_BYTES

PURPOSES = ("commands", "beats")
"""The connections of a server: its requests, and the signs of life."""
SIGN = struct.Struct("<d96s")
"""A sign of life: the seconds that the running step has taken, -1 for none, and the step of the load."""


@dataclass(frozen=True)
class DoorAddress:
    """Where a server process connects to an engine.

    Args:
        host: The address, or the path of a socket file.
        port: The port; a socket file has none.
        key: What both sides know.
    """

    host: str
    port: int
    key: bytes

    @classmethod
    def in_folder(cls, folder: str) -> DoorAddress:
        """The address of a socket file that is not there yet, with a random key.

        Args:
            folder: The folder.
        """
        return cls(f"{folder}/engine-{secrets.token_hex(8)}", 0, secrets.token_bytes(KEY_BYTES))
