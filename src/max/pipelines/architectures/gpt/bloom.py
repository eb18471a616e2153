"""BLOOM: ALiBi instead of a rotation, normalized embeddings."""

from __future__ import annotations

from dataclasses import replace

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gpt.gpt_names import GPT_FILE_KEYS, GPT_KEYS, MEGATRON_LAYER
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.blocks.attention import alibi_slopes
from max.pipelines.models.blocks.norms import NormForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder, with_every_bias
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def bloom_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A BLOOM."""
    names = {**GPT_KEYS, "max_position_embeddings": "seq_length", "hidden_act": ""}
    # older files have the second name
    for name, other in (("hidden_size", "n_embed"), ("n_head", "num_attention_heads")):
        key = "num_attention_heads" if name == "n_head" else name
        names[key] = name if keys.value(name) is not None else other
    config = read_decoder(keys, names, tied=True, gated=False, eps=1e-5, rotates=False)
    config = with_every_bias(config)
    config = config.with_attention(alibi_slopes=alibi_slopes(config.attention.num_attention_heads))
    config = config.with_mlp(size=4 * config.hidden_size, activation="gelu_tanh")
    normed = keys.flag("apply_residual_connection_post_layernorm")
    config = config.with_blocks(normed_residual=normed)
    norm = NormForm("layer", bias=True)
    return replace(config, embedding_norm=True, norm=norm, qkv_layout="heads")


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
    fused_projections=("qkv_proj",),
)

ARCHITECTURES = [
    decoder_family(
        "BloomForCausalLM",
        ["bigscience/bloom-560m"],
        bloom_decoder,
        names=NAMES,
        rotates=False,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
