"""What hypothesis draws for the families of decoders with experts."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.architectures.drawn_dense import granite
from tests.architectures.drawn_parts import (
    DEFAULT_ROPE,
    FACTORS,
    FLAGS,
    ROPES,
    WINDOWS,
    Draw,
    Families,
    Options,
    chosen,
    grouped_experts,
    kinds,
    longrope,
    partial,
    plain,
    windowed,
)
from tests.architectures.families import HUNYUAN_ROPE

INNER = st.integers(1, 20)


def latents(draw: Draw) -> Options:
    """The sizes of latent attention, and a rotation whose correction is equal for queries and keys."""
    heads = draw(st.integers(1, 6))
    correction = draw(st.sampled_from([{}, {"mscale": 0.7, "mscale_all_dim": 0.7}]))
    rope = draw(st.sampled_from([DEFAULT_ROPE, {"rope_type": "yarn"}]))
    if rope["rope_type"] == "yarn":
        rope = {
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0,
            "original_max_position_embeddings": 16, **correction,
        }  # fmt: skip
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": draw(st.integers(1, 12)),
        "q_lora_rank": draw(st.none() | st.integers(1, 12)),
        "qk_nope_head_dim": draw(st.integers(1, 8)),
        "qk_rope_head_dim": 2 * draw(st.integers(1, 4)),
        "v_head_dim": draw(st.integers(1, 8)),
        "attention_bias": draw(FLAGS),
        "rope_parameters": rope,
    }


def deepseek_v3(draw: Draw) -> Options:
    options = plain(draw)
    experts = grouped_experts(draw, options["num_hidden_layers"])
    return options | experts | latents(draw) | {"rope_interleave": draw(FLAGS)}


def deepseek_v32(draw: Draw) -> Options:
    options = deepseek_v3(draw)
    del options["rope_interleave"]
    return options | {
        "q_lora_rank": draw(st.integers(1, 12)),
        "index_topk": draw(st.integers(1, 40)),
        "index_n_heads": draw(st.integers(1, 20)),
        "index_head_dim": options["qk_rope_head_dim"] + draw(st.integers(0, 8)),
    }


def deepseek_v2(draw: Draw) -> Options:
    options = deepseek_v3(draw)
    del options["rope_interleave"], options["norm_topk_prob"]
    method = draw(st.sampled_from(["greedy", "group_limited_greedy"]))
    # transformers takes rotated parts as complex numbers, which lie at even places
    even = {key: 2 * options[key] for key in ("kv_lora_rank", "qk_nope_head_dim")}
    hidden = options["num_attention_heads"] * draw(st.integers(2, 7))
    return options | even | {"topk_method": method, "hidden_size": hidden}


def glm4_moe(draw: Draw) -> Options:
    options = plain(draw, "attention_bias", "use_qk_norm", head_dim=True)
    experts = grouped_experts(draw, options["num_hidden_layers"])
    return options | experts | partial(draw, options["head_dim"])


def dots1(draw: Draw) -> Options:
    options = windowed(draw, plain(draw, "attention_bias", head_dim=True))
    return options | grouped_experts(draw, options["num_hidden_layers"])


def ernie(draw: Draw) -> Options:
    options = plain(draw, "use_bias")
    layers = options["num_hidden_layers"]
    first = draw(st.integers(0, layers - 1))
    return options | chosen(draw, "moe_num_experts", "moe_k") | {
        "moe_intermediate_size": draw(INNER),
        "moe_num_shared_experts": draw(st.integers(0, 2)),
        "moe_layer_start_index": first,
        "moe_layer_end_index": draw(st.integers(first, layers)),
        "moe_layer_interval": draw(st.integers(1, 2)),
    }  # fmt: skip


def gpt_oss(draw: Draw) -> Options:
    options = windowed(draw, plain(draw, "attention_bias", head_dim=True))
    return options | chosen(draw, "num_local_experts") | {
        "hidden_act": "silu",
        "swiglu_alpha": draw(FACTORS),
        "swiglu_limit": draw(FACTORS),
    }  # fmt: skip


def granite_moe(draw: Draw) -> Options:
    options = granite(draw)
    del options["mlp_bias"]
    return options | chosen(draw, "num_local_experts")


def llama4(draw: Draw) -> Options:
    options = plain(draw, "attention_bias", "use_qk_norm", "attn_temperature_tuning", head_dim=True)
    layers = options["num_hidden_layers"]
    flags = draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers))
    return options | chosen(draw, "num_local_experts") | {
        "intermediate_size_mlp": draw(INNER),
        "interleave_moe_layer_step": draw(st.integers(1, 3)),
        "no_rope_layers": flags,
        "layer_types": kinds(draw, layers, "full_attention", "chunked_attention"),
        "attention_chunk_size": draw(WINDOWS),
        "floor_scale": draw(st.integers(1, 20)),
        "attn_scale": draw(FACTORS),
    }  # fmt: skip


def minimax(draw: Draw) -> Options:
    options = plain(draw, head_dim=True)
    return options | chosen(draw, "num_local_experts") | partial(draw, options["head_dim"])


def mixtral(draw: Draw) -> Options:
    options = plain(draw, head_dim=True, sliding_window=st.none() | WINDOWS)
    return options | chosen(draw, "num_local_experts")


def phimoe(draw: Draw) -> Options:
    options = plain(draw, "attention_bias", "lm_head_bias", sliding_window=st.none() | WINDOWS)
    rope: Options = {"rope_parameters": DEFAULT_ROPE}
    if draw(st.integers(0, 3)):
        size = options["hidden_size"] // options["num_attention_heads"]
        rope = longrope(draw, size // 2, short_mscale=draw(FACTORS), long_mscale=draw(FACTORS))
    return options | rope | {
        "num_local_experts": draw(st.integers(2, 6)),
        "router_jitter_noise": draw(st.sampled_from([0.0, 0.01, 0.3])),
    }  # fmt: skip


def qwen_moe(draw: Draw, options: Options) -> Options:
    """The experts of Qwen's families."""
    dense = draw(st.lists(st.integers(0, 3), max_size=2, unique=True))
    return options | chosen(draw, "num_experts") | {
        "moe_intermediate_size": draw(INNER),
        "norm_topk_prob": draw(FLAGS),
        "decoder_sparse_step": draw(st.integers(1, 2)),
        "mlp_only_layers": dense,
    }  # fmt: skip


