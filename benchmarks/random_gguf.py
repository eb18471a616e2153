"""GGUF files of Llama's form with random blocks, written tensor by tensor: no float of the model is ever made.

Blocks are random bytes with scales of the size of a model's, so every value is finite. The vocabulary is random, too: byte
pairs that were joined at random, as many merges as Llama 3 has for its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gguf_files import gguf_name
from max.dtype.blocks import BLOCK_FORMATS
from max.pipelines.gguf.file_writer import GGUFEntry, write_gguf

# the place of each float16 in a block, and its size where elements are to have a deviation of about 0.02 and a mean near 0
SCALES: dict[str, dict[int, float]] = {
    "Q4_0": {0: 4e-3},
    "Q8_0": {0: 3e-4},
    "Q4_K": {0: 1.2e-4, 2: 9e-4},
    "Q5_K": {0: 6e-5, 2: 9e-4},
    "Q6_K": {208: 1.5e-5},
}


def random_blocks(
    rng: np.random.Generator, shape: tuple[int, ...], encoding: str
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random blocks of a matrix.

    Args:
        rng: The generator.
        shape: The matrix's shape in elements; the last dimension is a multiple of the encoding's block.
        encoding: A key of `BLOCK_FORMATS`.

    Returns:
        uint8 ``[…, bytes of a row]``.
    """
    form = BLOCK_FORMATS[encoding]
    blocks = math.prod(shape) // form.elements
    data = rng.integers(0, 256, (blocks, form.bytes), np.uint8)
    for place, size in SCALES[encoding].items():
        scales = rng.uniform(0.7 * size, 1.3 * size, (blocks, 1)).astype(np.float16)
        data[:, place : place + 2] = scales.view(np.uint8)
    return data.reshape(*shape[:-1], -1)


def byte_alphabet() -> list[str]:
    """The characters of byte-level vocabularies, by byte: printable ones stand for themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def random_vocabulary(
    rng: np.random.Generator, size: int, most: int = 12
) -> tuple[list[str], list[str]]:
    """A byte-level vocabulary and its merges: each token is two earlier ones, joined.

    Args:
        rng: The generator.
        size: Tokens, 256 or more.
        most: The characters of the longest token.
    """
    tokens = byte_alphabet()
    numbers = {text: number for number, text in enumerate(tokens)}
    merges: dict[str, None] = {}
    while len(tokens) < size:
        # short tokens are parts of many
        for left, right in (rng.random((size, 2)) ** 3 * len(tokens)).astype(int).tolist():
            text = tokens[left] + tokens[right]
            if text in numbers or len(text) > most or len(tokens) == size:
                continue
            merges[f"{tokens[left]} {tokens[right]}"] = None
            numbers[text] = len(tokens)
            tokens.append(text)
    # other ways to the same token, as byte pairs of a real vocabulary have them: about twice as many merges as tokens
    for text in tokens[256:]:
        cuts = (i for i in range(1, len(text)) if text[:i] in numbers and text[i:] in numbers)
        merges |= {f"{text[:i]} {text[i:]}": None for i in list(cuts)[:2]}
    return tokens, list(merges)


def write_random_gguf(
    path: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], encoding: str
) -> Path:
    """Writes a Llama as a GGUF file; holds one tensor at a time.

    Args:
        path: The file.
        config: The keys of config.json that describe the shape.
        shapes: The weights by the names of the Hugging Face layout. Vectors are ones in float32.
        encoding: Of matrices, a key of `BLOCK_FORMATS`; an output layer of its own is in Q6_K where that is a K format.
    """
    rng = np.random.default_rng(0)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    tokens, merges = random_vocabulary(rng, config["vocab_size"])
    metadata = {
        "general.architecture": "llama",
        "general.name": path.stem,
        "general.quantization_version": 2,
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": hidden // heads,
        "llama.attention.value_length": hidden // heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": hidden // heads,
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
    entries = [_entry(rng, name, shape, encoding) for name, shape in shapes.items()]
    write_gguf(path, metadata, entries)
    return path


def _entry(rng: np.random.Generator, name: str, shape: tuple[int, ...], encoding: str) -> GGUFEntry:
    stored = gguf_name(name)
    if len(shape) == 1:
        return GGUFEntry(stored, "F32", shape, 4 * shape[0], lambda: np.ones(shape, np.float32))
    kind = "Q6_K" if name == "lm_head.weight" and encoding.endswith("_K") else encoding
    form = BLOCK_FORMATS[kind]
    nbytes = math.prod(shape) // form.elements * form.bytes
    return GGUFEntry(stored, kind, shape, nbytes, lambda: random_blocks(rng, shape, kind))
