"""`DebugConfig.nan_check`: names the first op whose result has a NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from max import mlir
from max._compiler.locations import SourceLocations
from max.dtype import DType

__all__ = ["NanError", "raise_for_nans"]

_Arrays = Sequence[npt.NDArray[Any]]


class NanError(ValueError, FloatingPointError):
    """An op yields a NaN; programs for MAX catch a ValueError."""


def raise_for_nans(op: mlir.MoOp, operands: _Arrays, results: _Arrays) -> None:
    """Raises for a NaN in the results of an op.

    Args:
        op: The op.
        operands: Its operands.
        results: Its results.

    Raises:
        NanError: A result has a NaN.
    """
    for result in results:
        places = _nans(result)
        if not len(places):
            continue
        # a NaN that came in is not this op's
        given = [str(index) for index, operand in enumerate(operands) if len(_nans(operand))]
        source = f"operand {', '.join(given)} has one too" if given else "no operand has one"
        name = op.attr("symbol") if op.name == "mo.custom" else op.name.removeprefix("mo.")
        place = SourceLocations([op.location]).describe(0)
        index = ", ".join(str(i) for i in places[0])
        dtype = DType.from_numpy(result.dtype).name
        raise NanError(
            f"nan-check: {name}: {len(places)} of {dtype} {list(result.shape)} are NaN, the first at [{index}]; "
            + source
            + (f" (staged at {place})" if place else "")
        )


def _nans(array: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The indices of the NaNs, one row per NaN."""
    if not DType.from_numpy(array.dtype).is_float():
        return np.empty((0, 0), np.int64)
    return np.argwhere(np.isnan(array))
