"""Where server processes connect to an engine or to a router, and for what."""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass

from max.serve.remote.connections import KEY_BYTES

PURPOSES = ("commands", "beats")
"""The connections of a server: its requests, and the signs of life."""
OWNER_PURPOSES = ("owner", "beats")
"""The same of a process that becomes the owner of the engine."""
OWNER = "owner"
"""The name of the owner's socket file in the folder that the processes of a server share."""
LINK = "link"
"""The connection of an owner to a router."""
SIGN = struct.Struct("<d96s")
"""A sign of life: the seconds that the running step has taken, -1 for none, and the step of the load."""


@dataclass(frozen=True)
class DoorAddress:
    """Where a server process connects to an engine, or the owner of the engines to a router.

    Args:
        host: The address, or the path of a socket file.
        port: The port; a socket file has none.
        key: What both sides know.
    """

    host: str
    port: int
    key: bytes

    @classmethod
    def in_folder(cls, folder: str, what: str = "engine") -> DoorAddress:
        """The address of a socket file that is not there yet, with a random key.

        Args:
            folder: The folder.
            what: What it is of: an engine or a router.
        """
        return cls(f"{folder}/{what}-{secrets.token_hex(8)}", 0, secrets.token_bytes(KEY_BYTES))
