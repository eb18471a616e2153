"""Attention layers with quantized weights, adapters and latents, against plain layers and transformers."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from max.dtype import DType
from max.dtype.blocks import decode, encode
from max.graph import BufferType, Graph, ShardingStrategy, TensorType, ops
from max.graph.quantization import QuantizationConfig, QuantizationEncoding
from max.nn import (
    AttentionWithRope,
    AttentionWithRopeAndLoRA,
    AttentionWithRopeNoOpaque,
    GGUFQAttentionWithRope,
    GPTQAttentionWithRope,
    LatentAttentionWithRope,
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
from max.nn.kv_cache import KVCacheParams, PagedCacheValues, paged_cache_types
from tests.nn.harness import BACKENDS, CPU_REF, Array, f32, normal, run_graph
from tests.nn.reference import PagedBatch
from tests.quantized import gptq_weight
from tests.tolerance import assert_close

both = pytest.mark.parametrize("backend", BACKENDS)
HIDDEN, HEADS, KV_HEADS, DIM = 32, 4, 2, 8
ROPE = RotaryEmbedding(HIDDEN, HEADS, 1e4, 32)


def run_layer(
    layer: Any, batch: PagedBatch, x: Array, backend: str, weights: dict[str, Array], *more: Array
) -> list[Array]:  # fmt: skip
    """A layer over layer 1 of a cache; ``more`` goes to `set_lora_batch_info`."""
    layer.load_state_dict(weights)
    params = layer.kv_params

    def forward(*args: Any) -> Any:
        rows, offsets, *rest = args
        groups, cache = rest[: len(more)], PagedCacheValues.of(rest[len(more) :])
        if groups:
            layer.set_lora_batch_info(*groups)
        index = ops.constant(1, DType.uint32, CPU_REF)
        if isinstance(layer, AttentionWithRopeNoOpaque):
            return layer(index, rows, cache, offsets)
        return layer(index, rows, cache, layer.rope.freqs_cis, offsets)

    inputs = [x, batch.offsets, *more, *batch.cache_arrays]
    names = paged_cache_types(params, batch.layers, CPU_REF)
    dims = [["rows", x.shape[1]], ["offsets"], *([None] * len(more)), *(t.shape for t in names)]
    types: list[Any] = []
    for array, dim, i in zip(inputs, dims, range(len(inputs)), strict=True):
        kind = BufferType if i == 2 + len(more) else TensorType
        types.append(
            kind(DType.from_numpy(array.dtype), array.shape if dim is None else dim, CPU_REF)
        )
    graph = Graph(
        "layer",
        lambda *v: forward(
            *(a.buffer if i == 2 + len(more) else a.tensor for i, a in enumerate(v))
        ),
        input_types=types,
    )
    return run_graph(graph, inputs, layer.state_dict(), backend)


def params(**options: Any) -> KVCacheParams:
    return KVCacheParams(DType.float32, KV_HEADS, DIM, page_size=4, **options)


def arguments(**more: Any) -> dict[str, Any]:
    return {
        "rope": ROPE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_size": HIDDEN,
        "kv_params": params(),
        **more,
    }


def batch_of(seed: int = 0) -> PagedBatch:
    return PagedBatch(np.random.default_rng(seed), [3, 0], [1, 6], KV_HEADS, DIM, 4)


def plain(x: Array, weights: dict[str, Array], **options: Any) -> Array:
    """Returns the plain layer's result over the same cache."""
    layer = AttentionWithRope(**arguments(**options))
    return run_layer(layer, batch_of(), x, "interpreter", weights)[0]


def weights_of(layer: Any, rng: np.random.Generator) -> dict[str, Array]:
    return {
        name: normal(rng, [int(d) for d in weight.shape]) * 0.3
        for name, weight in layer.raw_state_dict().items()
    }


