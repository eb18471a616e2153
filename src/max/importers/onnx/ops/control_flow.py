"""If, Loop and Scan: in the graph where the types of all iterations are equal, else on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.graph import Dim, TensorValue, ops
from max.importers.control import FAILURES, bounded_loop, stage_branch, tensors_of
from max.importers.errors import HostNode, ModelFileError, Unsupported
from max.importers.node import Node
from max.importers.onnx.table import host, op
from max.importers.source import SourceGraph
from max.importers.values import Imported

Array = npt.NDArray[Any]

_MOST_ITERATIONS = 20_000
"""Iterations of a loop that the host executes; loops in a graph have no limit."""


@op("If")
def branch(node: Node) -> Any:
    return stage_branch(node, 0, node.body("then_branch"), node.body("else_branch"))


def _keeps_on(body: SourceGraph, result: Any, argument: Any) -> bool:
    """Whether the condition that a body returns is the one it got, or true."""
    if result is argument:
        return True
    return (
        isinstance(result, Imported) and result.numbers is not None and bool(result.numbers.all())
    )


@op("Loop")
def loop(node: Node) -> Any:
    body = node.body("body")
    try:
        return _loop(node, body)
    except FAILURES as error:
        raise HostNode(f"is a loop that a graph has not: {error}") from error


def _loop(node: Node, body: SourceGraph) -> tuple[TensorValue, ...]:
    limit, capacity = None, None
    if node.has(0):
        limit = ops.cast(ops.reshape(node.tensor(0), []), DType.int64)
        # a known limit, also an expression over sizes, is the capacity of stacked results
        contents = node.value(0).contents
        capacity = None if contents is None else node.sizes(0)[0]
    state = tensors_of(node.operands[2:])
    start: TensorValue | None = None
    if node.has(1):
        known = node.value(1).numbers
        if known is None:
            start = ops.reshape(node.tensor(1), [])
        # constant and false: the host returns the initial state, and nothing stacked
        elif not known.all():
            raise HostNode("has no iteration")
    carried = len(state)
    if start is not None:
        # the condition is carried with the state, as the body may read it
        state = [start, *state]
    # whether the loop runs to its limit, so that the size of stacked results is known
    exact = start is None

    def step(iteration: TensorValue, current: list[TensorValue]) -> Any:
        nonlocal exact
        own = current if start is None else current[1:]
        condition = Imported(contents=np.array(True)) if start is None else Imported(current[0])
        arguments = [Imported(iteration), condition, *(Imported(tensor) for tensor in own)]
        keep, *results = node.walker.inner(body, arguments)
        tensors = tensors_of(results)
        following, stacked = tensors[:carried], tensors[carried:]
        if _keeps_on(body, keep, condition):
            going_on = None
        else:
            exact = False
            going_on = ops.reshape(tensors_of([keep])[0], [])
        if stacked and not exact:
            raise HostNode("stacks results of a number of iterations that only a run knows")
        if start is not None:
            flag = current[0] if going_on is None else going_on
            return flag, [flag, *following], stacked
        return going_on, following, stacked

    if start is not None:
        # the first condition decides about the first iteration
        limit = ops.where(start, limit if limit is not None else 1 << 62, 0)
    finals, stacked = bounded_loop(limit, state, step, capacity)
    return tuple([*(finals if start is None else finals[1:]), *stacked])


@host("Loop")
def loop_on_host(
    node: Any, limit: Array | None, condition: Array | None, *state: Any
) -> tuple[Any, ...]:
    body = node.body("body")
    most = 1 << 62 if limit is None else int(limit.reshape(-1)[0])
    going_on = condition is None or bool(condition.all())
    carried = list(state)
    stacked: list[list[Any]] = [[] for _ in range(len(body.outputs) - 1 - len(carried))]
    number = 0
    while going_on and number < most:
        if number >= _MOST_ITERATIONS:
            raise ModelFileError(
                f"a Loop whose state has no fixed types runs more than {_MOST_ITERATIONS} iterations"
            )
        arguments = [np.array(number, np.int64), np.array(going_on), *carried]
        keep, *results = node.run(body, _shape_arguments(body, arguments))
        going_on = bool(np.asarray(keep).all())
        carried = results[: len(carried)]
        for items, item in zip(stacked, results[len(carried) :], strict=True):
            items.append(item)
        number += 1
    return tuple(
        [*carried, *(_stack(node, body, index, items) for index, items in enumerate(stacked))]
    )


def _shape_arguments(body: SourceGraph, arguments: list[Any]) -> list[Any]:
    """The number and the condition in the shapes that the body declares: rank 0 or 1."""
    for index in (0, 1):
        shape = body.inputs[index][1].shape
        if shape is not None and len(shape) == 1:
            arguments[index] = arguments[index].reshape(1)
    return arguments


def _stack(node: Any, body: SourceGraph, index: int, items: list[Any]) -> Array:
    if items:
        if any(item.shape != items[0].shape for item in items):
            raise ModelFileError("a Loop stacks results of different shapes")
        return np.stack(items)
    # without an iteration only the body's declaration says what an item would be
    _, type_ = body.outputs[len(body.outputs) - (len(node.source.outputs) - index) :][0]
    sizes = [size if isinstance(size, int) else 0 for size in type_.shape or ()]
    dtype = type_.dtype.to_numpy() if type_.dtype is not None else np.dtype(object)
    return np.zeros([0, *sizes], dtype)


@op("Scan")
def scan(node: Node) -> Any:
    body = node.body("body")
    if node.version < 9:
        return _scan_batched(node, body)
    count = node.attr("num_scan_inputs")
    values = [node.tensor(index) for index in range(len(node.operands))]
    return tuple(_scan(node, body, values[: len(values) - count], values[len(values) - count :]))


def _int_list(node: Node, name: str, count: int) -> list[int]:
    return list(node.attr(name) or [0] * count)


def _scan(
    node: Node, body: SourceGraph, state: list[TensorValue], inputs: list[TensorValue]
) -> list[TensorValue]:
    axes = _int_list(node, "scan_input_axes", len(inputs))
    axes = [node.checked_axis(axis, x.rank) for axis, x in zip(axes, inputs, strict=True)]
    outputs = len(body.outputs) - len(state)
    reverse = _int_list(
        node, "scan_input_directions" if node.version >= 9 else "directions", len(inputs)
    )
    # the scanned axis of all inputs has one size
    count = inputs[0].shape[axes[0]]
    results_reverse = _int_list(node, "scan_output_directions", outputs)
    moved = [_move_axis(x, axis, 0) for x, axis in zip(inputs, axes, strict=True)]
    finals, stacked = _scan_rows(node, body, state, moved, reverse, count)
    result_axes = _int_list(node, "scan_output_axes", outputs)
    placed: list[TensorValue] = []
    for part, axis, backwards in zip(stacked, result_axes, results_reverse, strict=True):
        if backwards:
            # the first iteration's row comes last
            part = part[(slice(None, None, -1), *[slice(None)] * (part.rank - 1))]
        placed.append(_move_axis(part, 0, node.checked_axis(axis, part.rank)))
    return [*finals, *placed]


def _move_axis(x: TensorValue, source: int, target: int) -> TensorValue:
    """The tensor with an axis at another place."""
    if source == target:
        return x
    order = [axis for axis in range(x.rank) if axis != source]
    order.insert(target, source)
    return ops.permute(x, order)


def _scan_rows(
    node: Node,
    body: SourceGraph,
    state: list[TensorValue],
    inputs: list[TensorValue],
    reverse: list[int],
    count: Dim,
) -> tuple[list[TensorValue], list[TensorValue]]:
    last = TensorValue(count) - 1

    def step(iteration: TensorValue, current: list[TensorValue]) -> Any:
        rows = [
            ops.gather(x, last - iteration if backwards else iteration, 0)
            for x, backwards in zip(inputs, reverse, strict=True)
        ]
        arguments = [Imported(tensor) for tensor in (*current, *rows)]
        results = tensors_of(node.walker.inner(body, arguments))
        return None, results[: len(current)], results[len(current) :]

    try:
        return bounded_loop(TensorValue(count), state, step, count)
    except FAILURES as error:
        raise HostNode(f"is a scan that a graph has not: {error}") from error


def _scan_batched(node: Node, body: SourceGraph) -> Any:
    """Scan of version 8: each sequence of a batch has its own state, and all run over one axis."""
    count = node.attr("num_scan_inputs")
    if node.has(0):
        raise Unsupported("has lengths of sequences, which version 8 of Scan takes")
    values = [node.tensor(index) for index in range(1, len(node.operands))]
    state, inputs = values[: len(values) - count], values[len(values) - count :]
    batch = node.static(inputs[0].shape[0], 1 + len(state))
    parts = [
        # states of sequences are independent, and their number is static: one scan each
        _scan_rows(
            node, body, [x[index] for x in state], [x[index] for x in inputs],
            _int_list(node, "directions", count), inputs[0].shape[1],
        )
        for index in range(batch)
    ]  # fmt: skip
    joined = zip(*[[*finals, *stacked] for finals, stacked in parts], strict=True)
    return tuple(ops.stack(items) for items in joined)


@host("Scan")
def scan_on_host(node: Any, *operands: Any) -> tuple[Any, ...]:
    body, count = node.body("body"), node.attr("num_scan_inputs")
    state, inputs = list(operands[: len(operands) - count]), operands[len(operands) - count :]
    axes = _int_list(node, "scan_input_axes", count)
    backwards = _int_list(node, "scan_input_directions", count)
    length = inputs[0].shape[axes[0]]
    outputs = len(body.outputs) - len(state)
    stacked: list[list[Any]] = [[] for _ in range(outputs)]
    for number in range(length):
        rows = [
            # a backward input is read from its end
            np.take(x, length - 1 - number if back else number, axis)
            for x, axis, back in zip(inputs, axes, backwards, strict=True)
        ]
        results = node.run(body, [*state, *rows])
        state = results[: len(state)]
        for items, item in zip(stacked, results[len(state) :], strict=True):
            items.append(item)
    result_axes = _int_list(node, "scan_output_axes", outputs)
    reverse = _int_list(node, "scan_output_directions", outputs)
    placed = [
        np.stack(items[::-1] if back else items, axis)
        for items, axis, back in zip(stacked, result_axes, reverse, strict=True)
    ]
    return tuple([*state, *placed])
