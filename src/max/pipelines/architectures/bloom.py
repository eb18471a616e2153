"""BLOOM: ALiBi instead of a rotation, normalised embeddings."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gpt_names import GPT_FILE_KEYS, GPT_KEYS, MEGATRON_LAYER
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.alibi import alibi_slopes
from max.pipelines.models.config_fields import EVERY_BIAS, Fields, base_fields
from max.pipelines.models.norms import NormForm
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def bloom_fields(keys: ConfigKeys) -> Fields:
    """The fields of a BLOOM's config."""
    names = {**GPT_KEYS, "max_position_embeddings": "seq_length", "hidden_act": ""}
    # older files have the second name
    for name, other in (("hidden_size", "n_embed"), ("n_head", "num_attention_heads")):
        key = "num_attention_heads" if name == "n_head" else name
        names[key] = name if keys.value(name) is not None else other
    fields = base_fields(
        keys,
        names,
        tied=True,
        gated=False,
        eps=1e-5,
        rotates=False,
    )
    return fields | {
        "intermediate_size": 4 * fields["hidden_size"],
        "activation": "gelu_tanh",
        "alibi_slopes": alibi_slopes(fields["num_heads"]),
        "embedding_norm": True,
        "norm": NormForm("layer", bias=True),
        "normed_residual": keys.flag("apply_residual_connection_post_layernorm"),
        "qkv_layout": "heads",
        **EVERY_BIAS,
    }


NAMES = WeightNames(
    prefix="transformer.",
    layers="h.",
    top={
        "word_embeddings": "embed_tokens",
        "word_embeddings_layernorm": "embed_norm",
        "ln_f": "norm",
    },
    layer=MEGATRON_LAYER,
)

GGUF = GGUFForm(
    "bloom",
    "bloom",
    keys={**GPT_FILE_KEYS, "hidden_size": "hidden_size", "max_position_embeddings": "seq_length"},
    fused=("qkv_proj",),
)

ARCHITECTURES = [
    decoder_family(
        "BloomForCausalLM",
        ["bigscience/bloom-560m"],
        bloom_fields,
        names=NAMES,
        rotates=False,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
