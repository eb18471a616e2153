"""LFM 2: gated short convolutions and attention."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.models.blocks.causal_conv import conv_taps
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.blocks.norms import QKNorm
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.blocks.short_conv import ShortConvForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import attention_layers
from max.pipelines.models.decoder.read_config import read_decoder
from max.pipelines.models.decoder.read_state_space import GGUF_MIXER_FORMS
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES", "LAYER_NAMES", "STORED_FORMS", "lfm2_decoder"]


def lfm2_decoder(keys: ConfigKeys) -> DecoderConfig:
    """An LFM 2: blocks of short convolutions and of attention."""
    # earlier files have other names
    names = {"hidden_act": "", "rms_norm_eps": "norm_eps"}
    names |= {"intermediate_size": "block_ff_dim"} if keys.value("block_ff_dim") else {}
    tied = keys.flag("tie_embedding", True)
    config = read_decoder(keys, names, tied=tied, eps=1e-5, longest=128000, theta=1e6)
    layers, full = config.num_layers, keys.value("full_attn_idxs")
    default = ["full_attention" if full is None or i in full else "conv" for i in range(layers)]
    taps, bias = keys.integer("conv_L_cache", 2, 64, 3), keys.flag("conv_bias")
    attends = attention_layers(keys, default, "conv")
    config = config.with_recurrence(ShortConvForm(config.hidden_size, taps, bias), attends)
    return config.with_attention(qk_norm=QKNorm())


def lfm2_dense_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A dense LFM 2: the MLP's inner size is adjusted."""
    config = lfm2_decoder(keys)
    mlp = config.first_form(MLPForm)
    if mlp is None or not keys.flag("block_auto_adjust_ff_dim", True):
        return config
    multiple = keys.integer("block_multiple_of", 1, LONGEST_SEQUENCE, 256)
    factor = keys.number("block_ffn_dim_multiplier", over=0, default=1.0)
    # two thirds, as a gated MLP has three matrices instead of two
    size = int(factor * int(2 * mlp.size / 3))
    return config.with_mlp(size=-(-size // multiple) * multiple)


LAYER_NAMES = {
    "conv": "mixer",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
STORED_FORMS = {"mixer.conv.weight": conv_taps}
"""The stored form of convolutions, their names in GGUF files, and the GGUF name of the last norm."""

NAMES = WeightNames(top={"embedding_norm": "norm"}, layer=LAYER_NAMES, conversions=STORED_FORMS)

EXAMPLES = ["LiquidAI/LFM2-350M"]


def read_conv_layers(metadata: Metadata) -> dict[str, Any]:
    """The kinds of layers in a GGUF file, and the convolutions.

    Args:
        metadata: The file's metadata.
    """
    return {
        "layer_types": metadata.layer_types("full_attention", "conv"),
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "conv_bias": metadata.has("shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": metadata.rms_epsilon(),
        "use_expert_bias": metadata.has("exp_probs_b.bias"),
        "norm_topk_prob": True,
        "tie_embedding": "output.weight" not in metadata.file.tensors,
    }


GGUF = GGUFForm(
    "lfm2",
    "lfm2",
    hybrid=True,
    read=read_conv_layers,
    top={"token_embd_norm": "norm"},
    layer={f"shortconv.{x}": f"mixer.{x}" for x in ("conv", "in_proj", "out_proj")},
    conversions=GGUF_MIXER_FORMS,
)

ARCHITECTURES = [
    decoder_family("Lfm2ForCausalLM", EXAMPLES, lfm2_dense_decoder, names=NAMES, gguf=GGUF)
]
"""The architectures of this module, for the registry."""
