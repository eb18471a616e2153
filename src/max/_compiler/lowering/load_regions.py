"""Regions that run once, when a model is loaded: their kernels take all sizes at run time.

The weights of a model have many sizes, and LLVM takes longer for a kernel than the kernel runs: one serves all of them.
"""

from __future__ import annotations

from dataclasses import replace

from max._backends.regions import Leaf, RegionKernel, RegionSpec, Value
from max._compiler.lowering.kernel_tables import Argument
from max._compiler.lowering.lowered_graph import Pointer
from max.mlir import DimExpr
from max.mlir.sizes import Size, Sizes, contiguous_strides, substitute

__all__ = ["SymbolicRegion"]


class SymbolicRegion:
    """A region without reductions whose sizes and strides are symbols.

    Args:
        region: The region, with its sizes.
    """

    def __init__(self, region: RegionSpec) -> None:
        assert not region.reduces, "the order of a sum may depend on its static size"
        self._env: dict[str, Size] = {}
        self._static = region.dims
        self._dims = tuple([self._symbol(dim) for dim in region.dims])
        self.spec = RegionSpec(
            self._dims,
            False,
            tuple([self._value(value) for value in region.values]),
            tuple([replace(r, strides=self._strides(r.strides)) for r in region.results]),
        )
        """The region, to be written as a kernel."""

    def _symbol(self, size: Size) -> Size:
        if not isinstance(size, int):
            return size
        name = f"size_{len(self._env)}"
        self._env[name] = size
        return DimExpr.symbol(name)

    def _value(self, value: Value) -> Value:
        return (
            replace(value, strides=self._strides(value.strides))
            if isinstance(value, Leaf)
            else value
        )

    def _strides(self, strides: Sizes) -> Sizes:
        """The strides of a view: products of its sizes where it is contiguous, else symbols; 0 and 1 stay."""
        # axes that are broadcast (stride 0) do not count: the rest may be contiguous
        axes = [axis for axis, stride in enumerate(strides) if stride != 0]
        if tuple([strides[a] for a in axes]) == contiguous_strides([self._static[a] for a in axes]):
            steps = dict(zip(axes, contiguous_strides([self._dims[a] for a in axes]), strict=True))
            # 0 and 1 decide how a leaf is read: they are part of the code
            return tuple([steps.get(axis, 0) for axis in range(len(strides))])
        return tuple([stride if stride in (0, 1) else self._symbol(stride) for stride in strides])

    def with_sizes(self, kernel: RegionKernel) -> RegionKernel:
        """The region's kernel, with the sizes of its launch."""
        scalars = tuple([substitute(size, self._env) for size in kernel.scalars])
        if (geometry := kernel.geometry) is not None:
            grid = tuple([substitute(dim, self._env) for dim in geometry.grid])
            geometry = replace(geometry, grid=grid)
        return replace(kernel, scalars=scalars, geometry=geometry)

    def arguments(self, kernel: RegionKernel, pointers: list[Pointer]) -> list[Argument]:
        """The tensors of the region's kernel, at the given addresses."""
        arguments: list[Argument] = []
        for pointer, view in zip(pointers, kernel.args, strict=True):
            shape = tuple([substitute(dim, self._env) for dim in view.shape])
            static = tuple([isinstance(dim, int) for dim in view.shape])
            if view.strides is None:
                arguments.append(Argument(pointer, replace(view, shape=shape), static))
                continue
            strides = tuple([substitute(stride, self._env) for stride in view.strides])
            # strides that are ints in the kernel are no arguments of its launch
            in_code = tuple([isinstance(stride, int) for stride in view.strides])
            known = replace(view, shape=shape, strides=strides)
            arguments.append(Argument(pointer, known, static, in_code))
        return arguments
