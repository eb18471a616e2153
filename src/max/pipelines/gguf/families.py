"""The model families of GGUF files: their names in llama.cpp, and their keys in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from max._dataclass import dataclass

__all__ = ["FAMILIES", "GGUF_ARCHITECTURES", "GGUFFamily", "family_of"]

_GPT_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "intermediate_size": "n_inner",
}


@dataclass(frozen=True)
class GGUFFamily:
    """A family of models in GGUF files.

    Args:
        name: The name of the class in ``architectures`` of config.json.
        model_type: The model type in config.json.
        keys: Maps Llama's names of config.json keys to the family's names.
        constants: Keys of config.json that GGUF files omit because all models of the family have the same value.
    """

    name: str
    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)


def _llama_like(class_stem: str, model_type: str, **keys: str) -> GGUFFamily:
    return GGUFFamily(f"{class_stem}ForCausalLM", model_type, keys)


_EXPERTS = {"num_experts": "num_local_experts"}
_GROUPED = {"num_experts": "n_routed_experts"}

FAMILIES: dict[str, GGUFFamily] = {
    "llama": _llama_like("Llama", "llama"),
    "apertus": _llama_like("Apertus", "apertus"),
    "arcee": _llama_like("Arcee", "arcee"),
    "bloom": GGUFFamily(
        "BloomForCausalLM",
        "bloom",
        {**_GPT_KEYS, "hidden_size": "hidden_size", "max_position_embeddings": "seq_length"},
    ),
    "chatglm": _llama_like("Glm", "glm"),
    "cohere2": _llama_like("Cohere2", "cohere2"),
    "command-r": _llama_like("Cohere", "cohere", qk_norm="use_qk_norm"),
    "deepseek2": GGUFFamily("DeepseekV2ForCausalLM", "deepseek_v2", _GROUPED),
    "dots1": GGUFFamily("Dots1ForCausalLM", "dots1", _GROUPED),
    "ernie4_5-moe": GGUFFamily(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        {
            "attention_bias": "use_bias",
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_k",
            "n_shared_experts": "moe_num_shared_experts",
            "first_k_dense_replace": "moe_layer_start_index",
        },
    ),
    "ernie4_5": _llama_like("Ernie4_5", "ernie4_5", attention_bias="use_bias"),
    "exaone4": _llama_like("Exaone4", "exaone4"),
    "falcon-h1": _llama_like("FalconH1", "falcon_h1"),
    "falcon": GGUFFamily(
        "FalconForCausalLM",
        "falcon",
        {
            "num_key_value_heads": "num_kv_heads",
            "layer_norm_eps": "layer_norm_epsilon",
            "intermediate_size": "ffn_hidden_size",
            "attention_bias": "bias",
        },
    ),
    "gemma": _llama_like("Gemma", "gemma"),
    "gemma2": _llama_like("Gemma2", "gemma2"),
    "gemma3": _llama_like("Gemma3", "gemma3_text"),
    "gemma3n": _llama_like("Gemma3n", "gemma3n_text"),
    "gemma4": _llama_like("Gemma4", "gemma4_text", num_experts_per_tok="top_k_experts"),
    "glm4": _llama_like("Glm4", "glm4"),
    "glm4moe": GGUFFamily("Glm4MoeForCausalLM", "glm4_moe", {**_GROUPED, "qk_norm": "use_qk_norm"}),
    "gpt-oss": GGUFFamily("GptOssForCausalLM", "gpt_oss", _EXPERTS),
    "gpt2": GGUFFamily("GPT2LMHeadModel", "gpt2", _GPT_KEYS),
    "gptneox": _llama_like("GPTNeoX", "gpt_neox"),
    "granite": _llama_like("Granite", "granite", logit_scale="logits_scaling"),
    "granitemoe": GGUFFamily(
        "GraniteMoeForCausalLM",
        "granitemoe",
        {
            **_EXPERTS,
            "logit_scale": "logits_scaling",
            "shared_expert_intermediate_size": "shared_intermediate_size",
        },
    ),
    "granitehybrid": GGUFFamily(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {**_EXPERTS, "logit_scale": "logits_scaling"},
    ),
    "hunyuan-moe": GGUFFamily("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe"),
    "hunyuan-dense": _llama_like("HunYuanDenseV1", "hunyuan_v1_dense"),
    "jamba": _llama_like("Jamba", "jamba"),
    "lfm2": _llama_like("Lfm2", "lfm2"),
    "lfm2moe": _llama_like("Lfm2Moe", "lfm2_moe", first_k_dense_replace="num_dense_layers"),
    "llama4": GGUFFamily(
        "Llama4ForCausalLM",
        "llama4_text",
        {
            **_EXPERTS,
            "intermediate_size": "intermediate_size_mlp",
            "moe_intermediate_size": "intermediate_size",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
        # values that files do not state
        {
            "attention_chunk_size": 8192,
            "no_rope_layer_interval": 4,
            "attn_scale": 0.1,
            "floor_scale": 8192,
        },
    ),
    "mamba": _llama_like("Mamba", "mamba"),
    "mamba2": _llama_like("Mamba2", "mamba2"),
    "minimax-m2": GGUFFamily("MiniMaxM2ForCausalLM", "minimax_m2", _EXPERTS),
    "mistral3": _llama_like("Ministral3", "ministral3"),
    "mpt": GGUFFamily(
        "MptForCausalLM",
        "mpt",
        {
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
            "layer_norm_eps": "layer_norm_epsilon",
        },
    ),
    "nemotron_h_moe": _llama_like(
        "NemotronH",
        "nemotron_h",
        num_experts="n_routed_experts",
        shared_expert_intermediate_size="moe_shared_expert_intermediate_size",
    ),
    # listed after the form with experts, as this form is the default of the class's GGUF files
    "nemotron_h": _llama_like("NemotronH", "nemotron_h"),
    "nemotron": _llama_like("Nemotron", "nemotron", layer_norm_eps="norm_eps"),
    "olmo": _llama_like("Olmo", "olmo"),
    "olmoe": _llama_like("Olmoe", "olmoe"),
    "olmo2": _llama_like("Olmo2", "olmo2"),
    "phi2": _llama_like("Phi", "phi", qk_norm="qk_layernorm"),
    "phimoe": GGUFFamily(
        "PhimoeForCausalLM", "phimoe", {**_EXPERTS, "output_bias": "lm_head_bias"}
    ),
    "phi3": _llama_like("Phi3", "phi3"),
    "qwen2": _llama_like("Qwen2", "qwen2"),
    "qwen2moe": _llama_like("Qwen2Moe", "qwen2_moe", attention_bias="qkv_bias"),
    "qwen3moe": GGUFFamily("Qwen3MoeForCausalLM", "qwen3_moe", {}, {"norm_topk_prob": True}),
    "qwen3": _llama_like("Qwen3", "qwen3"),
    "qwen3next": GGUFFamily("Qwen3NextForCausalLM", "qwen3_next", {}, {"norm_topk_prob": True}),
    "qwen35": _llama_like("Qwen3_5", "qwen3_5_text"),
    "qwen35moe": GGUFFamily(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", {}, {"norm_topk_prob": True}
    ),
    "seed_oss": _llama_like("SeedOss", "seed_oss", attention_output_bias="attention_out_bias"),
    "smollm3": _llama_like("SmolLM3", "smollm3"),
    "stablelm": _llama_like(
        "StableLm", "stablelm", attention_bias="use_qkv_bias", qk_norm="qk_layernorm"
    ),
    "starcoder2": GGUFFamily(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {"layer_norm_eps": "norm_epsilon", "attention_bias": "use_bias"},
    ),
}
"""The families, by llama.cpp's architecture names."""

