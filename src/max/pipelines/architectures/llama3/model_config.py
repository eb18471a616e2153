"""What a Llama's config.json says, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from max.graph.quantization import QuantizationConfig
from max.nn.rotary_embedding import (
    LinearRotaryEmbedding,
    LinearScalingParams,
    Llama3RopeScalingParams,
    Llama3RotaryEmbedding,
    LongRoPERotaryEmbedding,
    LongRoPEScalingParams,
    RotaryEmbedding,
    YarnRotaryEmbedding,
    YarnScalingParams,
)
from max.pipelines.checkpoints.config_keys import ConfigKeys

__all__ = ["Llama3Config", "RopeConfig", "stores_plain_zeros"]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Hugging Face's names of activations, and those of `max.nn.MLP`."""

MOST_LAYERS = 1000
LARGEST_SIZE = 2**24
LONGEST_SEQUENCE = 2**31 - 1


@dataclass(frozen=True)
class RopeConfig:
    """How positions are rotated.

    Args:
        kind: default, linear, llama3, yarn, or factors: one for each frequency, as GGUF files may have.
        theta: The base of the frequencies.
        parameters: What the kind needs, by the names of config.json.
    """

    kind: str = "default"
    theta: float = 10000.0
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_huggingface(cls, config: Any) -> RopeConfig:
        """Reads ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` of older files.

        Args:
            config: The model's config.json.

        Raises:
            ModelFilesError: The kind is unknown, lacks a parameter, or has one that does not fit.
        """
        keys = ConfigKeys(config)
        found = keys.object("rope_parameters") or keys.object("rope_scaling")
        rope = ConfigKeys({}) if found is None else found
        kind = rope.choice(
            "type" if rope.value("rope_type") is None else "rope_type", tuple(_ROPES), "default"
        )
        theta = rope.number(
            "rope_theta", over=0, default=keys.number("rope_theta", over=0, default=10000.0)
        )
        if rope.number("partial_rotary_factor", over=0, default=1.0) != 1.0:
            raise rope.error("partial_rotary_factor", "1: a Llama rotates whole heads")
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if rope.value(name) is not None:
                raise rope.error(name, f"none: with rope_type {kind} it is not supported")
        longest = keys.integer("max_position_embeddings", 1, LONGEST_SEQUENCE, None)
        own = keys.integer("original_max_position_embeddings", 1, LONGEST_SEQUENCE, longest)
        values: dict[str, Any] = {
            "original_max_position_embeddings": rope.integer(
                "original_max_position_embeddings", 1, LONGEST_SEQUENCE, own
            ),
            "truncate": rope.flag("truncate", True),
        }
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            values[name] = rope.number(name, over=0, default=None)
        values["factors"] = rope.numbers("factors", over=0)
        for name in _ROPES[kind]:
            if values.get(name) is None:
                raise rope.error(name, f"what rope_type {kind} needs")
        if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
            raise rope.error("low_freq_factor", "less than high_freq_factor")
        return cls(kind, theta, values)

    def layer(
        self, *, dim: int, n_heads: int, head_dim: int, max_seq_len: int, interleaved: bool
    ) -> RotaryEmbedding:
        """The rotary embedding.

        Args:
            dim: The hidden size.
            n_heads: The number of query heads.
            head_dim: The size of a head.
            max_seq_len: The longest sequence.
            interleaved: Whether the elements of a pair are neighbours.
        """
        p = self.parameters
        common: dict[str, Any] = {
            "dim": dim,
            "n_heads": n_heads,
            "theta": self.theta,
            "max_seq_len": max_seq_len,
            "head_dim": head_dim,
            "interleaved": interleaved,
        }
        original = int(p.get("original_max_position_embeddings") or 0)
        match self.kind:
            case "linear":
                return LinearRotaryEmbedding(
                    **common, scaling_params=LinearScalingParams(float(p["factor"]))
                )
            case "llama3":
                scaling = Llama3RopeScalingParams(
                    factor=float(p["factor"]),
                    low_freq_factor=float(p["low_freq_factor"]),
                    high_freq_factor=float(p["high_freq_factor"]),
                    orig_max_position=original,
                )
                return Llama3RotaryEmbedding(**common, scaling_params=scaling)
            case "factors":
                # of equal factors at all lengths nothing else depends on the lengths
                factors = [float(f) for f in p["factors"]]
                equal = LongRoPEScalingParams(factors, factors, max_seq_len, max_seq_len)
                return LongRoPERotaryEmbedding(**common, scaling_params=equal)
            case "yarn":
                yarn = YarnScalingParams(
                    factor=float(p["factor"]),
                    beta_fast=float(p.get("beta_fast") or 32),
                    beta_slow=float(p.get("beta_slow") or 1),
                    original_max_position_embeddings=original,
                    truncate=bool(p.get("truncate", True)),
                )
                return YarnRotaryEmbedding(**common, scaling_params=yarn)
            case _:
                return RotaryEmbedding(**common)


_ROPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "factors": ("factors",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""The kinds, and the parameters that they cannot do without."""


@dataclass(frozen=True)
class Llama3Config:
    """The form of a Llama model.

    Args:
        hidden_size: The size of hidden states.
        intermediate_size: The size inside the MLPs.
        num_layers: The number of blocks.
        num_heads: The number of query heads.
        num_kv_heads: The number of key heads.
        head_dim: The size of a head.
        vocab_size: The number of tokens.
        rms_norm_eps: For the norms.
        max_position_embeddings: The longest sequence that the model can do.
        max_seq_len: The longest sequence that is wanted.
        rope: How positions are rotated.
        tie_word_embeddings: Whether the output layer has the embedding's weight.
        attention_bias: Whether the projections to queries, keys and values have biases.
        attention_output_bias: Whether the attention's projection back has one.
        mlp_bias: Whether the MLP's projections have biases.
        activation: The MLP's activation, by the names of `max.nn.MLP`.
        interleaved_rope: Whether the elements of a rotated pair are neighbours; in Hugging Face
            checkpoints they are half a head apart.
        quantization: How a GPTQ checkpoint's projections are quantised.
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
    activation: str = "silu"
    interleaved_rope: bool = False
    quantization: QuantizationConfig | None = None

    @classmethod
    def from_huggingface(cls, config: Any, max_seq_len: int | None = None) -> Llama3Config:
        """Reads a config.json.

        Args:
            config: Its keys as attributes.
            max_seq_len: The longest sequence that is wanted; the model's by default.

        Raises:
            ModelFilesError: A value is missing, or not one that this architecture has.
        """
        keys = ConfigKeys(config)
        hidden = keys.integer("hidden_size", 1, LARGEST_SIZE)
        heads = keys.integer("num_attention_heads", 1, LARGEST_SIZE)
        kv_heads = keys.integer("num_key_value_heads", 1, LARGEST_SIZE, heads)
        if heads % kv_heads:
            raise keys.error(
                "num_key_value_heads", f"a divisor of num_attention_heads, which is {heads}"
            )
        head_dim = keys.integer("head_dim", 2, LARGEST_SIZE, None)
        if head_dim is None and hidden % heads:
            raise keys.error(
                "num_attention_heads", f"a divisor of hidden_size, which is {hidden}, or a head_dim"
            )
        head_dim = head_dim or hidden // heads
        if head_dim % 2:
            raise keys.error(
                "num_attention_heads" if keys.value("head_dim") is None else "head_dim",
                f"heads of an even size, as halves are rotated; they have {head_dim} elements",
            )
        rope = RopeConfig.from_huggingface(config)
        if rope.kind == "factors" and len(rope.parameters["factors"]) != head_dim // 2:
            raise keys.error("rope_parameters", f"{head_dim // 2} factors, half of head_dim")
        longest = keys.integer("max_position_embeddings", 1, LONGEST_SEQUENCE, 2048)
        return cls(
            hidden_size=hidden,
            intermediate_size=keys.integer("intermediate_size", 1, LARGEST_SIZE),
            num_layers=keys.integer("num_hidden_layers", 1, MOST_LAYERS),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=keys.integer("vocab_size", 1, LARGEST_SIZE),
            rms_norm_eps=keys.number("rms_norm_eps", over=0, most=1),
            max_position_embeddings=longest,
            max_seq_len=longest if max_seq_len is None else max_seq_len,
            rope=rope,
            tie_word_embeddings=keys.flag("tie_word_embeddings"),
            # of Hugging Face's Llama the projection back has a bias too
            attention_bias=keys.flag("attention_bias"),
            attention_output_bias=keys.flag("attention_bias"),
            mlp_bias=keys.flag("mlp_bias"),
            activation=ACTIVATIONS[keys.choice("hidden_act", tuple(ACTIVATIONS), "silu")],
            quantization=_quantization(keys),
        )


def _quantization(keys: ConfigKeys) -> QuantizationConfig | None:
    """What ``quantization_config`` says of a GPTQ checkpoint.

    Raises:
        ModelFilesError: It is of another method, or of bits that no kernel has.
    """
    found = keys.object("quantization_config")
    if found is None:
        return None
    method = found.choice("quant_method", ("gptq",), "")
    if not method:
        raise found.error("quant_method", "gptq")
    bits = found.integer("bits", 2, 8)
    if bits not in (2, 4, 8):
        raise found.error("bits", "2, 4 or 8")
    group = found.integer("group_size", -1, LARGEST_SIZE, 128)
    if group == 0:
        raise found.error("group_size", "at least 1, or -1")
    if found.flag("lm_head"):
        raise found.error("lm_head", "false: a GPTQ lm_head is not supported")
    return QuantizationConfig(method, bits, group, found.flag("desc_act"), found.flag("sym", True))


def stores_plain_zeros(config: Any) -> bool:
    """Whether a GPTQ checkpoint has its zero points as they are (format ``gptq_v2``), not less 1.

    Args:
        config: The model's config.json.
    """
    found = getattr(config, "quantization_config", None)
    return found is not None and found.get("checkpoint_format") == "gptq_v2"
