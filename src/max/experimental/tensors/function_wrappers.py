"""`functional`: functions that stage ops into a graph, as functions on eager tensors.

An op of this package is recorded as one call. A function of the user runs at each call, as in MAX: the ops that it
calls are recorded, so that a call with other sizes finds a program with symbols. If it needs a graph (it makes a
`TensorValue`, or asks for `Graph.current`), it runs in a graph of its own (`CalledGraph`).
"""

# tensors are shared by the modules of this package
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast, overload
from weakref import WeakSet

from max._names import keyword_aliases
from max.experimental.record.called_graph import CalledGraph
from max.experimental.record.dispatch import apply, in_graph
from max.experimental.tensor import Tensor
from max.experimental.tensors.further_functions import ensure_context
from max.graph import BufferValue, TensorValue, Value
from max.graph.staging.current import RETRIES, GraphNeeded

__all__ = ["functional"]


@overload
def functional(
    op: Callable[..., tuple[TensorValue, TensorValue]], rule: Callable[..., Any] | None = None
) -> Callable[..., tuple[Tensor, Tensor]]: ...
@overload
def functional(
    op: Callable[..., list[TensorValue]], rule: Callable[..., Any] | None = None
) -> Callable[..., list[Tensor]]: ...
@overload
def functional(
    op: Callable[..., TensorValue], rule: Callable[..., Any] | None = None
) -> Callable[..., Tensor]: ...
@overload
def functional(
    op: Callable[..., Any], rule: Callable[..., Any] | None = None
) -> Callable[..., Any]: ...


