"""Layers with LoRA adapters, against products of NumPy with the matrices of each group."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from max.dtype import DType
from max.dtype.blocks import decode, encode
from max.graph import BufferType, DeviceRef, Graph, ShardingStrategy, TensorType, ops
from max.graph.quantization import QuantizationEncoding
from max.nn import (
    AttentionWithRope,
    AttentionWithRopeAndLoRA,
    LinearLoRA,
    RotaryEmbedding,
    SupportsLoRA,
)
from max.nn.float8_config import (
    Float8Config,
    Float8InputScaleSpec,
    Float8ScaleGranularity,
    Float8ScaleOrigin,
    Float8WeightScaleSpec,
)
from max.nn.kv_cache import KVCacheParams, PagedCacheValues
from tests.nn.harness import BACKENDS, CPU_REF, FLOATS, Array, f32, normal, run_graph
from tests.nn.reference import PagedBatch
from tests.quantized import assert_product
from tests.tolerance import assert_close

both = pytest.mark.parametrize("backend", BACKENDS)


def layer_of(**options: Any) -> LinearLoRA:
    return LinearLoRA(**{
        "in_dim": 8, "out_dim": 6, "max_num_loras": 4, "max_lora_rank": 3, "dtype": DType.float32,
        "device": CPU_REF, **options,
    })  # fmt: skip


def drawn(layer: Any, rng: np.random.Generator) -> dict[str, Array]:
    """Random values for a layer's weights."""
    return {
        name: normal(rng, [int(d) for d in w.shape], w.dtype.name if w.dtype.is_float() else "float32")
        for name, w in layer.raw_state_dict().items()
    }  # fmt: skip


def batch_inputs(ids: Any, offsets: Any, ranks: Any = None) -> list[Array]:
    """Adapters, ranks and offsets of the groups."""
    of_ids = [3] * len(ids) if ranks is None else ranks
    return [np.array(ids, np.int32), np.array(of_ids, np.uint32), np.array(offsets, np.uint32)]


def product(layer: LinearLoRA, call: bool = True) -> Any:
    """A function of the rows and the groups."""

    def forward(x: Any, ids: Any, ranks: Any, offsets: Any) -> Any:
        layer.set_lora_batch_info(ids, ranks, offsets)
        return layer(x) if call else layer.apply_lora(x)

    return forward


def run(
    layer: LinearLoRA, x: Array, groups: list[Array], backend: str, weights: dict[str, Array],
    symbolic: bool = False, call: bool = True,
) -> Array:  # fmt: skip
    layer.load_state_dict(weights)
    dims: list[Any] = [["rows", x.shape[1]], ["slots"], ["slots"], ["ends"]]
    types = [
        TensorType(DType.from_numpy(a.dtype), d if symbolic else a.shape, CPU_REF)
        for a, d in zip((x, *groups), dims, strict=True)
    ]
    forward = product(layer, call)
    graph = Graph("layer", lambda *v: forward(*[a.tensor for a in v]), input_types=types)
    return run_graph(graph, [x, *groups], layer.state_dict(), backend)[0]


def added(x: Array, weights: dict[str, Array], ids: Any, offsets: Any, prefix: str = "") -> Array:
    """What adapters add to each row, in float64."""
    a, b = (weights[f"{prefix}lora_{m}.weight"].astype(np.float64) for m in "AB")
    bias = weights.get(f"{prefix}lora.bias")
    y = np.zeros((len(x), b.shape[1]))
    for g, (start, stop) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if ids[g] >= 0:
            y[start:stop] = x[start:stop].astype(np.float64) @ a[ids[g]].T @ b[ids[g]].T
            if bias is not None:
                y[start:stop] += bias[ids[g]].astype(np.float64)
    return y


