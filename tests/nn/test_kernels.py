"""The library ops through max.nn.kernels against plain torch and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from max.dtype import DType
from max.graph import BufferType, Graph, TensorType, ops
from max.nn import kernels
from max.nn.attention import MHAMaskVariant
from max.nn.kv_cache import KVCacheParams, PagedCacheValues, paged_cache_types
from tests.nn.harness import BACKENDS, BF16, CPU_REF, FLOATS, Array, evaluate, f32, normal
from tests.nn.reference import PagedBatch
from tests.tolerance import assert_close

both = pytest.mark.parametrize("backend", BACKENDS)
BATCHES = [([0], [1]), ([7], [1]), ([0, 5, 3], [4, 1, 9]), ([3, 0, 8], [2, 0, 3])]


def params_of(batch: PagedBatch) -> KVCacheParams:
    dtype = DType.from_numpy(batch.blocks.dtype)
    return KVCacheParams(dtype, batch.kv_heads, batch.head_dim, page_size=batch.page_size)


def run(
    batch: PagedBatch, backend: str, function: Any, *arrays: Array, layer: int = 1
) -> list[Array]:
    """``function(params, tensors, offsets, cache, layer_idx)`` as a graph; the cache's pages change."""

    def forward(*args: Any) -> Any:
        values, (offsets, *cache) = args[: len(arrays)], args[len(arrays) :]
        layer_idx = ops.constant(layer, DType.uint32, CPU_REF)
        outputs = function(params_of(batch), values, offsets, PagedCacheValues.of(cache), layer_idx)
        return () if outputs is None else outputs

    inputs = [*arrays, batch.offsets, *batch.cache_arrays]
    names = paged_cache_types(params_of(batch), batch.layers, CPU_REF)
    dims: list[Any] = [("total", *array.shape[1:]) if array.ndim > 1 else None for array in arrays]
    dims += [None, *(t.shape for t in names)]  # type: ignore[attr-defined]
    dims[len(arrays)] = [names[1].shape[0] + 1]  # type: ignore[attr-defined]
    return evaluate(forward, inputs, backend, dims=dims, buffers=[len(arrays) + 1])


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("cached", "new"), BATCHES)
def test_projection_stores_keys_and_values(
    rng: np.random.Generator, backend: str, dtype: str, cached: list[int], new: list[int]
) -> None:
    numpy_dtype = FLOATS[dtype].to_numpy()
    batch = PagedBatch(rng, cached, new, 2, 6, 4, dtype=numpy_dtype)
    x = normal(rng, (batch.total, 10), dtype)
    weight, bias = normal(rng, (4 * 6 + 24, 10), dtype), normal(rng, (48,), dtype)
    before = batch.blocks.copy()

    def project(params: Any, values: Any, offsets: Any, cache: Any, layer: Any) -> Any:
        w, b = ops.constant(weight), ops.constant(bias)
        return kernels.fused_qkv_ragged_matmul(
            params, values[0], offsets, w, cache, layer, n_heads=4, bias=b
        )

    (q,) = run(batch, backend, project, x)
    qkv = f32(x) @ f32(weight).T + f32(bias)
    assert_close(q, qkv[:, :24], numpy_dtype, scale=2)
    for row, sequence, position in batch.positions():
        for side, start in ((0, 24), (1, 36)):
            stored = batch.slot(batch.blocks, side, 1, sequence, position)
            wanted = qkv[row, start : start + 12].reshape(2, 6)
            assert_close(stored, wanted, numpy_dtype, scale=4)
            batch.slot(before, side, 1, sequence, position)[:] = stored
    # no other element was written
    np.testing.assert_array_equal(batch.blocks, before)


@both
def test_projection_of_keys_and_values_alone(rng: np.random.Generator, backend: str) -> None:
    batch = PagedBatch(rng, [2], [3], 1, 4, 3)
    x, weight = normal(rng, (3, 5)), normal(rng, (8, 5))

    def project(params: Any, values: Any, offsets: Any, cache: Any, layer: Any) -> None:
        kernels.matmul_kv_cache_ragged(
            params, values[0], offsets, ops.constant(weight), cache, layer
        )

    run(batch, backend, project, x)
    for row, _, position in batch.positions():
        for side in (0, 1):
            wanted = x[row] @ weight[4 * side : 4 * side + 4].T
            assert_close(batch.slot(batch.blocks, side, 1, 0, position)[0], wanted)


