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

_NEEDED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "rms_norm_eps",
)  # fmt: skip


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
            ValueError: The kind is unknown, lacks a parameter, or has one that is not supported.
        """
        found = getattr(config, "rope_parameters", None)
        if found is None:
            found = {
                "rope_theta": getattr(config, "rope_theta", 10000.0),
                **(getattr(config, "rope_scaling", None) or {}),
            }
        values = dict(found)
        kind = str(values.pop("rope_type", None) or values.pop("type", None) or "default")
        values.pop("type", None)
        theta = float(values.pop("rope_theta", None) or getattr(config, "rope_theta", 10000.0))
        if kind not in _ROPES:
            raise ValueError(
                f"config.json: rope_type is {kind!r}, expected one of {', '.join(_ROPES)}"
            )
        if float(values.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ValueError(
                "config.json: partial_rotary_factor is "
                f"{values['partial_rotary_factor']}, a Llama rotates whole heads"
            )
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if values.get(name) is not None:
                raise ValueError(f"config.json: rope_type {kind} with {name} is not supported")
        original = values.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        values["original_max_position_embeddings"] = original or getattr(
            config, "max_position_embeddings", None
        )
        lacking = [name for name in _ROPES[kind] if values.get(name) is None]
        if lacking:
            raise ValueError(f"config.json: rope_type {kind} lacks {', '.join(lacking)}")
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
            ValueError: A value is missing, or not one that this architecture has.
        """
        lacking = [name for name in _NEEDED if getattr(config, name, None) is None]
        if lacking:
            raise ValueError(f"config.json lacks {', '.join(lacking)}")
        activation = str(getattr(config, "hidden_act", None) or "silu")
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"config.json: hidden_act is {activation!r}, expected one of "
                f"{', '.join(ACTIVATIONS)}"
            )
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        if heads % kv_heads:
            raise ValueError(
                f"config.json: {heads} num_attention_heads cannot share {kv_heads} "
                "num_key_value_heads"
            )
        longest = int(getattr(config, "max_position_embeddings", None) or 2048)
        return cls(
            hidden_size=int(config.hidden_size),
            intermediate_size=int(config.intermediate_size),
            num_layers=int(config.num_hidden_layers),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            vocab_size=int(config.vocab_size),
            rms_norm_eps=float(config.rms_norm_eps),
            max_position_embeddings=longest,
            max_seq_len=longest if max_seq_len is None else max_seq_len,
            rope=RopeConfig.from_huggingface(config),
            tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
            # of Hugging Face's Llama the projection back has a bias too
            attention_bias=bool(getattr(config, "attention_bias", False)),
            attention_output_bias=bool(getattr(config, "attention_bias", False)),
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            activation=ACTIVATIONS[activation],
            quantization=_quantization(getattr(config, "quantization_config", None)),
        )


def _quantization(found: Any) -> QuantizationConfig | None:
    """What ``quantization_config`` says of a GPTQ checkpoint.

    Raises:
        ValueError: It is of another method, or of bits that no kernel has.
    """
    if found is None:
        return None

    def value(name: str, default: Any = None) -> Any:
        return found.get(name, default)

    method = str(value("quant_method"))
    if method != "gptq":
        raise ValueError(f"config.json: quant_method is {method!r}, expected gptq")
    bits, group = value("bits"), value("group_size", 128)
    if bits not in (2, 4, 8) or not isinstance(group, int) or (group < 1 and group != -1):
        raise ValueError(
            f"config.json: GPTQ of {bits!r} bits in groups of {group!r}, expected 2, 4 or 8 bits and "
            "groups of 1 or more inputs, or -1"
        )
    if value("lm_head"):
        raise ValueError("config.json: a GPTQ lm_head is not supported")
    return QuantizationConfig(
        method, bits, group, bool(value("desc_act", False)), bool(value("sym", True))
    )


def stores_plain_zeros(config: Any) -> bool:
    """Whether a GPTQ checkpoint has its zero points as they are (format ``gptq_v2``), not less 1.

    Args:
        config: The model's config.json.
    """
    found = getattr(config, "quantization_config", None)
    return found is not None and found.get("checkpoint_format") == "gptq_v2"
