"""The keys of config.json that state-space models and hybrids read, and the values that they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest

from max.pipelines.architectures.falcon.falcon_h1 import falcon_h1_decoder
from max.pipelines.architectures.granite.bamba import bamba_decoder
from max.pipelines.architectures.granite.granite_moe_hybrid import hybrid_decoder
from max.pipelines.architectures.mamba.jamba import jamba_decoder
from max.pipelines.architectures.mamba.mamba import mamba2_decoder, mamba_decoder
from max.pipelines.architectures.nemotron.nemotron_h import nemotron_h_decoder
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.blocks.state_space import Mamba2Form
from max.pipelines.models.decoder.config import DecoderConfig

VALUES: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 61, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "mamba_n_heads": 6, "num_heads": 6,
    "head_dim": 8, "mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 5, "layers_block_type": None,
}  # fmt: skip


def read(fields: Any, **changes: Any) -> DecoderConfig:
    config = HuggingFaceConfig({**VALUES, **changes})
    return fields(ConfigKeys(config))


def shapes(config: DecoderConfig) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {state.name: (state.layers, state.shape) for state in config.states}


def test_the_states_of_families() -> None:
    # transformers saves the number of channels, which counts before the factor
    assert shapes(read(mamba_decoder)) == {"conv": (4, (3, 40)), "scan": (4, (16, 40))}
    of_factor = read(mamba_decoder, intermediate_size=None)
    assert shapes(of_factor) == {"conv": (4, (3, 48)), "scan": (4, (16, 48))}
    assert shapes(read(mamba2_decoder, state_size=5, n_groups=2, conv_kernel=3)) == {
        "conv": (4, (2, 48 + 2 * 2 * 5)),
        "scan": (4, (6, 5, 8)),
    }
    jamba = read(jamba_decoder, attn_layer_period=2, attn_layer_offset=1)
    assert jamba.num_cached_layers == 2 and shapes(jamba)["scan"][0] == 2
    assert jamba.cache.places == [(0, 0), (0, 0), (0, 1), (0, 1)]
    # one factor of all channels, by the hidden size, where a head's size is not stated
    assert shapes(read(bamba_decoder, mamba_d_head="auto"))["scan"][1][2] == 8
    both = read(falcon_h1_decoder, mamba_d_ssm=48)
    assert both.num_cached_layers == 4 and shapes(both)["scan"][0] == 4
    assert both.cache.places == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_kinds_of_layers() -> None:
    def parts(config: DecoderConfig) -> list[type]:
        """The class of the only layer of each block."""
        return [type(block.mixer or block.feed_forward) for block in config.blocks]

    kinds = [Mamba2Form, AttentionForm, MLPForm, Mamba2Form]
    assert parts(read(nemotron_h_decoder, hybrid_override_pattern="M*-M")) == kinds
    listed = ["mamba", "attention", "mlp", "linear_attention"]
    assert parts(read(nemotron_h_decoder, layers_block_type=listed)) == kinds
    bamba = read(bamba_decoder, attn_layer_indices=[2])
    assert parts(bamba) == [Mamba2Form, Mamba2Form, AttentionForm, Mamba2Form]


@pytest.mark.parametrize("bound", [math.inf, "Infinity", {"__float__": "Infinity"}])
def test_an_infinite_step_in_each_form(bound: Any) -> None:
    config = read(mamba2_decoder, time_step_limit=[0.5, bound])
    assert config.recurrence is not None and config.recurrence.limits == (0.5, math.inf)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        (mamba_decoder, {"conv_kernel": 1}, "conv_kernel is 1; expected an integer from 2"),
        (mamba_decoder, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected"),
        (mamba2_decoder, {"head_dim": 7}, "head_dim is 7; expected 48 divided by 6 heads"),
        (mamba2_decoder, {"n_groups": 4}, "n_groups is 4; expected a divisor of num_heads"),
        (mamba2_decoder, {"time_step_limit": [1, 0]}, "time_step_limit is .*; expected two numbers"),
        (mamba2_decoder, {"time_step_limit": [0]}, "time_step_limit is .*; expected two numbers"),
        (bamba_decoder, {"attn_layer_indices": [4]}, "attn_layer_indices is .*; expected a list"),
        (bamba_decoder, {"layers_block_type": ["mamba"]}, "layers_block_type is .*; expected 4 times"),
        (hybrid_decoder, {"layer_types": ["moe"] * 4, "num_local_experts": 0}, "layer_types is .*; expected 4"),
        (jamba_decoder, {"attn_layer_period": 2, "attn_layer_offset": 2}, "attn_layer_offset is 2"),
        (nemotron_h_decoder, {"hybrid_override_pattern": "ME"}, "config.json lacks n_routed_experts"),
        (nemotron_h_decoder, {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern is 'MX'; expected letters"),
        (nemotron_h_decoder, {"layers_block_type": ["moa"]}, "layers_block_type is .*; expected a list of"),
        (falcon_h1_decoder, {"ssm_multipliers": [1, 2]}, "ssm_multipliers is .*; expected 5 numbers"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(fields, **changes)