@both
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("biases", [(False, False), (True, True)])
def test_random_groups(
    rng: np.random.Generator, backend: str, dtype: str, biases: tuple[bool, bool]
) -> None:
    """Groups of any size, adapters that several groups or none have, sizes that only a run knows."""
    layer = layer_of(
        dtype=FLOATS[dtype], has_bias=biases[0], has_lora_bias=biases[1], max_num_loras=5
    )
    weights = drawn(layer, rng)
    for turn in range(4):
        sizes = rng.integers(0, 5, rng.integers(1, 7))
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        ids = rng.integers(-1, 5, len(sizes))
        x = normal(rng, (int(offsets[-1]) + turn, 8), dtype)
        groups = batch_inputs(ids, offsets)
        got = run(layer, x, groups, backend, weights, symbolic=turn > 0)
        extra = added(f32(x), weights, ids, offsets)
        want = f32(x) @ f32(weights["weight"]).T + f32(weights.get("bias", np.zeros(6))) + extra
        assert got.dtype == x.dtype
        # the base, the inner product and the adapter's product are each rounded to the dtype
        assert_close(got, want, dtype, scale=8.0)
        alone = run(layer, x, groups, backend, weights, symbolic=turn > 0, call=False)
        assert_close(alone, extra, dtype, scale=8.0)


@both
def test_a_table_of_adapters_longer_than_the_batch(rng: np.random.Generator, backend: str) -> None:
    """The reference gives lora_ids and lora_ranks of ``[max_num_loras]`` with the offsets of the batch's sequences."""
    layer = layer_of(has_lora_bias=True)
    weights, x = drawn(layer, rng), normal(rng, (9, 8))
    want = x @ weights["weight"].T + added(x, weights, [2, 0], [0, 3, 7])
    for symbolic in (False, True):
        groups = batch_inputs([2, 0, 9, -7], [0, 3, 7])
        assert_close(run(layer, x, groups, backend, weights, symbolic), want, scale=4.0)


@both
def test_a_lower_rank_is_filled_with_zeros(rng: np.random.Generator, backend: str) -> None:
    layer = layer_of()
    weights, x = drawn(layer, rng), normal(rng, (4, 8))
    weights["lora_A.weight"][1, 2:] = 0
    weights["lora_B.weight"][1, :, 2:] = 0
    a, b = weights["lora_A.weight"][1, :2], weights["lora_B.weight"][1, :, :2]
    got = run(layer, x, batch_inputs([1], [0, 4], [2]), backend, weights)
    assert_close(got, x @ (weights["weight"] + b @ a).T, scale=4.0)


@both
def test_groups_that_do_not_fit_at_the_run(rng: np.random.Generator, backend: str) -> None:
    layer = layer_of(has_lora_bias=True)
    weights, x = drawn(layer, rng), normal(rng, (9, 8))
    for ids, offsets, said in (
        ([4, 1], [0, 3, 9], "4"),
        ([-2, 1], [0, 3, 9], "-2"),
        ([1, 2], [0, 9, 3], "3"),
        ([1, 2], [0, 3, 12], "12"),
        ([1, 2], [2, 3, 9], "2"),
        ([1], [0, 3, 9], "slice"),
    ):
        with pytest.raises(Exception, match=said):
            run(layer, x, batch_inputs(ids, offsets), backend, weights, symbolic=True)


def test_arguments_that_do_not_fit() -> None:
    def stage(layer: LinearLoRA, *types: Any) -> None:
        forward = product(layer)
        names = [TensorType(dtype, shape, CPU_REF) for dtype, shape in types]
        Graph("layer", lambda *v: forward(*[a.tensor for a in v]), input_types=names)

    x, ids, ranks = (DType.float32, [9, 8]), (DType.int32, [2]), (DType.uint32, [2])
    offsets = (DType.uint32, [3])
    stage(layer_of(), x, ids, ranks, offsets)
    for types, error, said in (
        ((x, (DType.float32, [2]), ranks, offsets), TypeError, "lora_ids.*expected integers"),
        ((x, ids, (DType.float32, [2]), offsets), TypeError, "lora_ranks.*expected integers"),
        ((x, ids, ranks, (DType.float32, [3])), TypeError, "input_row_offsets.*expected integers"),
        ((x, (DType.int32, [2, 1]), ranks, offsets), ValueError, r"expected \[groups\]"),
        ((x, (DType.int32, [1]), ranks, offsets), ValueError, "1 lora_ids for the 2 groups"),
        ((x, ids, ranks, (DType.uint32, [0])), ValueError, r"expected \[groups\]"),
        (((DType.float32, [9, 7]), ids, ranks, offsets), ValueError, "9, 7"),
        (
            ((DType.float32, [1, 9, 8]), ids, ranks, offsets),
            ValueError,
            "x is .*, expected rank 2",
        ),
    ):
        with pytest.raises(error, match=said):
            stage(layer_of(), *types)
    for options in ({"max_num_loras": 0}, {"max_lora_rank": 0}, {"max_num_loras": -1}):
        with pytest.raises(ValueError, match="adapters of rank"):
            layer_of(**options)
    layer = layer_of()
    with pytest.raises(ValueError, match="set_lora_batch_info comes before"):
        Graph("unset", lambda x: layer(x.tensor), input_types=[TensorType(*x, CPU_REF)])
    assert isinstance(layer, SupportsLoRA)


