"""Enumerations in configurations."""

from __future__ import annotations

from enum import Enum
from typing import Literal, TypeAlias


class RopeType(str, Enum):
    """The RoPE layout: which elements of a head form a rotated pair, or the scaling of frequencies."""

    none = "none"
    normal = "normal"
    neox = "neox"
    longrope = "longrope"
    yarn = "yarn"


class SpeculativeMethod(str, Enum):
    """How tokens are drafted."""

    ngram = "ngram"
    """By look-up in the request's own text, and in recent answers."""
    auto = "auto"
    """As `ngram`, where the model can verify drafts; by `mtp` too, where the checkpoint has such layers."""
    mtp = "mtp"
    """By layers of the checkpoint that predict further tokens."""
    eagle3 = "eagle3"
    """By a head of EAGLE 3, which is in a folder of its own."""
    standalone = "standalone"
    """By a smaller model."""
    none = "none"
    """They are not."""


OF_DRAFT_MODELS = (SpeculativeMethod.standalone, SpeculativeMethod.eagle3)
"""The ways of drafting that need a draft model."""


class PipelineRole(str, Enum):
    """The part of the work that a pipeline does."""

    PrefillAndDecode = "prefill_and_decode"
    PrefillOnly = "prefill_only"
    DecodeOnly = "decode_only"

    @property
    def uses_dispatch_service(self) -> bool:
        """Whether requests move between machines."""
        return self is not PipelineRole.PrefillAndDecode


DeviceKind: TypeAlias = Literal["cpu", "gpu"]
