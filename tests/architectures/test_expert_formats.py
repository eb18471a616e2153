"""Experts in quantized checkpoints, against transformers' models with the decoded weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from max.driver import Tensor
from max.dtype.blocks import decode
from max.engine import InferenceSession
from max.graph.quantization import QuantizationEncoding
from max.graph.weights import GGUFFile, GGUFWeights, WeightData
from max.nn.transformer import ReturnLogits
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.checkpoints.quantize import Quantizer, encoding_for
from max.pipelines.checkpoints.quantized_formats import convert_quantized
from max.pipelines.gguf.reader import config_of
from max.pipelines.models.decoder.model import DecoderModel
from tests.architectures import gguf_files
from tests.architectures.families import (
    CASES,
    architecture,
    config_file,
    random_model,
    transformers_model,
)
from tests.architectures.llama_harness import (
    Server,
    reference_logits,
    relative_error,
    weights_of,
)


@pytest.mark.parametrize(("backend", "tolerance"), [("interpreter", 2e-5), ("engine", 0.03)])
def test_mxfp4_checkpoint(rng: np.random.Generator, backend: str, tolerance: float) -> None:
    """GPT-OSS as it is published: experts in 4-bit floats; the engine's products round inputs to 8 bits."""
    model = copy.deepcopy(transformers_model("gpt_oss_wide"))
    weights = weights_of(model)
    for name, parameter in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        count, inputs, outputs = parameter.shape
        blocks = rng.integers(0, 256, (count, outputs, inputs // 32, 16)).astype(np.uint8)
        # larger scales would let the rounding of inputs change which experts are chosen
        scales = rng.integers(120, 124, blocks.shape[:-1]).astype(np.uint8)
        decoded = convert_moe_packed_tensors(
            torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
        )
        parameter.data.copy_(decoded)
        del weights[name]
        for part, array in (("blocks", blocks), ("scales", scales)):
            weights[f"{name}_{part}"] = WeightData.from_numpy(array, f"{name}_{part}")
    converted = convert_quantized(weights, {"quant_method": "mxfp4"})
    encodings = {value.quantization_encoding for value in converted.values()}
    assert encodings == {None, QuantizationEncoding.Q8_0}
    ours = Server(
        HuggingFaceConfig(model.config.to_dict()),
        converted,
        backend,
        max_seq_len=CASES["gpt_oss_wide"].max_seq_len,
        architecture=cast(type[DecoderModel], architecture("gpt_oss_wide").pipeline_model),
        return_logits=ReturnLogits.ALL,
    )
    tokens = rng.integers(0, 61, 13).tolist()
    expected = reference_logits(model, tokens)
    assert relative_error(ours.step({"a": tokens}).logits[0], expected) < tolerance


KINDS = {"ffn_gate_exps": "Q8_0", "ffn_up_exps": "Q4_0", "ffn_down_exps": "MXFP4"}
"""A type for each projection: MXFP4 becomes Q8_0 when it is read."""


@pytest.mark.parametrize(
    ("backend", "case", "arch", "tolerance"),
    [
        ("interpreter", "gpt_oss_wide", "gpt-oss", 2e-5),
        ("interpreter", "mixtral_wide", "llama", 2e-5),
        ("engine", "mixtral_wide", "llama", 0.06),
    ],
)
def test_experts_in_blocks_of_gguf_files(
    tmp_path: Path, rng: np.random.Generator, backend: str, case: str, arch: str, tolerance: float
) -> None:
    model = copy.deepcopy(transformers_model(case))
    path = tmp_path / "model.gguf"
    decoded = gguf_files.write(path, model, arch, lambda _: None, kinds=KINDS)
    for index, layer in enumerate(model.model.layers):
        gate, up, down = (
            torch.from_numpy(decoded[f"blk.{index}.{name}.weight"].copy()) for name in KINDS
        )
        experts = layer.mlp.experts
        if arch == "gpt-oss":
            pairs = torch.stack([gate, up], 2).reshape(len(gate), -1, gate.shape[-1])
            experts.gate_up_proj.data.copy_(pairs.transpose(1, 2))
            experts.down_proj.data.copy_(down.transpose(1, 2))
        else:
            experts.gate_up_proj.data.copy_(torch.cat([gate, up], 1))
            experts.down_proj.data.copy_(down)
    weights = {name: value.data() for name, value in GGUFWeights(path).items()}
    encodings = {
        name.split(".")[2]: value.quantization_encoding
        for name, value in weights.items()
        if "_exps.weight" in name
    }
    assert encodings == {
        "ffn_gate_exps": QuantizationEncoding.Q8_0,
        "ffn_up_exps": QuantizationEncoding.Q4_0,
        "ffn_down_exps": QuantizationEncoding.Q8_0,
    }
    ours = Server(
        HuggingFaceConfig(config_of(GGUFFile(path))),
        weights,
        backend,
        max_seq_len=CASES[case].max_seq_len,
        architecture=cast(type[DecoderModel], architecture(case).pipeline_model),
        return_logits=ReturnLogits.ALL,
        gguf=True,
    )
    tokens = rng.integers(0, 61, 13).tolist()
    expected = reference_logits(model, tokens)
    assert relative_error(ours.step({"a": tokens}).logits[0], expected) < tolerance


EXPERTS = {
    "deepseek_v2": {"moe_intermediate_size": 32, "num_key_value_heads": 8},
    "deepseek_v3": {"moe_intermediate_size": 32, "num_key_value_heads": 8},
    "deepseek_v32": {"moe_intermediate_size": 32, "num_key_value_heads": 8, "q_lora_rank": 32},
    "dots1": {"moe_intermediate_size": 32},
    "ernie4_5_moe": {"moe_intermediate_size": 32},
    "glm4_moe": {"moe_intermediate_size": 32},
    "gpt_oss_wide": {},
    "granite_hybrid_moe": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "granite_moe_shared": {},
    "hunyuan_moe": {},
    "jamba": {},
    "lfm2_moe": {"moe_intermediate_size": 32},
    "llama4": {},
    "minimax_m2": {},
    "mixtral": {},
    "olmoe": {},
    "phimoe": {"num_attention_heads": 4},
    "qwen2_moe": {"moe_intermediate_size": 32, "num_attention_heads": 4},
    "qwen3_5_moe": {"moe_intermediate_size": 32},
    "qwen3_moe": {"moe_intermediate_size": 32},
    "qwen3_next": {"moe_intermediate_size": 32},
}
"""A case for each family with experts, and what makes their rows multiples of 32."""


def _wide(case: str) -> Any:
    spec = CASES[case]
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 8}
    options = {**spec.options, **sizes, **EXPERTS[case]}
    return random_model(replace(spec, options=options), 5)


def _logits(
    model: Any, case: str, kind: str, backend: str, decodes: bool, tokens: list[int]
) -> tuple[Any, set[str]]:
    """The logits of a model that is quantized at load, its blocks decoded again or not; the names of stacked weights in
    blocks.
    """
    quantizer, stacked = Quantizer(InferenceSession()), set[str]()

    def change(weights: dict[str, WeightData]) -> Mapping[str, WeightData]:
        for name, value in weights.items():
            shape = [int(n) for n in value.shape]
            if (chosen := encoding_for(name, shape, kind)) is None:
                continue
            stacked.update([name] if len(shape) == 3 else [])
            weights[name] = encoded = quantizer.encode(value, chosen)
            if decodes and encoded.quantization_encoding is not None:
                blocks = Tensor.from_dlpack(encoded.data).to_numpy()
                floats = decode(blocks, encoded.quantization_encoding.value)
                weights[name] = WeightData.from_numpy(floats, name)
        return weights

    server = Server(
        config_file(model),
        weights_of(model),
        backend,
        max_seq_len=CASES[case].max_seq_len,
        architecture=cast(type[DecoderModel], architecture(case).pipeline_model),
        return_logits=ReturnLogits.ALL,
        change=change,
    )
    return server.step({"a": tokens}).logits[0], stacked


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_are_quantized_at_load(rng: np.random.Generator, case: str) -> None:
    """The logits are those of the decoded blocks, for each family."""
    model, tokens = _wide(case), rng.integers(0, 61, 13).tolist()
    actual, stacked = _logits(model, case, "q4_k", "interpreter", False, tokens)
    expected, _ = _logits(model, case, "q4_k", "interpreter", True, tokens)
    assert {name.split(".")[-2] for name in stacked} >= {"down_proj"}
    assert relative_error(actual, expected) < 2e-5


@pytest.mark.parametrize("kind", ["q4_k", "q6_k"])
def test_kernels_of_quantized_experts(rng: np.random.Generator, kind: str) -> None:
    """Blocks of 256 elements in the engine, whose products round inputs to 8 bits."""
    case = CASES["olmoe"]
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
    # all experts are chosen: rounding must not change which
    options = {"num_experts": 2, "initializer_range": 0.06}
    model = random_model(replace(case, options={**case.options, **sizes, **options}), 5)
    tokens = rng.integers(0, 61, 13).tolist()
    actual, stacked = _logits(model, "olmoe", kind, "engine", False, tokens)
    expected, _ = _logits(model, "olmoe", kind, "interpreter", True, tokens)
    assert stacked and relative_error(actual, expected) < 0.06
