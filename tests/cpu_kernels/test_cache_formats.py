"""Caches of 8 bits: rows of codes with a scale, and float8, against NumPy that rounds in the same way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max._interpreter.models import cache_rows as cache_formats
from tests.cpu_kernels.harness import interpreted, run
from tests.cpu_kernels.test_attention import (
    BATCHES,
    BF16,
    F16,
    F32,
    Cache,
    launch,
    make_cache,
    numbers_by_head,
    reference,
)
from tests.cpu_kernels.test_batch_invariance import attended
from tests.cpu_kernels.test_cache_and_rope import LENGTHS, positions, rotated
from tests.tolerance import assert_close

F8, I8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.int8)


def layout(head_dim: int) -> np.dtype:
    """A row of codes, as a structure."""
    return np.dtype(
        [("scale", "<f4"), ("codes", "i1", (head_dim,)), ("padding", "i1", (-head_dim % 4,))]
    )


def encoded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Rows `[…, head_dim]` as the cache stores them."""
    x = x.astype(np.float32)
    if dtype != I8:
        return np.clip(x, -448, 448).astype(dtype)
    rows = np.zeros(x.shape[:-1], layout(x.shape[-1]))
    largest = abs(x).max(-1)
    rows["scale"] = largest * np.float32(1 / 127)
    inverse = np.divide(127, largest, where=largest > 0, out=np.zeros_like(largest))
    rows["codes"] = np.rint(x * inverse[..., None])
    return rows.view(np.int8).reshape(*x.shape[:-1], -1)


def decoded(blocks: np.ndarray, head_dim: int) -> np.ndarray:
    if blocks.dtype != I8:
        return blocks.astype(np.float32)
    rows = np.ascontiguousarray(blocks).view(layout(head_dim))[..., 0]
    return rows["scale"][..., None] * rows["codes"].astype(np.float32)


def rounded_cache(cache: Cache, dtype: np.dtype, queries: np.dtype) -> tuple[Cache, Cache]:
    """The cache with rounded pages, and the cache with their decoded values."""
    blocks = encoded(cache.blocks, dtype)
    q = cache.q.astype(queries)
    return replace(cache, q=q, blocks=blocks), replace(
        cache, q=q, blocks=decoded(blocks, q.shape[2])
    )


CACHES = given(
    batches=BATCHES,
    heads=st.sampled_from([(1, 1), (4, 4), (9, 3), (8, 1), (8, 2)]),
    head_dim=st.sampled_from([5, 16, 24, 33, 64, 80]),
    queries=st.sampled_from([F32, F32, BF16, F16]),
    dtype=st.sampled_from([I8, I8, F8]),
    page_size=st.sampled_from([1, 7, 16, 128, 300]),
    mask=st.sampled_from(["causal", "null", "sliding_window", "chunked_causal", "causal_alibi"]),
    window=st.sampled_from([1, 5, 33]),
    softcap=st.sampled_from([0.0, 0.0, 3.0]),
    has_sinks=st.booleans(),
    workers=st.sampled_from([1, 2]),
    machine=st.sampled_from(["host", "avx2", "generic"]),
)


@CACHES
@settings(max_examples=5)
def test_attention(
    batches, heads, head_dim, queries, dtype, page_size, mask, window, softcap, has_sinks, workers, machine
) -> None:  # fmt: skip
    sinks = numbers_by_head(heads[0], -2, 2) if has_sinks else None
    slopes = numbers_by_head(heads[0], 0, 0.5) if mask == "causal_alibi" else None
    options = (head_dim**-0.5, softcap, sinks, slopes)
    for lengths in batches:
        plain = make_cache(lengths, *heads, head_dim, page_size, F32, seed=sum(map(sum, lengths)))
        stored, values = rounded_cache(plain, dtype, queries)
        got = launch(stored, mask, window, *options, workers=workers, machine=machine)
        want = reference(values, head_dim**-0.5, mask, window, *options[1:])
        assert_close(got, want.astype(queries), dtype=queries)


@pytest.mark.long
@CACHES
@settings(max_examples=200)
def test_attention_long(**drawn: Any) -> None:
    test_attention.hypothesis.inner_test(**drawn)


