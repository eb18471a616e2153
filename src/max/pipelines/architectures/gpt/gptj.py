"""GPT-J: attention and MLP in parallel, partly rotated heads with adjacent pairs."""

from __future__ import annotations

from dataclasses import replace

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gpt.gpt_names import GPT_KEYS
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.blocks.norms import NormForm
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE, RopeConfig
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def gptj_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A GPT-J."""
    config = read_decoder(
        keys, GPT_KEYS, gated=False, activation="gelu_new", eps=1e-5, longest=2048
    )
    size = config.attention.head_dim
    rotated = keys.integer("rotary_dim", 2, size, size)
    config = config.with_attention(rope=RopeConfig(rotated_dim=rotated), interleaved=True)
    inner = keys.integer("n_inner", 1, LONGEST_SEQUENCE, 4 * config.hidden_size)
    config = config.with_mlp(size=inner, bias=True)
    config = config.with_blocks(norms=("attention_input",), parallel=True)
    return replace(config, norm=NormForm("layer", bias=True), output_bias=True)


NAMES = WeightNames(
    prefix="transformer.",
    layers="h.",
    top={"wte": "embed_tokens", "ln_f": "norm"},
    layer={
        "ln_1": "input_layernorm",
        "attn.out_proj": "self_attn.o_proj",
        "attn": "self_attn",
        "mlp.fc_in": "mlp.up_proj",
        "mlp.fc_out": "mlp.down_proj",
    },
    unused_buffers=(".attn.bias", ".attn.masked_bias", "attn.embed_positions"),
)

ARCHITECTURES = [
    decoder_family("GPTJForCausalLM", ["EleutherAI/gpt-j-6b"], gptj_decoder, names=NAMES)
]
"""The architectures of this module, for the registry."""
