"""Branches and loops: `torch.cond` and `while_loop`."""

from __future__ import annotations

from typing import Any

from max.graph import TensorValue, ops
from max.importers.control import FAILURES, bounded_loop, stage_branch, tensors_of
from max.importers.errors import Unsupported
from max.importers.node import Node
from max.importers.source import SourceGraph
from max.importers.torch.table import TABLE, Ref
from max.importers.values import Imported, Value


def _operands(node: Node, arguments: list[Any]) -> list[str]:
    """The names of the values that a body takes."""
    if not all(isinstance(argument, Ref) for argument in arguments):
        raise Unsupported("a body takes a number")
    return [node.source.inputs[argument.operand] for argument in arguments]


@TABLE.op("cond")
def branch(node: Node) -> Any:
    _, *bodies, arguments = node.source.attributes["args"]
    names = _operands(node, arguments)
    bound: list[SourceGraph] = []
    for number, body in enumerate(bodies):
        inputs = [name for name, _ in body.inputs]
        inner = body.with_prefix(
            f"cond {node.source.number}/{number}/", dict(zip(inputs, names, strict=True))
        )
        bound.append(
            SourceGraph(inner.name, (), inner.outputs, inner.nodes, inner.constants, inner.file)
        )
    chosen = stage_branch(node, 0, *bound)
    return tuple(node.walker.inner(chosen, [])) if isinstance(chosen, SourceGraph) else chosen


@TABLE.op("while_loop")
def while_loop(node: Node) -> Any:
    condition, body, carried, *others = node.source.attributes["args"]
    constant = _operands(node, list(others[0]) if others else [])
    fixed: list[Value] = [node.walker.values[name] for name in constant]
    state = tensors_of([node.walker.values[name] for name in _operands(node, carried)])

    def check(current: list[TensorValue]) -> TensorValue:
        arguments = [*(Imported(tensor) for tensor in current), *fixed]
        (keeps,) = tensors_of(node.walker.inner(condition, arguments))
        return ops.reshape(keeps, [])

    def step(iteration: TensorValue, current: list[TensorValue]) -> Any:
        arguments = [*(Imported(tensor) for tensor in current), *fixed]
        following = tensors_of(node.walker.inner(body, arguments))
        return check(following), following, []

    try:
        # the first condition decides about the first iteration
        finals, _ = bounded_loop(ops.where(check(state), 1 << 62, 0), state, step)
    except FAILURES as error:
        raise Unsupported(f"is a loop that a graph has not: {error}") from error
    return tuple(finals)
