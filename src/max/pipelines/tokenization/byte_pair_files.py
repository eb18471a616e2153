"""Tokenizers of byte-level pairs: ``vocab.json`` with ``merges.txt``, tekken.json, and files of tiktoken."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max.pipelines.gguf.splits import SPLITS
from max.pipelines.tokenization.sequence_ends import token_number, token_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "byte_characters",
    "cohere",
    "gpt2",
    "gpt_neox",
    "qwen2",
    "qwen35",
    "roberta",
    "roberta_ends",
    "tekken",
    "tiktoken",
]


def _pairs(vocab: Path, merges: Path) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _has_prefix(config: Mapping[str, object]) -> bool:
    return bool(config.get("add_prefix_space", False))


def gpt2(vocab: Path, merges: Path, config: Mapping[str, object]) -> Tokenizer:
    """GPT-2's tokenizer.

    Args:
        vocab: vocab.json.
        merges: merges.txt.
        config: The keys of tokenizer_config.json.
    """
    from tokenizers import pre_tokenizers

    tokenizer = _pairs(vocab, merges)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=_has_prefix(config))
    return tokenizer


def gpt_neox(vocab: Path, merges: Path, config: Mapping[str, object]) -> Tokenizer:
    """GPT-NeoX's tokenizer: GPT-2's of composed characters.

    Args:
        vocab: vocab.json.
        merges: merges.txt.
        config: The keys of tokenizer_config.json.
    """
    from tokenizers import normalizers

    tokenizer = gpt2(vocab, merges, config)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def cohere(vocab: Path, merges: Path, config: Mapping[str, object]) -> Tokenizer:
    """Cohere's tokenizer: GPT-NeoX's with single digits.

    Args:
        vocab: vocab.json.
        merges: merges.txt.
        config: The keys of tokenizer_config.json.
    """
    from tokenizers import pre_tokenizers

    tokenizer = gpt_neox(vocab, merges, config)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=_has_prefix(config)),
        ]
    )
    return tokenizer


def _split(tokenizer: Tokenizer, pattern: str, prefix: bool = False) -> None:
    """Splits texts by a pattern before their bytes are merged."""
    from tokenizers import Regex, pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
        ]
    )


def qwen2(vocab: Path, merges: Path, config: Mapping[str, object], pre: str = "qwen2") -> Tokenizer:
    """The tokenizer of Qwen 2 and 3.

    Args:
        vocab: vocab.json.
        merges: merges.txt.
        config: The keys of tokenizer_config.json.
        pre: The key of the pattern in `SPLITS`.
    """
    from tokenizers import normalizers

    tokenizer = _pairs(vocab, merges)
    tokenizer.normalizer = normalizers.NFC()
    (pattern,) = SPLITS[pre].patterns
    _split(tokenizer, pattern, _has_prefix(config))
    return tokenizer


def qwen35(vocab: Path, merges: Path, config: Mapping[str, object]) -> Tokenizer:
    """The tokenizer of Qwen 3.5.

    Args:
        vocab: vocab.json.
        merges: merges.txt.
        config: The keys of tokenizer_config.json.
    """
    return qwen2(vocab, merges, config, "qwen35")


def roberta(vocab: Path, merges: Path, config: Mapping[str, object]) -> Tokenizer:
    """RoBERTa's tokenizer.

    Args:
        vocab: vocab.json.
        merges: merges.txt.
        config: The keys of tokenizer_config.json.
    """
    return gpt2(vocab, merges, config)


def roberta_ends(tokenizer: Tokenizer, config: Mapping[str, object]) -> None:
    """Adds the classifier's and the separating token to texts.

    Args:
        tokenizer: The tokenizer.
        config: The keys of tokenizer_config.json.
    """
    from tokenizers import processors

    last, first = token_text(config, "sep_token"), token_text(config, "cls_token")
    tokenizer.post_processor = processors.RobertaProcessing(
        (last, token_number(tokenizer, last)),
        (first, token_number(tokenizer, first)),
        bool(config.get("trim_offsets", True)),
        _has_prefix(config),
    )


# tokens by rank ------------------------------------------------------------------------------------


def _ranked_tokenizer(
    ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int]
) -> Tokenizer:
    """The tokenizer of byte strings by rank: of the pairs of a text that are tokens, the first is merged first.

    Args:
        ranks: The tokens' numbers, which rise with the rank.
        pattern: How texts are split.
        special: More tokens of the vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models

    # files of ranks have no merges: they follow from the ranks
    merges: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        inside = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(inside, key=lambda pair: ranks[pair[0]])
    vocab = {byte_characters(token): rank for token, rank in ranks.items()} | {**special}
    pairs = [(byte_characters(left), byte_characters(right)) for left, right in merges]
    # a word that is a token is not made of its merges, as in tiktoken
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=True))
    _split(tokenizer, pattern)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _decoded_bytes(text: str | bytes) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, TypeError) as error:
        raise ValueError(f"a token is not base64: {error}") from error