_VARIANTS = (
    ("llama", "expert_count", _llama_like("Mixtral", "mixtral", **_EXPERTS)),
    ("llama", "attention.sliding_window_pattern", _llama_like("Ministral", "ministral")),
    ("llama", "attention.sliding_window", _llama_like("Mistral", "mistral")),
    ("olmo2", "attention.sliding_window", _llama_like("Olmo3", "olmo3")),
)
"""Families that share an architecture name, and the metadata key that distinguishes them; the first match applies.
"""


def family_of(name: str, metadata: Mapping[str, object]) -> GGUFFamily | None:
    """The family of a file; None if its architecture is not supported.

    Args:
        name: llama.cpp's name of the architecture.
        metadata: The file's metadata.
    """
    for variant_of, key, family in _VARIANTS:
        # files of dense models may state 0 experts
        value = metadata.get(f"{name}.{key}", 0)
        if variant_of == name and not (isinstance(value, int) and value == 0):
            return family
    return FAMILIES.get(name)


GGUF_ARCHITECTURES = frozenset(
    {family.name for family in (*FAMILIES.values(), *(family for _, _, family in _VARIANTS))}
    # variants of granitemoe and deepseek2
    | {"GraniteMoeSharedForCausalLM", "DeepseekV3ForCausalLM"}
)
"""The classes of all models that GGUF files may contain."""
