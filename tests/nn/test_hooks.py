"""Hooks that print, and layers that older programs use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from max.dtype import DType
from max.graph import Graph, TensorType, ops
from max.graph.quantization import QuantizationConfig, QuantizationEncoding
from max.graph.weights import WeightData
from max.nn import Linear, Sequential
from max.nn.float8_config import Float8ScaleGranularity, parse_float8_config
from max.nn.hooks import PrintHook
from max.nn.linear import GPTQLinearV1, LinearV1
from max.nn.rotary_embedding import DynamicRotaryEmbedding
from tests.nn.harness import BACKENDS, CPU_REF, Array, evaluate, normal, session
from tests.tolerance import assert_close


@pytest.fixture
def hook() -> Any:
    made = PrintHook("folder")
    yield made
    made.remove()


def test_values_of_layers_are_printed(hook: PrintHook, capfd: pytest.CaptureFixture[str]) -> None:
    model = Sequential([Linear(3, 2, DType.float32, CPU_REF), Linear(2, 2, DType.float32, CPU_REF)])
    weights = model.state_dict()
    hook.name_layers(model)
    assert hook.export_path == "folder"
    graph = Graph(
        "g",
        lambda x: model(x.tensor),
        input_types=[TensorType(DType.float32, [1, 3], CPU_REF)],
    )
    hook.remove()
    session().load(graph, weights_registry=weights).execute(np.full((1, 3), 7.0, np.float32))
    printed = capfd.readouterr().out
    names = (
        "model.input_0",
        "model.0.input_0",
        "model.0.output_0",
        "model.1.output_0",
    )
    for name in names:
        assert name in printed
    assert "7" in printed
    again = Graph(
        "h", lambda x: model(x.tensor), input_types=[TensorType(DType.float32, [1, 3], CPU_REF)]
    )
    session().load(again, weights_registry=weights).execute(np.zeros((1, 3), np.float32))
    assert "model" not in capfd.readouterr().out


def test_layers_without_names(hook: PrintHook, capfd: pytest.CaptureFixture[str]) -> None:
    weight = np.eye(3, dtype=np.float32)
    evaluate(lambda x: LinearV1(ops.constant(weight))(x), [np.ones((1, 3), np.float32)], "engine")
    printed = capfd.readouterr().out
    assert "LinearV1_0.input_0" in printed and "LinearV1_0.output_0" in printed
    assert not hook.print_value("text", "no tensor")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("last", [5, 15, 16, 40])
def test_dynamic_rotary_embedding(backend: str, last: int) -> None:
    """Rotation against transformers, up to the original length and past it."""
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 1.0, "rope_theta": 1e4},
    )  # fmt: skip
    want, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=last + 1)
    rope = DynamicRotaryEmbedding(64, 4, 1e4, 16)

    def table(positions: Any) -> Any:
        rope.maybe_update_freqs(positions)
        return rope.inv_freq, rope.freqs_cis_base(), rope.freqs_cis

    positions = np.array([[0, last], [last - 1, 3]], np.int64)
    freqs, base, flat = evaluate(table, [positions], backend)
    assert_close(freqs, want.numpy(), scale=8.0)
    angles = np.arange(32)[:, None] * want.numpy().astype(np.float64)
    assert np.abs(base - np.stack([np.cos(angles), np.sin(angles)], -1)).max() < 2e-4
    np.testing.assert_array_equal(flat, base.reshape(32, 16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gptq_weight_in_one_tensor(rng: np.random.Generator, backend: str) -> None:
    integers = rng.integers(0, 16, (6, 32))
    scales = rng.uniform(0.01, 1, (6, 1)).astype(np.float16)
    packed = (integers[:, ::2] | integers[:, 1::2] << 4).astype(np.uint8)
    weight = np.concatenate([packed, scales.view(np.uint8).reshape(6, 2)], 1)
    bias, order, x = normal(rng, (6,)), rng.permutation(32), normal(rng, (3, 32))
    config = QuantizationConfig("gptq", 4, -1)
    (got,) = evaluate(
        lambda v, w, b, o: GPTQLinearV1(w, b, QuantizationEncoding.GPTQ, config, o)(v),
        [x, weight, bias, order], backend,
    )  # fmt: skip
    want = x[:, order] @ ((integers - 8) * scales.astype(np.float32)).T + bias
    assert_close(got, want, scale=8.0)
    with pytest.raises(ValueError, match="quantization_config is needed"):
        GPTQLinearV1(weight)


def checkpoint(**quantization: Any) -> tuple[Any, dict[str, WeightData]]:
    arrays: dict[str, Array] = {
        "model.embed_tokens.weight": np.zeros((2, 2), np.float32),
        "model.layers.0.mlp.up_proj.weight_scale": np.zeros(1, np.float16),
        "model.layers.0.self_attn.q_proj.bias": np.zeros(2, np.float16),
    }
    weights = {name: WeightData.from_numpy(a, name) for name, a in arrays.items()}
    return SimpleNamespace(num_hidden_layers=3, quantization_config=quantization), weights


def test_float8_configs() -> None:
    group = {
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    }
    ignore = ["lm_head", "re:model.layers.1.mlp.*", "model.layers.2.self_attn"]
    given = checkpoint(
        quant_method="compressed-tensors", config_groups={"group_0": group}, ignore=ignore
    )
    config = parse_float8_config(*given, DType.float8_e4m3fn)
    assert config is not None
    assert config.weight_scale.is_rowwise and config.input_scale.is_colwise and config.is_dynamic
    assert config.weight_scale.dtype is DType.float16 and config.bias_dtype is DType.float16
    assert config.embedding_output_dtype is DType.float32
    assert (config.mlp_in_float8, config.attn_qkv_in_float8) == ({0, 2}, {0, 1})
    assert parse_float8_config(*given, DType.bfloat16) is None

    given = checkpoint(quant_method="fp8", weight_block_size=[64, 128])
    config = parse_float8_config(*given, DType.float8_e4m3fn)
    assert config is not None and config.weight_scale.block_size == (64, 128)
    assert config.input_scale.block_size == (1, 128) and config.mlp_in_float8 == {0, 1, 2}

    given = checkpoint(
        quant_method="fbgemm_fp8", activation_scale_ub=1200.0, modules_to_not_convert=["layers.0"]
    )
    config = parse_float8_config(*given, DType.float8_e4m3fn)
    assert config is not None and config.input_scale.activation_scale_ub == 1200.0
    assert config.weight_scale.granularity is Float8ScaleGranularity.ROWWISE
    assert config.mlp_in_float8 == {1, 2}


@pytest.mark.parametrize(
    ("quantization", "error"),
    [
        ({"quant_method": "awq"}, "quant_method is 'awq'"),
        ({"quant_method": "compressed-tensors"}, "0 config_groups"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}},
            "weights of 4 bits",
        ),
    ],
)  # fmt: skip
def test_float8_configs_without_kernels(quantization: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse_float8_config(*checkpoint(**quantization), DType.float8_e4m3fn)
