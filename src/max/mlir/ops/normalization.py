"""Normalizations over the last axis."""

from __future__ import annotations

from max.mlir.operation import Attrs, OpSpec, Types, define, same_device, tensor
from max.mlir.types import TensorType


def _check(op: str, x: TensorType, scales: dict[str, TensorType], epsilon: float) -> None:
    """Checks a float x with an axis, scales of the size of its last axis, and a positive epsilon."""
    if not x.dtype.is_float():
        raise TypeError(f"{op}: the input is {x.short}, expected a floating-point type")
    if x.rank == 0:
        raise ValueError(f"{op}: the input {x.short} has no axis to normalize over")
    for name, t in scales.items():
        if t.shape != (x.shape[-1],):
            raise ValueError(
                f"{op}: {name} is {t.short}, expected shape [{x.shape[-1]}], the last dimension "
                f"of the input {x.short}"
            )
        if t.dtype is not x.dtype:
            raise TypeError(
                f"{op}: {name} is {t.short}, the input is {x.short}; expected one dtype (cast)"
            )
    same_device(op, [x, *scales.values()])
    if not epsilon > 0:
        raise ValueError(f"{op}: epsilon is {epsilon}, expected a positive number")


def _infer_layer_norm(types: Types, attrs: Attrs) -> Types:
    x, gamma, beta = (tensor("layer_norm", types, i) for i in range(3))
    _check("layer_norm", x, {"gamma": gamma, "beta": beta}, attrs["epsilon"])
    return (x,)


define(
    OpSpec(
        "mo.layer_norm",
        (3, 3),
        1,
        attributes={"epsilon": float},
        infer=_infer_layer_norm,
        row_flops=6,
        region_size=8,
        takes="x, gamma, beta",
        doc="over the last axis",
    )
)


def _infer_rms_norm(types: Types, attrs: Attrs) -> Types:
    x, gamma = tensor("rms_norm", types, 0), tensor("rms_norm", types, 1)
    _check("rms_norm", x, {"gamma": gamma}, attrs["epsilon"])
    return (x,)


RmsNormOp = define(
    OpSpec(
        "mo.rms_norm",
        (2, 2),
        1,
        attributes={"epsilon": float, "weight_offset": float, "multiply_before_cast": bool},
        infer=_infer_rms_norm,
        row_flops=4,
        region_size=6,
        takes="x, gamma",
        doc="over the last axis",
    )
)