@keyword_aliases(graph_op="op")
def functional(
    op: Callable[..., Any], rule: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Turns a function that stages ops into a graph into a function on eager tensors.

    The function gets tensors as they are, and other arguments too; it may have none of them. Ops of `max.graph.ops`
    take tensors and return them in it. Shapes and dtypes are checked at the call, and the result is computed when a
    value is needed. While a graph is being built, the function stages into it. The attributes ``graph_op`` and ``rule``
    of the result are the arguments.

    Args:
        op: The function. Graph values among its results, also those in lists, tuples and dictionaries, become tensors;
            other results are returned as they are. A parameter that is annotated as a `TensorValue` or `BufferValue`
            gets that value of a tensor; the function then has a graph of its own for each call.
        rule: How tensors of several devices are split; not called, as tensors are on one.

    Raises:
        TypeError: The function or the rule is none.
    """
    if not callable(op):
        raise TypeError(f"functional: {op!r} is no function")
    if rule is not None and not callable(rule):
        raise TypeError(f"functional: the rule is {rule!r}, expected a function")
    if _of_this_package(op):
        on_tensors = _wrap_op(op)
    else:
        on_tensors = _wrap_user_function(op, _value_parameters(op))
    on_tensors: Any = functools.wraps(op)(on_tensors)
    on_tensors.graph_op, on_tensors.rule = op, rule
    return on_tensors


def _of_this_package(op: Callable[..., Any]) -> bool:
    """Whether a function has the same result for equal arguments: those of this package have."""
    while isinstance(op, functools.partial):
        op = cast("Callable[..., Any]", op.func)
    module: object = getattr(op, "__module__", None)
    return isinstance(module, str) and (module == "max" or module.startswith("max."))


def _wrap_op(op: Callable[..., Any]) -> Callable[..., Any]:
    parameters = _value_parameters(op)

    def on_tensors(*args: Any, **kwargs: Any) -> Any:
        if parameters and in_graph():
            args, kwargs = _as_values(args, kwargs, parameters)
        return apply(op, args, kwargs)

    return on_tensors


_needing_graphs: WeakSet[Any] = WeakSet()
"""The code of functions that need a graph."""


def _wrap_user_function(
    op: Callable[..., Any], parameters: Mapping[int | str, type[TensorValue | BufferValue]]
) -> Callable[..., Any]:
    code: Any = getattr(op, "__code__", None)
    needs_graph = bool(parameters)

    def on_tensors(*args: Any, **kwargs: Any) -> Any:
        nonlocal needs_graph
        if in_graph():
            args, kwargs = _as_values(args, kwargs, parameters)
            return _tensors_of(op(*args, **kwargs))
        if not needs_graph and code not in _needing_graphs:
            token = RETRIES.set(True)
            try:
                with ensure_context():
                    result = op(*args, **kwargs)
                    # an iterator would run outside of the context
                    return list(cast("Any", result)) if isinstance(result, Iterator) else result
            except GraphNeeded:
                pass
            finally:
                RETRIES.reset(token)
            # decorated again at each call of a factory, or a lambda in a loop
            needs_graph = True
            if code is not None:
                _needing_graphs.add(code)
        return _run_in_graph(op, args, kwargs, parameters)

    return on_tensors


def _run_in_graph(
    op: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parameters: Mapping[int | str, type[TensorValue | BufferValue]],
) -> Any:
    """Calls a function in a graph of its own, and runs the graph."""
    graph = CalledGraph(getattr(op, "__name__", None) or "functional")
    with graph:
        args, kwargs = _as_values(args, kwargs, parameters)
        staged: list[TensorValue] = []
        places: dict[int, int] = {}

        def place(value: Any) -> Any:
            if isinstance(value, Tensor) and value._cell is not None:
                return value
            if id(value) not in places:
                places[id(value)] = len(staged)
                staged.append(value if isinstance(value, TensorValue) else TensorValue(value))
            return _Place(places[id(value)])

        result = _map_result(place, op(*args, **kwargs))
    storages = graph.run(staged)
    tensors = [Tensor(storage=storage) for storage in storages]
    return _map_result(
        lambda item: tensors[item.index] if isinstance(item, _Place) else item, result
    )


class _Place:
    """The place of an output in a result."""

    def __init__(self, index: int) -> None:
        self.index = index


def _tensors_of(result: Any) -> Any:
    """A result with tensors in place of the values of the graph that is being built."""
    return _map_result(
        lambda item: Tensor.from_graph_value(item) if isinstance(item, Value) else item, result
    )


def _map_result(function: Callable[[Any], Any], result: Any) -> Any:
    """A result with a function applied to tensors, values and places in it."""
    if isinstance(result, Value | Tensor | _Place):
        return function(result)
    if isinstance(result, tuple):
        items = [_map_result(function, item) for item in cast("tuple[Any, ...]", result)]
        return type(result)(*items) if hasattr(result, "_fields") else tuple(items)
    if isinstance(result, list | Iterator):
        return [_map_result(function, item) for item in cast("list[Any]", result)]
    if isinstance(result, dict):
        items = cast("dict[Any, Any]", result).items()
        return {key: _map_result(function, item) for key, item in items}
    return result


_VALUES = {"TensorValue": TensorValue, "BufferValue": BufferValue}


def _value_parameters(op: Callable[..., Any]) -> dict[int | str, type[TensorValue | BufferValue]]:
    """The parameters of a function that are annotated as values of a graph, by position and by name."""
    try:
        parameters = inspect.signature(op).parameters.values()
    except (TypeError, ValueError):
        # a function of C has no signature
        return {}
    annotated: dict[int | str, type[TensorValue | BufferValue]] = {}
    for index, parameter in enumerate(parameters):
        hint = parameter.annotation
        text = hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))
        kind = _VALUES.get(text.removesuffix(" | None").rpartition(".")[2])
        if kind is not None:
            annotated[parameter.name] = kind
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                annotated[index] = kind
    return annotated


def _as_values(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parameters: Mapping[int | str, type[TensorValue | BufferValue]],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with values of the graph that is being built where parameters are annotated so."""
    if not parameters:
        return args, kwargs
    positional = [_as_value(arg, parameters.get(index)) for index, arg in enumerate(args)]
    named = {name: _as_value(arg, parameters.get(name)) for name, arg in kwargs.items()}
    return tuple(positional), named


def _as_value(arg: Any, cls: type[TensorValue | BufferValue] | None) -> Any:
    return arg if cls is None or not isinstance(arg, Tensor) else cls(arg)
