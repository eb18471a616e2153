"""Branches and loops of source models as `cond` and `while_loop`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from max import mlir
from max.dtype import DType
from max.graph import BufferType, BufferValue, DeviceRef, Dim, Graph, TensorValue, Value, ops
from max.graph.staging.branch import Branch, close_branches
from max.importers.errors import HostNode, ImportFailure, MissingContents, Unsupported
from max.importers.node import Node
from max.importers.source import SourceGraph
from max.importers.values import Imported
from max.importers.values import Value as SourceValue

__all__ = ["bounded_loop", "stage_branch", "tensors_of"]

Step = Callable[
    [TensorValue, list[TensorValue]],
    tuple["TensorValue | None", Sequence[TensorValue], Sequence[TensorValue]],
]
"""``(number, state) -> (whether to continue, the next state, what is stacked)``"""

FAILURES = (MissingContents, HostNode, Unsupported, ImportFailure, ValueError, TypeError)
"""What a body raises that cannot be a subgraph."""


def tensors_of(values: Sequence[SourceValue]) -> list[TensorValue]:
    """Values that must be tensors of numbers.

    Raises:
        HostNode: One is a sequence, absent, or a text.
    """
    tensors: list[TensorValue] = []
    for value in values:
        if not isinstance(value, Imported) or value.is_text:
            raise HostNode("carries a sequence or strings, which a graph has not")
        tensors.append(value.tensor)
    return tensors


def stage_branch(
    node: Node, condition: int, then: SourceGraph, otherwise: SourceGraph
) -> SourceGraph | tuple[TensorValue, ...]:
    """One of two bodies without inputs, chosen by an operand.

    Args:
        node: The node.
        condition: The operand.
        then: The body for true.
        otherwise: The body for false.

    Returns:
        The body itself if the condition is known, else the results of a `cond`.

    Raises:
        MissingContents: The bodies cannot be branches of one op: the condition must be known.
    """
    value = node.value(condition)
    if value.numbers is not None:
        return then if bool(node.number(condition)) else otherwise
    outer = Graph.current
    try:
        branches: list[Branch] = []
        results: list[list[Value[Any]]] = []
        for role, body in (("then", then), ("else", otherwise)):
            branch = Branch(outer, role, (), branches[0].captures if branches else ())
            with branch:
                tensors = tensors_of(node.walker.inner(body, []))
            results.append(branch.own(tensors))
            branches.append(branch)
        types = [[v.to_mlir().type for v in values] for values in results]
        if types[0] != types[1]:
            raise ValueError("the branches have results of different types")
        _check_bound(outer, types[0])
    except FAILURES as error:
        raise MissingContents(node.source.inputs[condition], "the elements", str(error)) from error
    predicate = ops.reshape(value.tensor, [])
    staged = close_branches(
        "mo.if", (branches[0], branches[1]), (results[0], results[1]), (predicate,), (), ("then", "otherwise"), types[0]
    )  # fmt: skip
    return tuple(value for value in staged if isinstance(value, TensorValue))


def _check_bound(outer: Graph, types: Sequence[mlir.Attribute]) -> None:
    """Raises ValueError if a type has a symbol that the enclosing graph lacks."""
    for type_ in types:
        assert isinstance(type_, mlir.TensorType)
        outer.check_symbols("cond", type_.shape)


def bounded_loop(
    limit: TensorValue | None,
    state: Sequence[TensorValue],
    step: Step,
    capacity: Dim | None = None,
) -> tuple[list[TensorValue], list[TensorValue]]:
    """A loop in the graph.

    Args:
        limit: The greatest number of iterations: int64, rank 0; None: no limit.
        state: The initial state. Its types do not change.
        step: Stages an iteration. It is called once.
        capacity: The exact number of iterations, for what is stacked.

    Returns:
        The last state, and the stacked results of all iterations.

    Raises:
        ValueError: The state changes its types.
        HostNode: There are results to stack, and the number of iterations is not known before.
    """
    outer = Graph.current
    device = DeviceRef.CPU()
    start = [ops.constant(0, DType.int64), ops.constant(True, DType.bool), *state]
    types = [value.to_mlir().type for value in start]
    condition = Branch(outer, "condition", types)
    with condition:
        number, keep = condition.inputs[0].tensor, condition.inputs[1].tensor
        check = keep if limit is None else ops.logical_and(keep, number < limit)
    checked = condition.own([check])
    body = Branch(outer, "body", types, condition.captures)
    buffers: list[BufferValue] = []
    with body:
        number, keep, *current = [value.tensor for value in body.inputs]
        going_on, following, stacked = step(number, current)
        if stacked and capacity is None:
            raise HostNode("stacks results of a number of iterations that only a run knows")
        for part in stacked:
            assert capacity is not None
            outer.check_symbols("loop", part.mlir_type.shape)
            with outer:
                buffer = ops.buffer_create(BufferType(part.dtype, [capacity, *part.shape], device))
            buffers.append(buffer)
            row = ops.unsqueeze(part, 0)
            index: list[Any] = [(slice(number, number + 1), 1), *[slice(None)] * part.rank]
            ops.buffer_store_slice(buffer, row, index)
        results = [number + 1, keep if going_on is None else going_on, *following]
    if [value.to_mlir().type for value in results] != types:
        raise ValueError("the state of a loop changes its types")
    staged = close_branches(
        "mo.while", (condition, body), (checked, body.own(results)), (), start, ("condition", "body"), types
    )  # fmt: skip
    finals = [value for value in staged if isinstance(value, TensorValue)]
    return finals[2:], [ops.buffer_load(buffer) for buffer in buffers]