@both
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotated", [8, 4])
def test_rope_turns_queries_and_new_keys(
    rng: np.random.Generator, backend: str, interleaved: bool, rotated: int
) -> None:
    batch = PagedBatch(rng, [5, 0], [2, 6], 2, 8, 4)
    q = normal(rng, (batch.total, 4, 8))
    angles = rng.uniform(-3, 3, (16, rotated // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], -1).reshape(16, rotated)
    before = batch.blocks.copy()

    def turn(params: Any, values: Any, offsets: Any, cache: Any, layer: Any) -> Any:
        freqs = ops.constant(table.astype(np.float32))
        return kernels.fused_qk_ragged_rope(
            params, values[0], offsets, cache, freqs, layer, interleaved
        )

    (turned,) = run(batch, backend, turn, q)

    def wanted(heads: Array, position: int) -> Array:
        out = heads.astype(np.float64)
        half = rotated // 2
        first, second = (
            (slice(0, rotated, 2), slice(1, rotated, 2))
            if interleaved
            else (slice(0, half), slice(half, rotated))
        )
        pairs = (out[:, first] + 1j * out[:, second]) * np.exp(1j * angles[position])
        out[:, first], out[:, second] = pairs.real, pairs.imag
        return out

    for row, sequence, position in batch.positions():
        assert_close(turned[row], wanted(q[row], position))
        key = batch.slot(before, 0, 1, sequence, position)
        assert_close(batch.slot(batch.blocks, 0, 1, sequence, position), wanted(key, position))
    np.testing.assert_array_equal(batch.blocks[:, 1], before[:, 1])
    np.testing.assert_array_equal(batch.blocks[:, 0, 0], before[:, 0, 0])


MASKS = [
    (MHAMaskVariant.CAUSAL_MASK, "causal", -1),
    (MHAMaskVariant.NULL_MASK, "null", -1),
    (MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK, "sliding_window", 3),
    (MHAMaskVariant.CHUNKED_CAUSAL_MASK, "chunked_causal", 4),
]


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("variant", "mask", "window"), MASKS, ids=[m[1] for m in MASKS])
@pytest.mark.parametrize(("cached", "new"), BATCHES)
def test_attention(
    rng: np.random.Generator,
    backend: str,
    dtype: str,
    variant: MHAMaskVariant,
    mask: str,
    window: int,
    cached: list[int],
    new: list[int],
) -> None:
    batch = PagedBatch(rng, cached, new, 2, 16, 4, dtype=FLOATS[dtype].to_numpy())
    q = normal(rng, (batch.total, 6, 16), dtype)

    def attend(params: Any, values: Any, offsets: Any, cache: Any, layer: Any) -> Any:
        return kernels.flash_attention_ragged(
            params, values[0], offsets, cache, layer, variant, 0.3, window
        )

    (out,) = run(batch, backend, attend, q)
    assert out.dtype == q.dtype
    assert_close(out, batch.attention(q, 1, 0.3, mask, window), q.dtype)


@both
@pytest.mark.parametrize("softcap", [None, 1.3])
@pytest.mark.parametrize("heads", [4, 6])
def test_attention_with_caps_sinks_and_biases(
    rng: np.random.Generator, backend: str, heads: int, softcap: float | None
) -> None:
    """Soft cap and mask, against the formulas of Gemma 2 and GPT-OSS; slopes against those of BLOOM."""
    batch = PagedBatch(rng, [6, 0, 3], [1, 7, 0], 2, 16, 4)
    q, sinks = normal(rng, (batch.total, heads, 16)), normal(rng, (heads,)) * 3

    def attend(params: Any, values: Any, offsets: Any, cache: Any, layer: Any) -> Any:
        given = (params, values[0], offsets, cache, layer)
        sliding = MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK
        return (
            kernels.flash_attention_ragged(*given, sliding, 0.9, 3, values[1], softcap=softcap),
            kernels.flash_attention_ragged(
                *given, MHAMaskVariant.CAUSAL_ALIBI_MASK, 0.9, softcap=softcap
            ),
        )

    window, biased = run(batch, backend, attend, q, sinks)
    alibi = build_alibi_tensor(torch.ones(1, 13), heads, torch.float32).reshape(heads, 13)
    slopes = (alibi[:, 1] - alibi[:, 0]).numpy()
    for out, options in (
        (window, {"window": 3, "mask": "sliding_window", "sinks": sinks}),
        (biased, {"slopes": slopes}),
    ):
        assert_close(out, batch.attention(q, 1, 0.9, softcap=softcap, **options))


@both
def test_attention_of_float32_queries_over_a_half_cache(
    rng: np.random.Generator, backend: str
) -> None:
    batch = PagedBatch(rng, [6, 0], [1, 7], 2, 16, 4, dtype=BF16)
    q = normal(rng, (batch.total, 4, 16))

    def attend(params: Any, values: Any, offsets: Any, cache: Any, layer: Any) -> Any:
        causal = MHAMaskVariant.CAUSAL_MASK
        options = (params, values[0], offsets, cache, layer, causal, 0.3)
        return (
            kernels.flash_attention_ragged(*options),
            kernels.flash_attention_ragged(*options, out_dtype=DType.bfloat16),
        )

    wide, half = run(batch, backend, attend, q)
    wanted = batch.attention(q, 1, 0.3)
    assert (wide.dtype, half.dtype) == (np.float32, BF16)
    # only the result is rounded
    assert_close(wide, wanted)
    assert_close(half, wanted)


def test_mistakes(rng: np.random.Generator) -> None:
    params = KVCacheParams(DType.float32, 2, 8, page_size=4)
    types = [
        TensorType(DType.float32, ["total", 5, 8], CPU_REF),
        TensorType(DType.uint32, ["offsets"], CPU_REF),
        *paged_cache_types(params, 1, CPU_REF),
    ]
    with Graph("g", input_types=types) as graph:
        q, offsets, *cache = graph.inputs
        kv = PagedCacheValues.of(cache)
        layer = ops.constant(0, DType.uint32, CPU_REF)
        causal = MHAMaskVariant.CAUSAL_MASK
        even = q.tensor[:, :4]

        def attend(**changed: Any) -> Any:
            arguments: dict[str, Any] = {
                "kv_params": params,
                "input": q.tensor,
                "input_row_offsets": offsets.tensor,
                "kv_collection": kv,
                "layer_idx": layer,
                "mask_variant": causal,
                "scale": 1.0,
            }
            return kernels.flash_attention_ragged(**{**arguments, **changed})

        with pytest.raises(ValueError, match="5 query heads cannot share 2 key heads"):
            attend()
        with pytest.raises(ValueError, match="softcap is -1.0, expected a finite number from 0"):
            attend(input=even, softcap=-1.0)
        with pytest.raises(ValueError, match=r"sink_weights is .* expected \[4\]"):
            attend(input=even, sink_weights=ops.constant(np.zeros(3, np.float32)))
        with pytest.raises(ValueError, match="alibi_slopes with the mask CAUSAL_MASK"):
            attend(input=even, alibi_slopes=np.zeros(4, np.float32))
        with pytest.raises(ValueError, match="with local_window_size -1"):
            attend(mask_variant=MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK)
        with pytest.raises(TypeError, match="layer_idx is .* expected uint32"):
            attend(layer_idx=ops.constant(0, DType.int64, CPU_REF))
        other = KVCacheParams(DType.float32, 2, 8, page_size=8)
        with pytest.raises(
            ValueError, match=r"kv_params says float32 \[pages, 2, layers, 8, 2, 8\]"
        ):
            attend(kv_params=other)
        with pytest.raises(ValueError, match="twice 2 key heads of 8 need 40 rows"):
            kernels.fused_qkv_ragged_matmul(
                params,
                q.tensor.reshape([-1, 40]),
                offsets.tensor,
                ops.constant(np.zeros((39, 40), np.float32)),
                kv,
                layer,
                n_heads=1,
            )
        with pytest.raises(NotImplementedError, match="position_ids"):
            kernels.fused_qk_ragged_rope(
                params,
                q.tensor,
                offsets.tensor,
                kv,
                ops.constant(np.zeros((4, 8), np.float32)),
                layer,
                position_ids=offsets.tensor,
            )
        with pytest.raises(ValueError, match="a paged cache has 4 values, got 3"):
            PagedCacheValues.of(cache[:3])


def test_cache_parameters() -> None:
    params = KVCacheParams(DType.bfloat16, 8, 64, page_size=128, n_devices=4)
    assert params.n_kv_heads_per_device == 2
    assert params.dtype_shorthand == "bf16"
    assert params.cache_strategy == "paged"
    copies = KVCacheParams(DType.float32, 8, 64, page_size=128, n_devices=4, data_parallel_degree=4)
    assert copies.n_kv_heads_per_device == 8
    assert (copies.copy_as_dp_1().n_devices, copies.copy_as_dp_1().data_parallel_degree) == (1, 1)
    with pytest.raises(ValueError, match="page_size is None"):
        KVCacheParams(DType.float32, 1, 64)
    with pytest.raises(ValueError, match="3 key heads cannot be split over 2 devices"):
        KVCacheParams(DType.float32, 3, 64, page_size=128, n_devices=2)
    with pytest.raises(ValueError, match="data_parallel_degree is 2, expected 1 or n_devices"):
        KVCacheParams(DType.float32, 3, 64, page_size=128, n_devices=3, data_parallel_degree=2)
    with pytest.raises(ValueError, match="n_kv_heads is 0"):
        KVCacheParams(DType.float32, 0, 64, page_size=128)


@both
def test_swish_glu(rng: np.random.Generator, backend: str) -> None:
    a, b0, b1 = normal(rng, (3, 4)), normal(rng, (5, 4)), normal(rng, (5, 4))
    (y,) = evaluate(kernels.swish_glu, [a, b0, b1], backend)
    gate = a @ b0.T
    assert_close(y, gate / (1 + np.exp(-gate)) * (a @ b1.T), scale=2)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max())
    return e / e.sum()


