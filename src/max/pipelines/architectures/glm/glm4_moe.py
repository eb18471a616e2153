"""GLM 4.5 and dots.1: experts in groups, chosen by sigmoids, and shared ones."""

from __future__ import annotations

from dataclasses import replace

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.models.blocks.norms import QKNorm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import layers_of_type, window
from max.pipelines.models.decoder.read_config import read_decoder, with_biases, with_windows
from max.pipelines.models.decoder.read_experts import EXPERT_NAMES, with_grouped_experts
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def glm4_moe_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A GLM 4.5."""
    config = read_decoder(keys, eps=1e-5, longest=131072, partial_rotation=0.5)
    qk_norm = QKNorm() if keys.flag("use_qk_norm") else None
    config = config.with_attention(bias=keys.flag("attention_bias"), qk_norm=qk_norm)
    return with_grouped_experts(config, keys)


def dots1_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A dots.1."""
    config = read_decoder(keys, eps=1e-6)
    layers = config.num_layers
    first = keys.integer("max_window_layers", 0, 1000, 62)
    full = frozenset(range(layers)) if keys.value("sliding_window") is None else frozenset[int]()
    full = full or frozenset(range(min(first, layers)))
    config = with_biases(config, keys).with_attention(qk_norm=QKNorm())
    config = with_grouped_experts(config, keys)
    return with_windows(config, window(keys), layers_of_type(keys, layers, full))


NAMES = WeightNames(layer=EXPERT_NAMES, stacks={"mlp.experts": "mlp.experts"})

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
    prediction_layers=True,
)
DOTS_GGUF = GGUFForm(
    "dots1", "dots1", keys=GROUPED, experts=ExpertKeys(scoring=True, shared_count=True)
)

ARCHITECTURES = [
    decoder_family(
        "Glm4MoeForCausalLM",
        ["zai-org/GLM-4.5-Air"],
        glm4_moe_decoder,
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
        dots1_decoder,
        names=NAMES,
        gguf=DOTS_GGUF,
    ),
]
"""The architectures of this module, for the registry."""
