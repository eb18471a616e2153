"""Phi 1, 1.5 and 2: attention and MLP in parallel, partly rotated heads, biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.blocks.norms import NormForm, QKNorm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder, with_every_bias
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def phi_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Phi."""
    names = {"rms_norm_eps": "layer_norm_eps"}
    config = read_decoder(
        keys, names, gated=False, activation="gelu_new", eps=1e-5, partial_rotation=0.5
    )
    norm = NormForm("layer", bias=True)
    qk_norm = QKNorm(norm) if keys.flag("qk_layernorm") else None
    config = with_every_bias(config).with_attention(qk_norm=qk_norm)
    config = config.with_blocks(norms=("attention_input",), parallel=True)
    return replace(config, norm=norm, output_bias=True)


NAMES = WeightNames(
    top={"final_layernorm": "norm"},
    layer={
        "self_attn.dense": "self_attn.o_proj",
        "self_attn.q_layernorm": "self_attn.q_norm",
        "self_attn.k_layernorm": "self_attn.k_norm",
        "mlp.fc1": "mlp.up_proj",
        "mlp.fc2": "mlp.down_proj",
    },
)

GGUF = GGUFForm("phi2", "phi", keys={"qk_norm": "qk_layernorm"}, fused_projections=("qkv_proj",))

ARCHITECTURES = [
    decoder_family("PhiForCausalLM", ["microsoft/phi-2"], phi_decoder, names=NAMES, gguf=GGUF)
]
"""The architectures of this module, for the registry."""