def test_names_of_the_weights() -> None:
    plain = layer_of(has_bias=True, has_lora_bias=True)
    assert set(plain.raw_state_dict()) == {
        "weight", "bias", "lora_A.weight", "lora_B.weight", "lora.bias",
    }  # fmt: skip
    named = layer_of(name="proj", has_lora_bias=True)
    assert {"proj.lora_A.weight", "proj.lora_B.weight", "proj.lora.bias"} < set(
        named.raw_state_dict()
    )


@both
def test_an_encoded_base(rng: np.random.Generator, backend: str) -> None:
    layer = layer_of(in_dim=32, quantization_encoding=QuantizationEncoding.Q8_0)
    weights = drawn(layer, rng)
    base = normal(rng, (6, 32))
    weights["weight"] = encode(base, "Q8_0")
    x, groups = normal(rng, (5, 32)), batch_inputs([1, -1], [0, 2, 5])
    got = run(layer, x, groups, backend, weights)
    adapters = added(x, weights, [1, -1], [0, 2, 5])
    assert_product(
        (got - adapters).astype(np.float32), x, decode(weights["weight"], "Q8_0"), scale=16.0
    )
    alone = run(layer, x, groups, backend, weights, call=False)
    assert_close(alone, adapters, scale=8.0)


@both
def test_a_float8_base(rng: np.random.Generator, backend: str) -> None:
    """Adapters are of bfloat16."""
    spec = Float8InputScaleSpec(
        Float8ScaleGranularity.COLWISE, Float8ScaleOrigin.DYNAMIC, DType.float32
    )
    weight_spec = Float8WeightScaleSpec(Float8ScaleGranularity.ROWWISE, DType.float32)
    config = Float8Config(spec, weight_spec, {0}, {0}, None)
    layer = layer_of(dtype=DType.float8_e4m3fn, float8_config=config)
    weights = {
        "weight": rng.standard_normal((6, 8)).astype(ml_dtypes.float8_e4m3fn),
        "weight_scale": rng.random((6, 1)).astype(np.float32) + 0.5,
        "lora_A.weight": normal(rng, (4, 3, 8), "bfloat16"),
        "lora_B.weight": normal(rng, (4, 6, 3), "bfloat16"),
    }
    x, groups = normal(rng, (5, 8), "bfloat16"), batch_inputs([1, -1], [0, 2, 5])
    got = run(layer, x, groups, backend, weights)
    base = f32(x) @ (f32(weights["weight"]) * weights["weight_scale"]).T
    want = base + added(f32(x), weights, [1, -1], [0, 2, 5])
    assert_close(got, want, "float8_e4m3fn")


@pytest.mark.parametrize("split", ["rows", "columns", "whole"])
def test_shards(rng: np.random.Generator, split: str) -> None:
    """Each device has its part of the adapters, and is told of the batch."""
    layer = layer_of(has_bias=True, has_lora_bias=True)
    weights, x = drawn(layer, rng), normal(rng, (5, 8))
    groups = batch_inputs([3, -1, 0], [0, 2, 3, 5])
    strategies = {
        "rows": ShardingStrategy.rowwise(2),
        "columns": ShardingStrategy.columnwise(2),
        "whole": ShardingStrategy.replicate(2),
    }
    layer.sharding_strategy = strategies[split]
    parts = layer.shard([DeviceRef.CPU(0), DeviceRef.CPU(0)])
    assert all(isinstance(part, LinearLoRA) for part in parts)

    def forward(x: Any, *groups: Any) -> Any:
        outputs = []
        for index, part in enumerate(parts):
            assert isinstance(part, LinearLoRA)
            part.set_lora_batch_info(*groups)
            rows = x[:, 4 * index : 4 * index + 4] if split == "columns" else x
            outputs.append(part(rows))
        if split == "columns":
            return outputs[0] + outputs[1]
        return ops.concat(outputs, axis=1) if split == "rows" else outputs[1]

    layer.load_state_dict(weights)
    types = [TensorType(DType.from_numpy(a.dtype), a.shape, CPU_REF) for a in (x, *groups)]
    graph = Graph("parts", lambda *v: forward(*[a.tensor for a in v]), input_types=types)
    (got,) = run_graph(graph, [x, *groups], layer.state_dict(), "engine")
    want = x @ weights["weight"].T + weights["bias"] + added(x, weights, [3, -1, 0], [0, 2, 3, 5])
    assert_close(got, want, scale=8.0)


