"""Reads the fields that Gemma 3n and 4 share from a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.models.config_fields import Fields, base_fields, biases, windows
from max.pipelines.models.norms import QKNorm
from max.pipelines.models.per_layer import PerLayerInputs
from max.pipelines.models.rope import LONGEST_SEQUENCE, RopeConfig, rotation_keys

__all__ = ["PER_LAYER_NAMES", "PER_LAYER_TOP", "full_heads", "per_layer_fields"]

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


def per_layer_fields(
    keys: ConfigKeys, pattern: int, shared: int, ends_full: bool = False
) -> Fields:
    """The shared fields: norms around each layer, windows with their own rotation, per-layer vectors, shared keys.

    The caller reads the inner size of the MLPs.

    Args:
        keys: The keys of config.json.
        pattern: The distance between layers without a window if the file has no ``layer_types``.
        shared: The number of layers that share keys and values if the file states none.
        ends_full: Whether the last layer has no window, whatever the file states.

    Raises:
        ModelFilesError: A value is missing, or does not fit.
    """
    if keys.value("use_bidirectional_attention") not in (None, False, "vision"):
        raise keys.error("use_bidirectional_attention", "null: a decoder's tokens see earlier ones")
    names = {"hidden_act": "hidden_activation", "intermediate_size": ""}
    fields = base_fields(
        keys,
        names,
        head_dim=256,
        tied=True,
        activation="gelu_pytorch_tanh",
        eps=1e-6,
        longest=32768,
        rotates=False,
    )
    layers = fields["num_layers"]
    fields |= biases(keys) | windows(keys, layers, pattern, 512)
    if ends_full:
        fields["full_attention_layers"] |= {layers - 1}
    full = fields["full_attention_layers"]
    shared = keys.integer("num_kv_shared_layers", 0, layers, shared)
    own = range(layers - shared)
    for kind, kinds in (("full", full), ("sliding", {*range(layers)} - full)):
        if not kinds.isdisjoint(range(layers - shared, layers)) and kinds.isdisjoint(own):
            raise keys.error(
                "num_kv_shared_layers", f"a layer of {kind}_attention before those that share"
            )
    size = keys.integer("hidden_size_per_layer_input", 0, LONGEST_SEQUENCE, 256)
    rows = keys.integer("vocab_size_per_layer_input", 1, LONGEST_SEQUENCE, 262144)
    return fields | {
        "rope": _rope(keys, fields["head_dim"], "full", "rope_theta", 1e6),
        "local_rope": _rope(keys, fields["head_dim"], "sliding", "rope_local_base_freq", 1e4),
        "embedding_multiplier": fields["hidden_size"] ** 0.5,
        "rounds_multiplier": True,
        "norm_places": ("attention_input", "attention_output", "mlp_input", "mlp_output"),
        "attention_multiplier": 1.0,
        "attention_output_bias": fields["attention_bias"],
        "qk_norm": QKNorm(),
        "value_norm": True,
        "shared_kv_layers": shared,
        "per_layer_inputs": PerLayerInputs(size, rows) if size else None,
        "logits_soft_cap": keys.number("final_logit_softcapping", over=0, default=None),
    }


def full_heads(keys: ConfigKeys, fields: Fields) -> Fields:
    """The fields with the head shape of layers without a window, which may differ (Gemma 4).

    Files state ``global_head_dim`` and ``num_global_key_value_heads``; later versions of transformers write
    ``per_layer_config``: the differing values, by layer index.

    Args:
        keys: The keys of config.json.
        fields: The other fields.

    Raises:
        ModelFilesError: A value does not fit, or layers of one kind differ from each other.
    """
    full, shape = fields["full_attention_layers"], (fields["num_kv_heads"], fields["head_dim"])
    as_values, stated = keys.flag("attention_k_eq_v"), keys.value("per_layer_config")
    if stated is None and keys.states("per_layer_config"):
        own = shape
    elif stated is None:
        heads = keys.integer("num_global_key_value_heads", 1, LONGEST_SEQUENCE, shape[0])
        dim = keys.integer("global_head_dim", 2, LONGEST_SEQUENCE, 512)
        own = (heads if as_values else shape[0], dim)
    else:
        stated = _by_index(keys, stated, fields["num_layers"])
        shapes = [
            _heads(keys, stated.get(index, {}), index, shape)
            for index in range(fields["num_layers"])
        ]
        own = next((shapes[index] for index in sorted(full)), shape)
        if any(one != (own if index in full else shape) for index, one in enumerate(shapes)):
            raise keys.error("per_layer_config", "equal heads in all layers of a kind")
    if fields["num_heads"] % own[0]:
        raise keys.error(
            "num_global_key_value_heads", f"a divisor of the {fields['num_heads']} query heads"
        )
    return fields | {"full_attention_heads": own, "keys_as_values": as_values}


def _by_index(keys: ConfigKeys, stated: object, num_layers: int) -> dict[int, Any]:
    """The objects of ``per_layer_config`` by layer index; transformers pads the indices with zeros (``05``)."""
    layers = stated.to_dict() if isinstance(stated, HuggingFaceConfig) else stated
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


def _rope(keys: ConfigKeys, head_dim: int, kind: str, key: str, theta: float) -> RopeConfig:
    """The rotation of one kind of layers."""
    sections, section = rotation_keys(keys), f"{kind}_attention"
    if sections is not None and sections.object(section) is not None:
        return RopeConfig.from_keys(keys, section=section, theta=theta)
    return RopeConfig(theta=keys.number(key, over=0, default=theta))
