"""SmolLM 3: every fourth layer is not rotated."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import layers_of_type, unrotated_layers, window
from max.pipelines.models.decoder.read_config import read_decoder, with_biases, with_windows

__all__ = ["ARCHITECTURES"]


def smollm3_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A SmolLM 3."""
    config = read_decoder(keys, tied=True, eps=1e-6, longest=32768, theta=2e6)
    layers = config.num_layers
    full = layers_of_type(keys, layers, frozenset(range(layers)))
    size = window(keys) if keys.flag("use_sliding_window") else None
    config = with_biases(config, keys, mlp="mlp_bias")
    config = config.with_attention(unrotated_layers(keys, layers), rope=None)
    return with_windows(config, size, full)


GGUF = GGUFForm("smollm3", "smollm3", permuted=True)

ARCHITECTURES = [
    decoder_family("SmolLM3ForCausalLM", ["HuggingFaceTB/SmolLM3-3B"], smollm3_decoder, gguf=GGUF)
]
"""The architectures of this module, for the registry."""
