"""What hypothesis draws for state-space models and hybrids."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from tests.architectures.drawn_dense import granite
from tests.architectures.drawn_experts import INNER, grouped_experts, qwen_moe
from tests.architectures.drawn_parts import (
    EPSILONS,
    FACTORS,
    FLAGS,
    PLAIN_ACTIVATIONS,
    Draw,
    Families,
    Options,
    chosen,
    divisor,
    kinds,
    partial,
    plain,
    sizes,
)

LIMITS = st.sampled_from([(0.0, math.inf), (0.0, math.inf), (0.3, 0.9)])
"""The least and the greatest step."""


def mamba(draw: Draw) -> Options:
    return {
        "hidden_size": draw(st.integers(1, 30)),
        "state_size": draw(st.integers(1, 9)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "layer_norm_epsilon": draw(EPSILONS),
        "expand": draw(st.integers(1, 3)),
        "conv_kernel": draw(st.integers(2, 5)),
        "time_step_rank": draw(st.just("auto") | st.integers(1, 9)),
        **{key: draw(FLAGS) for key in ("use_bias", "use_conv_bias", "tie_word_embeddings")},
    }


def mamba2(draw: Draw) -> Options:
    heads, expand = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    size = expand * draw(st.integers(1, 6))
    options = mamba(draw)
    del options["time_step_rank"]
    return options | {
        "expand": expand,
        "num_heads": heads,
        "head_dim": size,
        "hidden_size": heads * size // expand,
        "n_groups": divisor(draw, heads),
        "chunk_size": draw(st.integers(1, 9)),
        "time_step_limit": draw(LIMITS),
    }


def hybrid(draw: Draw, options: Options) -> Options:
    """Mamba 2 in hybrid models: its heads have the features of `mamba_expand` hidden states."""
    inner = options["hidden_size"] * 2
    size = divisor(draw, inner)
    # few heads, as each has a state
    size = size if inner // size <= 12 else inner
    heads = inner // size
    return options | {
        "hidden_act": "silu",
        "mamba_n_heads": heads,
        "mamba_d_head": draw(st.sampled_from([size, "auto"])),
        "mamba_d_state": draw(st.integers(1, 9)),
        "mamba_d_conv": draw(st.integers(2, 5)),
        "mamba_n_groups": divisor(draw, heads),
        "mamba_chunk_size": draw(st.integers(1, 9)),
        "mamba_conv_bias": draw(FLAGS),
        "mamba_proj_bias": draw(FLAGS),
        "time_step_limit": draw(LIMITS),
    }


def bamba(draw: Draw) -> Options:
    options = hybrid(draw, plain(draw, "attention_bias", "mlp_bias"))
    layers = options["num_hidden_layers"]
    size = options["hidden_size"] // options["num_attention_heads"]
    attends = draw(st.lists(st.integers(0, layers - 1), unique=True))
    return options | partial(draw, size) | {"attn_layer_indices": attends}


def granite_hybrid(draw: Draw) -> Options:
    options = hybrid(draw, granite(draw))
    del options["mlp_bias"]
    layers = options["num_hidden_layers"]
    if draw(FLAGS):
        options |= chosen(draw, "num_local_experts")
    else:
        options["num_local_experts"] = 0
    return options | {
        "layer_types": kinds(draw, layers, "full_attention", "linear_attention"),
        "shared_intermediate_size": draw(INNER),
        "position_embedding_type": draw(st.sampled_from([None, "rope", "nope"])),
    }


def falcon_h1(draw: Draw) -> Options:
    options = hybrid(draw, plain(draw, "attention_bias", "mlp_bias"))
    names = ("attention_in", "attention_out", "key", "ssm_in", "ssm_out", "embedding", "lm_head")
    return options | {
        "mamba_d_ssm": options["hidden_size"] * 2,
        "ssm_multipliers": draw(st.lists(FACTORS, min_size=5, max_size=5)),
        "mlp_multipliers": draw(st.lists(FACTORS, min_size=2, max_size=2)),
        **{f"{name}_multiplier": draw(FACTORS) for name in names},
        **{
            key: draw(FLAGS)
            for key in ("projectors_bias", "mamba_rms_norm", "mamba_norm_before_gate")
        },
    }


def jamba(draw: Draw) -> Options:
    options = sizes(draw) | chosen(draw, "num_experts")
    attends, routed = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return options | {
        "rms_norm_eps": draw(EPSILONS),
        "attn_layer_period": attends,
        "attn_layer_offset": draw(st.integers(0, attends - 1)),
        "expert_layer_period": routed,
        "expert_layer_offset": draw(st.integers(0, routed - 1)),
        "mamba_d_state": draw(st.integers(1, 9)),
        "mamba_d_conv": draw(st.integers(2, 5)),
        "mamba_expand": draw(st.integers(1, 3)),
        "mamba_dt_rank": draw(st.just("auto") | st.integers(1, 9)),
        "mamba_conv_bias": draw(FLAGS),
        "mamba_proj_bias": draw(FLAGS),
    }


def nemotron_h(draw: Draw) -> Options:
    options = sizes(draw, head_dim=True)
    layers = draw(st.integers(1, 5))
    del options["num_hidden_layers"]
    heads, size = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    experts = grouped_experts(draw, 0)
    del experts["first_k_dense_replace"]
    types = ("linear_attention", "full_attention", "mlp", "moe")
    return options | experts | {
        "layers_block_type": kinds(draw, layers, *types),
        "layer_norm_epsilon": draw(EPSILONS),
        "mlp_hidden_act": draw(PLAIN_ACTIVATIONS),
        "mamba_num_heads": heads,
        "mamba_head_dim": size,
        "n_groups": divisor(draw, heads),
        "ssm_state_size": draw(st.integers(1, 9)),
        "conv_kernel": draw(st.integers(2, 5)),
        "chunk_size": draw(st.integers(1, 9)),
        "moe_shared_expert_intermediate_size": draw(INNER),
        "time_step_min": draw(st.sampled_from([0.001, 0.4])),
        "moe_latent_size": draw(st.none() | st.integers(1, 12)),
        **{key: draw(FLAGS) for key in ("use_bias", "use_conv_bias", "mlp_bias")},
    }  # fmt: skip


def lfm2(draw: Draw) -> Options:
    options = sizes(draw)
    types = kinds(draw, options["num_hidden_layers"], "conv", "full_attention")
    flags = ("conv_bias", "block_auto_adjust_ff_dim")
    return options | {
        "layer_types": types,
        "norm_eps": draw(EPSILONS),
        "conv_L_cache": draw(st.integers(2, 5)),
        "block_multiple_of": draw(st.integers(1, 9)),
        "block_ffn_dim_multiplier": draw(FACTORS),
        "intermediate_size": draw(st.integers(20, 50)),
        **{flag: draw(FLAGS) for flag in flags},
    }


def lfm2_moe(draw: Draw) -> Options:
    options = lfm2(draw)
    for key in ("block_multiple_of", "block_ffn_dim_multiplier", "block_auto_adjust_ff_dim"):
        del options[key]
    return options | chosen(draw, "num_experts") | {
        "num_dense_layers": draw(st.integers(0, options["num_hidden_layers"])),
        "moe_intermediate_size": draw(INNER),
        "routed_scaling_factor": draw(FACTORS),
        "use_expert_bias": draw(FLAGS),
        "norm_topk_prob": draw(FLAGS),
    }  # fmt: skip


def delta_net(draw: Draw) -> Options:
    """A hybrid with gated delta nets; their sizes are such that few of the results that they divide by are near 0."""
    options = plain(draw, "attention_bias", head_dim=True)
    key_heads = draw(st.integers(1, 3))
    layers = options["num_hidden_layers"]
    return options | partial(draw, options["head_dim"]) | {
        "hidden_act": "silu",
        "layer_types": kinds(draw, layers, "linear_attention", "full_attention"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw(st.integers(1, 3)),
        "linear_key_head_dim": draw(st.integers(4, 16)),
        "linear_value_head_dim": draw(st.integers(4, 16)),
        "linear_conv_kernel_dim": draw(st.integers(2, 5)),
    }  # fmt: skip


def qwen3_next(draw: Draw) -> Options:
    return qwen_moe(draw, delta_net(draw)) | {"shared_expert_intermediate_size": draw(INNER)}


def qwen3_5_moe(draw: Draw) -> Options:
    return delta_net(draw) | chosen(draw, "num_experts") | {
        "moe_intermediate_size": draw(INNER),
        "shared_expert_intermediate_size": draw(INNER),
    }  # fmt: skip


RECURRENT: Families = {
    "MambaForCausalLM": ("MambaConfig", mamba),
    "Mamba2ForCausalLM": ("Mamba2Config", mamba2),
    "BambaForCausalLM": ("BambaConfig", bamba),
    "GraniteMoeHybridForCausalLM": ("GraniteMoeHybridConfig", granite_hybrid),
    "FalconH1ForCausalLM": ("FalconH1Config", falcon_h1),
    "JambaForCausalLM": ("JambaConfig", jamba),
    "NemotronHForCausalLM": ("NemotronHConfig", nemotron_h),
    "Lfm2ForCausalLM": ("Lfm2Config", lfm2),
    "Lfm2MoeForCausalLM": ("Lfm2MoeConfig", lfm2_moe),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", qwen3_next),
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", delta_net),
    "Qwen3_5MoeForCausalLM": ("Qwen3_5MoeTextConfig", qwen3_5_moe),
}
