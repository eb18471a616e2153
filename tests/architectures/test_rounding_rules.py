"""Constants and roundings in transformers' models that configs do not state, each with a model that shows it."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers.models.falcon import modeling_falcon

from max.dtype import DType
from max.nn.transformer import ReturnLogits
from max.pipelines.models.decoder.model import DecoderModel
from tests.architectures.families import (
    GEMMA4,
    LLAMA_KEYS,
    Case,
    architecture_named,
    config_file,
    random_model,
)
from tests.architectures.llama_harness import (
    Server,
    reference_logits,
    relative_error,
    weights_of,
)


def server(model: Any, dtype: DType = DType.float32, **options: Any) -> Server:
    """Our graph of a model of transformers, in the interpreter; it returns all logits."""
    name = type(model).__name__
    return Server(
        config_file(model),
        weights_of(model),
        "interpreter",
        dtype,
        architecture=cast(type[DecoderModel], architecture_named(name).pipeline_model),
        return_logits=ReturnLogits.ALL,
        **options,
    )


GEMMAS: dict[str, Case] = {
    "gemma": Case("GemmaForCausalLM", "GemmaConfig", {"head_dim": 8}),
    "gemma2": Case("Gemma2ForCausalLM", "Gemma2Config", {"head_dim": 8, "final_logit_softcapping": None}),
    "gemma3": Case("Gemma3ForCausalLM", "Gemma3TextConfig", {"head_dim": 8}),
    "gemma4": Case("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4 | {"final_logit_softcapping": None}),
}  # fmt: skip


@pytest.mark.parametrize("family", GEMMAS)
def test_16_bit_gemmas_round_the_factor_of_embeddings(family: str) -> None:
    """Layers add nothing, and the norm's epsilon is far over the squares of states, so logits grow with the factor."""
    case = GEMMAS[family]
    model = random_model(
        Case(case.architecture, case.config, {**case.options, "rms_norm_eps": 1.0}), 3
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "per_layer_projection.weight")):
                weight.zero_()
            if "embed_tokens" in name:
                weight.mul_(0.01)
    model = model.bfloat16()
    tokens = list(range(61))
    expected = reference_logits(model, tokens)
    actual = server(model.float(), DType.bfloat16).step({"a": tokens}).logits[0]
    # roundings of single values cancel in a projection; sqrt(24) and its bfloat16 differ by 1.5e-3
    ratio = (actual * expected).sum() / (expected * expected).sum()
    assert abs(ratio - 1) < 4e-4


def _exact_alibi(mask: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """ALiBi of transformers' Falcon without its rounding to bfloat16, which `.bfloat16()` of the slopes causes."""
    count = 2 ** int(np.log2(heads))
    slopes = [2.0 ** (-8 * (i + 1) / count) for i in range(count)]
    slopes += [2.0 ** (-4 * (i + 1) / count) for i in range(0, 2 * count, 2)]
    positions = ((mask.cumsum(dim=-1) - 1) * mask)[:, None, :]
    biases = torch.tensor(slopes[:heads])[..., None] * positions
    return biases.reshape(len(mask) * heads, 1, -1).to(dtype)


def test_falcon_biases_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers rounds Falcon's ALiBi to bfloat16 in every dtype; docs/models.md says that ours does not."""
    options = {
        "alibi": True,
        "new_decoder_architecture": False,
        "num_attention_heads": 12,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    model = random_model(Case("FalconForCausalLM", "FalconConfig", options, {}), 3)
    tokens = np.random.default_rng(4).integers(0, 61, 60).tolist()
    actual = server(model).step({"a": tokens}).logits[0]
    assert relative_error(actual, reference_logits(model, tokens)) > 1e-3
    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", _exact_alibi)
    assert relative_error(actual, reference_logits(model, tokens)) < 1e-5


def test_lfm2_moe_adds_a_constant_to_the_sum_of_weights() -> None:
    """Some tokens have scores far below 0: the sigmoids of their experts are near the constant, 1e-6."""
    sizes = {**LLAMA_KEYS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    case = Case(
        "Lfm2MoeForCausalLM", "Lfm2MoeConfig", {"layer_types": ["full_attention"] * 3, "num_dense_layers": 0}, sizes
    )  # fmt: skip
    model = random_model(case, 3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("feed_forward.gate.weight"):
                weight[:, 0] = -14.0
    tokens = list(range(40))
    actual = server(model).step({"a": tokens}).logits[0]
    assert relative_error(actual, reference_logits(model, tokens)) < 1e-4
