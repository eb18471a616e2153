"""Loops: `while_loop`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from max.dtype import DType
from max.graph import graph as _graph
from max.graph.ops.control.cond import check_results, checked_predicate, cond, result_values
from max.graph.staging.branch import Branch, close_branches
from max.graph.staging.truth import UndecidedCondition, decisions
from max.graph.type import DeviceRef, TensorType
from max.graph.value import BufferValue, TensorValue, Value

__all__ = ["while_loop"]


def while_loop(
    initial_values: Iterable[Value[Any]] | Value[Any],
    predicate: Callable[..., TensorValue],
    body: Callable[..., Value[Any] | Iterable[Value[Any]]],
) -> list[TensorValue]:
    """Executes a body while a predicate of the carried values is true.

    The functions are called to stage their ops, once; the predicate once for each outcome of conditions that it joins
    by `and`, `or` and `not`. They may use all values of the enclosing graphs, and the body may store to buffers.
    Iterations do not return to Python.

    Args:
        initial_values: The carried values of the first iteration: tensors.
        predicate: Maps the carried values to a bool of rank 0: whether to execute the body. A condition behind `and`
            and `or` is computed only if it decides.
        body: Maps the carried values to those of the next iteration, of the same types.

    Returns:
        The carried values after the last iteration.

    Raises:
        ValueError: There are no initial values, or the results of the body differ from them in number or type.
        TypeError: The predicate is not bool, a result does not convert to a tensor, or a predicate with side effects
            joins conditions by `and`, `or` or `not`.
        NotImplementedError: A carried value is a buffer; the body can use it without carrying it.
    """
    outer = _graph.Graph.current
    initial = [initial_values] if isinstance(initial_values, Value) else list(initial_values)
    values = result_values("while_loop", "initial_values", initial)
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
        checked = _stage_predicate(predicate, condition)
    condition_results = condition.own([checked])
    step = Branch(outer, "body", types, condition.captures)
    with step:
        carried = result_values("while_loop", "body", body(*step.inputs))
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


_MOST_CONDITIONS = 16
"""A predicate is called up to ``2 ** n`` times for n conditions."""


def _stage_predicate(
    predicate: Callable[..., Any], graph: Branch, truths: tuple[bool, ...] = ()
) -> TensorValue:
    """Stages a predicate whose first conditions have the truth values `truths`; a bool of rank 0 on the CPU."""
    try:
        with decisions(truths):
            result = predicate(*graph.inputs)
    except UndecidedCondition as undecided:
        if graph.has_effects:
            raise TypeError(
                "while_loop: a predicate that prints or uses buffers cannot join conditions by `and`, `or` or `not`; "
                "use ops.logical_and, logical_or and logical_not"
            ) from None
        if len(truths) == _MOST_CONDITIONS:
            raise ValueError(
                f"while_loop: the predicate joins more than {_MOST_CONDITIONS} conditions by `and`, `or` and `not`; "
                "use ops.logical_and and logical_or"
            ) from None
        # the predicate is staged again for each truth value of this condition
        condition = undecided.condition
    else:
        values = result_values("while_loop", "predicate", result)
        if len(values) != 1 or not isinstance(values[0], TensorValue):
            raise TypeError(
                f"while_loop: the predicate returns {len(values)} values, expected one bool of rank 0"
            )
        return checked_predicate("while_loop", values[0])
    return cond(
        checked_predicate("while_loop", condition),
        [TensorType(DType.bool, [], DeviceRef.CPU())],
        lambda: _stage_predicate(predicate, graph, (*truths, True)),
        lambda: _stage_predicate(predicate, graph, (*truths, False)),
    )[0]
