"""Tokenizers of folders without tokenizer.json: their tokens are those of transformers' AutoTokenizer."""

from __future__ import annotations

import base64
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import transformers
from hypothesis import given
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.lib.hf_utils import HuggingFaceRepo
from max.pipelines.tokenization.hf_tokenizer import HFTokenizer, load_tokenizer
from max.pipelines.tokenization.older_files import _characters, _merges
from max.pipelines.tokenization.sentencepiece_model import Piece, read_model
from tests.pipelines.test_gguf_tokenizers import CORPUS, SPECIAL, texts, with_bytes

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


def write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values), encoding="utf-8")


def assert_same(folder: Path, expected: Any) -> HFTokenizer:
    """Tokens of texts, of special tokens in texts, and decoded texts."""
    ours = load_tokenizer(HuggingFaceRepo(str(folder)))
    assert isinstance(ours, HFTokenizer)
    marks = " ".join(text for text in expected.all_special_tokens)
    for text in [*texts(), f"a {marks}b"]:
        tokens = expected.encode(text)
        assert ours.encode(text) == tokens, repr(text)
        assert ours.encode(text, add_special_tokens=False) == expected.encode(
            text, add_special_tokens=False
        )
        assert ours.decode(tokens) == expected.decode(tokens, clean_up_tokenization_spaces=False)
    assert (ours.eos_token, ours.bos_token) == (expected.eos_token, expected.bos_token)
    return ours


BYTE_LEVEL: dict[str, dict[str, Any]] = {
    "GPT2Tokenizer": {},
    "GPT2TokenizerFast": {"add_prefix_space": True, "add_bos_token": True},
    "Qwen2Tokenizer": {"eos_token": "<|im_end|>", "add_eos_token": True},
    "RobertaTokenizer": {},
}


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_vocab_json_and_merges(name: str, tmp_path: Path) -> None:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"] if "Roberta" in name else ["<|endoftext|>"]  # fmt: skip
    trained_pairs(special).model.save(str(tmp_path))
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": name, **BYTE_LEVEL[name]})
    write_json(tmp_path / "config.json", {"model_type": "gpt2"})
    assert_same(tmp_path, transformers.AutoTokenizer.from_pretrained(tmp_path))


@pytest.mark.parametrize("lowers", [True, False])
def test_vocab_txt(lowers: bool, tmp_path: Path) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowers)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([CORPUS[:15000]], trainer)
    tokenizer.model.save(str(tmp_path))
    write_json(tmp_path / "tokenizer_config.json", {"do_lower_case": lowers})
    write_json(tmp_path / "config.json", {"model_type": "bert"})
    assert_same(tmp_path, transformers.AutoTokenizer.from_pretrained(tmp_path))


def test_tekken_json(tmp_path: Path) -> None:
    tokens: list[bytes] = [bytes([byte]) for byte in range(256)]
    letters = {character: byte for byte in range(256) for character in [_characters(bytes([byte]))]}
    vocabulary = trained_pairs([]).get_vocab()
    for text in sorted(vocabulary, key=lambda t: vocabulary[t]):
        token = bytes(letters[character] for character in text)
        tokens += [token] if len(token) > 1 else []
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


def model_file(path: Path, pieces: list[tuple[str, float, int]]) -> Path:
    """A SentencePiece model as a message of protocol buffers."""

    def field(number: int, kind: int, value: bytes) -> bytes:
        length, size = b"", len(value)
        while kind == 2:
            length += bytes([size & 127 | (128 if size > 127 else 0)])
            size >>= 7
            if not size:
                break
        return bytes([number << 3 | kind]) + length + value

    message = b"".join(
        field(1, 2, field(1, 2, text.encode()) + field(2, 5, struct.pack("<f", score)) + field(3, 0, bytes([kind])))
        for text, score, kind in pieces
    )  # fmt: skip
    path.write_bytes(message + field(2, 2, field(4, 0, b"\x09")))
    return path


def pieces_of(special: list[str]) -> list[tuple[str, float, int]]:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False)
    trained.train_from_iterator([CORPUS[:15000]], trainer)
    vocabulary = trained.get_vocab()
    ordered = sorted(vocabulary, key=lambda piece: (len(piece) == 1, vocabulary[piece]))
    tokens, _ = with_bytes(ordered)
    pieces = [(text, 0.0, 2 if text == "<unk>" else 3) for text in special]
    pieces += [(text, 0.0, 6) for text in tokens[len(SPECIAL) : len(SPECIAL) + 256]]
    return pieces + [(text, -float(i), 1) for i, text in enumerate(ordered)] + [("<tool>", 0.0, 4)]


FAMILIES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "LlamaTokenizer": (SPECIAL, {"add_bos_token": True}),
    "LlamaTokenizer of old": (SPECIAL, {"add_bos_token": True, "add_eos_token": True, "legacy": True}),
    "LlamaTokenizer bare": (SPECIAL, {"add_bos_token": False, "add_prefix_space": False}),
    "GemmaTokenizer": (["<pad>", "<eos>", "<bos>", "<unk>"], {"add_bos_token": True}),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_sentencepiece_models(family: str, tmp_path: Path) -> None:
    """As transformers' classes of the same pieces; its reader of the file needs the package sentencepiece."""
    special, options = FAMILIES[family]
    name = family.split()[0]
    pieces = pieces_of(special)
    path = model_file(tmp_path / "tokenizer.model", pieces)
    assert read_model(path) == [Piece(*piece) for piece in pieces]
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": name, **options})
    vocabulary = {text: number for number, (text, _, _) in enumerate(pieces)}
    from transformers.tokenization_utils_base import generate_merges

    merges = generate_merges(vocabulary)
    assert _merges(vocabulary) == merges
    expected = getattr(transformers, name)(vocab=vocabulary, merges=merges, **options)
    expected.add_tokens(["<tool>"])
    assert_same(tmp_path, expected)


def test_added_tokens_json(tmp_path: Path) -> None:
    trained_pairs(["<|endoftext|>"]).model.save(str(tmp_path))
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})
    write_json(tmp_path / "added_tokens.json", {"<|im_start|>": 700, "<|im_end|>": 701})
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": "<|im_end|>"})
    ours = load_tokenizer(HuggingFaceRepo(str(tmp_path)))
    assert ours.encode("<|im_end|>a<|im_start|>")[::2] == [701, 700]
    assert ours.eos_token_id == 701


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


@pytest.mark.parametrize("name", ["LlamaTokenizer", "BertTokenizer", "GPT2Tokenizer", "tekken"])
@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_files(name: str, content: bytes, tmp_path: Path) -> None:
    others = ["tokenizer.model", "vocab.txt", "vocab.json", "merges.txt"]
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
            assert all(isinstance(piece.text, str) for piece in read_model(path))
        except ValueError as error:
            assert str(error)
