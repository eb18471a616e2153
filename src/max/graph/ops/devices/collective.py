"""Staging of collectives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from max.graph import graph
from max.graph.ops.staging.stage import as_tensor
from max.graph.value import BufferValue, TensorValue, tensor_of


def stage_collective(
    name: str,
    inputs: Iterable[TensorValue],
    signal_buffers: Iterable[BufferValue],
    attrs: Mapping[str, Any] | None = None,
) -> list[TensorValue]:
    """Stages a collective with one tensor, one signal buffer and one result per device.

    Raises:
        ValueError: There is no input, or the numbers of inputs and signal buffers differ.
    """
    tensors = [as_tensor(x) for x in inputs]
    buffers = list(signal_buffers)
    if not tensors:
        raise ValueError(f"{name}: no inputs; expected one a device")
    if len(buffers) != len(tensors):
        raise ValueError(
            f"{name}: {len(tensors)} inputs and {len(buffers)} signal buffers; expected a buffer "
            "for each input"
        )
    results = graph.Graph.current.stage_effect(f"mo.{name}", (*tensors, *buffers), attrs)
    return [tensor_of(result) for result in results]
