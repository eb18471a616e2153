"""GPT-2: learned positions, layer norms, transposed and fused projections."""

from __future__ import annotations

from dataclasses import replace

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gpt.gpt_names import GPT_FILE_KEYS, GPT_KEYS
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.blocks.norms import NormForm
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder, with_every_bias
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES", "NAMES", "read_gpt2"]


def read_gpt2(keys: ConfigKeys, activation: str) -> DecoderConfig:
    """What the models of GPT-2's keys have in common.

    Args:
        keys: The values of config.json.
        activation: The activation where the file names none.
    """
    config = read_decoder(
        keys,
        GPT_KEYS,
        tied=True,
        gated=False,
        activation=activation,
        eps=1e-5,
        longest=1024,
        rotates=False,
    )
    hidden = config.hidden_size
    config = with_every_bias(config)
    config = config.with_mlp(size=keys.integer("n_inner", 1, LONGEST_SEQUENCE, 4 * hidden))
    scale = config.attention.score_factor if keys.flag("scale_attn_weights", True) else 1.0
    config = config.with_attention(scale=scale)
    positions = config.max_position_embeddings
    return replace(config, learned_positions=positions, norm=NormForm("layer", bias=True))


def gpt2_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A GPT-2."""
    config = read_gpt2(keys, "gelu_new")
    scale = config.attention.score_factor
    if keys.flag("scale_attn_by_inverse_layer_idx"):
        for index in range(config.num_layers):
            config = config.with_attention([index], scale=scale / (index + 1))
    return config


NAMES = WeightNames(
    prefix="transformer.",
    layers="h.",
    top={"wte": "embed_tokens", "wpe": "embed_positions", "ln_f": "norm"},
    layer={
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.c_attn": "self_attn.qkv_proj",
        "attn.c_proj": "self_attn.o_proj",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    },
    transposed_weights=("proj.weight",),
    unused_buffers=(".attn.bias", ".attn.masked_bias"),
)

GGUF = GGUFForm("gpt2", "gpt2", keys=GPT_FILE_KEYS, fused_projections=("qkv_proj",))

ARCHITECTURES = [
    decoder_family(
        "GPT2LMHeadModel",
        ["openai-community/gpt2"],
        gpt2_decoder,
        names=NAMES,
        rotates=False,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
