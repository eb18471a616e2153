"""The choice of the axes that a region's loop nest vectorizes and tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from max._backends.regions import Leaf, RegionSpec, SizeOf
from max._compiler.codegen.expressions import compute_dtype
from max.mlir.sizes import Sizes

__all__ = ["column_axis", "move_axis", "reads_longer_rows", "tile_axis", "transposed_leaves"]


def move_axis(spec: RegionSpec, axis: int) -> RegionSpec:
    """Moves an outer axis of a region to the position before the last."""
    order = [a for a in range(len(spec.dims) - 1) if a != axis] + [axis, len(spec.dims) - 1]

    def permute(strides: Sizes) -> Sizes:
        return tuple(strides[a] for a in order)

    new_axis = {old: new for new, old in enumerate(order)}
    values = tuple(
        replace(v, strides=permute(v.strides)) if isinstance(v, Leaf)
        else replace(v, axis=new_axis[v.axis]) if isinstance(v, SizeOf)
        else v
        for v in spec.values
    )  # fmt: skip
    results = tuple(replace(r, strides=permute(r.strides)) for r in spec.results)
    return RegionSpec(permute(spec.dims), spec.reduces, values, results)


def column_axis(spec: RegionSpec) -> int | None:
    """The outer axis to vectorize if the reduction axis is contiguous in no leaf, else None."""
    varying = [v for v in spec.values if isinstance(v, Leaf) and v.strides and v.strides[-1] != 0]
    # a leaf that is contiguous along the reduction axis is read in vectors along it
    if not spec.reduces or len(spec.dims) < 2 or any(v.strides[-1] == 1 for v in varying):
        return None
    # for each outer axis, the leaves that are contiguous along it
    votes = [sum(v.strides[axis] == 1 for v in varying) for axis in range(len(spec.dims) - 1)]
    return max(range(len(votes)), key=votes.__getitem__) if max(votes) else None


def tile_axis(spec: RegionSpec) -> int:
    """The outer axis along which some leaf is contiguous that is strided along the last axis; -1: none."""
    if spec.reduces:
        return -1
    for value in spec.values:
        if (
            isinstance(value, Leaf)
            and value.strides
            and value.strides[-1] not in (0, 1)
            and 1 in value.strides
        ):
            return value.strides.index(1)
    return -1


def transposed_leaves(spec: RegionSpec, tile_axis: int) -> list[int]:
    """The leaves that are contiguous along the tile axis, if the kernel can transpose all of them in registers; else
    none.
    """
    if tile_axis < 0 or any(result.strides[-1] != 1 for result in spec.results):
        return []
    strided = [
        (i, v)
        for i, v in enumerate(spec.values)
        if isinstance(v, Leaf) and v.strides[-1] not in (0, 1)
    ]
    # transposes move lanes of 32 bits
    fits = all(
        leaf.strides[tile_axis] == 1 and compute_dtype(leaf.dtype).size_in_bytes == 4
        for _, leaf in strided
    )
    return [i for i, _ in strided] if fits else []


def reads_longer_rows(spec: RegionSpec, transposed: Sequence[int], tile_axis: int) -> bool:
    """Whether transposed leaves are read in longer rows than the results are written in.

    Tiles then advance along the rows that are read: of two strided walks the one with the shorter stride is cheaper.
    """
    read = [v.strides[-1] for i in transposed if isinstance(v := spec.values[i], Leaf)]
    written = [result.strides[tile_axis] for result in spec.results]
    # sizes known at run time only are not compared
    return all(isinstance(w, int) and isinstance(r, int) and w < r for r in read for w in written)
