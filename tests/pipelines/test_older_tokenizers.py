"""Tokenizers of folders without tokenizer.json: their tokens are those of transformers' AutoTokenizer."""

from __future__ import annotations

import base64
import random
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import transformers
from hypothesis import given
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.auto import tokenization_auto

from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.lib.hf_utils import HuggingFaceRepo
from max.pipelines.tokenization.hf_tokenizer import HFTokenizer, load_tokenizer
from max.pipelines.tokenization.older_files import (
    _CLASS_OF_TYPE,
    _FAMILIES,
    _GENERIC,
    _STATED_WRONGLY,
)
from max.pipelines.tokenization.sentencepiece_files import merges_of
from max.pipelines.tokenization.sentencepiece_model import Piece, SentencePieceModel, read_model
from tests.architectures import config_defaults
from tests.architectures.test_model_types import of_this_version
from tests.pipelines.sentencepiece_files import (
    NORMAL_FORMS,
    likeliest_pieces,
    model_file,
    paired_pieces,
    ranked_tokens,
    tiktoken_file,
    write_json,
)
from tests.pipelines.test_gguf_tokenizers import CORPUS, SPECIAL, texts


@pytest.fixture(autouse=True)
def _without_packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers parses models with protobuf alone, and files of tiktoken by their two lines of code."""

    def ranks(path: str) -> dict[bytes, int]:
        lines = (line.split() for line in Path(path).read_bytes().splitlines())
        return {base64.b64decode(token): int(rank) for token, rank in lines}

    module = import_module("transformers.convert_slow_tokenizer")
    monkeypatch.setattr(module, "requires_backends", lambda *_: None)
    monkeypatch.setattr(module.TikTokenConverter, "load_tiktoken_bpe", staticmethod(ranks))
    yield


TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained_pairs(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS[:15000]], trainer)
    return tokenizer


def assert_same(folder: Path, expected: Any) -> HFTokenizer:
    """Tokens of texts, of special tokens in texts, and decoded texts."""
    ours = load_tokenizer(HuggingFaceRepo(str(folder)))
    assert isinstance(ours, HFTokenizer)
    marks = {*expected.all_special_tokens, *expected.get_added_vocab()}
    # Code Llama's class makes a prompt with a gap of texts with this token
    marks = sorted(marks - {"<FILL_ME>"})
    draw = random.Random(len(marks))
    mixed = ["".join(draw.choices([*marks, "a", " b", " ", "ﬁ½"], k=5)) for _ in range(40)]
    for text in [*texts(), *mixed, "ﬁ½ Å ｆ\u3000x", "▁a ▁ b", " ".join(marks)]:
        tokens = expected.encode(text)
        assert ours.encode(text) == tokens, repr(text)
        assert ours.encode(text, add_special_tokens=False) == expected.encode(
            text, add_special_tokens=False
        )
        assert ours.decode(tokens) == expected.decode(tokens)
        assert ours.decode(tokens, True) == expected.decode(tokens, skip_special_tokens=True)
    assert len(ours) == len(expected)
    assert (ours.eos_token, ours.bos_token) == (expected.eos_token, expected.bos_token)
    return ours


BYTE_LEVEL: dict[str, dict[str, Any]] = {
    "GPT2Tokenizer": {},
    "GPT2TokenizerFast": {"add_prefix_space": True, "add_bos_token": True},
    "GPTNeoXTokenizer": {"add_eos_token": True, "pad_token": "<|pad|>"},
    "CohereTokenizer": {"add_bos_token": True},
    "Qwen2Tokenizer": {"eos_token": "<|im_end|>", "add_eos_token": True},
    "Qwen3_5Tokenizer": {"image_token": "<|image|>", "extra_special_tokens": ["<|a|>"]},
    "RobertaTokenizer": {},
}


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_vocab_json_and_merges(name: str, tmp_path: Path) -> None:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"] if "Roberta" in name else ["<|endoftext|>"]  # fmt: skip
    trained_pairs(special).model.save(str(tmp_path))
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": name, **BYTE_LEVEL[name]})
    write_json(tmp_path / "config.json", {"model_type": "gptj"})
    if name == "Qwen3_5Tokenizer":  # AutoTokenizer does not look for the files of this class
        files = {
            key: str(tmp_path / file)
            for key, file in (("vocab", "vocab.json"), ("merges", "merges.txt"))
        }
        expected = transformers.Qwen3_5Tokenizer(**files, **BYTE_LEVEL[name])
    else:
        expected = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert_same(tmp_path, expected)


@pytest.mark.parametrize("lowers", [True, False])
@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_vocab_txt(kind: str, lowers: bool, tmp_path: Path) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    special += ["<s>", "<pad>", "</s>", "<mask>"] if kind == "mpnet" else []
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowers)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([CORPUS[:15000]], trainer)
    tokenizer.model.save(str(tmp_path))
    write_json(tmp_path / "tokenizer_config.json", {"do_lower_case": lowers})
    write_json(tmp_path / "config.json", {"model_type": kind})
    assert_same(tmp_path, transformers.AutoTokenizer.from_pretrained(tmp_path))


def test_tekken_json(tmp_path: Path) -> None:
    tokens = ranked_tokens()
    file = {
        "config": {
            "pattern": TEKKEN_PATTERN,
            "num_vocab_tokens": len(tokens) + 9,
            "default_vocab_size": len(tokens) + 4,
            "default_num_special_tokens": 6,
            "version": "v3",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(["<unk>", "<s>", "</s>", "[INST]"])
        ],
    }
    write_json(tmp_path / "tekken.json", file)
    from transformers.integrations.mistral.tokenizer import MistralConverter

    expected = MistralConverter(str(tmp_path / "tekken.json")).converted()
    ours = load_tokenizer(HuggingFaceRepo(str(tmp_path)))
    assert len(ours) == len(tokens) + 4
    for text in [*texts(), "[INST] a</s>"]:
        ids = expected.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == expected.decode(ids, skip_special_tokens=False)


# SentencePiece -------------------------------------------------------------------------------------

_LLAMA_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")
_FILES = {
    "XLMRobertaTokenizer": "sentencepiece.bpe.model",
    "CamembertTokenizer": "sentencepiece.bpe.model",
    "T5Tokenizer": "spiece.model",
}


def test_models_are_read_whole(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0, 2), ("a", -1.5, 1), ("<0x00>", 0.5, 6)]
    trainer: dict[int, Any] = {3: 2, 4: 9, 35: 1, 40: 3, 41: -1, 42: 7, 45: b"U", 46: b"B", 47: b"E"}  # fmt: skip
    normalizer: dict[int, Any] = {1: b"nfkc", 2: b"\0\1", 3: 0, 4: 0, 5: 0}
    path = model_file(tmp_path / "m.model", pieces, trainer, normalizer)
    assert read_model(path) == SentencePieceModel(
        [Piece(*piece) for piece in pieces], 2, True, 3, -1, 7, "U", "B", "E", b"\0\1", False, False, False
    )  # fmt: skip
    path = model_file(tmp_path / "m.model", pieces, {3: b"text", 45: 5})
    assert read_model(path) == SentencePieceModel([Piece(*piece) for piece in pieces])


def drawn_folder(folder: Path, name: str, number: int) -> None:
    """A folder of a class with a random model, config, and lists of tokens."""
    draw = random.Random(f"{name}{number}")
    merged = name in _LLAMA_CLASSES or draw.random() < 0.5
    merged = merged and name not in _FILES
    styles = (["<unk>", "<s>", "</s>"], ["<pad>", "</s>", "<unk>"], ["<pad>", "<eos>", "<bos>", "<unk>"])  # fmt: skip
    # fairseq's classes replace the first three pieces
    special = draw.choice(styles if name not in _FILES else styles[:1])
    byte_fallback = draw.random() < 0.5
    pieces = (paired_pieces if merged else likeliest_pieces)(special, byte_fallback)
    trainer: dict[int, Any] = {3: 1 + merged, 35: byte_fallback, 40: special.index("<unk>")}
    for field, text in ((41, "<s>"), (42, "</s>")):
        other = text.replace("s", "bos") if field == 41 else "<eos>"
        found = text if text in special else other if other in special else None
        trainer[field] = special.index(found) if found else -1
        trainer |= {field + 5: found.encode()} if found else {}
    normalizer = {n: int(draw.random() < 0.6) for n in (3, 4, 5)}
    forms = {2: NORMAL_FORMS} if draw.random() < 0.6 else {}
    model_file(
        folder / _FILES.get(name, "tokenizer.model"), pieces, trainer, {**forms, **normalizer}
    )
    config: dict[str, Any] = {"tokenizer_class": name} if name != _GENERIC else {}
    # AutoTokenizer adds no begin token to Llama's texts unless it is asked to
    if name in _LLAMA_CLASSES or draw.random() < 0.5:
        config["add_bos_token"] = draw.random() < 0.7
    for key in ("add_eos_token", "legacy", "add_prefix_space"):
        config |= {key: draw.random() < 0.5} if draw.random() < 0.3 else {}
    match draw.randrange(5):
        case 0:
            numbers = sorted(draw.sample(range(3, len(pieces) + 3), 3))
            config["added_tokens_decoder"] = {
                str(n): {
                    "content": pieces[n][0] if n < len(pieces) and draw.random() < 0.6 else f"<new{n}>",
                    **{flag: draw.random() < 0.3 for flag in ("special", "lstrip", "rstrip", "normalized")},
                }
                for n in numbers
            }  # fmt: skip
        case 1:
            config["additional_special_tokens"] = ["<new a>", "<tool>"]
        case 2:
            lists: dict[str, Any] = {"additional_special_tokens": ["<am>"], "pad_token": "<padm>"}
            lists["mask_token"] = {"content": "<mask>", "lstrip": True, "normalized": False}
            write_json(folder / "special_tokens_map.json", lists)
            write_json(folder / "added_tokens.json", {"<am>": 900, "<zz>": 901})
        case _:
            pass
    write_json(folder / "tokenizer_config.json", config)
    kinds = [kind for kind, known in _CLASS_OF_TYPE.items() if known == name]
    kind = draw.choice(kinds or ["llama"])
    write_json(folder / "config.json", {"model_type": kind})


def compare(name: str, numbers: range, folder: Path) -> None:
    for number in numbers:
        inside = folder / str(number)
        inside.mkdir()
        drawn_folder(inside, name, number)
        expected = transformers.AutoTokenizer.from_pretrained(inside)
        assert_same(inside, expected)


SENTENCEPIECE = (*_LLAMA_CLASSES, *_FILES, _GENERIC)


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_models(name: str, tmp_path: Path) -> None:
    compare(name, range(4), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_models_for_long(name: str, tmp_path: Path) -> None:
    compare(name, range(4, 150), tmp_path)


def test_merges() -> None:
    from transformers.tokenization_utils_base import generate_merges

    vocabulary = {text: number for number, (text, _, _) in enumerate(paired_pieces(SPECIAL))}
    assert merges_of(vocabulary) == generate_merges(vocabulary)


TIKTOKEN: dict[str, dict[str, Any]] = {
    "tokenizer.model": {"tokenizer_class": "PreTrainedTokenizerFast"},
    "tiktoken.model": {},
    "tokenizer.model of Llama": {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True},
}


@pytest.mark.parametrize("name", TIKTOKEN)
def test_files_of_tiktoken(name: str, tmp_path: Path) -> None:
    tiktoken_file(tmp_path / name.split()[0])
    first = len(ranked_tokens())
    names = {first + 1: "<|begin|>", first + 4: "<|end|>", first + 2: "<|x|>"}
    added = {
        str(n): {"content": text, "special": True, "normalized": False} for n, text in names.items()
    }
    config = {"added_tokens_decoder": added, "bos_token": "<|begin|>", "eos_token": "<|end|>"}
    write_json(tmp_path / "tokenizer_config.json", {**config, **TIKTOKEN[name]})
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    ours = assert_same(tmp_path, transformers.AutoTokenizer.from_pretrained(tmp_path))
    assert ours.decode([first]) == f"<|reserved_token_{first}|>"


def test_qwen_1(tmp_path: Path) -> None:
    """Its own code splits as Qwen 2 does, and has 208 special tokens after those with ranks."""
    tiktoken_file(tmp_path / "qwen.tiktoken")
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "QWenTokenizer"})
    ours = load_tokenizer(HuggingFaceRepo(str(tmp_path)))
    first = len(ranked_tokens())
    assert ours.encode("<|im_start|>a<|extra_204|>") == [first + 1, ord("a"), first + 207]
    assert ours.encode("1234") == [*b"1234"]
    assert len(ours) == first + 208


@of_this_version
def test_each_type_has_its_class() -> None:
    """Of the types whose models run."""
    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    wrong = tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    for kind in config_defaults.types():
        name = names.get(kind) or "absent"
        own = _CLASS_OF_TYPE.get(kind)
        assert own == name or (name == "absent" and own in (None, "GPT2Tokenizer")), kind
        assert (kind in _STATED_WRONGLY) == (kind in wrong and name != _GENERIC), kind
    assert {*_CLASS_OF_TYPE.values()} <= {*_FAMILIES}


def test_added_tokens_json(tmp_path: Path) -> None:
    trained_pairs(["<|endoftext|>"]).model.save(str(tmp_path))
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})
    write_json(tmp_path / "added_tokens.json", {"<|im_start|>": 700, "<|im_end|>": 701})
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": "<|im_end|>"})
    ours = load_tokenizer(HuggingFaceRepo(str(tmp_path)))
    assert ours.encode("<|im_end|>a<|im_start|>")[::2] == [701, 700]
    assert ours.eos_token_id == 701


@pytest.mark.parametrize("number", range(6))
def test_lists_of_tokens_beside_tokenizer_json(number: int, tmp_path: Path) -> None:
    """special_tokens_map.json and added_tokens.json count where tokenizer_config.json numbers no tokens."""
    draw = random.Random(number)
    tokenizer = trained_pairs(["<|endoftext|>", "<|pad|>"])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "the"}
    config["image_token"] = "<image>"
    extra: Any = draw.choice([["<a>", "<b>"], {"first_token": "<a>"}])
    config |= {draw.choice(["extra", "additional"]) + "_special_tokens": extra} if number else {}
    lists = {"eos_token": "<|endoftext|>", "pad_token": {"content": "<|p|>", "lstrip": True}}
    write_json(tmp_path / "special_tokens_map.json", lists)
    write_json(tmp_path / "added_tokens.json", {"<b>": 702, "<zz>": 703})
    if number % 2:
        entry = {"content": "<new>", "special": True, "rstrip": True}
        config["added_tokens_decoder"] = {"700": entry}
    write_json(tmp_path / "tokenizer_config.json", config)
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = assert_same(tmp_path, expected)
    assert ours.special_tokens_map == expected.special_tokens_map


def test_neither_transformers_nor_torch_is_imported(tmp_path: Path) -> None:
    trained_pairs(["<|endoftext|>"]).model.save(str(tmp_path))
    write_json(tmp_path / "config.json", {"model_type": "gpt2"})
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from max.pipelines.lib.hf_utils import HuggingFaceRepo\n"
        "from max.pipelines.tokenization.hf_tokenizer import load_tokenizer\n"
        f"print(load_tokenizer(HuggingFaceRepo({str(tmp_path)!r})).decode(load_tokenizer("
        f"HuggingFaceRepo({str(tmp_path)!r})).encode('some text')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "some text", run.stderr


DAMAGED = [
    *(b"", b"\n", b"{}", b"[INST]", b"\x00\x00"),
    *(b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05\x0a\x03", b"\xff" * 40),
]


@pytest.mark.parametrize(
    "name", ["LlamaTokenizer", "T5Tokenizer", "BertTokenizer", "GPT2Tokenizer", "tekken"]
)
@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_files(name: str, content: bytes, tmp_path: Path) -> None:
    others = ["tokenizer.model", "spiece.model", "vocab.txt", "vocab.json", "merges.txt"]
    for file in ["tekken.json"] if name == "tekken" else others:
        (tmp_path / file).write_bytes(content)
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": name})
    with pytest.raises(ModelFilesError, match="no tokenizer|no JSON|holds"):
        load_tokenizer(HuggingFaceRepo(str(tmp_path)))


@given(st.binary(max_size=60), st.integers(0, 200))
def test_any_model_file(tmp_path_factory: pytest.TempPathFactory, junk: bytes, at: int) -> None:
    """Pieces, or one error."""
    path = tmp_path_factory.mktemp("spm") / "tokenizer.model"
    good = model_file(path, [("a", 0.0, 1), ("<s>", -1.5, 3), ("ab", 2.0, 4)]).read_bytes()
    for content in (junk, good[: at % len(good)] + junk + good[at % len(good) :]):
        path.write_bytes(content)
        try:
            assert all(isinstance(piece.text, str) for piece in read_model(path).pieces)
        except ValueError as error:
            assert str(error)
