"""GGUF files between `max quantize` and llama.cpp: each reads the other's files, with nearly equal perplexity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from max.engine import InferenceSession
from max.pipelines.gguf.export import EXPORT_TYPES, export_gguf
from max.pipelines.lib.hf_utils import HuggingFaceRepo
from max.pipelines.perplexity import perplexity, windows_of
from max.pipelines.tokenization.hf_tokenizer import load_tokenizer
from tests.architectures import llama_cpp

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
WINDOW, WINDOWS = 128, 4

FILE_TYPES = {
    "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k_m": 12, "q4_k_m": 15, "q5_k_m": 17,
    "q6_k": 18,
    "iq4_nl": 25, "iq4_xs": 30,
}  # fmt: skip
"""llama.cpp's numbers of kinds of files."""


@pytest.fixture(scope="module")
def peer() -> Iterator[llama_cpp.LlamaCpp]:
    process = llama_cpp.start()
    yield process
    process.close()


@pytest.fixture(scope="module")
def text() -> str:
    return (TINY / "heldout.txt").read_text("utf-8")[:6000]


@pytest.fixture(scope="module")
def windows(text: str) -> list[list[int]]:
    tokens = load_tokenizer(HuggingFaceRepo(str(TINY))).encode(text, False)
    parts = windows_of(list(tokens), WINDOW, WINDOWS)
    assert len(parts) == WINDOWS
    return parts


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exact") / "f32.gguf"
    export_gguf(TINY, path, "f32", InferenceSession())
    return path


def compare(
    path: Path, text: str, windows: list[list[int]], peer: llama_cpp.LlamaCpp
) -> tuple[float, float]:
    """Returns our perplexity of a file, and llama.cpp's."""
    ours = perplexity(text, WINDOW, WINDOWS, model_path=str(path)).value
    return ours, peer.perplexity(path, windows)


def _some_long(kinds: Iterable[str], short: Sequence[str]) -> list[Any]:
    return [kind if kind in short else pytest.param(kind, marks=pytest.mark.long) for kind in kinds]


@pytest.mark.parametrize("kind", _some_long(EXPORT_TYPES, ("q4_k", "q4_0")))
def test_llama_cpp_reads_ours(
    kind: str, tmp_path: Path, text: str, windows: list[list[int]], peer: llama_cpp.LlamaCpp
) -> None:
    path = tmp_path / f"{kind}.gguf"
    export_gguf(TINY, path, kind, InferenceSession())
    ours, theirs = compare(path, text, windows, peer)
    assert ours == pytest.approx(theirs, rel=0.01), (ours, theirs)


@pytest.mark.parametrize("kind", _some_long(FILE_TYPES, ("q4_k_m", "q5_0")))
def test_ours_reads_llama_cpps(
    kind: str,
    exact: Path,
    tmp_path: Path,
    text: str,
    windows: list[list[int]],
    peer: llama_cpp.LlamaCpp,
) -> None:
    path = tmp_path / f"{kind}.gguf"
    peer.quantize(exact, path, FILE_TYPES[kind])
    ours, theirs = compare(path, text, windows, peer)
    assert ours == pytest.approx(theirs, rel=0.01), (ours, theirs)


def test_tokenizers(exact: Path, peer: llama_cpp.LlamaCpp) -> None:
    """llama.cpp tokenizes a text as ours does."""
    tokens = load_tokenizer(HuggingFaceRepo(str(exact)))
    prompt = "What is the capital of Norway? größer 日本語 12345"
    assert peer.tokens(exact, prompt) == tokens.encode(prompt, False)
