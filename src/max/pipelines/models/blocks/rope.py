"""The rotary position embedding (RoPE) of a model, as described by its config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from max._dataclass import dataclass
from max.nn.layers.scaled_rotary import FactorRotaryEmbedding, yarn_magnitude
from max.nn.rotary_embedding import (
    LinearRotaryEmbedding,
    LinearScalingParams,
    Llama3RopeScalingParams,
    Llama3RotaryEmbedding,
    RotaryEmbedding,
    YarnRotaryEmbedding,
    YarnScalingParams,
)
from max.pipelines.checkpoints.config_keys import ConfigKeys

__all__ = [
    "LONGEST_SEQUENCE",
    "RopeConfig",
    "longest_of",
    "rotation_keys",
]

LONGEST_SEQUENCE = 2**31 - 1

_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "max_position_embeddings"),
    "factors": ("factors",),
    "proportional": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
"""The kinds of RoPE scaling, and the parameters that each kind requires."""

_ALIASES = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn"}
"""Aliases of kinds; M-RoPE's three position components are equal for text tokens."""


def longest_of(keys: ConfigKeys, key: str, default: Any = None) -> Any:
    """A number of tokens; one beyond the longest sequence that runs here counts as that.

    Args:
        keys: The keys of an object.
        key: The key.
        default: The value if the key is missing.

    Raises:
        ModelFilesError: The value is no integer from 1.
    """
    length = keys.integer(key, 1, 2**62, default)
    return None if length is None else min(length, LONGEST_SEQUENCE)


def rotation_keys(keys: ConfigKeys) -> ConfigKeys | None:
    """The keys of ``rope_scaling``, which counts first, or of ``rope_parameters``; None if neither has any.

    Args:
        keys: The keys of config.json.

    Raises:
        ModelFilesError: A value is no object.
    """
    for key in ("rope_scaling", "rope_parameters"):
        section = keys.object(key)
        if section is not None and section.config:
            return section
    return keys.default_object("rope_parameters")


