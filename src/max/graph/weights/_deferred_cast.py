"""Weights that are cast when a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from max.driver import Tensor
from max.dtype import DType

__all__ = ["LaterCast"]


class LaterCast:
    """A DLPack array whose elements are cast from a stored dtype when they are read.

    A session casts `source` with its own kernels, in parts, while it loads a model. Any other reader gets a cast copy.

    Args:
        source: The stored elements.
        dtype: The dtype that readers see.
        convert: Casts the source.
    """

    def __init__(self, source: Tensor, dtype: DType, convert: Callable[[], Tensor]) -> None:
        self.source = source
        self.dtype = dtype
        self._convert = convert
        self._converted: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the source."""
        return self.source.shape

    def now(self) -> Tensor:
        """The cast elements; the first call computes and keeps them."""
        if self._converted is None:
            self._converted = self._convert()
        return self._converted

    def __dlpack__(self, **kwargs: Any) -> Any:
        """A DLPack capsule of the cast elements."""
        return self.now().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The DLPack device of the elements."""
        return self.source.__dlpack_device__()

    def __repr__(self) -> str:
        return f"LaterCast({self.source.dtype.name} to {self.dtype.name}, {list(self.shape)})"
