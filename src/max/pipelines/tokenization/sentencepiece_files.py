"""Tokenizers from SentencePiece models: pairs with bytes (Llama, Gemma), and the likeliest pieces (T5, XLM-R)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from max.pipelines.tokenization.sentencepiece_model import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    SentencePieceModel,
)
from max.pipelines.tokenization.sequence_ends import token_number, token_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "as_stated",
    "camembert",
    "code_llama",
    "gemma",
    "llama",
    "merges_of",
    "t5",
    "t5_ends",
    "xlm_roberta",
    "xlm_roberta_ends",
]

_SPACE = "\u2581"


def merges_of(
    vocab: Mapping[str, int], skipped_pieces: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, by the number of the piece, then by the lengths of the two.

    Args:
        vocab: The numbers of the pieces.
        skipped_pieces: Pieces that take no part.
    """
    # the files have no merges: they follow from the order of the pieces
    left_out = {*skipped_pieces}
    ranked: list[tuple[tuple[int, int, int], str, str]] = []
    for piece, number in vocab.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in vocab and right in vocab and left_out.isdisjoint((piece, left, right)):
                ranked.append(((number, len(left), len(right)), left, right))
    return [(left, right) for _, left, right in sorted(ranked)]


def _add_pieces(
    model: SentencePieceModel, config: dict[str, Any], more: Sequence[str] = ()
) -> None:
    """Names the pieces that texts have as a whole, unless the config states its own list of such tokens."""
    pieces = [
        {"content": piece.text, "special": piece.kind == CONTROL, "normalized": False}
        for piece in model.pieces
        if piece.kind in (CONTROL, USER_DEFINED)
    ]
    config.setdefault("extra_special_tokens", [*pieces, *more])


# pairs ---------------------------------------------------------------------------------------------


def _byte_pairs(model: SentencePieceModel, unknown: str | None, strips: bool) -> Tokenizer:
    """The pairs of a model, whose characters without a piece become bytes."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {piece.text: number for number, piece in enumerate(model.pieces)}
    options: dict[str, Any] = {} if unknown is None else {"unk_token": unknown}
    merges = merges_of(vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, **options)
    )
    undo: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    # the space before a text that the prefix has added
    if strips:
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def llama(model: SentencePieceModel, config: dict[str, Any]) -> Tokenizer:
    """The tokenizer of Llama 1 and 2.

    Args:
        model: The model file.
        config: The keys of tokenizer_config.json; the model's special tokens are added.
    """
    from tokenizers import pre_tokenizers

    prefix = config.get("add_prefix_space") is not False
    tokenizer = _byte_pairs(model, None, prefix)
    scheme = ("always" if config.get("legacy") else "first") if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, scheme, split=False)
    _add_pieces(model, config)
    return tokenizer


_INFILLING = {
    "prefix_token": "\u2581<PRE>",
    "middle_token": "\u2581<MID>",
    "suffix_token": "\u2581<SUF>",
    "eot_token": "\u2581<EOT>",
    "fill_token": "<FILL_ME>",
}


def code_llama(model: SentencePieceModel, config: dict[str, Any]) -> Tokenizer:
    """Code Llama's tokenizer: Llama's, with tokens to fill gaps.

    Args:
        model: The model file.
        config: The keys of tokenizer_config.json; the model's special tokens are added.
    """
    from tokenizers import pre_tokenizers

    prefix = config.get("add_prefix_space") is not False
    tokenizer = _byte_pairs(model, token_text(config, "unk_token"), True)
    scheme = "first" if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, scheme, split=False)
    for name, text in _INFILLING.items():
        config.setdefault(name, text)
    _add_pieces(model, config)
    return tokenizer


def gemma(model: SentencePieceModel, config: dict[str, Any]) -> Tokenizer:
    """The tokenizer of Gemma 1 to 3.

    Args:
        model: The model file.
        config: The keys of tokenizer_config.json; the model's special tokens are added.
    """
    from tokenizers import normalizers, pre_tokenizers

    tokenizer = _byte_pairs(model, token_text(config, "unk_token"), False)
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    _add_pieces(model, config)
    return tokenizer


# the likeliest pieces ------------------------------------------------------------------------------


def _unigram_tokenizer(
    model: SentencePieceModel, vocab: Sequence[tuple[str, float]], unknown: int, prefix: bool
) -> Tokenizer:
    """The likeliest pieces of each word of a text."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    if model.algorithm != 1:
        raise ValueError("it merges pairs; expected a model of the likeliest pieces (unigram)")
    tokenizer = Tokenizer(models.Unigram([*vocab], unknown, byte_fallback=False))
    if model.charsmap:
        tokenizer.normalizer = normalizers.Precompiled(model.charsmap)
    scheme = "always" if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(_SPACE, scheme)]
    )
    tokenizer.decoder = decoders.Metaspace(_SPACE, scheme)
    return tokenizer


