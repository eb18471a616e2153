"""GPT BigCode: GPT-2 with one key and value head for all queries; StarCoder, SantaCoder and Granite Code use it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gpt.gpt_names import GPT_FILE_KEYS, GPT_KEYS
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.models.blocks.norms import NormForm
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder, with_every_bias
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def gpt_bigcode_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A GPT BigCode."""
    config = read_decoder(
        keys,
        GPT_KEYS,
        tied=True,
        gated=False,
        activation="gelu_pytorch_tanh",
        eps=1e-5,
        longest=1024,
        rotates=False,
    )
    shared = keys.flag("multi_query", True)
    config = with_every_bias(config)
    hidden, heads = config.hidden_size, config.attention.heads
    config = config.with_mlp(size=keys.integer("n_inner", 1, LONGEST_SEQUENCE, 4 * hidden))
    config = config.with_attention(
        kv_heads=1 if shared else heads,
        scale=config.attention.score_factor if keys.flag("scale_attn_weights", True) else 1.0,
    )
    return replace(
        config,
        learned_positions=config.max_position_embeddings,
        norm=NormForm("layer", bias=True),
        qkv_layout="rows" if shared else "heads",
    )


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
    unused_buffers=(".attn.bias", ".attn.masked_bias"),
)


def _read(metadata: Metadata) -> dict[str, Any]:
    """Files state the number of key heads instead of the flag."""
    return {"multi_query": metadata.config.get("num_key_value_heads") == 1}


GGUF = GGUFForm(
    "starcoder", "gpt_bigcode", keys=GPT_FILE_KEYS, read=_read, fused_projections=("qkv_proj",)
)

ARCHITECTURES = [
    decoder_family(
        "GPTBigCodeForCausalLM",
        ["bigcode/starcoder"],
        gpt_bigcode_decoder,
        names=NAMES,
        rotates=False,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
