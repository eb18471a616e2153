"""Elements at positions that other tensors hold."""

from __future__ import annotations

from max.dtype import DType
from max.graph import TensorValue, ops
from max.graph.ops.staging.broadcasting import broadcast_all
from max.importers.errors import Unsupported
from max.importers.functions.indexing import gather_along, positive
from max.importers.torch.table import Call, op

Indices = list["TensorValue | None"]


@op("aten.embedding.default")
def embedding(
    call: Call,
    weight: TensorValue,
    indices: TensorValue,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> TensorValue:
    return ops.gather(weight, indices, 0)


@op("aten.index_select.default")
def index_select(call: Call, x: TensorValue, dim: int, index: TensorValue) -> TensorValue:
    axis = call.axis(dim, x.rank)
    return ops.gather(x, ops.reshape(index, [-1]), axis)


@op("aten.gather.default")
def gather(
    call: Call, x: TensorValue, dim: int, index: TensorValue, sparse_grad: bool = False
) -> TensorValue:
    if not x.rank:
        return ops.reshape(x, index.shape)
    axis = call.axis(dim, x.rank)
    return gather_along(x, positive(index, x.shape[axis]), axis)


def expand_masks(call: Call, indices: Indices) -> Indices:
    """Indices without masks: a mask stands for the positions of its true elements, an index for each of its axes."""
    result: Indices = []
    for index in indices:
        if index is None or index.dtype.is_integral():
            result.append(index)
        elif index.dtype is DType.bool:
            places = ops.nonzero(index, call.node.new_size("selected"))
            result += [places[:, axis] for axis in range(index.rank)]
        else:
            raise Unsupported(f"an index is {index.dtype.name}, expected integers or bool")
    return result


class Places:
    """The elements that a list of indices selects.

    Attributes:
        order: The permutation that brings the indexed axes to the front.
        rows: The coordinates of elements in these axes: ``[*broadcast, count]``.
        lead: The rank of the indices, broadcast.
        position: The axis of the result at which the axes of the indices are.
    """

    def __init__(self, x: TensorValue, indices: Indices) -> None:
        axes = [axis for axis, index in enumerate(indices) if index is not None]
        tensors = [
            ops.cast(positive(index, x.shape[axis]), DType.int64)
            for axis, index in enumerate(indices)
            if index is not None
        ]
        self.order = [*axes, *(axis for axis in range(x.rank) if axis not in axes)]
        tensors = list(broadcast_all("index", tensors))
        self.rows = ops.stack(tensors, -1)  # [*broadcast, indexed axes]
        self.lead = tensors[0].rank
        # as in NumPy: axes of indices that are not adjacent come first
        adjacent = axes == list(range(axes[0], axes[0] + len(axes)))
        self.position = axes[0] if adjacent else 0

    def to_result(self, rank: int) -> list[int]:
        """The permutation from the order of a gather to that of the result."""
        lead = list(range(self.lead))
        rest = list(range(self.lead, rank))
        return [*rest[: self.position], *lead, *rest[self.position :]]


def inverse(order: list[int]) -> list[int]:
    """The permutation that undoes another."""
    return [order.index(axis) for axis in range(len(order))]


@op("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(call: Call, x: TensorValue, indices: Indices) -> TensorValue:
    indices = expand_masks(call, indices)
    given = [(axis, tensor) for axis, tensor in enumerate(indices) if tensor is not None]
    # the axes of a single index take the place of the axis that it indexes
    if len(given) == 1:
        axis, tensor = given[0]
        return ops.gather(x, positive(tensor, x.shape[axis]), axis)
    places = Places(x, indices)
    picked = ops.gather_nd(ops.permute(x, places.order), places.rows)
    return ops.permute(picked, places.to_result(picked.rank)) if picked.rank else picked


@op("aten.nonzero.default")
def nonzero(call: Call, x: TensorValue) -> TensorValue:
    if not x.rank:
        raise Unsupported("takes no tensor of rank 0")
    return ops.nonzero(x, call.node.new_size("nonzero"))
