"""What hypothesis draws for the families of dense decoders."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.architectures.drawn_parts import (
    ACTIVATIONS,
    DEFAULT_ROPE,
    EPSILONS,
    FACTORS,
    FLAGS,
    PLAIN_ACTIVATIONS,
    ROPES,
    WINDOWS,
    Draw,
    Families,
    Options,
    divisor,
    longrope,
    partial,
    plain,
    rotations_of_kinds,
    sizes,
    windowed,
)
from tests.architectures.families import LONGEST


def gemma2(draw: Draw) -> Options:
    options = windowed(draw, sizes(draw, head_dim=True))
    cap = st.sampled_from([None, 1.5, 30.0])
    return options | {
        "query_pre_attn_scalar": draw(st.integers(1, 20)),
        "attn_logit_softcapping": draw(cap),
        "final_logit_softcapping": draw(cap),
        "attention_bias": draw(FLAGS),
        "rms_norm_eps": draw(EPSILONS),
        "hidden_activation": draw(ACTIVATIONS),
    }


def gemma3(draw: Draw) -> Options:
    return gemma2(draw) | {"attn_logit_softcapping": None} | rotations_of_kinds(draw)


def per_layer(draw: Draw) -> Options:
    """What Gemma 3n and 4 have in common; the last layers share keys and values of layers of their kind before them."""
    options = windowed(draw, sizes(draw, head_dim=True)) | {
        "rms_norm_eps": draw(EPSILONS),
        "hidden_activation": draw(ACTIVATIONS),
        "attention_bias": draw(FLAGS),
        "hidden_size_per_layer_input": draw(st.integers(1, 8)),
        "vocab_size_per_layer_input": 61,
    }
    shared = draw(st.integers(0, 3))
    own = options["layer_types"]
    repeated = [draw(st.sampled_from(sorted({*own}))) for _ in range(shared)]
    return options | {
        "num_kv_shared_layers": shared,
        "layer_types": [*own, *repeated],
        "num_hidden_layers": len(own) + shared,
    }


def gemma3n(draw: Draw) -> Options:
    options = per_layer(draw)
    count, inputs = options["num_hidden_layers"], draw(st.integers(2, 5))

    def of_layers(values: st.SearchStrategy[object]) -> object:
        return draw(st.lists(values, min_size=count, max_size=count))

    return options | {
        **rotations_of_kinds(draw),
        "intermediate_size": of_layers(st.integers(1, 30)),
        "activation_sparsity_pattern": of_layers(st.sampled_from([0.0, 0.3, 0.9])),
        "altup_num_inputs": inputs,
        "altup_active_idx": draw(st.integers(0, inputs - 1)),
        "altup_correct_scale": draw(FLAGS),
        "laurel_rank": draw(st.integers(1, 6)),
        "final_logit_softcapping": draw(st.sampled_from([1.5, 30.0])),
    }


def gemma4(draw: Draw) -> Options:
    options = per_layer(draw)
    # transformers makes the last layer one without a window; those that share need one of each kind
    types = options["layer_types"][:-1] + ["full_attention"]
    shared = options["num_kv_shared_layers"]
    own = types[: len(types) - shared]
    if not {*types[len(own) :]} <= {*own}:
        shared = 0
    proportional = {
        "rope_type": "proportional",
        "rope_theta": 37.0,
        "partial_rotary_factor": draw(st.sampled_from([0.25, 0.5, 1.0])),
    }
    options |= {
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "intermediate_size": draw(st.integers(1, 30)),
        "use_double_wide_mlp": draw(FLAGS),
        # transformers cannot share keys without vectors of layers
        "hidden_size_per_layer_input": draw(st.sampled_from([5] if shared else [0, 5])),
        "global_head_dim": 4 * draw(st.integers(1, 4)),
        "final_logit_softcapping": draw(st.sampled_from([None, 1.5, 30.0])),
        "attention_k_eq_v": draw(FLAGS),
    }  # fmt: skip
    options |= rotations_of_kinds(draw)
    if draw(FLAGS):
        options["rope_parameters"]["full_attention"] = proportional
    if options["attention_k_eq_v"]:
        options["num_global_key_value_heads"] = divisor(draw, options["num_attention_heads"])
    if draw(FLAGS):
        count = draw(st.integers(1, 5))
        options |= {
            "enable_moe_block": True,
            "num_experts": count,
            "top_k_experts": draw(st.integers(1, count)),
            "moe_intermediate_size": draw(st.integers(1, 12)),
        }
    return options


def phi3(draw: Draw) -> Options:
    options = sizes(draw, step=4)
    size = options["hidden_size"] // options["num_attention_heads"]
    if draw(FLAGS):
        share = draw(st.sampled_from([0.5, 1.0]))
        rope = longrope(draw, int(size * share) // 2, partial_rotary_factor=share)
    else:
        rope = {"rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5}}
    return options | rope | {
        "sliding_window": draw(st.none() | WINDOWS),
        "rms_norm_eps": draw(EPSILONS),
        "hidden_act": draw(ACTIVATIONS),
    }  # fmt: skip


def phi(draw: Draw) -> Options:
    options = plain(draw, "qk_layernorm", eps="layer_norm_eps")
    size = options["hidden_size"] // options["num_attention_heads"]
    return options | partial(draw, size) | {"hidden_act": draw(PLAIN_ACTIVATIONS)}


def stablelm(draw: Draw) -> Options:
    options = sizes(draw)
    size = options["hidden_size"] // options["num_attention_heads"]
    return options | {
        **partial(draw, size),
        "layer_norm_eps": draw(EPSILONS),
        "hidden_act": draw(ACTIVATIONS),
        **{f: draw(FLAGS) for f in ("use_qkv_bias", "qk_layernorm", "use_parallel_residual")},
    }


def granite(draw: Draw) -> Options:
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier")
    factors = {name: FACTORS for name in (*names, "logits_scaling")}
    return plain(draw, "attention_bias", "mlp_bias", **factors)


def glm(draw: Draw) -> Options:
    options = plain(draw, "attention_bias", head_dim=True)
    return options | partial(draw, options["head_dim"])


def helium(draw: Draw) -> Options:
    options = sizes(draw) | {"attention_bias": draw(FLAGS), "mlp_bias": draw(FLAGS)}
    return options | {"head_dim": options["hidden_size"] // options["num_attention_heads"]}


def nemotron(draw: Draw) -> Options:
    options = plain(draw, "attention_bias", "mlp_bias", head_dim=True, eps="norm_eps")
    return options | partial(draw, options["head_dim"]) | {"hidden_act": draw(PLAIN_ACTIVATIONS)}


def olmo3(draw: Draw) -> Options:
    return windowed(draw, plain(draw, "attention_bias")) | rotations_of_kinds(draw)


def smollm3(draw: Draw) -> Options:
    options = windowed(draw, plain(draw, "attention_bias", "mlp_bias"))
    rotated = draw(st.lists(st.integers(0, 1), min_size=4, max_size=4))
    return options | {
        "use_sliding_window": True,
        "no_rope_layers": rotated[: options["num_hidden_layers"]],
    }


def starcoder2(draw: Draw) -> Options:
    return sizes(draw) | {
        "use_bias": draw(FLAGS),
        "sliding_window": draw(st.none() | WINDOWS),
        "rope_parameters": draw(ROPES),
        "norm_epsilon": draw(EPSILONS),
        "hidden_act": draw(PLAIN_ACTIVATIONS),
    }


def gpt(draw: Draw, *, step: int = 1) -> Options:
    """The sizes of GPT-2 and GPT-J; heads of any size."""
    heads = draw(st.integers(1, 6))
    return {
        "n_head": heads,
        "n_embd": heads * step * draw(st.integers(2, 9)),
        "n_layer": draw(st.integers(1, 4)),
        "n_positions": LONGEST,
        "n_inner": draw(st.none() | st.integers(1, 40)),
        "layer_norm_epsilon": draw(EPSILONS),
        "activation_function": draw(PLAIN_ACTIVATIONS),
        "tie_word_embeddings": draw(FLAGS),
    }


def gpt2(draw: Draw) -> Options:
    flags = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")
    return gpt(draw) | {flag: draw(FLAGS) for flag in flags}


def gpt_bigcode(draw: Draw) -> Options:
    flags = ("multi_query", "scale_attn_weights")
    return gpt(draw) | {flag: draw(FLAGS) for flag in flags}


def gptj(draw: Draw) -> Options:
    options = gpt(draw, step=2)
    size = options["n_embd"] // options["n_head"]
    return options | {
        "rotary_dim": 2 * draw(st.integers(1, size // 2)),
        "tie_word_embeddings": False,
    }


def gpt_neox(draw: Draw) -> Options:
    options = sizes(draw, grouped=False)
    del options["num_key_value_heads"]
    size = options["hidden_size"] // options["num_attention_heads"]
    return options | partial(draw, size) | {
        "attention_bias": draw(FLAGS),
        "use_parallel_residual": draw(FLAGS),
        "layer_norm_eps": draw(EPSILONS),
        "hidden_act": draw(PLAIN_ACTIVATIONS),
    }  # fmt: skip


def opt(draw: Draw) -> Options:
    heads, before = draw(st.integers(1, 6)), draw(FLAGS)
    hidden = heads * draw(st.integers(2, 9))
    return {
        "num_attention_heads": heads,
        "hidden_size": hidden,
        "word_embed_proj_dim": draw(st.just(hidden) | st.integers(2, 20)),
        "ffn_dim": draw(st.integers(1, 40)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "max_position_embeddings": LONGEST,
        "init_std": 0.25,
        "do_layer_norm_before": before,
        "enable_bias": draw(FLAGS),
        "layer_norm_elementwise_affine": draw(FLAGS),
        "activation_function": draw(PLAIN_ACTIVATIONS),
        "tie_word_embeddings": draw(FLAGS),
    }


def falcon(draw: Draw) -> Options:
    heads, grouped = draw(st.integers(1, 6)), draw(FLAGS)
    size = 2 * draw(st.integers(2, 6))
    options: Options = {
        "num_attention_heads": heads,
        "hidden_size": heads * size,
        "ffn_hidden_size": draw(st.integers(1, 50)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "max_position_embeddings": LONGEST,
        "layer_norm_epsilon": draw(EPSILONS),
        "activation": draw(PLAIN_ACTIVATIONS),
        "new_decoder_architecture": grouped,
        **{key: draw(FLAGS) for key in ("multi_query", "bias", "alibi", "tie_word_embeddings")},
        "parallel_attn": grouped or draw(FLAGS),
    }
    if grouped:
        options |= {
            "num_kv_heads": divisor(draw, heads),
            "num_ln_in_parallel_attn": draw(st.sampled_from([None, 1, 2])),
        }
    return options if options["alibi"] else options | {"rope_parameters": draw(ROPES)}


def bloom(draw: Draw) -> Options:
    heads = draw(st.integers(1, 7))
    return {
        "n_head": heads,
        "hidden_size": heads * draw(st.integers(2, 9)),
        "n_layer": draw(st.integers(1, 4)),
        "seq_length": LONGEST,
        "layer_norm_epsilon": draw(EPSILONS),
        "apply_residual_connection_post_layernorm": draw(FLAGS),
        "tie_word_embeddings": draw(FLAGS),
    }


def mpt(draw: Draw) -> Options:
    heads = draw(st.integers(1, 7))
    return {
        "n_heads": heads,
        "d_model": heads * draw(st.integers(2, 9)),
        "n_layers": draw(st.integers(1, 4)),
        "max_seq_len": LONGEST,
        "layer_norm_epsilon": draw(EPSILONS),
        "expansion_ratio": draw(st.integers(1, 5)),
        "attn_config": {
            "clip_qkv": draw(st.none() | st.floats(0.2, 2.0)),
            "softmax_scale": draw(st.none() | FACTORS),
            # transformers ignores alibi_bias_max
        },
        "tie_word_embeddings": draw(FLAGS),
    }


def ministral(draw: Draw) -> Options:
    return windowed(draw, plain(draw, head_dim=True))


def ministral3(draw: Draw) -> Options:
    options = plain(draw, head_dim=True, sliding_window=st.none() | WINDOWS)
    rope = {"original_max_position_embeddings": 16, **options["rope_parameters"]}
    return options | {
        "rope_parameters": {**rope, "llama_4_scaling_beta": draw(st.sampled_from([0.0, 0.6]))}
    }


DENSE: Families = {
    "ApertusForCausalLM": (
        "ApertusConfig",
        lambda draw: (
            plain(draw, "attention_bias")
            | {"hidden_act": draw(st.just("xielu") | PLAIN_ACTIVATIONS)}
        ),
    ),
    "ArceeForCausalLM": (
        "ArceeConfig",
        lambda draw: (
            plain(draw, "attention_bias", "mlp_bias", head_dim=True)
            | {"hidden_act": draw(PLAIN_ACTIVATIONS)}
        ),
    ),
    "BloomForCausalLM": ("BloomConfig", bloom),
    "CohereForCausalLM": (
        "CohereConfig",
        lambda draw: plain(
            draw,
            "attention_bias",
            "use_qk_norm",
            eps="layer_norm_eps",
            logit_scale=st.floats(0.1, 2),
        ),
    ),
    "Cohere2ForCausalLM": (
        "Cohere2Config",
        lambda draw: windowed(
            draw, plain(draw, "attention_bias", eps="layer_norm_eps", logit_scale=st.floats(0.1, 2))
        ),
    ),
    "Ernie4_5ForCausalLM": (
        "Ernie4_5Config",
        lambda draw: plain(draw, "use_bias", head_dim=True),
    ),
    "Exaone4ForCausalLM": (
        "Exaone4Config",
        lambda draw: windowed(draw, plain(draw, head_dim=True)),
    ),
    "FalconForCausalLM": ("FalconConfig", falcon),
    "GemmaForCausalLM": (
        "GemmaConfig",
        lambda draw: plain(draw, "attention_bias", head_dim=True),
    ),
    "Gemma2ForCausalLM": ("Gemma2Config", gemma2),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", gemma3),
    "Gemma3nForCausalLM": ("Gemma3nTextConfig", gemma3n),
    "Gemma4ForCausalLM": ("Gemma4TextConfig", gemma4),
    "GlmForCausalLM": ("GlmConfig", glm),
    "Glm4ForCausalLM": ("Glm4Config", glm),
    "GPT2LMHeadModel": ("GPT2Config", gpt2),
    "GPTBigCodeForCausalLM": ("GPTBigCodeConfig", gpt_bigcode),
    "GPTJForCausalLM": ("GPTJConfig", gptj),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", gpt_neox),
    "GraniteForCausalLM": ("GraniteConfig", granite),
    "HeliumForCausalLM": ("HeliumConfig", helium),
    "HunYuanDenseV1ForCausalLM": (
        "HunYuanDenseV1Config",
        lambda draw: plain(draw, "attention_bias", head_dim=True),
    ),
    "LlamaForCausalLM": (
        "LlamaConfig",
        lambda draw: plain(draw, "attention_bias", "mlp_bias", head_dim=True),
    ),
    "CwmForCausalLM": ("CwmConfig", ministral),
    "MinistralForCausalLM": ("MinistralConfig", ministral),
    "Ministral3ForCausalLM": ("Ministral3Config", ministral3),
    "MistralForCausalLM": (
        "MistralConfig",
        lambda draw: plain(draw, head_dim=True, sliding_window=st.none() | WINDOWS),
    ),
    "MptForCausalLM": ("MptConfig", mpt),
    "NemotronForCausalLM": ("NemotronConfig", nemotron),
    "OlmoForCausalLM": (
        "OlmoConfig",
        lambda draw: plain(draw, "attention_bias", clip_qkv=st.sampled_from([None, 0.5])),
    ),
    "Olmo2ForCausalLM": ("Olmo2Config", lambda draw: plain(draw, "attention_bias")),
    "Olmo3ForCausalLM": ("Olmo3Config", olmo3),
    "OPTForCausalLM": ("OPTConfig", opt),
    "PhiForCausalLM": ("PhiConfig", phi),
    "Phi3ForCausalLM": ("Phi3Config", phi3),
    "Qwen2ForCausalLM": (
        "Qwen2Config",
        lambda draw: windowed(draw, plain(draw)) | {"use_sliding_window": True},
    ),
    "Qwen3ForCausalLM": (
        "Qwen3Config",
        lambda draw: (
            windowed(draw, plain(draw, "attention_bias", head_dim=True))
            | {"use_sliding_window": True}
        ),
    ),
    "SeedOssForCausalLM": (
        "SeedOssConfig",
        lambda draw: plain(draw, "attention_bias", "attention_out_bias", "mlp_bias", head_dim=True),
    ),
    "SmolLM3ForCausalLM": ("SmolLM3Config", smollm3),
    "StableLmForCausalLM": ("StableLmConfig", stablelm),
    "Starcoder2ForCausalLM": ("Starcoder2Config", starcoder2),
}
