"""Two operands as tensors of one dtype and shape."""

from __future__ import annotations

from typing import Any

from max.experimental.array_api.data_types import astype, result_type
from max.experimental.array_api.manipulation import broadcast_arrays
from max.experimental.tensor import Tensor

__all__ = ["pair_of"]


def pair_of(name: str, x1: Any, x2: Any) -> tuple[Tensor, Tensor]:
    """Two operands of one dtype and shape; one of them may be a number of Python."""
    tensor = x1 if isinstance(x1, Tensor) else x2
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: neither {x1!r} nor {x2!r} is a Tensor")
    x1, x2 = (
        x if isinstance(x, Tensor) else Tensor.constant(x, dtype=tensor.dtype) for x in (x1, x2)
    )
    dtype = result_type(x1, x2)
    first, second = broadcast_arrays(*(astype(x, dtype, copy=False) for x in (x1, x2)))
    return first, second