def _scored_pieces(model: SentencePieceModel, first: int = 0) -> list[tuple[str, float]]:
    return [(piece.text, piece.score) for piece in model.pieces[first:]]


def _has_prefix(config: Mapping[str, object]) -> bool:
    return bool(config.get("add_prefix_space", True))


def xlm_roberta(model: SentencePieceModel, config: dict[str, Any]) -> Tokenizer:
    """XLM-R's tokenizer, whose first tokens are fairseq's.

    Args:
        model: The model file.
        config: The keys of tokenizer_config.json; the model's special tokens are added.
    """
    first = [token_text(config, f"{name}_token") for name in ("bos", "pad", "eos", "unk")]
    # fairseq's four first tokens replace the file's three
    vocab = [(text, 0.0) for text in first] + _scored_pieces(model, 3)
    vocab.append((token_text(config, "mask_token"), 0.0))
    _add_pieces(model, config)
    return _unigram_tokenizer(model, vocab, 3, _has_prefix(config))


def camembert(model: SentencePieceModel, config: dict[str, Any]) -> Tokenizer:
    """CamemBERT's tokenizer, whose first tokens are fairseq's.

    Args:
        model: The model file.
        config: The keys of tokenizer_config.json; the model's special tokens are added.
    """
    pad, unknown, mask = (token_text(config, f"{name}_token") for name in ("pad", "unk", "mask"))
    vocab = [("<s>NOTUSED", 0.0), (pad, 0.0), ("</s>NOTUSED", 0.0), (unknown, 0.0)]
    vocab += [("<unk>NOTUSED", -100.0), *_scored_pieces(model, 1), (mask, 0.0)]
    _add_pieces(model, config)
    if isinstance(config["mask_token"], str):
        config["mask_token"] = {"content": mask, "lstrip": True}
    # the first one, as the file may have the same text again
    number = next(number for number, (text, _) in enumerate(vocab) if text == unknown)
    return _unigram_tokenizer(model, vocab, number, _has_prefix(config))


def xlm_roberta_ends(tokenizer: Tokenizer, config: Mapping[str, object]) -> None:
    """Adds the begin and the end token to texts, and an end token between the texts of a pair.

    Args:
        tokenizer: The tokenizer.
        config: The keys of tokenizer_config.json.
    """
    from tokenizers import processors

    first, last = token_text(config, "bos_token"), token_text(config, "eos_token")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", last, last, "$B", last],
        special_tokens=[(text, token_number(tokenizer, text)) for text in {first, last}],
    )


_MOST_SENTINELS = 1 << 16


def t5(model: SentencePieceModel, config: dict[str, Any]) -> Tokenizer:
    """T5's tokenizer, with sentinels after the model's pieces.

    Args:
        model: The model file.
        config: The keys of tokenizer_config.json; the model's special tokens are added.
    """
    count = config.get("extra_ids", 100)
    if type(count) is not int or not 0 <= count <= _MOST_SENTINELS:
        raise ValueError(f"extra_ids is {count!r}; expected an integer up to {_MOST_SENTINELS}")
    sentinels = [f"<extra_id_{number}>" for number in range(count)]
    # in falling order: `<extra_id_0>` is the last token
    vocab = _scored_pieces(model) + [(text, 0.0) for text in reversed(sentinels)]
    _add_pieces(model, config, sentinels)
    return _unigram_tokenizer(model, vocab, 2, True)


def t5_ends(tokenizer: Tokenizer, config: Mapping[str, object]) -> None:
    """Adds the end token to texts.

    Args:
        tokenizer: The tokenizer.
        config: The keys of tokenizer_config.json.
    """
    from tokenizers import processors

    last = token_text(config, "eos_token")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", last],
        pair=["$A", last, "$B", last],
        special_tokens=[(last, token_number(tokenizer, last))],
    )


# as the file states --------------------------------------------------------------------------------


