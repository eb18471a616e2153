"""Mixtures of experts against those of transformers, and against NumPy."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, GptOssConfig, Lfm2MoeConfig, MixtralConfig, OlmoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

from max.dtype import DType
from max.dtype.blocks import decode, encode
from max.graph import Graph, ShardingStrategy, TensorType, TensorValue, ops
from max.graph.quantization import QuantizationEncoding
from max.nn import kernels
from max.nn.activation import GatedActivation
from max.nn.float8_config import (
    Float8Config,
    Float8InputScaleSpec,
    Float8ScaleGranularity,
    Float8ScaleOrigin,
    Float8WeightScaleSpec,
)
from max.nn.moe import (
    ExpertRouting,
    MoE,
    MoEFp8,
    MoEGate,
    RoutedMoEGate,
    SigmoidTopKRouter,
)
from tests.nn.harness import BACKENDS, CPU_REF, Array, evaluate, f32, normal, run_graph
from tests.quantized import rounded_to_8_bits
from tests.tolerance import assert_close

both = pytest.mark.parametrize("backend", BACKENDS)
TOKENS = (1, 37)
ROUTINGS = {
    "mixtral": ExpertRouting(normalized=True),
    "olmoe": ExpertRouting(),
    "gpt_oss": ExpertRouting("softmax_of_chosen"),
    "deepseek_v3": ExpertRouting(
        "sigmoid", True, 2.5, 4, 2, "two_greatest", has_correction=True, in_float32=True
    ),
}


def fill(block: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Random parameters and buffers."""
    generator = torch.Generator().manual_seed(seed)
    for value in (*block.parameters(), *block.buffers()):
        value.data = torch.randn(value.shape, generator=generator) * 0.3
    return block.eval()


def torch_block(family: str) -> tuple[Any, dict[str, Any]]:
    """A block of transformers with random weights, and the arguments of ours."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_experts_per_tok": 3}
    if family == "mixtral":
        config: Any = MixtralConfig(**sizes, intermediate_size=24, num_local_experts=8)
        return fill(MixtralSparseMoeBlock(config), 0), {}
    if family == "olmoe":
        config = OlmoeConfig(**sizes, intermediate_size=24, num_experts=8, norm_topk_prob=False)
        return fill(OlmoeSparseMoeBlock(config), 1), {}
    if family == "gpt_oss":
        config = GptOssConfig(**sizes, intermediate_size=24, num_local_experts=8)

        activation = GatedActivation("swigluoai", 1.702, 7.0)
        return fill(GptOssMLP(config), 2), {"activation": activation, "has_bias": True}
    config = DeepseekV3Config(
        **sizes, moe_intermediate_size=24, n_routed_experts=8, n_group=4, topk_group=2, norm_topk_prob=True,
        routed_scaling_factor=2.5, n_shared_experts=2,
    )  # fmt: skip
    shared = {"has_shared_experts": True, "shared_experts_dim": 48}
    return fill(DeepseekV3MoE(config), 3), shared


def weights_of(block: Any, family: str) -> dict[str, Array]:
    """Returns the block's weights under our names."""
    state = {name: value.numpy() for name, value in block.state_dict().items()}
    gate = "router" if family == "gpt_oss" else "gate"
    named = {"gate.gate_score.weight": state[f"{gate}.weight"]}
    gate_up, down = state["experts.gate_up_proj"], state["experts.down_proj"]
    if family == "gpt_oss":
        named["gate.gate_score.bias"] = state["router.bias"]
        gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
        gate_up = np.concatenate([gate_up[:, ::2], gate_up[:, 1::2]], 1)
        biases = state["experts.gate_up_proj_bias"]
        for i in range(8):
            named[f"experts.{i}.gate_proj.bias"] = biases[i, ::2].copy()
            named[f"experts.{i}.up_proj.bias"] = biases[i, 1::2].copy()
            named[f"experts.{i}.down_proj.bias"] = state["experts.down_proj_bias"][i]
    for i in range(8):
        named[f"experts.{i}.gate_proj.weight"] = np.ascontiguousarray(gate_up[i, :24])
        named[f"experts.{i}.up_proj.weight"] = np.ascontiguousarray(gate_up[i, 24:])
        named[f"experts.{i}.down_proj.weight"] = np.ascontiguousarray(down[i])
    if family == "deepseek_v3":
        named["gate.e_score_correction_bias"] = state["gate.e_score_correction_bias"]
        named |= {n: v for n, v in state.items() if n.startswith("shared_experts.")}
    return named


def layer_of(family: str, options: dict[str, Any], **more: Any) -> MoE:
    gate = functools.partial(RoutedMoEGate, routing=ROUTINGS[family], has_bias=family == "gpt_oss")
    return MoE(
        [CPU_REF], 32, 8, 3, 24, gate_cls=gate, **{"dtype": DType.float32, **options, **more}
    )


