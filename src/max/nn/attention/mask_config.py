"""Which keys a query sees."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = [
    "AttentionMaskVariant",
    "MHAMaskConfig",
    "MHAMaskVariant",
    "PositionalEncodingVariant",
]


class MHAMaskVariant(str, Enum):
    """The mask of an attention layer, with its positional encoding."""

    CAUSAL_MASK = "0"
    """A token sees itself and those before it."""

    CAUSAL_ALIBI_MASK = "1"
    """The same, with a bias that falls with the distance (ALiBi)."""

    NULL_MASK = "2"
    """A token sees all tokens."""

    CHUNKED_CAUSAL_MASK = "3"
    """A token sees itself and those before it in the same chunk of positions."""

    SLIDING_WINDOW_CAUSAL_MASK = "4"
    """A token sees itself and the ``local_window_size - 1`` tokens before it."""


class AttentionMaskVariant(str, Enum):
    """The mask of an attention layer alone."""

    NULL_MASK = "null"
    """A token sees all tokens."""

    CAUSAL_MASK = "causal"
    """A token sees itself and those before it."""

    TENSOR_MASK = "tensor_mask"
    """A tensor that is added to the scores says it."""

    CHUNKED_CAUSAL_MASK = "chunked_causal"
    """A token sees itself and those before it in the same chunk of positions."""

    SLIDING_WINDOW_CAUSAL_MASK = "sliding_window_causal"
    """A token sees itself and a fixed number of tokens before it."""


class PositionalEncodingVariant(str, Enum):
    """How an attention layer takes account of positions."""

    NO_POS = "no_pos"
    """Not at all; rotary embedding has done it before."""

    ALIBI_POS = "alibi_pos"
    """By a bias that falls with the distance."""


@dataclass
class MHAMaskConfig:
    """A mask and a positional encoding.

    Args:
        attention_mask_variant: The mask.
        positional_encoding_variant: The positional encoding.
    """

    attention_mask_variant: AttentionMaskVariant
    positional_encoding_variant: PositionalEncodingVariant
