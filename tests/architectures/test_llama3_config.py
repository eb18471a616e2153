"""Llama's config.json and checkpoints: supported contents, and errors."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from max.driver import Tensor
from max.dtype import DType
from max.graph import DeviceRef
from max.graph.weights import WeightData
from max.nn.kv_cache import KVCacheParams
from max.nn.rotary_embedding import (
    LinearRotaryEmbedding,
    Llama3RotaryEmbedding,
    RotaryEmbedding,
    YarnRotaryEmbedding,
)
from max.nn.transformer import ReturnLogits
from max.pipelines.architectures.llama3.llama3 import Llama3, build_graph, weights_registry
from max.pipelines.architectures.llama3.model_config import Llama3Config
from max.pipelines.architectures.llama3.weight_adapters import convert_safetensor_state_dict
from max.pipelines.models.blocks.feed_forward import MLPForm

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def config(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 50,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    }
    return SimpleNamespace(**{k: v for k, v in {**values, **changes}.items() if v is not None})


def rope_of(**changes: Any) -> RotaryEmbedding:
    made = Llama3Config.from_huggingface(config(**changes))
    (rope, *_) = made.ropes
    return rope.layer(
        dim=made.hidden_size,
        n_heads=made.attention.num_attention_heads,
        head_dim=made.attention.head_dim,
        max_seq_len=8,
        interleaved=False,
    )


def test_defaults() -> None:
    made = Llama3Config.from_huggingface(config())
    assert (made.attention.num_key_value_heads, made.attention.head_dim, made.max_seq_len) == (
        4,
        8,
        64,
    )
    mlp = made.first_form(MLPForm)
    assert mlp is not None and mlp.activation == "silu" and not mlp.bias
    assert not made.tie_word_embeddings and not made.attention.bias
    assert made.ropes[0].theta == 10000.0
    assert Llama3Config.from_huggingface(config(), 16).max_seq_len == 16


@pytest.mark.parametrize(
    ("kind", "parameters", "cls"),
    [
        ("default", {}, RotaryEmbedding),
        ("linear", {"factor": 2.0}, LinearRotaryEmbedding),
        ("llama3", LLAMA3, Llama3RotaryEmbedding),
        ("yarn", {"factor": 4.0}, YarnRotaryEmbedding),
    ],
)
def test_new_and_old_forms_of_rope(kind: str, parameters: dict[str, Any], cls: type) -> None:
    new = rope_of(rope_parameters={"rope_type": kind, "rope_theta": 500.0, **parameters})
    old = rope_of(rope_theta=500.0, rope_scaling={"rope_type": kind, **parameters})
    oldest = rope_of(rope_theta=500.0, rope_scaling={"type": kind, **parameters})
    for rope in (new, old, oldest):
        assert type(rope) is cls and rope.theta == 500.0 and not rope.interleaved
        np.testing.assert_array_equal(rope.table(), new.table())
    plain = RotaryEmbedding(32, 4, 500.0, 8).table()
    assert np.array_equal(new.table(), plain) == (kind == "default")


def test_rope_scaling_may_be_null() -> None:
    assert type(rope_of(rope_theta=500.0, rope_scaling=None)) is RotaryEmbedding


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": [8]}, "hidden_size is \\[8\\]; expected an integer"),
        ({"hidden_act": "prelu"}, "hidden_act is 'prelu'"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads is 3; expected a divisor of num_attention_heads, which is 4",
        ),
        (
            {"rope_parameters": {"rope_type": "spiral"}},
            "rope_parameters.rope_type is 'spiral'; expected one of",
        ),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "lacks rope_parameters.factor"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "alpha": -1.0}},
            "rope_parameters.alpha is -1.0; expected a number over 0",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks rope_parameters.factor"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0}},
            "attention_factor is 0; expected a number over 0",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5",
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected an integer from 1 to 1000"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'; expected an integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; expected"),
        ({"hidden_size": 3}, "num_attention_heads is 4; expected at most hidden_size, which is 3"),
        ({"hidden_size": -32}, "hidden_size is -32"),
        ({"hidden_size": 12}, "heads of an even size, as halves are rotated; they have 3"),
        ({"head_dim": 7}, "head_dim is 7; expected heads of an even size"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06; expected a number at least 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings is an integer of 401"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; expected true or"),
        ({"rope_scaling": 3}, "rope_scaling is 3; expected an object"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta is 0; expected"),
        ({"quantization_config": {"quant_method": "eetq"}}, "quant_method is 'eetq'; expected one"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 5}},
            "bits is 5; expected 2, 3, 4",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Llama3Config.from_huggingface(config(**changes))


def parts(dtype: DType = DType.float32, **changes: Any) -> tuple[Llama3Config, KVCacheParams]:
    made = Llama3Config.from_huggingface(config(**changes))
    return made, made.cache_params(dtype, 16)


def checkpoint(made: Llama3Config, params: KVCacheParams, dtype: Any) -> dict[str, WeightData]:
    """Weights by Hugging Face's names."""
    names: dict[str, WeightData] = {}
    for name, weight in Llama3(made, params, DType.float32).raw_state_dict().items():
        full = name if name.startswith("lm_head") else f"model.{name}"
        names[full] = WeightData.from_numpy(np.ones([int(d) for d in weight.shape], dtype), full)
    return names


