"""The bytes of a model's tokens."""

from __future__ import annotations

import copy
import re
from typing import Any

from max._host.process_caches import cached_results
from max.pipelines.tokenization.hf_tokenizer import tokenizer_json

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cached_results(1)
def _byte_of_character() -> dict[str, int]:
    """The bytes by the characters that byte-level tokenizers write for them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    # as in GPT-2: bytes that do not print have the characters from U+0100 on
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


class Vocabulary:
    """The bytes of each token of a tokenizer.

    Args:
        delegate: The tokenizer of a ``TextTokenizer``.
    """

    def __init__(self, delegate: Any) -> None:
        backend = delegate.backend_tokenizer
        self._backend = backend
        self._added = {
            number: token.content for number, token in backend.get_added_tokens_decoder().items()
        }
        state = tokenizer_json(delegate)
        self._byte_level = '"ByteLevel"' in state
        self._bytes: dict[int, bytes] = {}
        self._is_numbered = False

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        if token not in self._bytes:
            self._bytes[token] = self._compute(token)
        return self._bytes[token]

    def text(self, token: int) -> str:
        """The text of one token; bytes that are not a whole character become U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def by_numbers(self) -> Vocabulary:
        """The same tokens, named by their numbers."""
        other = copy.copy(self)
        other._is_numbered = True
        return other

    def name(self, token: int) -> str:
        """The name of a token in log-probabilities: its text, which others may share, or its number."""
        return f"token_id:{token}" if self._is_numbered else self.text(token)

    def _compute(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._backend.id_to_token(token) or ""
        if self._byte_level:
            table = _byte_of_character()
            if all(character in table for character in piece):
                return bytes(table[character] for character in piece)
            return piece.encode()
        # SentencePiece: bytes that no token has stand as <0x0A>
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        # U+2581 is SentencePiece's space
        return piece.replace("\u2581", " ").encode()
