"""The lanes of a native vector, and the number of vectors that one step of a region's innermost loop takes."""

from __future__ import annotations

from max import kernel as k
from max._backends.cpu.regions.axes import tile_axis
from max._backends.regions import Node, RegionSpec
from max._compiler.codegen.expressions import KERNEL_NAME, compute_dtype
from max.dtype import DType

__all__ = ["native_width", "vectors_per_step"]

SIMPLE = 4
"""The most computed values of a region that needs few registers."""
LONG = frozenset({"tanh", "exp", "sigmoid", "silu", "erf", "gelu"})
"""Functions with long dependency chains: their latency limits a loop, not their throughput."""


def native_width(spec: RegionSpec, target: k.Target) -> int:
    """The lanes of a region's widest compute type in a vector register."""
    widest = max((compute_dtype(v.dtype) for v in spec.values), key=lambda d: d.size_in_bytes)
    # regions of narrow integers take at most twice the lanes of f32
    return min(target.width(KERNEL_NAME[widest]), target.width("f32") * 2)


def vectors_per_step(spec: RegionSpec, columns: bool) -> int:
    """The number of native vectors of a step.

    Columns take wider strips, which use whole cache lines of each row; simple reductions keep more accumulators, as
    each addition depends on the one before; so do the steps of a chain of long functions.
    """
    simple = spec.reduces and sum(isinstance(v, Node) for v in spec.values) <= SIMPLE
    if columns or simple:
        return 4
    if tile_axis(spec) >= 0:
        return 1
    return 4 if not spec.reduces and _long_functions(spec) > 1 else 2


def _long_functions(spec: RegionSpec) -> int:
    """The length of the longest chain of `LONG` functions in f32 that a value depends on."""
    depth: list[int] = []
    for value in spec.values:
        if isinstance(value, Node):
            is_long = value.op in LONG and compute_dtype(value.dtype) is DType.float32
            depth.append(max(depth[i] for i in value.args) + is_long)
        else:
            depth.append(0)
    return max(depth)
