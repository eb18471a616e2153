"""A loop while the program runs."""

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
    """Runs a body as long as a predicate of the values that it carries on is true.

    Both functions stage ops. They may use all values around them, and the body may change buffers. No turn goes back to
    Python.

    Args:
        initial_values: The values of the first turn.
        predicate: From the values of a turn to whether there is one: a bool of rank 0.
        body: From the values of a turn to those of the next, of the same types.

    Returns:
        The values after the last turn.

    Raises:
        ValueError: There are no values, or the types of the body's results are not theirs.
        TypeError: The predicate is not of bool, or a function returns no values.
        NotImplementedError: A value is a buffer; use it in the body without carrying it.
    """
    outer = _graph.Graph.current
    given = [initial_values] if isinstance(initial_values, Value) else list(initial_values)
    values = returned("while_loop", "initial_values", given)
    if not values:
        raise ValueError("while_loop: there are no initial values; give at least one")
    for index, value in enumerate(values):
        if isinstance(value, BufferValue):
            raise NotImplementedError(
                f"while_loop: initial value {index} is {value!r}; a buffer cannot be carried, the body can use "
                "it without"
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
    tested = condition.own([checked])
    step = Branch(outer, "body", types, condition.captures)
    with step:
        carried = returned("while_loop", "body", body(*step.inputs))
    check_results("while_loop", "body", carried, types, "initial_values")
    results_and_chains = close_branches(
        "mo.while",
        (condition, step),
        (tested, step.own(carried)),
        (),
        values,
        ("condition", "body"),
        types,
    )
    return [value for value in results_and_chains if isinstance(value, TensorValue)]
