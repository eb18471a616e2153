"""Reads the recurrent layers of state-space models from a config.json, and converts their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.blocks.causal_conv import conv_taps
from max.pipelines.models.blocks.mixer import Mixer
from max.pipelines.models.blocks.state_space import Mamba2Form, MambaForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import LARGEST_SIZE

__all__ = [
    "GGUF_MIXER_FORMS",
    "HYBRID_KEYS",
    "HYBRID_LAYER",
    "HYBRID_TOP",
    "MAMBA2_KEYS",
    "MAMBA_KEYS",
    "MIXER_FORMS",
    "NEMOTRON_KEYS",
    "NEMOTRON_LAYER",
    "factors",
    "kinds_of_layers",
    "kinds_of_pattern",
    "layer_numbers",
    "mamba2_form",
    "mamba_form",
    "mixer_names",
    "periodic_layers",
    "with_kinds",
]

Array = npt.NDArray[Any]

LayerKind = Literal["attention", "recurrent", "feed_forward"]
"""The kinds of layers of hybrid models."""


def _rates(logarithms: Array) -> Array:
    """The decay rates ``-exp(x)`` of the logarithms in checkpoints; Mamba's are transposed to ``[states,
    channels]``.
    """
    # once, at load: a scan would compute the exponential again for each token; in float32, as bf16 rounds small rates
    return np.ascontiguousarray(-np.exp(logarithms.astype(np.float32)).T)


MIXER_FORMS: Mapping[str, Callable[[Array], Array]] = {
    "mixer.A": _rates,
    "mixer.conv1d.weight": conv_taps,
}
"""The conversions of recurrent layers' weights, by the ends of the decoder's names."""


def _stored_rates(rates: Array) -> Array:
    """The decay rates in GGUF files: ``[heads]`` or ``[heads, 1]``, in Mamba ``[channels, states]``."""
    if rates.ndim == 1:
        return rates
    return np.ascontiguousarray(rates[:, 0] if rates.shape[1] == 1 else rates.T)


def _stored_taps(filters: Array) -> Array:
    return np.ascontiguousarray(filters.astype(np.float32).T)


def _vector(values: Array) -> Array:
    return values.reshape(-1)


GGUF_MIXER_FORMS: Mapping[str, Callable[[Array], Array]] = {
    "mixer.A": _stored_rates,
    "mixer.D": _vector,
    "mixer.norm.weight": _vector,
    "mixer.conv1d.weight": _stored_taps,
    "mixer.conv.weight": _stored_taps,
}
"""The conversions for GGUF files."""

HYBRID_KEYS = {
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state_size": "mamba_d_state",
    "taps": "mamba_d_conv",
    "bias": "mamba_proj_bias",
    "conv_bias": "mamba_conv_bias",
    "limits": "time_step_limit",
    "expand": "mamba_expand",
    "rank": "mamba_dt_rank",
}
"""The keys of config.json for recurrent layers of hybrid models, by the names that `mamba2_form` and `mamba_form` use.
"""

MAMBA_KEYS = {
    "state_size": "state_size",
    "taps": "conv_kernel",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
    "expand": "expand",
    "rank": "time_step_rank",
    "channels": "intermediate_size",
}
MAMBA2_KEYS = {
    **MAMBA_KEYS,
    "heads": "num_heads",
    "head_dim": "head_dim",
    "groups": "n_groups",
    "limits": "time_step_limit",
}
NEMOTRON_KEYS = {
    **MAMBA2_KEYS,
    "heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "state_size": "ssm_state_size",
}

HYBRID_TOP = {"final_layernorm": "norm"}
"""Names outside of layers in checkpoints of hybrid models, and the decoder's names."""


def mixer_names(stored_name: str, own: str = "mixer") -> dict[str, str]:
    """The parts of names of recurrent layers in checkpoints, and the decoder's parts.

    Args:
        stored_name: The name of the layer in checkpoints.
            own: The name of the layer in the decoder.
    """
    return {
        stored_name: own,
        f"{stored_name}.A_log": f"{own}.A",
        f"{stored_name}.dt_proj.bias": f"{own}.dt_bias",
    }


HYBRID_LAYER = {
    "pre_ff_layernorm": "post_attention_layernorm",
    "feed_forward": "mlp",
    **mixer_names("mamba"),
}
"""Parts of names within a layer in checkpoints of hybrid models, and the decoder's parts."""