@both
def test_sampling_follows_the_distribution(rng: np.random.Generator, backend: str) -> None:
    row = (rng.standard_normal(7) * 1.5).astype(np.float32)
    rows = 3000
    logits = np.tile(row, (rows, 1))

    def share(**options: Any) -> Array:
        (tokens,) = evaluate(
            lambda x: kernels.topk_fused_sampling(x, **options),
            [logits],
            backend,
            dims=[("rows", 7)],
        )
        assert tokens.shape == (rows, 1) and tokens.dtype == np.int64
        return np.bincount(tokens[:, 0], minlength=7) / rows

    order = np.argsort(-row)
    greedy = np.eye(7)[order[0]]
    np.testing.assert_array_equal(share(top_k=1, seed=3), greedy)
    np.testing.assert_array_equal(share(top_k=-1, temperature=0.0), greedy)
    # three standard deviations of a frequency in 3000 draws are less than 0.03
    np.testing.assert_allclose(share(top_k=-1, seed=1), softmax(row), atol=0.03)
    np.testing.assert_allclose(
        share(top_k=-1, temperature=2.0, seed=2), softmax(row / 2), atol=0.03
    )
    top3 = np.where(np.isin(np.arange(7), order[:3]), row, -np.inf)
    np.testing.assert_allclose(share(top_k=3, seed=4), softmax(top3), atol=0.03)
    p = softmax(row)
    count = int(np.searchsorted(np.cumsum(p[order]), 0.7)) + 1
    nucleus = np.where(np.isin(np.arange(7), order[:count]), row, -np.inf)
    np.testing.assert_allclose(share(top_k=-1, top_p=0.7, seed=5), softmax(nucleus), atol=0.03)


