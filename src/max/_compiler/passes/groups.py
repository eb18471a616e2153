"""Groups of ops that will be regions, and what has a place in the space that such a group runs over."""

from __future__ import annotations

from xdsl.ir import SSAValue

from max._compiler.analysis.shapes import shape_of, strip
from max._dataclass import dataclass
from max.mlir import MoOp
from max.mlir.sizes import Sizes, nominal, product


@dataclass(eq=False)
class Group:
    """Ops that will be one region."""

    ops: list[MoOp]
    space: Sizes
    axis: int
    """The place of the reduction axis in the space; -1 without one."""
    merged_into: Group | None = None
    """The group that this one was merged into."""

    @property
    def size(self) -> int:
        """The size in element-wise ops; ops over rows count as several."""
        return sum(op.spec.region_size for op in self.ops)

    def root(self) -> Group:
        """The group that this one is part of, after merges."""
        group = self
        while group.merged_into is not None:
            group = group.merged_into
        return group

    def row_space(self) -> Sizes:
        """The space without the reduction axis, for groups with one."""
        return self.space[: self.axis] + self.space[self.axis + 1 :]


def keeps_places(view: MoOp, axis: int) -> bool:
    """Whether a view keeps each element in its place of a group's space, or repeats a row over the reduction axis.

    Args:
        view: A view of one of the group's values, or a further view of it.
        axis: The place of the group's reduction axis, or -1.
    """
    shape, source = shape_of(view.results[0]), shape_of(view.operands[0])
    if not view.spec.in_order:
        return False
    # the order of elements is kept, so that only dims of 1 may differ
    if strip(shape) == strip(source):
        return True
    if len(shape) != len(source):
        return False
    # each axis is numbered by the dims other than 1 before it, as the reduction axis of a group is
    repeated = [
        len(strip(shape[:axis]))
        for axis, (a, b) in enumerate(zip(source, shape, strict=True))
        if a != b
    ]
    # repeated along the reduction axis and no other: the place in a row is free
    return repeated == [axis]


def one_nest(space: Sizes, axis: int, group: Group) -> bool:
    """Whether a group's loop nest runs over a space with a reduction axis, or -1 without one."""
    if axis >= 0 and group.axis >= 0:
        return space == group.space and axis == group.axis
    # dims of 1 add no loop
    return strip(space) == strip(group.space)


def covers(value: SSAValue, space: Sizes) -> bool:
    """Whether a value has as many elements as a space has points, at nominal sizes."""
    return nominal(product(shape_of(value))) >= nominal(product(space))
