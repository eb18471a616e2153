"""The shape of an encoder, and of the head of a classifier on top of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.blocks.rope import RopeConfig, longest_of
from max.pipelines.models.decoder.config_values import ACTIVATIONS

__all__ = ["EncoderConfig", "HeadConfig", "read_activation", "read_labels", "read_sizes"]

MOST_LAYERS = 1000
LARGEST_SIZE = 2**24


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of an encoder, and what families differ in.

    Args:
        hidden_size: The size of hidden states.
        intermediate_size: The inner size of the MLPs.
        num_layers: The number of blocks.
        num_attention_heads: The number of query heads.
        num_key_value_heads: The number of KV heads.
        head_dim: The size of a head.
        vocab_size: The number of tokens.
        max_length: The longest text that the model supports, in tokens.
        norm_eps: The epsilon of the norms.
        norm: ``layer`` for layer norms, ``rms`` for RMS norms.
        norm_bias: Whether layer norms have biases.
        norm_weight_offset: Added to the weights of RMS norms.
        norm_placement: Where the norms of a block are: ``after`` the residual sums, ``before`` attention and MLP,
            or ``around`` each of the two.
        first_attention_norm: Whether the first block has a norm before its attention.
        embedding_norm: Whether embeddings are normalized.
        final_norm: Whether there is a norm after the last block.
        position_rows: Rows of the table of learned positions; 0 without one.
        first_position: The row of a text's first token.
        token_types: Rows of the table of token types; 0 without one.
        relative_buckets: Buckets of distances whose bias is added to attention scores; 0 without one.
        rope: How positions rotate queries and keys; None: they do not.
        local_rope: The rotation in layers with a window, if it is another.
        window: In layers with a window a token sees those that are less than this away.
        full_attention_layers: The layers without the window.
        causal: Whether a token sees only itself and the tokens before it.
        attention_bias: Whether the projections to queries, keys and values have biases.
        attention_output_bias: Whether the attention's output projection has a bias.
        attention_scale: The factor of the attention scores; None: ``1 / sqrt(head_dim)``.
        qk_norm: Whether query and key heads are normalized before they are rotated.
        gated_mlp: Whether the MLP multiplies by a gate.
        mlp_bias: Whether the MLP's projections have biases.
        activation: The MLP's activation, as `max.nn.activation.ACTIVATIONS` names it.
        embedding_multiplier: The factor of the embeddings.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_length: int
    norm_eps: float
    norm: Literal["layer", "rms"] = "layer"
    norm_bias: bool = True
    norm_weight_offset: float = 0.0
    norm_placement: Literal["after", "before", "around"] = "after"
    first_attention_norm: bool = True
    embedding_norm: bool = True
    final_norm: bool = False
    position_rows: int = 0
    first_position: int = 0
    token_types: int = 0
    relative_buckets: int = 0
    rope: RopeConfig | None = None
    local_rope: RopeConfig | None = None
    window: int | None = None
    full_attention_layers: frozenset[int] = frozenset()
    causal: bool = False
    attention_bias: bool = True
    attention_output_bias: bool = True
    attention_scale: float | None = None
    qk_norm: bool = False
    gated_mlp: bool = False
    mlp_bias: bool = True
    activation: str = "gelu"
    embedding_multiplier: float = 1.0

    def window_of(self, index: int) -> int | None:
        """The window of a layer; None: a token sees all others, or all before it.

        Args:
            index: The layer's index.
        """
        return None if index in self.full_attention_layers else self.window

    def rotates_locally(self, index: int) -> bool:
        """Whether a layer rotates queries and keys by ``local_rope``.

        Args:
            index: The layer's index.
        """
        return self.window_of(index) is not None and self.local_rope is not None


@dataclass(frozen=True)
class HeadConfig:
    """The head of a classifier: ``classifier(norm(activation(dense(pooled))))``.

    Args:
        outputs: The number of scores.
        pooling: The hidden state that the head reads: that of the first token, of the last one, or the mean.
        dense: Whether there is a dense layer before the classifier.
        dense_bias: Whether the dense layer has a bias.
        activation: The activation after the dense layer.
        norm: Whether there is a norm after the activation.
        bias: Whether the classifier has a bias.
    """

    outputs: int = 2
    pooling: Literal["cls", "last", "mean"] = "cls"
    dense: bool = True
    dense_bias: bool = True
    activation: str = "tanh"
    norm: bool = False
    bias: bool = True


def read_activation(keys: ConfigKeys, key: str, default: str = "gelu") -> str:
    """An activation of a config.json, as `max.nn.activation.ACTIVATIONS` names it.

    Args:
        keys: The keys of config.json.
        key: The key.
        default: Hugging Face's name where the key is missing.

    Raises:
        ModelFilesError: The activation is unknown.
    """
    return ACTIVATIONS[keys.choice(key, tuple(ACTIVATIONS), default)]


def read_sizes(
    keys: ConfigKeys, *, states_kv_heads: bool = False, states_head_dim: bool = False
) -> dict[str, Any]:
    """The sizes that most families name alike, as fields of `EncoderConfig`.

    Args:
        keys: The keys of config.json.
        states_kv_heads: Whether the family has a key for the number of KV heads; of others it is not read.
        states_head_dim: Whether the family has a key for the size of a head; of others it is not read.

    Raises:
        ModelFilesError: A value is missing, or does not fit.
    """
    hidden = keys.integer("hidden_size", 1, LARGEST_SIZE)
    heads = keys.integer("num_attention_heads", 1, LARGEST_SIZE)
    kv_heads, head_dim = heads, None
    if states_kv_heads:
        kv_heads = keys.integer("num_key_value_heads", 1, LARGEST_SIZE, heads)
    if states_head_dim:
        head_dim = keys.integer("head_dim", 1, LARGEST_SIZE, None)
    if head_dim is None and hidden % heads:
        raise keys.error("num_attention_heads", f"a divisor of hidden_size, which is {hidden}")
    if heads % kv_heads:
        raise keys.error(
            "num_key_value_heads", f"a divisor of num_attention_heads, which is {heads}"
        )
    longest = longest_of(keys, "max_position_embeddings")
    if longest is None:
        raise keys.error("max_position_embeddings", "the number of tokens of the longest text")
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.integer("intermediate_size", 1, LARGEST_SIZE),
        "num_layers": keys.integer("num_hidden_layers", 1, MOST_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "vocab_size": keys.integer("vocab_size", 1, LARGEST_SIZE),
        "max_length": longest,
    }


def read_labels(keys: ConfigKeys) -> int:
    """The number of a classifier's scores: the entries of ``id2label``, or ``num_labels``; 2 by default.

    Args:
        keys: The keys of config.json.

    Raises:
        ModelFilesError: A value does not fit.
    """
    labels = keys.value("id2label")
    if isinstance(labels, dict) and labels:
        return len(labels)
    return keys.integer("num_labels", 1, LARGEST_SIZE, 2)