@pytest.mark.parametrize("dtype", [I8, F8], ids=str)
@pytest.mark.parametrize("length", [1000, 5000])
def test_a_long_context_is_split(dtype: np.dtype, length: int) -> None:
    stored, values = rounded_cache(make_cache([(length - 1, 1)], 6, 2, 64, 128, F32), dtype, F32)
    want = reference(values, 0.125, "causal", -1)
    assert_close(launch(stored, "causal", scale=0.125), want.astype(F32), dtype=F32)


@pytest.mark.parametrize("machine", ["host", "generic"])
def test_values_that_begin_their_keys(machine: str) -> None:
    """Latents of multi-latent attention: one head, no values."""
    plain = make_cache([(70, 1), (3, 30)], 4, 1, 40, 16, F32)
    stored, values = rounded_cache(plain, I8, F32)
    (got,) = run(
        "mo.attention.ragged.paged",
        replace(stored, blocks=stored.blocks[:, :1].copy()).operands(0.2),
        [(F32, (*plain.q.shape[:2], 24))],
        {"mask": "causal", "local_window_size": -1, "value_size": 24},
        machine=machine,
    )
    same = np.concatenate([values.blocks[:, :1]] * 2, axis=1)
    want = reference(replace(values, blocks=same), 0.2, "causal", -1)[..., :24]
    assert_close(got, want.astype(F32), dtype=F32)


@pytest.mark.parametrize("dtype", [I8, F8], ids=str)
@pytest.mark.parametrize("given_dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("head_dim", [5, 16, 66])
def test_stored_rows_are_loaded(
    dtype: np.dtype, given_dtype: np.dtype, head_dim: int, rng: np.random.Generator
) -> None:
    cache, _ = rounded_cache(make_cache(LENGTHS, 4, 2, head_dim, 8, F32), dtype, F32)
    total = cache.q.shape[0]
    keys, values = (
        (rng.standard_normal((total, 2 * head_dim)) * 300).astype(given_dtype) for _ in range(2)
    )
    keys[1] = 0
    want = cache.blocks.copy()
    for row, _, page, slot in positions(cache):
        for side, rows in enumerate((keys, values)):
            want[page, side, cache.layer, slot] = encoded(rows[row].reshape(2, head_dim), dtype)
    before = cache.blocks.copy()
    operands = cache.operands(1.0)
    run("mo.kv_store.ragged.paged", [keys, values, cache.offsets, *operands[2:7]], [])
    np.testing.assert_array_equal(cache.blocks.view(I8), want.view(I8))
    cache.blocks[:] = before
    addressed = [cache.offsets, cache.blocks, *operands[3:5], operands[6]]
    for side, rows in enumerate((keys, values)):
        run("mo.k_store.ragged.paged", [rows, *addressed], [], {"side": side})
        (loaded,) = run(
            "mo.kv_load.ragged.paged",
            [*addressed, np.array(total, np.int64)],
            [(F32, keys.shape)],
            {"side": side},
        )
        expected = decoded(encoded(rows.reshape(total, 2, head_dim), dtype), head_dim)
        np.testing.assert_array_equal(loaded, expected.reshape(total, -1))
    np.testing.assert_array_equal(cache.blocks.view(I8), want.view(I8))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [I8, F8], ids=str)
def test_rotation(dtype: np.dtype, interleaved: bool, rng: np.random.Generator) -> None:
    """Stored keys are decoded, rotated and encoded again, or stay unchanged."""
    cache, values = rounded_cache(make_cache(LENGTHS, 4, 2, 18, 8, F32), dtype, F32)
    angles = rng.uniform(-1, 1, (64, 12)).astype(np.float32)
    want, turned = decoded(cache.blocks, 18), np.empty_like(cache.q)
    for row, at, page, slot in positions(cache):
        turned[row] = rotated(cache.q[row], angles[at], interleaved)
        key = values.blocks[page, 0, cache.layer, slot]
        want[page, 0, cache.layer, slot] = rotated(key, angles[at], interleaved)
    operands = cache.operands(1.0)
    for rotates in (False, True):
        before = cache.blocks.copy()
        (got,) = run(
            "mo.rope.ragged.paged",
            [cache.q, cache.offsets, angles, *operands[2:7]],
            [(F32, cache.q.shape)],
            {"interleaved": interleaved, "rotates_cache": rotates},
        )
        assert_close(got, turned, dtype=F32)
        if not rotates:
            np.testing.assert_array_equal(cache.blocks.view(I8), before.view(I8))
    stored = decoded(cache.blocks, 18)
    # half a unit in the last place: of the scale for codes, of the value for float8
    unit = abs(want).max(-1, keepdims=True) / 254 if dtype == I8 else abs(want) / 16 + 2**-10
    assert (abs(stored - want) <= unit * 1.01).all() and (stored != values.blocks).any()


