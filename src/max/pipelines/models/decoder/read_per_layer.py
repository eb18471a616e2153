"""Reads what Gemma 3n and 4 share from a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.models.blocks.norms import QKNorm
from max.pipelines.models.blocks.per_layer import PerLayerInputs
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE, RopeConfig, rotation_keys
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import periodic_windows
from max.pipelines.models.decoder.read_config import read_decoder, with_biases, with_windows

__all__ = ["PER_LAYER_NAMES", "PER_LAYER_TOP", "read_per_layer_decoder", "with_full_heads"]

PER_LAYER_TOP = {
    name: f"per_layer.{name}"
    for name in (
        "embed_tokens_per_layer",
        "per_layer_model_projection",
        "per_layer_projection_norm",
    )
}
"""Names outside of layers in checkpoints, and the decoder's names."""

PER_LAYER_NAMES = {
    name: f"gate.{name}"
    for name in ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
}
"""Parts of names within a layer in checkpoints, and the decoder's parts."""


def read_per_layer_decoder(
    keys: ConfigKeys, pattern: int, num_shared: int, ends_full: bool = False
) -> DecoderConfig:
    """The shared shape: norms around each layer, windows with their own rotation, per-layer vectors, shared keys.

    The caller reads the inner size of the MLPs.

    Args:
        keys: The keys of config.json.
        pattern: The distance between layers without a window if the file has no ``layer_types``.
        num_shared: The number of layers that share keys and values if the file states none.
        ends_full: Whether the last layer has no window, whatever the file states.
        ends_full: Whether the last layer has no window, whatever the file states.

    Raises:
        ModelFilesError: A value is missing, or does not fit.
    """
    if keys.value("use_bidirectional_attention") not in (None, False, "vision"):
        raise keys.error("use_bidirectional_attention", "null: a decoder's tokens see earlier ones")
    # sizes may differ by layer: families read them
    names = {"hidden_act": "hidden_activation", "intermediate_size": ""}
    config = read_decoder(
        keys,
        names,
        head_dim=256,
        tied=True,
        activation="gelu_pytorch_tanh",
        eps=1e-6,
        longest=32768,
        rotates=False,
    )
    layers = config.num_layers
    config = with_biases(config, keys)
    window, full = _windows(keys, layers, pattern, ends_full)
    num_shared = keys.integer("num_kv_shared_layers", 0, layers, num_shared)
    own = range(layers - num_shared)
    # a layer that shares takes the keys of an earlier layer of its kind
    for kind, kinds in (("full", full), ("sliding", {*range(layers)} - full)):
        if not kinds.isdisjoint(range(layers - num_shared, layers)) and kinds.isdisjoint(own):
            raise keys.error(
                "num_kv_shared_layers", f"a layer of {kind}_attention before those that share"
            )
    size = keys.integer("hidden_size_per_layer_input", 0, LONGEST_SEQUENCE, 256)
    rows = keys.integer("vocab_size_per_layer_input", 1, LONGEST_SEQUENCE, 262144)
    head_dim = config.attention.head_dim
    rope = _rope(keys, head_dim, "full", "rope_theta", 1e6)
    local_rope = _rope(keys, head_dim, "sliding", "rope_local_base_freq", 1e4)
    config = config.with_attention(rope=rope, scale=1.0, qk_norm=QKNorm(), value_norm=True)
    config = with_windows(config, window, full, rope=local_rope)
    for index in range(layers - num_shared, layers):
        # the last earlier layer of the same kind, with or without a window
        source = max(i for i in own if (i in full) is (index in full))
        config = config.with_attention([index], shared_with=source)
    config = config.with_blocks(
        norms=("attention_input", "attention_output", "mlp_input", "mlp_output")
    )
    return replace(
        config,
        embedding_multiplier=config.hidden_size**0.5,
        rounds_multiplier=True,
        per_layer_inputs=PerLayerInputs(size, rows) if size else None,
        logits_soft_cap=keys.number("final_logit_softcapping", over=0, default=None),
    )