@both
def test_the_rope_of_the_layer(rng: np.random.Generator, backend: str) -> None:
    weights = weights_of(AttentionWithRope(**arguments()), rng)
    x = normal(rng, (7, HIDDEN))
    layer = AttentionWithRopeNoOpaque(**arguments())
    (got,) = run_layer(layer, batch_of(), x, backend, weights)
    assert_close(got, plain(x, weights), scale=4.0)


@both
@pytest.mark.parametrize("has_bias", [False, True])
def test_gguf_weights(rng: np.random.Generator, backend: str, has_bias: bool) -> None:
    layer = GGUFQAttentionWithRope(
        **arguments(dtype=DType.uint8, quantization_encoding=QuantizationEncoding.Q8_0, has_bias=has_bias)
    )  # fmt: skip
    weights = weights_of(AttentionWithRope(**arguments(has_bias=has_bias)), rng)
    encoded = {n: v if v.ndim == 1 else encode(v, "Q8_0") for n, v in weights.items()}
    decoded = {n: v if v.ndim == 1 else decode(v, "Q8_0") for n, v in encoded.items()}
    x = normal(rng, (7, HIDDEN))
    (got,) = run_layer(layer, batch_of(), x, backend, encoded)
    want = plain(x, decoded, has_bias=has_bias)
    # compiled products round their inputs to 8 bits
    assert (
        np.abs(got - want).max() < (1e-4 if backend == "interpreter" else 0.03) * np.abs(want).max()
    )
    for options, error in (
        ({"dtype": DType.float32}, "expected uint8"),
        ({"quantization_encoding": QuantizationEncoding.GPTQ}, "use GPTQAttentionWithRope"),
        ({"clip_qkv": 1.0}, "not clamped"),
    ):
        given = {
            "dtype": DType.uint8,
            "quantization_encoding": QuantizationEncoding.Q8_0,
            **options,
        }
        with pytest.raises(ValueError, match=error):
            GGUFQAttentionWithRope(**arguments(**given))


@both
def test_gptq_weights(rng: np.random.Generator, backend: str) -> None:
    config = QuantizationConfig("gptq", 4, 16, False, True)
    layer = GPTQAttentionWithRope(config, **arguments())
    weights, dense = {}, {}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        outputs = int(getattr(layer, name).scales.shape[1])
        (qweight, qzeros, scales), values = gptq_weight(rng, HIDDEN, outputs, 4, 16, False)
        for part, value in (("qweight", qweight), ("qzeros", qzeros), ("scales", f32(scales))):
            weights[f"{name}.{part}"] = value
        dense[f"{name}.weight"] = np.ascontiguousarray(f32(values))
    x = normal(rng, (7, HIDDEN))
    (got,) = run_layer(layer, batch_of(), x, backend, weights)
    assert_close(got, plain(x, dense), scale=16.0)


