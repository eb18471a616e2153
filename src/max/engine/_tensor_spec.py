"""The definition of :class:`TensorSpec`, and of :class:`MojoValue`."""

from __future__ import annotations

from collections.abc import Sequence

from max.dtype import DType

__all__ = ["MojoValue", "TensorSpec"]


class MojoValue:
    """A value that only custom ops interpret. Not used: opaque values stay inside a model."""

    __module__ = "max.engine"


class TensorSpec:
    """The properties of a tensor: its name, shape and dtype.

    For usage, see :attr:`Model.input_metadata`.

    Args:
        shape: The sizes, None for those known only when the model runs; None for an unknown rank.
        dtype: The element type.
        name: The name.
    """

    __module__ = "max.engine"
    __slots__ = ("_dtype", "_name", "_shape")

    def __init__(self, shape: Sequence[int | None] | None, dtype: DType, name: str) -> None:
        self._shape = None if shape is None else list(shape)
        self._dtype = dtype
        self._name = name

    @property
    def dtype(self) -> DType:
        """A tensor data type."""
        return self._dtype

    @property
    def name(self) -> str:
        """A tensor name."""
        return self._name

    @property
    def shape(self) -> list[int | None] | None:
        """The shape of the tensor as a list of integers.

        If a dimension size is unknown/dynamic (such as the batch size), its value is ``None``.
        """
        return None if self._shape is None else list(self._shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorSpec) and (self._shape, self._dtype, self._name) == (
            other._shape,
            other._dtype,
            other._name,
        )

    def __hash__(self) -> int:
        return hash((tuple(self._shape or ()), self._dtype, self._name))

    def __repr__(self) -> str:
        return f"TensorSpec(shape={self._shape}, dtype={self._dtype}, name={self._name})"

    def __str__(self) -> str:
        dims = (
            "unknown"
            if self._shape is None
            else "x".join("-1" if d is None else str(d) for d in self._shape)
        )
        return f"{dims}x{self._dtype.name}"
