"""The structure of the results of modules: tuples, lists and dictionaries around tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from max.experimental.tensor import Tensor
from max.graph import Value

__all__ = ["flatten_result", "result_of"]


def flatten_result(op: str, result: Any, outputs: list[Tensor]) -> Any:
    """The structure of a result, with None for each tensor; the tensors are appended to `outputs`."""
    if isinstance(result, Value):
        result = Tensor.from_graph_value(result)
    if isinstance(result, Tensor):
        outputs.append(result)
        return None
    if isinstance(result, tuple | list):
        items = [flatten_result(op, item, outputs) for item in result]
        return getattr(result, "_make", type(result)), items
    if isinstance(result, dict):
        items = [flatten_result(op, item, outputs) for item in result.values()]
        keys = list(result)
        return (lambda values: dict(zip(keys, values, strict=True)), items)
    raise TypeError(f"{op}: __call__ returned {result!r}, expected tensors")


def result_of(structure: Any, storages: Iterator[Any]) -> Any:
    """The result with a structure: a tensor on the next memory for each None."""
    if structure is None:
        return Tensor(storage=next(storages))
    make, items = structure
    return make([result_of(item, storages) for item in items])
