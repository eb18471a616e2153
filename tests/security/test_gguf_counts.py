"""Counts, lengths, sizes and offsets of GGUF files that do not fit the file are errors, and take no memory.

CVE-2025-53630, CVE-2026-27940 (llama.cpp: sums and products of sizes overflowed), CVE-2025-49847 (llama.cpp: lengths of
tokens), CVE-2025-0317 (Ollama: a block size or an alignment of zero), CVE-2026-7482 (Ollama: tensors beyond the file).
"""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from max.driver import Tensor
from max.graph.weights import GGUFFile, GGUFWeights, WeightsFileError
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.tokenizer import tokenizer_of
from tests.weights.test_gguf_file import F32, Q4_K, Q8_0, file_of, tensor, text, value

EDGES = (0, 1, 2, 3, 7, 31, 32, 33, 255, 256, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**42 + 1, 2**61, 2**62,
    2**63 - 1, 2**63, 2**64 - 33, 2**64 - 32, 2**64 - 8, 2**64 - 1)  # fmt: skip
KINDS = (F32, Q8_0, Q4_K, 0, 1, 4, 5, 9, 30, 31, 39, 2**31, 2**32 - 1)
COUNT = 1500


def draw_file(path: Path, draw: random.Random) -> Path:
    """A small file of which each number may be any edge."""

    def number(usual: int) -> int:
        return draw.choice(EDGES) if draw.random() < 0.25 else usual

    def array(kind: int, count: int, data: bytes) -> bytes:
        return struct.pack("<IQ", number(kind) & 0xFFFFFFFF, number(count)) + data

    def long_text(content: str) -> bytes:
        return struct.pack("<Q", number(len(content))) + content.encode()

    values = [
        text("tokenizer.ggml.model") + struct.pack("<I", 8) + text(draw.choice(["llama", "gpt2", "bert", "t5"])),
        value("tokenizer.ggml.tokens", 9, array(8, 3, long_text("a") + long_text("<s>") + long_text("[UNK]"))),
        value("tokenizer.ggml.scores", 9, array(6, 3, struct.pack("<3f", 0, -1, -2))),
        value("tokenizer.ggml.token_type", 9, array(5, 3, struct.pack("<3i", 1, 3, number(2) % 2**31))),
        value("tokenizer.ggml.bos_token_id", 4, struct.pack("<I", number(1) & 0xFFFFFFFF)),
        value("general.alignment", draw.choice([4, 4, 4, 10]), struct.pack("<Q", number(32))[: draw.choice([4, 4, 8])]),
        value("x", 9, struct.pack("<IQ", 9, number(1)) + array(4, 1, bytes(4))),
    ]  # fmt: skip
    draw.shuffle(values)
    shape = tuple(number(size) for size in draw.choice([(32,), (2, 32), (1, 256), (0, 32), ()]))
    tensors = [tensor(f"t{i}", shape, draw.choice(KINDS) if draw.random() < 0.4 else F32, number(256 * i))
        for i in range(draw.randint(0, 2))]  # fmt: skip
    kept = values[: draw.randint(0, len(values))]
    changed = {}
    if draw.random() < 0.3:
        changed = {draw.choice(["num_tensors", "num_values"]): draw.choice(EDGES)}
    return file_of(path, tensors, kept, **changed)


def test_random_counts_lengths_and_offsets(tmp_path: Path) -> None:
    """CVE-2025-53630, CVE-2026-27940, CVE-2025-49847, CVE-2025-0317, CVE-2026-7482."""
    draw, opened, path = random.Random(0), 0, tmp_path / "a.gguf"
    tracemalloc.start()
    try:
        for seed in range(COUNT):
            draw.seed(seed)
            draw_file(path, draw)
            size = path.stat().st_size
            try:
                file = GGUFFile(path)
                opened += 1
                for entry in file.tensors.values():
                    assert entry.nbytes is None or entry.begin + entry.nbytes <= size, seed
                weights = GGUFWeights(path)
                for name, weight in weights.items():
                    try:
                        data = Tensor.from_dlpack(weight.data().data)
                    except ValueError as error:
                        assert name in str(error) or "weight" in str(error), (seed, error)
                        continue
                    assert data.num_elements * data.dtype.size_in_bytes <= 8 * size, seed
                tokenizer_of(file)
            except (WeightsFileError, ModelFilesError):
                pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert opened > COUNT // 20 and peak < 32 << 20, (opened, peak)


@pytest.mark.parametrize(
    "shape", [(2**42 + 1, 2**20), (2**32, 2**32), (2**63, 2), (0, 2**63), (2**64 - 1,), (2**61,)]
)
@pytest.mark.parametrize("kind", [F32, Q8_0, Q4_K])
def test_sizes_whose_product_overflows(shape: tuple[int, ...], kind: int, tmp_path: Path) -> None:
    """CVE-2025-53630, CVE-2026-27940: a product modulo 2 ** 64 would fit."""
    path = file_of(tmp_path / "a.gguf", [tensor("t", shape, kind, 0)])
    with pytest.raises(WeightsFileError, match="bytes|multiples|too large"):
        GGUFFile(path)


@pytest.mark.parametrize("offset", [512, 2**63, 2**64 - 32, 2**64 - 256])
def test_tensors_beyond_the_file(offset: int, tmp_path: Path) -> None:
    """CVE-2026-7482, CVE-2025-53630: an offset whose sum with the size wraps around would fit."""
    path = file_of(tmp_path / "a.gguf", [tensor("t", (64,), F32, offset)])
    with pytest.raises(WeightsFileError, match="'t' is at bytes"):
        GGUFFile(path)


@pytest.mark.parametrize("alignment", [0, 1, 3, 2**31 + 1])
def test_alignments(alignment: int, tmp_path: Path) -> None:
    """CVE-2025-0317."""
    values = [value("general.alignment", 4, struct.pack("<I", alignment))]
    with pytest.raises(WeightsFileError, match="expected a multiple of 8"):
        GGUFFile(file_of(tmp_path / "a.gguf", [tensor("t", (64,), F32, 0)], values))