@both
@pytest.mark.parametrize("family", ROUTINGS)
def test_families(rng: np.random.Generator, backend: str, family: str) -> None:
    block, options = torch_block(family)
    layer, weights = layer_of(family, options), weights_of(block, family)
    for tokens in TOKENS:
        x = normal(rng, (tokens, 32))
        with torch.no_grad():
            want = block(torch.from_numpy(x)[None])
        want = (want[0] if isinstance(want, tuple) else want)[0].numpy()
        (got,) = evaluate(layer, [x], backend, weights, dims=[["tokens", 32]])
        assert_close(got, want, scale=4.0)


@both
@pytest.mark.parametrize(("normalized", "scale"), [(True, 2.5), (False, 1.0)])
def test_a_router_of_sigmoids(
    rng: np.random.Generator, backend: str, normalized: bool, scale: float
) -> None:
    router = SigmoidTopKRouter(
        [CPU_REF], 32, 7, 3, DType.float32, normalized, routed_scaling_factor=scale
    )
    weights = {
        "gate_score.weight": normal(rng, (7, 32)),
        "e_score_correction_bias": normal(rng, (7,)),
    }
    router.load_state_dict(weights)
    x = normal(rng, (5, 32))
    experts, shares = evaluate(router, [x], backend, weights)
    scores = 1 / (1 + np.exp(-(x @ weights["gate_score.weight"].T)))
    chosen = np.argsort(-(scores + weights["e_score_correction_bias"]), axis=1)[:, :3]
    want = np.take_along_axis(scores, chosen, 1)
    want = (want / want.sum(1, keepdims=True) if normalized else want) * scale
    assert (experts.dtype, shares.dtype) == (np.int32, np.float32)
    np.testing.assert_array_equal(experts, chosen)
    np.testing.assert_allclose(shares, want, rtol=1e-5)
    with pytest.raises(TypeError, match="correction_bias_dtype is bfloat16, expected float32"):
        SigmoidTopKRouter([CPU_REF], 32, 7, 3, DType.float32, correction_bias_dtype=DType.bfloat16)


def test_weights_of_tokens_first(rng: np.random.Generator) -> None:
    """The plain gate: the weights are the top-k scores."""
    layer = MoE([CPU_REF], 16, 4, 2, 8, dtype=DType.float32, apply_router_weight_first=True)
    weights = {n: normal(rng, [int(d) for d in w.shape]) for n, w in layer.raw_state_dict().items()}
    x = normal(rng, (9, 16))
    scores = x @ weights["gate.gate_score.weight"].T
    want = np.zeros_like(x)
    for i, row in enumerate(scores):
        for e in np.argsort(-row)[:2]:
            gate, up, down = (
                weights[f"experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down")
            )
            v = x[i] * row[e]
            hidden = gate @ v / (1 + np.exp(-(gate @ v))) * (up @ v)
            want[i] += down @ hidden
    (got,) = evaluate(layer, [x], "engine", weights)
    assert_close(got, want, scale=4.0)


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float16], ids=str)
def test_half_weights(rng: np.random.Generator, dtype: DType) -> None:
    """Float32 tokens over 16-bit experts; the gate stays in float32, so that routing is equal."""
    block, options = torch_block("olmoe")
    narrow = dtype.to_numpy()
    weights = weights_of(block, "olmoe")
    rounded = {n: v.astype(narrow) if "experts" in n else v for n, v in weights.items()}
    for i in range(8):
        parts = [rounded[f"experts.{i}.{n}_proj.weight"].astype(np.float32) for n in ("gate", "up")]
        block.experts.gate_up_proj.data[i] = torch.from_numpy(np.concatenate(parts))
        down = rounded[f"experts.{i}.down_proj.weight"].astype(np.float32)
        block.experts.down_proj.data[i] = torch.from_numpy(down)
    layer = layer_of("olmoe", options, dtype=dtype, gate_dtype=DType.float32)
    x = normal(rng, (19, 32))
    with torch.no_grad():
        want = block(torch.from_numpy(x)[None])[0].numpy()
    (got,) = evaluate(layer, [x], "engine", rounded)
    assert_close(got, want, narrow, scale=4.0)


