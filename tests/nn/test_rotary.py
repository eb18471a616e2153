"""Rotary embeddings against transformers and complex numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from max.dtype import DType
from max.graph import Graph
from max.nn.rotary_embedding import (
    DeepseekYarnRopeScalingParams,
    DeepseekYarnRotaryEmbedding,
    LinearRotaryEmbedding,
    LinearScalingParams,
    Llama3RopeScalingParams,
    Llama3RotaryEmbedding,
    LongRoPERotaryEmbedding,
    LongRoPEScalingParams,
    RotaryEmbedding,
    YarnRotaryEmbedding,
    YarnScalingParams,
)
from tests.nn.harness import BACKENDS, evaluate, f32, normal
from tests.tolerance import assert_close

HEADS, HEAD_DIM, LENGTH = 4, 32, 300
DIM = HEADS * HEAD_DIM


def reference(kind: str, original: int = 64, **parameters: Any) -> tuple[torch.Tensor, float]:
    """Returns the frequencies and the magnitude of transformers."""
    config = LlamaConfig(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": kind,
            "rope_theta": 5000.0,
            "original_max_position_embeddings": original,
            **parameters,
        },
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


def table_of(inv_freq: Any, magnitude: float) -> Any:
    angles = torch.arange(2 * LENGTH).float()[:, None] * inv_freq.float()[None]
    return torch.stack([angles.cos(), angles.sin()], -1) * magnitude


def test_default_table() -> None:
    rope = RotaryEmbedding(DIM, HEADS, 5000.0, LENGTH)
    inv_freq = 1 / 5000.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    # angles up to 600 in float32: one unit in the last place is 3e-5 turns
    np.testing.assert_allclose(rope.table(), table_of(inv_freq, 1.0), atol=1e-4)
    assert rope.table() is rope.table()
    assert rope.compute_scale() == pytest.approx(1 / math.sqrt(HEAD_DIM))
    assert rope.compute_scale(0.3) == 0.3


def test_linear_table() -> None:
    rope = LinearRotaryEmbedding(
        DIM, HEADS, 5000.0, LENGTH, scaling_params=LinearScalingParams(4.0)
    )
    np.testing.assert_allclose(rope.table(), table_of(*reference("linear", factor=4.0)), atol=1e-4)


@pytest.mark.parametrize("high", [4.0, 1.5])
def test_llama3_table(high: float) -> None:
    params = Llama3RopeScalingParams(8.0, 1.0, high, 64)
    rope = Llama3RotaryEmbedding(DIM, HEADS, 5000.0, LENGTH, scaling_params=params)
    wanted = reference("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=high)
    np.testing.assert_allclose(rope.table(), table_of(*wanted), atol=1e-4)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_table(truncate: bool) -> None:
    params = YarnScalingParams(4.0, 16.0, 1.0, 64, truncate)
    rope = YarnRotaryEmbedding(DIM, HEADS, 5000.0, LENGTH, scaling_params=params)
    wanted = reference("yarn", factor=4.0, beta_fast=16.0, beta_slow=1.0, truncate=truncate)
    np.testing.assert_allclose(rope.table(), table_of(*wanted), atol=1e-4)


def test_deepseek_yarn_table() -> None:
    params = DeepseekYarnRopeScalingParams(4.0, 64, 16, 1, 0.7, 1.3)
    rope = DeepseekYarnRotaryEmbedding(
        HEAD_DIM, HEADS, 5000.0, 2 * LENGTH, 96, scaling_params=params
    )
    inv_freq, magnitude = reference(
        "yarn", factor=4.0, beta_fast=16.0, beta_slow=1.0, mscale=0.7, mscale_all_dim=1.3
    )
    np.testing.assert_allclose(rope.table(), table_of(inv_freq, magnitude), atol=1e-4)
    correction = 0.1 * 1.3 * math.log(4.0) + 1.0
    assert rope.compute_scale() == pytest.approx(correction**2 / math.sqrt(96))
    assert rope.compute_scale(0.5) == pytest.approx(correction**2 / 2)
    plain = DeepseekYarnRotaryEmbedding(HEAD_DIM, HEADS, 5000.0, 8)
    np.testing.assert_array_equal(plain.table(), RotaryEmbedding(DIM, HEADS, 5000.0, 4).table())


def test_longrope_table(rng: np.random.Generator) -> None:
    short, long = (rng.uniform(1, 8, HEAD_DIM // 2).tolist() for _ in range(2))
    params = LongRoPEScalingParams(short, long, 64, 256)
    rope = LongRoPERotaryEmbedding(DIM, HEADS, 5000.0, LENGTH, scaling_params=params)
    base = 5000.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    for rows, factors in ((slice(0, 64), short), (slice(64, None), long)):
        wanted = table_of(1 / (torch.tensor(factors) * base), 1.0)
        np.testing.assert_allclose(rope.table()[rows], wanted[rows], atol=1e-4)
    # transformers multiplies cosines and sines by this; our attention scale contains its square
    factor = math.sqrt(1 + math.log(4) / math.log(64))
    assert rope.compute_scale() == pytest.approx(factor**2 / math.sqrt(HEAD_DIM))
    with pytest.raises(ValueError, match="3 factors in short_factor, expected one for each of 16"):
        LongRoPERotaryEmbedding(
            DIM, HEADS, 5000.0, 8, scaling_params=LongRoPEScalingParams([1.0] * 3, long, 64, 256)
        )


@pytest.mark.parametrize(
    "cls",
    [Llama3RotaryEmbedding, LinearRotaryEmbedding, YarnRotaryEmbedding, LongRoPERotaryEmbedding],
)
def test_without_parameters_nothing_is_scaled(cls: Any) -> None:
    plain = RotaryEmbedding(DIM, HEADS, 5000.0, 8).table()
    np.testing.assert_array_equal(cls(DIM, HEADS, 5000.0, 8).table(), plain)
    assert cls(DIM, HEADS, 5000.0, 8).compute_scale() == pytest.approx(1 / math.sqrt(HEAD_DIM))


def test_freqs_cis_in_a_graph() -> None:
    rope = RotaryEmbedding(DIM, HEADS, 5000.0, 8)
    with Graph("g") as graph:
        base, flat = rope.freqs_cis_base(), rope.freqs_cis
        graph.output(flat)
    assert list(base.shape) == [16, HEAD_DIM // 2, 2]
    assert list(flat.shape) == [16, HEAD_DIM]
    assert flat.dtype is DType.float32


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation(rng: np.random.Generator, backend: str, interleaved: bool, dtype: str) -> None:
    rope = RotaryEmbedding(DIM, HEADS, 5000.0, 40, interleaved=interleaved)
    x = normal(rng, (2, 7, HEADS, HEAD_DIM), dtype)
    start = np.array(5, np.int64)
    (y,) = evaluate(lambda v, at: rope(v, at), [x, start], backend)
    wide = f32(x)
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide[..., : HEAD_DIM // 2], wide[..., HEAD_DIM // 2 :]
    freqs = 1 / 5000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turns = np.exp(1j * (np.arange(7) + 5)[:, None] * freqs)[None, :, None]
    turned = (first + 1j * second) * turns
    wanted = np.empty_like(wide)
    if interleaved:
        wanted[..., 0::2], wanted[..., 1::2] = turned.real, turned.imag
    else:
        wanted = np.concatenate([turned.real, turned.imag], -1)
    assert y.dtype == x.dtype
    assert_close(y, wanted.astype(np.float32))


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="heads of 5 elements"):
        RotaryEmbedding(20, 4, 5000.0, 8)
