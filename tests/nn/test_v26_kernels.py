"""The library ops of later versions, against NumPy and torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, TensorType, ops
from max.nn import kernels
from max.nn.attention import MHAMaskVariant
from max.nn.quant_config import ceildiv as ceildiv_of_config
from tests.nn.harness import BACKENDS, BF16, CPU_REF, Array, evaluate, f32, normal
from tests.nn.test_cache_rows import batch_of, rows_of, run
from tests.tolerance import assert_close

both = pytest.mark.parametrize("backend", BACKENDS)
TABLE = 20


def values_of(*types: Any) -> list[Any]:
    """Values of a graph, for calls that fail when they are staged."""
    graph = Graph("staged", input_types=[TensorType(d, s, CPU_REF) for d, s in types])
    graph.__enter__()
    return [value.tensor for value in graph.inputs]


@pytest.fixture(autouse=True)
def _no_graph_is_left() -> Any:
    from max.graph.staging.current import CURRENT

    before = CURRENT.get()
    yield
    CURRENT.set(before)


def test_ceildiv() -> None:
    assert kernels.ceildiv(Dim(7), Dim(3)) == 3 and kernels.ceildiv(6, 3) == 2
    assert kernels.ceildiv(Dim("n"), Dim(3)).substitute({"n": 10}) == 4
    assert ceildiv_of_config is kernels.ceildiv
    with pytest.raises(ZeroDivisionError):
        kernels.ceildiv(7, 0)


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_of_queries_and_keys_by_their_means(
    rng: np.random.Generator, backend: str, dtype: str
) -> None:
    q, k = normal(rng, (5, 7), dtype), normal(rng, (5, 3), dtype)
    gammas = normal(rng, (7,)), normal(rng, (3,))

    def layer(q: Any, k: Any, a: Any, b: Any) -> Any:
        means = kernels.row_mean_of_squares_qk(q, k)
        return means, *kernels.apply_qk_rms_norm(q, k, means, a, b, 1e-3)

    means, *got = evaluate(layer, [q, k, *gammas], backend, dims=[["n", 7], ["n", 3], None, None])
    want = np.stack([(f32(x) ** 2).mean(-1) for x in (q, k)], -1)
    assert_close(means, want)
    for side, (x, gamma) in enumerate(((q, gammas[0]), (k, gammas[1]))):
        full = f32(x) / np.sqrt(want[:, side : side + 1] + 1e-3) * gamma
        assert got[side].dtype == x.dtype
        assert_close(f32(got[side]), f32(full.astype(x.dtype)), dtype=dtype)
    (single,) = evaluate(kernels.row_mean_of_squares, [normal(rng, (2, 3, 5))], backend)
    assert single.shape == (2, 3, 1)


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_norms_side_by_side(rng: np.random.Generator, backend: str, dtype: str) -> None:
    x, y = normal(rng, (3, 6), dtype), normal(rng, (3, 6), dtype)
    a, b = normal(rng, (6,), dtype), normal(rng, (6,), dtype)
    (got,) = evaluate(
        lambda *v: kernels.mtp_eh_norm(*v, 1e-5),
        [x, y, a, b],
        backend,
        dims=[["n", 6], ["n", 6], None, None],
    )
    want = []
    for data, weight in ((x, a), (y, b)):
        normed = f32(data) / np.sqrt((f32(data) ** 2).mean(-1, keepdims=True) + 1e-5)
        want.append(f32((f32(normed.astype(data.dtype)) * f32(weight)).astype(data.dtype)))
    assert_close(f32(got), np.concatenate(want, -1), dtype=dtype)


def test_statistics_of_what_does_not_fit() -> None:
    f, half, u = DType.float32, DType.float16, DType.bfloat16
    q, k, other, h, w, scalar = values_of(
        (f, ("n", 4)), (f, ("n", 3)), (u, ("n", 3)), (half, (4,)), (f, (4,)), (f, ())
    )
    for call in (
        lambda: kernels.row_mean_of_squares(h),
        lambda: kernels.row_mean_of_squares(scalar),
        lambda: kernels.row_mean_of_squares_qk(q, other),
        lambda: kernels.row_mean_of_squares_qk(q, w),
        lambda: kernels.apply_qk_rms_norm(q, k, q, w, w, 1e-5),
        lambda: kernels.mtp_eh_norm(q, k, w, w, 1e-5),
        lambda: kernels.mtp_eh_norm(q, q, k, w, 1e-5),
        lambda: kernels.mtp_eh_norm(q, q, w, w, 1e-5, block_threads=33),
    ):
        with pytest.raises(ValueError, match=r"row_mean|apply_qk|mtp_eh"):
            call()


def bits(allowed: Array) -> Array:
    """Packs bools, 32 in a word, the lowest bit first."""
    words = -(-allowed.shape[-1] // 32)
    padded = np.zeros((*allowed.shape[:-1], words * 32), np.uint8)
    padded[..., : allowed.shape[-1]] = allowed
    return np.packbits(padded, axis=-1, bitorder="little").view(np.int32)


@both
@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 70), "float32"), ((2, 3, 64), "bfloat16"), ((1, 5), "float32")]
)
def test_masks_of_bits(
    rng: np.random.Generator, backend: str, shape: tuple[int, ...], dtype: str
) -> None:
    logits = normal(rng, shape, dtype)
    allowed = rng.random(shape) < 0.5
    packed = bits(allowed)
    wider = np.concatenate([packed, np.full((*shape[:-1], 1), -1, np.int32)], -1)
    for words in (packed, wider):
        (got,) = evaluate(
            lambda x, m: kernels.apply_packed_bitmask(x, m, -7.0), [logits, words], backend
        )
        np.testing.assert_array_equal(f32(got), np.where(allowed, f32(logits), -7.0))


@both
def test_masks_of_bits_with_penalties(rng: np.random.Generator, backend: str) -> None:
    logits = normal(rng, (2, 2, 40))
    logits[0, 0, 3] = -np.inf
    allowed = rng.random((2, 2, 40)) < 0.7
    allowed[0, 0, [3, 4]] = True
    allowed[1, 1, 6] = False
    data = np.array([[3, 2], [4, 5], [-1, 9], [6, 1], [0, 3]], np.int32)
    offsets = np.array([0, 3, 3, 3, 5], np.uint32)
    frequency, presence = normal(rng, (4,)), normal(rng, (4,))
    want = logits.reshape(4, 40).copy()
    for row in range(4):
        for token, count in data[offsets[row] : offsets[row + 1]]:
            if token >= 0:
                want[row, token] -= frequency[row] * count + presence[row]
    want = np.where(allowed, want.reshape(logits.shape), -5.0)
    (got,) = evaluate(
        lambda x, m, *rest: kernels.apply_packed_bitmask_with_penalties(x, m, -5.0, *rest),
        [logits, bits(allowed), data, offsets, frequency, presence], backend,
    )  # fmt: skip
    assert_close(got, want)


@both
def test_argmax_with_bias(rng: np.random.Generator, backend: str) -> None:
    logits, bias = normal(rng, (4, 3, 9), "bfloat16"), normal(rng, (4, 9))
    for position in (0, 2):
        (got,) = evaluate(
            lambda x, b, position=position: kernels.argmax_with_bias(x, b, position=position),
            [logits, bias],
            backend,
        )
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, (f32(logits)[:, position] + bias).argmax(-1))


@both
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_top_k_per_row(rng: np.random.Generator, backend: str, dtype: Any) -> None:
    x = rng.permutation(40).reshape(5, 8).astype(dtype)
    k = np.array([0, 1, 3, 2, 3], np.int64)
    values, columns = evaluate(
        lambda x, k: kernels.top_k_per_row(x, k, 3), [x, k], backend, dims=[["r", 8], ["r"]]
    )
    lowest = -np.inf if dtype is np.float32 else np.iinfo(dtype).min
    for row in range(5):
        order = np.argsort(-x[row])[: k[row]]
        rest = 3 - len(order)
        np.testing.assert_array_equal(columns[row], [*order, *[-1] * rest])
        np.testing.assert_array_equal(values[row], [*x[row][order], *[lowest] * rest])
    nothing, none = evaluate(lambda x, k: kernels.top_k_per_row(x, k, 0), [x, k], backend)
    assert nothing.shape == none.shape == (5, 0)


@both
def test_the_distribution_that_top_k_and_top_p_leave(
    rng: np.random.Generator, backend: str
) -> None:
    logits = normal(rng, (6, 11))
    logits[5] = 1.0
    k = np.array([-1, 3, -1, 5, 1, 4], np.int64)
    temperature = np.array([1, 0.5, 2, 0.8, 1, 0], np.float32)
    p = np.array([1, 1, 0.6, 0.5, 0.1, 1], np.float32)
    (got,) = evaluate(
        lambda x, k, t, p: kernels.topk_topp_masked_probs(x, top_k=k, temperature=t, top_p=p),
        [logits, k, temperature, p], backend,
    )  # fmt: skip
    for row in range(5):
        x = torch.from_numpy(logits[row]).double() / float(temperature[row])
        order = torch.argsort(x, descending=True)
        order = order if k[row] < 0 else order[: k[row]]
        shares = torch.softmax(x[order], 0)
        count = int((shares.cumsum(0) - shares < p[row]).sum())
        want = np.zeros(11)
        want[order[:count]] = torch.softmax(x[order[:count]], 0)
        assert_close(got[row], want.astype(np.float32))
    (single,) = evaluate(
        lambda x, k, t, p: kernels.topk_topp_masked_probs(x, top_k=k, temperature=t, top_p=p),
        [logits, k, temperature, np.zeros_like(p)], backend,
    )  # fmt: skip
    np.testing.assert_array_equal(single[:5], np.eye(11, dtype=np.float32)[logits[:5].argmax(-1)])
    # equal logits are kept together
    assert_close(got[5], np.full(11, 1 / 11, np.float32))


def test_logits_that_do_not_fit() -> None:
    f, i, long = DType.float32, DType.int32, DType.int64
    x, mask, short, wide, k, row, bias = values_of(
        (f, ("n", 70)),
        (i, ("n", 3)),
        (i, ("n", 2)),
        (long, ("n", 3)),
        (long, ("n",)),
        (f, ("m",)),
        (f, ("n", 71)),
    )
    for call in (
        lambda: kernels.apply_packed_bitmask(x, short),
        lambda: kernels.apply_packed_bitmask(x, wide),
        lambda: kernels.apply_packed_bitmask(row, mask),
        lambda: kernels.apply_packed_bitmask(mask, mask),
        lambda: kernels.argmax_with_bias(ops.unsqueeze(x, 1), bias, position=0),
        lambda: kernels.argmax_with_bias(ops.unsqueeze(x, 1), x, position=1),
        lambda: kernels.argmax_with_bias(ops.unsqueeze(x, 1), x, position=-1),
        lambda: kernels.top_k_per_row(x, k, 71),
        lambda: kernels.top_k_per_row(x, row, 3),
        lambda: kernels.top_k_per_row(x, ops.cast(k, i), 3),
        lambda: kernels.top_k_per_row(row, k, 3),
        lambda: kernels.topk_topp_masked_probs(x, top_k=k, temperature=row, top_p=row),
    ):
        with pytest.raises(ValueError, match=r"apply_packed|argmax_with|top_k_per|topk_topp"):
            call()


@both
@pytest.mark.parametrize(
    ("groups", "chosen", "normed"), [(4, 2, True), (4, 1, False), (1, 1, False)]
)
def test_experts_of_the_best_groups(
    rng: np.random.Generator, backend: str, groups: int, chosen: int, normed: bool
) -> None:
    scores = torch.sigmoid(torch.from_numpy(normal(rng, (7, 16))))
    bias = torch.from_numpy(normal(rng, (16,)))
    experts, weights = evaluate(
        lambda s, b: kernels.moe_router_group_limited(s, b, 16, 3, groups, chosen, normed, 2.5),
        [scores.numpy(), bias.numpy()], backend, dims=[["t", 16], None],
    )  # fmt: skip
    # the published code of DeepSeek-V3's gate
    biased = scores + bias
    if groups > 1:
        grouped = biased.view(7, groups, -1)
        best = grouped.topk(2, dim=-1)[0].sum(-1).topk(chosen, dim=-1)[1]
        mask = torch.ones(7, groups, dtype=torch.bool).scatter_(1, best, False)
        biased = grouped.masked_fill(mask.unsqueeze(-1), float("-inf")).flatten(1)
    indices = biased.topk(3, dim=-1)[1]
    want = scores.gather(1, indices)
    if normed or groups == 1:
        want = want / want.sum(-1, keepdim=True)
    assert experts.dtype == np.int32
    np.testing.assert_array_equal(experts, indices.numpy())
    assert_close(weights, (want * 2.5).numpy())


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sum_over_experts(rng: np.random.Generator, backend: str, dtype: str) -> None:
    rows, weights = normal(rng, (12, 5), dtype), normal(rng, (4, 3))
    order = rng.permutation(12).astype(np.uint32)
    kind = DType.from_numpy(rows.dtype)
    (got,) = evaluate(
        lambda x, o, w: kernels.moe_finalize(x, o, w, kind), [rows, order, weights], backend,
        dims=[["r", 5], ["r"], ["t", 3]],
    )  # fmt: skip
    want = (f32(rows)[order].reshape(4, 3, 5) * weights[..., None]).sum(1)
    assert got.dtype == rows.dtype
    assert_close(f32(got), f32(want.astype(rows.dtype)), dtype=dtype)


def test_experts_that_do_not_fit() -> None:
    f, u = DType.float32, DType.uint32
    scores, bias, rows, order, weights = values_of(
        (f, ("t", 16)), (f, (16,)), (f, (12, 5)), (u, (11,)), (f, (4, 3))
    )
    route = kernels.moe_router_group_limited
    for call in (
        lambda: route(scores, bias, 8, 2, 4, 2, True, 1.0),
        lambda: route(scores, bias, 16, 2, 3, 2, True, 1.0),
        lambda: route(scores, bias, 16, 2, 4, 5, True, 1.0),
        lambda: route(scores, bias, 16, 9, 4, 2, True, 1.0),
        lambda: route(scores, weights, 16, 2, 4, 2, True, 1.0),
        lambda: kernels.moe_finalize(rows, order, weights, f),
        lambda: kernels.moe_finalize(rows, order, bias, f),
    ):
        with pytest.raises(ValueError, match=r"moe_router|moe_finalize|rebind"):
            call()
    with pytest.raises(TypeError, match="expected uint32"):
        kernels.moe_finalize(rows, bias, weights, f)


def rotated(x: Array, table: Array, positions: Array, interleaved: bool, first: bool) -> Array:
    """Rotates heads by multiplication of complex numbers."""
    width = table.shape[1]
    turn = (table[:, 0::2] + 1j * table[:, 1::2])[positions][:, None]
    begin = 0 if first else x.shape[2] - width
    out = f32(x).copy()
    part = out[..., begin : begin + width]
    pairs = part[..., 0::2] + 1j * part[..., 1::2] if interleaved else (
        part[..., : width // 2] + 1j * part[..., width // 2 :]
    )  # fmt: skip
    turned = pairs * turn
    if interleaved:
        part[..., 0::2], part[..., 1::2] = turned.real, turned.imag
    else:
        part[..., : width // 2], part[..., width // 2 :] = turned.real, turned.imag
    return out


def angles(rng: np.random.Generator, width: int) -> Array:
    angle = rng.uniform(0, 6, (TABLE, width // 2))
    return np.stack([np.cos(angle), np.sin(angle)], -1).reshape(TABLE, width).astype(np.float32)


@both
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("width", "first"), [(8, False), (6, False), (4, True)])
def test_rotation_of_ragged_rows(
    rng: np.random.Generator, backend: str, interleaved: bool, width: int, first: bool
) -> None:
    x, table = normal(rng, (9, 3, 8)), angles(rng, width)
    offsets, starts = np.array([0, 4, 4, 7], np.uint32), np.array([5, 0, 2], np.uint32)
    positions = np.array([5, 6, 7, 8, 2, 3, 4])
    (got,) = evaluate(
        lambda x, o, s, t: kernels.rope_ragged(x, o, s, t, interleaved=interleaved, rope_first=first),
        [x, offsets, starts, table], backend, dims=[["n", 3, 8], ["b1"], ["b"], None],
    )  # fmt: skip
    assert_close(got[:7], rotated(x[:7], table, positions, interleaved, first))
    ids = rng.integers(0, TABLE, 9).astype(np.uint32)
    if width == 8:
        for given in (ids, ids[None]):
            (got,) = evaluate(
                lambda x, t, p: kernels.rope_ragged_with_position_ids(x, t, p, interleaved=interleaved),
                [x, table, given], backend,
            )  # fmt: skip
            assert_close(got, rotated(x, table, ids, interleaved, True))


def test_the_dtype_of_rotated_rows(rng: np.random.Generator) -> None:
    x, table = normal(rng, (2, 1, 4), "bfloat16"), angles(rng, 4)
    offsets, starts = np.array([0, 2], np.uint32), np.array([18], np.uint32)
    inputs = [x, offsets, starts, table]
    (narrow,) = evaluate(kernels.rope_ragged, inputs, "engine")
    (wide,) = evaluate(
        lambda *v: kernels.rope_ragged(*v, output_dtype=DType.float32), inputs, "engine"
    )
    assert narrow.dtype == BF16 and wide.dtype == np.float32
    np.testing.assert_array_equal(f32(narrow), wide)
    inputs[2] = np.array([19], np.uint32)
    with pytest.raises(Exception, match="gather"):
        evaluate(kernels.rope_ragged, inputs, "engine")


def test_rotations_that_do_not_fit() -> None:
    f, u = DType.float32, DType.uint32
    x, table, odd, wide, offsets, ids, three, flat = values_of(
        (f, ("n", 3, 8)),
        (f, (20, 8)),
        (f, (20, 7)),
        (f, (20, 10)),
        (u, ("b",)),
        (u, ("n",)),
        (u, (3, "n")),
        (f, ("n", 8)),
    )
    for call in (
        lambda: kernels.rope_ragged(x, offsets, offsets, odd),
        lambda: kernels.rope_ragged(x, offsets, offsets, wide),
        lambda: kernels.rope_ragged(flat, offsets, offsets, table),
        lambda: kernels.rope_ragged_with_position_ids(x, wide, ids),
        lambda: kernels.rope_ragged_with_position_ids(x, table, offsets),
    ):
        with pytest.raises(ValueError, match="rope_ragged"):
            call()
    for options in ({}, {"mrope_section": [2, 1, 1]}):
        with pytest.raises(NotImplementedError, match="mrope_section"):
            kernels.rope_ragged_with_position_ids(x, table, three, **options)
    with pytest.raises(NotImplementedError, match="mrope_section"):
        kernels.rope_ragged_with_position_ids(x, table, ids, mrope_section=[4])
    with pytest.raises(TypeError, match="position_ids"):
        kernels.rope_ragged_with_position_ids(x, table, ops.cast(ids, DType.int64))


@both
@pytest.mark.parametrize("dtype", [np.float32, BF16, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("side", [0, 1])
def test_stores_to_a_side_of_the_cache(
    rng: np.random.Generator, backend: str, dtype: Any, side: int
) -> None:
    batch = batch_of(rng, dtype=dtype)
    x = normal(rng, (batch.total, 2, 8))
    before = batch.blocks.copy()
    store = (kernels.store_k_cache_ragged, kernels.store_v_cache_ragged)[side]
    run(batch, backend, lambda p, v, o, kv, layer: store(kv, v[0], o, layer), x)
    np.testing.assert_array_equal(
        rows_of(batch, side), f32(x.astype(dtype)).reshape(batch.total, 16)
    )
    np.testing.assert_array_equal(f32(batch.blocks[:, 1 - side]), f32(before[:, 1 - side]))
    padded = np.zeros((3, 7, 2, 8), np.float32)
    lengths = np.diff(batch.offsets).astype(np.uint32)
    for sequence, length in enumerate(lengths):
        padded[sequence, :length] = -x[batch.offsets[sequence] :][:length]
    run(
        batch, backend,
        lambda p, v, o, kv, layer: kernels.kv_cache_store_paged_padded(kv, v[0], v[1], layer, key_or_value=side),
        padded, lengths,
    )  # fmt: skip
    np.testing.assert_array_equal(
        rows_of(batch, side), f32((-x).astype(dtype)).reshape(batch.total, 16)
    )


@both
def test_stores_to_a_cache_of_codes(rng: np.random.Generator, backend: str) -> None:
    """Heads of 7 codes: with their scale and padding they take 12 bytes."""
    batches = [batch_of(rng, dim=7) for _ in range(2)]
    x, y = normal(rng, (batches[0].total, 2, 7)), normal(rng, (batches[0].total, 2, 7))
    batches[1].lookup_table = batches[0].lookup_table
    for batch in batches:
        batch.blocks = np.zeros((*batch.blocks.shape[:-1], 12), np.int8)

    def joint(p: Any, v: Any, o: Any, kv: Any, layer: Any) -> None:
        k, values = (ops.reshape(t, [t.shape[0], 14]) for t in v)
        kernels.store_kv_cache_ragged(p, k, values, o, kv, layer)

    def single(p: Any, v: Any, o: Any, kv: Any, layer: Any) -> None:
        kernels.store_k_cache_ragged(kv, v[0], o, layer)
        kernels.store_v_cache_ragged(kv, v[1], o, layer)

    run(batches[0], backend, joint, x, y)
    run(batches[1], backend, single, x, y)
    assert batches[0].blocks.any()
    np.testing.assert_array_equal(batches[1].blocks, batches[0].blocks)


@both
def test_norm_of_new_values(rng: np.random.Generator, backend: str) -> None:
    batch = batch_of(rng)
    gamma = normal(rng, (8,))
    values = rows_of(batch, 1).reshape(batch.total, 2, 8)
    want = values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-3) * (gamma + 0.5)
    keys = rows_of(batch, 0)
    run(
        batch, backend,
        lambda p, v, o, kv, layer: kernels.rms_norm_value_cache(p, kv, v[0], 1e-3, layer, Dim(batch.total), o, 0.5),
        gamma,
    )  # fmt: skip
    assert_close(rows_of(batch, 1), want.reshape(batch.total, 16))
    np.testing.assert_array_equal(rows_of(batch, 0), keys)


def rms(x: Array, gamma: Array | float, epsilon: float = 1e-3) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * gamma


@both
@pytest.mark.parametrize("rotates", [False, True])
def test_norm_of_queries_and_new_keys(
    rng: np.random.Generator, backend: str, rotates: bool
) -> None:
    batch = batch_of(rng)
    q, table = normal(rng, (batch.total, 4, 8)), angles(rng, 8)
    a, b = normal(rng, (8,)), normal(rng, (8,))
    positions = np.array([p for _, _, p in batch.positions()])
    keys = rms(rows_of(batch, 0).reshape(batch.total, 2, 8), b + 1)
    want = rms(q, a + 1)
    if rotates:
        keys, want = (rotated(x, table, positions, False, True) for x in (keys, want))

    def layer(p: Any, v: Any, o: Any, kv: Any, layer: Any) -> Any:
        if rotates:
            return kernels.fused_qk_rms_norm_rope_ragged(
                p,
                v[0],
                o,
                kv,
                v[1],
                v[2],
                v[3],
                1e-3,
                layer,
                1.0,
                interleaved=False,
                q_out_dtype=DType.float64,
            )
        return kernels.fused_qk_ragged_rms_norm(p, v[0], o, kv, v[1], v[2], 1e-3, layer, 1.0)

    (got,) = run(batch, backend, layer, q, a, b, table)
    assert got.dtype == (np.float64 if rotates else np.float32)
    assert_close(f32(got), want)
    assert_close(rows_of(batch, 0), keys.reshape(batch.total, 16))


@both
@pytest.mark.parametrize("form", ["plain", "positions", "normed", "shared"])
def test_rotation_and_stores_of_a_joint_projection(
    rng: np.random.Generator, backend: str, form: str
) -> None:
    batch = batch_of(rng)
    total = batch.total
    heads = [4, 2] if form == "shared" else [4, 2, 2]
    qkv = normal(rng, (total, 8 * sum(heads)))
    table = angles(rng, 8)
    a, b = normal(rng, (8,)), normal(rng, (8,))
    ids = rng.integers(0, TABLE, (1, total)).astype(np.uint32)
    positions = ids[0] if form == "positions" else np.array([p for _, _, p in batch.positions()])
    normed = form in ("normed", "shared")
    parts = [x.reshape(total, -1, 8) for x in np.split(qkv, np.cumsum(heads)[:-1] * 8, axis=1)]
    q, k, v = parts[0], parts[1], parts[-1]
    if normed:
        q, k, v = rms(q, a), rms(k, b), rms(v, 1.0)
    options: dict[str, Any] = {"k_eq_v": form == "shared", "rms_norm_eps": 1e-3 if normed else None}

    def layer(p: Any, x: Any, o: Any, kv: Any, layer: Any) -> Any:
        if normed:
            options.update(q_norm_weight=x[2], k_norm_weight=x[3])
        if form == "positions":
            options.update(position_ids=x[4])
        return kernels.rope_split_store_ragged(p, x[0], o, x[1], kv, layer, 4, **options)

    (got,) = run(batch, backend, layer, qkv, table, a, b, ids)
    assert_close(got, rotated(q, table, positions, True, True).reshape(total, -1))
    assert_close(rows_of(batch, 0), rotated(k, table, positions, True, True).reshape(total, -1))
    assert_close(rows_of(batch, 1), v.reshape(total, -1))


@both
def test_attention_of_a_padded_batch(rng: np.random.Generator, backend: str) -> None:
    batch = batch_of(rng)
    lengths = np.diff(batch.offsets).astype(np.uint32)
    x = normal(rng, (3, 8, 12))
    w = normal(rng, (4 * 8 + 2 * 16, 12)) / 4
    rows = np.concatenate([x[s, :n] for s, n in enumerate(lengths)])

    def layer(p: Any, v: Any, o: Any, kv: Any, layer: Any) -> Any:
        q = kernels.fused_qkv_padded_matmul(p, v[0], v[1], kv, layer, v[2], 4)
        heads = ops.reshape(q, [3, 8, 4, 8])
        out = kernels.flash_attention_padded_kv_cache(
            p, heads, kv, layer, v[2], MHAMaskVariant.CAUSAL_MASK, 0.3
        )
        return q, out

    q, got = run(batch, backend, layer, x, w, lengths)
    projected = rows @ w.T
    assert_close(rows_of(batch, 0), projected[:, 32:48])
    assert_close(rows_of(batch, 1), projected[:, 48:])
    want = batch.attention(projected[:, :32].reshape(-1, 4, 8), 1, 0.3)
    for sequence, length in enumerate(lengths):
        begin = int(batch.offsets[sequence])
        assert_close(q[sequence, :length], projected[begin : begin + length, :32])
        assert_close(got[sequence, :length], want[begin : begin + length])
        assert not q[sequence, length:].any() and not got[sequence, length:].any()


def test_lengths_beyond_the_padded_batch(rng: np.random.Generator) -> None:
    """A length is at most that of the batch: nothing else is read or stored."""
    batch = batch_of(rng)
    x = normal(rng, (3, 2, 2, 8))
    before = batch.blocks.copy()
    run(
        batch, "engine", lambda p, v, o, kv, layer: kernels.store_k_cache_padded(kv, v[0], v[1], layer),
        x, np.array([2, 9, 1], np.uint32),
    )  # fmt: skip
    stored = [(s, i) for s, n in enumerate((2, 2, 1)) for i in range(n)]
    for sequence, index in stored:
        slot = batch.slot(batch.blocks, 0, 1, sequence, batch.cached[sequence] + index)
        np.testing.assert_array_equal(slot, x[sequence, index])
    assert (batch.blocks != before).any((-1, -2)).sum() == len(stored)


@both
def test_rows_that_are_added_and_indices_that_are_left_out(
    rng: np.random.Generator, backend: str
) -> None:
    x, y = normal(rng, (6, 3)), normal(rng, (6, 3))
    for end in (0, 4, 6, 9):
        for shape in ([], [1]):
            (got,) = evaluate(kernels.sliced_add, [x, y, np.full(shape, end, np.int64)], backend)
            np.testing.assert_array_equal(got, np.where(np.arange(6)[:, None] < end, x + y, x))
    for depth, lead in ((1, 3), (2, 1)):
        rows = normal(rng, (5, 3)) if depth == 1 else normal(rng, (5,))
        places = np.array([[0, 1], [-6, 2], [-7, 0], [6, 0], [5, 3]])[:, :depth]
        (got,) = evaluate(
            kernels.scatter_nd_skip_oob_indices,
            [x, rows, places],
            backend,
            dims=[["n", 3], None, None],
        )
        want = x.copy()
        for row, place in zip(rows, places, strict=True):
            if all(-d <= i < d for i, d in zip(place, x.shape, strict=False)):
                want[tuple(place)] = row
        assert lead and not np.array_equal(want, x)
        np.testing.assert_array_equal(got, want)


def test_copies_to_a_buffer(rng: np.random.Generator) -> None:
    x, y = normal(rng, (3, 4)), normal(rng, (3, 4))
    evaluate(lambda b, v: (kernels.inplace_memcpy(b, v), ())[1], [x, y], "engine", buffers=[0])
    np.testing.assert_array_equal(x, y)
    for other in (normal(rng, (4, 4)), normal(rng, (3, 4), "bfloat16")):
        with pytest.raises(ValueError, match="inplace_memcpy"):
            evaluate(
                lambda b, v: (kernels.inplace_memcpy(b, v), ())[1],
                [x, other],
                "engine",
                buffers=[0],
            )


def test_rows_and_stores_that_do_not_fit(rng: np.random.Generator) -> None:
    batch = batch_of(rng)
    x, y, w, lengths = (
        normal(rng, (batch.total, 3, 8)), normal(rng, (batch.total, 2, 7)), normal(rng, (7,)), np.ones(2, np.uint32),
    )  # fmt: skip
    padded = normal(rng, (3, 4, 2, 8))
    calls: list[Any] = [
        lambda p, v, o, kv, layer: kernels.store_k_cache_ragged(kv, v[0], o, layer),
        lambda p, v, o, kv, layer: kernels.store_v_cache_ragged(kv, v[1], o, layer),
        lambda p, v, o, kv, layer: kernels.kv_cache_store_paged_ragged(kv, v[0], o, layer, key_or_value=2),
        lambda p, v, o, kv, layer: kernels.store_k_cache_padded(kv, v[4], v[3], layer),
        lambda p, v, o, kv, layer: kernels.store_k_cache_padded(kv, v[0], v[3], layer),
        lambda p, v, o, kv, layer: kernels.fused_qk_ragged_rms_norm(p, v[1], o, kv, v[2], v[2], 1e-3, layer, 0.0),
        lambda p, v, o, kv, layer: kernels.fused_qk_ragged_rms_norm(p, v[0], o, kv, v[2], v[2], 1e-3, layer, 0.0),
        lambda p, v, o, kv, layer: kernels.rope_split_store_ragged(p, v[1], o, v[1], kv, layer, 4),
        lambda p, v, o, kv, layer: kernels.rope_split_store_ragged(
            p, v[1], o, v[1], kv, layer, 4, q_norm_weight=v[2]
        ),
        lambda p, v, o, kv, layer: kernels.rope_split_store_ragged(p, v[1], o, v[1], kv, layer, 4, k_eq_v=True),
        lambda p, v, o, kv, layer: kernels.fused_qkv_padded_matmul(p, v[2], v[1], kv, layer, v[3], 4),
        lambda p, v, o, kv, layer: kernels.flash_attention_padded_kv_cache(
            p, v[0], kv, layer, v[3], MHAMaskVariant.CAUSAL_MASK, 1.0
        ),
        lambda p, v, o, kv, layer: kernels.sliced_add(v[0], v[1], v[3][:1]),
        lambda p, v, o, kv, layer: kernels.sliced_add(v[0], ops.cast(v[0], DType.float64), v[3][:1]),
        lambda p, v, o, kv, layer: kernels.scatter_nd_skip_oob_indices(
            v[2], v[2], ops.constant(np.zeros((7, 2), np.int64), DType.int64, DeviceRef.CPU())
        ),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(
            ValueError, match=r"store|rms_norm|rope_split|padded|sliced_add|scatter_nd"
        ):
            run(batch, "engine", call, x, y, w, lengths, padded)


def test_dtypes_that_do_not_fit(rng: np.random.Generator) -> None:
    batch = batch_of(rng)
    x = normal(rng, (batch.total, 2, 8))
    calls: list[Any] = [
        lambda p, v, o, kv, layer: kernels.store_k_cache_ragged(kv, v[0], o, ops.cast(layer, DType.int32)),
        lambda p, v, o, kv, layer: kernels.store_k_cache_ragged(kv, v[0], ops.cast(o, DType.int64), layer),
        lambda p, v, o, kv, layer: kernels.store_k_cache_padded(kv, ops.unsqueeze(v[0], 0), v[0][0, 0, :1], layer),
        lambda p, v, o, kv, layer: kernels.sliced_add(v[0], v[0], v[0][0, 0, 0]),
        lambda p, v, o, kv, layer: kernels.scatter_nd_skip_oob_indices(v[0], v[0], v[0]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError, match=r"k_store|kv_cache_store|sliced_add|scatter_nd"):
            run(batch, "engine", call, x)