HIDDEN, HEADS, KV_HEADS, DIM = 32, 4, 2, 8
LORA = functools.partial(LinearLoRA, max_num_loras=3, max_lora_rank=2, has_lora_bias=True)


def attention(cls: Any = AttentionWithRopeAndLoRA, devices: int = 1, **options: Any) -> Any:
    lora = {} if cls is AttentionWithRope else {"linear_cls": LORA}
    return cls(**{
        "rope": RotaryEmbedding(HIDDEN, HEADS, 1e4, 32), "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "hidden_size": HIDDEN,
        "kv_params": KVCacheParams(DType.float32, KV_HEADS, DIM, page_size=4, n_devices=devices), **lora, **options,
    })  # fmt: skip


def run_attention(
    call: Any, weights: Any, batch: PagedBatch, x: Array, groups: list[Array], backend: str
) -> Array:
    """``call(rows, offsets, layer_idx, cache, *groups)`` for layer 1 of a cache."""
    arrays = [x, batch.offsets, *groups, *batch.cache_arrays]
    at = 2 + len(groups)
    types = [
        (BufferType if i == at else TensorType)(DType.from_numpy(a.dtype), a.shape, CPU_REF)
        for i, a in enumerate(arrays)
    ]

    def forward(*values: Any) -> Any:
        args = [v.buffer if i == at else v.tensor for i, v in enumerate(values)]
        index = ops.constant(1, DType.uint32, CPU_REF)
        return call(args[0], args[1], index, PagedCacheValues.of(args[at:]), *args[2:at])

    graph = Graph("attention", forward, input_types=types)
    return run_graph(graph, arrays, weights, backend)[0]


def batch_of() -> PagedBatch:
    return PagedBatch(np.random.default_rng(3), [3, 0, 2], [1, 6, 2], KV_HEADS, DIM, 4)


def new_rows(batch: PagedBatch, side: int) -> Array:
    """Keys (0) or values (1) of the new tokens."""
    return np.stack([batch.slot(batch.blocks, side, 1, s, p) for _, s, p in batch.positions()])


@both
def test_keys_and_values_of_adapters_go_to_the_cache(
    rng: np.random.Generator, backend: str
) -> None:
    """Two sequences make a group."""
    layer, batch = attention(), batch_of()
    weights = drawn(layer, rng)
    layer.load_state_dict(weights)
    before = [new_rows(batch, side) for side in (0, 1)]
    x, ids, ends = normal(rng, (9, HIDDEN)), [2, 0], [0, 7, 9]

    def call(rows: Any, offsets: Any, index: Any, cache: Any, *groups: Any) -> Any:
        layer.set_lora_batch_info(*groups)
        return layer.fused_qkv_lora(rows, cache, offsets, index)

    queries = run_attention(call, layer.state_dict(), batch, x, batch_inputs(ids, ends), backend)
    assert_close(queries, added(x, weights, ids, ends, "q_proj."), scale=8.0)
    for side, name in enumerate("kv"):
        want = added(x, weights, ids, ends, f"{name}_proj.").reshape(9, KV_HEADS, DIM)
        assert_close(new_rows(batch, side), before[side] + want, scale=8.0)


def outputs_of(layer: Any, x: Array, groups: list[Array], backend: str) -> Array:
    def call(rows: Any, offsets: Any, index: Any, cache: Any, *groups: Any) -> Any:
        if groups:
            layer.set_lora_batch_info(*groups)
        return layer(index, rows, cache, layer.rope.freqs_cis, offsets)

    return run_attention(call, layer.state_dict(), batch_of(), x, groups, backend)


