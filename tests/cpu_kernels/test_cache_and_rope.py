"""Storing keys and values, and rotary embedding, against plain loops."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from max._backends.program import KernelRunError
from tests.cpu_kernels.harness import run
from tests.cpu_kernels.test_attention import F16, F32, make_cache
from tests.tolerance import assert_close

BF16 = np.dtype(ml_dtypes.bfloat16)
LENGTHS = [(0, 5), (17, 1), (30, 9), (4, 0), (2, 3)]


def positions(cache) -> list[tuple[int, int, int, int]]:
    """Row, position, page and slot of each new token."""
    places = []
    size = cache.blocks.shape[3]
    for b, cached in enumerate(cache.cache_lengths.astype(int)):
        for row in range(int(cache.offsets[b]), int(cache.offsets[b + 1])):
            at = cached + row - int(cache.offsets[b])
            places.append((row, at, int(cache.lookup_table[b, at // size]), at % size))
    return places


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [(F32, F32), (BF16, BF16), (F16, F16), (F32, BF16)], ids=str
)
@pytest.mark.parametrize("head_dim", [16, 20])
def test_kv_store(
    dtype: np.dtype, cache_dtype: np.dtype, head_dim: int, rng: np.random.Generator
) -> None:
    cache = make_cache(LENGTHS, 4, 2, head_dim, 8, cache_dtype)
    total = cache.q.shape[0]
    keys, values = (
        rng.standard_normal((total, 2 * head_dim)).astype(np.float32).astype(dtype)
        for _ in range(2)
    )
    want = cache.blocks.copy()
    for row, _, page, slot in positions(cache):
        want[page, 0, cache.layer, slot] = keys[row].reshape(2, head_dim).astype(cache_dtype)
        want[page, 1, cache.layer, slot] = values[row].reshape(2, head_dim).astype(cache_dtype)
    operands = cache.operands(1.0)
    run("mo.kv_store.ragged.paged", [keys, values, cache.offsets, *operands[2:7]], [])
    np.testing.assert_array_equal(cache.blocks, want)


def rotated(x: np.ndarray, angles: np.ndarray, interleaved: bool) -> np.ndarray:
    out = x.astype(np.float64)
    size = angles.size
    cosine, sine = angles[0::2].astype(np.float64), angles[1::2].astype(np.float64)
    a, b = (
        (out[..., 0:size:2], out[..., 1:size:2])
        if interleaved
        else (out[..., : size // 2], out[..., size // 2 : size])
    )
    first, second = a * cosine - b * sine, a * sine + b * cosine
    if interleaved:
        out[..., 0:size:2], out[..., 1:size:2] = first, second
    else:
        out[..., : size // 2], out[..., size // 2 : size] = first, second
    return out


@pytest.mark.parametrize("machine", ["host", "avx2", "generic"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("head_dim", "rope_dim"), [(64, 64), (24, 24), (40, 12)])
def test_rope(
    dtype: np.dtype,
    interleaved: bool,
    head_dim: int,
    rope_dim: int,
    machine: str,
    rng: np.random.Generator,
) -> None:
    cache = make_cache(LENGTHS, 4, 2, head_dim, 8, dtype)
    freqs = rng.uniform(-1, 1, (64, rope_dim)).astype(np.float32)
    want_q, want_blocks = cache.q.astype(np.float64), cache.blocks.astype(np.float64)
    for row, at, page, slot in positions(cache):
        want_q[row] = rotated(cache.q[row], freqs[at], interleaved)
        want_blocks[page, 0, cache.layer, slot] = rotated(
            cache.blocks[page, 0, cache.layer, slot], freqs[at], interleaved
        )
    operands = cache.operands(1.0)
    (got,) = run(
        "mo.rope.ragged.paged",
        [cache.q, cache.offsets, freqs, *operands[2:7]],
        [(dtype, cache.q.shape)],
        {"interleaved": interleaved},
        machine=machine,
    )
    assert_close(got, want_q.astype(dtype), dtype=dtype)
    assert_close(cache.blocks, want_blocks.astype(dtype), dtype=dtype)


def test_a_position_without_frequencies_raises() -> None:
    cache = make_cache([(20, 2)], 2, 2, 16, 8, F32)
    freqs = np.zeros((21, 16), np.float32)
    with pytest.raises(KernelRunError, match="position 21 of sequence 0; freqs_cis has 21 rows"):
        run(
            "mo.rope.ragged.paged",
            [cache.q, cache.offsets, freqs, *cache.operands(1.0)[2:7]],
            [(F32, cache.q.shape)],
            {},
        )


def test_storing_beyond_the_pages_raises() -> None:
    cache = make_cache([(7, 1)], 2, 2, 16, 8, F32)
    cache.cache_lengths[0] = 8
    rows = np.zeros((1, 32), np.float32)
    with pytest.raises(KernelRunError, match="position 8 lies beyond its 1 pages"):
        run("mo.kv_store.ragged.paged", [rows, rows, cache.offsets, *cache.operands(1.0)[2:7]], [])
