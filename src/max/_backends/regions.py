"""A fused region as plain data without MLIR, and the kernel that a backend writes for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from max._backends.kernel_call import Geometry
from max._dataclass import dataclass
from max.dtype import DType
from max.mlir.sizes import Size, Sizes, contiguous_strides, product

__all__ = [
    "REDUCTIONS",
    "ArgView",
    "Leaf",
    "Literal",
    "Node",
    "RegionKernel",
    "RegionSpec",
    "Result",
    "SizeOf",
    "Value",
]

REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_mul"})
"""Nodes that combine a value over the reduction axis."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """An argument that is read. A stride of 0 means that the value does not depend on that axis."""

    dtype: DType
    strides: Sizes


@dataclass(frozen=True, slots=True)
class Literal:
    """A number known at compile time."""

    dtype: DType
    value: float | int | bool


@dataclass(frozen=True, slots=True)
class SizeOf:
    """The size of an axis of the iteration space, as a number."""

    dtype: DType
    axis: int


@dataclass(frozen=True, slots=True)
class Node:
    """``op(args)``; `args` are indices of earlier values, `attr` is the op's attribute."""

    op: str
    args: tuple[int, ...]
    dtype: DType
    attr: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """An argument that is written, with the element type in memory. Row results have stride 0 on the reduction axis."""

    value: int
    dtype: DType
    strides: Sizes


Value = Leaf | Literal | SizeOf | Node


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """A loop nest over `dims`; if `reduces`, reductions run over the last axis."""

    dims: Sizes
    reduces: bool
    values: tuple[Value, ...]
    results: tuple[Result, ...]
    inner: tuple[bool, ...] = field(init=False)
    """For each value, whether it varies along the last axis."""
    level: tuple[int, ...] = field(init=False)
    """For each value, the number of reductions that must finish before it, one after the other."""

    def __post_init__(self) -> None:
        self._drop_strides_of_ones()
        inner: list[bool] = []
        level: list[int] = []
        for value in self.values:
            match value:
                case Leaf():
                    inner.append(bool(value.strides) and value.strides[-1] != 0)
                    level.append(0)
                case Node(op=op, args=args):
                    after = max((level[a] for a in args), default=0)
                    # one number per row, known after a pass of its own
                    if op in REDUCTIONS:
                        inner.append(False)
                        level.append(after + 1)
                    else:
                        inner.append(any(inner[a] for a in args))
                        level.append(after)
                case _:
                    inner.append(False)
                    level.append(0)
        object.__setattr__(self, "inner", tuple(inner))
        object.__setattr__(self, "level", tuple(level))

    def _drop_strides_of_ones(self) -> None:
        """Sets strides along axes of size 1 to 0: no element depends on the index along them."""
        ones = [axis for axis, dim in enumerate(self.dims) if dim == 1]
        if not ones:
            return

        def without_ones(strides: Sizes) -> Sizes:
            return tuple(0 if axis in ones else stride for axis, stride in enumerate(strides))

        values = [
            replace(v, strides=without_ones(v.strides)) if isinstance(v, Leaf) else v
            for v in self.values
        ]
        results = [replace(r, strides=without_ones(r.strides)) for r in self.results]
        object.__setattr__(self, "values", tuple(values))
        object.__setattr__(self, "results", tuple(results))

    @property
    def size(self) -> Size:
        """The number of points of the iteration space."""
        return product(self.dims)


@dataclass(frozen=True)
class ArgView:
    """A kernel's view of one of its tensors: dims and strides of the axes that it varies along (None: contiguous)."""

    dtype: DType
    shape: Sizes
    strides: Sizes | None

    @staticmethod
    def of(spec: RegionSpec, dtype: DType, strides: Sizes, axes: Sequence[int]) -> ArgView:
        """The view of an argument of a region.

        Args:
            spec: The region.
            dtype: The argument's element type.
            strides: Its strides over the region's dims.
            axes: The axes that it varies along, in the order of the view.
        """
        if not axes:
            return ArgView(dtype, (1,), None)
        shape = tuple([spec.dims[axis] for axis in axes])
        arg_strides = tuple([strides[axis] for axis in axes])
        return ArgView(
            dtype, shape, None if arg_strides == contiguous_strides(shape) else arg_strides
        )


@dataclass(frozen=True)
class RegionKernel:
    """The source of a kernel named ``region``, and its parameters in order.

    Args:
        source: The source in the kernel language, where ``k`` is the language and ``fn`` the functions of
            `max._compiler.codegen.functions`.
        args: The tensors: results, leaves, then workspaces.
        scalars: The run-time dims, which follow them.
        serial: Whether one worker runs it.
        functions: Further names that the source uses.
        geometry: The workers of the launch, as for `KernelCall`.
    """

    source: str
    args: tuple[ArgView, ...]
    scalars: Sizes
    serial: bool
    functions: Mapping[str, object] = field(default_factory=dict[str, object])
    geometry: Geometry | None = None
