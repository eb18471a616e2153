"""Weights that are converted when a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from max.driver import Tensor
from max.dtype import DType

__all__ = ["LaterCast"]


class LaterCast:
    """Elements that are converted to another dtype when they are needed: a DLPack array.

    A session converts them by its kernels, on all cores, part by part while the model is loaded; any other reader gets a
    converted copy.

    Args:
        source: The elements as stored.
        dtype: Their dtype when they are read.
        convert: Converts the source.
    """

    def __init__(self, source: Tensor, dtype: DType, convert: Callable[[], Tensor]) -> None:
        self.source = source
        self.dtype = dtype
        self._convert = convert
        self._converted: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, which is that of the source."""
        return self.source.shape

    def now(self) -> Tensor:
        """The converted elements; they are kept."""
        if self._converted is None:
            self._converted = self._convert()
        return self._converted

    def __dlpack__(self, **kwargs: Any) -> Any:
        """A DLPack capsule on the converted elements."""
        return self.now().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The DLPack device of the elements."""
        return self.source.__dlpack_device__()

    def __repr__(self) -> str:
        return f"LaterCast({self.source.dtype.name} to {self.dtype.name}, {list(self.shape)})"
