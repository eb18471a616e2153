"""Reads the recurrent layers of state-space models from a config.json, and converts their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import LARGEST_SIZE
from max.pipelines.models.state_space import Mamba2Form, MambaForm

__all__ = ["HYBRID_KEYS", "MIXER_FORMS", "mamba2_form", "mamba_form", "mixer_names"]

Array = npt.NDArray[Any]


def _rates(logarithms: Array) -> Array:
    """The rates of decay, from the logarithms that checkpoints have; of Mamba's ``[states, channels]``."""
    return np.ascontiguousarray(-np.exp(logarithms.astype(np.float32)).T)


def _taps(filters: Array) -> Array:
    """``[taps, channels]`` of a filter ``[channels, 1, taps]``."""
    return np.ascontiguousarray(filters[:, 0].astype(np.float32).T)


MIXER_FORMS: Mapping[str, Callable[[Array], Array]] = {
    "mixer.A": _rates,
    "mixer.conv1d.weight": _taps,
}
"""How the weights of recurrent layers are converted, by the ends of the decoder's names."""

HYBRID_KEYS = {
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state_size": "mamba_d_state",
    "taps": "mamba_d_conv",
    "bias": "mamba_proj_bias",
    "conv_bias": "mamba_conv_bias",
    "limits": "time_step_limit",
}
"""The keys of Mamba 2's sizes in hybrid models."""


def mixer_names(stored: str) -> dict[str, str]:
    """The parts of names of recurrent layers, and the decoder's.

    Args:
        stored: What checkpoints call the layer.
    """
    return {
        stored: "mixer",
        f"{stored}.A_log": "mixer.A",
        f"{stored}.dt_proj.bias": "mixer.dt_bias",
    }


def mamba2_form(
    keys: ConfigKeys, names: Mapping[str, str], inner: int | None = None, activation: str = "hidden_act"
) -> Mamba2Form:
    """The form of Mamba 2's layers.

    Args:
        keys: The keys of config.json.
        names: The family's keys, by the names in `HYBRID_KEYS`; one that is missing keeps its default.
        inner: The channels of all heads, by which a head's size is computed where it is missing or auto.
        activation: The key of the convolution's activation.

    Raises:
        ModelFilesError: A value is missing, or does not fit.
    """
    keys.choice(activation, ("silu", "swish"), "silu")
    heads = keys.integer(names["heads"], 1, LARGEST_SIZE)
    size_key, groups = names["head_dim"], keys.integer(names["groups"], 1, LARGEST_SIZE, 1)
    if keys.value(size_key) in (None, "auto") and inner is not None:
        size = inner // heads
    else:
        size = keys.integer(size_key, 1, LARGEST_SIZE)
    if inner is not None and heads * size != inner:
        raise keys.error(size_key, f"{inner} divided by {heads} heads")
    if heads % groups:
        raise keys.error(names["groups"], f"a divisor of {names['heads']}, which is {heads}")
    bias = keys.flag(names["bias"])
    return Mamba2Form(
        heads,
        size,
        groups,
        keys.integer(names["state_size"], 1, LARGEST_SIZE, 128),
        keys.integer(names["taps"], 2, 64, 4),
        keys.flag(names["conv_bias"], True),
        bias,
        bias,
        _limits(keys, names["limits"]) if "limits" in names else (0.0, math.inf),
    )


def _limits(keys: ConfigKeys, key: str) -> tuple[float, float]:
    """The least and the greatest step."""
    value = keys.value(key)
    if value is None:
        return 0.0, math.inf
    bounds: list[Any] = [_number(bound) for bound in value] if isinstance(value, list | tuple) else []
    if len(bounds) == 2 and None not in bounds and 0 <= bounds[0] <= bounds[1]:
        return bounds[0], bounds[1]
    raise keys.error(key, "two numbers from 0, the second not the smaller one")


def _number(value: Any) -> float | None:
    """A bound of the steps; transformers writes an infinite one as a text in an object, other files as JSON's Infinity."""
    if isinstance(value, Mapping):
        value = value.get("__float__")
    if value == "Infinity":
        return math.inf
    return float(value) if type(value) in (int, float) else None


def mamba_form(
    keys: ConfigKeys, names: Mapping[str, str], channels: int, hidden_size: int
) -> MambaForm:
    """The form of Mamba's layers.

    Args:
        keys: The keys of config.json.
        names: The family's keys for ``state_size``, ``rank``, ``taps``, ``bias`` and ``conv_bias``.
        channels: The number of channels.
        hidden_size: The size of hidden states, by which an automatic rank is computed.

    Raises:
        ModelFilesError: A value is missing, or does not fit.
    """
    keys.choice("hidden_act", ("silu", "swish"), "silu")
    automatic = keys.value(names["rank"]) in (None, "auto")
    return MambaForm(
        channels,
        keys.integer(names["state_size"], 1, LARGEST_SIZE, 16),
        -(-hidden_size // 16) if automatic else keys.integer(names["rank"], 1, LARGEST_SIZE),
        keys.integer(names["taps"], 2, 64, 4),
        keys.flag(names["conv_bias"], True),
        keys.flag(names["bias"]),
    )
