"""Experts in quantised checkpoints, against transformers' models with the decoded weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from max.graph.quantization import QuantizationEncoding
from max.graph.weights import GGUFFile, GGUFWeights, WeightData
from max.nn.transformer import ReturnLogits
from max.pipelines.checkpoints.gguf import config_of
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.checkpoints.quantised_formats import convert_quantised
from max.pipelines.models.decoder_model import DecoderModel
from tests.architectures import gguf_files
from tests.architectures.families import CASES, architecture, transformers_model
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
    converted = convert_quantised(weights, {"quant_method": "mxfp4"})
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
