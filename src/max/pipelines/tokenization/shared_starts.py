"""Encodes the start that several texts share once, where its tokens do not depend on what follows.

Byte-pair encoding works on pieces of a text, which a regular expression finds from left to right. With the expressions
that are known here a line break and a letter behind it lie in different pieces: none of their alternatives matches a
break before a letter, and they look ahead by one character at most.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

_LEAST_SHARED = 256
"""The least number of shared characters that are worth a search."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        rf"{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}",  # Llama 3
        rf"{_WORDS}|\p{{N}}|{_OTHERS}",  # Qwen
    }
)


def has_lines(tokenizer: Any) -> bool:
    """Whether the tokens of a text up to a line break before a letter, and those from the letter on, are its tokens.

    Args:
        tokenizer: A tokenizer of the tokenizers package.
    """
    if type(tokenizer.model).__name__ != "BPE" or tokenizer.model.dropout:
        return False
    if _type(tokenizer.normalizer) not in (None, "NFC"):
        return False
    if any(
        token.lstrip or token.rstrip or token.single_word or "\n" in token.content
        for token in tokenizer.get_added_tokens_decoder().values()
    ):
        return False
    if tokenizer.pre_tokenizer is None:
        return False
    state = json.loads(tokenizer.pre_tokenizer.__getstate__())
    parts = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    return _splits_lines(parts)


def _type(part: Any) -> str | None:
    return None if part is None else json.loads(part.__getstate__())["type"]


def _splits_lines(parts: Sequence[dict[str, Any]]) -> bool:
    *first, last = parts
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    splits = [part for part in first if part["type"] != "Digits"]
    if last["use_regex"]:
        return not splits
    # further splits of its pieces would be as good, if they were known
    return len(splits) == 1 and _is_known(splits[0])


def _is_known(part: dict[str, Any]) -> bool:
    return (
        part["type"] == "Split"
        and part["behavior"] == "Isolated"
        and not part["invert"]
        and part["pattern"].get("Regex") in _PATTERNS
    )


def shared_start(texts: Sequence[str]) -> int:
    """The length of a start that texts share, which ends behind a line break and before a letter of each; 0: none.

    Args:
        texts: The texts.
    """
    if len(texts) < 2:
        return 0
    shared = commonprefix(texts)
    place = len(shared)
    while place >= _LEAST_SHARED:
        if shared[place - 1] == "\n" and all(_is_letter(text[place : place + 1]) for text in texts):
            return place
        place = shared.rfind("\n", 0, place - 1) + 1
    return 0


def _is_letter(text: str) -> bool:
    return text.isascii() and text.isalpha()
