"""The operations of `Tensor`: ops of `max.graph.ops`, recorded or staged (`max.experimental.record.dispatch`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from max._names import keyword_aliases
from max.driver import Device
from max.dtype import DType
from max.experimental.record.dispatch import apply
from max.experimental.tensors import bits
from max.experimental.tensors.placement import OnDevice, device_of
from max.graph import DeviceRef, Dim, DimLike, ShapeLike, TensorValue, TensorValueLike, ops
from max.graph._operators import Operators, missing_method

__all__ = ["Operations", "along", "split"]


def split(x: TensorValue, split_sizes: Sequence[DimLike] | int, axis: int = 0) -> list[TensorValue]:
    """`max.graph.ops.split`, which takes one size for all parts too; the last part may be smaller.

    Args:
        x: The tensor.
        split_sizes: The sizes of the parts, or their common size.
        axis: The axis; negative counts from the last.

    Raises:
        ValueError: The common size is less than 1, or the size of the axis is not known.
    """
    if isinstance(split_sizes, Sequence) or not isinstance(split_sizes, int | Dim):
        return ops.split(x, split_sizes, axis)
    dim = x.shape[axis]
    if isinstance(split_sizes, Dim) or not dim.expr.is_static or split_sizes < 1:
        raise ValueError(
            f"split: parts of size {split_sizes} of axis {axis} of {x!r}; expected a size of 1 or more, and an axis of "
            "a known size"
        )
    total = int(dim)
    sizes = [min(split_sizes, total - at) for at in range(0, total, split_sizes)]
    return ops.split(x, sizes, axis)


def along(x: Any, axis: int | None) -> tuple[Any, int]:
    """The operand of a reduction and its axis; flattened if the axis is None, so that the result has shape ``[1]``."""
    return (apply(ops.reshape, (x, (-1,)), {}), 0) if axis is None else (x, axis)


class Operations(Operators[TensorValueLike]):
    """The operators and methods of tensors that are ops. Errors are those of the op, raised at the call.

    Reductions take an axis, which keeps size 1, or None for all elements: their result has shape ``[1]``.
    """

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_method(self, name, "max.experimental.functional")

    def cast(self, dtype: DType) -> Self:
        """The elements in another dtype.

        Args:
            dtype: The dtype.
        """
        return apply(ops.cast, (self, dtype), {})

    @keyword_aliases(target="device")
    def to(self, device: Device | OnDevice) -> Self:
        """The elements on another device.

        Args:
            device: The device, or a mesh or mapping of one device.

        Raises:
            ShardingError: A mesh has several devices.
        """
        return apply(ops.transfer_to, (self, DeviceRef.from_device(device_of(device))), {})

    def to_device(self, device: Device, /, *, stream: object = None) -> Self:
        """The elements on another device; :meth:`to` by the name of the array API standard."""
        return self.to(device)

    def argmax(self, axis: int | None = -1) -> Self:
        """The indices of the greatest elements along an axis, which keeps size 1."""
        return apply(ops.argmax, along(self, axis), {})

    def max(self, axis: int | None = -1) -> Self:
        """The greatest elements along an axis, which keeps size 1."""
        x, axis = along(self, axis)
        return apply(ops.max, (x,), {"axis": axis})

    def min(self, axis: int | None = -1) -> Self:
        """The smallest elements along an axis, which keeps size 1."""
        x, axis = along(self, axis)
        return apply(ops.min, (x,), {"axis": axis})

    def clip(
        self, *, min: TensorValueLike | None = None, max: TensorValueLike | None = None
    ) -> Self:
        """The elements, not below `min` and not above `max`; None is no bound."""
        result = self if min is None else apply(ops.max, (self, min), {})
        return result if max is None else apply(ops.min, (result, max), {})

    def mean(self, axis: int | None = -1) -> Self:
        """The means along an axis, which keeps size 1."""
        return apply(ops.mean, along(self, axis), {})

    def var(self, axis: int | None = -1) -> Self:
        """The population variances along an axis, which keeps size 1."""
        tensor: Any = self
        centered = tensor - tensor.mean(axis)
        squares = (centered * centered).mean(axis)
        if not tensor.dtype.is_float():
            return squares
        # the mean of the deviations is the rounding of the mean
        rest = centered.mean(axis)
        exact = apply(ops.max, (squares - rest * rest, 0), {})
        return apply(ops.where, (apply(ops.is_inf, (squares,), {}), squares, exact), {})

    def stdev(self, axis: int | None = -1) -> Self:
        """The population standard deviations along an axis, which keeps size 1."""
        return apply(ops.sqrt, (self.var(axis),), {})

    def sum(self, axis: int | None = -1) -> Self:
        """The sums along an axis, which keeps size 1."""
        return apply(ops.sum, along(self, axis), {})

    def prod(self, axis: int | None = -1) -> Self:
        """The products along an axis, which keeps size 1."""
        return apply(ops.prod, along(self, axis), {})

    def reshape(self, shape: ShapeLike) -> Self:
        """The elements in another shape; one size may be -1 and is found from the others."""
        return apply(ops.reshape, (self, list(shape)), {})

    def broadcast_to(self, shape: ShapeLike) -> Self:
        """The elements repeated along axes of size 1 and new leading axes."""
        return apply(ops.broadcast_to, (self, list(shape)), {})

    def permute(self, dims: list[int]) -> Self:
        """The axes in another order.

        Args:
            dims: The axis that comes to each place.
        """
        return apply(ops.permute, (self, dims), {})

    def transpose(self, dim1: int, dim2: int) -> Self:
        """Two axes swapped."""
        return apply(ops.transpose, (self, dim1, dim2), {})

    @property
    def T(self) -> Self:
        """The last two axes swapped."""
        return self.transpose(-1, -2)

    @property
    def mT(self) -> Self:
        """The last two axes swapped; :attr:`T` by the name of the array API standard."""
        return self.T

    def squeeze(self, axis: int) -> Self:
        """Without an axis of size 1."""
        return apply(ops.squeeze, (self, axis), {})

    def unsqueeze(self, axis: int) -> Self:
        """With a new axis of size 1."""
        return apply(ops.unsqueeze, (self, axis), {})

    @keyword_aliases(split_size_or_sections="split_sizes")
    def split(self, split_sizes: Sequence[int] | int, axis: int = 0) -> list[Self]:
        """Parts of given sizes along an axis, or of one size."""
        return apply(split, (self, split_sizes, axis), {})

    # operators

    def _call(self, function: Callable[..., Any], *operands: Any) -> Self:
        """Calls an op; it is recorded or staged."""
        return apply(function, operands, {})

    def __pos__(self) -> Self:
        return self

    # of integers these are the bits, of bools logic

    def __invert__(self) -> Self:
        return apply(bits.bitwise_invert, (self,), {})

    def __and__(self, rhs: TensorValueLike) -> Self:
        return apply(bits.bitwise_and, (self, rhs), {})

    def __rand__(self, lhs: TensorValueLike) -> Self:
        return apply(bits.bitwise_and, (lhs, self), {})

    def __or__(self, rhs: TensorValueLike) -> Self:
        return apply(bits.bitwise_or, (self, rhs), {})

    def __ror__(self, lhs: TensorValueLike) -> Self:
        return apply(bits.bitwise_or, (lhs, self), {})

    def __xor__(self, rhs: TensorValueLike) -> Self:
        return apply(bits.bitwise_xor, (self, rhs), {})

    def __rxor__(self, lhs: TensorValueLike) -> Self:
        return apply(bits.bitwise_xor, (lhs, self), {})

    def __lshift__(self, rhs: TensorValueLike) -> Self:
        return apply(bits.bitwise_left_shift, (self, rhs), {})

    def __rlshift__(self, lhs: TensorValueLike) -> Self:
        return apply(bits.bitwise_left_shift, (lhs, self), {})

    def __rshift__(self, rhs: TensorValueLike) -> Self:
        return apply(bits.bitwise_right_shift, (self, rhs), {})

    def __rrshift__(self, lhs: TensorValueLike) -> Self:
        return apply(bits.bitwise_right_shift, (lhs, self), {})
