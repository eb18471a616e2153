"""Random models of transformers for each family of decoders, with the options that the family has."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import transformers

from max.pipelines import PIPELINE_REGISTRY
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.registry.architecture import SupportedArchitecture
from tests.architectures.llama_harness import vary_vectors

WINDOW = 5
VOCABULARY = 61
LONGEST = 64

LLAMA_KEYS = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
HUNYUAN_ROPE = {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0}
LONGROPE: dict[str, Any] = {
    "num_attention_heads": 4,
    "original_max_position_embeddings": 12,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.67,
        "original_max_position_embeddings": 12,
        "short_factor": [1.0, 1.3],
        "long_factor": [1.5, 4.0],
    },
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 100.0}
GROUPED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
GEMMA3N: dict[str, Any] = {
    "num_attention_heads": 4,
    "head_dim": 8,
    "num_hidden_layers": 6,
    "intermediate_size": [20, 20, 30, 20, 20, 24],
    "activation_sparsity_pattern": [0.6, 0.0, 0.6, 0.3, 0.0, 0.9],
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
    "num_kv_shared_layers": 3,
    "vocab_size_per_layer_input": VOCABULARY - 9,
    "hidden_size_per_layer_input": 6,
    "laurel_rank": 4,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
GEMMA4: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 3, "full_attention"],
    "vocab_size_per_layer_input": 5000,
    "head_dim": 6,
    "global_head_dim": 8,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 6,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 20.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
INDEX = {"index_n_heads": 16, "index_head_dim": 10, "index_topk": 6}
DELTA_NET: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.25,
    },
}
GPT_KEYS = {"n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": LONGEST}
OPT_KEYS = {
    "hidden_size": 24,
    "ffn_dim": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": LONGEST,
    "init_std": 0.25,
}
FALCON_KEYS = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": LONGEST,
}
BLOOM_KEYS = {"hidden_size": 24, "n_layer": 3, "n_head": 6, "seq_length": LONGEST}
MPT_KEYS = {"d_model": 24, "n_layers": 3, "n_heads": 6, "max_seq_len": LONGEST}


def _without_kv_heads(sizes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sizes.items() if key != "num_key_value_heads"}


@dataclass(frozen=True)
class Case:
    """A random model.

    Args:
        architecture: The class's name in config.json.
        config: The name of the config's class in transformers.
        options: The values of its keys.
        sizes: The values of the keys of sizes.
        max_seq_len: The longest sequence that is served.
    """

    architecture: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=lambda: LLAMA_KEYS)
    max_seq_len: int = LONGEST


def llama_like(family: str, **options: Any) -> Case:
    """A case whose config has Llama's keys for its sizes."""
    return Case(f"{family}ForCausalLM", f"{family}Config", options)


MAMBA_KEYS = {"hidden_size": 24, "num_hidden_layers": 3, "state_size": 5}
MAMBA2_KEYS = {**MAMBA_KEYS, "num_heads": 6, "head_dim": 8, "chunk_size": 4}

HYBRID_SIZES = {
    **LLAMA_KEYS,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_d_state": 5,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 4,
}
NEMOTRON_SIZES = {key: value for key, value in LLAMA_KEYS.items() if key != "num_hidden_layers"}
NEMOTRON_MAMBA = {
    "head_dim": 6,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "ssm_state_size": 5,
    "n_groups": 3,
}
NEMOTRON_H = {
    **NEMOTRON_MAMBA,
    **{key: value for key, value in GROUPED_EXPERTS.items() if key != "first_k_dense_replace"},
    "moe_shared_expert_intermediate_size": 20,
}
GRANITE_FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.11,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.4,
}

