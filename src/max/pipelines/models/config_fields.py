"""Reads the fields of `DecoderConfig` that all families share from a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.gptq import read_quantization
from max.pipelines.models.recurrent_form import LayerKind
from max.pipelines.models.rope import LONGEST_SEQUENCE, RopeConfig, longest_of

__all__ = [
    "ACTIVATIONS",
    "EVERY_BIAS",
    "Fields",
    "base_fields",
    "biases",
    "layer_kinds",
    "layers_of_type",
    "nonzero",
    "recurrent_fields",
    "unrotated_layers",
    "window",
    "windows",
]

Fields = dict[str, Any]
"""Fields of `DecoderConfig` by name."""

ACTIVATIONS = {
    **{name: name for name in ("silu", "gelu", "gelu_10", "hardswish", "laplace")},
    **{name: name for name in ("leaky_relu", "linear", "sqrtsoftplus")},
    **{name: name for name in ("mish", "relu", "relu2", "relu6", "sigmoid", "tanh")},
    "swish": "silu",
    "gelu_python": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate"), "gelu_tanh"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"),
    "quick_gelu": "gelu_quick",
}
"""The activations' names in config.json, and the names of `max.nn.activation.ACTIVATIONS`."""

PLAIN_ACTIVATIONS = {**ACTIVATIONS, "xielu": "xielu"}
"""The same for MLPs without a gate: the names that `PlainMLP` takes."""

MOST_LAYERS = 1000
LARGEST_SIZE = 2**24
LONGEST_RECURRENT = 2**20
"""The default longest sequence of models without attention, whose memory does not depend on the length."""

_NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "head_dim",
)


def base_fields(
    keys: ConfigKeys,
    names: Mapping[str, str] | None = None,
    *,
    head_dim: int | None = None,
    tied: bool = False,
    gated: bool = True,
    activation: str = "silu",
    eps: float | None = None,
    longest: int = 2048,
    rotates: bool = True,
    theta: float = 10000.0,
    partial_rotation: float | None = None,
    rope_section: str | None = None,
) -> Fields:
    """The fields that all families share, by name.

    Args:
        keys: The keys of config.json.
        names: The family's names of keys, by Llama's (``hidden_size``, ``num_hidden_layers``, …); an empty name marks a
            key that the family's files do not have.
        head_dim: The size of a head if the file states none; by default the hidden size divided by the heads.
        tied: Whether the output layer is tied if the file does not say so.
        gated: Whether the MLPs have a gate.
        activation: The activation if the file states none.
        eps: The epsilon of the norms if the file states none; None: the file must state it.
        longest: The longest sequence if the file states none.
        rotates: Whether heads are rotated.
        theta: The base of the rotation's frequencies if the file states none.
        partial_rotation: The rotated share of a head if the file states none; None: heads are rotated as a whole.
        rope_section: The layer type whose rotation is read, if ``rope_parameters`` has an object per layer type.

    Raises:
        ModelFilesError: A value is missing, or does not fit.
    """
    key = {name: (names or {}).get(name, name) for name in _NAMES}
    hidden = keys.integer(key["hidden_size"], 1, LARGEST_SIZE)
    heads_key, kv_key = key["num_attention_heads"], key["num_key_value_heads"]
    heads = keys.integer(heads_key, 1, LARGEST_SIZE)
    kv_heads = keys.integer(kv_key, 1, LARGEST_SIZE, heads) if kv_key else heads
    if heads % kv_heads:
        raise keys.error(kv_key, f"a divisor of {heads_key}, which is {heads}")
    if key["head_dim"]:
        head_dim = keys.integer(key["head_dim"], 2, LARGEST_SIZE, head_dim)
    size = _head_dim(keys, hidden, heads, heads_key, head_dim, rotates)
    positions = longest_of(keys, key["max_position_embeddings"], longest)
    fields: Fields = {
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": size,
        "vocab_size": keys.integer("vocab_size", 1, LARGEST_SIZE),
        "max_position_embeddings": positions,
        "max_seq_len": positions,
        "rope": None,
        "tie_word_embeddings": keys.flag("tie_word_embeddings", tied),
        "gated": gated,
        "activation": _activation(keys, key["hidden_act"], activation, gated),
        "quantization": read_quantization(keys),
        "prediction_layers": keys.integer("num_nextn_predict_layers", 0, MOST_LAYERS, 0),
    }
    # an empty name: files have no such key, the family sets the value
    if key["num_hidden_layers"]:
        fields["num_layers"] = keys.integer(key["num_hidden_layers"], 1, MOST_LAYERS)
    if key["intermediate_size"]:
        fields["intermediate_size"] = keys.integer(key["intermediate_size"], 1, LARGEST_SIZE)
    name = key["rms_norm_eps"]
    fields["norm_eps"] = epsilon(keys, name, eps) if name else eps
    if rotates:
        fields["rope"] = RopeConfig.from_keys(
            keys, head_dim=size, section=rope_section, theta=theta, partial=partial_rotation
        )
    return fields