@both
def test_sampling_with_options_of_each_row(rng: np.random.Generator, backend: str) -> None:
    logits = normal(rng, (4, 9))
    k = np.array([1, 9, 2, 3], np.int64)
    temperature = np.array([1.0, 0.0, 1.0, 0.7], np.float32)
    seeds = np.array([1, 2, 3, 4], np.uint64)

    def sample(x: Any, k: Any, t: Any, s: Any) -> Any:
        return kernels.topk_fused_sampling(x, k, temperature=t, max_k=9, seed=s)

    inputs = [logits, k, temperature, seeds]
    (tokens,) = evaluate(sample, inputs, backend)
    np.testing.assert_array_equal(tokens[:2, 0], logits[:2].argmax(-1))
    for row, count in ((2, 2), (3, 3)):
        assert tokens[row, 0] in np.argsort(-logits[row])[:count]
    (again,) = evaluate(sample, inputs, "interpreter")
    np.testing.assert_array_equal(tokens, again)


def test_sampling_mistakes() -> None:
    with Graph("g", input_types=[TensorType(DType.float32, [2, 5], CPU_REF)]) as graph:
        logits = graph.inputs[0].tensor
        sample = kernels.topk_fused_sampling
        with pytest.raises(ValueError, match="top_k is 0"):
            sample(logits, 0)
        with pytest.raises(ValueError, match=r"top_p is 1\.5"):
            sample(logits, 2, top_p=1.5)
        with pytest.raises(ValueError, match=r"temperature is -1\.0"):
            sample(logits, 2, temperature=-1.0)
        with pytest.raises(ValueError, match="max_k is needed"):
            sample(logits, ops.constant([1, 1], DType.int64, CPU_REF))
        with pytest.raises(ValueError, match=r"top_k is .*expected a scalar or \[2\]"):
            sample(logits, ops.constant([1, 1, 1], DType.int64, CPU_REF), max_k=1)


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_penalties(rng: np.random.Generator, backend: str, dtype: str) -> None:
    logits = normal(rng, (2, 8), dtype)
    data = np.array([[1, 2], [5, 1], [0, 3], [7, 0]], np.int32)
    offsets = np.array([0, 2, 4], np.uint32)
    repetition = np.array([1.5, 2.0], np.float32)
    wanted = f32(logits)
    for row in range(2):
        for token, count in data[offsets[row] : offsets[row + 1]]:
            if count:
                x = wanted[row, token]
                x = x / repetition[row] if x > 0 else x * repetition[row]
                wanted[row, token] = x - 0.25 * count - 0.5

    def apply(buffer: Any, d: Any, o: Any, r: Any) -> Any:
        kernels.apply_penalties_to_logits(
            buffer, d, o, frequency_penalty=0.25, presence_penalty=0.5, repetition_penalty=r
        )
        return ()

    evaluate(apply, [logits, data, offsets, repetition], backend, buffers=[0])
    assert_close(logits, wanted, logits.dtype)


