"""GPTQ weights in one tensor: the packed integers and the scales of each row."""

from __future__ import annotations

from max.dtype import DType
from max.graph import TensorValue, ops
from max.graph.quantization import QuantizationConfig

__all__ = [
    "gptq_rows",
]


def gptq_rows(weight: TensorValue, inputs: int, config: QuantizationConfig) -> TensorValue:
    """Decodes a GPTQ weight in one tensor to float32 ``[out_dim, inputs]``.

    Args:
        weight: uint8 ``[out_dim, inputs * bits / 8 + 2 * groups]``: the packed integers of a row, lowest bits first,
            then its float16 scales, one per group of inputs. The zero point is ``2 ** (bits - 1)``.
        inputs: The number of inputs.
        config: The number of bits of an integer, and the size of a group.

    Raises:
        ValueError: The sizes do not fit, or the number of bits is not 2, 4 or 8.
    """
    bits = config.bits
    if bits not in (2, 4, 8):
        raise ValueError(f"GPTQ weights of {bits} bits; 2, 4 and 8 have kernels")
    group = inputs if config.group_size == -1 else config.group_size
    per_byte, size = 8 // bits, inputs * bits // 8
    groups = -(-inputs // group)
    if (
        weight.rank != 2
        or weight.dtype is not DType.uint8
        or weight.shape[1] != size + 2 * groups
        or inputs % group
    ):
        raise ValueError(
            f"the GPTQ weight is {weight!r}; {inputs} inputs of {bits} bits in groups of {group} need uint8 "
            f"[out_dim, {size} + 2 * {groups}]"
        )
    rows = weight.shape[0]
    words = ops.cast(weight[:, :size], DType.int32)
    # integer i of a byte begins at bit bits * i
    parts = [words // 2 ** (bits * i) % 2**bits for i in range(per_byte)]
    integers = ops.reshape(ops.stack(parts, axis=2), [rows, groups, group])
    # the two bytes of a float16, the low one first
    halves = ops.cast(ops.reshape(weight[:, size:], [rows, groups, 2]), DType.int32)
    scales = _float16(halves[:, :, 0] + halves[:, :, 1] * 256)
    values = ops.cast(integers - 2 ** (bits - 1), DType.float32)
    return ops.reshape(values * ops.reshape(scales, [rows, groups, 1]), [rows, inputs])


def _float16(bits: TensorValue) -> TensorValue:
    """Decodes float16 bit patterns, given as integers, to float32."""
    # 5 bits of exponent, 10 of fraction; exponent 0 is subnormal: no leading bit
    exponent = bits // 1024 % 32
    fraction = ops.cast(bits % 1024, DType.float32) / 1024.0
    normal = ops.greater(exponent, 0)
    power = ops.cast(ops.max(exponent, 1) - 15, DType.float32)
    magnitude = ops.exp(power * 0.6931471805599453)
    # exp() is inexact: rounding to float16 restores the exact power of 2
    magnitude = ops.cast(ops.cast(magnitude, DType.float16), DType.float32)
    leading_bit = ops.cast(normal, DType.float32)
    sign = 1.0 - 2.0 * ops.cast(bits // 32768, DType.float32)
    return sign * magnitude * (leading_bit + fraction)
