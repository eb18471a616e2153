"""CWM: a Llama in which three of four layers have a window."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import layers_of_type, window
from max.pipelines.models.decoder.read_config import read_decoder, with_windows

__all__ = ["ARCHITECTURES"]


def cwm_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A CWM."""
    config = read_decoder(keys, eps=1e-5, longest=131072, theta=1e6)
    layers = config.num_layers
    full = layers_of_type(keys, layers, frozenset(range(0, layers, 4)))
    return with_windows(config, window(keys), full).with_mlp(bias=keys.flag("mlp_bias"))


ARCHITECTURES = [decoder_family("CwmForCausalLM", ["facebook/cwm"], cwm_decoder)]
"""The architectures of this module, for the registry."""
