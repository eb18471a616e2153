"""Files of tiktoken, line by line; whole tokenizers of older models are in `test_older_tokenizers.py`."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from max.pipelines.tokenization.byte_pair_files import byte_characters, tiktoken

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
