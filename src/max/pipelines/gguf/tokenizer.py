"""The tokenizer in a GGUF file's metadata, built as the model's tokenizer.json would build it.

``tokenizer.ggml.model`` names the algorithm: ``gpt2`` (byte-level pairs, split by ``tokenizer.ggml.pre``, or those of
``gemma4``), ``llama`` (SentencePiece pairs), ``gemma4`` (the same with a list of merges), ``t5`` (SentencePiece
unigrams) and ``bert`` (WordPiece). The keys are those of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from max.graph.weights import GGUFFile
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.core.native_calls import native_calls
from max.pipelines.gguf.splits import SPACED_PAIRS, SPLITS, Split

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["tokenizer_of"]

_REMEDY = "Give the model's folder in the Hugging Face layout with --model, and the file with --weight-path."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"
"""The character that SentencePiece writes for a space."""

_SPECIAL = {
    "bos_token": ("bos",),
    "eos_token": ("eos",),
    "unk_token": ("unknown",),
    "sep_token": ("seperator",),  # the format's own spelling
    "pad_token": ("padding",),
    "cls_token": ("cls", "bos"),
    "mask_token": ("mask",),
}
"""For each special token of tokenizer_config.json the names of its metadata key; the first one in the file applies."""
INFILL_TOKENS = "infill_tokens"
"""The config key for the tokens of ``_INFILL``, for which tokenizer_config.json has no names."""
_INFILL = {
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
    "pad": ("fim_pad",),
    "repository": ("fim_rep",),
    "separator": ("fim_sep",),
    "end": ("eot",),
}
"""For each fill-in-the-middle token the names of its metadata key, those of newer files first."""


class Vocabulary(NamedTuple):
    """The vocabulary of a file.

    Args:
        texts: The texts of the tokens, by token id.
        kinds: The types of the tokens, by token id: normal, control and so on.
        special: The special tokens, by their names in tokenizer_config.json.
        values: The metadata.
        path: The file.
    """

    texts: list[str]
    kinds: list[int]
    special: dict[str, str]
    values: Mapping[str, Any]
    path: str

    def flag(self, name: str, default: bool) -> bool:
        """A flag of the metadata with the prefix ``tokenizer.ggml``."""
        return bool(self.values.get(f"tokenizer.ggml.{name}", default))

    @property
    def scores(self) -> list[float]:
        """The scores of the tokens.

        Raises:
            ModelFilesError: The number of scores differs from the number of tokens.
        """
        scores: Any = self.values.get("tokenizer.ggml.scores")
        if not isinstance(scores, np.ndarray) or len(scores) != len(self.texts):
            raise _broken_file(self.path, f"there is no score for each of {len(self.texts)} tokens")
        if not np.isfinite(scores).all():
            raise _broken_file(self.path, "a score of a token is not finite")
        return [float(score) for score in scores]


@native_calls("the GGUF file's tokenizer cannot be built", _REMEDY)
def tokenizer_of(file: GGUFFile) -> tuple[Tokenizer, dict[str, Any], dict[str, str]]:
    """The tokenizer, the object of a tokenizer_config.json, and the chat templates by name.

    Args:
        file: The file.

    Raises:
        ModelFilesError: The file has no tokenizer, or one of an unsupported kind.
    """
    from tokenizers import AddedToken

    values = file.metadata
    model = values.get("tokenizer.ggml.model")
    builders = {
        "gpt2": _byte_pairs,
        "llama": _sentencepiece,
        "gemma4": _listed_pairs,
        "t5": _unigrams,
        "bert": _wordpiece,
    }
    if model not in builders:
        raise ModelFilesError(
            f"{file.path}: the tokenizer is {model!r}; GGUF tokenizers are read of {', '.join(builders)}",
            _REMEDY,
        )
    try:
        vocabulary = _vocabulary(file)
        spaced = model == "gpt2" and _is_spaced(vocabulary)
        tokenizer = builders["gemma4" if spaced else model](vocabulary)
        of_control = (_CONTROL,) if model == "gpt2" and not spaced else (_CONTROL, _UNKNOWN)
        added = [
            AddedToken(text, special=kind != _USER_DEFINED, normalized=False)
            for text, kind in zip(vocabulary.texts, vocabulary.kinds, strict=True)
            if kind in (*of_control, _USER_DEFINED)
        ]
        tokenizer.add_tokens(added)
        _add_ends(tokenizer, model, vocabulary)
    except ModelFilesError:
        raise
    except Exception as error:  # the package raises bare Exception; values may be of any type
        raise _broken_file(file.path, str(error)) from error
    template = values.get("tokenizer.chat_template")
    templates = {"default": template} if isinstance(template, str) else {}
    config: dict[str, Any] = dict(vocabulary.special)
    if infill := _named_tokens(values, vocabulary.texts, _INFILL):
        config[INFILL_TOKENS] = infill
    return tokenizer, config, templates


def _broken_file(path: str, why: str) -> ModelFilesError:
    return ModelFilesError(f"{path}: the tokenizer is broken: {why}", _REMEDY)


def _texts(file: GGUFFile, key: str) -> list[str]:
    texts = file.metadata.get(key)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ModelFilesError(f"{file.path}: {key} is no list of texts", _REMEDY)
    return texts


def _vocabulary(file: GGUFFile) -> Vocabulary:
    """The tokens of a file with their types and special names."""
    values = file.metadata
    texts = _texts(file, "tokenizer.ggml.tokens")
    kinds = list(values.get("tokenizer.ggml.token_type", [_NORMAL] * len(texts)))
    if len(kinds) != len(texts):
        raise ModelFilesError(
            f"{file.path}: {len(kinds)} token types for {len(texts)} tokens", _REMEDY
        )
    special = _named_tokens(values, texts, _SPECIAL)
    # GGUF has one key for the begin token, which WordPiece calls the class token
    special.pop("bos_token" if values.get("tokenizer.ggml.model") == "bert" else "cls_token", None)
    return Vocabulary(texts, [int(kind) for kind in kinds], special, values, file.path)


def _named_tokens(
    values: Mapping[str, object], texts: Sequence[str], keys: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """The texts of the special tokens whose ids the metadata states."""
    named: dict[str, str] = {}
    for key, names in keys.items():
        numbers = (values.get(f"tokenizer.ggml.{name}_token_id") for name in names)
        number = next((n for n in numbers if isinstance(n, int)), None)
        if number is not None and 0 <= number < len(texts):
            named[key] = texts[number]
    return named


def _numbers(texts: Sequence[str]) -> dict[str, int]:
    return {text: number for number, text in enumerate(texts)}


# algorithms ------------------------------------------------------------------------------------


def _byte_pairs(vocabulary: Vocabulary) -> Tokenizer:
    """Byte-level BPE; token texts have one character per byte."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    split = _split(vocabulary)
    pairs = _stored_merges(vocabulary)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_numbers(vocabulary.texts), merges=pairs, ignore_merges=split.ignore_merges
        )
    )
    parts: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns
    ]
    prefix = vocabulary.flag("add_space_prefix", False)
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _stored_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges that a file lists, each as two texts separated by a space."""
    stored: Any = vocabulary.values.get("tokenizer.ggml.merges")
    if not isinstance(stored, list):
        raise _broken_file(vocabulary.path, "tokenizer.ggml.merges is no list of texts")
    # a token may begin with a space, so the separator is the first space after the first character
    return [(merge[:at], merge[at + 1 :]) for merge in stored if (at := merge.find(" ", 1)) > 0]


def _is_spaced(vocabulary: Vocabulary) -> bool:
    """Whether a vocabulary of pairs is not of bytes: by its `pre` key, and by SentencePiece's character for spaces."""
    pre = vocabulary.values.get("tokenizer.ggml.pre")
    return pre in SPACED_PAIRS and any(_SPACE in text for text in vocabulary.texts)