def _windows(
    keys: ConfigKeys, layers: int, pattern: int, ends_full: bool
) -> tuple[int | None, frozenset[int]]:
    """The window, and the layers without one."""
    window, full = periodic_windows(keys, layers, pattern, 512)
    return window, full | {layers - 1} if ends_full else full


def with_full_heads(
    config: DecoderConfig, keys: ConfigKeys, ends_full: bool = False
) -> DecoderConfig:
    """A decoder whose layers without a window may have heads of another shape (Gemma 4).

    Files state ``global_head_dim`` and ``num_global_key_value_heads``; later versions of transformers write
    ``per_layer_config``: the differing values, by layer index.

    Args:
        config: The decoder of equal heads.
        keys: The keys of config.json.
        ends_full: As for `read_per_layer_decoder`.

    Raises:
        ModelFilesError: A value does not fit, or layers of one kind differ from each other.
    """
    attention, layers = config.attention, config.num_layers
    full = _windows(keys, layers, 6, ends_full)[1]
    shape = attention.num_key_value_heads, attention.head_dim
    as_values, stated = keys.flag("attention_k_eq_v"), keys.value("per_layer_config")
    if stated is None and keys.states("per_layer_config"):
        # an explicit null: all layers have equal heads
        own = shape
    elif stated is None:
        heads = keys.integer("num_global_key_value_heads", 1, LONGEST_SEQUENCE, shape[0])
        dim = keys.integer("global_head_dim", 2, LONGEST_SEQUENCE, 512)
        own = (heads if as_values else shape[0], dim)
    else:
        stated = _by_index(keys, stated, layers)
        shapes = [_heads(keys, stated.get(index, {}), index, shape) for index in range(layers)]
        own = next((shapes[index] for index in sorted(full)), shape)
        if any(one != (own if index in full else shape) for index, one in enumerate(shapes)):
            raise keys.error("per_layer_config", "equal heads in all layers of a kind")
    if attention.num_attention_heads % own[0]:
        raise keys.error(
            "num_global_key_value_heads",
            f"a divisor of the {attention.num_attention_heads} query heads",
        )
    return config.with_attention(
        full, num_key_value_heads=own[0], head_dim=own[1], keys_as_values=as_values
    )


def _by_index(keys: ConfigKeys, value: object, num_layers: int) -> dict[int, Any]:
    """The objects of ``per_layer_config`` by layer index; transformers pads the indices with zeros (``05``)."""
    layers = value.to_dict() if isinstance(value, HuggingFaceConfig) else value
    by_index: dict[int, Any] = {}
    if isinstance(layers, Mapping):
        by_index = {int(key): layer for key, layer in layers.items() if str(key).isdecimal()}
    fits = isinstance(layers, Mapping) and len(by_index) == len(layers)
    if not fits or not {*by_index} <= {*range(num_layers)}:
        raise keys.error("per_layer_config", f"objects by layers' indices, 0 to {num_layers - 1}")
    return by_index


def _heads(keys: ConfigKeys, layer: object, index: int, shape: tuple[int, int]) -> tuple[int, int]:
    """The number of KV heads of a layer, and the size of a head."""
    if not isinstance(layer, Mapping) or not {*layer} <= {"head_dim", "num_key_value_heads"}:
        raise keys.error("per_layer_config", "head_dim and num_key_value_heads by layers' indices")
    own = ConfigKeys(layer, f"per_layer_config.{index}")
    return (
        own.integer("num_key_value_heads", 1, LONGEST_SEQUENCE, shape[0]),
        own.integer("head_dim", 2, LONGEST_SEQUENCE, shape[1]),
    )


def _rope(keys: ConfigKeys, head_dim: int, attention: str, key: str, theta: float) -> RopeConfig:
    """The rotation of one kind of layers."""
    sections, section = rotation_keys(keys), f"{attention}_attention"
    if sections is not None and sections.object(section) is not None:
        return RopeConfig.from_keys(keys, section=section, theta=theta)
    return RopeConfig(theta=keys.number(key, over=0, default=theta))
