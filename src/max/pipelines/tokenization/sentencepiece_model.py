"""The pieces of a SentencePiece model file, read without the sentencepiece package.

The file is a message of protocol buffers (https://protobuf.dev/programming-guides/encoding): field 1 is repeated, a
piece with its text (1), score (2, float32) and kind (3).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["CONTROL", "NORMAL", "USER_DEFINED", "Piece", "read_model"]

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Kinds of pieces; 2 is the unknown piece, 5 an unused one, 6 a byte."""


class Piece(NamedTuple):
    """A piece of a vocabulary.

    Args:
        text: Its text.
        score: Its score.
        kind: Its kind.
    """

    text: str
    score: float
    kind: int


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number of variable length, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("the model file is cut off")
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise ValueError("a number in the model file has over 10 bytes")


def _fields(data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """The fields of a message: number, kind of encoding, and bytes; those of a number in 8 bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, kind, memoryview((value & (2**64 - 1)).to_bytes(8, "little"))
            continue
        length = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            length, at = _varint(data, at)
        if length is None or number == 0:
            raise ValueError("it is no SentencePiece model")
        if at + length > len(data):
            raise ValueError("the model file is cut off")
        yield number, kind, data[at : at + length]
        at += length


def read_model(path: Path) -> list[Piece]:
    """The pieces of a model file, in the order of their numbers.

    Args:
        path: The file.

    Raises:
        ValueError: It is no SentencePiece model, or damaged.
    """
    pieces: list[Piece] = []
    for number, kind, data in _fields(memoryview(path.read_bytes())):
        if (number, kind) != (1, 2):
            continue
        text, score, kind_of_piece = "", 0.0, NORMAL
        for inner, encoding, value in _fields(data):
            if (inner, encoding) == (1, 2):
                text = bytes(value).decode("utf-8")
            elif (inner, encoding) == (2, 5):
                (score,) = struct.unpack("<f", value)
            elif (inner, encoding) == (3, 0):
                kind_of_piece = int.from_bytes(value, "little")
        pieces.append(Piece(text, score, kind_of_piece))
    if not pieces:
        raise ValueError("it is no SentencePiece model: there are no pieces in it")
    return pieces
