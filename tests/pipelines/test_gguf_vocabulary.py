"""A model's tokenizer.json as GGUF metadata, against what the gguf package reads of the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.splits import SPLITS
from max.pipelines.gguf.vocabulary import tokenizer_metadata
from max.pipelines.lib.hf_utils import HuggingFaceRepo

KIND = gguf.TokenType
LLAMA3 = SPLITS["llama3"].patterns[0]
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
LETTERS = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}
MERGES = ["a b", "ab c"]


def isolated(**pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def sequence(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def found(
    folder: Path, rows: int = 0, model: Any = (), config: Any = None, files: Any = (), **values: Any
) -> dict[str, Any]:
    """The metadata of a folder with a tokenizer.json of byte-level pairs, changed in parts, without its prefix."""
    pairs = {"type": "BPE", "vocab": LETTERS, "merges": MERGES, **dict(model)}
    written = {"tokenizer.json": {"model": pairs, "pre_tokenizer": GPT2, **values}, **dict(files)}
    if config is not None:
        written["tokenizer_config.json"] = config
    for name, content in written.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, "utf-8")
    repo = HuggingFaceRepo(str(folder))
    metadata = tokenizer_metadata(repo, rows)
    return {
        key.removeprefix("tokenizer.").removeprefix("ggml."): value
        for key, value in metadata.items()
    }


@pytest.mark.parametrize(
    ("steps", "pre"),
    [
        (GPT2, "gpt-2"),
        ({"type": "ByteLevel"}, "gpt-2"),
        (sequence(isolated(Regex=LLAMA3), BYTES), "dbrx"),
        (sequence({"type": "Digits", "individual_digits": True}, GPT2), "starcoder"),
        (sequence(sequence(isolated(Regex=r"\p{N}")), GPT2), "starcoder"),
        (isolated(Regex=LLAMA3), "dbrx"),
    ],
)
def test_the_name_of_how_text_is_split(steps: Any, pre: str, tmp_path: Path) -> None:
    metadata = found(tmp_path, pre_tokenizer=steps)
    assert (metadata["model"], metadata["pre"]) == ("gpt2", pre)
    assert metadata["merges"] == MERGES and metadata["tokens"] == list(LETTERS)


def test_merges_that_are_ignored_for_whole_words(tmp_path: Path) -> None:
    steps = sequence(isolated(Regex=LLAMA3), BYTES)
    assert found(tmp_path, pre_tokenizer=steps, model={"ignore_merges": True})["pre"] == "llama3"


@pytest.mark.parametrize(
    "steps",
    [
        None, {"type": "ByteLevel", "add_prefix_space": True}, {"type": "Digits", "individual_digits": False},
        sequence(*[isolated(Regex=pattern) for pattern in SPLITS["default"].patterns]),
        sequence(isolated(Regex=r"\p{N}")), isolated(String=r"\p{N}"), {"type": "Whitespace"}, BYTES,
        sequence({**isolated(Regex=LLAMA3), "behavior": "Removed"}, BYTES),
        sequence({**isolated(Regex=LLAMA3), "invert": True}, BYTES),
    ],
)  # fmt: skip
def test_splits_without_a_name(steps: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ModelFilesError, match="no `pre` name of GGUF files splits as tokenizer.json does"
    ):
        found(tmp_path, pre_tokenizer=steps)


def test_files_without_pairs(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="has no tokenizer.json"):
        tokenizer_metadata(HuggingFaceRepo(str(tmp_path)), 0)
    for model in ({"type": "Unigram"}, {"type": "WordPiece"}):
        with pytest.raises(ModelFilesError, match=f"the tokenizer is of '{model['type']}'"):
            found(tmp_path, model=model)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}}}')
    with pytest.raises(ModelFilesError, match="the tokenizer is of 'BPE'"):
        tokenizer_metadata(HuggingFaceRepo(str(tmp_path)), 0)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFilesError, match="the tokenizer is of None"):
        tokenizer_metadata(HuggingFaceRepo(str(tmp_path)), 0)


def test_each_row_has_a_token(tmp_path: Path) -> None:
    """Added tokens have their kind, rows without a text are unused; a file may have more tokens than rows."""
    added = [
        {"id": 6, "content": "<|x|>", "special": True}, {"id": 5, "content": "<y>", "special": False},
    ]  # fmt: skip
    metadata = found(tmp_path, 9, added_tokens=added)
    texts = [*LETTERS, "<y>", "<|x|>", "[PAD7]", "[PAD8]"]
    kinds = [*[KIND.NORMAL] * 5, KIND.USER_DEFINED, KIND.CONTROL, KIND.UNUSED, KIND.UNUSED]
    assert metadata["tokens"] == texts and metadata["token_type"] == kinds
    assert found(tmp_path, 3, added_tokens=added)["tokens"] == texts[:7]
    assert found(tmp_path, 3, added_tokens=None)["tokens"] == texts[:5]
    # a merge of texts with spaces is a list
    spaced = found(tmp_path, model={"merges": [["a", "b"], ["ab", "c"]]})
    assert spaced["merges"] == MERGES


def test_what_the_gguf_package_reads(tmp_path: Path) -> None:
    """Special tokens as texts and objects, merges, and the chat template."""
    added = [
        {"id": 5 + i, "content": text, "special": True}
        for i, text in enumerate(["<s>", "</s>", "<p>", "<u>"])
    ]
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": "<p>", "unk_token": {"content": "<u>"},
              "chat_template": "{{ messages }}"}  # fmt: skip
    metadata = found(tmp_path, added_tokens=added, config=config)
    theirs = gguf.SpecialVocab(tmp_path, load_merges=True)
    assert metadata["merges"] == theirs.merges and metadata["chat_template"] == theirs.chat_template
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ours = {name: metadata[f"{key}_token_id"] for name, key in names.items()}
    assert (
        ours
        == {name: theirs.special_token_ids[name] for name in names}
        == dict(bos=5, eos=6, pad=7, unk=8)
    )
    wrong = found(
        tmp_path,
        added_tokens=added,
        config={"bos_token": "<none>", "eos_token": 3, "pad_token": None, "unk_token": ["x"]},
    )
    assert not [key for key in wrong if key.endswith("_token_id")] and "chat_template" not in wrong


def test_templates_in_files_of_their_own(tmp_path: Path) -> None:
    config = {"chat_template": "of the config"}
    assert found(tmp_path, config=config)["chat_template"] == "of the config"
    listed = {"chat_template": [{"name": "default", "template": "x"}]}
    assert "chat_template" not in found(tmp_path, config=listed)
    other = {"chat_template.json": {"chat_template": "of JSON"}}
    assert found(tmp_path, config=config, files=other)["chat_template"] == "of JSON"
    assert (
        found(tmp_path, config=config, files={"chat_template.json": {}})["chat_template"]
        == "of the config"
    )
    assert (
        found(tmp_path, config=config, files={"chat_template.jinja": "of größe"})["chat_template"]
        == "of größe"
    )


def test_absent_files_are_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, file = list[str](), HuggingFaceRepo.file
    monkeypatch.setattr(
        HuggingFaceRepo, "file", lambda repo, name: asked.append(name) or file(repo, name)
    )
    found(tmp_path)
    assert asked == ["tokenizer.json", "tokenizer_config.json"]


def test_whether_texts_begin_with_a_token(tmp_path: Path) -> None:
    added = [{"id": 5, "content": "<ß>", "special": True}]
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<ß>", "type_id": 0}}],
    }
    for bos in ("<ß>", {"content": "<ß>"}):
        config = {"bos_token": bos}
        assert (
            found(tmp_path, added_tokens=added, config=config, post_processor=template)[
                "add_bos_token"
            ]
            is True
        )
        assert (
            found(tmp_path, added_tokens=added, config=config, post_processor=None)["add_bos_token"]
            is False
        )
    for processor in (template, None):
        metadata = found(tmp_path, added_tokens=added, config={}, post_processor=processor)
        assert metadata["add_bos_token"] is False


def pieces(
    folder: Path, normalizer: Any, pre_tokenizer: Any = None, **model: Any
) -> dict[str, Any]:
    vocabulary = {
        "<unk>": 0,
        "<0x0A>": 1,
        "<0xAG>": 2,
        **{text: 3 + i for i, text in enumerate(LETTERS)},
    }
    # two pairs make one token: the first counts
    merges = ["b c", "a b", "ab c", "a bc", "a  b"]
    given = {
        "vocab": {**vocabulary, "bc": 8, "a b": 9},
        "merges": merges,
        "byte_fallback": True,
        **model,
    }
    return found(folder, 11, given, normalizer=normalizer, pre_tokenizer=pre_tokenizer)


def test_pairs_of_sentencepiece(tmp_path: Path) -> None:
    """The rank of the first merge that makes a token is its score; others come last."""
    metadata = pieces(tmp_path, {"type": "Prepend", "prepend": "_"}, unk_token="<unk>")
    assert (metadata["model"], metadata["pre"], metadata["add_space_prefix"]) == (
        "llama",
        "default",
        True,
    )
    assert metadata["tokens"] == ["<unk>", "<0x0A>", "<0xAG>", *LETTERS, "bc", "a b", "[PAD10]"]
    assert metadata["scores"] == [*[-5.0] * 6, -1.0, -2.0, 0.0, -4.0, -5.0]
    kinds = [KIND.UNKNOWN, KIND.BYTE, *[KIND.NORMAL] * 8, KIND.UNUSED]
    assert metadata["token_type"] == kinds and "merges" not in metadata
    assert pieces(tmp_path, None, unk_token="<none>")["token_type"][0] == KIND.NORMAL
    assert pieces(tmp_path, None)["token_type"][0] == KIND.NORMAL


@pytest.mark.parametrize(
    ("normalizer", "scheme", "prefix"),
    [(None, "first", True), (None, "always", True), (None, "never", False), (None, None, False),
     ({"type": "Prepend", "prepend": "_"}, None, True)],
)  # fmt: skip
def test_a_space_before_the_text(
    normalizer: Any, scheme: str | None, prefix: bool, tmp_path: Path
) -> None:
    step = (
        None
        if scheme is None
        else {"type": "Metaspace", "replacement": "_", "prepend_scheme": scheme}
    )
    assert pieces(tmp_path, normalizer, step)["add_space_prefix"] is prefix
