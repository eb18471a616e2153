"""Qwen2 and Qwen2.5: queries, keys and values have biases; later layers may have a window."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import layers_of_type
from max.pipelines.models.decoder.read_config import read_decoder, with_windows

__all__ = ["ARCHITECTURES", "qwen2_decoder", "qwen2_window"]


def qwen2_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Qwen2."""
    config = read_decoder(keys).with_attention(bias=True)
    return with_windows(config, qwen2_window(keys), _full_layers(keys, config.num_layers))


def qwen2_window(keys: ConfigKeys) -> int | None:
    """The window, which counts only if a flag says so.

    Args:
        keys: The keys of config.json.
    """
    if not keys.flag("use_sliding_window"):
        return None
    return keys.integer("sliding_window", 1, LONGEST_SEQUENCE, 4096)


def _full_layers(keys: ConfigKeys, layers: int) -> frozenset[int]:
    first = min(layers, keys.integer("max_window_layers", 0, LONGEST_SEQUENCE, 28))
    return layers_of_type(keys, layers, frozenset(range(first)))


GGUF = GGUFForm("qwen2", "qwen2")

ARCHITECTURES = [
    decoder_family(
        "Qwen2ForCausalLM",
        ["Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"],
        qwen2_decoder,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
