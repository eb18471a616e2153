"""Converts a model's tokenizer.json to GGUF metadata: the inverse of `tokenizer.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from max.pipelines.checkpoints.hub import HuggingFaceRepo
from max.pipelines.checkpoints.model_files import read_json
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.splits import SPLITS

__all__ = ["tokenizer_metadata"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_REMEDY = "`max quantize` writes byte-level pairs whose splits have a `pre` name, and SentencePiece pairs."
_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_metadata(repo: HuggingFaceRepo, rows: int) -> dict[str, Any]:
    """The metadata of a model's tokenizer.

    Args:
        repo: The model.
        rows: The number of rows of its embedding; unused tokens are appended up to it.

    Raises:
        ModelFilesError: The model has no tokenizer.json, or one that GGUF files cannot describe.
    """
    path = repo.file("tokenizer.json")
    if path is None:
        raise ModelFilesError(f"{repo.repo_id} has no tokenizer.json", _REMEDY)
    values = read_json(path)
    model: dict[str, Any] = values.get("model") or {}
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise ModelFilesError(f"{path}: the tokenizer is of {model.get('type')!r}", _REMEDY)
    # a pair is a text with a space, or in newer files a list
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    metadata = _byte_level(values, merges) if not model.get("byte_fallback") else {}
    numbers: dict[Any, int] = {**model["vocab"]}
    added: list[dict[str, Any]] = values.get("added_tokens") or []
    numbers |= {token["content"]: token["id"] for token in added}
    texts = {number: text for text, number in numbers.items()}
    # a file names each row of the embedding, also those that no text has
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(max(rows, len(numbers)))]
    kinds = {token["id"]: _CONTROL if token["special"] else _USER_DEFINED for token in added}
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.token_type"] = [
        kinds.get(number, _kind(text, number in texts)) for number, text in enumerate(tokens)
    ]
    if not metadata.get("tokenizer.ggml.merges"):
        metadata |= _sentencepiece(values, model, merges, tokens)
        if (unknown := numbers.get(model.get("unk_token"))) is not None:
            metadata["tokenizer.ggml.token_type"][unknown] = _UNKNOWN
    return metadata | _special_tokens(repo, values, numbers)


def _kind(text: str, exists: bool) -> int:
    if not exists:
        return _UNUSED
    return _BYTE if re.fullmatch("<0x[0-9A-F]{2}>", text) else _NORMAL


def _byte_level(values: dict[str, Any], merges: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """The keys of a byte-level tokenizer, with the `pre` name that splits text in the same way."""
    patterns = _patterns(values.get("pre_tokenizer") or {})
    ignores = bool(values["model"].get("ignore_merges"))
    fitting = [
        name
        for name, split in SPLITS.items()
        if split.patterns == patterns and split.ignore_merges == ignores and name != "default"
    ]
    if not fitting:
        raise ModelFilesError("no `pre` name of GGUF files splits as tokenizer.json does", _REMEDY)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": fitting[0],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
    }


def _patterns(step: dict[str, Any]) -> tuple[str, ...]:
    """The patterns by which a pre-tokenizer splits; a pattern that no family has if the step is of another kind."""
    gpt2 = SPLITS["gpt-2"].patterns
    match step.get("type"):
        case "Sequence":
            return tuple(p for part in step["pretokenizers"] for p in _patterns(part))
        case "ByteLevel" if not step.get("add_prefix_space"):
            return gpt2 if step.get("use_regex", True) else ()
        case "Digits" if step.get("individual_digits"):
            return (r"\p{N}",)
        case "Split" if step.get("behavior") == "Isolated" and not step.get("invert"):
            # no family splits at a literal text
            return (step["pattern"].get("Regex", ""),)
        case other:
            return (f"{other}",)


def _sentencepiece(
    values: Mapping[str, object],
    model: Mapping[str, object],
    merges: Sequence[tuple[str, ...]],
    tokens: Sequence[str],
) -> dict[str, Any]:
    """SentencePiece BPE: the rank of a merge becomes the score of the merged token."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        # of several merges that make a token the first counts
        ranks.setdefault("".join(pair), rank)
    normalizer = json.dumps(values.get("normalizer")) + json.dumps(values.get("pre_tokenizer"))
    prefix = "Prepend" in normalizer or '"prepend_scheme": "first"' in normalizer
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [-float(ranks.get(text, len(merges))) for text in tokens],
        "tokenizer.ggml.add_space_prefix": prefix or '"prepend_scheme": "always"' in normalizer,
    }


def _special_tokens(
    repo: HuggingFaceRepo, values: Mapping[str, object], numbers: dict[str, int]
) -> dict[str, Any]:
    """The metadata of special tokens, of the begin token flag, and of the chat template."""
    path = repo.file("tokenizer_config.json")
    config = {} if path is None else read_json(path)
    metadata: dict[str, Any] = {}
    for key, name in _KEYS.items():
        token = config.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text in numbers:
            metadata[f"tokenizer.ggml.{name}_token_id"] = numbers[text]
    bos = config.get("bos_token")
    text = bos.get("content") if isinstance(bos, dict) else bos
    processor = json.dumps(values.get("post_processor"), ensure_ascii=False)
    metadata["tokenizer.ggml.add_bos_token"] = (
        isinstance(text, str) and json.dumps(text, ensure_ascii=False) in processor
    )
    template = config.get("chat_template")
    # a template in a file of its own replaces that of the config
    if repo.file_exists("chat_template.json") and (file := repo.file("chat_template.json")):
        template = read_json(file).get("chat_template", template)
    if repo.file_exists("chat_template.jinja") and (file := repo.file("chat_template.jinja")):
        template = file.read_text("utf-8")
    if isinstance(template, str):
        metadata["tokenizer.chat_template"] = template
    return metadata
