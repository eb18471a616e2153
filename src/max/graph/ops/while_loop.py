"""Loops: `while_loop`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from max.graph import graph as _graph
from max.graph.branch import Branch, close_branches
from max.graph.ops.cond import check_results, checked_predicate, returned
from max.graph.value import BufferValue, TensorValue, Value

__all__ = ["while_loop"]


def while_loop(
    initial_values: Iterable[Value[Any]] | Value[Any],
    predicate: Callable[..., TensorValue],
    body: Callable[..., Value[Any] | Iterable[Value[Any]]],
) -> list[TensorValue]:
    """Executes a body while a predicate of the carried values is true.

    Both functions are called once, to stage their ops. They may use all values of the enclosing graphs, and the body
    may store to buffers. Iterations do not return to Python.

    Args:
        initial_values: The carried values of the first iteration: tensors.
        predicate: Maps the carried values to a bool of rank 0: whether to execute the body.
        body: Maps the carried values to those of the next iteration, of the same types.

    Returns:
        The carried values after the last iteration.

    Raises:
        ValueError: There are no initial values, or the results of the body differ from them in number or type.
        TypeError: The predicate is not bool, or a result does not convert to a tensor.
        NotImplementedError: A carried value is a buffer; the body can use it without carrying it.
    """
    outer = _graph.Graph.current
    initial = [initial_values] if isinstance(initial_values, Value) else list(initial_values)
    values = returned("while_loop", "initial_values", initial)
    if not values:
        raise ValueError("while_loop: there are no initial values, expected at least one")
    for index, value in enumerate(values):
        if isinstance(value, BufferValue):
            raise NotImplementedError(
                f"while_loop: initial value {index} is {value!r}; a buffer cannot be carried; use "
                "it in the body directly"
            )
    types = [value.to_mlir().type for value in values]
    condition = Branch(outer, "condition", types)
    with condition:
        predicates = returned("while_loop", "predicate", predicate(*condition.inputs))
        if len(predicates) != 1 or not isinstance(predicates[0], TensorValue):
            raise TypeError(
                f"while_loop: the predicate returns {len(predicates)} values, expected one bool of rank 0"
            )
        checked = checked_predicate("while_loop", predicates[0])
    condition_results = condition.own([checked])
    step = Branch(outer, "body", types, condition.captures)
    with step:
        carried = returned("while_loop", "body", body(*step.inputs))
    check_results("while_loop", "body", carried, types, "initial_values")
    results_and_chains = close_branches(
        "mo.while",
        (condition, step),
        (condition_results, step.own(carried)),
        (),
        values,
        ("condition", "body"),
        types,
    )
    return [value for value in results_and_chains if isinstance(value, TensorValue)]
