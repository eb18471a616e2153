"""The RoPE of a model, as its config.json describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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

__all__ = ["LONGEST_SEQUENCE", "RopeConfig"]

LONGEST_SEQUENCE = 2**31 - 1

_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "factors": ("factors",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""The kinds of RoPE scaling, and the parameters that each requires."""


@dataclass(frozen=True)
class RopeConfig:
    """How positions rotate queries and keys.

    Args:
        kind: default, linear, llama3, yarn, or factors (one factor per frequency, from GGUF files).
        theta: The base of the frequencies.
        parameters: Parameters of the kind, by their names in config.json.
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
        return cls.from_keys(ConfigKeys(config), 10000.0)

    @classmethod
    def from_keys(cls, keys: ConfigKeys, default_theta: float) -> RopeConfig:
        """Reads ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` of older files.

        Args:
            keys: The keys of config.json.
            default_theta: The base of the frequencies where the file has none.

        Raises:
            ModelFilesError: The kind is unknown, lacks a parameter, or has one that does not fit.
        """
        theta = keys.number("rope_theta", over=0, default=default_theta)
        rope = keys.object("rope_parameters") or keys.object("rope_scaling")
        return cls.from_parameters(keys, rope, theta)

    @classmethod
    def from_parameters(
        cls, keys: ConfigKeys, rope: ConfigKeys | None, default_theta: float
    ) -> RopeConfig:
        """Reads an object such as ``rope_parameters``.

        Args:
            keys: The keys of config.json.
            rope: The keys of the object; None where there is none.
            default_theta: The base of the frequencies where the object has none.

        Raises:
            ModelFilesError: The kind is unknown, lacks a parameter, or has one that does not fit.
        """
        rope = rope or ConfigKeys({})
        kind_key = "type" if rope.value("rope_type") is None else "rope_type"
        kind = rope.choice(kind_key, tuple(_REQUIRED), "default")
        theta = rope.number("rope_theta", over=0, default=default_theta)
        if rope.number("partial_rotary_factor", over=0, default=1.0) != 1.0:
            raise rope.error("partial_rotary_factor", "1: heads are rotated as a whole")
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if rope.value(name) is not None:
                raise rope.error(name, f"none: with rope_type {kind} it is not supported")
        parameters = _parameters(keys, rope)
        for name in _REQUIRED[kind]:
            if parameters.get(name) is None:
                raise rope.error(name, f"what rope_type {kind} needs")
        if kind == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
            raise rope.error("low_freq_factor", "less than high_freq_factor")
        return cls(kind, theta, parameters)

    def layer(
        self, *, dim: int, n_heads: int, head_dim: int, max_seq_len: int, interleaved: bool
    ) -> RotaryEmbedding:
        """The rotary embedding.

        Args:
            dim: The hidden size.
            n_heads: The number of query heads.
            head_dim: The size of a head.
            max_seq_len: The longest sequence.
            interleaved: Whether the elements of a rotated pair are neighbours.
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
                # LongRoPE with the same factors at every length
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


def _parameters(keys: ConfigKeys, rope: ConfigKeys) -> dict[str, Any]:
    """The parameters of all kinds, None where the file lacks one."""
    original = "original_max_position_embeddings"
    trained = keys.integer("max_position_embeddings", 1, LONGEST_SEQUENCE, None)
    trained = keys.integer(original, 1, LONGEST_SEQUENCE, trained)
    factors = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
    return {
        original: rope.integer(original, 1, LONGEST_SEQUENCE, trained),
        "truncate": rope.flag("truncate", True),
        "factors": rope.numbers("factors", over=0),
        **{name: rope.number(name, over=0, default=None) for name in factors},
    }
