"""Remembers the tokens of parts of chats: an instruction or an earlier message is encoded once, not with each request.

A text is cut before special tokens, such as those that begin a message. The tokenizers package cuts it there too,
before it normalizes anything, so the tokens of the parts are those of the text.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from max.pipelines.core.native_calls import tokenizer_calls

MOST_BYTES = 8 << 20
"""The memory for parts and their tokens, about; those that were not met for the longest time are forgotten."""
_ENTRY_BYTES = 300
"""What a part takes besides its text and its tokens."""
_MOST_PARTS = 4096
"""The parts of a text; one with more is encoded as a whole."""

_LONG = 4096
"""More characters are encoded without the GIL."""


class KnownParts:
    """The tokens of parts of texts, for any thread.

    Args:
        tokenizer: A tokenizer of the tokenizers package.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._pattern = tokenizer, _pattern_of(tokenizer)
        self._parts: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()  # guards the two before

    def encode(self, text: str, salt: str) -> list[array[int]]:
        """The tokens of the parts of a text, without begin and end tokens; none: it cannot be cut.

        Args:
            text: The text.
            salt: Parts are known to those that give the same: how long a text takes tells whether they were met.
        """
        if self._pattern is None:
            return []
        places = [match.start() for match in self._pattern.finditer(text, 1)]
        if not 0 < len(places) < _MOST_PARTS:
            return []
        ends = [*places, len(text)]
        keys = [(salt, text[begin:end]) for begin, end in zip([0, *places], ends, strict=True)]
        found = self._find(keys)
        # a message may occur twice
        missing = list(dict.fromkeys(key for key in keys if key not in found))
        if missing:
            tokens = self._tokens([part for _, part in missing])
            new = dict(zip(missing, tokens, strict=True))
            self._keep(new)
            found |= new
        return [found[key] for key in keys]

    @tokenizer_calls
    def _tokens(self, parts: Sequence[str]) -> list[array[int]]:
        if sum(map(len, parts)) <= _LONG:
            encode = self._tokenizer.encode
            encodings = [encode(part, add_special_tokens=False) for part in parts]
        else:
            encodings = self._tokenizer.encode_batch_fast(list(parts), add_special_tokens=False)
        return [array("I", each.ids) for each in encodings]

    def _find(self, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], array[int]]:
        """The known parts of a text, which are the last ones to be forgotten then."""
        parts, found = self._parts, dict[tuple[str, str], "array[int]"]()
        with self._lock:
            for key in keys:
                if (tokens := parts.get(key)) is not None:
                    parts.move_to_end(key)
                    found[key] = tokens
        return found

    def _keep(self, new: dict[tuple[str, str], array[int]]) -> None:
        with self._lock:
            for key, tokens in new.items():
                size = _size(key, tokens)
                # another thread may have been faster
                if key in self._parts or size > MOST_BYTES // 4:
                    continue
                self._parts[key] = tokens
                self._bytes += size
            while self._bytes > MOST_BYTES:
                self._bytes -= _size(*self._parts.popitem(last=False))


def _size(key: tuple[str, str], tokens: array[int]) -> int:
    # a character beyond Latin-1 takes up to 4 bytes
    return _ENTRY_BYTES + 4 * len(key[1]) + tokens.itemsize * len(tokens)


def _pattern_of(tokenizer: Any) -> re.Pattern[str] | None:
    """Finds the special tokens before which a text can be cut; None: there are none.

    Nothing may be found across such a place: no other token that ends in the first characters of the special one, or
    has it within; and no token that takes spaces before it, or needs the end of a word there.
    """
    if tokenizer.encode_special_tokens or getattr(tokenizer.model, "dropout", None):
        return None
    # these are looked for in the text as it is, the longest at each place; the others in what is left, normalized
    added = [t for t in tokenizer.get_added_tokens_decoder().values() if not t.normalized]
    if any(token.single_word for token in added):
        return None
    texts = [token.content for token in added if token.content]
    marks = [
        token.content
        for token in added
        if token.special and not token.lstrip and len(token.content) > 1
    ]
    kept = [mark for mark in marks if not any(_reaches_into(text, mark) for text in texts)]
    return re.compile("|".join(map(re.escape, kept))) if kept else None


def _reaches_into(text: str, mark: str) -> bool:
    """Whether a text may begin before a mark and end within or behind it."""
    if mark in text[1:]:
        return True
    return any(text.endswith(mark[:length]) for length in range(1, min(len(mark), len(text))))
