"""Constants, weights, and transfers between devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.mlir.operation import Attrs, OpSpec, Types, define, tensor
from max.mlir.types import dtype_text


def _check_constant(operands: Types, results: Types, attrs: Attrs) -> None:
    """Checks that the value has the dtype and the shape of the result."""
    y = tensor("constant", results, 0)
    # an attribute, or its array when the op is verified
    value: npt.NDArray[Any] = getattr(attrs["value"], "array", attrs["value"])
    if DType.from_numpy(value.dtype) is not y.dtype or value.shape != y.static_shape:
        raise ValueError(
            f"constant: a value of {dtype_text(DType.from_numpy(value.dtype))}"
            f"{list(value.shape)} for the type {y.short}"
        )


ConstantOp = define(
    OpSpec(
        "mo.constant",
        (0, 0),
        1,
        attributes={"value": np.ndarray},
        check=_check_constant,
        source=True,
        borrows=True,
        doc="dense or resource attribute",
    )
)


def _check_external(operands: Types, results: Types, attrs: Attrs) -> None:
    tensor("constant_external", results, 0)
    if not attrs["name"]:
        raise ValueError("constant_external: the name is empty")


ConstantExternalOp = define(
    OpSpec(
        "mo.constant.external",
        (0, 0),
        1,
        attributes={"name": str},
        optional={"align": int},
        check=_check_external,
        source=True,
        borrows=True,
        doc="`name`, optional `align`; a weight, bound at `load`",
    )
)


def _check_transfer(operands: Types, results: Types, attrs: Attrs) -> None:
    x, y = tensor("transfer_to", operands, 0), tensor("transfer_to", results, 0)
    if x.dtype is not y.dtype or x.shape != y.shape:
        raise ValueError(f"transfer_to: {x.short} to {y.short} changes more than the device")


TransferOp = define(
    OpSpec(
        "mo.transfer",
        (1, 1),
        1,
        check=_check_transfer,
        view=True,
        takes="x",
        doc="to the result's device",
    )
)