def epsilon(keys: ConfigKeys, key: str, default: float | None) -> float:
    """The epsilon of norms; 0 counts as the least positive normal float32.

    Args:
        keys: The keys of config.json.
        key: The key.
        default: The value if the key is missing; None: the file must state it.

    Raises:
        ModelFilesError: The value does not fit.
    """
    options: dict[str, Any] = {} if default is None else {"default": default}
    return max(keys.number(key, least=0, **options), 2.0**-126)


def nonzero(keys: ConfigKeys, key: str, default: float) -> float:
    """A number other than 0.

    Args:
        keys: The keys of config.json.
        key: The key.
        default: The value if the key is missing.

    Raises:
        ModelFilesError: The value does not fit.
    """
    number = keys.number(key, default=default)
    if number == 0:
        raise keys.error(key, "a number other than 0")
    return number


def recurrent_fields(keys: ConfigKeys, *, tied: bool = False) -> Fields:
    """The fields of families whose blocks have only a norm and a recurrent layer.

    Args:
        keys: The keys of config.json.
        tied: Whether the output layer is tied if the file does not say so.

    Raises:
        ModelFilesError: A value is missing, or does not fit.
    """
    hidden = keys.integer("hidden_size", 1, LARGEST_SIZE)
    layers = keys.integer("num_hidden_layers", 1, MOST_LAYERS)
    return {
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_layers": layers,
        # the paged cache has no layers
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 2,
        "vocab_size": keys.integer("vocab_size", 1, LARGEST_SIZE),
        "norm_eps": epsilon(keys, "layer_norm_epsilon", 1e-5),
        "max_position_embeddings": LONGEST_RECURRENT,
        "max_seq_len": LONGEST_RECURRENT,
        "rope": None,
        "tie_word_embeddings": keys.flag("tie_word_embeddings", tied),
        "norm_places": ("attention_input",),
        "layer_kinds": ("recurrent",) * layers,
        "mixers_alone": True,
    }


EVERY_BIAS = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
"""The fields of families whose projections all have biases."""


def biases(
    keys: ConfigKeys, key: str = "attention_bias", *, mlp: str = "", default: bool = False
) -> Fields:
    """The fields of biases, for families in which one key covers all projections of the attention.

    Args:
        keys: The keys of config.json.
        key: The key.
        mlp: The key for the MLP's biases; empty: it has none.
        default: Whether there are biases if the file lacks a key.

    Raises:
        ModelFilesError: A value does not fit.
    """
    attention = keys.flag(key, default)
    return {
        "attention_bias": attention,
        "attention_output_bias": attention,
        "mlp_bias": bool(mlp) and keys.flag(mlp, default),
    }


def windows(keys: ConfigKeys, num_layers: int, pattern: int, default: int) -> Fields:
    """The fields of windows, for families in which every `pattern`-th layer sees all tokens, the others a window.

    Args:
        keys: The keys of config.json.
        num_layers: The number of layers.
        pattern: The distance between layers without a window if the file states neither ``layer_types`` nor
            ``sliding_window_pattern``.
        default: The window if the file lacks the key; null means no window.

    Raises:
        ModelFilesError: A value does not fit.
    """
    period = keys.integer("sliding_window_pattern", 1, LONGEST_SEQUENCE, pattern)
    full = frozenset(index for index in range(num_layers) if (index + 1) % period == 0)
    return {
        "sliding_window": window(keys, default),
        "full_attention_layers": layers_of_type(keys, num_layers, full),
    }


