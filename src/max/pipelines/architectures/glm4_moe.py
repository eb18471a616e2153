"""GLM 4.5 and dots.1: experts in groups, chosen by sigmoids, and shared ones."""

from __future__ import annotations

from dataclasses import replace

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields, biases, layers_of_type, window
from max.pipelines.models.expert_fields import EXPERT_NAMES, grouped_experts_of_layers
from max.pipelines.models.norms import QKNorm
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def glm4_moe_fields(keys: ConfigKeys) -> Fields:
    """The fields of a GLM 4.5's config."""
    fields = base_fields(keys, eps=1e-5, longest=131072, partial_rotation=0.5)
    return fields | {
        "attention_bias": keys.flag("attention_bias"),
        "qk_norm": QKNorm() if keys.flag("use_qk_norm") else None,
        "experts": grouped_experts_of_layers(keys, fields["num_layers"]),
    }


def dots1_fields(keys: ConfigKeys) -> Fields:
    """The fields of a dots.1's config."""
    fields = base_fields(keys, eps=1e-6)
    layers = fields["num_layers"]
    first = keys.integer("max_window_layers", 0, 1000, 62)
    full = frozenset(range(layers)) if keys.value("sliding_window") is None else frozenset[int]()
    full = full or frozenset(range(min(first, layers)))
    return (
        fields
        | biases(keys)
        | {
            "qk_norm": QKNorm(),
            "experts": grouped_experts_of_layers(keys, layers),
            "sliding_window": window(keys),
            "full_attention_layers": layers_of_type(keys, layers, full),
        }
    )


NAMES = WeightNames(layer=EXPERT_NAMES, stacked={"mlp.experts": "mlp.experts"})

SARVAM_TOP = {"word_embeddings": "embed_tokens"}
SARVAM_LAYER = {
    "attention.query_key_value": "self_attn.qkv_proj",
    "attention.dense": "self_attn.o_proj",
    "attention.query_layernorm": "self_attn.q_norm",
    "attention.key_layernorm": "self_attn.k_norm",
    "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
}
"""The names of weights in files of the type ``sarvam_moe``, also in those of transformers."""

GROUPED = {"num_experts": "n_routed_experts"}
GLM_GGUF = GGUFForm(
    "glm4moe",
    "glm4_moe",
    keys={**GROUPED, "qk_norm": "use_qk_norm"},
    layer={"post_attention_norm": "post_attention_layernorm"},
    experts=ExpertKeys(scoring=True, shared_count=True),
)
DOTS_GGUF = GGUFForm(
    "dots1", "dots1", keys=GROUPED, experts=ExpertKeys(scoring=True, shared_count=True)
)

ARCHITECTURES = [
    decoder_family(
        "Glm4MoeForCausalLM",
        ["zai-org/GLM-4.5-Air"],
        glm4_moe_fields,
        names=replace(
            NAMES,
            top=SARVAM_TOP,
            layer={**EXPERT_NAMES, **SARVAM_LAYER},
        ),
        gguf=GLM_GGUF,
    ),
    decoder_family(
        "Dots1ForCausalLM",
        ["rednote-hilab/dots.llm1.inst"],
        dots1_fields,
        names=NAMES,
        gguf=DOTS_GGUF,
    ),
]
"""The architectures of this module, for the registry."""
