"""Printing of tensors on standard output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextvars import ContextVar

import numpy as np

from max._interpreter.core import Array, Frame, implements
from max.driver._checkpoint_file import checkpoint_bytes
from max.dtype import DType
from max.graph.print_options import PrintOptions
from max.mlir import MoOp

__all__ = ["CURRENT", "show", "tensor_text", "write"]

CURRENT: ContextVar[PrintOptions] = ContextVar("CURRENT", default=PrintOptions())  # noqa: B039
"""The options of `mo.print` in the interpreter."""


def tensor_text(label: str, array: Array, options: PrintOptions) -> str:
    """Formats a tensor: label, dtype and shape, then the elements in NumPy's format.

    Args:
        label: The label.
        array: The tensor.
        options: The style and precision.
    """
    sizes = ", ".join(str(size) for size in array.shape)
    if options.style == "FULL":
        digits = options.precision
        elements = np.array2string(
            array, separator=", ", threshold=array.size + 1,
            formatter={"float_kind": lambda x: f"{float(x):.{digits}e}"},
        )  # fmt: skip
    else:
        elements = np.array2string(array, separator=", ")
    return f"{label}: {DType.from_numpy(array.dtype).name}[{sizes}]\n{elements}"


def show(label: str, array: Array, options: PrintOptions) -> None:
    """Prints a tensor, or writes it to a file, as the options require.

    Args:
        label: The label.
        array: The tensor.
        options: The options.
    """
    # the label is a file's name, not a path
    file = label.replace("/", "_")
    if options.style == "BINARY" and options.folder is not None:
        (options.folder / file).write_bytes(array.tobytes())
    elif options.style == "BINARY_MAX_CHECKPOINT" and options.folder is not None:
        (options.folder / f"{file}.max").write_bytes(checkpoint_bytes(label, array))
    elif options.style != "NONE":
        write(tensor_text(label, array, options))


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
    if text is None:
        show(label, operands[0], CURRENT.get())
    else:
        write(f"{label}: {text}")
