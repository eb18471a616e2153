"""CWM: a Llama in which three of four layers have a window."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import Fields, base_fields, layers_of_type, window

__all__ = ["ARCHITECTURES"]


def cwm_fields(keys: ConfigKeys) -> Fields:
    """The fields of a CWM's config."""
    fields = base_fields(keys, eps=1e-5, longest=131072, theta=1e6)
    layers = fields["num_layers"]
    full = layers_of_type(keys, layers, frozenset(range(0, layers, 4)))
    return fields | {
        "mlp_bias": keys.flag("mlp_bias"),
        "sliding_window": window(keys),
        "full_attention_layers": full,
    }


ARCHITECTURES = [decoder_family("CwmForCausalLM", ["facebook/cwm"], cwm_fields)]
"""The architectures of this module, for the registry."""
