"""Fourier transforms."""

from __future__ import annotations

from max.mlir.dims import DimExpr
from max.mlir.operation import Attrs, OpSpec, Types, axis_of, define, same_device, tensor

NORMALIZATIONS = ("backward", "ortho", "forward")


def _infer_irfft(types: Types, attrs: Attrs) -> Types:
    """The operand's type without its last axis of 2, and with `n` elements along `axis`."""
    x, roots = tensor("irfft", types, 0), tensor("irfft", types, 1)
    n: int = attrs["n"]
    if attrs["normalization"] not in NORMALIZATIONS:
        raise ValueError(
            f"irfft: the normalization is {attrs['normalization']!r}, expected "
            + ", ".join(NORMALIZATIONS)
        )
    if n < 1:
        raise ValueError(f"irfft: n is {n}, expected 1 or more")
    if not x.dtype.is_float() or roots.dtype is not x.dtype:
        raise TypeError(f"irfft: {x.short}, expected one floating-point type of operand and roots")
    if x.rank < 2 or x.shape[-1] != 2 or roots.shape != (n, 2):
        raise ValueError(
            f"irfft: the operand is {x.short}, expected an axis of 2, real and imaginary part, last; "
            f"the roots are {roots.short}"
        )
    same_device("irfft", [x, roots])
    axis = axis_of("irfft", attrs["axis"], x.rank - 1)
    return (x.with_shape([*x.shape[:axis], DimExpr.constant(n), *x.shape[axis + 1 : -1]]),)


define(
    OpSpec(
        "mo.irfft",
        (2, 2),
        1,
        attributes={"n": int, "axis": int, "normalization": str},
        infer=_infer_irfft,
        takes=(
            "x `[…, m, …, 2]` (complex), roots `[n, 2]`: cosine and sine of the n-th parts "
            "of a circle"
        ),
        doc="`n`, `axis`, `normalization` = backward, ortho, forward; NumPy `irfft`",
    )
)
