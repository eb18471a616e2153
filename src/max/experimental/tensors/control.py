"""Control flow on tensors: runs at once on eager tensors; is staged as one op while a graph is being built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from max.dtype import DType
from max.experimental.record.dispatch import apply, in_graph
from max.experimental.tensor import Tensor
from max.graph import Type, Value, ops
from max.graph.ops.devices.launches import check_stream

__all__ = ["cond", "side_stream", "while_loop"]


def cond(
    pred: Any,
    out_types: Iterable[Type[Any]] | None,
    then_fn: Callable[[], Any],
    else_fn: Callable[[], Any],
) -> list[Tensor]:
    """Executes one of two branches.

    On eager tensors the predicate is computed, and only the chosen function is called. In a graph both are staged; see
    `max.graph.ops.cond`.

    Args:
        pred: The predicate: bool, rank 0.
        out_types: The types of the results of both branches; None for no results.
        then_fn: The branch for a true predicate; returns its results.
        else_fn: The branch for a false predicate; returns its results.

    Returns:
        The results of the executed branch.

    Raises:
        TypeError: `pred` is not bool, or a result does not convert to a tensor.
        ValueError: `pred` is not of rank 0, or the results differ from `out_types`.
    """
    types = None if out_types is None else list(out_types)
    if in_graph():
        return apply(
            ops.cond, (pred, types, _as_value_function(then_fn), _as_value_function(else_fn)), {}
        )
    name, branch = ("then_fn", then_fn) if _truth("cond", pred) else ("else_fn", else_fn)
    results = _tensors("cond", name, branch())
    _check_types("cond", name, results, types or [], "out_types")
    return results


def while_loop(
    initial_values: Any, predicate: Callable[..., Any], body: Callable[..., Any]
) -> list[Tensor]:
    """Executes a body while a predicate of the carried values is true.

    On eager tensors both functions are called in each iteration, and the predicate is computed. In a graph they are
    staged once; see `max.graph.ops.while_loop`.

    Args:
        initial_values: The carried values of the first iteration: a tensor, or several.
        predicate: Maps the carried values to a bool of rank 0: whether to execute the body.
        body: Maps the carried values to those of the next iteration, of the same types.

    Returns:
        The carried values after the last iteration.

    Raises:
        ValueError: There are no initial values, or the results of the body differ from them in number or type.
        TypeError: The predicate is not bool, or a result does not convert to a tensor.
    """
    if in_graph():
        single = isinstance(initial_values, Tensor | Value)
        values = [initial_values] if single else list(initial_values)
        return apply(
            ops.while_loop, (values, _as_value_function(predicate), _as_value_function(body)), {}
        )
    carried = _tensors("while_loop", "initial_values", initial_values)
    if not carried:
        raise ValueError("while_loop: there are no initial values, expected at least one")
    types = [tensor.type for tensor in carried]
    while _truth("while_loop", predicate(*carried)):
        carried = _tensors("while_loop", "body", body(*carried))
        _check_types("while_loop", "body", carried, types, "initial_values")
    return carried


def side_stream(
    inputs: Sequence[Tensor],
    body_fn: Callable[..., Tensor | Iterable[Tensor]],
    *,
    result_types: Sequence[Type[Any]] | None = None,
    stream_id: int = 1,
) -> list[Tensor]:
    """Calls a function of tensors, which a GPU would run beside its other work; on a CPU it runs as all others.

    Args:
        inputs: The function's arguments.
        body_fn: Takes a tensor for each input, and returns a tensor or several.
        result_types: The type of each result; None: any.
        stream_id: The number of the stream, 0 or more.

    Returns:
        The results.

    Raises:
        ValueError: The function returns another number of tensors, or a result has another type; `stream_id` is
            negative.
        TypeError: A result does not convert to a tensor; `stream_id` is no int.
    """
    check_stream(stream_id)
    results = _tensors("side_stream", "body_fn", body_fn(*inputs))
    if result_types is not None:
        _check_types("side_stream", "body_fn", results, list(result_types), "result_types")
    return results


def _as_value_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turns a function of tensors into one of values of the graph that is being built."""

    def stage_values(*values: Value[Any]) -> Any:
        result = function(*[Tensor.from_graph_value(value) for value in values])
        # a tensor is iterable: it would be taken for several results
        return result.__tensorvalue__() if isinstance(result, Tensor) else result

    return stage_values


def _truth(op: str, pred: Any) -> bool:
    """The value of a predicate."""
    if isinstance(pred, bool):
        return pred
    items = cast("list[Any]", pred) if isinstance(pred, list | tuple) else [pred]
    if len(items) != 1 or not isinstance(items[0], Tensor) or items[0].dtype is not DType.bool:
        raise TypeError(f"{op}: the predicate is {pred!r}, expected one bool tensor of rank 0")
    if items[0].rank:
        raise ValueError(f"{op}: the predicate is {items[0]!r}, expected rank 0")
    return bool(items[0].item())


def _tensors(op: str, what: str, result: Any) -> list[Tensor]:
    """The results of a function as tensors."""
    if result is None:
        return []
    several = isinstance(result, list | tuple)
    tensors: list[Tensor] = []
    for index, item in enumerate(cast("list[Any]", result) if several else [result]):
        try:
            tensors.append(item if isinstance(item, Tensor) else Tensor.constant(item))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{op}: result {index} of {what} is {item!r}, expected a tensor"
            ) from error
    return tensors


def _check_types(
    op: str, what: str, results: list[Tensor], types: list[Any], expected: str
) -> None:
    if len(results) != len(types):
        raise ValueError(f"{op}: {what} returns {len(results)} values, {expected} has {len(types)}")
    for index, (result, type_) in enumerate(zip(results, types, strict=True)):
        if result.type != type_:
            raise ValueError(
                f"{op}: result {index} of {what} is {result.type!r}, {expected} has {type_!r}"
            )
