"""MPT: ALiBi, layer norms without a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gpt.gpt_names import GPT_KEYS
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.models.blocks.attention import alibi_slopes
from max.pipelines.models.blocks.norms import NormForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


_KEYS = {
    **GPT_KEYS,
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
    "hidden_act": "",
    "head_dim": "",
}


def mpt_decoder(keys: ConfigKeys) -> DecoderConfig:
    """An MPT."""
    config = read_decoder(
        keys, _KEYS, tied=True, gated=False, activation="gelu", eps=1e-5, rotates=False
    )
    attention = keys.object("attn_config") or ConfigKeys({})
    if not attention.flag("alibi", True):
        raise attention.error("alibi", "true: learned positions of MPT are not supported")
    for name in ("prefix_lm", "qk_ln"):
        if attention.flag(name):
            raise attention.error(name, "false: it is not supported")
    if not keys.flag("no_bias", True):
        raise keys.error("no_bias", "true: biases of MPT are not supported")
    largest = attention.number("alibi_bias_max", over=0, default=8)
    config = config.with_attention(
        alibi_slopes=alibi_slopes(config.attention.num_attention_heads, largest, interleaved=True),
        clip=attention.number("clip_qkv", over=0, default=None),
        scale=attention.number("softmax_scale", over=0, default=None),
    )
    config = config.with_mlp(size=4 * config.hidden_size, activation="gelu")
    return replace(config, norm=NormForm("layer"))


NAMES = WeightNames(
    prefix="transformer.",
    layers="blocks.",
    top={"wte": "embed_tokens", "norm_f": "norm"},
    layer={
        "norm_1": "input_layernorm",
        "norm_2": "post_attention_layernorm",
        "attn.Wqkv": "self_attn.qkv_proj",
        "attn.out_proj": "self_attn.o_proj",
        "ffn": "mlp",
    },
)


def _read(metadata: Metadata) -> dict[str, Any]:
    """The keys of the attention stand in an object."""
    largest = metadata.greatest_number("attention.max_alibi_bias", 8.0)
    clip = metadata.config.get("clip_qkv")
    return {"attn_config": {"alibi": largest > 0, "alibi_bias_max": largest, "clip_qkv": clip}}


GGUF = GGUFForm(
    "mpt",
    "mpt",
    keys={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
        "layer_norm_eps": "layer_norm_epsilon",
    },
    read=_read,
    write=lambda config: {"attention.max_alibi_bias": 8.0},
    fused_projections=("qkv_proj",),
)

ARCHITECTURES = [
    # the name in the model's own files; GGUF files are read under the other one
    decoder_family(
        "MPTForCausalLM",
        ["mosaicml/mpt-7b"],
        mpt_decoder,
        names=NAMES,
        rotates=False,
        gguf=replace(GGUF, reads=False),
    ),
    decoder_family(
        "MptForCausalLM", ["mosaicml/mpt-7b"], mpt_decoder, names=NAMES, rotates=False, gguf=GGUF
    ),
]
"""The architectures of this module, for the registry."""
