"""Numbers of the blocks of formats that are read but not written: scales, integers, offsets."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "LEVELS",
    "Parts",
    "alternating_nibbles",
    "half_at",
    "halves",
    "iq4_nl",
    "iq4_xs",
    "one",
    "pairs_of_bits",
    "q2_k",
    "q3_k",
    "signed_values",
    "words_at",
]

Array = npt.NDArray[Any]


class Parts(NamedTuple):
    """The numbers of blocks: an element is ``d * s * q``, or ``d * s * q + m * o``.

    Args:
        d: float32 ``[blocks, 1]``.
        s: Integers ``[blocks, groups]``, or float32 where `d` has no common factor.
        q: int8 ``[blocks, groups, elements]``.
        offset: float32 ``[blocks, groups]``, m times o; None in formats without.
    """

    d: Array
    s: Array
    q: Array
    offset: Array | None = None

    def values(self) -> Array:
        """The elements, float32 ``[blocks, groups * elements]``."""
        scale = self.d * self.s.astype(np.float32)
        values = scale[:, :, None] * self.q.astype(np.float32)
        if self.offset is not None:
            values += self.offset[:, :, None]
        return values.reshape(len(values), -1)


def half_at(blocks: Array, at: int) -> Array:
    """The float16 at a byte of each block, as a column of float32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def words_at(blocks: Array, start: int, end: int, dtype: str) -> Array:
    """Little-endian words in bytes `start` to `end` of each block."""
    return np.ascontiguousarray(blocks[:, start:end]).view(dtype)


def halves(packed: Array) -> Array:
    """The low, then the high halves of the last axis: ``[…, n]`` to ``[…, 2 n]``."""
    return np.concatenate([packed & 15, packed >> 4], -1)


def alternating_nibbles(packed: Array) -> Array:
    """Low and high half of each byte in turn: ``[…, n]`` to ``[…, 2 n]``."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def pairs_of_bits(packed: Array) -> Array:
    """2 bits of each byte, the lowest of all first: ``[n, 64]`` to ``[n, 256]``, in two halves of 32 bytes."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (packed.reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 256)


def one(blocks: Array) -> Array:
    """A scale of 1 for each block."""
    return np.ones((len(blocks), 1), np.int8)


def signed_values(q: Array, groups: int) -> Array:
    """Integers as int8, in groups."""
    return q.astype(np.int8).reshape(len(q), groups, -1)


LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
"""The levels of IQ4_NL and IQ4_XS."""


def q2_k(b: Array) -> Parts:
    """The numbers of Q2_K: 2 bits, a scale and an offset of 16 elements."""
    q = signed_values(pairs_of_bits(b[:, 16:80]), 16)
    offset = half_at(b, 82) * (b[:, :16] >> 4).astype(np.float32)
    return Parts(half_at(b, 80), b[:, :16] & 15, q, -offset)


def q3_k(b: Array) -> Parts:
    """The numbers of Q3_K: 3 bits, a scale of 16 elements."""
    third = b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    q = pairs_of_bits(b[:, 32:96]) | third.reshape(-1, 256) << 2
    upper = b[:, None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    s = halves(b[:, 96:104]) | upper.reshape(-1, 16) << 4
    return Parts(
        half_at(b, 108), s.astype(np.int8) - np.int8(32), signed_values(q, 16) - np.int8(4)
    )


def iq4_nl(b: Array) -> Parts:
    """The numbers of IQ4_NL: levels with a scale of 32 elements."""
    return Parts(half_at(b, 0), one(b), LEVELS[halves(b[:, 2:])][:, None])


def iq4_xs(b: Array) -> Parts:
    """The numbers of IQ4_XS: levels, with a scale of 32 elements."""
    upper = words_at(b, 2, 4, "<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    s = alternating_nibbles(b[:, 4:8]) | upper.astype(np.uint8) << 4
    q = LEVELS[halves(b[:, 8:].reshape(-1, 8, 16))]
    return Parts(half_at(b, 0), s.astype(np.int8) - np.int8(32), q)
