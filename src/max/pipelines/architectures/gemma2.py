"""Gemma 2: norms before and after layers, soft caps, a window in every other layer."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gemma import gemma_fields
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import Fields, windows
from max.pipelines.models.weight_names import SANDWICH_NORMS, WeightNames

__all__ = ["ARCHITECTURES", "sandwich_fields"]


def sandwich_fields(keys: ConfigKeys, fields: Fields, pattern: int) -> Fields:
    """The fields with norms around attention and MLP, soft caps and windows, as Gemma 2 and 3 have them.

    Args:
        config: config.json.
        keys: Its keys.
        fields: The other fields.
        pattern: The distance of layers without a window, see `windows`.
    """
    return (
        fields
        | windows(keys, fields["num_layers"], pattern, 4096)
        | {
            "attention_multiplier": keys.number("query_pre_attn_scalar", over=0, default=256)
            ** -0.5,
            "norm_places": ("attention_input", "attention_output", "mlp_input", "mlp_output"),
            "scores_soft_cap": keys.number("attn_logit_softcapping", over=0, default=None),
            "logits_soft_cap": keys.number("final_logit_softcapping", over=0, default=None),
        }
    )


def gemma2_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Gemma 2's config."""
    return sandwich_fields(keys, gemma_fields(keys), 2)


ARCHITECTURES = [
    decoder_family(
        "Gemma2ForCausalLM",
        ["google/gemma-2-2b-it"],
        gemma2_fields,
        names=WeightNames(layer=SANDWICH_NORMS),
    )
]
"""The architectures of this module, for the registry."""
