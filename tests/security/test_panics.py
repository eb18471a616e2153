"""Panics of packages in Rust are errors: a damaged tokenizer.json ends in two lines, and no server or worker ends."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max.entrypoints.cli import cli
from max.entrypoints.cli.errors import report
from max.pipelines.core.exceptions import InputError, ModelFilesError, UserError
from max.pipelines.core.native_calls import is_panic, native_calls, quiet_panics
from max.pipelines.lib.hf_utils import HuggingFaceRepo
from max.pipelines.lib.registry import PIPELINE_REGISTRY
from max.pipelines.structured.step_masks import MaskWork
from max.pipelines.tokenization.hf_tokenizer import HFTokenizer, load_tokenizer
from max.pipelines.tokenization.text_stream import TextStream
from tests.pipelines.broken_files import STRANGE, TINY, places

NORMALIZERS: list[Any] = [
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Precompiled", "precompiled_charsmap": "AAAAA"},
    {"type": "Precompiled", "precompiled_charsmap": ["A"]},
    {"type": "Precompiled"},
    {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Precompiled", "precompiled_charsmap": "////"}]},
]  # fmt: skip
"""Normalizers of which each makes the package panic."""


def panicking(**parts: Any) -> str:
    """The text of a tokenizer.json with other parts."""
    return json.dumps({**json.loads((TINY / "tokenizer.json").read_text()), **parts})


def panic() -> BaseException:
    from tokenizers import Tokenizer

    with quiet_panics(), pytest.raises(BaseException) as caught:
        Tokenizer.from_str(panicking(normalizer=NORMALIZERS[0]))
    return caught.value


def test_a_panic_is_no_exception() -> None:
    error = panic()
    assert is_panic(error) and not isinstance(error, Exception)
    assert not is_panic(ValueError()) and not is_panic(None) and not is_panic(KeyboardInterrupt())


def test_the_door_makes_it_an_error() -> None:
    def fails(error: BaseException) -> None:
        raise error

    guarded = native_calls("it fails", "Do that.", InputError)
    with pytest.raises(InputError, match=r"it fails: Precompiled: .*\nDo that."):
        guarded(fails)(panic())
    with pytest.raises(KeyError), guarded:
        fails(KeyError("x"))
    with pytest.raises(KeyboardInterrupt), guarded:
        fails(KeyboardInterrupt())


def test_a_stream_of_text_that_panics() -> None:
    """A decoder of a stream is the package's own method."""
    failure = panic()

    def decode(tokens: Sequence[int]) -> str:
        raise failure if tokens[-1] else KeyError

    stream = TextStream(decode)
    with pytest.raises(ModelFilesError, match="cannot handle its own tokens: Precompiled"):
        stream.push([1])
    with pytest.raises(KeyError):
        stream.push([0])
    assert not isinstance(failure, Exception)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_a_tokenizer_that_panics(normalizer: Any, tmp_path: Path, capfd) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    (model / "tokenizer.json").write_text(panicking(normalizer=normalizer))
    failures: list[BaseException] = []

    def load() -> None:
        try:
            load_tokenizer(HuggingFaceRepo(str(model)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 3 and {type(failure) for failure in failures} == {ModelFilesError}
    PIPELINE_REGISTRY.reset()
    assert report(cli, ["generate", "--model", str(model), "--prompt", "hi"]) == 2
    told = capfd.readouterr().err
    assert "panicked" not in told and "Traceback" not in told
    assert "tokenizer.json is no tokenizer: Precompiled" in told


def test_other_output_is_kept(capfd) -> None:
    with quiet_panics():
        os.write(2, b"first\n")
        print("second", file=sys.stderr, flush=True)
    with pytest.raises(KeyError), quiet_panics():
        os.write(2, b"third\n")
        raise KeyError
    assert sorted(capfd.readouterr().err.split()) == ["first", "second", "third"]


def test_numbers_of_tokens_with_great_gaps() -> None:
    from tokenizers import Tokenizer, models

    for number in (2**31, 2**32 - 1):
        delegate = Tokenizer(models.WordLevel({"a": 0, "b": number}, unk_token="a"))
        tokenizer = HFTokenizer(delegate, {}, {})
        with pytest.raises(ModelFilesError, match=f"has 2 tokens, and one has the number {number}"):
            tokenizer.to_json()
    assert HFTokenizer(Tokenizer(models.WordLevel({"a": 0, "b": 70_000}, "a")), {}, {}).to_json()


def test_a_mask_that_panics_fails_its_request_alone() -> None:
    class Matcher:
        def __init__(self, error: BaseException | None) -> None:
            self.error = error

        def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
            if self.error is not None:
                raise self.error

    masks = np.zeros((3, 2), np.int32)
    work = MaskWork(masks, deque([(Matcher(None), 0), (Matcher(panic()), 1), (Matcher(None), 2)]))
    work.run()
    assert work.error is None and [row for row, _ in work.panics] == [1]
    assert masks.tolist() == [[0, 0], [-1, -1], [0, 0]]


PROGRAM = """
import json, sys
from pathlib import Path
from max.pipelines.core.exceptions import UserError
from max.pipelines.lib.hf_utils import HuggingFaceRepo
from max.pipelines.tokenization.hf_tokenizer import load_tokenizer

import resource
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
folder = Path(sys.argv[1])
for line in sys.stdin:
    (folder / "tokenizer.json").write_text(line)
    try:
        tokenizer = load_tokenizer(HuggingFaceRepo(str(folder)))
        for text in ("hello ab  <s> 日本", "", "a" * 300, "b" * 5000):
            tokenizer.decode(tokenizer.encode(text))
        tokenizer.decode([0, 1, 4, 5, 7, 999999])
        tokenizer.fewest_tokens("a" * 9999)
        len(tokenizer), tokenizer.all_special_ids, tokenizer.eos_token_id
        tokenizer.to_json()
        print("loaded", flush=True)
    except UserError as error:
        print("refused", str(error)[:200].replace(chr(10), " "), flush=True)
"""
_TOKENS = {"a": 0, "b": 1, "ab": 2, "##b": 3, "[UNK]": 4, "▁a": 6, "Ġ": 7, "<0x41>": 8}
PARTS: dict[str, list[Any]] = {
    "model": [
        {
            "type": "BPE",
            "dropout": None,
            "unk_token": "[UNK]",
            "fuse_unk": False,
            "byte_fallback": True,
            "vocab": _TOKENS,
            "merges": [["a", "b"]],
        },
        {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": _TOKENS,
        },
        {"type": "WordLevel", "vocab": _TOKENS, "unk_token": "[UNK]"},
        {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [["<unk>", 0.0], ["a", -1.0], ["▁a", -2.5]],
            "byte_fallback": False,
        },
    ],
    "normalizer": [
        None,
        None,
        *NORMALIZERS[:1],
        {"type": "NFKC"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
        {"type": "Prepend", "prepend": "▁"},
    ],
    "pre_tokenizer": [
        None,
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
        {"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Isolated", "invert": False},
        {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}]},
    ],
    "post_processor": [
        None,
        {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
        {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [5], "tokens": ["<s>"]}},
        },
    ],
    "decoder": [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
    ],
    "truncation": [
        None,
        {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0},
    ],
    "padding": [
        None,
        {
            "strategy": {"Fixed": 10},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        },
    ],
}


