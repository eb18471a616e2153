"""OPT: learned positions, norms before layers or after the sums."""

from __future__ import annotations

from dataclasses import replace

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.blocks.norms import NormForm
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder, with_biases
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


_KEYS = {
    "intermediate_size": "ffn_dim",
    "rms_norm_eps": "",
    "hidden_act": "activation_function",
    "head_dim": "",
}


def opt_decoder(keys: ConfigKeys) -> DecoderConfig:
    """An OPT."""
    config = read_decoder(
        keys, _KEYS, tied=True, gated=False, activation="relu", eps=1e-5, rotates=False
    )
    before = keys.flag("do_layer_norm_before", True)
    affine = keys.flag("layer_norm_elementwise_affine", True)
    width = keys.integer("word_embed_proj_dim", 1, LONGEST_SEQUENCE, config.hidden_size)
    config = with_biases(config, keys, "enable_bias", mlp="enable_bias", default=True)
    config = config.with_blocks(
        norms=("attention_input", "mlp_input") if before else ("attention_sum", "mlp_sum")
    )
    return replace(
        config,
        # the first two rows are for padding
        learned_positions=config.max_position_embeddings + 2,
        first_position=2,
        embedding_size=None if width == config.hidden_size else width,
        norm=NormForm("layer", weight=affine, bias=affine),
        final_norm=before and not keys.flag("_remove_final_layer_norm"),
    )


NAMES = WeightNames(
    layers="decoder.layers.",
    top={"decoder.final_layer_norm": "norm", "decoder": ""},
    layer={
        "self_attn.out_proj": "self_attn.o_proj",
        "self_attn_layer_norm": "input_layernorm",
        "final_layer_norm": "post_attention_layernorm",
        "fc1": "mlp.up_proj",
        "fc2": "mlp.down_proj",
    },
)

ARCHITECTURES = [
    decoder_family("OPTForCausalLM", ["facebook/opt-125m"], opt_decoder, names=NAMES, rotates=False)
]
"""The architectures of this module, for the registry."""
