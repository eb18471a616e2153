"""Texts get the same tokens in parts, new or known, as the tokenizers package gives them as a whole."""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from max.pipelines.core.exceptions import PromptTooLongError
from max.pipelines.tokenization import known_parts
from max.pipelines.tokenization.hf_tokenizer import HFTokenizer
from max.pipelines.tokenization.known_parts import KnownParts, _size

PIECES = [
    "the", "Fox", " ", "  ", "\n", "7", "é", "e\u0301", "日本", "🙂", "...", "<", "|", "a", "|>", "<|a", "x",
    "<|a|>", "<|b|>", "<|c|>", "<|a|><|b|>", "_", "\u2581", "ſ", "A", "<|A|>",
]  # fmt: skip


def special(content: str, **more: Any) -> AddedToken:
    return AddedToken(content, special=True, normalized=more.pop("normalized", False), **more)


def trained(
    pre: Any, added: Iterable[AddedToken], normalizer: Any = None, model: str = "BPE"
) -> Tokenizer:
    make, trainer = {
        "BPE": (models.BPE, trainers.BpeTrainer),
        "Unigram": (models.Unigram, trainers.UnigramTrainer),
        "WordPiece": (models.WordPiece, trainers.WordPieceTrainer),
    }[model]
    tokenizer = Tokenizer(make())
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    draw = random.Random(5)
    texts = ["".join(draw.choices(PIECES, k=60)) for _ in range(40)]
    more = {"unk_token": "<unk>"} if model == "Unigram" else {}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainer(
            vocab_size=500,
            initial_alphabet=alphabet,
            show_progress=False,
            special_tokens=["<unk>"],
            **more,
        ),
    )
    tokenizer.add_tokens(list(added))
    return tokenizer


A, B = special("<|a|>"), special("<|b|>")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA_2 = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
# the marks that texts are cut at, and the tokenizer
CASES = {
    "bytes": ({"<|a|>", "<|b|>"}, lambda: trained(BYTES, [A, B])),
    "prefix space": (
        {"<|a|>"},
        lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True), [A]),
    ),
    "first word": (
        {"<|a|>", "<|b|>"},
        lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="first"), [A, B], model="Unigram"),
    ),
    "each word": (
        {"<|a|>"},
        lambda: trained(
            pre_tokenizers.Metaspace(prepend_scheme="always"), [A, AddedToken("Fox")], model="Unigram"
        ),
    ),
    "no pieces": ({"<|a|>", "<|b|>"}, lambda: trained(None, [A, B], LLAMA_2)),
    "composed": ({"<|a|>"}, lambda: trained(BYTES, [A], normalizers.NFC())),
    "words": (
        {"<|a|>", "<|b|>"},
        lambda: trained(
            pre_tokenizers.BertPreTokenizer(),
            [A, B],
            normalizers.BertNormalizer(lowercase=True),
            "WordPiece",
        ),
    ),
    "normalized": (
        {"<|a|>"},
        lambda: trained(BYTES, [A, special("<|b|>", normalized=True)], normalizers.Lowercase()),
    ),
    "takes spaces behind": (
        {"<|a|>", "<|b|>"},
        lambda: trained(BYTES, [A, special("<|b|>", rstrip=True)]),
    ),
    "takes spaces before": ({"<|b|>"}, lambda: trained(BYTES, [special("<|a|>", lstrip=True), B])),
    "ends within": ({"<|b|>"}, lambda: trained(BYTES, [A, B, AddedToken("x<|a", normalized=False)])),
    "is within": ({"<|b|>"}, lambda: trained(BYTES, [A, B, AddedToken("the<|a|>", normalized=False)])),
    "begins alike": ({"<|a|>", "<|a|><|b|>"}, lambda: trained(BYTES, [A, special("<|a|><|b|>")])),
    "no special": ({"<|b|>"}, lambda: trained(BYTES, [AddedToken("<|a|>", normalized=False), B])),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_whole_text(name: str) -> None:
    marks, make = CASES[name]
    backend = make()
    tokenizer = HFTokenizer(backend, {}, {})
    draw = random.Random(name)
    cut = 0
    for _ in range(300):
        # short ones of few pieces, so that parts occur again
        text = "".join(draw.choices(PIECES, k=draw.choice((2, 4, 8, 40))))
        expected = backend.encode(text, add_special_tokens=False).ids
        parts = tokenizer._known_parts.encode(text, "")
        assert [token for part in parts for token in part] in ([], expected), text
        assert tokenizer.encode(text, False, None, "") == expected, text
        places = sum(text[1:].count(mark) for mark in marks)
        assert bool(parts) == (places > 0), text
        cut += bool(parts)
    assert cut > 60
    # a long text is encoded by another function of the package
    text = "".join(draw.choices(PIECES, k=5000))
    expected = backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, False, None, "long") == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: trained(BYTES, [special("a", single_word=True), A]),
        lambda: trained(BYTES, [AddedToken("Fox")]),
        lambda: trained(BYTES, [special("<")]),
        lambda: trained(BYTES, [special("<|<")]),  # it may begin within itself
    ],
)
def test_texts_that_cannot_be_cut(make: Any) -> None:
    backend = make()
    tokenizer = HFTokenizer(backend, {}, {})
    text = "a Fox<|a|>a<|<|<|a|>Fox<|<the"
    assert tokenizer._known_parts.encode(text, "") == []
    assert tokenizer.encode(text, False, None, "") == backend.encode(text).ids


