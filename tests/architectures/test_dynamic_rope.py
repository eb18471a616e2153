"""NTK-aware scaling (`rope_type` dynamic): the base of the longest sequence that is served, or a stated growth."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from max.nn.transformer import ReturnLogits
from max.pipelines import PipelineConfig
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.decoder.model import DecoderModel
from tests.architectures.families import (
    architecture,
    architecture_named,
    config_file,
    llama_like,
    random_model,
)
from tests.architectures.llama_harness import (
    Server,
    reference_logits,
    relative_error,
    weights_of,
)

TRAINED, FACTOR = 16, 2.5
CASE = llama_like(
    "Llama",
    max_position_embeddings=TRAINED,
    rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": FACTOR},
)


def model_class(name: str) -> type[DecoderModel]:
    return cast(type[DecoderModel], architecture_named(name).pipeline_model)


@pytest.mark.parametrize("longest", [TRAINED - 3, TRAINED, TRAINED + 1, int(TRAINED * FACTOR)])
def test_the_base_is_that_of_the_longest_sequence(rng: np.random.Generator, longest: int) -> None:
    model = random_model(CASE, 5)
    ours = Server(
        config_file(model), weights_of(model), "interpreter", max_seq_len=longest,
        architecture=model_class("LlamaForCausalLM"), return_logits=ReturnLogits.ALL,
    )  # fmt: skip
    tokens = rng.integers(0, 61, longest).tolist()
    expected = reference_logits(model, tokens)
    cut = longest // 3
    parts = [ours.step({"a": part}).logits[0] for part in (tokens[:cut], tokens[cut:])]
    assert relative_error(np.concatenate(parts), expected) < 2e-5


def longest_sequence(rope: dict[str, Any], max_length: int | None) -> int:
    values = {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
        "vocab_size": 61, "rms_norm_eps": 1e-6,
        "max_position_embeddings": TRAINED, "rope_parameters": rope,
    }  # fmt: skip
    config = PipelineConfig(max_length=max_length)
    return model_class("LlamaForCausalLM").calculate_max_seq_len(config, HuggingFaceConfig(values))


def test_longer_sequences_are_served_only_if_they_are_asked_for() -> None:
    dynamic = {"rope_type": "dynamic", "factor": FACTOR}
    assert longest_sequence(dynamic, None) == TRAINED
    assert longest_sequence(dynamic, 40) == 40
    with pytest.raises(ConfigError, match="41 is more than .* 16, scaled to 40"):
        longest_sequence(dynamic, 41)
    for rope in ({"rope_type": "default"}, {"rope_type": "dynamic", "alpha": 50.0}):
        assert longest_sequence(rope, TRAINED) == TRAINED
        with pytest.raises(ConfigError, match="17 is more than .* 16\n"):
            longest_sequence(rope, TRAINED + 1)


def test_experts_of_lists_are_equal_in_all_layers() -> None:
    fields = architecture("hunyuan_moe").pipeline_model.config_class
    values = {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 61, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64, "num_experts": [4, 4], "moe_topk": [2, 2],
    }  # fmt: skip
    experts = fields.from_huggingface(HuggingFaceConfig(values)).first_form(Experts)
    assert (experts.count, experts.per_token) == (4, 2)
    for wrong in ([2, 1], [], [2, 5], [2, None], 0):
        with pytest.raises(ValueError, match="moe_topk"):
            fields.from_huggingface(HuggingFaceConfig({**values, "moe_topk": wrong}))
    assert ConfigKeys({"n": [3.0, 3]}).same_integer("n", 1, 4) == 3