NEMOTRON_LAYER = {
    "norm": "input_layernorm",
    **{f"mixer.{x}_proj": f"self_attn.{x}_proj" for x in "qkvo"},
    **{f"mixer.{x}_proj": f"mlp.{x}_proj" for x in ("up", "down")},
    **{f"mixer.experts.{x}_proj": f"mlp.experts.{x}_proj.weight" for x in ("up", "down")},
    "mixer.experts": "mlp.experts",
    "mixer.gate.weight": "mlp.gate.gate_score.weight",
    "mixer.gate.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    "mixer.shared_experts": "mlp.shared",
    "mixer.fc1_latent_proj": "mlp.latent_in",
    "mixer.fc2_latent_proj": "mlp.latent_out",
    **mixer_names("mixer"),
}
"""Parts of names within a layer of Nemotron-H, in which each layer has one mixer of some kind."""


def mamba2_form(
    keys: ConfigKeys,
    names: Mapping[str, str],
    hidden_size: int | None = None,
    inner: int | None = None,
    activation: str = "hidden_act",
) -> Mamba2Form:
    """The form of Mamba 2's layers.

    Args:
        keys: The keys of config.json.
        names: The family's keys, by the names of this module.
        hidden_size: The size of hidden states, if the number of channels is a multiple of it; None: the file states the
            number and the size of heads.
        inner: The number of channels of all heads, if a key states it.
        activation: The key of the convolution's activation.

    Raises:
        ModelFilesError: A value is missing, or does not fit.
    """
    if inner is None and hidden_size is not None:
        inner = hidden_size * keys.integer(names["expand"], 1, 64, 2)
    keys.choice(activation, ("silu", "swish"), "silu")
    heads = keys.integer(names["heads"], 1, LARGEST_SIZE)
    size_key, groups = names["head_dim"], keys.integer(names["groups"], 1, LARGEST_SIZE, 1)
    # files state the channels, the size of a head, or both
    if keys.value(size_key) in (None, "auto") and inner is not None:
        size = inner // heads
    else:
        size = keys.integer(size_key, 1, LARGEST_SIZE)
    if inner is not None and heads * size != inner:
        raise keys.error(size_key, f"{inner} divided by {heads} heads")
    # the heads of a group share their B and C
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
        _limits(keys, names["limits"]),
    )


def _limits(keys: ConfigKeys, key: str) -> tuple[float, float]:
    """The minimum and maximum step size."""
    value = keys.value(key)
    if value is None:
        return 0.0, math.inf
    bounds: list[Any] = (
        [_number(bound) for bound in value] if isinstance(value, list | tuple) else []
    )
    if len(bounds) == 2 and None not in bounds and 0 <= bounds[0] <= bounds[1]:
        return bounds[0], bounds[1]
    raise keys.error(key, "two numbers from 0, the second not the smaller one")


def _number(value: Any) -> float | None:
    """A limit of the step size; transformers writes an infinite one as ``{"__float__": "Infinity"}``, other files as
    JSON's Infinity.
    """
    if isinstance(value, Mapping):
        value = value.get("__float__")
    if value == "Infinity":
        return math.inf
    return float(value) if type(value) in (int, float) else None


