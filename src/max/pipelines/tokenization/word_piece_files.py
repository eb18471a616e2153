"""Tokenizers from ``vocab.txt``: WordPiece."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max.pipelines.tokenization.sequence_ends import token_number, token_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["bert", "bert_ends", "mpnet", "mpnet_ends"]


def bert(path: Path, config: dict[str, Any]) -> Tokenizer:
    """BERT's tokenizer.

    Args:
        path: vocab.txt.
        config: The keys of tokenizer_config.json.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    lines = path.read_text(encoding="utf-8").split("\n")
    lines = lines[:-1] if not lines[-1] else lines
    vocab = {line.rstrip("\r"): number for number, line in enumerate(lines)}
    unknown = token_text(config, "unk_token")
    if unknown not in vocab:
        raise ValueError(
            f"the vocabulary lacks the token {unknown!r}, which stands for unknown words"
        )
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
        lowercase=bool(config.get("do_lower_case", True)),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def mpnet(path: Path, config: dict[str, Any]) -> Tokenizer:
    """MPNet's tokenizer.

    Args:
        path: vocab.txt.
        config: The keys of tokenizer_config.json; the mask becomes a token that takes the space before it.
    """
    if isinstance(config["mask_token"], str):
        config["mask_token"] = {"content": config["mask_token"], "lstrip": True}
    return bert(path, config)


def bert_ends(tokenizer: Tokenizer, config: Mapping[str, object]) -> None:
    """Adds the classifier's and the separating token to texts.

    Args:
        tokenizer: The tokenizer.
        config: The keys of tokenizer_config.json.
    """
    from tokenizers import processors

    first, last = token_text(config, "cls_token"), token_text(config, "sep_token")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(text, token_number(tokenizer, text)) for text in (first, last)],
    )


def mpnet_ends(tokenizer: Tokenizer, config: Mapping[str, object]) -> None:
    """As `bert_ends`, with two separating tokens between the texts of a pair.

    Args:
        tokenizer: The tokenizer.
        config: The keys of tokenizer_config.json.
    """
    from tokenizers import processors

    last, first = token_text(config, "sep_token"), token_text(config, "cls_token")
    tokenizer.post_processor = processors.RobertaProcessing(
        (last, token_number(tokenizer, last)), (first, token_number(tokenizer, first)), True, False
    )
