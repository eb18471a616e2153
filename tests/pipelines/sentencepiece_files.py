"""Writes SentencePiece models and files of tiktoken, of pieces that the tokenizers package trains."""

from __future__ import annotations

import base64
import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from max.pipelines.tokenization.byte_pair_files import byte_characters
from tests.pipelines.test_gguf_tokenizers import CORPUS, SPECIAL, with_bytes

Pieces = list[tuple[str, float, int]]
"""Text, score and kind."""


def _number(value: int) -> bytes:
    value &= 2**64 - 1
    parts = bytearray()
    while True:
        parts.append(value & 127 | (128 if value > 127 else 0))
        value >>= 7
        if not value:
            return bytes(parts)


def field(number: int, value: bytes | int | float) -> bytes:
    """A field of a message of protocol buffers."""
    if isinstance(value, float):
        return _number(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _number(number << 3) + _number(value)
    return _number(number << 3 | 2) + _number(len(value)) + value


def model_file(
    path: Path,
    pieces: Pieces,
    trainer: dict[int, bytes | int] | None = None,
    normalizer: dict[int, bytes | int] | None = None,
) -> Path:
    """A SentencePiece model with the fields of its two specifications by their numbers."""
    message = b"".join(
        field(1, field(1, text.encode()) + field(2, float(score)) + field(3, kind))
        for text, score, kind in pieces
    )
    for number, values in ((2, trainer or {}), (3, normalizer or {})):
        message += field(number, b"".join(field(n, value) for n, value in values.items()))
    path.write_bytes(message)
    return path


def charsmap(texts: dict[str, str]) -> bytes:
    """A compiled table of normalized texts: the double array of a trie, and the texts that its leaves stand for."""
    strings, values = b"", {}
    for text, normal in texts.items():
        values[text.encode()] = len(strings)
        strings += normal.encode() + b"\0"
    units: dict[int, int] = {}
    taken = {0}

    def place(index: int, prefix: bytes, label: int) -> None:
        """Puts the children of a node where all have free places."""
        nexts = sorted({key[len(prefix)] for key in values if key[: len(prefix)] == prefix != key})
        leaf = prefix in values
        places = [*([0] if leaf else []), *nexts]
        base = next(b for b in range(1, 1 << 20) if all(b ^ c not in taken for c in places))
        taken.update(base ^ c for c in places)
        units[index] = (base ^ index) << 10 | (1 << 8 if leaf else 0) | label
        if leaf:
            units[base] = values[prefix] | 1 << 31
        for byte in nexts:
            place(base ^ byte, prefix + bytes([byte]), byte)

    place(0, b"", 0)
    size = (max(taken) | 255) + 1
    trie = b"".join(struct.pack("<I", units.get(index, 0)) for index in range(size))
    return struct.pack("<I", len(trie)) + trie + strings


NORMAL_FORMS = charsmap({"ﬁ": "fi", "½": "1⁄2", "Å": "Å", "ｆ": "f", "\t": " ", "\u3000": " "})


@cache
def _scored() -> list[tuple[str, float]]:
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator(CORPUS[:15000].splitlines(), trainer)
    return [(text, score) for text, score in json.loads(trained.to_str())["model"]["vocab"][1:]]


def likeliest_pieces(special: list[str], bytes_too: bool = False) -> Pieces:
    """Pieces of the unigram algorithm after special ones, of which ``<unk>`` is the unknown one."""
    first: Pieces = [(text, 0.0, 2 if text == "<unk>" else 3) for text in special]
    middle: Pieces = [(f"<0x{n:02X}>", 0.0, 6) for n in range(256)] if bytes_too else []
    return [*first, *middle, *((text, score, 1) for text, score in _scored()), ("<tool>", 0.0, 4)]


@cache
def _ordered() -> list[str]:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False)
    trained.train_from_iterator([CORPUS[:15000]], trainer)
    vocabulary = trained.get_vocab()
    return sorted(vocabulary, key=lambda piece: (len(piece) == 1, vocabulary[piece]))


def paired_pieces(special: list[str], bytes_too: bool = True) -> Pieces:
    """Pieces of pairs and bytes after special ones."""
    tokens, _ = with_bytes(_ordered())
    pieces: Pieces = [(text, 0.0, 2 if text == "<unk>" else 3) for text in special]
    middle = tokens[len(SPECIAL) : len(SPECIAL) + 256] if bytes_too else []
    pieces += [(text, 0.0, 6) for text in middle]
    scored: Pieces = [(text, -float(i), 1) for i, text in enumerate(_ordered())]
    return [*pieces, *scored, ("<tool>", 0.0, 4)]


@cache
def ranked_tokens() -> list[bytes]:
    """Byte strings by rank: the single bytes, then those of trained pairs."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([CORPUS[:15000]], trainer)
    letters = {byte_characters(bytes([byte])): byte for byte in range(256)}
    vocabulary = trained.get_vocab()
    longer = [
        bytes(letters[character] for character in text)
        for text in sorted(vocabulary, key=lambda t: vocabulary[t])
    ]
    return [bytes([byte]) for byte in range(256)] + [token for token in longer if len(token) > 1]


def tiktoken_file(path: Path) -> Path:
    """A file of tiktoken, whose lines are in another order than the ranks."""
    lines = [
        base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranked_tokens())
    ]
    path.write_bytes(b"".join(reversed(lines)))
    return path


def write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values), encoding="utf-8")
