"""ERNIE 4.5: a Llama whose rotated pairs are adjacent."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields, biases

__all__ = ["ARCHITECTURES", "ernie_fields"]


def ernie_fields(keys: ConfigKeys) -> Fields:
    """The fields of an ERNIE 4.5's config."""
    fields = base_fields(keys, tied=True, eps=1e-5, longest=131072, theta=500000.0)
    return fields | biases(keys, "use_bias", mlp="use_bias") | {"interleaved_rope": True}


GGUF = GGUFForm("ernie4_5", "ernie4_5", keys={"attention_bias": "use_bias"})

ARCHITECTURES = [
    decoder_family("Ernie4_5ForCausalLM", ["baidu/ERNIE-4.5-0.3B-PT"], ernie_fields, gguf=GGUF)
]
"""The architectures of this module, for the registry."""
