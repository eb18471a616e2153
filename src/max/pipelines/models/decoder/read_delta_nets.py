"""Reads the gated delta nets of a family from a config.json."""

from __future__ import annotations

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.blocks.delta_net import DeltaNetForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import attention_layers

__all__ = ["STORED_PARTS", "with_delta_nets"]

STORED_PARTS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "mixer.in_proj_qkv",
    # files of earlier versions
    "ssm_in": "mixer.in_proj_qkvz",
}
"""GGUF names within a layer that differ from those of other families, and the decoder's names."""

_MOST = 2**16


def with_delta_nets(
    config: DecoderConfig, keys: ConfigKeys, fused: bool, gguf_tiled: bool = False
) -> DecoderConfig:
    """A decoder with delta nets in some layers.

    Args:
        config: The decoder with attention in all layers.
        keys: The keys of config.json.
        fused: As in `DeltaNetForm`.
        gguf_tiled: As in `DeltaNetForm`.

    Raises:
        ModelFilesError: A value does not fit.
    """
    # of the convolution, too
    keys.choice("hidden_act", ("silu", "swish"), "silu")
    attention_interval = keys.integer("full_attention_interval", 1, _MOST, 4)
    default = [
        "linear_attention" if (index + 1) % attention_interval else "full_attention"
        for index in range(config.num_layers)
    ]
    heads = keys.integer("linear_num_value_heads", 1, _MOST, 32)
    key_heads = keys.integer("linear_num_key_heads", 1, _MOST, 16)
    if heads % key_heads:
        raise keys.error(
            "linear_num_key_heads", f"a divisor of linear_num_value_heads, which is {heads}"
        )
    attends = attention_layers(keys, default, "linear_attention")
    form = DeltaNetForm(
        heads,
        key_heads,
        keys.integer("linear_key_head_dim", 1, 512, 128),
        keys.integer("linear_value_head_dim", 1, _MOST, 128),
        keys.integer("linear_conv_kernel_dim", 2, 64, 4),
        fused,
        gguf_tiled=gguf_tiled,
    )
    return config.with_recurrence(form, attends)