def damaged(seed: int) -> str:
    """A tokenizer of random parts, of which up to three values are changed, renamed or left out."""
    draw = random.Random(seed)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {"id": 5, "content": "<s>", **flags, "special": True}
    value: dict[str, Any] = {"version": "1.0", "added_tokens": [added]}
    for name, choices in PARTS.items():
        value[name] = copy.deepcopy(draw.choice(choices))
    for _ in range(draw.randint(0, 3)):
        container, key = draw.choice(places(value))
        match draw.randrange(5):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[f"{key}x"] = container.pop(key)
            case _:
                container[key] = copy.deepcopy(
                    draw.choice([*STRANGE, 2**31, 2**32 - 1, {"Regex": "("}])
                )
    return json.dumps(value)


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.long)])
def test_damaged_tokenizers(count: int, tmp_path: Path) -> None:
    first = random.randrange(1 << 30) if count > 400 else 0
    lines = [damaged(seed) for seed in range(first, first + count)]
    (tmp_path / "config.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
    )
    told = done.stdout.splitlines()
    last = lines[len(told)] if len(told) < count else ""
    assert done.returncode == 0 and len(told) == count, (last, done.stderr[-2000:])
    assert sum(line == "loaded" for line in told) > count // 10
    assert any("Precompiled" in line for line in told)


assert issubclass(ModelFilesError, UserError)
