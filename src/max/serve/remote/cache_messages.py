"""The protocol by which an engine fetches cache entries from another one.

Client and server share a key. A `REQUEST` contains a random nonce; a response is its size, its payload and an HMAC over
the request and both, keyed with that key, so that nobody in between can inject code into an engine or replay an old
response. Payloads are not encrypted: the network of a cluster is trusted with models and texts.
"""

from __future__ import annotations

import hmac
import struct

from max._host.disk_cache import SHARED_KINDS, WEIGHTS_FOLDER

PURPOSE = "cache"
"""The purpose that a client states when it connects."""
KINDS = (*SHARED_KINDS, WEIGHTS_FOLDER)
"""The kinds of entries that are served, by their number in a request."""
REQUEST = struct.Struct("<16sB40sQQ")
"""The nonce, the number of the kind, the key, the first byte (of packed weights), and the maximum payload size."""
SIZE = struct.Struct("<Q")
"""The payload size."""
ABSENT = 2**64 - 1
"""The payload size that stands for a missing entry."""
CODE_BYTES = 32
"""The size of the HMAC at the end of a response."""
MOST_BYTES = 256 << 20
"""The maximum size of an entry: a recipe has constants of up to 128 MiB."""
RANGE = 8 << 20
"""The bytes of packed weights per response."""
PIECE = 1 << 20
"""The bytes per read or send."""


def answer_code(key: bytes, request: bytes) -> hmac.HMAC:
    """The HMAC of a response, to be updated with its size and its payload.

    Args:
        key: The shared key.
        request: The request.
    """
    # SHA-256 has instructions of its own: twice as fast as BLAKE2
    return hmac.new(key, request, "sha256")
