"""Files of tiktoken, line by line; whole tokenizers of older models are in `test_older_tokenizers.py`."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from max.pipelines.tokenization import byte_pair_files
from max.pipelines.tokenization.byte_pair_files import (
    byte_characters,
    cohere,
    gpt2,
    gpt_neox,
    qwen2,
    qwen35,
    roberta,
    roberta_ends,
    tekken,
    tiktoken,
)

LETTERS = [bytes([byte]) for byte in range(256)]


def line(token: bytes, rank: int) -> str:
    return f"{base64.b64encode(token).decode()} {rank}"


def written(folder: Path, *more: str, tokens: Any = (*LETTERS, b"ab", b"abc")) -> Path:
    path = folder / "m.tiktoken"
    lines = [line(token, rank) for rank, token in enumerate(tokens)]
    path.write_text("\n".join([*lines, *more]) + "\n\n")
    return path


def added(**texts: str) -> dict[str, Any]:
    return {
        "added_tokens_decoder": {
            number.lstrip("n"): {"content": text} for number, text in texts.items()
        }
    }


def test_tokens_by_rank(tmp_path: Path) -> None:
    tokenizer = tiktoken(written(tmp_path), {})
    assert tokenizer.encode("abcab").ids == [257, 256] and tokenizer.get_vocab_size() == 258
    assert tokenizer.decode([257, 256]) == "abcab"
    assert tokenizer.encode("é \n").ids == [*"é \n".encode()]
    pair = tokenizer.encode("ab", "a")
    assert (pair.ids, pair.type_ids) == ([256, 97], [0, 1])


@pytest.mark.parametrize("wrong", ["YQ==", "YQ== x", "YQ== 1 2", "YQ== -1", "YQ== 1.5"])
def test_lines_without_a_token_and_its_rank(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"the line b'{wrong}' has no token and rank"):
        tiktoken(written(tmp_path, wrong), {})


def test_a_file_without_tokens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no tokens in it"):
        tiktoken(written(tmp_path, tokens=()), {})


def test_added_tokens_and_those_that_nobody_names(tmp_path: Path) -> None:
    """Numbers have no gaps; a number of a rank names nothing new."""
    tokenizer = tiktoken(written(tmp_path), added(n260="<x>", n258="<y>", n5="<z>"))
    assert tokenizer.get_vocab_size() == 261
    assert tokenizer.encode("ab<x><y>ab").ids == [256, 260, 258, 256]
    assert (
        tokenizer.id_to_token(259) == "<|reserved_token_259|>"
        and tokenizer.token_to_id("<z>") is None
    )
    kinds = {
        token["id"]: token["special"] for token in json.loads(tokenizer.to_str())["added_tokens"]
    }
    assert kinds == {258: True, 259: True, 260: True}


@pytest.mark.parametrize("number", ["x", "-1", "1.5", "", "1" * 16, "1" * 400])
def test_keys_that_are_no_numbers(number: str, tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {number: {"content": "<x>"}}}
    with pytest.raises(ValueError, match="has a key that is no number of a token"):
        tiktoken(written(tmp_path), config)


def test_a_number_far_behind_the_ranks(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"9" * 15: {"content": "<x>"}}}
    with pytest.raises(
        ValueError, match="258 tokens have ranks, but one has the number 999999999999999"
    ):
        tiktoken(written(tmp_path), config)


def test_the_tokens_that_qwen_has_in_its_code(tmp_path: Path) -> None:
    """Only where no file names added tokens."""
    name = {"tokenizer_class": "QWenTokenizer"}
    assert tiktoken(written(tmp_path), name).token_to_id("<|endoftext|>") == 258
    assert (
        tiktoken(written(tmp_path), {**name, **added(n258="<x>")}).token_to_id("<|endoftext|>")
        is None
    )
    assert tiktoken(written(tmp_path), {}).token_to_id("<|endoftext|>") is None


def test_a_character_for_each_byte() -> None:
    """GPT-2's: printable ones of Latin-1 are themselves, the others follow from 256 on."""
    from tokenizers import pre_tokenizers

    characters = [byte_characters(letter) for letter in LETTERS]
    assert (
        set(characters) == set(pre_tokenizers.ByteLevel.alphabet()) and len(set(characters)) == 256
    )
    assert byte_characters(b" \n") == "\u0120\u010a" and byte_characters("é".encode()) == "Ã©"
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = "".join(map(chr, [*range(1, 0x500), 0x1F642]))
    assert "".join(part for part, _ in level.pre_tokenize_str(text)) == byte_characters(
        text.encode()
    )


