"""Tokenizers in GGUF files against those of the folders from which they were written."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.splits import SPACED_PAIRS, SPLITS
from max.pipelines.gguf.tokenizer import INFILL_TOKENS, tokenizer_of
from max.pipelines.lib.hf_utils import HuggingFaceRepo
from max.pipelines.tokenization.hf_tokenizer import load_tokenizer

CORPUS = (Path(__file__).parents[2] / "models" / "tiny-chat" / "heldout.txt").read_text("utf-8")
CORPUS = (
    CORPUS[:30000]
    + " 1234567 3.14 日本語のテキスト größer Ünïcödé I'll we'VE camelCaseWord\r\n\t x=1;\n" * 9
)
KIND = gguf.TokenType


def texts() -> list[str]:
    """Texts with many scripts, spaces and lines, and random texts of the same characters."""
    alphabet = "aZé ß\t\n\r 　012９.,!?'’—sdtrevmlDL_日本어кп$+<=>^|`~(){}🙂́ा\u200b"
    draw = random.Random(7)
    given = [
        "", " ", "   a", "Hello, world!", "I'll say: we'VE 'don't'", "1234567 12 1 3.1415",
        "camelCase HTTPServer XMLHttp",
        "  two  spaces\n\n\ttab \r\n end ", "größer 日本語 テスト 한국어 кириллица",
        "x=1;y+=2 // a/b\n", "a<|end|>b <|end|>",
        "naïve café — “quoted” … ।", "🙂🙃 👩‍👩‍👧",
    ]  # fmt: skip
    return given + ["".join(draw.choices(alphabet, k=draw.randrange(40))) for _ in range(150)]


def write(path: Path, tokenizer: str, tokens: list[str], kinds: list[int], **values: Any) -> Any:
    """Writes a GGUF file with a tokenizer only and loads it. Keys are those of `gguf.Keys.Tokenizer`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tensor("a", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return load_tokenizer(HuggingFaceRepo(str(path)))


def assert_same(actual: Any, expected: Tokenizer) -> None:
    for text in texts():
        tokens = expected.encode(text).ids
        assert actual.encode(text) == tokens, repr(text)
        assert actual.decode(tokens) == expected.decode(tokens, skip_special_tokens=False)
        assert actual.decode(tokens, True) == expected.decode(tokens, skip_special_tokens=True)


def byte_level(
    *before: Any, use_regex: bool = False, after: Any = None, **options: Any
) -> Tokenizer:
    """Trains a byte-level tokenizer on the corpus, in the form of models' tokenizer.json."""
    tokenizer = Tokenizer(models.BPE(**options))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    steps = [*before, last] if after is None else [*before, last, after]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    return tokenizer


def isolated(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


# as in the tokenizer.json files of GPT-2, StarCoder 2, Llama 3, Qwen 2, Falcon, DeepSeek Coder, BLOOM, Mistral NeMo and
# GPT-OSS
FOLDERS = {
    "gpt-2": lambda: byte_level(use_regex=True),
    "starcoder": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "llama-bpe": lambda: byte_level(isolated(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ), ignore_merges=True),
    "qwen2": lambda: byte_level(isolated(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
        r"|\s+"
    )),
    "falcon": lambda: byte_level(
        pre_tokenizers.Punctuation("contiguous"), use_regex=True, after=isolated("[0-9][0-9][0-9]")
    ),
    "deepseek-coder": lambda: byte_level(
        isolated("[\r\n]"), isolated(r"\s?\p{L}+"), isolated(r"\s?\p{P}+"), isolated("[一-龥ࠀ-一가-퟿]+"),
        pre_tokenizers.Digits(individual_digits=True),
    ),
    "bloom": lambda: byte_level(isolated(r" ?[^(\s|[.,!?…。，、।۔،])]+")),
    "tekken": lambda: byte_level(isolated(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ), ignore_merges=True),
    "gpt-4o": lambda: byte_level(isolated(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )),
    "deepseek-v3": lambda: byte_level(isolated(r"\p{N}{1,3}"), isolated("[一-龥぀-ゟ゠-ヿ]+"), isolated(
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
    )),
}  # fmt: skip


@pytest.mark.parametrize("pre", FOLDERS)
def test_byte_level(pre, tmp_path):
    folder = FOLDERS[pre]()
    vocabulary = folder.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    end = tokens.index("<|end|>")
    kinds = [KIND.CONTROL if number == end else KIND.NORMAL for number in range(len(tokens))]
    merges = json.loads(folder.to_str())["model"]["merges"]
    values = {
        "tokenizer_pre": pre,
        "token_merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "eos_token_id": end,
        "bos_token_id": end,
        "add_bos_token": False,
    }
    ours = write(tmp_path / "m.gguf", "gpt2", tokens, kinds, **values)
    assert_same(ours, folder)
    assert (ours.eos_token, len(ours)) == ("<|end|>", len(tokens))
    del values["add_bos_token"]
    begins = write(tmp_path / "b.gguf", "gpt2", tokens, kinds, **values).encode("a")[0] == end
    assert begins == (pre in ("llama-bpe", "tekken"))


def test_every_pre_name_splits():
    """The tokenizers package accepts each pattern, and splitting by it loses no character."""
    for name, split in SPLITS.items():
        steps = pre_tokenizers.Sequence([isolated(pattern) for pattern in split.patterns])
        for text in texts():
            parts = steps.pre_tokenize_str(text)
            assert "".join(part for part, _ in parts) == text, name


SPECIAL = ["<unk>", "<s>", "</s>"]


def with_bytes(pieces: list[str]) -> tuple[list[str], list[int]]:
    """Returns a SentencePiece vocabulary with a token for each byte."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [KIND.UNKNOWN, KIND.CONTROL, KIND.CONTROL, *[KIND.BYTE] * 256, *[KIND.NORMAL] * len(pieces)]  # fmt: skip
    return [*SPECIAL, *bytes_, *pieces], kinds


def pairs_by_score(text: str, numbers: dict[str, int], scores: list[float]) -> list[int]:
    """SentencePiece's algorithm: the adjacent pair whose token has the highest score merges first; of equal scores the
    leftmost.
    """
    parts = list(text)
    while True:
        pairs = [
            (-scores[numbers[left + right]], i)
            for i, (left, right) in enumerate(zip(parts, parts[1:], strict=False))
            if left + right in numbers
        ]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    tokens: list[int] = []
    for part in parts:
        if part in numbers:
            tokens.append(numbers[part])
        else:
            tokens += [numbers[f"<0x{byte:02X}>"] for byte in part.encode()]
    return tokens


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_pairs(prefix, tmp_path):
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator([CORPUS], trainers.BpeTrainer(vocab_size=600, show_progress=False))
    vocabulary = trained.get_vocab()
    pieces = sorted(vocabulary, key=lambda piece: (len(piece) == 1, vocabulary[piece]))
    tokens, kinds = with_bytes(pieces)
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    ours = write(
        tmp_path / "m.gguf", "llama", tokens, kinds, token_scores=scores, unk_token_id=0, bos_token_id=1,
        eos_token_id=2,
        add_space_prefix=prefix,
    )  # fmt: skip
    numbers = {text: number for number, text in enumerate(tokens)}
    for text in texts():
        spaced = ("▁" if prefix and text else "") + text.replace(" ", "▁")
        expected = [1, *pairs_by_score(spaced, numbers, scores)]
        assert ours.encode(text) == expected, repr(text)
        assert ours.decode(expected, True) == text
        assert ours.encode(text, add_special_tokens=False) == expected[1:]
    assert ours.encode("</s>", add_special_tokens=False) == [2]
    assert (ours.bos_token, ours.eos_token) == ("<s>", "</s>")


def test_listed_pairs_of_gemma_4(tmp_path):
    """As Gemma's tokenizer.json: merges of characters, spaces as ▁, bytes for what is unknown."""
    folder = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    folder.normalizer = normalizers.Replace(" ", "▁")
    folder.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    folder.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<unk>", "<bos>", "<turn|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    folder.train_from_iterator(CORPUS.splitlines(), trainer)
    values = json.loads(folder.to_str())
    # bytes are no special tokens
    values["added_tokens"] = values["added_tokens"][:3]
    folder = Tokenizer.from_str(json.dumps(values))
    vocabulary = folder.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    kinds = [KIND.UNKNOWN, KIND.CONTROL, KIND.CONTROL, *[KIND.BYTE] * 256]
    kinds += [KIND.NORMAL] * (len(tokens) - len(kinds))
    stored = {
        "token_merges": [" ".join(pair) for pair in values["model"]["merges"]],
        "tokenizer_pre": "gemma4",
        "token_scores": [0.0] * len(tokens),
        "unk_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    ours = write(tmp_path / "m.gguf", "gemma4", tokens, kinds, **stored, add_bos_token=False)
    assert_same(ours, folder)
    assert write(tmp_path / "b.gguf", "gemma4", tokens, kinds, **stored).encode("a")[0] == 1
    # llama.cpp reads such vocabularies as these pairs under the byte-level name, too
    for pre, begins in SPACED_PAIRS.items():
        stored["tokenizer_pre"] = pre
        ours = write(tmp_path / "g.gguf", "gpt2", tokens, kinds, **stored, add_bos_token=False)
        assert_same(ours, folder)
        ours = write(tmp_path / "g.gguf", "gpt2", tokens, kinds, **stored)
        assert (ours.encode("a")[0] == 1) == begins
        with pytest.raises(ModelFilesError, match=f"'gpt2' with pre '{pre}'"):
            write(tmp_path / "w.gguf", "gpt2", ["a", "b"], [KIND.NORMAL] * 2, tokenizer_pre=pre)


NUMBERS = {
    "kimi-k2": ("漢字 abcDef 12345 漢a", ["漢字", " abc", "Def", " ", "123", "45", " ", "漢", "a"]),
    "superbpe": ("a 1234567 b", ["a ", "1", "234", "567", " b"]),
    "chameleon": ("ab 12,c", ["ab", " ", "1", "2", ",", "c"]),
    "tiny_aya": ("a 1234567", ["a", " ", "1", "234", "567"]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_splits_of_digits_and_scripts(name):
    """As the patterns of the families' own tokenizers say."""
    text, expected = NUMBERS[name]
    steps = pre_tokenizers.Sequence([isolated(pattern) for pattern in SPLITS[name].patterns])
    assert [part for part, _ in steps.pre_tokenize_str(text)] == expected


def test_unigrams(tmp_path):
    """As transformers converts SentencePiece's unigrams."""
    folder = Tokenizer(models.Unigram())
    folder.normalizer = normalizers.Sequence(
        [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")]
    )
    folder.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    folder.decoder = decoders.Metaspace("▁", "always")
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    folder.train_from_iterator(CORPUS.splitlines(), trainer)
    folder.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    scored = json.loads(folder.to_str())["model"]["vocab"]
    kinds = [KIND.CONTROL, KIND.CONTROL, KIND.UNKNOWN, *[KIND.NORMAL] * (len(scored) - 3)]
    ours = write(
        tmp_path / "m.gguf", "t5", [text for text, _ in scored], kinds, token_scores=[score for _, score in scored],
        unk_token_id=2, eos_token_id=1, pad_token_id=0, add_space_prefix=True, remove_extra_whitespaces=True,
    )  # fmt: skip
    # scores are float32 in the file, so texts with tied best splits are not compared
    same = sum(ours.encode(text) == folder.encode(text).ids for text in texts())
    assert same >= len(texts()) - 1
    assert ours.encode("a b")[-1] == 1
    for text in texts():
        ids = folder.encode(text).ids
        assert ours.decode(ids, True) == folder.decode(ids)


@pytest.mark.parametrize("lowers", [True, False])
def test_wordpiece(lowers, tmp_path):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    folder = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    folder.normalizer = normalizers.BertNormalizer(lowercase=lowers)
    folder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    folder.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    folder.train_from_iterator([CORPUS], trainer)
    folder.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )  # fmt: skip
    folder.add_special_tokens([AddedToken(text, special=True) for text in special])
    vocabulary = folder.get_vocab()
    pieces = sorted(vocabulary, key=lambda piece: vocabulary[piece])

    def stored(piece: str) -> str:
        """A vocabulary as llama.cpp's converter writes it."""
        if piece in special:
            return piece
        return piece[2:] if piece.startswith("##") else f"▁{piece}"

    kinds = [KIND.CONTROL if piece in special else KIND.NORMAL for piece in pieces]
    ours = write(
        tmp_path / "m.gguf", "bert", [stored(piece) for piece in pieces], kinds, unk_token_id=1, bos_token_id=2,
        sep_token_id=3, pad_token_id=0, mask_token_id=4,
    )  # fmt: skip
    assert_same(ours, folder)
    assert ours.special_tokens_map["cls_token"] == "[CLS]"
    pair = ours.backend_tokenizer.encode("a", "b")
    assert (pair.ids, pair.type_ids) == (folder.encode("a", "b").ids, folder.encode("a", "b").type_ids)  # fmt: skip


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2**33), st.floats(),
    st.sampled_from(["", "default", "llama-bpe", "qwen2", "a"]),
    st.lists(st.sampled_from(["a", "b", "ab", "<0x41>", "a b", "▁", "##a", "[UNK]", ""]), max_size=6),
    st.lists(st.integers(-1, 7), max_size=6).map(np.array), st.lists(st.floats(width=32), max_size=6).map(np.array),
)  # fmt: skip
KEYS = ["pre", "tokens", "token_type", "merges", "scores", "add_bos_token", "add_eos_token", "add_space_prefix",
        "bos_token_id",
        "eos_token_id", "unknown_token_id", "padding_token_id", "seperator_token_id", "cls_token_id", "mask_token_id",
        "precompiled_charsmap", "remove_extra_whitespaces"]  # fmt: skip


@given(
    st.sampled_from(["gpt2", "llama", "gemma4", "t5", "bert"]),
    st.dictionaries(st.sampled_from(KEYS), VALUES),
)
def test_metadata_of_any_type(model, given_values):
    """Inconsistent metadata gives a tokenizer, or an error that names the file."""
    tokens = {"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": ["a", "b", "[UNK]"]}
    values = {f"tokenizer.ggml.{key}": value for key, value in given_values.items()}
    file = SimpleNamespace(metadata={**tokens, **values}, path="m.gguf")
    with suppress(ModelFilesError):
        tokenizer, config, _ = tokenizer_of(file)
        tokenizer.encode("a b")
        assert all(isinstance(text, str) for text in config.values())


def test_the_marks_of_filling_in_the_middle():
    """Newer keys come before older ones; a number beyond the vocabulary names nothing."""
    texts = ["<p>", "<s>", "<m>", "<e>", "<old>"]
    numbers = {"fim_pre": 0, "prefix": 4, "suffix": 1, "fim_mid": 2, "eot": 3, "fim_pad": 9}
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": np.zeros(5),
        **{f"tokenizer.ggml.{key}_token_id": number for key, number in numbers.items()},
    }
    _, config, _ = tokenizer_of(SimpleNamespace(metadata=metadata, path="m.gguf"))
    marks = {"prefix": "<p>", "suffix": "<s>", "middle": "<m>", "end": "<e>"}
    assert config[INFILL_TOKENS] == marks


def test_mistakes(tmp_path):
    def refused(message: str, model: str, **values: Any) -> None:
        with pytest.raises(ModelFilesError, match=message):
            write(tmp_path / "m.gguf", model, ["a", "b"], [1, 1], **values)

    refused("the tokenizer is 'rwkv'; GGUF tokenizers are read of gpt2, llama", "rwkv")
    refused("'gpt2' with pre 'whitespace'; pre may be gpt-2", "gpt2", tokenizer_pre="whitespace")
    refused("merges is no list", "gpt2", tokenizer_pre="gpt-2")
    refused("Token `x` out of vocabulary", "gpt2", tokenizer_pre="gpt-2", token_merges=["x y"])
    refused("no score for each of 2 tokens", "llama", token_scores=[1.0])
    refused("a score of a token is not finite", "llama", token_scores=[1.0, float("nan")])
    refused("is broken", "t5", token_scores=[1.0, 2.0], unk_token_id=7)


def tokenizer_with(model: str, texts: list[str], **values: Any) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of a file with some keys, and its special tokens."""
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    metadata |= {"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": texts}
    tokenizer, config, _ = tokenizer_of(SimpleNamespace(metadata=metadata, path="m.gguf"))
    return tokenizer, config


def test_control_tokens_within_a_text():
    """They are found as they are, before the text is split; tokens of users too, which are no special ones."""
    texts_ = [*pre_tokenizers.ByteLevel.alphabet(), "<|x|>", "<y>"]
    kinds = [KIND.NORMAL] * 256 + [KIND.CONTROL, KIND.USER_DEFINED]
    tokenizer, _ = tokenizer_with(
        "gpt2", texts_, merges=[], pre="gpt-2", token_type=np.array(kinds)
    )
    ids = tokenizer.encode("a<|x|><y>").ids
    assert ids == [texts_.index("a"), 256, 257]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<y>"


def test_numbers_of_special_tokens():
    """A negative number, or one behind the vocabulary, names no token."""
    texts_, scores = ["<s>", "a", "b"], np.zeros(3)
    for number in (-1, 3, 2**40):
        assert (
            "bos_token"
            not in tokenizer_with("llama", texts_, scores=scores, bos_token_id=number)[1]
        )
    for number in (0, 2):
        _, config = tokenizer_with("llama", texts_, scores=scores, bos_token_id=number)
        assert config["bos_token"] == texts_[number]


def test_an_empty_token_joins_nothing():
    """A vocabulary may have one; SentencePiece merges two parts of at least a character."""
    tokenizer, _ = tokenizer_with("llama", ["<unk>", "", "a", "ab", "b"], scores=np.array([0.0, 0, -2, -1, -3]),
                                  add_bos_token=False, add_space_prefix=False)  # fmt: skip
    assert tokenizer.encode("abba").ids == [3, 4, 2]
    (pairs,) = [json.loads(tokenizer.to_str())["model"]["merges"]]
    assert [tuple(pair) for pair in pairs] == [("a", "b")]


def test_the_unknown_token_of_unigrams_is_the_first_if_none_is_stated():
    values = {"scores": np.array([0.0, -1, -2]), "add_eos_token": False, "add_space_prefix": False}
    for stated, number in (({}, 0), ({"unknown_token_id": 1}, 1)):
        tokenizer, _ = tokenizer_with("t5", ["<unk>", "<other>", "a"], **values, **stated)
        assert tokenizer.encode("aß").ids == [2, number]


@pytest.mark.parametrize("model", ["llama", "t5"])
def test_a_text_begins_with_a_space_if_none_is_stated(model):
    """As llama.cpp reads SentencePiece's vocabularies."""
    values = {"scores": np.array([0.0, -1, -2, -3]), "add_bos_token": False, "add_eos_token": False}
    for stated, number in (
        ({}, 1),
        ({"add_space_prefix": True}, 1),
        ({"add_space_prefix": False}, 2),
    ):
        tokenizer, _ = tokenizer_with(model, ["<unk>", "▁a", "a", "▁"], **values, **stated)
        assert tokenizer.encode("a").ids == [number]


def test_an_unknown_token_in_a_text_of_bytes():
    """Bytes know all texts, so that its characters are none but where SentencePiece's spaces are used."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    kinds = np.array([KIND.NORMAL] * 256 + [KIND.UNKNOWN])
    tokenizer, _ = tokenizer_with(
        "gpt2", [*alphabet, "<u>"], merges=[], pre="gpt-2", token_type=kinds
    )
    assert tokenizer.encode("a<u>").ids == [alphabet.index(each) for each in "a<u>"]
    spaced, _ = tokenizer_with("gpt2", ["a", "▁", "<u>"], merges=[], pre="gemma4", add_bos_token=False,
                               token_type=np.array([KIND.NORMAL, KIND.NORMAL, KIND.UNKNOWN]))  # fmt: skip
    assert spaced.encode("a<u>a").ids == [0, 2, 0]


def test_other_models_have_no_spaced_pairs():
    """`pre` names the splits of pairs; a file of another model may state it too."""
    texts_ = ["[UNK]", "[CLS]", "[SEP]", "▁a", "▁b"]
    kinds = np.array([KIND.CONTROL] * 3 + [KIND.NORMAL] * 2)
    tokenizer, _ = tokenizer_with(
        "bert", texts_, token_type=kinds, pre="gemma4", unknown_token_id=0
    )
    assert tokenizer.encode("a b", add_special_tokens=False).ids == [3, 4]


def test_whether_words_end_with_a_separator():
    """Keys as the gguf package names them; WordPiece has one if the file does not say it."""
    keys = gguf.Keys.Tokenizer
    separator, adds = (key.removeprefix("tokenizer.ggml.") for key in (keys.SEP_ID, keys.ADD_SEP))
    texts_ = ["[UNK]", "[CLS]", "[SEP]", "▁a"]
    kinds = np.array([KIND.CONTROL] * 3 + [KIND.NORMAL])
    values = {"token_type": kinds, "unknown_token_id": 0, "bos_token_id": 1, separator: 2}
    for stated, ends in (({}, [2]), ({adds: True}, [2]), ({adds: False}, [])):
        tokenizer, _ = tokenizer_with("bert", texts_, **values, **stated)
        assert tokenizer.encode("a").ids == [1, 3, *ends]


@pytest.mark.parametrize("pre", SPACED_PAIRS)
def test_whether_spaced_pairs_begin_with_a_token(pre):
    """By the name of the splits, if the file does not say it."""
    texts_ = ["<bos>", "▁a", "▁", "a"]
    values = {"merges": ["▁ a"], "token_type": np.array([KIND.CONTROL, 1, 1, 1]), "bos_token_id": 0}
    tokenizer, _ = tokenizer_with("gpt2", texts_, pre=pre, **values)
    begins = {"gemma4": True, "granite-embed-multi-311m": True, "sarvam-moe": False}[pre]
    assert tokenizer.encode(" a").ids == [*([0] if begins else []), 1]


def test_unknown_tokens_and_texts_that_are_none():
    """The unknown token is found in a text as control tokens are; a vocabulary with a number is refused."""
    kinds = np.array([KIND.UNKNOWN, KIND.NORMAL])
    values = {"scores": np.zeros(2), "add_bos_token": False, "add_space_prefix": False}
    tokenizer, _ = tokenizer_with("llama", ["<unk>", "a"], token_type=kinds, **values)
    assert tokenizer.encode("a<unk>a").ids == [1, 0, 1]
    for model in ("llama", "gpt2"):
        with pytest.raises(ModelFilesError, match="tokens is no list of texts"):
            tokenizer_with(model, ["<unk>", 3], **values)  # type: ignore[list-item]


def test_pairs_of_one_token_are_in_the_order_of_their_left_parts():
    """As transformers converts SentencePiece's vocabularies."""
    texts_ = ["<unk>", "a", "ab", "b", "bb", "abb"]
    tokenizer, _ = tokenizer_with("llama", texts_, scores=np.array([0.0, -4, -2, -5, -3, -1]))
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    assert merges == [("a", "bb"), ("ab", "b"), ("a", "b"), ("b", "b")]
