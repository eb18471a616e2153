"""Data of a weight with its name, dtype, shape and encoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from max.driver import DLPackArray, Tensor
from max.dtype import DType
from max.dtype.rounding import convert_rounding_once
from max.graph.quantization import QuantizationEncoding
from max.graph.shape import Shape
from max.graph.weights._deferred_cast import LaterCast


@dataclass
class WeightData:
    """The data of a weight, with its name, dtype, shape and encoding. It is a DLPack array.

    Attributes:
        data: The elements; uint8 blocks for a quantized weight.
        name: The hierarchical name, such as ``model.layers.0.mlp.down_proj.weight``.
        dtype: The element type of ``data``.
        shape: The shape of ``data``.
        quantization_encoding: The encoding of a quantized weight, or None.
    """

    data: DLPackArray
    name: str
    dtype: DType
    shape: Shape
    quantization_encoding: QuantizationEncoding | None = None

    @property
    def element_shape(self) -> Shape:
        """The shape in elements: that of ``data`` unless it holds encoded blocks."""
        encoding = self.quantization_encoding
        if encoding is None or not encoding.is_gguf or not self.shape:
            return self.shape
        elements = self.shape[-1] // encoding.block_size * encoding.elements_per_block
        return Shape([*self.shape[:-1], elements])

    @classmethod
    def from_numpy(cls, arr: np.ndarray[Any, Any], name: str) -> WeightData:
        """Wraps an array, without a copy if it is contiguous.

        Args:
            arr: The array; its dtype may come from ml_dtypes.
            name: The weight's name.

        Raises:
            ValueError: No DType corresponds to the array's.
        """
        return cls._from_tensor(Tensor.from_numpy(arr), name)

    @classmethod
    def _from_tensor(
        cls, tensor: Tensor, name: str, encoding: QuantizationEncoding | None = None
    ) -> WeightData:
        return cls(tensor, name, tensor.dtype, Shape(tensor.shape), encoding)

    def astype(self, dtype: DType) -> WeightData:
        """Converts the elements to another dtype, rounding to the nearest, ties to even.

        Args:
            dtype: The new element type; for the current one this object is returned.

        Raises:
            ValueError: The weight is quantized.
        """
        if dtype is self.dtype:
            return self
        if self.quantization_encoding is not None:
            raise ValueError(
                f"weight {self.name!r}: its {self.quantization_encoding.value} blocks cannot be "
                f"converted to {dtype}"
            )
        array = Tensor.from_dlpack(self.data).to_numpy()
        if self.dtype is DType.bfloat16 and dtype is DType.float32:
            # bfloat16 is the upper half of float32: a shift is 15 times as fast as ml_dtypes' cast
            shifted = np.left_shift(array.view(np.uint16), np.uint32(16), dtype=np.uint32)
            return WeightData._from_tensor(
                Tensor.from_numpy(np.asarray(shifted.view(np.float32))), self.name
            )
        # values beyond a narrower type's range become infinite, without a warning
        with np.errstate(over="ignore", invalid="ignore"):
            result = convert_rounding_once(array, dtype.to_numpy())
        return WeightData._from_tensor(Tensor.from_numpy(result), self.name)

    def cast_at_load(self, dtype: DType) -> WeightData:
        """:meth:`astype`, deferred until a model is loaded with the weight or its elements are read.

        Args:
            dtype: The new element type; for the current one this object is returned.

        Raises:
            ValueError: The weight is quantized.
        """
        if dtype is self.dtype or self.quantization_encoding is not None:
            return self.astype(dtype)
        later = LaterCast(
            Tensor.from_dlpack(self.data),
            dtype,
            lambda: Tensor.from_dlpack(self.astype(dtype).data),
        )
        return WeightData(later, self.name, dtype, self.shape)

    def to_buffer(self) -> Tensor:
        """The data as a `max.driver.Buffer` on the same memory."""
        return Tensor.from_dlpack(self.data)

    def __dlpack__(self, **kwargs: Any) -> Any:
        """A DLPack capsule of the data."""
        return self.to_buffer().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The DLPack device of the data."""
        return self.data.__dlpack_device__()


# assigned after the class: the dataclass decorator resolves names in the defining module
WeightData.__module__ = "max.graph.weights"

WeightsAdapter: TypeAlias = Callable[..., dict[str, WeightData]]
"""Converts a checkpoint's weights to a model's names: ``adapter(dict(weights.items()), …)``."""
