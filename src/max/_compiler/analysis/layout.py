"""Strided layouts over symbolic sizes, and the view ops on them."""

from __future__ import annotations

from collections.abc import Sequence

from max._dataclass import dataclass
from max.mlir.sizes import Size, Sizes, contiguous_strides, divide, nominal, product, simplify

__all__ = ["Layout", "collapse"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a value in a buffer: element `i` is at `offset + sum(i * strides)`, in elements."""

    shape: Sizes
    strides: Sizes
    offset: Size = 0

    @staticmethod
    def contiguous(shape: Sequence[Size]) -> Layout:
        """The row-major layout of a whole buffer."""
        return Layout(tuple(shape), contiguous_strides(shape))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are in row-major order without gaps, at any offset."""
        step: Size = 1
        if 0 in self.shape:
            return True
        for dim, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            # the stride of an axis of size 1 is never used
            if dim != 1:
                if stride != step:
                    return False
                step = simplify(step * dim)
        return True

    def transpose(self, perm: Sequence[int]) -> Layout:
        """Axis ``i`` of the result is axis ``perm[i]``."""
        return Layout(
            tuple(self.shape[p] for p in perm), tuple(self.strides[p] for p in perm), self.offset
        )

    def broadcast_to(self, shape: Sequence[Size]) -> Layout:
        """NumPy broadcasting: new and stretched axes have stride 0."""
        lead = len(shape) - len(self.shape)
        strides: list[Size] = [0] * lead
        for dim, new, stride in zip(self.shape, shape[lead:], self.strides, strict=True):
            # a stretched axis reads the same element again
            strides.append(stride if dim == new else 0)
        return Layout(tuple(shape), tuple(strides), self.offset)

    def slice(self, starts: Sequence[Size], steps: Sequence[int], shape: Sequence[Size]) -> Layout:
        """Element ``i`` of the result is element ``start + i * step``."""
        offset = self.offset
        for start, stride in zip(starts, self.strides, strict=True):
            offset = simplify(offset + start * stride)
        strides = tuple(simplify(s * step) for s, step in zip(self.strides, steps, strict=True))
        return Layout(tuple(shape), strides, offset)

    def reshape(self, shape: Sequence[Size]) -> Layout | None:
        """The layout of the reshaped value, or None if strides cannot describe it."""
        shape = tuple(shape)
        if self.shape == shape:
            return self
        # no element has a position that matters, or all follow each other
        if 0 in shape or self.is_contiguous:
            return Layout(shape, contiguous_strides(shape), self.offset)
        # pair groups of old and new axes with equal products; the old axes of a group must be mergeable
        old = [
            (dim, stride) for dim, stride in zip(self.shape, self.strides, strict=True) if dim != 1
        ]
        new = [index for index, dim in enumerate(shape) if dim != 1]
        strides: list[Size] = [0] * len(shape)
        i = j = 0
        while i < len(old) and j < len(new):
            first_old, first_new = i, j
            old_size, new_size = old[i][0], shape[new[j]]
            i, j = i + 1, j + 1
            while old_size != new_size:
                # extend the side that divides the other; if neither does, the smaller one
                if divide(new_size, old_size) is not None or nominal(old_size) < nominal(new_size):
                    grow_old = True
                else:
                    grow_old = False
                if grow_old:
                    if i == len(old):
                        return None
                    old_size, i = simplify(old_size * old[i][0]), i + 1
                else:
                    if j == len(new):
                        return None
                    new_size, j = simplify(new_size * shape[new[j]]), j + 1
            # axes merge where each is as far apart as all of the next
            for (_, outer), (dim, inner) in zip(
                old[first_old : i - 1], old[first_old + 1 : i], strict=True
            ):
                if outer != simplify(inner * dim):
                    return None
            step = old[i - 1][1]
            # the new axes of a group, from the innermost: row-major within the old ones
            for axis in reversed(new[first_new:j]):
                strides[axis] = step
                step = simplify(step * shape[axis])
        if i != len(old) or j != len(new):
            return None
        return Layout(shape, tuple(strides), self.offset)


def collapse(
    shape: Sequence[Size], views: Sequence[Sequence[Size]], keep_last: bool = False
) -> tuple[Sizes, list[Sizes]]:
    """Merges adjacent axes of an iteration space where every view allows it, and drops axes of size 1.

    Args:
        shape: The iteration space.
        views: For each view its strides over that space.
        keep_last: Whether to keep the last axis separate, as a reduction runs over it.

    Returns:
        The new space and the new strides of each view.
    """
    rank = len(shape)
    axes = [axis for axis in range(rank) if shape[axis] != 1 or (keep_last and axis == rank - 1)]
    dims: list[Size] = []
    strides: list[list[Size]] = [[] for _ in views]
    for axis in axes:
        mergeable = bool(dims) and not (keep_last and axis == rank - 1)
        if mergeable and all(
            merged[-1] == simplify(view[axis] * shape[axis])
            for merged, view in zip(strides, views, strict=True)
        ):
            dims[-1] = product((dims[-1], shape[axis]))
            for merged, view in zip(strides, views, strict=True):
                merged[-1] = view[axis]
        else:
            dims.append(shape[axis])
            for merged, view in zip(strides, views, strict=True):
                merged.append(view[axis])
    return tuple(dims), [tuple(view) for view in strides]