@pytest.mark.parametrize("encoding", ["Q4_0", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("packed", [True, False])
def test_quantized_experts(rng: np.random.Generator, encoding: str, packed: bool) -> None:
    """Weights that are packed at load, and weights that are inputs of the graph."""
    w = normal(rng, (4, 40, 256))
    blocks = np.stack([encode(rows, encoding) for rows in w])
    decoded = np.stack([decode(rows, encoding) for rows in blocks])
    ids = np.array([2, 0, 2, 2, 1], np.int64)
    x = normal(rng, (5, 256))

    def product(rows: TensorValue, chosen: TensorValue, weight: TensorValue) -> TensorValue:
        order, starts, restored, experts, stats = kernels.moe_create_indices(chosen, 4)
        sorted_rows = ops.gather(rows, ops.cast(order, DType.int64), axis=0)
        y = kernels.grouped_matmul_ragged(
            sorted_rows, weight, starts, experts, stats,
            quantization_encoding=QuantizationEncoding[encoding],
        )  # fmt: skip
        return ops.gather(y, ops.cast(restored, DType.int64), axis=0)

    if packed:
        (got,) = evaluate(
            lambda rows, chosen: product(rows, chosen, ops.constant(blocks, DType.uint8, CPU_REF)),
            [x, ids],
            "engine",
        )
        rows = rounded_to_8_bits(x)
    else:
        (got,) = evaluate(product, [x, ids, blocks], "engine")
        rows = x
    assert_close(
        got, np.stack([decoded[e] @ row for e, row in zip(ids, rows, strict=True)]), scale=4.0
    )


def test_quantized_layer(rng: np.random.Generator) -> None:
    layer = MoE(
        [CPU_REF], 64, 4, 2, 32, dtype=DType.uint8, gate_dtype=DType.float32,
        quantization_encoding=QuantizationEncoding.Q8_0,
    )  # fmt: skip
    plain = MoE([CPU_REF], 64, 4, 2, 32, dtype=DType.float32)
    values = {n: normal(rng, [int(d) for d in w.shape]) for n, w in plain.raw_state_dict().items()}
    encoded = {n: encode(v, "Q8_0") if "experts" in n else v for n, v in values.items()}
    values = {n: decode(encoded[n], "Q8_0") if "experts" in n else v for n, v in values.items()}
    x = normal(rng, (7, 64))
    (want,) = evaluate(plain, [x], "engine", values)
    for backend in BACKENDS:
        (got,) = evaluate(layer, [x], backend, encoded)
        # rows of the operands of two products are rounded to 8 bits
        assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()


def float8_config(granularity: str, block: tuple[int, int] | None) -> Float8Config:
    kind = Float8ScaleGranularity(granularity)
    inputs = Float8InputScaleSpec(
        Float8ScaleGranularity.COLWISE, Float8ScaleOrigin.DYNAMIC, DType.float32
    )
    return Float8Config(inputs, Float8WeightScaleSpec(kind, DType.float32, block), {0}, {0})


@both
@pytest.mark.parametrize(
    ("granularity", "block"), [("block", (16, 32)), ("rowwise", None), ("tensor", None)]
)
def test_float8(
    rng: np.random.Generator, backend: str, granularity: str, block: tuple[int, int] | None
) -> None:
    """Scale blocks that do not divide the weights, separate for gate and up projection."""
    options: dict[str, Any] = {"gate_dtype": DType.float32}
    layer = MoEFp8(
        [CPU_REF], 48, 3, 2, 40, dtype=DType.float8_e4m3fn, float8_config=float8_config(granularity, block), **options
    )  # fmt: skip
    plain = MoE([CPU_REF], 48, 3, 2, 40, dtype=DType.float32, **options)
    weights, wide = {}, {}
    for name, weight in layer.raw_state_dict().items():
        shape = [int(d) for d in weight.shape]
        if name.endswith("scale"):
            weights[name] = rng.uniform(0.5, 2.0, shape).astype(np.float32)
        else:
            narrow = np.float32 if "gate_score" in name else ml_dtypes.float8_e4m3fn
            weights[name] = (rng.standard_normal(shape) * 0.5).astype(narrow)
    for name, value in weights.items():
        if not name.endswith("scale"):
            wide[name] = value.astype(np.float32)
            scale = weights.get(f"{name}_scale")
            if scale is not None:
                rows, columns = value.shape
                sizes = block or (1, columns)
                spread = scale if scale.ndim == 0 else (
                    scale.repeat(sizes[0], 0)[:rows].repeat(sizes[1], 1)[:, :columns])  # fmt: skip
                wide[name] *= spread
    x = normal(rng, (11, 48))
    (want,) = evaluate(plain, [x], "interpreter", wide)
    (got,) = evaluate(layer, [x], backend, weights)
    assert_close(got, want, scale=4.0)


@both
def test_grouped_float8_product(rng: np.random.Generator, backend: str) -> None:
    f8 = ml_dtypes.float8_e4m3fn
    x, w = normal(rng, (7, 64)).astype(f8), normal(rng, (3, 33, 64)).astype(f8)
    a_scales = rng.uniform(0.5, 2, (2, 7)).astype(np.float32)
    b_scales = rng.uniform(0.5, 2, (3, 3, 2)).astype(np.float32)
    starts = np.array([0, 4, 6, 7], np.uint32)
    experts = np.array([2, 0, -1], np.int32)
    stats = np.array([4, 2], np.uint32)
    block = Float8ScaleGranularity.BLOCK
    spec = (
        Float8InputScaleSpec(block, Float8ScaleOrigin.DYNAMIC, DType.float32, block_size=(1, 32)),
        Float8WeightScaleSpec(block, DType.float32, (16, 32)),
    )
    (got,) = evaluate(
        lambda *values: kernels.grouped_dynamic_scaled_fp8_matmul(*values, *spec, DType.float32),
        [x, w, a_scales, b_scales, starts, experts, stats],
        backend,
    )
    rows = f32(x) * a_scales.T.repeat(32, 1)
    weights = f32(w) * b_scales.repeat(16, 1)[:, :33].repeat(32, 2)
    want = np.zeros((7, 33), np.float32)
    want[:4], want[4:6] = rows[:4] @ weights[2].T, rows[4:6] @ weights[0].T
    assert_close(got, want, scale=4.0)


def test_shards(rng: np.random.Generator) -> None:
    """The results of shards sum to the layer's result."""
    block, options = torch_block("deepseek_v3")
    layer, weights = layer_of("deepseek_v3", options), weights_of(block, "deepseek_v3")
    layer.load_state_dict(weights)
    layer.sharding_strategy = ShardingStrategy.tensor_parallel(2)
    parts = layer.shard([CPU_REF, CPU_REF])
    x = normal(rng, (5, 32))
    graph = Graph(
        "shards",
        lambda value: tuple(part(value.tensor) for part in parts),
        input_types=[TensorType(DType.float32, [5, 32], CPU_REF)],
    )
    first, second = run_graph(graph, [x], layer.state_dict(), "engine")
    with torch.no_grad():
        want = block(torch.from_numpy(x)[None])[0].numpy()
    assert_close(first + second, want, scale=4.0)


def test_sums_near_zero() -> None:
    """LFM 2 adds a constant to the sum of weights, which matters where all weights are small."""
    config = Lfm2MoeConfig(
        hidden_size=16, num_experts=6, num_experts_per_tok=2, routed_scaling_factor=1.5
    )
    router = Lfm2MoeTopKRouter(config)
    rng = np.random.default_rng(4)
    weight = -(1 + 0.1 * normal(rng, (6, 16)))
    router.weight.data = torch.from_numpy(weight)
    x = rng.uniform(0.6, 1.1, (5, 16)).astype(np.float32)
    with torch.no_grad():
        expected = router(torch.from_numpy(x), torch.zeros(6))[1].numpy()
    assert expected.sum(-1).min() < 1.2, "the offset counts"
    routing = ExpertRouting("sigmoid", normalized=True, scale=1.5, sum_offset=1e-6)
    gate = RoutedMoEGate([CPU_REF], 16, 6, 2, DType.float32, routing)
    actual = evaluate(gate, [x], "interpreter", {"gate_score.weight": weight})[1]
    assert_close(actual, expected)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="9 of 8 experts for a token"):
        MoEGate([CPU_REF], 16, 8, 9, DType.float32)
    with pytest.raises(NotImplementedError, match="ep_size 2"):
        MoE([CPU_REF], 16, 8, 2, 8, ep_size=2)
    with pytest.raises(ValueError, match="float8_config is needed"):
        MoEFp8([CPU_REF], 16, 8, 2, 8)
    with pytest.raises(ValueError, match="1 of 3 groups of 8 experts"):
        RoutedMoEGate([CPU_REF], 16, 8, 2, DType.float32, ExpertRouting(groups=3))
    layer = MoE([CPU_REF], 16, 8, 2, 8)
    with pytest.raises(ValueError, match="there is no sharding strategy"):
        layer.shard([CPU_REF])
    types = [
        TensorType(DType.float32, ["n", 63], CPU_REF),
        TensorType(DType.float32, [8, 96, 64], CPU_REF),
        *(TensorType(DType.uint32, [size], CPU_REF) for size in (9, 8, 2)),
    ]
    with Graph("g", input_types=types) as graph:
        x, w, *rest = (value.tensor for value in graph.inputs)
        with pytest.raises(ValueError, match="x is .*63.*the last dimensions must be equal"):
            kernels.grouped_matmul_ragged(x, w, *rest)
        with pytest.raises(ValueError, match="weight is .* expected rank 3"):
            kernels.grouped_matmul_ragged(x, x, *rest)
        with pytest.raises(ValueError, match="moe.indices: ids is .* expected rank 1"):
            kernels.moe_create_indices(ops.cast(x, DType.int32), 8)
        with pytest.raises(TypeError, match="expected integers"):
            kernels.moe_create_indices(x[:, 0], 8)
