"""Tokenizers of folders without tokenizer.json, built from their older files as transformers builds them.

============================================  =============================================================
files                                         classes
============================================  =============================================================
``vocab.json`` with ``merges.txt``            GPT-2, Qwen 2, RoBERTa: byte-level pairs
``vocab.txt``                                 BERT, DistilBERT: WordPiece
``tokenizer.model``                           Llama, Gemma: SentencePiece's pairs
``tekken.json``                               Mistral: byte-level pairs by rank
============================================  =============================================================

The class is ``tokenizer_class`` of tokenizer_config.json, else that of the model's type.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max.pipelines.checkpoints.damaged_files import remedy_for
from max.pipelines.checkpoints.hub import HuggingFaceRepo
from max.pipelines.checkpoints.json_files import read_json
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.splits import SPLITS
from max.pipelines.tokenization.sentencepiece_model import CONTROL, USER_DEFINED, read_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["tokenizer_of_older_files"]

_SPACE = "\u2581"
_CLASS_OF_TYPE = {
    **dict.fromkeys(("gpt2", "gpt-sw3", "opt"), "GPT2Tokenizer"),
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("bert", "distilbert"), "BertTokenizer"),
    **dict.fromkeys(("llama", "mistral", "mixtral"), "LlamaTokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "GemmaTokenizer"),
    "roberta": "RobertaTokenizer",
}
_SPECIAL: dict[str, dict[str, str]] = {
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "RobertaTokenizer": {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "sep_token": "</s>",
        "cls_token": "<s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "BertTokenizer": {
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    },
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
}
"""The special tokens of each class where the config states none."""


def tokenizer_of_older_files(
    repo: HuggingFaceRepo, config: Mapping[str, Any]
) -> tuple[Tokenizer, dict[str, Any]] | None:
    """The tokenizer of a model without tokenizer.json, and its config with the class's special tokens.

    Args:
        repo: The model.
        config: The object of tokenizer_config.json.

    Returns:
        None if the files or the class are not among those above.

    Raises:
        ModelFilesError: A file is damaged.
    """
    name = _class_name(repo, config)
    if repo.file_exists("tekken.json") and (path := repo.file("tekken.json")):
        return _guarded(path, lambda: (_tekken(read_json(path)), dict(config)))
    builders: dict[str, tuple[tuple[str, ...], Callable[..., Tokenizer]]] = {
        "GPT2Tokenizer": (("vocab.json", "merges.txt"), _gpt2),
        "Qwen2Tokenizer": (("vocab.json", "merges.txt"), _qwen2),
        "RobertaTokenizer": (("vocab.json", "merges.txt"), _roberta),
        "BertTokenizer": (("vocab.txt",), _bert),
        "LlamaTokenizer": (("tokenizer.model",), _llama),
        "GemmaTokenizer": (("tokenizer.model",), _gemma),
    }
    if name not in builders:
        return None
    files, build = builders[name]
    paths = [repo.file(file) for file in files if repo.file_exists(file)]
    found = [path for path in paths if path is not None]
    if len(found) < len(files):
        return None
    whole = {**_SPECIAL[name], **_stated_special(repo, config)}
    return _guarded(found[0], lambda: (build(*found, whole), whole))


def _class_name(repo: HuggingFaceRepo, config: Mapping[str, Any]) -> str | None:
    name = config.get("tokenizer_class")
    if not isinstance(name, str):
        path = repo.file("config.json")
        kind = read_json(path).get("model_type") if path is not None else None
        name = _CLASS_OF_TYPE.get(kind, "") if isinstance(kind, str) else ""
    name = name.removesuffix("Fast")
    return {"DistilBertTokenizer": "BertTokenizer"}.get(name, name)


def _stated_special(repo: HuggingFaceRepo, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the tokens of special_tokens_map.json and added_tokens.json, which count after it."""
    stated = {key: value for key, value in config.items() if value is not None}
    if repo.file_exists("special_tokens_map.json") and (path := repo.file("special_tokens_map.json")):  # fmt: skip
        stated = {**read_json(path), **stated}
    has_added = repo.file_exists("added_tokens.json") and "added_tokens_decoder" not in stated
    if has_added and (path := repo.file("added_tokens.json")):
        numbers = read_json(path)
        if not all(type(number) is int for number in numbers.values()):
            raise ModelFilesError(f"{path} has a token whose number is none", remedy_for(path))
        stated["added_tokens_decoder"] = {
            str(number): {"content": text, "special": True, "normalized": False}
            for text, number in numbers.items()
        }
    return stated


