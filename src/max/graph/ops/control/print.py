"""Printing of values when a graph runs."""

from __future__ import annotations

from max.graph import graph as _graph
from max.graph.ops.control.buffer import buffer_load
from max.graph.value import BufferValue, TensorValue

__all__ = ["print"]


def print(value: str | TensorValue | BufferValue, label: str = "debug_tensor") -> None:
    """Prints a tensor, or a text, on standard output each time the graph runs.

    One line has the label, dtype and shape; the elements follow in NumPy's format. Printing is a side effect, ordered
    with stores to buffers as staged. It interrupts the program: executions of such a graph cannot be captured.

    Args:
        value: A tensor, a buffer, whose elements at this point are printed, or a text.
        label: The start of the line.

    Raises:
        TypeError: The value is none of these, or the label is not a str.
    """
    if not isinstance(label, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"print: the label is {label!r}, expected a str")
    graph = _graph.Graph.current
    if isinstance(value, str):
        graph.stage_effect("mo.print", (), {"label": label, "text": value})
        return
    shown = buffer_load(value) if isinstance(value, BufferValue) else value
    if not isinstance(shown, TensorValue):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"print: the value is {value!r}, expected a str, a TensorValue or a buffer")
    graph.stage_effect("mo.print", (shown,), {"label": label})
