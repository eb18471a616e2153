"""Gemma 3 (text): QK norm, and a rotation of their own in layers with a window."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gemma.gemma import read_gemma
from max.pipelines.architectures.gemma.gemma2 import check_divisor, score_divisor, with_sandwich
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.norms import NormForm, QKNorm
from max.pipelines.models.blocks.rope import RopeConfig, rotation_keys
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.weight_names import SANDWICH_NORMS, WeightNames

__all__ = ["ARCHITECTURES"]


def gemma3_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Gemma 3."""
    config = read_gemma(keys, theta=1e6, rope_section="full_attention")
    if keys.flag("use_bidirectional_attention"):
        raise keys.error(
            "use_bidirectional_attention", "false: a decoder's tokens see earlier ones"
        )
    local = RopeConfig(theta=keys.number("rope_local_base_freq", over=0, default=10000.0))
    sections = rotation_keys(keys)
    if sections is not None and sections.object("sliding_attention") is not None:
        local = RopeConfig.from_keys(keys, section="sliding_attention")
    config = with_sandwich(keys, config, 6).with_attention(qk_norm=QKNorm(NormForm(offset=1.0)))
    forms = enumerate(config.every(AttentionForm))
    windowed = [index for index, form in forms if form.window is not None]
    return config.with_attention(windowed, rope=local)


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
        gemma3_decoder,
        names=WeightNames(layer=SANDWICH_NORMS),
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