def _merges_by_score(model: SentencePieceModel, texts: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of normal pieces that make one, those of the highest score first."""
    normal = {
        text: (-piece.score, number)
        for number, (text, piece) in enumerate(zip(texts, model.pieces, strict=True))
        if piece.kind == NORMAL
    }
    ranked: list[tuple[tuple[float, int], str, str]] = []
    for text, rank in normal.items():
        for at in range(1, len(text)):
            if text[:at] in normal and text[at:] in normal:
                ranked.append((rank, text[:at], text[at:]))
    return [(left, right) for _, left, right in sorted(ranked)]


def _model_as_stated(model: SentencePieceModel, texts: Sequence[str], keeps: bool) -> Tokenizer:
    from tokenizers import Tokenizer, models

    if model.algorithm == 1:
        scored = _scored_pieces(model)
        return Tokenizer(models.Unigram(scored, model.unknown, byte_fallback=model.byte_fallback))
    return Tokenizer(
        models.BPE(
            vocab={text: number for number, text in enumerate(texts)},
            merges=_merges_by_score(model, texts),
            unk_token=model.unknown_text,
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
            ignore_merges=keeps,
        )
    )


def _renamed_pieces(model: SentencePieceModel, config: Mapping[str, Any]) -> list[str]:
    """The texts of the pieces, where added_tokens_decoder replaces some: of placeholders, by their numbers."""
    texts = [piece.text for piece in model.pieces]
    added: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
    names = {int(number): entry["content"] for number, entry in added.items()}
    if model.algorithm == 1 or not names:
        return texts
    kept = {text for number, text in enumerate(texts) if number not in names}
    return [
        names[number] if number in names and names[number] not in kept else text
        for number, text in enumerate(texts)
    ]


def as_stated(model: SentencePieceModel, config: dict[str, Any]) -> Tokenizer:
    """The tokenizer that the file itself states: its algorithm, its normalizer and its special pieces.

    Args:
        model: The model file.
        config: The keys of tokenizer_config.json; the model's special tokens are added.
    """
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    texts = _renamed_pieces(model, config)
    whole = [t for t, piece in zip(texts, model.pieces, strict=True) if piece.kind == USER_DEFINED]
    tokenizer = _model_as_stated(model, texts, bool(whole))
    legacy = bool(config.get("legacy", True))
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.trims_spaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if model.escapes_spaces:
        steps.append(normalizers.Replace(" ", _SPACE))
    if model.dummy_prefix and legacy:
        # the pre-tokenizer puts no prefix before one that is there
        steps.append(normalizers.Replace(Regex(rf"\A{_SPACE}"), _SPACE * 2))
    tokenizer.normalizer = normalizers.Sequence(steps)
    parts: list[Any] = []
    if model.dummy_prefix:
        scheme = "always" if legacy else "first"
        parts.append(pre_tokenizers.Metaspace(_SPACE, scheme, split=False))
    if whole:
        # an expression takes the first alternative that fits
        longest_first = sorted(whole, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first))
        parts.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    if parts:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    undo: list[Any] = [decoders.Replace(_SPACE, " ")]
    undo += [decoders.ByteFallback()] if model.byte_fallback else []
    undo += [decoders.Fuse()] if model.byte_fallback or model.dummy_prefix else []
    undo += [decoders.Strip(" ", 1, 0)] if model.dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(undo)
    _add_special(model, config, {*whole})
    return tokenizer


def _add_special(model: SentencePieceModel, config: dict[str, Any], whole: set[str]) -> None:
    """Names the model's special tokens; texts are cut at added tokens before a prefix is put to the parts."""
    stated = (
        ("bos_token", model.begin, model.begin_text),
        ("eos_token", model.end, model.end_text),
        ("unk_token", model.unknown, model.unknown_text),
    )
    for name, number, text in stated:
        if number >= 0:
            config.setdefault(name, text)
    _add_pieces(model, config)
    if isinstance(config["extra_special_tokens"], list):
        config["extra_special_tokens"] = [
            entry
            for entry in config["extra_special_tokens"]
            if not isinstance(entry, Mapping) or entry["content"] not in whole
        ]
    if model.dummy_prefix and config.get("added_tokens_decoder"):
        config["added_tokens_decoder"] = {
            number: {**entry, "normalized": False}
            for number, entry in config["added_tokens_decoder"].items()
        }