def _guarded(path: Path, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except ModelFilesError:
        raise
    except Exception as error:  # the package raises bare Exception; values may be of any type
        raise ModelFilesError(f"{path} is no tokenizer: {error}", remedy_for(path)) from error


def _text(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key)
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else ""


# byte-level pairs ----------------------------------------------------------------------------------


def _pairs(vocab: Path, merges: Path) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gpt2(vocab: Path, merges: Path, config: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import pre_tokenizers

    tokenizer = _pairs(vocab, merges)
    prefix = bool(config.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    _add_ends(tokenizer, config)
    return tokenizer


def _qwen2(vocab: Path, merges: Path, config: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Regex, normalizers, pre_tokenizers

    tokenizer = _pairs(vocab, merges)
    prefix = bool(config.get("add_prefix_space", False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLITS["qwen2"].patterns[0]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
        ]
    )
    _add_ends(tokenizer, config)
    return tokenizer


def _roberta(vocab: Path, merges: Path, config: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import pre_tokenizers, processors

    tokenizer = _pairs(vocab, merges)
    prefix = bool(config.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    last, first = _text(config, "sep_token"), _text(config, "cls_token")
    trims = bool(config.get("trim_offsets", True))
    tokenizer.post_processor = processors.RobertaProcessing(
        (last, _number(tokenizer, last)), (first, _number(tokenizer, first)), trims, prefix
    )
    return tokenizer


def _number(tokenizer: Tokenizer, text: str) -> int:
    number = tokenizer.token_to_id(text)
    if number is None:
        raise ValueError(f"the vocabulary lacks the token {text!r}")
    return number


def _add_ends(tokenizer: Tokenizer, config: Mapping[str, Any], begins: bool = False) -> None:
    """Adds the begin and end tokens that the config asks for; tokens that are no pieces are added first."""
    from tokenizers import AddedToken, processors

    first = _text(config, "bos_token") if config.get("add_bos_token", begins) else ""
    last = _text(config, "eos_token") if config.get("add_eos_token", False) else ""
    for text in filter(None, (first, last)):
        if tokenizer.token_to_id(text) is None:
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    if not first and not last:
        return
    single = [*([f"{first}:0"] if first else []), "$A:0", *([f"{last}:0"] if last else [])]
    pair = [part.replace(":0", ":1").replace("$A", "$B") for part in single]
    ends = [(text, _number(tokenizer, text)) for text in dict.fromkeys((first, last)) if text]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, *pair], special_tokens=ends
    )


def _tekken(values: Mapping[str, Any]) -> Tokenizer:
    """Mistral's tekken.json: the tokens by rank, after special ones."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    config, special = values["config"], values["special_tokens"]
    names = {entry["rank"]: entry["token_str"] for entry in special}
    if sorted(names) != list(range(len(special))):
        raise ValueError("the ranks of special tokens are not 0, 1, 2, …")
    count = config.get("default_num_special_tokens") or len(names)
    fillers = (f"<SPECIAL_{number}>" for number in range(len(names), count))
    texts = [*(names[rank] for rank in sorted(names)), *fillers]
    size = config.get("default_vocab_size")
    entries = values["vocab"] if size is None else values["vocab"][: size - len(texts)]
    try:
        tokens = [base64.b64decode(entry["token_bytes"]) for entry in entries]
    except binascii.Error as error:
        raise ValueError(f"a token is not base64: {error}") from error
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges: list[tuple[bytes, bytes]] = []
    for token in ranks:
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        inside = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(inside, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    vocab = {_characters(token): rank + len(texts) for token, rank in ranks.items()}
    vocab |= {text: number for number, text in enumerate(texts)}
    pairs = [(_characters(left), _characters(right)) for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in texts])
    return tokenizer


_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + index) for index, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}
"""GPT-2's character for each byte: printable ones stand for themselves."""


def _characters(token: bytes) -> str:
    return "".join(_CHARACTERS[byte] for byte in token)


# WordPiece -----------------------------------------------------------------------------------------


def _bert(path: Path, config: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    lines = path.read_text(encoding="utf-8").split("\n")
    lines = lines[:-1] if not lines[-1] else lines
    vocab = {line.rstrip("\r"): number for number, line in enumerate(lines)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token=_text(config, "unk_token")))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
        lowercase=bool(config.get("do_lower_case", True)),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    first, last = _text(config, "cls_token"), _text(config, "sep_token")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(text, _number(tokenizer, text)) for text in (first, last)],
    )
    return tokenizer


# SentencePiece -------------------------------------------------------------------------------------


def _merges(vocab: Mapping[str, int], skipped: Sequence[str] = ()) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, by the number of the piece, then by the lengths of the two."""
    left_out = {*skipped}
    ranked: list[tuple[tuple[int, int, int], str, str]] = []
    for piece, number in vocab.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in vocab and right in vocab and left_out.isdisjoint((piece, left, right)):
                ranked.append(((number, len(left), len(right)), left, right))
    return [(left, right) for _, left, right in sorted(ranked)]


def _sentencepiece(
    path: Path, unknown: str | None, prefix: str
) -> tuple[Tokenizer, list[tuple[str, bool]]]:
    """The pairs of a model file without normalizer, and its pieces that are matched as a whole."""
    from tokenizers import Tokenizer, decoders, models

    pieces = read_model(path)
    vocab = {piece.text: number for number, piece in enumerate(pieces)}
    options: dict[str, Any] = {} if unknown is None else {"unk_token": unknown}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(vocab), fuse_unk=True, byte_fallback=True, **options)
    )
    undo: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(undo)
    added = [(p.text, p.kind == CONTROL) for p in pieces if p.kind in (CONTROL, USER_DEFINED)]
    return tokenizer, added


def _llama(path: Path, config: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import pre_tokenizers

    prefix = config.get("add_prefix_space") is not False
    tokenizer, added = _sentencepiece(path, None, " " if prefix else "")
    scheme = ("always" if config.get("legacy") else "first") if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, scheme, split=False)
    _add_pieces(tokenizer, added)
    _add_ends(tokenizer, config, begins=True)
    return tokenizer


def _gemma(path: Path, config: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import normalizers, pre_tokenizers

    tokenizer, added = _sentencepiece(path, _text(config, "unk_token"), "")
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    _add_pieces(tokenizer, added)
    _add_ends(tokenizer, config, begins=True)
    return tokenizer


def _add_pieces(tokenizer: Tokenizer, added: Sequence[tuple[str, bool]]) -> None:
    from tokenizers import AddedToken

    tokenizer.add_tokens(
        [AddedToken(text, special=special, normalized=False) for text, special in added]
    )