def qwen2_moe(draw: Draw) -> Options:
    options = qwen_moe(draw, windowed(draw, plain(draw, "qkv_bias")))
    return options | {"use_sliding_window": True, "shared_expert_intermediate_size": draw(INNER)}


def qwen3_moe(draw: Draw) -> Options:
    options = plain(draw, "attention_bias", "use_sliding_window", head_dim=True)
    return qwen_moe(draw, options | {"sliding_window": draw(WINDOWS)})


def olmoe(draw: Draw) -> Options:
    options = plain(draw, "attention_bias", "norm_topk_prob")
    return options | chosen(draw, "num_experts") | {"clip_qkv": draw(st.sampled_from([None, 0.5]))}


def hunyuan_moe(draw: Draw) -> Options:
    options = plain(draw, "attention_bias", head_dim=True)
    rope = draw(st.sampled_from([DEFAULT_ROPE, HUNYUAN_ROPE]) | ROPES)
    return options | chosen(draw, "num_experts", "moe_topk") | {"rope_parameters": rope}


EXPERTS: Families = {
    "DeepseekV2ForCausalLM": ("DeepseekV2Config", deepseek_v2),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", deepseek_v3),
    "DeepseekV32ForCausalLM": ("DeepseekV32Config", deepseek_v32),
    "Dots1ForCausalLM": ("Dots1Config", dots1),
    "Ernie4_5_MoeForCausalLM": ("Ernie4_5_MoeConfig", ernie),
    "Glm4MoeForCausalLM": ("Glm4MoeConfig", glm4_moe),
    "GptOssForCausalLM": ("GptOssConfig", gpt_oss),
    "GraniteMoeForCausalLM": ("GraniteMoeConfig", granite_moe),
    "GraniteMoeSharedForCausalLM": (
        "GraniteMoeSharedConfig",
        lambda draw: granite_moe(draw) | {"shared_intermediate_size": draw(st.integers(0, 20))},
    ),
    "HunYuanMoEV1ForCausalLM": ("HunYuanMoEV1Config", hunyuan_moe),
    "Llama4ForCausalLM": ("Llama4TextConfig", llama4),
    "MiniMaxM2ForCausalLM": ("MiniMaxM2Config", minimax),
    "MixtralForCausalLM": ("MixtralConfig", mixtral),
    "OlmoeForCausalLM": ("OlmoeConfig", olmoe),
    "PhimoeForCausalLM": ("PhimoeConfig", phimoe),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", qwen2_moe),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", qwen3_moe),
}
