"""Reads what Gemma 3n and 4 share from a config.json."""

from __future__ import annotations

from typing import Any

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import Fields, base_fields, biases, windows
from max.pipelines.models.norms import QKNorm
from max.pipelines.models.per_layer import PerLayerInputs
from max.pipelines.models.rope import LONGEST_SEQUENCE, RopeConfig

__all__ = ["PER_LAYER_NAMES", "PER_LAYER_TOP", "per_layer_fields"]

PER_LAYER_TOP = {
    name: f"per_layer.{name}"
    for name in (
        "embed_tokens_per_layer",
        "per_layer_model_projection",
        "per_layer_projection_norm",
    )
}
"""Names outside of layers, and the decoder's."""

PER_LAYER_NAMES = {
    name: f"gate.{name}"
    for name in ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
}
"""Parts of names within a layer, and the decoder's."""


def per_layer_fields(config: Any, keys: ConfigKeys, pattern: int, shared: int) -> Fields:
    """The fields of both: sandwiched norms, windows with a rotation of their own, vectors of each layer, shared keys.

    The inner size of the MLPs is the caller's to read.

    Args:
        config: The keys of config.json as attributes.
        keys: The same keys, with checks.
        pattern: The distance of layers without a window where the file has no ``layer_types``.
        shared: How many layers share keys and values where the file does not say so.

    Raises:
        ModelFilesError: A value is missing, or does not fit.
    """
    if keys.value("use_bidirectional_attention") not in (None, False, "vision"):
        raise keys.error("use_bidirectional_attention", "null: a decoder's tokens see earlier ones")
    names = {"hidden_act": "hidden_activation", "intermediate_size": ""}
    fields = base_fields(
        config,
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
    fields |= biases(keys) | windows(keys, config, layers, pattern, 512)
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
        "rope": _rope(config, keys, fields["head_dim"], "full", "rope_theta", 1e6),
        "local_rope": _rope(
            config, keys, fields["head_dim"], "sliding", "rope_local_base_freq", 1e4
        ),
        "embedding_multiplier": fields["hidden_size"] ** 0.5,
        "norm_places": ("attention_input", "attention_output", "mlp_input", "mlp_output"),
        "attention_multiplier": 1.0,
        "attention_output_bias": fields["attention_bias"],
        "qk_norm": QKNorm(),
        "value_norm": True,
        "shared_kv_layers": shared,
        "per_layer_inputs": PerLayerInputs(size, rows) if size else None,
        "logits_soft_cap": keys.number("final_logit_softcapping", over=0, default=None),
    }


def _rope(
    config: Any, keys: ConfigKeys, head_dim: int, kind: str, key: str, theta: float
) -> RopeConfig:
    """The rotation of a kind of layers."""
    sections, section = keys.object("rope_parameters"), f"{kind}_attention"
    if sections is not None and sections.object(section) is not None:
        return RopeConfig.from_huggingface(config, section=section, theta=theta)
    return RopeConfig(theta=keys.number(key, over=0, default=theta))
