"""Attention masks, which select the keys that a query attends to."""

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
    """A token attends to itself and to the tokens before it."""

    CAUSAL_ALIBI_MASK = "1"
    """A causal mask, plus a bias that decreases linearly with the distance (ALiBi)."""

    NULL_MASK = "2"
    """A token attends to all tokens."""

    CHUNKED_CAUSAL_MASK = "3"
    """A token attends to itself and to the tokens before it in the same chunk of positions."""

    SLIDING_WINDOW_CAUSAL_MASK = "4"
    """A token attends to itself and to the ``local_window_size - 1`` tokens before it."""


class AttentionMaskVariant(str, Enum):
    """The mask of an attention layer, without its positional encoding."""

    NULL_MASK = "null"
    """A token attends to all tokens."""

    CAUSAL_MASK = "causal"
    """A token attends to itself and to the tokens before it."""

    TENSOR_MASK = "tensor_mask"
    """A tensor that is added to the scores."""

    CHUNKED_CAUSAL_MASK = "chunked_causal"
    """A token attends to itself and to the tokens before it in the same chunk of positions."""

    SLIDING_WINDOW_CAUSAL_MASK = "sliding_window_causal"
    """A token attends to itself and to a fixed number of tokens before it."""


class PositionalEncodingVariant(str, Enum):
    """The positional encoding of an attention layer."""

    NO_POS = "no_pos"
    """No bias; rotary embedding is applied before attention."""

    ALIBI_POS = "alibi_pos"
    """A bias that decreases linearly with the distance (ALiBi)."""


@dataclass
class MHAMaskConfig:
    """A mask and a positional encoding.

    Args:
        attention_mask_variant: The mask.
        positional_encoding_variant: The positional encoding.
    """

    attention_mask_variant: AttentionMaskVariant
    positional_encoding_variant: PositionalEncodingVariant
