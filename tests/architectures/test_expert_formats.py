"""Experts in quantised checkpoints, against transformers' models with the decoded weights."""

from __future__ import annotations

import copy
from typing import cast

import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from max.graph.quantization import QuantizationEncoding
from max.graph.weights import WeightData
from max.nn.transformer import ReturnLogits
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.checkpoints.quantised_formats import convert_quantised
from max.pipelines.models.decoder_model import DecoderModel
from tests.architectures.families import CASES, architecture, transformers_model
from tests.architectures.llama_harness import (
    Server,
    reference_logits,
    relative_error,
    weights_of,
)


@pytest.mark.parametrize(("backend", "tolerance"), [("interpreter", 2e-5), ("engine", 0.06)])
def test_mxfp4_checkpoint(rng: np.random.Generator, backend: str, tolerance: float) -> None:
    """GPT-OSS as it is published: experts in 4-bit floats; the engine's products round inputs to 8 bits."""
    model = copy.deepcopy(transformers_model("gpt_oss_wide"))
    weights = weights_of(model)
    for name, parameter in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        count, inputs, outputs = parameter.shape
        blocks = rng.integers(0, 256, (count, outputs, inputs // 32, 16)).astype(np.uint8)
        scales = rng.integers(122, 126, blocks.shape[:-1]).astype(np.uint8)
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
