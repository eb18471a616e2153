"""Format of the tensors that `ops.print` prints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["STYLES", "PrintOptions"]

STYLES = ("COMPACT", "FULL", "BINARY", "BINARY_MAX_CHECKPOINT", "NONE")


@dataclass(slots=True, eq=False, weakref_slot=True)
class PrintOptions:
    """The format of printed tensors.

    Args:
        style: ``COMPACT`` abbreviates large tensors, ``FULL`` prints all elements, ``BINARY`` writes the elements to
            the file ``folder / label``, ``BINARY_MAX_CHECKPOINT`` writes ``folder / label.max`` for
            `max.driver.load_max_buffer`, ``NONE`` prints nothing.
        precision: The digits after the decimal point, for ``FULL``.
        folder: The output folder of the binary styles.
    """

    style: str = "COMPACT"
    precision: int = 6
    folder: Path | None = None
