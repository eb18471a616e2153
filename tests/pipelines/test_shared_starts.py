"""Texts that begin alike get the same tokens together as each by itself, though their start is encoded once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from max.pipelines.tokenization.hf_tokenizer import HFTokenizer
from max.pipelines.tokenization.shared_starts import _PATTERNS, has_lines, shared_start

GPT_2, LLAMA_3, QWEN = sorted(_PATTERNS, key=lambda pattern: ("{1,3}" in pattern, "(?i" in pattern))
PIECES = [
    "the", "Fox", "n't", "'s", "'S", " ", "  ", "\n", "\n\n", "\r\n", "\t", "7", "123456", "é", "e\u0301",
    "日本", "🙂", "...", "\n}", " \n", "\nlet", "\u00a0", "<|a|>", "\u2028", "Q: ", "'",
]  # fmt: skip
SPECIAL = AddedToken("<|a|>", special=True)


def byte_level(
    *before: Any, regex: bool = False, prefix: bool = False
) -> pre_tokenizers.PreTokenizer:
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)
    return pre_tokenizers.Sequence([*before, last]) if before else last


def split(pattern: str, behavior: str = "isolated", invert: bool = False) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def trained(
    pre: Any, normalizer: Any = None, added: AddedToken = SPECIAL, model: Any = None
) -> Tokenizer:
    tokenizer = Tokenizer(model or models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    draw = random.Random(5)
    texts = ["".join(draw.choices(PIECES, k=60)) for _ in range(60)]
    kind: Any = trainers.BpeTrainer if model is None else trainers.WordPieceTrainer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, kind(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_tokens([added])
    return tokenizer


KNOWN: dict[str, Callable[[], Tokenizer]] = {
    "gpt 2": lambda: trained(byte_level(regex=True)),
    "digits": lambda: trained(byte_level(pre_tokenizers.Digits(True), regex=True)),
    "gpt 2 as split": lambda: trained(byte_level(split(GPT_2))),
    "llama 3": lambda: trained(byte_level(split(LLAMA_3))),
    "qwen": lambda: trained(byte_level(split(QWEN)), normalizers.NFC()),
}
OTHERS: dict[str, Callable[[], Tokenizer]] = {
    "one piece": lambda: trained(byte_level()),
    "prefix": lambda: trained(byte_level(regex=True, prefix=True)),
    "other pattern": lambda: trained(byte_level(split(r"\n?\p{L}+"))),
    "removed": lambda: trained(byte_level(split(LLAMA_3, "removed", True))),
    "joined": lambda: trained(byte_level(split(LLAMA_3, "merged_with_next"))),
    "two patterns": lambda: trained(byte_level(split(LLAMA_3), split(QWEN))),
    "metaspace": lambda: trained(pre_tokenizers.Metaspace()),
    "lowercase": lambda: trained(byte_level(regex=True), normalizers.Lowercase()),
    "none": lambda: Tokenizer(models.BPE()),
    "word pieces": lambda: trained(
        byte_level(regex=True), model=models.WordPiece(unk_token="[UNK]")
    ),
    "stripped": lambda: trained(
        byte_level(regex=True), added=AddedToken("Q:", lstrip=True, special=True)
    ),
    "stripped behind": lambda: trained(
        byte_level(regex=True), added=AddedToken("x", rstrip=True, special=True)
    ),
    "words": lambda: trained(byte_level(regex=True), added=AddedToken("Fox", single_word=True)),
    "line": lambda: trained(byte_level(regex=True), added=AddedToken("\nF")),
    "dropout": lambda: dropping(),
}


def dropping() -> Tokenizer:
    tokenizer = trained(byte_level(regex=True))
    tokenizer.model.dropout = 0.0
    assert has_lines(tokenizer)
    tokenizer.model.dropout = 0.5
    return tokenizer


@pytest.mark.parametrize("kind", KNOWN)
def test_they_equal_those_of_each_text(kind: str) -> None:
    tokenizer = KNOWN[kind]()
    assert has_lines(tokenizer)
    ours, draw, shared = HFTokenizer(tokenizer, {}, {}), random.Random(kind), 0
    for _ in range(40):
        start = "".join(draw.choices(PIECES, k=draw.randrange(90, 200)))
        if draw.random() < 0.5:
            start += draw.choice(["\n", "\n\n", " \n", "\r\n", "<|a|>\n"])
        heads = [draw.choice(["the", "Fox", "Q: ", "é"]) for _ in range(2)]
        texts = [
            start + draw.choice(heads) + "".join(draw.choices(PIECES, k=draw.randrange(12)))
            for _ in range(draw.randrange(1, 6))
        ]
        shared += shared_start(texts) > 0
        for special in (False, True):
            expected = [tokenizer.encode(text, add_special_tokens=special).ids for text in texts]
            assert ours.encode_all(texts, special) == expected
    assert shared > 9


@pytest.mark.parametrize("kind", OTHERS)
def test_other_tokenizers_read_all_of_each_text(kind: str) -> None:
    tokenizer = OTHERS[kind]()
    assert not has_lines(tokenizer)
    if kind in ("none", "dropout", "word pieces"):
        return
    texts = ["the Fox 's\n" * 40 + end for end in ("Q: what", "Fox", "the")]
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert HFTokenizer(tokenizer, {}, {}).encode_all(texts, False) == expected


def test_the_start_is_encoded_once() -> None:
    ours = HFTokenizer(KNOWN["llama 3"](), {}, {})
    real, sizes = ours.backend_tokenizer, list[int]()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            sizes.append(sum(map(len, texts)))
            return real.encode_batch_fast(texts, **options)

    counting: Any = Counting()
    ours.backend_tokenizer = counting
    start = "the Fox " * 400 + "\n\n"
    ours.encode_all([start + end for end in ("Statement: a", "Question: b", "Statement: c")], False)
    assert sizes == [len(start) + 12 + 12 + 11 + 12]


@pytest.mark.parametrize(
    ("texts", "place"),
    [
        ([], 0),
        (["a" * 300 + "\nb"], 0),
        (["a" * 300 + "\nb", "a" * 300 + "\nc"], 301),
        (["a" * 300 + "\nb", "a" * 300 + "\nbc"], 301),
        (["a" * 300 + "\nb", "a" * 300 + "\n1"], 0),
        (["a" * 300 + "\nb", "a" * 300 + "\n"], 0),
        (["a" * 300 + "\nb", "a" * 300 + "\né"], 0),
        (["a" * 260 + "\nb" + "c" * 40 + "\n\n1", "a" * 260 + "\nb" + "c" * 40 + "\n\n1"], 261),
        (["a" * 300, "a" * 300], 0),
        (["\n" * 400, "\n" * 400], 0),
        (["a" * 255 + "\nb", "a" * 255 + "\nc"], 256),
        (["a" * 254 + "\nb", "a" * 254 + "\nc"], 0),
    ],
)
def test_where_a_shared_start_ends(texts: list[str], place: int) -> None:
    assert shared_start(texts) == place
