"""OLMo 3: OLMo 2 with windows; only layers without a window use the scaled rotation."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.olmo2 import olmo2_fields
from max.pipelines.checkpoints.config_keys import ConfigKeys
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


ARCHITECTURES = [
    decoder_family(
        "Olmo3ForCausalLM",
        ["allenai/Olmo-3-7B-Instruct"],
        olmo3_fields,
        names=WeightNames(layer=OUTPUT_NORMS),
    )
]
"""The architectures of this module, for the registry."""