@both
@pytest.mark.parametrize(
    "options", [{}, {"scale": 0.2, "has_bias": True}, {"clip_qkv": 0.4}], ids=str
)
def test_attention_as_with_merged_weights(
    rng: np.random.Generator, backend: str, options: dict[str, Any]
) -> None:
    """Sequences with an adapter of their own, or none."""
    layer = attention(**options)
    assert [type(part) for part in layer.qkv_loras] == [LinearLoRA] * 3
    weights = {name: value * 0.3 for name, value in drawn(layer, rng).items()}
    layer.load_state_dict(weights)
    x, ids = normal(rng, (9, HIDDEN)), [1, -1, 2]
    got = outputs_of(layer, x, batch_inputs(ids, [0, 1, 7, 9]), backend)
    for adapter, rows in zip(ids, (slice(0, 1), slice(1, 7), slice(7, 9)), strict=True):
        merged, bias = merged_weights(weights, adapter, options.get("clip_qkv"))
        plain = attention(AttentionWithRope, **{**options, "has_bias": True, "clip_qkv": None})
        plain.load_state_dict(merged)
        want = outputs_of(plain, x, [], "interpreter") + bias
        assert_close(got[rows], want[rows], scale=16.0)


def merged_weights(
    weights: dict[str, Array], adapter: int, clip: float | None
) -> tuple[dict[str, Array], Array]:
    """The weights of `AttentionWithRope` with an adapter in them, and what its output projection adds."""
    merged: dict[str, Array] = {}
    for part in "qkvo":
        prefix = f"{part}_proj."
        weight = weights[prefix + "weight"]
        if clip is not None and part != "o":
            weight = weight.clip(-clip, clip)
        bias = weights.get(prefix + "bias", np.zeros(len(weight), np.float32))
        if adapter >= 0:
            a, b = (weights[f"{prefix}lora_{m}.weight"][adapter] for m in "AB")
            weight, bias = weight + b @ a, bias + weights[prefix + "lora.bias"][adapter]
        merged[prefix + "weight"], merged[prefix + "bias"] = weight, bias
    return merged, merged.pop("o_proj.bias")


def test_shards_of_attention(rng: np.random.Generator) -> None:
    """The results of the heads on two devices sum to the layer's result."""
    whole, layer = attention(), attention(devices=2)
    weights = {name: value * 0.3 for name, value in drawn(layer, rng).items()}
    for each in (whole, layer):
        each.load_state_dict(weights)
    x, groups = normal(rng, (9, HIDDEN)), batch_inputs([1, -1, 2], [0, 1, 7, 9])
    want = outputs_of(whole, x, groups, "interpreter")
    layer.sharding_strategy = ShardingStrategy.tensor_parallel(2)
    total: Any = 0.0
    for index, part in enumerate(layer.shard([CPU_REF, CPU_REF])):
        assert isinstance(part, AttentionWithRopeAndLoRA)

        def call(
            rows: Any, offsets: Any, idx: Any, cache: Any, *groups: Any, part: Any = part
        ) -> Any:
            part.set_lora_batch_info(*groups)
            return part(idx, rows, cache, part.rope.freqs_cis, offsets)

        batch = batch_of()
        batch.blocks = np.ascontiguousarray(batch.blocks[..., index : index + 1, :])
        total = total + run_attention(call, layer.state_dict(), batch, x, groups, "engine")
    assert_close(total, want, scale=16.0)


def test_layers_without_adapters_are_refused() -> None:
    with pytest.raises(ValueError, match="linear_cls makes Linear, expected LinearLoRA"):
        AttentionWithRopeAndLoRA(
            rope=RotaryEmbedding(HIDDEN, HEADS, 1e4, 32), num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS, hidden_size=HIDDEN,
            kv_params=KVCacheParams(DType.float32, KV_HEADS, DIM, page_size=4),
        )  # fmt: skip
    with pytest.raises(ValueError, match="do not go with stacked_qkv"):
        attention(stacked_qkv=True)
    with pytest.raises(TypeError, match="unexpected keyword"):
        attention(lora_rank=3)
    layer = attention()
    types = [TensorType(DType.float32, [2, HIDDEN], CPU_REF)]
    with pytest.raises(ValueError, match="set_lora_batch_info comes before"):
        Graph("unset", lambda x: layer.project_qkv(x.tensor)[0], input_types=types)
