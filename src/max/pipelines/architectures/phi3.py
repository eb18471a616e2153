"""Phi 3, 3.5 and 4: fused projections, LongRoPE, windows."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields, window

__all__ = ["ARCHITECTURES"]


def phi3_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Phi 3's config."""
    return base_fields(keys, eps=1e-5, longest=4096, partial_rotation=1.0) | {
        "sliding_window": window(keys)
    }


GGUF = GGUFForm(
    "phi3", "phi3", layer={"ffn_up": "mlp.gate_up_proj"}, fused=("qkv_proj", "gate_up_proj")
)

ARCHITECTURES = [
    decoder_family(
        "Phi3ForCausalLM",
        ["microsoft/Phi-3-mini-4k-instruct", "microsoft/Phi-3.5-mini-instruct", "microsoft/phi-4"],
        phi3_fields,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
