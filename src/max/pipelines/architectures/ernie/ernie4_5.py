"""ERNIE 4.5: a Llama whose rotated pairs are adjacent."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder, with_biases

__all__ = ["ARCHITECTURES", "ernie_decoder"]


def ernie_decoder(keys: ConfigKeys) -> DecoderConfig:
    """An ERNIE 4.5."""
    config = read_decoder(keys, tied=True, eps=1e-5, longest=131072, theta=500000.0)
    config = with_biases(config, keys, "use_bias", mlp="use_bias")
    return config.with_attention(interleaved=True)


GGUF = GGUFForm("ernie4_5", "ernie4_5", keys={"attention_bias": "use_bias"})

ARCHITECTURES = [
    decoder_family("Ernie4_5ForCausalLM", ["baidu/ERNIE-4.5-0.3B-PT"], ernie_decoder, gguf=GGUF)
]
"""The architectures of this module, for the registry."""
