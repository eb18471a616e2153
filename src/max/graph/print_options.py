"""How a model shows the tensors that `ops.print` prints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["STYLES", "PrintOptions"]

STYLES = ("COMPACT", "FULL", "BINARY", "NONE")


@dataclass(slots=True)
class PrintOptions:
    """How tensors are shown.

    Args:
        style: ``COMPACT`` shows the first and last elements of many, ``FULL`` all of them, ``BINARY`` writes the
            elements to a file of ``folder`` that has the label's name, ``NONE`` shows nothing.
        precision: The digits after the point, for ``FULL``.
        folder: Where ``BINARY`` writes.
    """

    style: str = "COMPACT"
    precision: int = 6
    folder: Path | None = None
