"""What `mo.print` shows, on standard output."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from max._interpreter.core import Array, Frame, implements
from max.dtype import DType
from max.mlir import MoOp

__all__ = ["tensor_text", "write"]


def tensor_text(label: str, array: Array) -> str:
    """A label, dtype and shape of a tensor, and its elements as NumPy shows them: of many the first and last ones.

    Args:
        label: The label.
        array: The tensor.
    """
    sizes = ", ".join(str(size) for size in array.shape)
    elements = np.array2string(array, separator=", ")
    return f"{label}: {DType.from_numpy(array.dtype).name}[{sizes}]\n{elements}"


def write(text: str) -> None:
    """Writes a line to standard output.

    Args:
        text: The line, or several.
    """
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@implements("print")
def _print(frame: Frame, op: MoOp, operands: Sequence[Array]) -> None:
    label: str = op.attr("label")
    text = op.attr_or("text", None)
    write(tensor_text(label, operands[0]) if text is None else f"{label}: {text}")
