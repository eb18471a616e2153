"""OLMo 3: OLMo 2 with windows; only layers without a window use the scaled rotation."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.olmo2 import olmo2_fields
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.models.config_fields import Fields, windows
from max.pipelines.models.rope import RopeConfig, rotation_keys
from max.pipelines.models.weight_names import OUTPUT_NORMS, WeightNames

__all__ = ["ARCHITECTURES"]


def olmo3_fields(keys: ConfigKeys) -> Fields:
    """The fields of an OLMo 3's config."""
    fields = olmo2_fields(keys, theta=500000.0, rope_section="full_attention")
    local = RopeConfig(theta=fields["rope"].theta)
    sections = rotation_keys(keys)
    if sections is not None and sections.object("sliding_attention") is not None:
        local = RopeConfig.from_keys(keys, section="sliding_attention", theta=local.theta)
    return fields | windows(keys, fields["num_layers"], 4, 4096) | {"local_rope": local}


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
        olmo3_fields,
        names=WeightNames(layer=OUTPUT_NORMS),
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
