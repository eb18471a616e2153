"""Checks of the operands of library ops when they are staged."""

from __future__ import annotations

from max.dtype import DType
from max.graph import (
    TensorValue,
)
from max.nn.attention.mask_config import MHAMaskVariant


def check_operand(op: str, what: str, value: TensorValue, dtype: DType, rank: int) -> None:
    """Checks an operand; raises TypeError if its dtype differs, ValueError if its rank differs."""
    if value.dtype is not dtype:
        raise TypeError(f"{op}: {what} is {value!r}, expected {dtype.name}")
    if value.rank != rank:
        raise ValueError(f"{op}: {what} is {value!r}, expected rank {rank}")


def check_mask(op: str, mask: MHAMaskVariant, window: int) -> None:
    """Raises ValueError if a mask requires a window and the window is less than 1."""
    windowed = (MHAMaskVariant.CHUNKED_CAUSAL_MASK, MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK)
    if mask in windowed and window < 1:
        raise ValueError(
            f"{op}: the mask {mask.name} with local_window_size {window}; expected a positive "
            "number of tokens"
        )