def _split(vocabulary: Vocabulary) -> Split:
    """How the `pre` key of a file splits text before byte pairs are merged."""
    name = vocabulary.values.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise ModelFilesError(
            f"{vocabulary.path}: the tokenizer is 'gpt2' with pre {name!r}; pre may be {', '.join(SPLITS)}",
            _REMEDY,
        )
    return SPLITS[name]


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    """SentencePiece BPE: merges pairs by the scores of the merged tokens; unknown characters become byte tokens."""
    prefix = vocabulary.flag("add_space_prefix", True)
    return _spaced_pairs(vocabulary, _merges(vocabulary), prefix)


def _listed_pairs(vocabulary: Vocabulary) -> Tokenizer:
    """Gemma 4: SentencePiece's characters and byte tokens, with a list of merges."""
    prefix = vocabulary.flag("add_space_prefix", False)
    return _spaced_pairs(vocabulary, _stored_merges(vocabulary), prefix)


def _spaced_pairs(vocabulary: Vocabulary, merges: list[tuple[str, str]], prefix: bool) -> Tokenizer:
    """BPE of characters, with SentencePiece's character for spaces, and `prefix` for one before the text."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokenizer = Tokenizer(
        models.BPE(
            vocab=_numbers(vocabulary.texts),
            merges=merges,
            unk_token=vocabulary.special.get("unk_token"),
            byte_fallback=_BYTE in vocabulary.kinds,
            fuse_unk=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    if prefix:
        steps.insert(0, normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    undo: list[Any] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens whose concatenation is a token, in descending order of its score."""
    scores = vocabulary.scores
    numbers = {
        text: number
        for number, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.kinds, strict=True))
        if kind in (_NORMAL, _USER_DEFINED)
    }
    order = sorted(numbers.values(), key=lambda number: -scores[number])
    merges: list[tuple[str, str]] = []
    for number in order:
        text = vocabulary.texts[number]
        # in the order of transformers' converter, which has made tokenizer.json
        halves = [(text[:at], text[at:]) for at in range(1, len(text))]
        inside = [pair for pair in halves if pair[0] in numbers and pair[1] in numbers]
        merges += sorted(inside, key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))
    return merges


