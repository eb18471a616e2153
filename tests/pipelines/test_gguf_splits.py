"""Splits of texts by the names of ``tokenizer.ggml.pre`` against recorded splits of llama.cpp.

``python -m tests.pipelines.record_gguf_splits`` writes the record.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from max.pipelines.gguf.splits import SPLITS
from max.pipelines.gguf.tokenizer import tokenizer_of
from tests.pipelines.record_gguf_splits import RECORD

DATA = json.loads(RECORD.read_text("utf-8"))
TOKENS = DATA["tokens"].split(" ")
ROWS = {name: row for names, row in DATA["names"].items() for name in names.split(" ")}


def marks(text: str) -> bool:
    """Marks, which llama.cpp leaves out of some classes of letters."""
    return any(unicodedata.category(letter)[0] == "M" for letter in text)


def cases(text: str) -> bool:
    """Letters with a case outside ASCII, whose case some patterns of llama.cpp take from ASCII."""
    return any(letter > "\x7f" and letter.upper() != letter.lower() for letter in text)


def humps(text: str) -> bool:
    """An upper-case letter after another letter, which some patterns of llama.cpp do not split."""
    return any(
        a.isalpha() and not a.isupper() and b.isupper()
        for a, b in zip(text, text[1:], strict=False)
    )


def wide_spaces(text: str) -> bool:
    """Spaces outside ASCII, which llama.cpp never counts as Chinese characters."""
    return any(letter > "\x7f" and letter.isspace() for letter in text)


def wide_digits(text: str) -> bool:
    """Digits outside ASCII."""
    return any(letter > "\x7f" and letter.isdecimal() for letter in text)


CASED = (marks, cases)
APPROXIMATED: dict[str, tuple[Callable[[str], bool], ...]] = {
    **dict.fromkeys(["gpt-4o", "kanana2", "llama4", "minimax-m2", "talkie", "tekken"], CASED),
    "granite-embed-multi-97m": CASED,
    **dict.fromkeys(["kimi-k2", "tiny_aya", "youtu"], (*CASED, humps)),
    "superbpe": (wide_digits,),
    "deepseek-coder": (wide_spaces,),
    "deepseek-llm": (wide_spaces,),
}
"""The characters for which llama.cpp's patterns differ from those of the family's tokenizer.json, which we follow."""


def test_every_name_is_recorded():
    assert sorted(ROWS) == sorted(SPLITS)


@pytest.mark.parametrize("name", SPLITS)
def test_splits_of_llama_cpp(name: str):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [*TOKENS, "<s>"],
        "tokenizer.ggml.merges": DATA["merges"],
        "tokenizer.ggml.bos_token_id": len(TOKENS),
    }
    tokenizer, _, _ = tokenizer_of(SimpleNamespace(metadata=metadata, path="m.gguf"))  # pyright: ignore[reportArgumentType]
    begins = ROWS[name][-1] == "+"
    assert (tokenizer.encode("a").ids[0] == len(TOKENS)) == begins
    compared = 0
    for (text, splits), mark in zip(DATA["texts"].items(), ROWS[name][:-1], strict=True):
        if any(differs(text) for differs in APPROXIMATED.get(name, ())):
            continue
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert " ".join(str(len(TOKENS[i])) for i in ids) == splits[ord(mark) - 97], repr(text)
        compared += 1
    assert compared >= 20


@pytest.mark.parametrize("end", ["", "x", "!", "7"])
def test_runs_of_spaces_in_powers_of_two(end: str):
    """As llama.cpp cuts them for jais-2: at most 512 spaces, and before other text the last space on its own."""
    bytes_ = sorted({token for token in TOKENS if len(token) == 1})
    # a token for each power of two: longer parts than 512 would show
    runs = ["Ġ" * (1 << power) for power in range(12)]
    tokens = list(dict.fromkeys([*bytes_, *runs]))
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "jais-2",
        "tokenizer.ggml.tokens": [*tokens, "<s>"],
        "tokenizer.ggml.merges": [f"{run} {run}" for run in runs[:-1]],
        "tokenizer.ggml.bos_token_id": len(tokens),
    }
    tokenizer, _, _ = tokenizer_of(SimpleNamespace(metadata=metadata, path="m.gguf"))  # pyright: ignore[reportArgumentType]
    for count in (1, 2, 3, 7, 100, 511, 512, 513, 1023, 1500, 2048):
        expected, rest = list[int](), count - bool(end)
        while rest:
            expected.append(min(1 << (rest.bit_length() - 1), 512))
            rest -= expected[-1]
        expected += [1, 1] if end else []
        ids = tokenizer.encode(" " * count + end, add_special_tokens=False).ids
        assert [len(tokens[i]) for i in ids] == expected, count
