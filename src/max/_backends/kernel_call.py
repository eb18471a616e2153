"""The description of a kernel launch that the compiler receives: plain data, no compiler types."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

from max._dataclass import dataclass
from max.dtype import DType
from max.kernel import Target

Dims = tuple[Any, ...]
"""Dims of a view: ints, or the compiler's symbolic dims, which are only multiplied with `*`."""


@dataclass(frozen=True)
class Operand:
    """An operand or a result of an op, as the compiler sees it.

    Args:
        dtype: The element type.
        shape: The dims, ints where they are static.
    """

    dtype: DType
    shape: Dims


@dataclass(frozen=True)
class Arg:
    """One tensor parameter of a kernel.

    Args:
        source: Where the memory comes from: an operand of the op, a result, or a workspace.
        index: Which operand or result. For a workspace: its number in `KernelCall.workspaces`.
        dtype: Element type of the view.
        shape: Dims of the contiguous view that the kernel takes of that memory (already flattened).
        static: For each dim, whether a static dim is a compile-time constant of the kernel.
            Where it is False the dim is always passed at run time, so that one compiled kernel serves all sizes.
    """

    source: Literal["operand", "result", "workspace"]
    index: int
    dtype: DType
    shape: Dims
    static: tuple[bool, ...]

    def spec_shape(self) -> tuple[int | None, ...]:
        """The shape for `k.TensorSpec`: ints for compile-time dims, None for dims that take a slot.

        A dim of 0 takes a slot: code that never runs may divide by it.
        """
        return tuple(
            dim if constant and isinstance(dim, int) and dim else None
            for dim, constant in zip(self.shape, self.static, strict=True)
        )


@dataclass(frozen=True)
class Limit:
    """A row threshold: a scalar parameter of a kernel, the maximum number of rows that take the GEMV path.

    Both paths give the same result. The threshold is bound when a program is loaded: to the one measured on the
    machine, else to the default, which depends on the target only.

    Args:
        name: The key of the measurement: launches with equal names have the same threshold.
        default: The threshold without a measurement.
        maximum: The greatest threshold that the kernel supports.
        rows: The rows of the launch: an int, or a symbolic dim.
    """

    name: str
    default: int
    maximum: int
    rows: Any


@dataclass(frozen=True)
class Scalar:
    """An integer parameter of a kernel that is passed at run time, so that one compiled kernel serves all values.

    Args:
        value: An int, or a symbolic dim.
    """

    value: Any


@dataclass(frozen=True)
class Workspace:
    """Memory that lives for one launch; its contents are undefined at the start.

    Args:
        dtype: The element type.
        shape: Its dims (symbolic where an operand's are).
    """

    dtype: DType
    shape: Dims


@dataclass(frozen=True)
class Geometry:
    """The workers of a launch on a device with a grid of blocks. A device with one group of workers ignores it.

    Args:
        grid: The number of blocks along each axis.
        block: The workers of a block along each axis. Only the workers of one block meet at a barrier.
        shared_bytes: The memory that the workers of a block share.
    """

    grid: Dims
    block: tuple[int, ...]
    shared_bytes: int = 0


@dataclass(frozen=True)
class KernelCall:
    """One launch of one kernel, which carries out one op.

    Args:
        kernel: The kernel function; `k.specialize(kernel, args=[…], params=params, target=target)` takes it.
        args: Its tensor parameters, scalars, and a limit, in order. Views for `*extra` come after them.
        params: Compile-time parameters. `epilogue`, where the kernel takes one, is left out: its default is the
            identity.
        serial: The kernel does not split its work: launch it on worker 0 only.
        epilogue: The kernel takes an `epilogue` parameter and `*extra` views (see `KernelLibrary`). It calls the
            epilogue once for each element, right before it stores the element: a view that lies like the result may
            be the result's own memory.
        workspaces: Memory that the launch needs besides operands and results.
        in_place: Pairs (result, operand): the result may use the operand's memory.
        geometry: The workers of the launch; None leaves them to the device.
    """

    kernel: Any
    args: tuple[Arg | Limit | Scalar, ...]
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    serial: bool = False
    epilogue: bool = False
    workspaces: tuple[Workspace, ...] = ()
    in_place: tuple[tuple[int, int], ...] = ()
    geometry: Geometry | None = None


Lowering = Callable[[Sequence[Operand], Sequence[Operand], Mapping[str, Any], Target], KernelCall]
"""`(operands, results, attributes, target) -> KernelCall`; raises `NotImplementedError` for unsupported operands."""


def product(dims: Sequence[Any]) -> Any:
    """Multiplies dims; the product of none is 1.

    Args:
        dims: Ints or symbolic dims.
    """
    return functools.reduce(operator.mul, dims) if dims else 1


def around(axis: int, rank: int) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """The groups of axes of a view ``[outer, axis, inner]``; see `view`."""
    return range(axis), (axis,), range(axis + 1, rank)


def view(
    source: Literal["operand", "result", "workspace"],
    index: int,
    tensor: Operand | Workspace,
    groups: Sequence[Sequence[int]] | None = None,
    *,
    static: bool | Sequence[bool] = True,
) -> Arg:
    """Describes a contiguous view whose dims are products of a tensor's dims.

    Args:
        source: Where the memory comes from.
        index: Its number.
        tensor: Its dtype and shape.
        groups: For each dim of the view the axes that are multiplied into it, in order; an empty group is a dim of size
            1. None takes the shape as it is.
        static: Whether static dims become compile-time constants, for all dims or for each.
    """
    shape = (
        tuple(tensor.shape)
        if groups is None
        else tuple(product([tensor.shape[axis] for axis in group]) for group in groups)
    )
    constant = (static,) * len(shape) if isinstance(static, bool) else tuple(static)
    return Arg(source, index, tensor.dtype, shape, constant)


def operand_views(
    operands: Sequence[Operand],
    groups: Sequence[Sequence[int]] | None = None,
    *,
    first: int = 0,
    static: bool = True,
) -> tuple[Arg, ...]:
    """A view of each operand from number `first` on; `groups` and `static` as for `view`."""
    return tuple(
        view("operand", i, operands[i], groups, static=static) for i in range(first, len(operands))
    )


def run_time_views(results: Sequence[Operand], operands: Sequence[Operand]) -> tuple[Arg, ...]:
    """The views of all results, then of all operands, in their shapes, with dims that are known at run time only."""
    outs = (view("result", i, result, static=False) for i, result in enumerate(results))
    return (*outs, *operand_views(operands, static=False))
