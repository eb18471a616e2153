"""Sequences and optional values: lists of the importer, not of the graph."""

from __future__ import annotations

from typing import Any

import numpy as np

from max.graph import TensorValue, ops
from max.importers.errors import Unsupported
from max.importers.node import Node
from max.importers.onnx.table import op
from max.importers.values import Imported, Items


@op("SequenceEmpty")
def sequence_empty(node: Node) -> Items:
    return Items()


@op("SequenceConstruct")
def sequence_construct(node: Node) -> Items:
    return Items(node.value(index) for index in range(len(node.operands)))


@op("SequenceLength")
def sequence_length(node: Node) -> Any:
    return np.array(len(node.items(0)), np.int64)


def _index(node: Node, operand: int, length: int, last: int) -> int:
    """A position in a sequence; negative ones count from the end."""
    index = int(node.number(operand))
    if not -length <= index <= last:
        raise Unsupported(f"the position is {index}, the sequence has {length} items")
    return index + length if index < 0 else index


@op("SequenceAt")
def sequence_at(node: Node) -> Imported:
    items = node.items(0)
    return items[_index(node, 1, len(items), len(items) - 1)]


@op("SequenceInsert")
def sequence_insert(node: Node) -> Items:
    # a copy: others may use the operand
    items = Items(node.items(0))
    place = _index(node, 2, len(items), len(items)) if node.has(2) else len(items)
    items.insert(place, node.value(1))
    return items


@op("SequenceErase")
def sequence_erase(node: Node) -> Items:
    items = Items(node.items(0))
    if not items:
        raise Unsupported("the sequence is empty")
    del items[_index(node, 1, len(items), len(items) - 1) if node.has(1) else -1]
    return items


@op("SplitToSequence")
def split_to_sequence(node: Node) -> Items:
    x = node.tensor(0)
    axis = node.axis("axis", x.rank, 0)
    total = node.static(x.shape[axis])
    if not node.has(1):
        parts = ops.split(x, [1] * total, axis)
        if not node.attr("keepdims", 1):
            parts = [ops.squeeze(part, axis) for part in parts]
        return Items(Imported(part) for part in parts)
    sizes = node.elements(1)
    if sizes.ndim == 0:
        each = int(sizes)
        if each < 1:
            raise Unsupported(f"the size of parts is {each}")
        listed = [min(each, total - start) for start in range(0, total, each)]
    else:
        listed = [int(size) for size in sizes]
    return Items(Imported(part) for part in ops.split(x, listed, axis))


@op("ConcatFromSequence")
def concat_from_sequence(node: Node) -> TensorValue:
    tensors = [item.tensor for item in node.items(0)]
    if not tensors:
        raise Unsupported("the sequence is empty")
    if node.attr("new_axis", 0):
        return ops.stack(tensors, node.axis("axis", tensors[0].rank + 1))
    return ops.concat(tensors, node.axis("axis", tensors[0].rank))


@op("Optional")
def optional(node: Node) -> Any:
    return (node.operands[0] if node.operands else None,)


@op("OptionalHasElement")
def optional_has_element(node: Node) -> Any:
    return np.array(bool(node.operands) and node.operands[0] is not None)


@op("OptionalGetElement")
def optional_get_element(node: Node) -> Any:
    value = node.operands[0]
    if value is None:
        raise Unsupported("the optional value is absent")
    return value
