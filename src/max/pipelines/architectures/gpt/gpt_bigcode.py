"""GPT BigCode: GPT-2 with one key and value head for all queries; StarCoder, SantaCoder and Granite Code use it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gpt.gpt2 import NAMES as GPT2_NAMES
from max.pipelines.architectures.gpt.gpt2 import read_gpt2
from max.pipelines.architectures.gpt.gpt_names import GPT_FILE_KEYS
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.models.decoder.config import DecoderConfig

__all__ = ["ARCHITECTURES"]


def gpt_bigcode_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A GPT BigCode."""
    config = read_gpt2(keys, "gelu_pytorch_tanh")
    shared = keys.flag("multi_query", True)
    config = config.with_attention(
        num_key_value_heads=1 if shared else config.attention.num_attention_heads
    )
    return replace(config, qkv_layout="rows" if shared else "heads")


NAMES = replace(GPT2_NAMES, transposed_weights=())


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