def test_names_of_checkpoints() -> None:
    made, params = parts()
    found = checkpoint(made, params, np.float32)
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    found[buffer] = WeightData.from_numpy(np.ones(4, np.float32), buffer)
    converted = convert_safetensor_state_dict(found)
    assert "layers.1.self_attn.q_proj.weight" in converted
    assert "lm_head.weight" in converted and "embed_tokens.weight" in converted
    assert set(converted) == set(Llama3(made, params, DType.float32).raw_state_dict())


def test_weights_are_converted_once_and_shared_where_they_fit() -> None:
    made, params = parts()
    bf16 = checkpoint(made, params, ml_dtypes.bfloat16)
    same = weights_registry(made, params, DType.bfloat16, convert_safetensor_state_dict(bf16))
    name = "layers.0.mlp.up_proj.weight"
    assert same[name] is bf16[f"model.{name}"].data
    wide = weights_registry(made, params, DType.float32, convert_safetensor_state_dict(bf16))
    assert {Tensor.from_dlpack(v).dtype for v in wide.values()} == {DType.float32}


def test_a_tied_output_layer_needs_no_weight() -> None:
    made, params = parts(tie_word_embeddings=True)
    found = checkpoint(made, params, np.float32)
    assert "lm_head.weight" not in found
    weights_registry(made, params, DType.float32, convert_safetensor_state_dict(found))
    # some checkpoints have the embedding twice
    found["lm_head.weight"] = found["model.embed_tokens.weight"]
    registry = weights_registry(made, params, DType.float32, convert_safetensor_state_dict(found))
    assert "lm_head.weight" not in registry


def test_mistakes_in_checkpoints_are_named() -> None:
    made, params = parts()
    found = checkpoint(made, params, np.float32)
    del found["lm_head.weight"]
    found["model.norm.weight"] = WeightData.from_numpy(np.ones(31, np.float32), "")
    found["model.extra"] = WeightData.from_numpy(np.ones(3, np.float32), "")
    with pytest.raises(ValueError) as error:
        weights_registry(made, params, DType.float32, convert_safetensor_state_dict(found))
    text = str(error.value)
    for part in ("norm.weight has shape [31], the model takes [32]", "missing: lm_head", "extra"):
        assert part in text


def test_the_graph_has_the_documented_inputs_and_outputs() -> None:
    made, params = parts()
    graph = build_graph(made, params, DType.float32, ReturnLogits.ALL, with_sampling=True)
    inputs = [str(value.type) for value in graph.inputs]
    assert len(inputs) == 12
    assert "int64, shape=[Dim('total_seq_len')]" in inputs[0].replace("DType.", "")
    assert "BufferType" in inputs[3]
    outputs = [(t.dtype, list(map(str, t.shape))) for t in graph.output_types]  # type: ignore[attr-defined]
    assert outputs == [
        (DType.int64, ["batch"]),
        (DType.float32, ["batch", "50"]),
        (DType.float32, ["total_seq_len", "50"]),
        (DType.uint32, ["batch + 1"]),
    ]


def test_the_cache_must_fit_the_model() -> None:
    made, _ = parts()
    params = KVCacheParams(DType.float32, 2, 8, page_size=16)
    with pytest.raises(
        ValueError, match="a cache of 2 heads of 8, keys and values; the model has 4 of 8"
    ):
        build_graph(made, params, DType.float32)


@pytest.mark.parametrize("devices", [1, 2])
def test_steps_that_verify_drafts_read_the_output_layer_once(devices: int) -> None:
    made, params = parts()
    products = {
        kind: str(
            build_graph(
                made,
                replace(params, n_devices=devices),
                DType.float32,
                kind,
                devices=[DeviceRef.CPU(i) for i in range(devices)],
            )
        ).count("mo.matmul")
        for kind in (ReturnLogits.LAST_TOKEN, ReturnLogits.VARIABLE, ReturnLogits.ALL)
    }
    last, variable, every = products.values()
    assert last == variable < every


def test_text_of_a_model() -> None:
    made, params = parts()
    text = repr(Llama3(made, params, DType.bfloat16))
    assert "(0-1): 2 x DecoderBlock(" in text
    assert "weight: bfloat16[50, 32]" in text