def mamba_form(keys: ConfigKeys, names: Mapping[str, str], hidden_size: int) -> MambaForm:
    """The form of Mamba's layers.

    Args:
        keys: The keys of config.json.
        names: The family's keys.
        hidden_size: The size of hidden states, from which the number of channels and an automatic rank are computed.

    Raises:
        ModelFilesError: A value is missing, or does not fit.
    """
    keys.choice("hidden_act", ("silu", "swish"), "silu")
    automatic = keys.value(names["rank"]) in (None, "auto")
    channels = int(hidden_size * keys.number(names["expand"], over=0, most=64, default=2))
    if "channels" in names:
        channels = keys.integer(names["channels"], 1, LARGEST_SIZE, channels)
    return MambaForm(
        channels,
        keys.integer(names["state_size"], 1, LARGEST_SIZE, 16),
        # transformers' default
        -(-hidden_size // 16) if automatic else keys.integer(names["rank"], 1, LARGEST_SIZE),
        keys.integer(names["taps"], 2, 64, 4),
        keys.flag(names["conv_bias"], True),
        keys.flag(names["bias"]),
    )


_KINDS: dict[str, LayerKind] = {
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "feed_forward",
}
_PATTERN_TYPES = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""The layer types by the letters of Nemotron-H's pattern."""


def kinds_of_layers(
    keys: ConfigKeys, key: str, count: int | None, attends: Collection[int] = ()
) -> tuple[LayerKind, ...]:
    """The kinds of layers that a key lists.

    Args:
        keys: The keys of config.json.
        key: The key.
        count: The number of layers; None: the length of the list.
        attends: The layers with attention if the key is missing; the others are recurrent.

    Raises:
        ModelFilesError: The value is not a list of known kinds, or has another length.
    """
    value = keys.value(key)
    if value is None and count is not None:
        return tuple("attention" if i in attends else "recurrent" for i in range(count))
    names = list(value) if isinstance(value, list) else []
    if (
        not names
        or len(names) != (count or len(names))
        or not all(name in _KINDS for name in names)
    ):
        expected = f"{count or 'some'} times one of {', '.join(_KINDS)}"
        raise keys.error(key, expected)
    return tuple(_KINDS[name] for name in names)


def kinds_of_pattern(keys: ConfigKeys) -> tuple[tuple[LayerKind, ...], frozenset[int]]:
    """The kinds of Nemotron-H's layers, and the layers with experts.

    They come from ``layers_block_type``, else from the letters of ``hybrid_override_pattern``.

    Args:
        keys: The keys of config.json.

    Raises:
        ModelFilesError: There is neither, or a kind is unknown.
    """
    types, pattern = keys.value("layers_block_type"), keys.value("hybrid_override_pattern")
    if types is None and pattern is not None:
        if not isinstance(pattern, str) or not pattern or not set(pattern) <= set(_PATTERN_TYPES):
            raise keys.error("hybrid_override_pattern", f"letters of {' '.join(_PATTERN_TYPES)}")
        types = [_PATTERN_TYPES[letter] for letter in pattern]
    # newer files list the types, older ones have the letters; transformers' default without either
    types = ["mamba", "moe", "attention", "mlp"] if types is None else types
    kinds: dict[str, LayerKind] = {**_KINDS, "moe": "feed_forward"}
    names: list[Any] = list(types) if isinstance(types, list) else []
    if not names or not all(isinstance(name, str) and name in kinds for name in names):
        raise keys.error("layers_block_type", f"a list of {', '.join(kinds)}")
    routed = frozenset(index for index, name in enumerate(names) if name == "moe")
    return tuple(kinds[name] for name in names), routed


def with_kinds(
    config: DecoderConfig, kinds: Sequence[LayerKind], recurrence: Mixer
) -> DecoderConfig:
    """A decoder whose blocks have attention, a recurrent layer, or no mixer.

    Args:
        config: The decoder with attention in all blocks.
        kinds: The kind of each block.
        recurrence: The form of the recurrent layers.
    """

    def of_kind(layer_kind: LayerKind) -> list[int]:
        return [index for index, own in enumerate(kinds) if own == layer_kind]

    config = config.with_blocks(of_kind("recurrent"), mixer=recurrence)
    return config.with_blocks(of_kind("feed_forward"), mixer=None)


def layer_numbers(keys: ConfigKeys, key: str, count: int) -> frozenset[int]:
    """The layers that a key lists; none if the key is missing.

    Args:
        keys: The keys of config.json.
        key: The key.
        count: The number of layers.

    Raises:
        ModelFilesError: The value is not a list of layers.
    """
    value = keys.value(key)
    numbers: list[Any] = [] if value is None else value
    # `type`, as True is an integer too
    if not isinstance(value, list | None) or not all(
        type(n) is int and 0 <= n < count for n in numbers
    ):
        raise keys.error(key, f"a list of layers, from 0 to {count - 1}")
    return frozenset(numbers)


def periodic_layers(
    keys: ConfigKeys, prefix: str, period: int, offset: int
) -> Callable[[int], bool]:
    """A predicate of the layers that occur once per period.

    Args:
        keys: The keys of config.json.
        prefix: The prefix of the keys ``…_layer_period`` and ``…_layer_offset``.
        period: The period if the file states none.
        offset: The first such layer if the file states none.

    Raises:
        ModelFilesError: A value does not fit.
    """
    period = keys.integer(f"{prefix}_layer_period", 1, LARGEST_SIZE, period)
    offset = keys.integer(f"{prefix}_layer_offset", 0, period - 1, offset)
    return lambda index: index % period == offset


def factors(keys: ConfigKeys, key: str, count: int) -> tuple[float, ...]:
    """The factors that a key lists; all 1 if the key is missing.

    Args:
        keys: The keys of config.json.
        key: The key.
        count: Their number.

    Raises:
        ModelFilesError: The value is not a list of `count` numbers.
    """
    values = keys.numbers(key, over=-math.inf)
    if values is None:
        return (1.0,) * count
    if len(values) != count:
        raise keys.error(key, f"{count} numbers")
    return tuple(values)
