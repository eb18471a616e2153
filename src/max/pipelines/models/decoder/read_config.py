"""Reads decoders from a config.json: what all families share, and what several have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.block import Block
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.blocks.mixer import Mixer
from max.pipelines.models.blocks.rope import RopeConfig, longest_of
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import LARGEST_SIZE, MOST_LAYERS, epsilon
from max.pipelines.models.decoder.config_values import activation as activation_of
from max.pipelines.models.decoder.gptq import read_quantization

__all__ = [
    "read_decoder",
    "read_recurrent",
    "with_biases",
    "with_every_bias",
    "with_windows",
]


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


def read_decoder(
    keys: ConfigKeys,
    names: Mapping[str, str] | None = None,
    *,
    num_layers: int | None = None,
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
) -> DecoderConfig:
    """A decoder of equal blocks of attention and an MLP, with RMS norms before both, as a Llama has them.

    A family changes what differs, by the methods of `DecoderConfig`.

    Args:
        keys: The keys of config.json.
        names: The family's names of keys, by Llama's (``hidden_size``, ``num_hidden_layers``, …); an empty name marks a
            key that the family's files do not have.
        num_layers: The number of blocks, if files have no key for it.
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
    # each head of keys serves equally many query heads
    if heads % kv_heads:
        raise keys.error(kv_key, f"a divisor of {heads_key}, which is {heads}")
    if key["head_dim"]:
        head_dim = keys.integer(key["head_dim"], 2, LARGEST_SIZE, head_dim)
    size = _head_dim(keys, hidden, heads, heads_key, head_dim, rotates)
    positions = longest_of(keys, key["max_position_embeddings"], longest)
    rope: RopeConfig | None = None
    vocab_size = keys.integer("vocab_size", 1, LARGEST_SIZE)
    tie = keys.flag("tie_word_embeddings", tied)
    function = activation_of(keys, key["hidden_act"], activation, gated)
    quantization = read_quantization(keys)
    # not among the blocks: their weights are left out or draft tokens
    prediction_layers = keys.integer("num_nextn_predict_layers", 0, MOST_LAYERS, 0)
    # an empty name: files have no such key, the family sets the value
    if key["num_hidden_layers"]:
        num_layers = keys.integer(key["num_hidden_layers"], 1, MOST_LAYERS)
    inner = hidden
    if key["intermediate_size"]:
        inner = keys.integer(key["intermediate_size"], 1, LARGEST_SIZE)
    name = key["rms_norm_eps"]
    if name:
        eps = epsilon(keys, name, eps)
    if rotates:
        rope = RopeConfig.from_keys(
            keys, head_dim=size, section=rope_section, theta=theta, partial=partial_rotation
        )
    attention = AttentionForm(heads, kv_heads, size, rope)
    block = Block(attention, MLPForm(inner, function, gated))
    assert num_layers is not None and eps is not None
    return DecoderConfig(
        hidden_size=hidden,
        vocab_size=vocab_size,
        norm_eps=eps,
        max_position_embeddings=positions,
        max_seq_len=positions,
        blocks=(block,) * num_layers,
        tie_word_embeddings=tie,
        quantization=quantization,
        prediction_layers=prediction_layers,
    )


def read_recurrent(
    keys: ConfigKeys, form: Callable[[int], Mixer], *, tied: bool = False
) -> DecoderConfig:
    """A decoder whose blocks have only a norm and a recurrent layer.

    Args:
        keys: The keys of config.json.
        form: Reads the form of the layers, from the size of hidden states.
        tied: Whether the output layer is tied if the file does not say so.

    Raises:
        ModelFilesError: A value is missing, or does not fit.
    """
    hidden = keys.integer("hidden_size", 1, LARGEST_SIZE)
    layers = keys.integer("num_hidden_layers", 1, MOST_LAYERS)
    vocab_size = keys.integer("vocab_size", 1, LARGEST_SIZE)
    eps = epsilon(keys, "layer_norm_epsilon", 1e-5)
    tie = keys.flag("tie_word_embeddings", tied)
    return DecoderConfig(
        hidden_size=hidden,
        vocab_size=vocab_size,
        norm_eps=eps,
        max_position_embeddings=LONGEST_RECURRENT,
        max_seq_len=LONGEST_RECURRENT,
        blocks=(Block(form(hidden), None, ("attention_input",)),) * layers,
        tie_word_embeddings=tie,
    )


def with_every_bias(config: DecoderConfig) -> DecoderConfig:
    """A decoder whose projections all have biases.

    Args:
        config: The decoder without.
    """
    return config.with_attention(bias=True, output_bias=True).with_mlp(bias=True)


def with_biases(
    config: DecoderConfig,
    keys: ConfigKeys,
    key: str = "attention_bias",
    *,
    mlp: str = "",
    default: bool = False,
) -> DecoderConfig:
    """A decoder with biases, for families in which one key covers all projections of the attention.

    Args:
        config: The decoder without.
        keys: The keys of config.json.
        key: The key.
        mlp: The key for the MLP's biases; empty: it has none.
        default: Whether there are biases if the file lacks a key.

    Raises:
        ModelFilesError: A value does not fit.
    """
    attention = keys.flag(key, default)
    config = config.with_attention(bias=attention, output_bias=attention)
    return config.with_mlp(bias=bool(mlp) and keys.flag(mlp, default))


def with_windows(
    config: DecoderConfig, size: int | None, full_layers: Collection[int] = (), **local: Any
) -> DecoderConfig:
    """A decoder with a window in all layers but some.

    Args:
        config: The decoder without.
        size: The window in tokens; None: there is none, and all layers stay as they are.
        full_layers: The layers without a window.
        local: Further fields of `AttentionForm` in layers with a window.
    """
    if size is None:
        return config
    # windows differ by layer, so pages of each kind are in groups of their own
    layers = [index for index in range(config.num_layers) if index not in full_layers]
    return config.with_attention(layers, window=size, **local)


def _head_dim(
    keys: ConfigKeys,
    hidden_size: int,
    heads: int,
    heads_key: str,
    own_size: int | None,
    rotates: bool,
) -> int:
    """The size of a head: the stated one, or the hidden size divided by the number of heads."""
    if own_size is None and hidden_size < heads:
        raise keys.error(heads_key, f"at most hidden_size, which is {hidden_size}, or a head_dim")
    size = own_size or hidden_size // heads
    if rotates and size % 2:
        raise keys.error(
            heads_key if own_size is None else "head_dim",
            f"heads of an even size, as halves are rotated; they have {size} elements",
        )
    return size