@pytest.mark.parametrize("static", [False, True])
def test_float8_weights(rng: np.random.Generator, static: bool) -> None:
    kind = Float8ScaleGranularity
    config = Float8Config(
        Float8InputScaleSpec(
            kind.TENSOR if static else kind.COLWISE,
            Float8ScaleOrigin.STATIC if static else Float8ScaleOrigin.DYNAMIC,
            DType.float32,
        ),
        Float8WeightScaleSpec(kind.TENSOR if static else kind.ROWWISE, DType.float32),
        {0}, {0},
    )  # fmt: skip
    layer = AttentionWithRope(**arguments(dtype=DType.float8_e4m3fn, float8_config=config))
    weights, wide = {}, {}
    for name, weight in layer.raw_state_dict().items():
        shape = [int(d) for d in weight.shape]
        if name.endswith("input_scale"):
            weights[name] = np.array(0.02, np.float32)
        elif name.endswith("weight_scale"):
            weights[name] = rng.uniform(0.1, 0.3, shape).astype(np.float32)
        else:
            weights[name] = normal(rng, shape).astype(ml_dtypes.float8_e4m3fn)
    for name, value in weights.items():
        if name.endswith(".weight"):
            wide[name] = f32(value) * weights[f"{name}_scale"]
    x = normal(rng, (7, HIDDEN))
    (got,) = run_layer(layer, batch_of(), x, "engine", weights)
    want = plain(x, wide)
    # inputs have 4 bits of precision
    assert np.linalg.norm(got - want) < 0.1 * np.linalg.norm(want)

    def scales(_: Any) -> Any:
        given = layer.qkv_input_scale
        return layer.qkv_weight_scale, ops.constant(
            0.0, DType.float32, CPU_REF
        ) if given is None else given

    graph = Graph("scales", scales, input_types=[TensorType(DType.float32, [1], CPU_REF)])
    weight, given = run_graph(graph, [np.zeros(1, np.float32)], layer.state_dict(), "interpreter")
    each = [weights[f"{n}_proj.weight_scale"] for n in "qkv"]
    np.testing.assert_array_equal(weight, max(each) if static else np.concatenate(each))
    assert given == np.float32(0.02 if static else 0)
    with pytest.raises(ValueError, match="float8_config and stacked_qkv"):
        AttentionWithRope(
            **arguments(dtype=DType.float8_e4m3fn, float8_config=config, stacked_qkv=True)
        )


@both
def test_adapters_as_merged_weights(rng: np.random.Generator, backend: str) -> None:
    """Each sequence has a different adapter; the second has none."""
    linear = functools.partial(LinearLoRA, max_num_loras=3, max_lora_rank=2, has_lora_bias=True)
    layer = AttentionWithRopeAndLoRA(**arguments(linear_cls=linear))
    assert isinstance(layer, SupportsLoRA) is hasattr(layer, "apply_lora")
    assert isinstance(layer.q_proj, SupportsLoRA) and len(layer.qkv_loras) == 3
    weights = weights_of(layer, rng)
    x = normal(rng, (7, HIDDEN))
    ids, ranks = np.array([2, -1], np.int32), np.array([2, 0], np.uint32)
    groups = np.array([0, 1, 7], np.uint32)
    (got,) = run_layer(layer, batch_of(), x, backend, weights, ids, ranks, groups)
    base = {n: v for n, v in weights.items() if "lora" not in n}
    merged = {}
    for name, value in base.items():
        a, b = (weights[name.replace("weight", f"lora_{m}.weight")][2] for m in "AB")
        merged[name] = value + b @ a
        merged[name.replace("weight", "bias")] = weights[name.replace("weight", "lora.bias")][2]
    plain_layer = AttentionWithRope(**arguments(has_bias=True))
    bias = merged.pop("o_proj.bias")
    with_adapter = run_layer(plain_layer, batch_of(), x, "interpreter", merged)[0] + bias
    assert_close(got[:1], with_adapter[:1], scale=16.0)
    assert_close(got[1:], plain(x, base)[1:], scale=16.0)
    with pytest.raises(ValueError, match="expected LinearLoRA"):
        AttentionWithRopeAndLoRA(**arguments())
    with pytest.raises(ValueError, match="set_lora_batch_info"):
        LinearLoRA(4, 4, 1, 1, DType.float32, CPU_REF).groups()


