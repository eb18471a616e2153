"""What two engines say when one takes entries of its cache from the other's.

Both know a key. The side that asks sends a `REQUEST` with a random number; an answer is its size, its bytes and a code
of both, of the request and of the key, so that nobody on the way between them can put other code into an engine, or
send an old answer again. Nothing is secret: the network of a cluster is trusted with models and texts.
"""

from __future__ import annotations

import hmac
import struct

from max._host.disk_cache import SHARED_KINDS, WEIGHTS_FOLDER

PURPOSE = "cache"
"""The connection of an engine to the cache of another one."""
KINDS = (*SHARED_KINDS, WEIGHTS_FOLDER)
"""What is handed out, by its number in a request."""
REQUEST = struct.Struct("<16sB40sQQ")
"""A random number, the number of the kind, the key, and for weights the first byte; the most bytes of the answer."""
SIZE = struct.Struct("<Q")
"""The size of an answer."""
ABSENT = 2**64 - 1
"""The size of an answer that says that there is no such entry."""
CODE_BYTES = 32
"""The size of the code at the end of an answer."""
MOST_BYTES = 256 << 20
"""The largest entry: a recipe has constants of up to 128 MiB."""
RANGE = 8 << 20
"""The bytes of packed weights in an answer."""
PIECE = 1 << 20
"""The bytes that are read or sent at a time."""


def answer_code(key: bytes, request: bytes) -> hmac.HMAC:
    """The code of an answer, to be updated with its size and its bytes.

    Args:
        key: What both sides know.
        request: The request.
    """
    # processors have instructions for it: twice as fast as BLAKE2 here
    return hmac.new(key, request, "sha256")