@dataclass(frozen=True)
class RopeConfig:
    """The rotation of queries and keys by position.

    Args:
        kind: default, linear, dynamic, llama3, yarn, longrope, factors (one divisor per frequency, from GGUF files), or
            proportional (the frequencies of the whole head, of which only a fraction rotates).
        theta: The base of the frequencies.
        parameters: Parameters of the kind, by their names in config.json.
        rotated_dim: The number of rotated elements at the beginning of a head; None: the whole head.
    """

    kind: str = "default"
    theta: float = 10000.0
    parameters: Mapping[str, Any] = field(default_factory=dict)
    rotated_dim: int | None = None

    @classmethod
    def from_keys(
        cls,
        keys: ConfigKeys,
        theta: float = 10000.0,
        *,
        head_dim: int | None = None,
        section: str | None = None,
        partial: float | None = None,
    ) -> RopeConfig:
        """Reads ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` of older files.

        Args:
            keys: The keys of config.json.
            theta: The base of the frequencies if the file states none.
            head_dim: The size of a head; required with `partial`.
            section: The layer type, if ``rope_parameters`` has an object per layer type.
            partial: The rotated fraction of a head if the file states none; None: the whole head is rotated, and a
                file that states another fraction is refused.

        Raises:
            ModelFilesError: The kind is unknown, lacks a parameter, or has one that does not fit.
        """
        theta = keys.number("rope_theta", over=0, default=theta)
        rope = rotation_keys(keys)
        if rope is not None and section is not None and isinstance(rope.value(section), Mapping):
            rope = rope.object(section)
        return cls.from_parameters(keys, rope, theta, head_dim=head_dim, partial=partial)

    @classmethod
    def from_parameters(
        cls,
        keys: ConfigKeys,
        rope: ConfigKeys | None,
        default_theta: float,
        *,
        head_dim: int | None = None,
        partial: float | None = None,
    ) -> RopeConfig:
        """Reads an object of the form of ``rope_parameters``.

        Args:
            keys: The keys of config.json.
            rope: The keys of the object; None if there is none.
            default_theta: The base of the frequencies if the object has none.
            head_dim: As in `from_keys`.
            partial: As in `from_keys`.

        Raises:
            ModelFilesError: The kind is unknown, lacks a parameter, or has one that does not fit.
        """
        rope = rope or ConfigKeys({})
        kind_key = "type" if rope.value("rope_type") is None else "rope_type"
        kind = rope.choice(kind_key, (*_REQUIRED, *_ALIASES), "default")
        kind = _ALIASES.get(kind, kind)
        theta = rope.number("rope_theta", over=0, default=default_theta)
        if kind == "proportional":
            parameters = {
                "share": rope.number("partial_rotary_factor", over=0, most=1, default=1.0),
                "factor": rope.number("factor", over=0, default=1.0),
            }
            return cls(kind, theta, parameters)
        rotated = _rotated_dim(keys, rope, head_dim, partial)
        if rotated is not None and rotated % 2:
            if kind not in ("default", "linear"):
                raise rope.error(
                    "partial_rotary_factor", "a share of a head that is an even number"
                )
            # frequencies are ``theta ** (-2 i / rotated)`` for pairs i, of which the last one is whole
            rotated, theta = rotated + 1, theta ** ((rotated + 1) / rotated)
            rotated = None if rotated == head_dim else rotated
        parameters = _parameters(keys, rope)
        # Hunyuan's files state kind dynamic with a fixed growth ``alpha`` of the base
        fixed = kind == "dynamic" and parameters["alpha"] is not None
        for name in () if fixed else _REQUIRED[kind]:
            if parameters.get(name) is None:
                raise rope.error(name, f"what rope_type {kind} needs")
        size = rotated or head_dim
        if kind == "dynamic" and size is not None and size < 4:
            raise rope.error(
                kind_key, f"another kind, as heads of {size} elements have one frequency"
            )
        for name in ("factors", "short_factor", "long_factor"):
            factors = parameters[name]
            if size is not None and factors is not None and len(factors) != size // 2:
                raise rope.error(name, f"{size // 2} factors, one per rotated pair")
        return cls(kind, theta, parameters, rotated)

    def layer(
        self, *, dim: int, n_heads: int, head_dim: int, max_seq_len: int, interleaved: bool
    ) -> RotaryEmbedding:
        """The rotary embedding.

        Args:
            dim: The hidden size.
            n_heads: The number of query heads.
            head_dim: The size of a head.
            max_seq_len: The longest sequence.
            interleaved: Whether the elements of a rotated pair are neighbors.
        """
        p = self.parameters
        rotated = self.rotated_dim or head_dim
        common: dict[str, Any] = {
            "dim": dim,
            "n_heads": n_heads,
            "theta": self.base(rotated, max_seq_len),
            "max_seq_len": max_seq_len,
            "head_dim": rotated,
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
                return FactorRotaryEmbedding(list(p["factors"]), **common)
            case "longrope":
                # one set for all positions, as cached keys must not depend on the current length of their sequence
                which = "long" if max_seq_len > original else "short"
                magnitude = p.get(f"{which}_mscale")
                if magnitude is None:
                    magnitude = self.longrope_magnitude()
                return FactorRotaryEmbedding(list(p[f"{which}_factor"]), magnitude, **common)
            case "proportional":
                return FactorRotaryEmbedding(self.proportional_divisors(head_dim), **common)
            case "yarn":
                return self._yarn(common)
            case _:
                return RotaryEmbedding(**common)

    def base(self, rotated_dim: int, longest: int) -> float:
        """The base of the frequencies: `theta`, scaled for kind ``dynamic`` (NTK-aware scaling).

        The factor is ``growth ** (d / (d - 2))`` for ``d`` rotated elements. The growth is the parameter ``alpha``, or
        ``factor * n / trained - (factor - 1)`` if the longest sequence ``n`` exceeds ``max_position_embeddings``.

        Args:
            rotated_dim: The number of rotated elements of a head.
            longest: The longest sequence to serve, as cached keys must not depend on the current length.
        """
        p = self.parameters
        if self.kind != "dynamic":
            return self.theta
        growth = p["alpha"]
        if growth is None:
            trained = p["max_position_embeddings"]
            # that of the longest sequence for all, as cached keys must not depend on the length of theirs
            growth = p["factor"] * max(longest, trained) / trained - (p["factor"] - 1)
        return self.theta * growth ** (rotated_dim / (rotated_dim - 2))

    def longest_sequence(self, trained_length: int) -> int:
        """The longest sequence that the rotation supports.

        Args:
            trained_length: The longest sequence in training, ``max_position_embeddings``.
        """
        if self.kind != "dynamic" or self.parameters["alpha"] is not None:
            return trained_length
        return min(
            max(trained_length, int(trained_length * self.parameters["factor"])), LONGEST_SEQUENCE
        )

    def proportional_divisors(self, head_dim: int) -> list[float]:
        """The divisors of the frequencies if only a fraction of a head rotates: infinity for pairs past the fraction.

        Args:
            head_dim: The size of a head.
        """
        pairs, share = head_dim // 2, self.parameters["share"]
        rotated = int(share * head_dim // 2)
        return [self.parameters["factor"]] * rotated + [math.inf] * (pairs - rotated)

    def _yarn(self, common: Mapping[str, Any]) -> RotaryEmbedding:
        """The layer of a YaRN rotation."""
        p = self.parameters
        scaling = YarnScalingParams(
            factor=float(p["factor"]),
            beta_fast=float(p.get("beta_fast") or 32),
            beta_slow=float(p.get("beta_slow") or 1),
            original_max_position_embeddings=int(p["original_max_position_embeddings"]),
            truncate=bool(p.get("truncate", True)),
        )
        rope = YarnRotaryEmbedding(**common, scaling_params=scaling)
        rope.magnitude = self.stated_yarn_magnitude()
        return rope

    def stated_yarn_magnitude(self) -> float | None:
        """The stated factor of cosines and sines of YaRN; None: the file states none, `yarn_magnitude` applies."""
        p = self.parameters
        magnitude = p.get("attention_factor")
        if magnitude is None and p.get("mscale") and p.get("mscale_all_dim"):
            own, all_dim = (
                yarn_magnitude(float(p["factor"]), p[name]) for name in ("mscale", "mscale_all_dim")
            )
            magnitude = own / all_dim
        return magnitude

    def longrope_magnitude(self) -> float:
        """LongRoPE's factor of cosines and sines."""
        p = self.parameters
        if p.get("attention_factor") is not None:
            return p["attention_factor"]
        original = p["original_max_position_embeddings"]
        factor = p.get("factor") or p["max_position_embeddings"] / original
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _rotated_dim(
    keys: ConfigKeys, rope: ConfigKeys, head_dim: int | None, partial: float | None
) -> int | None:
    """The number of rotated elements of a head; None: all.

    Raises:
        ModelFilesError: The share does not fit.
    """
    name = "partial_rotary_factor"
    if partial is None or head_dim is None:
        # transformers reads the share where the kind scales frequencies, and fails then
        kind = rope.value("rope_type") or rope.value("type") or "default"
        if rope.number(name, over=0, default=1.0) != 1.0 and kind != "default":
            raise rope.error(name, "1: heads are rotated as a whole")
        return None
    share = keys.number(name, over=0, most=1, default=partial)
    share = rope.number(name, over=0, most=1, default=share)
    # the small term makes ``n / head_dim * head_dim`` round to n again
    rotated = int(head_dim * share + 1e-9)
    if rotated < 1 or rotated + rotated % 2 > head_dim:
        at = rope if rope.value(name) is not None else keys
        raise at.error(name, f"a share of head_dim {head_dim} that is at least an element")
    return None if rotated == head_dim else rotated


def _parameters(keys: ConfigKeys, rope: ConfigKeys) -> dict[str, Any]:
    """The parameters of all kinds; None if the file lacks one."""
    original, longest = "original_max_position_embeddings", "max_position_embeddings"
    trained = longest_of(keys, longest)
    numbers = ("alpha", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
    magnitudes = ("attention_factor", "mscale", "mscale_all_dim", "short_mscale", "long_mscale")
    return {
        longest: trained,
        # the key of the file counts before that of the object, as in transformers
        original: longest_of(keys, original, longest_of(rope, original, trained)),
        "truncate": rope.flag("truncate", True),
        **{name: rope.numbers(name, over=0) for name in ("factors", "short_factor", "long_factor")},
        **{name: rope.number(name, over=0, default=None) for name in (*numbers, *magnitudes)},
    }
