"""Reads latent attention from a config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import LARGEST_SIZE, Fields, base_fields
from max.pipelines.models.experts import Experts
from max.pipelines.models.latent_attention import IndexForm, LatentForm
from max.pipelines.models.rope import RopeConfig, yarn_magnitude

__all__ = ["indexed_fields", "latent_fields"]

_MOST_SELECTED = 1 << 16
"""The largest ``index_topk``; kernels keep the candidates in scratch memory of fixed size."""


def latent_fields(keys: ConfigKeys, **defaults: Any) -> Fields:
    """The fields of families with latent attention: the shared ones, and the sizes.

    Args:
        keys: The keys of config.json.
        defaults: Arguments of `base_fields`.

    Raises:
        ModelFilesError: A value is missing, or does not fit.
    """
    # the sizes of heads have keys of their own
    fields = base_fields(keys, rotates=False, head_dim=2, **defaults)

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
    rope = replace(RopeConfig.from_keys(keys), rotated_dim=form.rotated_dim)
    head_dim = form.plain_dim + form.rotated_dim
    # YaRN's `mscale_all_dim` scales queries and keys, so its square scales the scores
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


def indexed_fields(fields: Fields, keys: ConfigKeys) -> Fields:
    """The fields of DeepSeek V3.2: those of V3, and an indexer in each layer.

    Args:
        fields: The fields of `latent_fields`, and the experts.
        keys: The keys of config.json, with checks.

    Raises:
        ModelFilesError: A value is missing, or does not fit.
    """
    latent, experts, count = fields["latent"], fields["experts"], fields["num_layers"]
    assert isinstance(latent, LatentForm) and isinstance(experts, Experts)
    if latent.query_rank is None:
        raise keys.error("q_lora_rank", "an integer: the indexer reads the latents of queries")
    if not fields["interleaved_rope"]:
        raise keys.error("rope_interleave", "true: only index keys are rotated by halves")
    if not _layers_of(
        keys, "layer_types", ("indexed_attention", "deepseek_sparse_attention"), count
    ):
        raise keys.error("layer_types", f"{count} times indexed_attention")
    index = IndexForm(
        keys.integer("index_n_heads", 1, LARGEST_SIZE, 64),
        keys.integer("index_head_dim", 1, LARGEST_SIZE, 128),
        keys.integer("index_topk", 1, _MOST_SELECTED, 2048),
    )
    if index.dim < latent.rotated_dim:
        raise keys.error(
            "index_head_dim", f"qk_rope_head_dim or more, which is {latent.rotated_dim}"
        )
    kinds = _layers_of(keys, "mlp_layer_types", ("dense", "sparse"), count)
    if not kinds:
        raise keys.error("mlp_layer_types", f"{count} times dense or sparse")
    if keys.value("mlp_layer_types") is not None:
        dense = frozenset(index for index, kind in enumerate(kinds) if kind == "dense")
        experts = replace(experts, dense_layers=dense)
    return fields | {"latent": replace(latent, index=index), "experts": experts}


def _layers_of(keys: ConfigKeys, key: str, kinds: tuple[str, ...], count: int) -> list[str]:
    """The kind of each layer in a list of config.json; all `kinds[0]` without a list; empty if the list does not
    fit.
    """
    stated_kinds = keys.value(key)
    if stated_kinds is None:
        return [kinds[0]] * count
    is_valid = (
        isinstance(stated_kinds, list)
        and len(stated_kinds) == count
        and {*map(str, stated_kinds)} <= {*kinds}
    )
    return [str(kind) for kind in stated_kinds] if is_valid else []
