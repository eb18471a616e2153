"""Reads latent attention from a config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import LARGEST_SIZE, Fields, base_fields
from max.pipelines.models.latent_attention import LatentForm
from max.pipelines.models.rope import RopeConfig, yarn_magnitude

__all__ = ["latent_fields"]


def latent_fields(config: Any, keys: ConfigKeys, **defaults: Any) -> Fields:
    """The fields of families with latent attention: those that all families have, and the sizes.

    Args:
        config: The keys of config.json as attributes.
        keys: The same keys, with checks.
        defaults: Arguments of `base_fields`.

    Raises:
        ModelFilesError: A value is missing, or does not fit.
    """
    fields = base_fields(config, keys, rotates=False, **defaults)

    def size(key: str, default: int | None) -> Any:
        return keys.integer(key, 1, LARGEST_SIZE, default)

    form = LatentForm(
        size("kv_lora_rank", 512),
        size("q_lora_rank", None),
        size("qk_nope_head_dim", 128),
        size("qk_rope_head_dim", 64),
        size("v_head_dim", 128),
        keys.flag("attention_bias"),
    )
    if form.rotated_dim % 2:
        raise keys.error("qk_rope_head_dim", "an even number, as halves are rotated")
    rope = replace(RopeConfig.from_huggingface(config), rotated_dim=form.rotated_dim)
    head_dim = form.plain_dim + form.rotated_dim
    # a scaled rotation corrects queries and keys
    scale, weight = head_dim**-0.5, rope.parameters["mscale_all_dim"]
    if rope.kind != "default" and weight:
        scale *= yarn_magnitude(rope.parameters["factor"], weight) ** 2
    return fields | {
        "head_dim": head_dim,
        "num_kv_heads": fields["num_heads"],
        "attention_multiplier": scale,
        "interleaved_rope": keys.flag("rope_interleave", True),
        "latent": form,
        "rope": rope,
    }
