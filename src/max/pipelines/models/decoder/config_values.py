"""Values of a config.json that several families have: activations, windows, lists of layers."""

from __future__ import annotations

from typing import Any

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE, longest_of

__all__ = [
    "ACTIVATIONS",
    "LARGEST_SIZE",
    "MOST_LAYERS",
    "activation",
    "attention_layers",
    "epsilon",
    "layers_of_type",
    "nonzero",
    "periodic_windows",
    "unrotated_layers",
    "window",
]

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


def periodic_windows(
    keys: ConfigKeys, num_layers: int, pattern: int, default: int
) -> tuple[int | None, frozenset[int]]:
    """The window, and the layers without one, for families in which every `pattern`-th layer sees all tokens.

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
    return window(keys, default), layers_of_type(keys, num_layers, full)


def activation(keys: ConfigKeys, key: str, default: str, gated: bool) -> str:
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
    layer_type: str = "full_attention",
    other: str = "sliding_attention",
) -> frozenset[int]:
    """The layers that ``layer_types`` of config.json marks as `layer_type`; all other layers must be `other`.

    Args:
        keys: The keys of config.json.
        num_layers: The number of layers.
        default: The layers if the key is missing.
        layer_type: The type of the returned layers.
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
    return frozenset(index for index, stated in enumerate(types) if stated == layer_type)


def attention_layers(keys: ConfigKeys, default: list[str], recurrent: str) -> frozenset[int]:
    """The layers with attention, for families that mix them with recurrent layers, from ``layer_types``.

    Args:
        keys: The keys of config.json.
        default: The types if the key is missing.
        recurrent: The type of recurrent layers; the type of all others is ``full_attention``.

    Raises:
        ModelFilesError: The list has other types, or another length.
    """
    types = keys.value("layer_types")
    types = default if types is None else types
    kinds = {"full_attention", recurrent}
    if not isinstance(types, list) or len(types) != len(default) or not {*types} <= kinds:
        raise keys.error("layer_types", f"{len(default)} times full_attention or {recurrent}")
    return frozenset(index for index, kind in enumerate(types) if kind == "full_attention")