def test_merges_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All halves of a token that are tokens, by the rank of the left one."""
    converter = pytest.importorskip("transformers.convert_slow_tokenizer").TikTokenConverter
    tokens = (*LETTERS, b"bc", b"ab", b"cd", b"abcd", b"abc", b"bcd", b"xyz", b"'S")
    ranks = {token: rank for rank, token in enumerate(tokens)}
    monkeypatch.setattr(
        converter, "load_tiktoken_bpe", staticmethod(lambda _: ranks), raising=False
    )
    own = converter.__new__(converter)
    _, expected = own.extract_vocab_merges_from_model("m.tiktoken")
    tokenizer = tiktoken(written(tmp_path, tokens=tokens), {})
    found = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    assert found == [tuple(pair) for pair in expected] and len(found) > 6
    # a word that is a token needs no merges; words are split by the model's pattern alone
    assert tokenizer.encode("xyz").ids == [ranks[b"xyz"]]
    assert tokenizer.encode("a'S").ids == [97, ranks[b"'S"]]


@pytest.mark.parametrize("token", ["YQ=", "Y!Q==", "\u00e9"])
def test_tokens_that_are_no_base64(token: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a token is not base64"):
        tiktoken(written(tmp_path, f"{token} 300"), {})
    with pytest.raises(ValueError, match="a token is not base64"):
        tekken(tekken_file([*LETTERS], token_bytes=token))


def test_reserved_tokens_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_pair_files, "_MOST_RESERVED", 4)
    assert tiktoken(written(tmp_path), added(n261="<x>")).get_vocab_size() == 262
    with pytest.raises(ValueError, match="but one has the number 262"):
        tiktoken(written(tmp_path), added(n262="<x>"))
    assert tiktoken(written(tmp_path, tokens=(b"a",)), {}).get_vocab_size() == 1


def tekken_file(tokens: list[bytes], token_bytes: str | None = None, **config: Any) -> dict[str, Any]:  # fmt: skip
    vocabulary = [{"token_bytes": base64.b64encode(token).decode()} for token in tokens]
    vocabulary += [] if token_bytes is None else [{"token_bytes": token_bytes}]
    special = [{"rank": rank, "token_str": f"<{rank}>"} for rank in (2, 0, 1)]
    return {
        "config": {"pattern": r"\p{L}+|[^\p{L}]", **config},
        "vocab": vocabulary, "special_tokens": special,
    }  # fmt: skip


def test_special_tokens_of_tekken_by_rank() -> None:
    for more, first in (({}, 3), ({"default_num_special_tokens": 5}, 5)):
        tokenizer = tekken(tekken_file([*LETTERS, b"ab"], **more))
        assert tokenizer.encode("<1>ab<2>").ids == [1, first + 256, 2]
        assert (
            tokenizer.decode([1, first + 256]) == "ab" and tokenizer.get_vocab_size() == first + 257
        )
        assert tokenizer.id_to_token(4) == ("<SPECIAL_4>" if first == 5 else byte_characters(b"\x01"))  # fmt: skip
    assert tekken(tekken_file([*LETTERS, b"ab"], default_vocab_size=259)).get_vocab_size() == 259
    wrong = tekken_file([*LETTERS])
    wrong["special_tokens"][0]["rank"] = 3
    with pytest.raises(ValueError, match="ranks of special tokens"):
        tekken(wrong)


def pair_files(folder: Path) -> tuple[Path, Path]:
    """Letters, special tokens, and pairs of digits, of spaces and of marks."""
    texts = ["<s>", "</s>", *map(byte_characters, LETTERS)]
    pairs = [("1", "2"), ("\u0120", "a"), ("'", "S")]
    texts += ["".join(pair) for pair in pairs]
    (folder / "vocab.json").write_text(json.dumps({text: number for number, text in enumerate(texts)}))  # fmt: skip
    (folder / "merges.txt").write_text("\n".join(map(" ".join, pairs)))
    return folder / "vocab.json", folder / "merges.txt"


def test_files_of_pairs(tmp_path: Path) -> None:
    files = pair_files(tmp_path)
    for make, texts in (
        (gpt2, {"12": ["12"], "a": ["a"], "'S": ["'", "S"]}),
        (cohere, {"12": ["1", "2"], "a": ["a"]}),
        (qwen2, {"12": ["1", "2"], "a": ["a"], "'S": ["'S"]}),
    ):
        for text, tokens in texts.items():
            assert make(*files, {}).encode(text).tokens == tokens
        assert make(*files, {"add_prefix_space": True}).encode("a").tokens == ["\u0120a"]
        assert make(*files, {"add_prefix_space": False}).decode([0, 1]) == "<s></s>"
    for make, composes in ((gpt2, False), (gpt_neox, True), (cohere, True), (qwen2, True), (qwen35, True)):  # fmt: skip
        tokens = make(*files, {}).encode("e\u0301").ids
        assert (tokens == make(*files, {}).encode("\u00e9").ids) is composes
    # a mark within a word, as Qwen 3.5 has it
    words = [
        make(*files, {}).pre_tokenizer.pre_tokenize_str("x\u0301y") for make in (qwen2, qwen35)
    ]
    assert [len(each) for each in words] == [2, 1]


def test_the_ends_of_roberta(tmp_path: Path) -> None:
    config = {"cls_token": "<s>", "sep_token": "</s>"}
    for more, trims, spaced in (
        ({}, True, False),
        ({"trim_offsets": False, "add_prefix_space": True}, False, True),
    ):
        tokenizer = roberta(*pair_files(tmp_path), {**config, **more})
        roberta_ends(tokenizer, {**config, **more})
        made = json.loads(tokenizer.to_str())["post_processor"]
        assert (made["trim_offsets"], made["add_prefix_space"]) == (trims, spaced)
        assert (made["cls"], made["sep"]) == (["<s>", 0], ["</s>", 1])
        encoding = tokenizer.encode(" a")
        assert encoding.tokens[0] == "<s>" and encoding.tokens[-1] == "</s>"
        assert encoding.offsets[-2] == ((1, 2) if trims else (0, 2))
