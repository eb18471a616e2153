"""Phi 3, 3.5 and 4: fused projections, LongRoPE, windows."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import window
from max.pipelines.models.decoder.read_config import read_decoder, with_windows

__all__ = ["ARCHITECTURES"]


def phi3_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Phi 3."""
    config = read_decoder(keys, eps=1e-5, longest=4096, partial_rotation=1.0)
    return with_windows(config, window(keys))


GGUF = GGUFForm(
    "phi3",
    "phi3",
    layer={"ffn_up": "mlp.gate_up_proj"},
    fused_projections=("qkv_proj", "gate_up_proj"),
)

ARCHITECTURES = [
    decoder_family(
        "Phi3ForCausalLM",
        ["microsoft/Phi-3-mini-4k-instruct", "microsoft/Phi-3.5-mini-instruct", "microsoft/phi-4"],
        phi3_decoder,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