@both
@pytest.mark.parametrize(("q_rank", "mode"), [(None, "decode"), (12, "prefill"), (12, None)])
def test_latent_attention(
    rng: np.random.Generator, backend: str, q_rank: int | None, mode: str | None
) -> None:
    """A prompt, and a token after it, of two sequences: with keys absorbed, expanded, and as it pays."""
    config = DeepseekV3Config(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=q_rank, kv_lora_rank=16,
        qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, rope_interleave=True, max_position_embeddings=64,
        attn_implementation="eager",
    )  # fmt: skip
    reference = DeepseekV3Attention(config, 0).eval()
    generator = torch.Generator().manual_seed(1)
    for value in reference.parameters():
        value.data = torch.randn(value.shape, generator=generator) * 0.4
    weights = {name: value.numpy() for name, value in reference.state_dict().items()}
    rotary = DeepseekV3RotaryEmbedding(config)
    rope = RotaryEmbedding(HIDDEN, HEADS, 1e4, 64, head_dim=4)
    cache = KVCacheParams(DType.float32, 1, 20, page_size=4, is_mla=True)
    layer = LatentAttentionWithRope(
        rope=rope, num_attention_heads=HEADS, num_key_value_heads=HEADS, hidden_size=HIDDEN, kv_params=cache,
        dtype=DType.float32, q_lora_rank=q_rank, kv_lora_rank=16, qk_nope_head_dim=6, qk_rope_head_dim=4,
        v_head_dim=5, graph_mode=mode,
    )  # fmt: skip
    assert set(layer.raw_state_dict()) == set(weights)
    hidden = [normal(rng, (6, HIDDEN)), normal(rng, (4, HIDDEN))]
    wants = []
    for rows in hidden:
        x = torch.from_numpy(rows)[None]
        mask = torch.full((len(rows), len(rows)), -torch.inf).triu(1)[None, None]
        with torch.no_grad():
            angles = rotary(x, torch.arange(len(rows))[None])
            wants.append(reference(x, angles, mask)[0][0].numpy())
    batch = PagedBatch(rng, [0, 0], [5, 3], 1, 20, 4)
    batch.blocks = np.ascontiguousarray(batch.blocks[:, :1])
    x = np.concatenate([hidden[0][:5], hidden[1][:3]])
    (prompt,) = run_layer(layer, batch, x, backend, weights)
    assert_close(prompt, np.concatenate([wants[0][:5], wants[1][:3]]), scale=16.0)
    batch.cached, batch.new = [5, 3], [1, 1]
    (token,) = run_layer(layer, batch, np.stack([hidden[0][5], hidden[1][3]]), backend, weights)
    assert_close(token, np.stack([wants[0][5], wants[1][3]]), scale=16.0)


def test_shards_of_latent_attention(rng: np.random.Generator) -> None:
    """The results of the heads on two devices sum to the layer's result."""
    cache = KVCacheParams(DType.float32, 1, 20, page_size=4, is_mla=True)
    layer = LatentAttentionWithRope(
        rope=RotaryEmbedding(HIDDEN, HEADS, 1e4, 64, head_dim=4), num_attention_heads=HEADS,
        num_key_value_heads=HEADS, hidden_size=HIDDEN, kv_params=cache, dtype=DType.float32, q_lora_rank=12,
        kv_lora_rank=16, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
    )  # fmt: skip
    weights = weights_of(layer, rng)
    layer.load_state_dict(weights)
    batch = PagedBatch(rng, [0], [5], 1, 20, 4)
    batch.blocks = np.ascontiguousarray(batch.blocks[:, :1])
    x = normal(rng, (5, HIDDEN))
    (want,) = run_layer(layer, batch, x, "interpreter", weights)
    layer.sharding_strategy = ShardingStrategy.tensor_parallel(2)
    parts = layer.shard([CPU_REF, CPU_REF])

    class Both:
        kv_params, rope = cache, layer.rope

        def load_state_dict(self, _: Any) -> None:
            pass

        def state_dict(self) -> Any:
            return layer.state_dict()

        def __call__(self, *args: Any) -> Any:
            return parts[0](*args) + parts[1](*args)

    (got,) = run_layer(Both(), batch, x, "interpreter", weights)
    assert_close(got, want, scale=16.0)
    with pytest.raises(ValueError, match="graph_mode is 'both'"):
        LatentAttentionWithRope(
            rope=layer.rope, num_attention_heads=4, num_key_value_heads=4, hidden_size=32, kv_params=cache,
            dtype=DType.float32, graph_mode="both",
        )  # fmt: skip
