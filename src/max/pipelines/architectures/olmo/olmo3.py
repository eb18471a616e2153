"""OLMo 3: OLMo 2 with windows; only layers without a window use the scaled rotation."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.olmo.olmo2 import olmo2_decoder
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.models.blocks.rope import RopeConfig, rotation_keys
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import periodic_windows
from max.pipelines.models.decoder.read_config import with_windows
from max.pipelines.models.decoder.weight_names import OUTPUT_NORMS, WeightNames

__all__ = ["ARCHITECTURES"]


def olmo3_decoder(keys: ConfigKeys) -> DecoderConfig:
    """An OLMo 3."""
    config = olmo2_decoder(keys, theta=500000.0, rope_section="full_attention")
    local = RopeConfig(theta=config.ropes[0].theta)
    sections = rotation_keys(keys)
    if sections is not None and sections.object("sliding_attention") is not None:
        local = RopeConfig.from_keys(keys, section="sliding_attention", theta=local.theta)
    window, full = periodic_windows(keys, config.num_layers, 4, 4096)
    return with_windows(config, window, full, rope=local)


def _read(metadata: Metadata) -> dict[str, Any]:
    """Layers with a window do not scale their rotation."""
    theta = metadata.rotation()["rope_theta"]
    return {"rope_parameters": metadata.local_rotation(theta)}


GGUF = GGUFForm(
    "olmo2",
    "olmo3",
    marks={"attention.sliding_window": None},
    read=_read,
    window_period=4,
    states_windows=True,
)

ARCHITECTURES = [
    decoder_family(
        "Olmo3ForCausalLM",
        ["allenai/Olmo-3-7B-Instruct"],
        olmo3_decoder,
        names=WeightNames(layer=OUTPUT_NORMS),
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
