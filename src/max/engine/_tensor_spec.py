"""The definitions of :class:`TensorSpec`, :class:`TorchInputSpec` and :class:`MojoValue`."""

from __future__ import annotations

from collections.abc import Sequence

from max.dtype import DType

__all__ = ["InputSpec", "MojoValue", "TensorSpec", "TorchInputSpec"]


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


class TorchInputSpec:
    """The shape and dtype of an input of a model of another framework, for ``InferenceSession.load(input_specs=)``.

    Args:
        shape: Sizes, names of dynamic sizes, or None for dynamic sizes; None: as the model says.
        dtype: The dtype; None: as the model says.
        device: The device. Models of other frameworks run on the CPU.

    Raises:
        ValueError: A size is no int, text or None, or is negative.
    """

    __module__ = "max.engine"

    def __init__(
        self,
        shape: Sequence[int | str | None] | None = None,
        dtype: DType | None = None,
        device: object = "",
    ) -> None:
        for size in shape or ():
            if not (size is None or isinstance(size, str) or (type(size) is int and size >= 0)):
                raise ValueError(
                    f"TorchInputSpec: the shape {list(shape or ())} has {size!r}; expected sizes, names or None"
                )
        self.shape = None if shape is None else list(shape)
        self.dtype = dtype
        self.device = device

    def __repr__(self) -> str:
        return f"TorchInputSpec(shape={self.shape}, dtype={self.dtype})"


InputSpec = TorchInputSpec
"""What `input_specs` takes."""
