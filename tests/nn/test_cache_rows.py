"""The ops on rows of the cache, cross and latent attention, adapters and formats, against NumPy and torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from max.dtype import DType
from max.dtype.blocks import decode, encode
from max.graph import Dim, Graph, TensorType, ops
from max.graph.quantization import QuantizationConfig, QuantizationEncoding
from max.nn import kernels
from max.nn.attention import MHAMaskVariant
from max.nn.kv_cache import KVCacheParams, PagedCacheValues, paged_cache_types
from tests.nn.harness import BACKENDS, CPU_REF, Array, evaluate, f32, normal
from tests.nn.reference import PagedBatch
from tests.tolerance import assert_close

both = pytest.mark.parametrize("backend", BACKENDS)
F8 = ml_dtypes.float8_e4m3fn
CAUSAL, NULL = MHAMaskVariant.CAUSAL_MASK, MHAMaskVariant.NULL_MASK


def run(
    batch: PagedBatch, backend: str, function: Any, *arrays: Array, latent: bool = False
) -> list[Array]:
    """``function(params, tensors, offsets, cache, layer_idx)`` over layer 1 of a cache, whose pages change."""
    params = KVCacheParams(
        DType.from_numpy(batch.blocks.dtype), batch.kv_heads, batch.head_dim, page_size=batch.page_size, is_mla=latent
    )  # fmt: skip

    def forward(*args: Any) -> Any:
        values, (offsets, *cache) = args[: len(arrays)], args[len(arrays) :]
        layer_idx = ops.constant(1, DType.uint32, CPU_REF)
        outputs = function(params, values, offsets, PagedCacheValues.of(cache), layer_idx)
        return () if outputs is None else outputs

    inputs = [*arrays, batch.offsets, *batch.cache_arrays]
    names = paged_cache_types(params, batch.layers, CPU_REF)
    dims = [*([None] * len(arrays)), ["offsets"], *(t.shape for t in names)]
    return evaluate(forward, inputs, backend, dims=dims, buffers=[len(arrays) + 1])


def batch_of(
    rng: np.random.Generator, heads: int = 2, dim: int = 8, dtype: Any = np.float32
) -> PagedBatch:
    return PagedBatch(rng, [5, 0, 3], [2, 7, 1], heads, dim, 4, dtype=dtype)


def latent_batch(rng: np.random.Generator, dim: int) -> PagedBatch:
    batch = batch_of(rng, 1, dim)
    batch.blocks = np.ascontiguousarray(batch.blocks[:, :1])
    return batch


def rows_of(batch: PagedBatch, side: int) -> Array:
    """Returns keys or values of the new tokens, ``[total, kv_heads * head_dim]``."""
    slots = [batch.slot(batch.blocks, side, 1, s, p) for _, s, p in batch.positions()]
    return f32(np.stack(slots).reshape(len(slots), -1))


@both
def test_projection_to_keys_only(rng: np.random.Generator, backend: str) -> None:
    batch = batch_of(rng)
    x, w = normal(rng, (batch.total, 12)), normal(rng, (16, 12))
    before = batch.blocks.copy()
    run(
        batch, backend,
        lambda p, v, o, kv, layer: kernels.matmul_k_cache_ragged(p, v[0], o, v[1], kv, layer), x, w,
    )  # fmt: skip
    assert_close(rows_of(batch, 0), x @ w.T)
    np.testing.assert_array_equal(batch.blocks[:, 1], before[:, 1])
    np.testing.assert_array_equal(batch.blocks[:, :, 0], before[:, :, 0])


@both
@pytest.mark.parametrize(("per_head", "columns"), [(True, 8), (True, 6), (False, 16)])
def test_norm_of_new_keys(
    rng: np.random.Generator, backend: str, per_head: bool, columns: int
) -> None:
    batch = batch_of(rng)
    gamma = normal(rng, (columns,))
    keys = rows_of(batch, 0).reshape(batch.total, 2 if per_head else 1, -1)
    part = keys[..., :columns]
    root = np.sqrt((part**2).mean(-1, keepdims=True) + 1e-3)
    want = np.concatenate([part / root * (gamma + 0.5), keys[..., columns:]], -1)
    run(
        batch, backend,
        lambda p, v, o, kv, layer: kernels.rms_norm_key_cache(
            p, kv, v[0], 1e-3, layer, Dim(batch.total), o, 0.5, rms_norm_cols=columns, per_head_norm=per_head
        ), gamma,
    )  # fmt: skip
    assert_close(rows_of(batch, 0), want.reshape(batch.total, -1))


@both
@pytest.mark.parametrize("first", [0, 1])
def test_adding_to_the_last_sequences(rng: np.random.Generator, backend: str, first: int) -> None:
    batch = batch_of(rng)
    begin = int(batch.offsets[first])
    a = normal(rng, (batch.total - begin, 32))
    before = [rows_of(batch, side) for side in (0, 1)]
    (longest,) = run(
        batch, backend,
        lambda p, v, o, kv, layer: (
            kernels.kv_cache_ragged_radd(p, v[0], kv, o, v[1], 1), kernels.kv_cache_get_max_seq_len(p, kv)
        )[1],
        a, np.array(first, np.uint32),
    )  # fmt: skip
    for side in (0, 1):
        before[side][begin:] += a[:, 16 * side : 16 * side + 16]
        assert_close(rows_of(batch, side), before[side])
    assert longest == 7


def test_a_graph_that_adds_to_sequences_is_staged_alike_again() -> None:
    """Programs on the disk are found by the text of their graph."""
    params = KVCacheParams(DType.float32, 2, 8, page_size=4)
    types: list[Any] = [
        TensorType(DType.float32, ["rows", 32], CPU_REF),
        TensorType(DType.uint32, [], CPU_REF),
        TensorType(DType.uint32, ["offsets"], CPU_REF),
        *paged_cache_types(params, 2, CPU_REF),
    ]
    texts: list[str] = []
    for _ in range(2):
        with Graph("g", input_types=types) as graph:
            a, first, offsets, *cache = graph.inputs
            for layer in range(2):
                kernels.kv_cache_ragged_radd(
                    params,
                    a.tensor,
                    PagedCacheValues.of(cache),
                    offsets.tensor,
                    first.tensor,
                    layer,
                )
            graph.output()
        texts.append(str(graph))
    assert texts[0] == texts[1]


def windows(batch: PagedBatch, size: int) -> list[tuple[list[int], list[int]]]:
    """Returns offsets and first tokens of each chunk, counted token by token."""
    tokens = [
        (s, p)
        for s, (c, n) in enumerate(zip(batch.cached, batch.new, strict=True))
        for p in range(c + n)
    ]
    chunks = []
    for begin in range(0, len(tokens), size):
        part = tokens[begin : begin + size]
        counts = [sum(s == i for s, _ in part) for i in range(len(batch.new))]
        chunks.append(([0, *np.cumsum(counts).tolist()], counts))
    return chunks


@both
@pytest.mark.parametrize("size", [4, 7, 64])
def test_latent_attention(rng: np.random.Generator, backend: str, size: int) -> None:
    """Expanded in chunks and absorbed, both against the plain formula."""
    heads, latent, rotated, plain, value = 3, 12, 4, 6, 5
    batch = latent_batch(rng, latent + rotated)
    w_k, w_v = normal(rng, (heads, plain, latent)), normal(rng, (heads, value, latent))
    q = normal(rng, (batch.total, heads, plain + rotated))
    weight = np.concatenate([w_k, w_v], 1).reshape(-1, latent)

    def attend(p: Any, v: Any, o: Any, kv: Any, layer: Any) -> Any:
        offsets, tokens, lengths = kernels.flare_mla_prefill_plan(p, o, kv, layer, size, 6)
        out = info = None
        for i in range(6):
            both_parts = kernels.flare_mla_decompress_k_cache(
                p, offsets[i], tokens[i], lengths[i], v[1], kv, layer, size
            )
            parts = ops.reshape(both_parts, [size, heads, plain + value])
            out, info = kernels.flare_mla_prefill_ragged(
                p, v[0], parts[:, :, :plain], parts[:, :, plain:], o, offsets[i], tokens[i], kv, layer,
                CAUSAL, 0.4, rotated, out, info,
            )  # fmt: skip
        absorbed = ops.concat(
            [ops.matmul(v[0][:, h : h + 1, :plain].reshape((batch.total, plain)), v[2][h]).reshape((batch.total, 1,
                        latent)) for h in range(heads)], axis=1
        )  # fmt: skip
        decoded = kernels.flare_mla_decode_ragged(
            p,
            ops.concat([absorbed, v[0][:, :, plain:]], axis=2),
            o,
            kv,
            layer,
            CAUSAL,
            0.4,
            rotated,
        )
        return out, decoded, offsets, tokens, lengths

    out, decoded, offsets, tokens, lengths = run(
        batch, backend, attend, q, weight, w_k, latent=True
    )
    chunks = windows(batch, size)
    for i, (bounds, counts) in enumerate(chunks):
        np.testing.assert_array_equal(offsets[i], bounds)
        assert lengths[i] == sum(counts)
    assert not lengths[len(chunks) :].any()
    for row, s, position in batch.positions():
        cache = np.stack([batch.slot(batch.blocks, 0, 1, s, p)[0] for p in range(position + 1)])
        for h in range(heads):
            keys = np.concatenate([cache[:, :latent] @ w_k[h].T, cache[:, latent:]], 1)
            scores = keys @ q[row, h] * 0.4
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            assert_close(out[row, h], weights @ cache[:, :latent] @ w_v[h].T, scale=8.0)
            assert_close(decoded[row, h], weights @ cache[:, :latent], scale=8.0)


@both
def test_keys_in_a_buffer(rng: np.random.Generator, backend: str) -> None:
    batch = latent_batch(rng, 8)
    offsets = np.array([0, 3, 3, 5], np.uint32)
    starts = np.array([2, 0, 1], np.uint32)
    (got,) = run(
        batch, backend,
        lambda p, v, o, kv, layer: kernels.k_cache_to_buffer(p, v[0], v[1], kv, layer, v[0][3:], 7, 6),
        offsets, starts, latent=True,
    )  # fmt: skip
    places = [(0, 2), (0, 3), (0, 4), (2, 1), (2, 2)]
    want = [batch.slot(batch.blocks, 0, 1, s, p)[0, :6] for s, p in places]
    np.testing.assert_array_equal(got[:5], np.stack(want))
    assert not got[5:].any()


@both
@pytest.mark.parametrize("causal", [False, True])
def test_cross_attention(rng: np.random.Generator, backend: str, causal: bool) -> None:
    """More queries than keys, and fewer."""
    batch = batch_of(rng)
    rows = [3, 2, 4]
    offsets = np.cumsum([0, *rows]).astype(np.uint32)
    q = normal(rng, (sum(rows), 4, 8))
    (got,) = run(
        batch, backend,
        lambda p, v, o, kv, layer: kernels.cross_attention_ragged(
            p, v[0], v[1], kv, layer, CAUSAL if causal else NULL, o, v[2], 0.5
        ), q, offsets, np.array([4], np.uint32),
    )  # fmt: skip
    for s in range(3):
        keys, values = (batch.context(side, 1, s).numpy() for side in (0, 1))
        for i in range(rows[s]):
            row = int(offsets[s]) + i
            count = min(batch.cached[s] + i + 1, len(keys)) if causal else len(keys)
            for h in range(4):
                scores = keys[:count, h // 2] @ q[row, h] * 0.5
                weights = torch.softmax(torch.from_numpy(scores), 0).numpy()
                assert_close(got[row, h], weights @ values[:count, h // 2], scale=4.0)


@both
def test_counts_of_tokens(rng: np.random.Generator, backend: str) -> None:
    data = np.array([[5, 2], [-1, 0], [7, 1], [9, 1], [3, 0]], np.int32)
    offsets, tokens = np.array([0, 2, 3, 5], np.uint32), np.array([6, 7, 9], np.int64)
    evaluate(
        lambda d, o, t: kernels.update_frequency_data(d, o, t) or (),
        [data, offsets, tokens], backend, buffers=[0],
    )  # fmt: skip
    np.testing.assert_array_equal(data, [[5, 2], [6, 1], [7, 2], [9, 2], [3, 0]])
    with pytest.raises(Exception, match="row 1 has no free pair for token 4"):
        evaluate(
            lambda d, o, t: kernels.update_frequency_data(d, o, t) or (),
            [data, offsets, np.array([6, 4, 9])], backend, buffers=[0],
        )  # fmt: skip


@both
def test_adapters(rng: np.random.Generator, backend: str) -> None:
    """Two adapters, a group without one, and rows past the last group; keys and values are written to the cache."""
    batch = batch_of(rng, 1, 4)
    x = normal(rng, (batch.total, 6))
    a, b = normal(rng, (3, 6, 6)), normal(rng, (3, 16, 2))
    bias = normal(rng, (3, 16))
    ids, ranks = np.array([2, -1, 0], np.int32), np.array([2, 0, 2], np.uint32)
    groups = np.array([0, 2, 5, 9], np.uint32)
    before = [rows_of(batch, side) for side in (0, 1)]

    def apply(p: Any, v: Any, o: Any, kv: Any, layer: Any) -> Any:
        rows, a, b, bias, ids, ranks, groups = v
        q = kernels.sgmv_qkv_lora_kernel(
            rows, a, b, ids, ranks, o, groups, kv, p, layer, 4, 2, 8, 4, bias
        )
        return q, kernels.sgmv_lora_kernel(rows, a[:, :2], b, ids, ranks, groups, 4, bias)

    q, plain = run(batch, backend, apply, x, a, b, bias, ids, ranks, groups)
    want, simple = np.zeros((batch.total, 16), np.float32), np.zeros((batch.total, 16), np.float32)
    for g, adapter in enumerate(ids):
        for row in range(groups[g], groups[g + 1]):
            if adapter >= 0:
                for part, columns in enumerate((slice(0, 8), slice(8, 12), slice(12, 16))):
                    narrow = a[adapter, 2 * part : 2 * part + 2] @ x[row]
                    want[row, columns] = b[adapter, columns] @ narrow + bias[adapter, columns]
                simple[row] = b[adapter] @ (a[adapter, :2] @ x[row]) + bias[adapter]
    assert_close(q, want[:, :8], scale=4.0)
    assert_close(plain, simple, scale=4.0)
    assert_close(rows_of(batch, 0), before[0] + want[:, 8:12], scale=4.0)
    assert_close(rows_of(batch, 1), before[1] + want[:, 12:], scale=4.0)


@both
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_rows(rng: np.random.Generator, backend: str, bits: int) -> None:
    """Integers and scales in one tensor, with permuted input columns."""
    batch = batch_of(rng, 1, 4)
    x = normal(rng, (batch.total, 32))
    integers = rng.integers(0, 2**bits, (12, 32))
    scales = (rng.standard_normal((12, 2)) * 10.0 ** rng.uniform(-6, 0, (12, 2))).astype(np.float16)
    packed = np.zeros((12, 32 * bits // 8), np.uint8)
    for i in range(32):
        packed[:, i * bits // 8] |= (integers[:, i] << (i * bits % 8)).astype(np.uint8)
    weight = np.concatenate([packed, scales.view(np.uint8).reshape(12, 4)], 1)
    order = rng.permutation(32)
    config = QuantizationConfig("gptq", bits, 16, False, True)
    (q,) = run(
        batch, backend,
        lambda p, v, o, kv, layer: kernels.fused_qkv_ragged_matmul_quantized(
            p, v[0], o, v[1], kv, layer, 1, config, v[2]
        ), x, weight, order,
    )  # fmt: skip
    values = (integers - 2 ** (bits - 1)) * f32(scales).repeat(16, 1)
    want = x[:, order] @ values.T.astype(np.float32)
    assert_close(q, want[:, :4], scale=8.0)
    assert_close(rows_of(batch, 0), want[:, 4:8], scale=8.0)
    assert_close(rows_of(batch, 1), want[:, 8:], scale=8.0)


@both
def test_weights_of_several_encodings(rng: np.random.Generator, backend: str) -> None:
    batch = batch_of(rng, 1, 4)
    x = normal(rng, (batch.total, 256))
    names = ("Q4_0", "Q8_0", "Q4_K")
    encoded = [encode(normal(rng, (4, 256)), name) for name in names]
    (q,) = run(
        batch, backend,
        lambda p, v, o, kv, layer: kernels.unfused_qkv_ragged_matmul_gguf_quantized(
            p, v[0], o, 1, *v[1:], *(QuantizationEncoding[n] for n in names), kv, layer
        ), x, *encoded,
    )  # fmt: skip
    wants = [x @ decode(w, n).T for w, n in zip(encoded, names, strict=True)]
    for got, want in zip((q, rows_of(batch, 0), rows_of(batch, 1)), wants, strict=True):
        assert_close(got, want, scale=8.0)


@both
def test_float8_products(rng: np.random.Generator, backend: str) -> None:
    batch = batch_of(rng, 1, 4)
    x, w = normal(rng, (batch.total, 32)).astype(F8), normal(rng, (12, 32)).astype(F8)
    row_scales = rng.uniform(0.5, 2, (1, batch.total)).astype(np.float32)
    w_scales = rng.uniform(0.5, 2, (12, 1)).astype(np.float32)
    one = np.array([0.5], np.float32)

    def project(p: Any, v: Any, o: Any, kv: Any, layer: Any) -> Any:
        rows, weight, each, scales, static = v
        fixed = kernels.fused_qkv_ragged_matmul_scaled_float8(
            p, rows, o, weight, kv, layer, 1, static, scales
        )
        return fixed, kernels.fused_qkv_ragged_matmul_scaled_float8(
            p, rows, o, weight, kv, layer, 1, each, scales
        )

    fixed, q = run(batch, backend, project, x, w, row_scales, w_scales, one)
    product = f32(x) @ (f32(w) * w_scales).T
    bf16 = np.dtype(ml_dtypes.bfloat16)
    assert_close(f32(fixed), product[:, :4] * 0.5, bf16)
    want = product * row_scales.T
    assert_close(f32(q), want[:, :4], bf16)
    assert_close(rows_of(batch, 0), want[:, 4:8], bf16)
    blocks = rng.uniform(0.5, 2, (1, 2)).astype(np.float32)
    groups = rng.uniform(0.5, 2, (2, batch.total)).astype(np.float32)
    run(
        batch, backend,
        lambda p, v, o, kv, layer: kernels.matmul_k_cache_ragged_scaled_float8(
            p, v[0], o, v[1], v[2], v[3], kv, (1, 4, 16), layer
        ), x, w[:4], groups, blocks,
    )  # fmt: skip
    scaled = f32(x) * groups.T.repeat(16, 1)
    assert_close(rows_of(batch, 0), scaled @ (f32(w[:4]) * blocks.repeat(16, 1)).T, scale=4.0)


def test_another_float8_format() -> None:
    """For all bit patterns the value is half of that in the other format, and -0 becomes 0."""
    bits = np.arange(256, dtype=np.uint8)
    weight = bits.view(F8)
    got, scale = evaluate(
        kernels.normalize_e4m3fn_to_e4m3fnuz, [weight, np.array([1.5], np.float32)], "interpreter"
    )
    number = np.isfinite(f32(weight)) & (bits != 128)
    np.testing.assert_array_equal(got.view(np.uint8)[number], bits[number])
    assert got.view(np.uint8)[128] == 0
    assert scale == 3.0
    assert not kernels.needs_fp8_fnuz_conversion()


@both
@pytest.mark.parametrize("bad", ["page", "length", "offsets"])
def test_what_lies_outside_of_the_cache_raises(
    rng: np.random.Generator, backend: str, bad: str
) -> None:
    batch = latent_batch(rng, 8)
    offsets, starts = np.array([0, 3, 3, 5], np.uint32), np.array([2, 0, 1], np.uint32)
    if bad == "page":
        batch.lookup_table[0, 0] = 1000
    if bad == "length":
        starts[2] = 500
    if bad == "offsets":
        offsets[3] = 8
    with pytest.raises(Exception, match="page|position|offsets"):
        run(
            batch, backend,
            lambda p, v, o, kv, layer: kernels.k_cache_to_buffer(p, v[0], v[1], kv, layer, v[0][3:], 7, 6),
            offsets, starts, latent=True,
        )  # fmt: skip


@both
@pytest.mark.parametrize("missing", ["rows", "heads", "values"])
def test_results_of_earlier_chunks_have_the_shapes_of_this_one(
    rng: np.random.Generator, backend: str, missing: str
) -> None:
    batch = latent_batch(rng, 8)
    lost = [int(missing == name) for name in ("rows", "heads", "values")]
    offsets, starts = np.array([0, 2, 4, 7], np.uint32), np.zeros(3, np.uint32)
    earlier = normal(rng, (batch.total - lost[0], 3 - lost[1], 5 - lost[2]))
    state = np.ones((batch.total - lost[0], 3 - lost[1], 2), np.float32)

    def attend(p: Any, v: Any, o: Any, kv: Any, layer: Any) -> Any:
        return kernels.flare_mla_prefill_ragged(
            p, v[0], v[1], v[2], o, v[3], v[4], kv, layer, CAUSAL, 0.4, 4, v[5], v[6]
        )  # fmt: skip

    arrays = [
        normal(rng, (batch.total, 3, 10)), normal(rng, (7, 3, 6)), normal(rng, (7, 3, 5)), offsets, starts
    ]  # fmt: skip
    with pytest.raises(Exception, match="earlier chunks|previous_out is"):
        run(batch, backend, attend, *arrays, earlier, state, latent=True)
