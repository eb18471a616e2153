"""Functions on tensors that are not ops of `max.graph.ops`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from max.driver import CPU, Device
from max.dtype import DType
from max.experimental.programs.sessions import session_of
from max.experimental.record.dispatch import apply, in_graph
from max.experimental.tensor import Tensor
from max.experimental.tensors import mutation
from max.experimental.tensors.control import cond, while_loop
from max.graph import DimLike, Graph, ShapeLike, TensorValue, TensorValueLike, ops
from max.graph.staging.current import OUTSIDE, RETRIES, GraphNeeded

__all__ = [
    "arange", "clamp", "clip", "complex_mul", "elementwise_max", "elementwise_min", "ensure_context", "full",
    "full_like",
    "in_graph_context", "lazy", "ones", "ones_like", "print", "shape_to_tensor", "zeros", "zeros_like",
]  # fmt: skip

full, zeros, ones, arange = Tensor.full, Tensor.zeros, Tensor.ones, Tensor.arange
full_like, zeros_like, ones_like = Tensor.full_like, Tensor.zeros_like, Tensor.ones_like


def elementwise_max(lhs: TensorValueLike, rhs: TensorValueLike) -> Tensor:
    """The greater of two elements; NaN where one is."""
    return apply(ops.max, (lhs, rhs), {})


def elementwise_min(lhs: TensorValueLike, rhs: TensorValueLike) -> Tensor:
    """The smaller of two elements; NaN where one is."""
    return apply(ops.min, (lhs, rhs), {})


def clip(x: Tensor, lower_bound: TensorValueLike, upper_bound: TensorValueLike) -> Tensor:
    """The elements, not below one bound and not above the other."""
    return elementwise_min(elementwise_max(x, lower_bound), upper_bound)


clamp = clip


def complex_mul(lhs: TensorValueLike, rhs: TensorValueLike) -> Tensor:
    """The product of complex numbers, whose real and imaginary parts are the last axis.

    Args:
        lhs: Complex numbers ``[…, 2]``.
        rhs: Complex numbers ``[…, 2]``; broadcasts with the left.

    Raises:
        ValueError: The last axis of an operand has another size, or the shapes do not broadcast.
    """
    return apply(ops.complex.mul, (lhs, rhs), {})


def shape_to_tensor(shape: ShapeLike) -> Tensor:
    """The sizes of a shape: a tensor of int64 and rank 1 on the CPU.

    Args:
        shape: The shape; symbols only in a graph.
    """
    if in_graph():
        return apply(ops.shape_to_tensor, (shape,), {})
    sizes = [int(dim) for dim in _dims(shape)]
    return Tensor.constant(sizes, dtype=DType.int64, device=CPU()).reshape((len(sizes),))


def _dims(shape: ShapeLike) -> list[DimLike]:
    return list(shape)


def print(value: Tensor | TensorValue | str, name: str = "debug_tensor") -> None:
    """Prints a tensor or a text: at once, or each time the graph that is being built runs; see `max.graph.ops.print`.

    Args:
        value: The tensor or text.
        name: The start of the line.
    """
    if in_graph():
        ops.print(value if isinstance(value, str) else TensorValue(value), name)
        return
    tensors = [value.realize] if isinstance(value, Tensor) else []
    with Graph("print", input_types=[tensor.type for tensor in tensors]) as graph:
        shown: Any = graph.inputs[0].tensor if tensors else value
        ops.print(shown, name)
        graph.output()
    devices: list[Device] = [tensor.device for tensor in tensors]
    session_of(devices).load(graph).execute(*[tensor.driver_tensor for tensor in tensors])


@contextlib.contextmanager
def lazy() -> Generator[None]:
    """Records operations on tensors, and runs them when a value is needed, as is always done here.

    Within it the ops of `max.graph.ops` also take and return tensors, if no graph is being built.
    """
    token = OUTSIDE.set(_on_tensors)
    try:
        yield
    finally:
        OUTSIDE.reset(token)


def _on_tensors(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    run = _AT_ONCE.get(op)
    if run is not None:
        return run(*args, **kwargs)
    if RETRIES.get() and op in _OF_GRAPHS:
        raise GraphNeeded
    return apply(op, args, kwargs)


ensure_context = lazy


def _load(x: Any) -> Tensor:
    """The elements of an eager tensor that is used as a buffer, as they are now."""
    return _buffer(x)[...]


def _store(destination: Any, source: TensorValueLike, indices: Any = None) -> None:
    mutation.store(_buffer(destination), source, indices)


def _buffer(value: Any) -> Tensor:
    if isinstance(value, Tensor) and value._cell is not None:
        return value
    if RETRIES.get():  # a graph has buffers of its own
        raise GraphNeeded
    raise TypeError(f"{value!r} is not a buffer: outside of a graph these are eager tensors")


_AT_ONCE: dict[Callable[..., Any], Callable[..., Any]] = {
    ops.shape_to_tensor: shape_to_tensor,
    ops.print: print,
    ops.buffer_load: _load,
    ops.buffer_store: _store,
    ops.buffer_store_slice: _store,
    ops.cond: cond,
    ops.while_loop: while_loop,
}
"""Ops that are run, not recorded: they take functions or buffers, or return no tensor."""
_OF_GRAPHS = frozenset(
    {
        ops.buffer_create,
        ops.call,
        ops.constant_external,
        ops.custom,
        ops.inplace_custom,
        ops.parallel,
        ops.side_stream,
    }
)
"""Ops of what only a graph has."""


def in_graph_context() -> bool:
    """Whether a graph is being built, so that operations are staged into it."""
    return in_graph()
