"""The closed sets of values that configurations take."""

from __future__ import annotations

from enum import Enum
from typing import Literal, TypeAlias


class RopeType(str, Enum):
    """How a model rotates its queries and keys."""

    none = "none"
    normal = "normal"
    neox = "neox"
    longrope = "longrope"
    yarn = "yarn"


class PipelineRole(str, Enum):
    """What part of the work a pipeline does."""

    PrefillAndDecode = "prefill_and_decode"
    PrefillOnly = "prefill_only"
    DecodeOnly = "decode_only"

    @property
    def uses_dispatch_service(self) -> bool:
        """Whether requests move between machines."""
        return self is not PipelineRole.PrefillAndDecode


DeviceKind: TypeAlias = Literal["cpu", "gpu"]