def tekken(values: Mapping[str, Any]) -> Tokenizer:
    """Mistral's tekken.json: the tokens by rank, after special ones.

    Args:
        values: The file's object.
    """
    config, special = values["config"], values["special_tokens"]
    names = {entry["rank"]: entry["token_str"] for entry in special}
    if sorted(names) != list(range(len(special))):
        raise ValueError("the ranks of special tokens are not 0, 1, 2, …")
    count = config.get("default_num_special_tokens") or len(names)
    fillers = (f"<SPECIAL_{number}>" for number in range(len(names), count))
    texts = [*(names[rank] for rank in sorted(names)), *fillers]
    size = config.get("default_vocab_size")
    # a file may have more tokens than the model
    entries = values["vocab"] if size is None else values["vocab"][: size - len(texts)]
    tokens = [_decoded_bytes(entry["token_bytes"]) for entry in entries]
    ranks = {token: rank + len(texts) for rank, token in enumerate(tokens)}
    numbers = {text: number for number, text in enumerate(texts)}
    tokenizer = _ranked_tokenizer(ranks, config["pattern"], numbers)
    tokenizer.add_special_tokens(texts)
    return tokenizer


_PATTERNS = {"QWenTokenizer": "qwen2", "TikTokenTokenizer": "kimi-k2"}
"""The splits of classes of models' own code; others have Llama 3's."""
_QWEN_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{n}|>" for n in range(205)),
)
_MOST_RESERVED = 1 << 16


def tiktoken(path: Path, config: Mapping[str, object]) -> Tokenizer:
    """A file of tiktoken: a line for each token, with its bytes in base64 and its rank.

    Args:
        path: The file.
        config: The keys of tokenizer_config.json.
    """
    name = str(config.get("tokenizer_class"))
    ranks: dict[bytes, int] = {}
    for line in filter(None, path.read_bytes().splitlines()):
        parts = line.split()
        if len(parts) != 2 or not parts[1].isdigit():
            raise ValueError(f"the line {line[:40]!r} has no token and rank")
        ranks[_decoded_bytes(parts[0])] = int(parts[1])
    if not ranks:
        raise ValueError("there are no tokens in it")
    (pattern,) = SPLITS[_PATTERNS.get(name, "llama3")].patterns
    tokenizer = _ranked_tokenizer(ranks, pattern, {})
    added = {int(n): entry["content"] for n, entry in _added_entries(config).items()}
    # the numbers of tokens have no gaps, so those that nobody names are reserved
    after = range(len(ranks), max(added, default=0) + 1)
    if len(after) > _MOST_RESERVED:
        raise ValueError(f"{len(ranks)} tokens have ranks, but one has the number {max(added)}")
    texts = [added.get(number, f"<|reserved_token_{number}|>") for number in after]
    # the class has them in its code, and no file names them
    texts += _QWEN_TOKENS if name == "QWenTokenizer" and not texts else ()
    tokenizer.add_special_tokens(texts)
    return tokenizer


def _added_entries(config: Mapping[str, Any]) -> Mapping[str, Any]:
    section = config.get("added_tokens_decoder") or {}
    if not all(number.isdecimal() and len(number) < 16 for number in section):
        raise ValueError("added_tokens_decoder has a key that is no number of a token")
    return section


_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + index) for index, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}
"""GPT-2's character for each byte: printable ones stand for themselves."""


def byte_characters(token: bytes) -> str:
    """GPT-2's text of bytes.

    Args:
        token: The bytes.
    """
    return "".join(_CHARACTERS[byte] for byte in token)