def _activation(keys: ConfigKeys, key: str, default: str, gated: bool) -> str:
    """The activation that a key names, as the layers name it.

    Args:
        keys: The keys of config.json.
        key: The key; empty if the file has none.
        default: The activation if the file states none.
        gated: Whether the MLPs have a gate.

    Raises:
        ModelFilesError: The engine lacks the activation.
    """
    choices = ACTIVATIONS if gated else PLAIN_ACTIVATIONS
    return choices[keys.choice(key, tuple(choices), default)] if key else default


def window(keys: ConfigKeys, default: int | None = None) -> int | None:
    """``sliding_window``, in tokens; an explicit null means no window, a missing key means the default.

    Args:
        keys: The keys of config.json.
        default: The window if the file lacks the key; null means no window.

    Raises:
        ModelFilesError: The value does not fit.
    """
    is_stated = keys.states("sliding_window")
    return longest_of(keys, "sliding_window", None if is_stated else default)


def unrotated_layers(keys: ConfigKeys, num_layers: int) -> frozenset[int]:
    """The layers whose heads are not rotated: those with 0 in ``no_rope_layers``; by default every fourth layer.

    Args:
        keys: The keys of config.json.
        num_layers: The number of layers.

    Raises:
        ModelFilesError: The list has other values, or another length.
    """
    interval = keys.integer("no_rope_layer_interval", 1, LONGEST_SEQUENCE, 4)
    rotated = keys.value("no_rope_layers")
    # an empty list counts as missing
    if rotated is None or rotated == []:
        rotated = [int((index + 1) % interval != 0) for index in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) != num_layers or not {*rotated} <= {0, 1}:
        raise keys.error("no_rope_layers", f"{num_layers} times 1 (rotated) or 0")
    return frozenset(index for index, flag in enumerate(rotated) if not flag)


def layers_of_type(
    keys: ConfigKeys,
    num_layers: int,
    default: frozenset[int],
    kind: str = "full_attention",
    other: str = "sliding_attention",
) -> frozenset[int]:
    """The layers that ``layer_types`` of config.json marks as `kind`; all other layers must be `other`.

    Args:
        keys: The keys of config.json.
        num_layers: The number of layers.
        default: The layers if the key is missing.
        kind: The type of the returned layers.
        other: The type of the other layers.

    Raises:
        ModelFilesError: The list has other types, or another length.
    """
    types = keys.value("layer_types")
    if types is None:
        return default
    kinds = ("full_attention", other)
    if not isinstance(types, list) or len(types) != num_layers or not {*types} <= {*kinds}:
        raise keys.error("layer_types", f"{num_layers} times full_attention or {other}")
    return frozenset(index for index, stated in enumerate(types) if stated == kind)


def layer_kinds(keys: ConfigKeys, default: list[str], recurrent: str) -> tuple[LayerKind, ...]:
    """The kind of each layer, for families that mix attention with recurrent layers, from ``layer_types``.

    Args:
        keys: The keys of config.json.
        default: The types if the key is missing.
        recurrent: The type of recurrent layers; the type of all others is ``full_attention``.

    Raises:
        ModelFilesError: The list has other types, or another length.
    """
    types = keys.value("layer_types")
    types = default if types is None else types
    kinds: dict[Any, LayerKind] = {"full_attention": "attention", recurrent: "recurrent"}
    if not isinstance(types, list) or len(types) != len(default) or not {*types} <= {*kinds}:
        raise keys.error("layer_types", f"{len(default)} times full_attention or {recurrent}")
    return tuple(kinds[stated] for stated in types)


def _head_dim(
    keys: ConfigKeys, hidden: int, heads: int, heads_key: str, stated: int | None, rotates: bool
) -> int:
    """The size of a head: the stated one, or the hidden size divided by the number of heads."""
    if stated is None and hidden < heads:
        raise keys.error(heads_key, f"at most hidden_size, which is {hidden}, or a head_dim")
    size = stated or hidden // heads
    if rotates and size % 2:
        raise keys.error(
            heads_key if stated is None else "head_dim",
            f"heads of an even size, as halves are rotated; they have {size} elements",
        )
    return size
