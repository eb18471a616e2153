"""Tensors of torch as arrays that share their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.importers.errors import ImportFailure

if TYPE_CHECKING:
    import torch

__all__ = ["array_of", "dtype_of"]

_STORED: dict[str, tuple[str, Any]] = {
    "torch.bfloat16": ("int16", ml_dtypes.bfloat16),
    "torch.float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3fn),
    "torch.float8_e5m2": ("uint8", ml_dtypes.float8_e5m2),
}
"""Dtypes that NumPy lacks: the integer of the same size, and the dtype of the array."""


def dtype_of(dtype: torch.dtype) -> DType | None:
    """The `DType` of a torch dtype; None if there is none."""
    try:
        return DType.from_torch(dtype)
    except ValueError:
        return None


def array_of(name: str, tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The elements of a tensor. A contiguous tensor of the CPU is not copied.

    Raises:
        ImportFailure: The tensor has no elements in memory, or of a type that graphs lack.
    """
    import torch

    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ImportFailure(
            f"{name!r} is a {tensor.layout} tensor on {tensor.device}, expected a dense one on the CPU"
        )
    if dtype_of(tensor.dtype) is None:
        raise ImportFailure(f"{name!r} is {tensor.dtype}, which graphs lack")
    plain = tensor.detach().contiguous()
    # views that negate or conjugate have the bits of what they view
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    stored = _STORED.get(str(plain.dtype))
    if stored is None:
        return plain.numpy()
    shape = tuple(plain.shape)
    bits = plain.reshape(-1).view(getattr(torch, stored[0])).numpy()
    return np.asarray(bits.view(stored[1]).reshape(shape))
