"""The shape of a decoder-only model, read from its config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from max.graph.quantization import QuantizationConfig
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.gptq import read_quantization
from max.pipelines.models.rope import LONGEST_SEQUENCE, RopeConfig

__all__ = ["ACTIVATIONS", "DecoderConfig", "full_attention_layers"]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Hugging Face's names of activations, and the names that `max.nn.MLP` takes."""

MOST_LAYERS = 1000
LARGEST_SIZE = 2**24


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder-only model, and the options of its layers.

    An architecture extends `fields_from` where its config.json has other keys or defaults, and adds
    fields of its own.

    Args:
        hidden_size: The size of hidden states.
        intermediate_size: The inner size of the MLPs.
        num_layers: The number of blocks.
        num_heads: The number of query heads.
        num_kv_heads: The number of KV heads.
        head_dim: The size of a head.
        vocab_size: The number of tokens.
        rms_norm_eps: The epsilon of the norms.
        max_position_embeddings: The longest sequence that the model supports.
        max_seq_len: The longest sequence to serve.
        rope: The rotary embedding.
        tie_word_embeddings: Whether the output layer shares the embedding's weight.
        attention_bias: Whether the projections to queries, keys and values have biases.
        attention_output_bias: Whether the attention's output projection has a bias.
        mlp_bias: Whether the MLP's projections have biases.
        qk_norm: Whether query and key heads are normalised before RoPE.
        activation: The MLP's activation, as `max.nn.MLP` names it.
        interleaved_rope: Whether the elements of a rotated pair are neighbours; in Hugging Face
            checkpoints they are half a head apart.
        embedding_multiplier: The factor of the embeddings.
        attention_multiplier: The factor of the attention scores; None: ``1 / sqrt(head_dim)``.
        residual_multiplier: The factor of each block's outputs before they are added.
        logits_scaling: The divisor of the logits.
        sliding_window: How many tokens a token sees in layers with a window, itself included.
        full_attention_layers: The layers without the window.
        quantization: The format of a GPTQ checkpoint's projections.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    max_seq_len: int
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"
    interleaved_rope: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    sliding_window: int | None = None
    full_attention_layers: frozenset[int] = frozenset()
    quantization: QuantizationConfig | None = None

    def window_of(self, index: int) -> int | None:
        """How many tokens a token sees in a layer; None: all tokens before it.

        A window that no sequence exceeds is None, too.

        Args:
            index: The layer's index.
        """
        window = self.sliding_window
        if window is None or window >= self.max_seq_len or index in self.full_attention_layers:
            return None
        return window

    @classmethod
    def from_huggingface(cls, config: Any, max_seq_len: int | None = None) -> Self:
        """Reads a config.json.

        Args:
            config: The file's keys as attributes.
            max_seq_len: The longest sequence to serve; by default the longest that the model supports.

        Raises:
            ModelFilesError: A value is missing, or the architecture does not support it.
        """
        fields = cls.fields_from(config, ConfigKeys(config))
        if max_seq_len is not None:
            fields["max_seq_len"] = max_seq_len
        return cls(**fields)

    @classmethod
    def fields_from(cls, config: Any, keys: ConfigKeys) -> dict[str, Any]:
        """The fields by name; architectures extend the result.

        Args:
            config: The keys of config.json as attributes.
            keys: The same keys, with checks.

        Raises:
            ModelFilesError: A value is missing, or does not fit.
        """
        hidden = keys.integer("hidden_size", 1, LARGEST_SIZE)
        heads = keys.integer("num_attention_heads", 1, LARGEST_SIZE)
        kv_heads = keys.integer("num_key_value_heads", 1, LARGEST_SIZE, heads)
        if heads % kv_heads:
            raise keys.error(
                "num_key_value_heads", f"a divisor of num_attention_heads, which is {heads}"
            )
        head_dim = _head_dim(keys, hidden, heads)
        rope = RopeConfig.from_huggingface(config)
        if rope.kind == "factors" and len(rope.parameters["factors"]) != head_dim // 2:
            raise keys.error("rope_parameters", f"{head_dim // 2} factors, half of head_dim")
        longest = keys.integer("max_position_embeddings", 1, LONGEST_SEQUENCE, 2048)
        return {
            "hidden_size": hidden,
            "intermediate_size": keys.integer("intermediate_size", 1, LARGEST_SIZE),
            "num_layers": keys.integer("num_hidden_layers", 1, MOST_LAYERS),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": keys.integer("vocab_size", 1, LARGEST_SIZE),
            "rms_norm_eps": keys.number("rms_norm_eps", over=0, most=1),
            "max_position_embeddings": longest,
            "max_seq_len": longest,
            "rope": rope,
            "tie_word_embeddings": keys.flag("tie_word_embeddings"),
            "activation": ACTIVATIONS[keys.choice("hidden_act", tuple(ACTIVATIONS), "silu")],
            "quantization": read_quantization(keys),
        }


def full_attention_layers(
    keys: ConfigKeys, num_layers: int, default: frozenset[int]
) -> frozenset[int]:
    """The layers that ``layer_types`` of config.json marks as full_attention, not sliding_attention.

    Args:
        keys: The keys of config.json.
        num_layers: The number of layers.
        default: The layers where the key is missing.

    Raises:
        ModelFilesError: The list has other types, or another length.
    """
    types = keys.value("layer_types")
    if types is None:
        return default
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or not {*types} <= {*known}:
        raise keys.error("layer_types", f"{num_layers} times full_attention or sliding_attention")
    return frozenset(index for index, kind in enumerate(types) if kind == known[0])


def _head_dim(keys: ConfigKeys, hidden: int, heads: int) -> int:
    """The size of a head: ``head_dim``, or the hidden size divided by the number of heads."""
    stated = keys.integer("head_dim", 2, LARGEST_SIZE, None)
    if stated is None and hidden % heads:
        raise keys.error(
            "num_attention_heads", f"a divisor of hidden_size, which is {hidden}, or a head_dim"
        )
    size = stated or hidden // heads
    if size % 2:
        raise keys.error(
            "num_attention_heads" if stated is None else "head_dim",
            f"heads of an even size, as halves are rotated; they have {size} elements",
        )
    return size