@both
def test_scatter_set_constant(rng: np.random.Generator, backend: str) -> None:
    data = normal(rng, (3, 4))
    wanted = data.copy()
    wanted[[0, 2], [1, 3]] = -7.0

    def fill(buffer: Any, indices: Any) -> Any:
        kernels.scatter_set_constant(buffer, indices, -7.0)
        return ()

    evaluate(fill, [data, np.array([[0, 1], [2, 3]], np.int64)], backend, buffers=[0])
    np.testing.assert_array_equal(data, wanted)


def test_bf16_is_a_buffer_dtype() -> None:
    params = KVCacheParams(DType.bfloat16, 2, 8, page_size=4)
    kinds = paged_cache_types(params, 3, CPU_REF)
    assert isinstance(kinds[0], BufferType) and kinds[0].dtype.to_numpy() == BF16


@both
@pytest.mark.parametrize(
    ("a_sizes", "b_sizes"), [([2, 4], [3, 1]), ([0, 3, 1], [2, 0, 5]), ([1], [1])]
)
def test_merge_ragged_tensors(
    rng: np.random.Generator, backend: str, a_sizes: list[int], b_sizes: list[int]
) -> None:
    a, b = normal(rng, (sum(a_sizes), 3)), normal(rng, (sum(b_sizes), 3))
    bounds = [np.cumsum([0, *sizes]).astype(np.uint32) for sizes in (a_sizes, b_sizes)]
    merged, offsets = evaluate(
        kernels.merge_ragged_tensors,
        [a, bounds[0], b, bounds[1]],
        backend,
        dims=[("a", 3), ("bounds",), ("b", 3), ("bounds",)],
    )
    parts = [
        part
        for i in range(len(a_sizes))
        for part in (
            a[bounds[0][i] : bounds[0][i + 1]],
            b[bounds[1][i] : bounds[1][i + 1]],
        )
    ]
    np.testing.assert_array_equal(merged, np.concatenate(parts))
    np.testing.assert_array_equal(offsets, bounds[0] + bounds[1])