def counted(parts: KnownParts) -> list[list[str]]:
    """The lists of parts that are encoded from now on."""
    calls: list[list[str]] = []
    tokens = parts._tokens
    parts._tokens = lambda new: calls.append(list(new)) or tokens(new)  # type: ignore[method-assign]
    return calls


def test_known_parts_are_encoded_once_for_each_salt() -> None:
    parts = HFTokenizer(trained(BYTES, [A, B]), {}, {})._known_parts
    calls = counted(parts)
    text = "<|a|>the<|b|><|a|>Fox<|b|><|a|>the<|b|>"
    parts.encode(text, "one")
    assert calls == [["<|a|>the", "<|b|>", "<|a|>Fox"]]
    parts.encode(text + "x", "one")
    assert calls[1:] == [["<|b|>x"]]
    parts.encode(text, "two")
    assert calls[2:] == [["<|a|>the", "<|b|>", "<|a|>Fox"]]
    parts.encode(text, "two")
    parts.encode(text, "one")
    assert len(calls) == 3


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_parts, "MOST_BYTES", 40_000)
    parts = HFTokenizer(trained(BYTES, [A, B]), {}, {})._known_parts
    calls = counted(parts)
    for number in range(200):
        parts.encode(f"<|a|>kept<|b|>{number}", "")
        taken = [_size(key, tokens) for key, tokens in parts._parts.items()]
        assert parts._bytes == sum(taken) <= 40_000
    assert 50 < len(parts._parts) < 150
    # the part of each text is still known, an old one is not
    assert sum(part == "<|a|>kept" for call in calls for part in call) == 1
    calls.clear()
    parts.encode("<|a|>kept<|b|>0", "")
    assert calls == [["<|b|>0"]]
    # a part that would take the place of many is not kept
    before = parts._bytes
    parts.encode("<|a|>" + "x" * 11_000 + "<|b|>0", "")
    assert parts._bytes == before
    # nor is a text cut into too many parts
    assert parts.encode("<|a|>" * 5000, "") == []


def test_a_text_with_too_many_tokens_is_refused() -> None:
    tokenizer = HFTokenizer(trained(BYTES, [A, B]), {}, {})
    text = "<|a|>the<|b|><|a|>Fox"
    size = len(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
    for _ in range(2):  # new parts, and known ones
        assert len(tokenizer.encode(text, False, size, "")) == size
        with pytest.raises(PromptTooLongError) as found:
            tokenizer.encode(text, False, size - 1, "")
        assert (found.value.size, found.value.limit) == (str(size), size - 1)


def test_threads_share_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_parts, "MOST_BYTES", 8_000)
    backend = trained(BYTES, [A, B])
    tokenizer = HFTokenizer(backend, {}, {})
    draw = random.Random(3)
    texts = ["".join(draw.choices(PIECES, k=12)) for _ in range(30)]
    expected = {text: backend.encode(text, add_special_tokens=False).ids for text in texts}

    def run(seed: int) -> bool:
        own = random.Random(seed)
        return all(
            tokenizer.encode(text, False, None, "") == expected[text]
            for text in own.choices(texts, k=300)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))
    parts = tokenizer._known_parts
    assert parts._bytes == sum(_size(*each) for each in parts._parts.items()) <= 8_000
