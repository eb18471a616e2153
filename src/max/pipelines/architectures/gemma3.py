"""Gemma 3 (text): QK norm, and a rotation of their own in layers with a window."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gemma import gemma_fields
from max.pipelines.architectures.gemma2 import check_divisor, sandwich_fields, score_divisor
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields
from max.pipelines.models.norms import NormForm, QKNorm
from max.pipelines.models.rope import RopeConfig, rotation_keys
from max.pipelines.models.weight_names import SANDWICH_NORMS, WeightNames

__all__ = ["ARCHITECTURES"]


def gemma3_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Gemma 3's config."""
    fields = gemma_fields(keys, theta=1e6, rope_section="full_attention")
    if keys.flag("use_bidirectional_attention"):
        raise keys.error(
            "use_bidirectional_attention", "false: a decoder's tokens see earlier ones"
        )
    local = RopeConfig(theta=keys.number("rope_local_base_freq", over=0, default=10000.0))
    sections = rotation_keys(keys)
    if sections is not None and sections.object("sliding_attention") is not None:
        local = RopeConfig.from_keys(keys, section="sliding_attention")
    return sandwich_fields(keys, fields, 6) | {
        "local_rope": local,
        "qk_norm": QKNorm(NormForm(offset=1.0)),
    }


GGUF = GGUFForm(
    "gemma3",
    "gemma3_text",
    window_period=6,
    read=lambda metadata: score_divisor(metadata, 62),
    write=lambda config: check_divisor(config, "gemma3", 62),
)

ARCHITECTURES = [
    decoder_family(
        "Gemma3ForCausalLM",
        ["google/gemma-3-1b-it"],
        gemma3_fields,
        names=WeightNames(layer=SANDWICH_NORMS),
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
