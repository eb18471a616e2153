"""Attention over padded sequences against torch: masks, shared key heads, lengths, dtypes."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from max.nn.attention.mask_config import MHAMaskVariant
from max.nn.kernels import flash_attention_gpu, flash_attention_ragged_gpu

REF = DeviceRef.CPU()
session = InferenceSession(devices=[CPU()])
CAUSAL, NULL = MHAMaskVariant.CAUSAL_MASK, MHAMaskVariant.NULL_MASK
SLIDING, CHUNKED = (
    MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK,
    MHAMaskVariant.CHUNKED_CAUSAL_MASK,
)
ALIBI = MHAMaskVariant.CAUSAL_ALIBI_MASK


def attended(q, k, v, mask, scale, window, lengths=None) -> np.ndarray:
    """Computes attention row by row in float64."""
    batch, rows, heads, _ = q.shape
    out = np.zeros(q.shape)
    for b, i, h in np.ndindex(batch, rows, heads):
        head = h // (heads // k.shape[2])
        j = np.arange(k.shape[1])
        seen = np.ones(len(j), bool) if mask is NULL else j <= i
        if mask is SLIDING:
            seen &= i - j < window
        if mask is CHUNKED:
            seen &= i // window == j // window
        if lengths is not None:
            seen &= j < lengths[b]
        scores = k[b, seen, head].astype(np.float64) @ q[b, i, h] * scale
        if mask is ALIBI:
            scores += 2.0 ** (-8 * (h + 1) / heads) * (j[seen] - i)
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights / weights.sum() @ v[b, seen, head]
    return out


def run(q, k, v, mask, scale, window=-1, lengths=None, symbols=False) -> np.ndarray:
    dtype = DType.from_numpy(q.dtype)

    def kind(x):
        return TensorType(dtype, ["batch", "tokens", *x.shape[2:]] if symbols else x.shape, REF)

    types, inputs = [kind(q), kind(k), kind(v)], [q, k, v]
    if lengths is not None:
        types.append(TensorType(DType.uint32, ["batch" if symbols else len(lengths)], REF))
        inputs.append(lengths)
    graph = Graph(
        "attention",
        lambda q, k, v, *more: flash_attention_gpu(q, k, v, mask, scale, window, *more),
        input_types=types,
    )
    return session.load(graph).execute(*inputs)[0].to_numpy()


def tensors(rng, batch, rows, keys, heads, kv_heads, size):
    shapes = [
        (batch, rows, heads, size),
        (batch, keys, kv_heads, size),
        (batch, keys, kv_heads, size),
    ]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("mask", "window"),
    [(CAUSAL, -1), (NULL, -1), (SLIDING, 3), (SLIDING, 1), (CHUNKED, 4), (ALIBI, -1)],
)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_masks_and_shared_heads(mask, window, kv_heads) -> None:
    q, k, v = tensors(np.random.default_rng(kv_heads), 2, 9, 9, 4, kv_heads, 8)
    got = run(q, k, v, mask, 0.3, window)
    np.testing.assert_allclose(got, attended(q, k, v, mask, 0.3, window), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("symbols", [False, True])
def test_lengths(symbols) -> None:
    q, k, v = tensors(np.random.default_rng(0), 3, 7, 7, 2, 2, 4)
    lengths = np.array([7, 3, 1], np.uint32)
    got = run(q, k, v, CAUSAL, 0.5, lengths=lengths, symbols=symbols)
    want = attended(q, k, v, CAUSAL, 0.5, -1, lengths)
    for b, n in enumerate(lengths):
        np.testing.assert_allclose(got[b, :n], want[b, :n], rtol=1e-4, atol=1e-5)
    empty = run(q, k, v, CAUSAL, 0.5, lengths=np.zeros(3, np.uint32))
    assert np.isfinite(empty).all()


def test_other_keys_than_queries() -> None:
    q, k, v = tensors(np.random.default_rng(2), 2, 5, 11, 2, 2, 4)
    np.testing.assert_allclose(
        run(q, k, v, NULL, 1.0), attended(q, k, v, NULL, 1.0, -1), rtol=1e-4, atol=1e-5
    )


def test_bfloat16_is_rounded_once() -> None:
    q, k, v = (
        x.astype(ml_dtypes.bfloat16) for x in tensors(np.random.default_rng(3), 1, 6, 6, 2, 2, 8)
    )
    got = run(q, k, v, CAUSAL, 0.35)
    assert got.dtype == ml_dtypes.bfloat16
    want = attended(*(x.astype(np.float32) for x in (q, k, v)), CAUSAL, 0.35, -1)
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize(
    ("shapes", "mask", "window", "error", "said"),
    [
        ([(1, 4, 2, 8), (1, 5, 2, 8)], CAUSAL, -1, ValueError, "4 queries and 5 keys"),
        ([(1, 4, 2, 8), (1, 4, 2, 6)], NULL, -1, ValueError, "do not go together"),
        ([(1, 4, 3, 8), (1, 4, 2, 8)], NULL, -1, ValueError, "3 query heads cannot share 2"),
        ([(4, 2, 8), (4, 2, 8)], NULL, -1, ValueError, "of rank 4"),
        ([(1, 4, 2, 8), (1, 4, 2, 8)], SLIDING, 0, ValueError, "local_window_size 0"),
    ],
)
def test_what_does_not_fit(shapes, mask, window, error, said) -> None:
    q, k = (TensorType(DType.float32, shape, REF) for shape in shapes)
    with pytest.raises(error, match=said):
        Graph(
            "attention",
            lambda q, k, v: flash_attention_gpu(q, k, v, mask, 1.0, window),
            input_types=[q, k, k],
        )


@pytest.mark.parametrize(("mask", "window"), [(NULL, -1), (CAUSAL, -1), (SLIDING, 3), (CHUNKED, 4)])
def test_a_ragged_batch_without_a_cache(mask: MHAMaskVariant, window: int) -> None:
    rng = np.random.default_rng(5)
    lengths = [7, 1, 0, 12]
    offsets = np.cumsum([0, *lengths]).astype(np.uint32)
    q, k, v = (x[0] for x in tensors(rng, 1, sum(lengths), sum(lengths), 4, 2, 8))
    types = [TensorType(DType.float32, ["rows", *x.shape[1:]], REF) for x in (q, k, v)]
    types += [TensorType(DType.uint32, ["bounds"], REF), TensorType(DType.uint32, [], REF)]
    graph = Graph(
        "ragged",
        lambda *args: flash_attention_ragged_gpu(*args, mask, 0.3, window),
        input_types=types,
    )
    longest = np.array(max(lengths), np.uint32)
    (got,) = session.load(graph).execute(q, k, v, offsets, longest)
    for begin, end in itertools.pairwise(offsets.tolist()):
        parts = (x[None, begin:end] for x in (q, k, v))
        want = attended(*parts, mask, 0.3, window)[0]
        np.testing.assert_allclose(got.to_numpy()[begin:end], want, rtol=1e-5, atol=1e-5)


def test_a_ragged_batch_that_does_not_fit() -> None:
    def stage(q, k, v, offsets=(DType.uint32, (3,))) -> None:
        types = [TensorType(DType.float32, shape, REF) for shape in (q, k, v)]
        types += [TensorType(*offsets, REF), TensorType(DType.uint32, [], REF)]
        Graph(
            "ragged",
            lambda *args: flash_attention_ragged_gpu(*args, NULL, 1.0),
            input_types=types,
        )

    rows = (5, 4, 8)
    with pytest.raises(ValueError, match="expected rank 3"):
        stage((5, 32), rows, rows)
    with pytest.raises(ValueError, match="values of the keys' shape"):
        stage(rows, (5, 2, 8), (5, 4, 8))
    with pytest.raises(ValueError, match="4 query heads cannot share 3"):
        stage(rows, (5, 3, 8), (5, 3, 8))
    with pytest.raises(TypeError, match="input_row_offsets is .*, expected uint32"):
        stage(rows, rows, rows, (DType.int64, (3,)))
