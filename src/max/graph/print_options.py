"""Format of the tensors that `ops.print` prints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["STYLES", "PrintOptions"]

STYLES = ("COMPACT", "FULL", "BINARY", "NONE")


@dataclass(slots=True)
class PrintOptions:
    """The format of printed tensors.

    Args:
        style: ``COMPACT`` abbreviates large tensors, ``FULL`` prints all elements, ``BINARY`` writes the elements to
            the file ``folder / label``, ``NONE`` prints nothing.
        precision: The digits after the decimal point, for ``FULL``.
        folder: The output folder of ``BINARY``.
    """

    style: str = "COMPACT"
    precision: int = 6
    folder: Path | None = None