def _unigrams(vocabulary: Vocabulary) -> Tokenizer:
    """SentencePiece unigram: the most likely sequence of tokens by their scores."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    unknown = vocabulary.values.get("tokenizer.ggml.unknown_token_id", 0)
    scored = list(zip(vocabulary.texts, vocabulary.scores, strict=True))
    tokenizer = Tokenizer(models.Unigram(scored, unknown, byte_fallback=_BYTE in vocabulary.kinds))
    steps: list[Any] = []
    table: Any = vocabulary.values.get("tokenizer.ggml.precompiled_charsmap")
    if isinstance(table, np.ndarray) and table.size:
        steps.append(normalizers.Precompiled(table.astype(np.uint8).tobytes()))
    if vocabulary.flag("remove_extra_whitespaces", False):
        steps += [
            normalizers.Strip(left=False, right=True),
            normalizers.Replace(Regex(" {2,}"), _SPACE),
        ]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if vocabulary.flag("add_space_prefix", True) else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, scheme)
    tokenizer.decoder = decoders.Metaspace(_SPACE, scheme)
    return tokenizer


def _wordpiece(vocabulary: Vocabulary) -> Tokenizer:
    """WordPiece; GGUF marks tokens that begin a word, tokenizer.json marks those that continue one."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces: dict[str, int] = {}
    for number, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.kinds, strict=True)):
        if kind not in (_NORMAL, _BYTE):
            pieces[text] = number
        elif text.startswith(_SPACE):
            pieces[text[1:]] = number
        else:
            pieces[f"##{text}"] = number
    unknown = vocabulary.special.get("unk_token", "[UNK]")
    if unknown not in pieces:
        raise _broken_file(vocabulary.path, f"the unknown token {unknown!r} is no token")
    tokenizer = Tokenizer(models.WordPiece(vocab=pieces, unk_token=unknown))
    # a vocabulary without upper-case letters implies that the model lower-cases its texts
    normal = zip(vocabulary.texts, vocabulary.kinds, strict=True)
    lowers = all(text == text.lower() for text, kind in normal if kind == _NORMAL)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowers)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


# begin and end ---------------------------------------------------------------------------------


def _add_ends(tokenizer: Tokenizer, model: str, vocabulary: Vocabulary) -> None:
    """Adds the post-processor that puts special tokens before, between and after texts."""
    from tokenizers import processors

    special = vocabulary.special
    pre = vocabulary.values.get("tokenizer.ggml.pre", "default")
    by_pre = SPLITS[pre].adds_bos if pre in SPLITS else SPACED_PAIRS.get(pre, False)
    begins = model in ("llama", "gemma4", "bert") or (model == "gpt2" and by_pre)
    names: list[str | None] = [None, None]
    if vocabulary.flag("add_bos_token", begins):
        names[0] = special.get("cls_token") if model == "bert" else special.get("bos_token")
    if vocabulary.flag("add_eos_token", model == "t5") or (
        model == "bert" and vocabulary.flag("add_sep_token", True)
    ):
        names[1] = special.get("sep_token") if model == "bert" else special.get("eos_token")
    first, last = names
    if first is None and last is None:
        return
    before = [f"{first}:0"] if first is not None else []
    after = [f"{last}:0"] if last is not None else []
    # BERT has no class token before the second text
    second = (
        ["$B:1", *(f"{last}:1" for _ in after)]
        if model == "bert"
        else [*(f"{first}:1" for _ in before), "$B:1", *(f"{last}:1" for _ in after)]
    )
    numbers = _numbers(vocabulary.texts)
    ends = [(text, numbers[text]) for text in dict.fromkeys(names) if text is not None]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A:0", *after],
        pair=[*before, "$A:0", *after, *second],
        special_tokens=ends,
    )
