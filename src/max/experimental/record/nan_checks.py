"""``MAX_DEBUG_NANS``: raises an error at the op that makes the first NaN."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from max.driver import CPU
from max.experimental.programs.lazy_values import Call, Cell

__all__ = ["check_nans"]


def check_nans(call: Call, operands: Sequence[Cell], results: Sequence[Cell]) -> None:
    """Checks the results of a call for NaNs that its operands do not have.

    Args:
        call: The call.
        operands: Its operands, with storage.
        results: Its results, with storage.

    Raises:
        FloatingPointError: A result has a NaN, and no operand has one.
    """
    for cell in results:
        places = _nans(cell)
        if not len(places) or any(len(_nans(operand)) for operand in operands):
            continue
        op = getattr(call.signature.family.arguments.op, "__name__", "an op")
        filename, line = call.place
        index = ", ".join(str(i) for i in places[0])
        raise FloatingPointError(
            f"{op}: {len(places)} of {cell.type.dtype.name} {list(cell.type.shape)} are NaN, the first at [{index}]; "
            f"no operand has a NaN (staged at {filename}:{line})"
        )


def _nans(cell: Cell) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """The indices of the NaNs of a cell, one row per NaN."""
    storage = cell.storage
    if storage is None or not cell.type.dtype.is_float():
        return np.empty((0, 0), np.int64)
    array = (storage if storage.is_host else storage.to(CPU())).to_numpy()
    return np.argwhere(np.isnan(array))
