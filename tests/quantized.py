"""What tests of quantized weights share: blocks to decode, weights of GPTQ, and what a product may be."""

from __future__ import annotations

from typing import Any

import numpy as np

from max.dtype.blocks import BLOCK_FORMATS, ENCODED_FORMATS, decode, encode
from tests.tolerance import assert_close, tolerance

ENCODINGS = tuple(BLOCK_FORMATS)
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
"""Where the float16 scales of blocks that are only read begin."""


def random_weight(rng: np.random.Generator, rows: int, columns: int, encoding: str) -> np.ndarray:
    """Rows of blocks with scales of all sizes."""
    sizes = 10.0 ** rng.uniform(-2, 1, (rows, 1))
    if encoding in ENCODED_FORMATS:
        values = rng.standard_normal((rows, columns)) * sizes
        return encode(values.astype(np.float32), encoding)
    elements, size = BLOCK_FORMATS[encoding]
    blocks = rng.integers(0, 256, (rows, columns // elements, size), np.uint8)
    for at in HALVES[encoding]:
        halves = (rng.uniform(0.5, 1, blocks.shape[:2]) * sizes).astype(np.float16)
        blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
    # elements as large as those of the encoded formats
    largest = np.abs(decode(blocks[:, :1].reshape(rows, -1), encoding)).max() / 3
    for at in HALVES[encoding]:
        halves = blocks[..., at : at + 2].copy().view(np.float16) / np.float16(largest)
        blocks[..., at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


def rounded_to_8_bits(x: np.ndarray) -> np.ndarray:
    """x as a kernel may take it: 8 bits with a scale for each 32 neighbors (docs/quantization.md)."""
    inner = x.shape[-1]
    padded = np.pad(np.asarray(x, np.float32), [*[(0, 0)] * (x.ndim - 1), (0, -inner % 32)])
    blocks = padded.reshape(*x.shape[:-1], -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    q = np.rint(blocks * np.where(scale == 0, 0, 1 / np.where(scale == 0, 1, scale)))
    return (q * scale).reshape(padded.shape)[..., :inner]


def assert_product(actual: Any, x: np.ndarray, w: np.ndarray, scale: float = 4.0) -> None:
    """Whether a result is ``x @ w.T``, or that of x rounded to 8 bits."""
    actual = np.asarray(actual)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    rounded = rounded_to_8_bits(x).astype(np.float64) @ np.asarray(w, np.float64).T
    near = np.where(
        np.abs(actual.astype(np.float64) - exact) <= np.abs(actual.astype(np.float64) - rounded),
        exact,
        rounded,
    )
    assert tolerance(actual.dtype) > 0
    assert_close(actual, near, scale=scale)


def gptq_weight(
    rng: np.random.Generator,
    inputs: int,
    outputs: int,
    bits: int,
    group: int,
    desc_act: bool,
    scale: float = 1.0,
    less: int = 1,
) -> tuple[list[np.ndarray], np.ndarray]:
    """The tensors of a GPTQ weight, and what it holds, ``[outputs, inputs]``: element by element, as the format says.

    `less` is what stored zero points lack: 1, in the format ``gptq_v2`` 0.
    """
    groups = -(-inputs // group)
    q = rng.integers(0, 2**bits, (inputs, outputs))
    zeros = rng.integers(1, 2**bits, (groups, outputs))
    scales = (scale * rng.uniform(0.5, 2, (groups, outputs))).astype(np.float16)
    order = np.arange(inputs) // group
    if desc_act:
        order = rng.permutation(order)

    def packed(values: np.ndarray) -> np.ndarray:
        """Along the first axis, the lowest bits first."""
        per_word = 32 // bits
        words = np.zeros((len(values) // per_word, *values.shape[1:]), np.uint32)
        for i in range(len(values)):
            words[i // per_word] |= values[i].astype(np.uint32) << np.uint32(bits * (i % per_word))
        return words.view(np.int32)

    weight = scales.astype(np.float32)[order] * (q - zeros[order])
    tensors = [packed(q), np.ascontiguousarray(packed(zeros.T - less).T), scales]
    if desc_act:
        tensors.append(order.astype(np.int32))
    return tensors, weight.T