def test_codes_of_non_finite_numbers() -> None:
    """A key with NaN or infinity is decoded as NaN; other rows are unchanged."""
    cache, _ = rounded_cache(make_cache([(0, 3)], 2, 2, 8, 4, F32), I8, F32)
    keys = np.ones((3, 16), np.float32)
    keys[1, 3], keys[1, 12] = np.nan, np.inf
    run("mo.kv_store.ragged.paged", [keys, keys, cache.offsets, *cache.operands(1.0)[2:7]], [])
    page = cache.lookup_table[0, 0]
    rows = cache.blocks[page, 0, cache.layer, :3]
    scales = rows[..., :4].copy().view(np.float32)
    assert not np.isfinite(scales[1]).any() and np.isfinite(scales[[0, 2]]).all()


def test_the_interpreter_rounds_equally(rng: np.random.Generator) -> None:
    x = (rng.standard_normal((7, 3, 21)) * 10.0 ** rng.integers(-9, 9, (7, 3, 1))).astype(F32)
    x[2, 1] = 0
    for dtype in (I8, F8):
        like = encoded(x, dtype)
        np.testing.assert_array_equal(cache_formats.encode_rows(x, like).view(I8), like.view(I8))
        np.testing.assert_array_equal(cache_formats.decode_rows(like, 21), decoded(like, 21))


def test_rows_of_another_size_raise() -> None:
    cache = make_cache([(0, 3)], 2, 2, 8, 4, F32)
    keys = np.ones((3, 16), np.float32)
    wrong = replace(cache, blocks=np.zeros((*cache.blocks.shape[:-1], 8), np.int8))
    with pytest.raises(NotImplementedError, match="take rows of 12 in int8"):
        run("mo.kv_store.ragged.paged", [keys, keys, wrong.offsets, *wrong.operands(1.0)[2:7]], [])
    with pytest.raises(NotImplementedError, match="take rows of 12 in int8"):
        launch(wrong, "causal")


@pytest.mark.parametrize("dtype", [I8, F8], ids=str)
def test_results_do_not_depend_on_the_batch(dtype: np.dtype) -> None:
    cache, values = rounded_cache(make_cache([(0, 150), (0, 40)], 6, 2, 33, 16, F32), dtype, F32)
    whole = attended(cache, [(0, 150), (0, 40)], "causal", -1, 2, "host")
    want = np.split(reference(replace(values, offsets=cache.offsets), 0.25, "causal", -1), [150])
    for spans in ([(149, 150), (3, 9)], [(60, 130), (39, 40)]):
        parts = attended(cache, spans, "causal", -1, 1, "host")
        for (begin, end), part, full, right in zip(spans, parts, whole, want, strict=True):
            np.testing.assert_array_equal(part, full[begin:end])
            assert_close(part, right[begin:end].astype(F32), dtype=F32)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotated_keys_are_clamped(interleaved: bool) -> None:
    """To the greatest finite float8: a greater number would become NaN."""
    cache = make_cache([(3, 2)], 2, 2, 16, 4, F32)
    stored = replace(cache, blocks=np.full(cache.blocks.shape, 400, F8))
    angles = np.ones((5, 12), np.float32)
    operands = [stored.q, stored.offsets, angles, *stored.operands(1.0)[2:7]]
    options = {"interleaved": interleaved}
    interpreted("mo.rope.ragged.paged", operands, [(F32, stored.q.shape)], options)
    for _, _, page, slot in positions(stored):
        keys = operands[3][page, 0, stored.layer, slot].astype(np.float32)
        turned, kept = keys[:, :12], keys[:, 12:]
        assert set(np.unique(turned)) == {0, 448}
        assert (kept == F8.type(400)).all()
