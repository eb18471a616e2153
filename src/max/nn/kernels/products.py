"""Products with weights that have one row per output: ``x @ weight.T + bias``."""

from __future__ import annotations

from max.dtype import DType
from max.graph import TensorValue, TensorValueLike, ops
from max.graph.quantization import QuantizationEncoding

__all__ = [
    "HALF",
    "matmul_input",
    "plain_dtype",
    "project",
    "swish_glu",
    "with_bias",
]

HALF = (DType.bfloat16, DType.float16)


def matmul_input(x: TensorValue, weight: TensorValue) -> TensorValue:
    """Casts `x` for a product with a weight: float32 is rounded to the dtype of a 16-bit weight.

    Widening the weight instead would double the bytes read, without more precision in the weight.
    """
    if weight.dtype in HALF and x.dtype is DType.float32:
        return ops.cast(x, weight.dtype)
    return x


def project(
    x: TensorValueLike,
    weight: TensorValueLike,
    bias: TensorValueLike | None = None,
    encoding: QuantizationEncoding | None = None,
) -> TensorValue:
    """``x @ weight.T + bias``.

    Sums are accumulated in float32. A float32 `x` gives a float32 result; if the weight is bfloat16 or float16, `x` is
    rounded to that dtype first.

    Args:
        x: ``[…, in_dim]``.
        weight: ``[out_dim, in_dim]``, or rows of encoded blocks.
        bias: ``[out_dim]``.
        encoding: The encoding of the weight; None: not encoded.

    Raises:
        ValueError: The sizes do not fit.
    """
    left, right = TensorValue(x), TensorValue(weight)
    if encoding is not None:
        return with_bias(ops.qmatmul(encoding, None, left, right), bias)
    if left.rank < 1 or right.rank != 2 or left.shape[-1] != right.shape[-1]:
        raise ValueError(
            f"Linear: the input is {left!r}, the weight {right!r}; the last dimension of the input "
            "must equal the last one of the weight"
        )
    y = ops.matmul(matmul_input(left, right), right.T)
    # x may have been rounded for the product
    if left.dtype is DType.float32:
        y = ops.cast(y, DType.float32)
    return with_bias(y, bias)


def with_bias(y: TensorValue, bias: TensorValueLike | None) -> TensorValue:
    """``y + bias``, of y's dtype."""
    return y if bias is None else y + ops.cast(TensorValue(bias), y.dtype)


def plain_dtype(dtype: DType, encoding: QuantizationEncoding | None) -> DType:
    """The dtype of parameters that are not encoded: float32 if the caller passes uint8 for an encoded weight."""
    return DType.float32 if encoding is not None and not dtype.is_float() else dtype


def swish_glu(a: TensorValueLike, b0: TensorValueLike, b1: TensorValueLike) -> TensorValue:
    """``silu(a @ b0ᵀ) * (a @ b1ᵀ)``.

    Args:
        a: ``[rows, in_dim]``.
        b0: The gate projection's weight ``[out_dim, in_dim]``.
        b1: The up projection's weight ``[out_dim, in_dim]``.

    Raises:
        ValueError: The sizes do not fit.
    """
    return ops.silu(project(a, b0)) * project(a, b1)
