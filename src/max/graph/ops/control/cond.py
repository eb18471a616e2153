"""Conditional execution: `cond`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

from max import mlir
from max.dtype import DType
from max.graph import graph
from max.graph.ops.staging.stage import as_tensor
from max.graph.staging.branch import Branch, close_branches
from max.graph.type import DeviceRef, Type
from max.graph.value import TensorValue, TensorValueLike, Value

__all__ = ["cond"]

BranchFunction = Callable[[], "Iterable[Value[Any]] | Value[Any] | None"]


def checked_predicate(op: str, value: TensorValueLike) -> TensorValue:
    """Checks a predicate and transfers it to the CPU.

    Args:
        op: The op, for messages.
        value: The predicate.

    Returns:
        A bool tensor of rank 0 on the CPU.

    Raises:
        TypeError: The dtype is not bool.
        ValueError: The rank is not 0.
    """
    tensor = as_tensor(value)
    if tensor.dtype is not DType.bool:
        raise TypeError(f"{op}: the predicate is {tensor!r}, expected a tensor of bool")
    if tensor.rank != 0:
        raise ValueError(f"{op}: the predicate is {tensor!r}, expected a tensor of rank 0")
    return tensor.to(DeviceRef.CPU())


def result_values(op: str, function: str, result: Any) -> list[Value[Any]]:
    """Converts the result of a user's function to a list of values.

    Args:
        op: The op, for messages.
        function: The name of the function, for messages.
        result: The returned object: a value, an iterable of values, or None.

    Raises:
        TypeError: An item does not convert to a tensor.
    """
    if result is None:
        return []
    if isinstance(result, Value) or not hasattr(result, "__iter__"):
        result = (result,)
    values: list[Value[Any]] = []
    for index, item in enumerate(cast("Iterable[Any]", result)):
        if isinstance(item, Value):
            values.append(cast("Value[Any]", item))
            continue
        try:
            values.append(as_tensor(item))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{op}: result {index} of {function} is {item!r}, expected a tensor"
            ) from error
    return values


def check_results(
    op: str, function: str, values: list[Value[Any]], types: list[Any], expected: str
) -> None:
    """Checks the number and types of the values that a user's function returned.

    Args:
        op: The op, for messages.
        function: The name of the function, for messages.
        values: The returned values.
        types: The required MLIR types.
        expected: The argument that determines the types, for messages.

    Raises:
        ValueError: The number or a type differs.
    """
    if len(values) != len(types):
        raise ValueError(
            f"{op}: {function} returns {len(values)} values, {expected} has {len(types)}"
        )
    for index, (value, type_) in enumerate(zip(values, types, strict=True)):
        actual = value.to_mlir().type
        if actual != type_:
            raise ValueError(
                f"{op}: result {index} of {function} is {mlir.short_types([actual])}, {expected} has "
                f"{mlir.short_types([type_])}"
            )


def cond(
    pred: TensorValueLike,
    out_types: Iterable[Type[Any]] | None,
    then_fn: BranchFunction,
    else_fn: BranchFunction,
) -> list[TensorValue]:
    """Executes one of two branches, chosen when the graph runs.

    The functions are called once each, to stage their branch. They may use all values of the enclosing graphs, and
    store to buffers; side effects keep the order in which they are staged.

    Args:
        pred: The predicate: bool, rank 0.
        out_types: The tensor types of the results of both branches; None for no results. Their symbols must be
            bound in the enclosing graph.
        then_fn: Stages the branch for a true predicate and returns its results.
        else_fn: Stages the branch for a false predicate and returns its results.

    Returns:
        The results of the executed branch, one per type.

    Raises:
        TypeError: `pred` is not bool, `out_types` has a type that is not a tensor, or a result does not convert to a
            tensor.
        ValueError: `pred` is not of rank 0, a symbol is not bound, or the results of a branch differ from
            `out_types`.
    """
    outer = graph.Graph.current
    choice = checked_predicate("cond", pred)
    types = [] if out_types is None else [t.to_mlir() for t in out_types]
    for t in types:
        if not isinstance(t, mlir.TensorType):
            raise TypeError(f"cond: out_types has {mlir.short_types([t])}, expected tensors")
        outer.check_symbols("cond", t.shape)
    results: list[list[Value[Any]]] = []
    branches: list[Branch] = []
    for role, what, function in (("then", "then_fn", then_fn), ("else", "else_fn", else_fn)):
        # both branches take the same operands
        branch = Branch(outer, role, (), branches[0].captures if branches else ())
        with branch:
            values = result_values("cond", what, function())
        check_results("cond", what, values, types, "out_types")
        results.append(branch.own(values))
        branches.append(branch)
    results_and_chains = close_branches(
        "mo.if",
        (branches[0], branches[1]),
        (results[0], results[1]),
        (choice,),
        (),
        ("then", "otherwise"),
        types,
    )
    return [value for value in results_and_chains if isinstance(value, TensorValue)]
