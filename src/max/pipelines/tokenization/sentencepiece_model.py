"""SentencePiece model files, read without the sentencepiece package.

The file is a message of protocol buffers (https://protobuf.dev/programming-guides/encoding): field 1 is repeated, a
piece with its text (1), score (2, float32) and kind (3); field 2 says how the model was trained, field 3 how texts are
normalized.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["CONTROL", "NORMAL", "USER_DEFINED", "Piece", "SentencePieceModel", "read_model"]

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


@dataclass
class SentencePieceModel:
    """What a model file says.

    Args:
        pieces: The pieces, in the order of their numbers.
        algorithm: 1: the likeliest pieces (unigram); 2: pairs are merged; 3 and 4: words and characters.
        byte_fallback: Whether characters without a piece become bytes.
        unknown: The number of the unknown piece.
        begin: The number of the piece that begins a text; negative: there is none.
        end: The number of the piece that ends a text; negative: there is none.
        unknown_text: The text of the unknown piece.
        begin_text: The text of the piece that begins a text.
        end_text: The text of the piece that ends a text.
        charsmap: The compiled table of normalized characters; empty without one.
        dummy_prefix: Whether a space is put before a text.
        trims_spaces: Whether spaces at the ends are removed, and others joined.
        escapes_spaces: Whether spaces become U+2581.
    """

    pieces: list[Piece]
    algorithm: int = 1
    byte_fallback: bool = False
    unknown: int = 0
    begin: int = 1
    end: int = 2
    unknown_text: str = "<unk>"
    begin_text: str = "<s>"
    end_text: str = "</s>"
    charsmap: bytes = b""
    dummy_prefix: bool = True
    trims_spaces: bool = True
    escapes_spaces: bool = True


_TRAINER = {
    3: "algorithm",
    35: "byte_fallback",
    40: "unknown",
    41: "begin",
    42: "end",
    45: "unknown_text",
    46: "begin_text",
    47: "end_text",
}
_NORMALIZER = {2: "charsmap", 3: "dummy_prefix", 4: "trims_spaces", 5: "escapes_spaces"}
"""The fields of `SentencePieceModel` by their numbers in the messages 2 and 3 of the file."""


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number of variable length, and the place after it."""
    value = 0
    # up to ten bytes of seven bits each
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
        # as in protobuf: the number of a field, and the kind of its encoding
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, kind, memoryview((value & (2**64 - 1)).to_bytes(8, "little"))
            continue
        # fixed sizes
        length = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            length, at = _varint(data, at)
        if length is None or number == 0:
            raise ValueError("it is no SentencePiece model")
        if at + length > len(data):
            raise ValueError("the model file is cut off")
        yield number, kind, data[at : at + length]
        at += length


def _piece(data: memoryview) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for number, encoding, value in _fields(data):
        if (number, encoding) == (1, 2):
            text = bytes(value).decode("utf-8")
        elif (number, encoding) == (2, 5):
            (score,) = struct.unpack("<f", value)
        elif (number, encoding) == (3, 0):
            kind = int.from_bytes(value, "little")
    return Piece(text, score, kind)


def _set(model: SentencePieceModel, names: dict[int, str], data: memoryview) -> None:
    """Sets fields of the model from a message; others of the message are left out."""
    for number, encoding, value in _fields(data):
        name = names.get(number)
        current = None if name is None else getattr(model, name)
        # a field of another type than here is left out
        if name is None or (encoding == 2) != isinstance(current, (str, bytes)):
            continue
        if isinstance(current, bytes):
            setattr(model, name, bytes(value))
        elif isinstance(current, str):
            setattr(model, name, bytes(value).decode("utf-8"))
        elif encoding == 0:
            whole = int.from_bytes(value, "little", signed=True)
            setattr(model, name, bool(whole) if isinstance(current, bool) else whole)


def read_model(path: Path) -> SentencePieceModel:
    """Reads a model file.

    Args:
        path: The file.

    Raises:
        ValueError: It is no SentencePiece model, or damaged.
    """
    model = SentencePieceModel([])
    for number, encoding, data in _fields(memoryview(path.read_bytes())):
        if encoding == 2 and number == 1:
            model.pieces.append(_piece(data))
        elif encoding == 2 and number in (2, 3):
            _set(model, _TRAINER if number == 2 else _NORMALIZER, data)
    if not model.pieces:
        raise ValueError("it is no SentencePiece model: there are no pieces in it")
    return model
