"""Reads latent attention from a config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.nn.layers.scaled_rotary import yarn_magnitude
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.blocks.latent_attention import LatentForm
from max.pipelines.models.blocks.rope import RopeConfig
from max.pipelines.models.blocks.sparse_latent_attention import IndexForm, SparseLatentForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import LARGEST_SIZE
from max.pipelines.models.decoder.read_config import read_decoder

__all__ = ["dense_layers_of", "read_latent_decoder", "with_indexer"]

_MOST_SELECTED = 1 << 16
"""The largest ``index_topk``; kernels keep the candidates in scratch memory of fixed size."""


def read_latent_decoder(keys: ConfigKeys, **defaults: Any) -> DecoderConfig:
    """A decoder of blocks of latent attention and an MLP.

    Args:
        keys: The keys of config.json.
        defaults: Arguments of `read_decoder`.

    Raises:
        ModelFilesError: A value is missing, or does not fit.
    """
    # the sizes of heads have keys of their own
    config = read_decoder(keys, rotates=False, head_dim=2, **defaults)

    def size(key: str, default: int | None) -> Any:
        return keys.integer(key, 1, LARGEST_SIZE, default)

    form = LatentForm(
        config.attention.num_attention_heads,
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
    # YaRN's `mscale_all_dim` scales queries and keys, so its square scales the scores
    scale, weight = form.head_dim**-0.5, rope.parameters["mscale_all_dim"]
    if rope.kind != "default" and weight:
        scale *= yarn_magnitude(rope.parameters["factor"], weight) ** 2
    interleaved = keys.flag("rope_interleave", True)
    return config.with_blocks(mixer=replace(form, rope=rope, scale=scale, interleaved=interleaved))


def with_indexer(config: DecoderConfig, keys: ConfigKeys) -> DecoderConfig:
    """A decoder whose latent attention sees the tokens that an indexer selects, as in DeepSeek V3.2.

    Args:
        config: The decoder with latent attention.
        keys: The keys of config.json, with checks.

    Raises:
        ModelFilesError: A value is missing, or does not fit.
    """
    latent, count = config.first_form(LatentForm), config.num_layers
    assert latent is not None
    if latent.query_rank is None:
        raise keys.error("q_lora_rank", "an integer: the indexer reads the latents of queries")
    if not latent.interleaved:
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
    # the rotated part of an index key is as long as that of a key
    if index.dim < latent.rotated_dim:
        raise keys.error(
            "index_head_dim", f"qk_rope_head_dim or more, which is {latent.rotated_dim}"
        )
    return config.with_blocks(mixer=SparseLatentForm(**vars(latent), index=index))


def dense_layers_of(keys: ConfigKeys, count: int) -> frozenset[int] | None:
    """The layers without experts that ``mlp_layer_types`` lists; None if the key is missing.

    Args:
        keys: The keys of config.json.
        count: The number of layers.

    Raises:
        ModelFilesError: The list has other types, or another length.
    """
    kinds = _layers_of(keys, "mlp_layer_types", ("dense", "sparse"), count)
    if not kinds:
        raise keys.error("mlp_layer_types", f"{count} times dense or sparse")
    # without a list the first layers are dense, by their number
    if keys.value("mlp_layer_types") is None:
        return None
    return frozenset(index for index, kind in enumerate(kinds) if kind == "dense")


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
