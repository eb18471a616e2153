"""Which files of cached prefixes a folder keeps, by what it costs to compute their pages again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DIGEST_DIGITS", "StoredFile", "cost_of_key", "files_to_remove", "key_with_cost"]

DIGEST_DIGITS = 32
"""The hexadecimal digits of a model's digest in the names of its files."""
_STEPS = 8  # numbers for each factor of two


@dataclass(frozen=True)
class StoredFile:
    """A file of cached prefixes.

    Args:
        path: Its path.
        size: Its bytes.
        age: The seconds since it was written.
        cost: The work to compute a byte of it again: bytes of weights that are read for a token, for each byte that a
            token has in the cache.
    """

    path: Path
    size: int
    age: float
    cost: float

    @property
    def rank(self) -> float:
        """Files with the greatest rank are removed first: a file that is twice as dear may be twice as old."""
        return max(self.age, 1.0) / self.cost


def files_to_remove(files: Sequence[StoredFile], room: int) -> list[StoredFile]:
    """The files that a folder has no room for: of those that fit, the ones of the least rank are kept.

    Args:
        files: The files.
        room: The bytes for them; a negative number: none.
    """
    removed: list[StoredFile] = []
    for file in sorted(files, key=lambda file: (file.rank, file.path)):
        if file.size > room:
            removed.append(file)
        else:
            room -= file.size
    return removed


def key_with_cost(digest: str, cost: float) -> str:
    """The key of a model's files, which states the cost of their pages to other models.

    Args:
        digest: What tells the model from others, in `DIGEST_DIGITS` hexadecimal digits.
        cost: As of `StoredFile`, from 1 to 2³¹; other numbers count as the nearest of these.
    """
    return f"{digest}{min(max(round(_STEPS * math.log2(max(cost, 1.0))), 0), 255):02x}"


def cost_of_key(key: str) -> float | None:
    """The cost of the pages of files with a key, to a twentieth; None if it states none, as those of earlier versions.

    Args:
        key: The first part of the name of a file.
    """
    digits = key[DIGEST_DIGITS:]
    if len(digits) != 2 or not set(digits) <= set("0123456789abcdef"):
        return None
    return 2.0 ** (int(digits, 16) / _STEPS)