CASES: dict[str, Case] = {
    "mamba": Case("MambaForCausalLM", "MambaConfig", {}, MAMBA_KEYS),
    "mamba_bias": Case(
        "MambaForCausalLM",
        "MambaConfig",
        {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "time_step_rank": 7},
        MAMBA_KEYS,
    ),
    "bamba": Case("BambaForCausalLM", "BambaConfig", {"attn_layer_indices": [1]}, HYBRID_SIZES),
    "granite_hybrid": Case(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 32,
            **GRANITE_FACTORS,
        },
        HYBRID_SIZES,
    ),
    "granite_hybrid_moe": Case(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "position_embedding_type": "rope",
            **GRANITE_FACTORS,
        },
        HYBRID_SIZES,
    ),
    "falcon_h1": Case("FalconH1ForCausalLM", "FalconH1Config", {"mamba_d_ssm": 48}, HYBRID_SIZES),
    "falcon_h1_factors": Case(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {
            "mamba_d_ssm": 48,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "projectors_bias": True,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.8,
            "key_multiplier": 0.7,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.9,
            "ssm_multipliers": [0.8, 1.1, 0.7, 1.4, 0.6],
            "mlp_multipliers": [1.5, 0.6],
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 1.7,
        },
        HYBRID_SIZES,
    ),
    "jamba": Case(
        "JambaForCausalLM",
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "expert_layer_period": 2,
            "expert_layer_offset": 0,
            "mamba_d_state": 5,
        },
    ),
    "nemotron_h": Case(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **NEMOTRON_MAMBA,
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
            "time_step_min": 0.4,
        },
        NEMOTRON_SIZES,
    ),
    "nemotron_h_moe": Case(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **NEMOTRON_H,
            "layers_block_type": ["moe", "linear_attention", "full_attention", "mlp", "moe"],
        },
        NEMOTRON_SIZES,
    ),
    "nemotron_h_latents": Case(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **NEMOTRON_H,
            "layers_block_type": ["linear_attention", "moe", "full_attention"],
            "moe_latent_size": 10,
            "mlp_bias": True,
            "use_bias": True,
        },
        NEMOTRON_SIZES,
    ),
    "mamba2": Case("Mamba2ForCausalLM", "Mamba2Config", {"n_groups": 1}, MAMBA2_KEYS),
    "mamba2_groups": Case(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {"n_groups": 3, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
        MAMBA2_KEYS,
    ),
    "mistral": llama_like("Mistral", sliding_window=None),
    "mistral_window": llama_like("Mistral", sliding_window=WINDOW, head_dim=10),
    "qwen2": llama_like("Qwen2", tie_word_embeddings=True),
    "qwen2_window": llama_like(
        "Qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": llama_like("Qwen3", head_dim=14),
    "qwen3_bias": llama_like("Qwen3", head_dim=8, attention_bias=True),
    "granite": llama_like(
        "Granite",
        embedding_multiplier=3.0,
        attention_multiplier=0.11,
        residual_multiplier=0.6,
        logits_scaling=0.4,
        attention_bias=True,
        mlp_bias=True,
    ),
    "gemma": llama_like("Gemma", head_dim=10, tie_word_embeddings=True),
    "gemma_bias": llama_like("Gemma", head_dim=4, attention_bias=True),
    "gemma2": llama_like(
        "Gemma2",
        head_dim=8,
        sliding_window=WINDOW,
        query_pre_attn_scalar=5,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma2_plain": llama_like(
        "Gemma2",
        head_dim=8,
        sliding_window=WINDOW,
        query_pre_attn_scalar=8,
        tie_word_embeddings=True,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": Case(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 5,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma3_plain": Case(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 8,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma3n": Case("Gemma3nForCausalLM", "Gemma3nTextConfig", GEMMA3N),
    "gemma4": Case("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4),
    "gemma4_gguf": Case(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4_experts": Case(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 12,
            "rope_parameters": None,
        },
    ),
    "gemma3n_plain": Case(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        {
            **GEMMA3N,
            "num_kv_shared_layers": 0,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "altup_active_idx": 2,
            "altup_num_inputs": 3,
            "altup_correct_scale": False,
            "intermediate_size": 20,
            "rope_parameters": None,
            "activation_sparsity_pattern": None,
        },
    ),
    "gemma3n_gguf": Case(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        {
            **GEMMA3N,
            "num_hidden_layers": 5,
            "layer_types": [*["sliding_attention"] * 4, "full_attention"],
            "num_kv_shared_layers": 0,
            "tie_word_embeddings": True,
            # what llama.cpp has fixed; it divides the deviation of gates by their number less 1
            "activation_sparsity_pattern": [0.95] * 5,
            "hidden_size_per_layer_input": 256,
            "laurel_rank": 64,
            "intermediate_size": 640,
        },
    ),
    "lfm2": Case(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "num_hidden_layers": 4,
            "block_multiple_of": 7,
            "rope_parameters": PLAIN_ROPE,
        },
    ),
    "lfm2_bias": Case(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {
            "full_attn_idxs": [0, 2],
            "conv_bias": True,
            "conv_L_cache": 4,
            "tie_word_embeddings": True,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2_moe": Case(
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "routed_scaling_factor": 1.3,
            "rope_parameters": PLAIN_ROPE,
        },
    ),
    "qwen3_next": Case(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **DELTA_NET,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 12,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5": Case(
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {
            **DELTA_NET,
            "linear_num_key_heads": 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe": Case(
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        {
            **DELTA_NET,
            "layer_types": None,
            "num_hidden_layers": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 12,
        },
    ),
    "phi": llama_like("Phi", num_attention_heads=3, num_key_value_heads=3, qk_layernorm=True),
    "phi_grouped": llama_like("Phi", num_attention_heads=3, num_key_value_heads=1),
    "phi3": llama_like("Phi3", sliding_window=WINDOW),
    "phi3_long": llama_like("Phi3", **LONGROPE),
    "phi3_short": replace(llama_like("Phi3", **LONGROPE), max_seq_len=12),
    "olmo": llama_like("Olmo", clip_qkv=0.7, attention_bias=True),
    "olmo2": llama_like("Olmo2", attention_bias=True),
    "olmo3": llama_like(
        "Olmo3",
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "smollm3": llama_like("SmolLM3", num_hidden_layers=4, attention_bias=True, mlp_bias=True),
    "smollm3_window": llama_like(
        "SmolLM3", no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=WINDOW
    ),
    "seed_oss": llama_like("SeedOss", head_dim=6, attention_out_bias=True, mlp_bias=True),
    "arcee": llama_like("Arcee", attention_bias=True, mlp_bias=True, rope_parameters=YARN),
    "apertus": llama_like("Apertus", rope_parameters=LLAMA3),
    "helium": llama_like("Helium", head_dim=4, attention_bias=True, mlp_bias=True),
    "exaone4": llama_like("Exaone4", sliding_window=WINDOW, num_hidden_layers=4),
    "exaone4_full": llama_like("Exaone4", sliding_window=None, layer_types=["full_attention"] * 3),
    "ernie4_5": llama_like("Ernie4_5", head_dim=8, use_bias=True),
    "hunyuan": llama_like(
        "HunYuanDenseV1", head_dim=8, attention_bias=True, rope_parameters=HUNYUAN_ROPE
    ),
    "ministral": llama_like(
        "Ministral",
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "ministral3": llama_like(
        "Ministral3",
        head_dim=8,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.6},
    ),
    "cohere": llama_like("Cohere", use_qk_norm=True, logit_scale=0.3, tie_word_embeddings=True),
    "cohere_bias": llama_like("Cohere", attention_bias=True),
    "cohere2": llama_like(
        "Cohere2", sliding_window=WINDOW, num_hidden_layers=4, tie_word_embeddings=True
    ),
    "cwm": llama_like(
        "Cwm",
        head_dim=8,
        sliding_window=WINDOW,
        num_hidden_layers=5,
        mlp_bias=True,
        rope_parameters=LLAMA3,
    ),
    "stablelm": llama_like(
        "StableLm", num_attention_heads=3, num_key_value_heads=1, use_qkv_bias=True
    ),
    "stablelm_parallel": llama_like(
        "StableLm",
        num_attention_heads=2,
        qk_layernorm=True,
        use_parallel_residual=True,
        partial_rotary_factor=0.5,
    ),
    "starcoder2": llama_like("Starcoder2", sliding_window=WINDOW, tie_word_embeddings=True),
    "starcoder2_no_bias": llama_like("Starcoder2", use_bias=False),
    "glm": llama_like("Glm", head_dim=8),
    "glm4": llama_like("Glm4", head_dim=12, attention_bias=False),
    "nemotron": llama_like("Nemotron", attention_bias=True, mlp_bias=True, head_dim=8),
    "gpt2": Case("GPT2LMHeadModel", "GPT2Config", {"tie_word_embeddings": True}, GPT_KEYS),
    "gpt2_scaled": Case(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"scale_attn_by_inverse_layer_idx": True, "n_inner": 30, "activation_function": "relu"},
        GPT_KEYS,
    ),
    "gpt_bigcode": Case(
        "GPTBigCodeForCausalLM", "GPTBigCodeConfig", {"tie_word_embeddings": True}, GPT_KEYS
    ),
    "gpt_bigcode_heads": Case(
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        {"multi_query": False, "scale_attn_weights": False, "n_inner": 30},
        GPT_KEYS,
    ),
    "gpt_neox": Case(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", {"rotary_pct": 0.5}, _without_kv_heads(LLAMA_KEYS)
    ),
    "gpt_neox_serial": Case(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {"rotary_pct": 1.0, "use_parallel_residual": False, "attention_bias": False},
        _without_kv_heads(LLAMA_KEYS),
    ),
    "gptj": Case("GPTJForCausalLM", "GPTJConfig", {"rotary_dim": 2}, GPT_KEYS),
    "opt": Case("OPTForCausalLM", "OPTConfig", {"tie_word_embeddings": True}, OPT_KEYS),
    "opt_after": Case(
        "OPTForCausalLM",
        "OPTConfig",
        {"do_layer_norm_before": False, "word_embed_proj_dim": 14, "enable_bias": False},
        OPT_KEYS,
    ),
    "falcon": Case("FalconForCausalLM", "FalconConfig", {"bias": True}, FALCON_KEYS),
    "falcon_grouped": Case(
        "FalconForCausalLM",
        "FalconConfig",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 30},
        FALCON_KEYS,
    ),
    "falcon_serial": Case(
        "FalconForCausalLM",
        "FalconConfig",
        {"multi_query": False, "parallel_attn": False},
        FALCON_KEYS,
    ),
    "falcon_alibi": Case(
        "FalconForCausalLM",
        "FalconConfig",
        {"alibi": True, "multi_query": False, "num_attention_heads": 4},
        FALCON_KEYS,
    ),
    "bloom": Case("BloomForCausalLM", "BloomConfig", {"tie_word_embeddings": True}, BLOOM_KEYS),
    "bloom_normed": Case(
        "BloomForCausalLM",
        "BloomConfig",
        {"apply_residual_connection_post_layernorm": True},
        BLOOM_KEYS,
    ),
    "mpt": Case("MptForCausalLM", "MptConfig", {"attn_config": {"clip_qkv": 0.7}}, MPT_KEYS),
    "mixtral": llama_like(
        "Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW
    ),
    "qwen2_moe": llama_like(
        "Qwen2Moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=20,
        mlp_only_layers=[1],
    ),
    "qwen3_moe": llama_like(
        "Qwen3Moe",
        head_dim=8,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
    # without what GGUF files do not state
    "qwen2_moe_gguf": llama_like(
        "Qwen2Moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=20,
    ),
    "qwen3_moe_gguf": llama_like(
        "Qwen3Moe",
        head_dim=8,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        norm_topk_prob=True,
    ),
    "olmoe_gguf": llama_like("Olmoe", num_experts=4, num_experts_per_tok=2),
    "phimoe_gguf": llama_like(
        "Phimoe", num_local_experts=8, attention_bias=True, lm_head_bias=True
    ),
    "deepseek_v3_gguf": llama_like(
        "DeepseekV3",
        **LATENT,
        **GROUPED_EXPERTS,
        q_lora_rank=9,
        rope_parameters={**YARN, "mscale": 0.6, "mscale_all_dim": 0.6},
    ),
    "olmoe": llama_like("Olmoe", num_experts=4, num_experts_per_tok=2, clip_qkv=0.7),
    "hunyuan_moe": llama_like(
        "HunYuanMoEV1", head_dim=8, num_experts=4, moe_topk=2, rope_parameters=HUNYUAN_ROPE
    ),
    "minimax_m2": llama_like(
        "MiniMaxM2",
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={**PLAIN_ROPE, "partial_rotary_factor": 0.5},
    ),
    "glm4_moe": llama_like(
        "Glm4Moe", head_dim=8, use_qk_norm=True, attention_bias=True, **GROUPED_EXPERTS
    ),
    "deepseek_v2": llama_like(
        "DeepseekV2",
        **LATENT,
        **GROUPED_EXPERTS,
        q_lora_rank=7,
        topk_method="group_limited_greedy",
        attention_bias=True,
        rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    "deepseek_v2_lite": llama_like(
        "DeepseekV2",
        **LATENT,
        **{**GROUPED_EXPERTS, "n_group": 1, "topk_group": 1},
        q_lora_rank=None,
        rope_parameters=PLAIN_ROPE,
    ),
    "deepseek_v3": llama_like(
        "DeepseekV3",
        **LATENT,
        **GROUPED_EXPERTS,
        q_lora_rank=9,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    ),
    # a token sees 6 tokens of up to 23
    "deepseek_v32": llama_like(
        "DeepseekV32",
        **LATENT,
        **GROUPED_EXPERTS,
        **INDEX,
        q_lora_rank=9,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    ),
    # all tokens
    "deepseek_v32_dense": llama_like(
        "DeepseekV32",
        **LATENT,
        **{**GROUPED_EXPERTS, "n_group": 1, "topk_group": 1},
        **{**INDEX, "index_topk": 64},
        q_lora_rank=9,
        attention_bias=True,
        mlp_layer_types=["sparse", "dense", "sparse"],
        rope_parameters=PLAIN_ROPE,
    ),
    "kimi_k2": llama_like(
        "DeepseekV3",
        **LATENT,
        **{**GROUPED_EXPERTS, "n_group": 1, "topk_group": 1},
        q_lora_rank=None,
        attention_bias=True,
        rope_interleave=False,
        norm_topk_prob=False,
        rope_parameters=PLAIN_ROPE,
    ),
    "llama4": Case(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            "head_dim": 6,
            "intermediate_size_mlp": 30,
            "num_local_experts": 4,
            "num_hidden_layers": 4,
            "attention_chunk_size": WINDOW,
            "no_rope_layer_interval": 2,
            "floor_scale": 3,
            "attn_scale": 0.4,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama4_dense": Case(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            "head_dim": 4,
            "intermediate_size_mlp": 30,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": WINDOW,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "rope_parameters": PLAIN_ROPE,
        },
    ),
    "gpt_oss": llama_like(
        "GptOss",
        head_dim=8,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=0.8,
        rope_parameters={**YARN, "truncate": False},
    ),
    # for blocks of 32 elements
    "mixtral_wide": llama_like(
        "Mixtral",
        hidden_size=64,
        intermediate_size=32,
        num_attention_heads=4,
        num_local_experts=4,
        num_hidden_layers=2,
        sliding_window=None,
    ),
    "gpt_oss_wide": llama_like(
        "GptOss",
        hidden_size=64,
        intermediate_size=32,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        sliding_window=WINDOW,
    ),  # fmt: skip
    "gpt_oss_no_bias": llama_like(
        "GptOss",
        head_dim=8,
        sliding_window=WINDOW,
        num_local_experts=5,
        num_experts_per_tok=3,
        attention_bias=False,
        swiglu_alpha=1.2,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters=PLAIN_ROPE,
    ),
    "phimoe": llama_like(
        "Phimoe",
        num_local_experts=4,
        attention_bias=True,
        sliding_window=WINDOW,
        router_jitter_noise=0.3,
    ),
    "phimoe_long": llama_like(
        "Phimoe",
        num_local_experts=8,
        lm_head_bias=True,
        rope_parameters={
            **LONGROPE["rope_parameters"],
            "partial_rotary_factor": 1.0,
            "short_factor": [1.2, 3.0],
            "short_mscale": 1.1,
            "long_mscale": 1.3,
        },
    ),
    "granite_moe": llama_like(
        "GraniteMoe",
        num_local_experts=4,
        num_experts_per_tok=3,
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        residual_multiplier=0.6,
        logits_scaling=0.4,
    ),
    "granite_moe_shared": llama_like(
        "GraniteMoeShared",
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=12,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "ernie4_5_moe": llama_like(
        "Ernie4_5_Moe",
        moe_num_experts=6,
        moe_k=3,
        moe_intermediate_size=16,
        moe_num_shared_experts=2,
    ),
    "ernie4_5_moe_interval": llama_like(
        "Ernie4_5_Moe",
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=16,
        moe_num_shared_experts=0,
        moe_layer_start_index=0,
        moe_layer_end_index=1,
        moe_layer_interval=2,
        use_bias=True,
    ),
    "dots1": llama_like("Dots1", head_dim=8, **GROUPED_EXPERTS),
}


def random_model(spec: Case, seed: int, vocabulary: int = VOCABULARY) -> Any:
    """A random model, in float32; norms and biases are not 1 and 0."""
    torch.manual_seed(seed)
    values = {
        "vocab_size": vocabulary,
        "initializer_range": 0.25,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        **spec.sizes,
        **spec.options,
    }
    config = getattr(transformers, spec.config)(**values)
    return varied(getattr(transformers, spec.architecture)(config).float().eval())


def varied(model: Any) -> Any:
    """A model whose norms, biases and buffers, which are initialized to 1 and 0, are random."""
    name_of_class = type(model).__name__
    # grouped products of torch need rows of whole 16 bytes
    model.set_experts_implementation("eager")
    vary_vectors(model)
    with torch.no_grad():
        for name, buffer in (*model.named_buffers(), *model.named_parameters()):
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.add_(torch.rand_like(buffer) * 0.3)
            if name.endswith("layer_scalar"):
                buffer.mul_(0.6)
            if name.endswith("q_norm.weight") and name_of_class.startswith(("Gemma3n", "Gemma4")):
                # what other families divide scores by is learned there
                buffer.mul_(0.4)
    return model


@cache
def transformers_model(case: str, vocabulary: int = VOCABULARY) -> Any:
    """The random model of a case."""
    return random_model(CASES[case], len(case), vocabulary)


def config_file(model: Any) -> HuggingFaceConfig:
    """The config.json that transformers writes for a model."""
    return HuggingFaceConfig(json.loads(model.config.to_json_string()))


def architecture(case: str) -> SupportedArchitecture:
    """The architecture of a case."""
    return architecture_named(CASES[case].architecture)


def architecture_named(name: str) -> SupportedArchitecture:
    """The architecture of a class's name in config.json."""
    PIPELINE_REGISTRY.load_own([name])
    return PIPELINE_REGISTRY.architectures[name]


def tolerance(case: str) -> float:
    """The error that is allowed in a row of logits of a case in float32, relative to the row's norm."""
    # delta nets divide by the lengths of results that may be near 0, Gemma 4 does not divide scores by the heads' size;
    # transformers' own errors are 1e-5 and 4e-5 there
    return 1e-4 if case.startswith(("qwen3_next", "qwen3_5", "gemma4")) else 2e-5
