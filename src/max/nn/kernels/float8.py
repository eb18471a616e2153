"""Products of scaled 8-bit floats.

A tensor is given as float8 elements and scales: its values are the elements times their scales. Weights are
``[out_dim, in_dim]``; their scales are a tensor of rank 0 (one scale), ``[out_dim, 1]`` (one per row),
``[1, in_dim]`` (one per column) or ``[row blocks, column blocks]``. Scales of inputs that are computed while the graph
runs are ``[groups, rows]``.

If each row has one scale, the elements are multiplied as bfloat16, which represents every float8 value, and accumulated
in float32; the scales are applied to the sums. If scales vary along the summed axis, the elements are scaled first, in
float32.
"""

from __future__ import annotations

import ml_dtypes

from max.dtype import DType
from max.graph import Dim, StaticDim, TensorValue, ops
from max.nn.float8_config import (
    Float8InputScaleSpec,
    Float8WeightScaleSpec,
)

__all__ = [
    "F32",
    "batched_dynamic_scaled_fp8_matmul",
    "batched_quantize_dynamic_scaled_float8",
    "convert_weights_to_fp8_fnuz_if_needed",
    "dynamic_scaled_matmul",
    "matmul_static_scaled_float8",
    "needs_fp8_fnuz_conversion",
    "normalize_e4m3fn_to_e4m3fnuz",
    "quantize_dynamic_scaled_float8",
    "quantize_static_scaled_float8",
    "scale_shape",
    "scaled_rows",
    "scaled_weights",
]

F32 = DType.float32


_LEAST = 1e-12
"""The lower bound of the magnitude from which a scale is computed, so that the scale of a row of zeros is not 0."""


def quantize_static_scaled_float8(
    x: TensorValue,
    scale: TensorValue,
    scale_is_inverted: bool = True,
    out_type: DType = DType.float8_e4m3fn,
) -> TensorValue:
    """Quantizes to float8 with a given scale; magnitudes out of range saturate.

    Args:
        x: A float tensor.
        scale: The scale, of one element.
        scale_is_inverted: Whether `x` is divided by `scale`; otherwise it is multiplied by `scale`.
        out_type: The float8 type.

    Raises:
        ValueError: `scale` has more than one element, or `out_type` is not a float8 type.
    """
    scale = _one("quantize_static_scaled_float8: the scale", scale)
    wide = ops.cast(x, F32)
    return _round_up(wide / scale if scale_is_inverted else wide * scale, out_type)


def quantize_dynamic_scaled_float8(
    input: TensorValue,
    input_scale_spec: Float8InputScaleSpec,
    weight_scale_spec: Float8WeightScaleSpec,
    scale_ub: float = 1200.0,
    group_size_or_per_token: int = -1,
    out_type: DType = DType.float8_e4m3fn,
    scales_type: DType = DType.bfloat16,
) -> tuple[TensorValue, TensorValue]:
    """Quantizes to float8 with computed scales, which map the greatest magnitude of each group to the type's maximum.

    Args:
        input: ``[rows, columns]``.
        input_scale_spec: How the input is scaled.
        weight_scale_spec: How the weight that multiplies the input is scaled.
        scale_ub: An upper bound of the magnitude from which a scale is computed.
        group_size_or_per_token: The number of columns that share a scale; -1: all.
        out_type: The float8 type.
        scales_type: The dtype of the scales.

    Returns:
        The elements, ``[rows, columns]``, and the scales, ``[groups, rows]``.

    Raises:
        ValueError: The input is not a matrix, or its number of columns is not a multiple of the group size.
    """
    _matrices("quantize_dynamic_scaled_float8", input)
    rows, columns = input.shape
    size = _static("quantize_dynamic_scaled_float8: the columns", columns)
    group = size if group_size_or_per_token == -1 else group_size_or_per_token
    if group < 1 or size % group:
        raise ValueError(
            f"quantize_dynamic_scaled_float8: groups of {group} columns do not divide the {size} columns "
            f"of {input!r}"
        )
    # [rows, groups, columns of a group]
    wide = ops.reshape(ops.cast(input, F32), (rows, size // group, group))
    magnitude = ops.max(ops.abs(wide), axis=-1)
    # one scale for all: that of the greatest magnitude
    if input_scale_spec.is_tensor:
        magnitude = ops.broadcast_to(ops.max(ops.max(magnitude, axis=0), axis=1), magnitude.shape)
    bounded = ops.max(ops.min(magnitude, scale_ub), _LEAST)
    # the product applies the scale rounded to `scales_type`: quantize with the same rounded scale
    scales = ops.cast(bounded / _greatest(out_type), scales_type)
    quantized = _round_up(wide / ops.cast(scales, F32), out_type)
    # scales are [groups, rows] by contract, though computed row by row
    table = ops.transpose(ops.reshape(scales, (rows, size // group)), 0, 1)
    return ops.reshape(quantized, (rows, columns)), table


def matmul_static_scaled_float8(
    input: TensorValue, weight: TensorValue, input_scale: TensorValue, weight_scale: TensorValue
) -> TensorValue:
    """``(input * input_scale) @ (weight * weight_scale).T`` as bfloat16.

    Args:
        input: float8 ``[rows, in_dim]``.
        weight: float8 ``[out_dim, in_dim]``.
        input_scale: The input's scale, of one element.
        weight_scale: The weight's scales.

    Raises:
        ValueError: The sizes do not fit.
    """
    op = "matmul_static_scaled_float8"
    _factors(op, input, weight)
    scale = _one(f"{op}: the input scale", input_scale)
    return ops.cast(_product(op, input, weight, None, weight_scale) * scale, DType.bfloat16)


def dynamic_scaled_matmul(
    a: TensorValue,
    b: TensorValue,
    a_scales: TensorValue,
    b_scales: TensorValue,
    input_scale_spec: Float8InputScaleSpec,
    weight_scale_spec: Float8WeightScaleSpec,
    out_type: DType = DType.bfloat16,
) -> TensorValue:
    """The product of two matrices of scaled float8 elements.

    Args:
        a: float8 ``[rows, in_dim]``.
        b: float8 ``[out_dim, in_dim]``.
        a_scales: ``[groups, rows]``.
        b_scales: The weight's scales.
        input_scale_spec: How `a` is scaled.
        weight_scale_spec: How `b` is scaled.
        out_type: The dtype of the result.

    Returns:
        ``[rows, out_dim]``.

    Raises:
        ValueError: The sizes do not fit.
    """
    op = "dynamic_scaled_matmul"
    _factors(op, a, b)
    if a_scales.rank != 2 or a_scales.shape[1] != a.shape[0]:
        raise ValueError(
            f"{op}: the input scales are {a_scales!r}, expected [groups, {a.shape[0]}]"
        )
    blocks = weight_scale_spec.block_size
    return ops.cast(_product(op, a, b, a_scales, b_scales, blocks), out_type)


def batched_quantize_dynamic_scaled_float8(
    input: TensorValue,
    input_scale_spec: Float8InputScaleSpec,
    weight_scale_spec: Float8WeightScaleSpec,
    scale_ub: float = 1200.0,
    group_size_or_per_token: int = -1,
    out_type: DType = DType.float8_e4m3fn,
    scales_type: DType = DType.bfloat16,
) -> tuple[TensorValue, TensorValue]:
    """`quantize_dynamic_scaled_float8` of each matrix of a batch.

    Args:
        input: ``[batch, rows, columns]`` with a static batch size.
        input_scale_spec: How the input is scaled.
        weight_scale_spec: How the weight is scaled.
        scale_ub: An upper bound of the magnitude from which a scale is computed.
        group_size_or_per_token: The number of columns that share a scale; -1: all.
        out_type: The float8 type.
        scales_type: The dtype of the scales.

    Returns:
        The elements, ``[batch, rows, columns]``, and the scales, ``[batch, groups, rows]``.

    Raises:
        ValueError: The sizes do not fit.
    """
    pairs = [
        quantize_dynamic_scaled_float8(
            matrix, input_scale_spec, weight_scale_spec, scale_ub, group_size_or_per_token, out_type, scales_type,
        )
        for matrix in _batch("batched_quantize_dynamic_scaled_float8", input)
    ]  # fmt: skip
    return ops.stack([q for q, _ in pairs]), ops.stack([scales for _, scales in pairs])


def batched_dynamic_scaled_fp8_matmul(
    a: TensorValue,
    b: TensorValue,
    a_scales: TensorValue,
    b_scales: TensorValue,
    input_scale_spec: Float8InputScaleSpec,
    weight_scale_spec: Float8WeightScaleSpec,
    out_type: DType = DType.bfloat16,
) -> TensorValue:
    """`dynamic_scaled_matmul` of each pair of matrices of two batches.

    Args:
        a: float8 ``[batch, rows, in_dim]`` with a static batch size.
        b: float8 ``[batch, out_dim, in_dim]``.
        a_scales: ``[batch, groups, rows]``.
        b_scales: The weights' scales, ``[batch, …]``.
        input_scale_spec: How `a` is scaled.
        weight_scale_spec: How `b` is scaled.
        out_type: The dtype of the result.

    Returns:
        ``[batch, rows, out_dim]``.

    Raises:
        ValueError: The sizes do not fit.
    """
    op = "batched_dynamic_scaled_fp8_matmul"
    batches = [_batch(op, value) for value in (a, b, a_scales, b_scales)]
    if len({len(batch) for batch in batches}) != 1:
        raise ValueError(f"{op}: {a!r}, {b!r}, {a_scales!r} and {b_scales!r} differ in their batch")
    return ops.stack(
        [
            dynamic_scaled_matmul(x, y, xs, ys, input_scale_spec, weight_scale_spec, out_type)
            for x, y, xs, ys in zip(*batches, strict=True)
        ]
    )


def convert_weights_to_fp8_fnuz_if_needed(
    weight: TensorValue, weight_scale: TensorValue
) -> tuple[TensorValue, TensorValue]:
    """The weight and its scales, unchanged: no device of this engine needs another float8 format.

    Args:
        weight: The weight.
        weight_scale: Its scales.
    """
    return weight, weight_scale


def scale_shape(spec: Float8WeightScaleSpec, rows: int, columns: int) -> tuple[int, ...]:
    """The shape of a weight's scales.

    Args:
        spec: How the weight is scaled.
        rows: The number of rows of the weight: its outputs.
        columns: The number of columns of the weight: its inputs.
    """
    if spec.is_rowwise:
        return rows, 1
    if spec.is_colwise:
        return 1, columns
    if spec.block_size is not None:
        return -(-rows // spec.block_size[0]), -(-columns // spec.block_size[1])
    return ()


def scaled_rows(op: str, x: TensorValue, scales: TensorValue) -> TensorValue:
    """Applies the scales of float8 rows; the result is float32.

    Args:
        op: The name of the op, for error messages.
        x: float8 ``[rows, columns]``.
        scales: ``[groups, rows]``: each row is divided into `groups` equal runs of columns, which share a scale.

    Raises:
        ValueError: A shape does not fit.
        TypeError: `x` is not a float8 tensor.
    """
    _factors(op, x, x)
    if scales.rank != 2 or scales.shape[1] != x.shape[0]:
        raise ValueError(f"{op}: the input scales are {scales!r}, expected [groups, {x.shape[0]}]")
    columns = _static(f"{op}: the columns", x.shape[1])
    return ops.cast(x, F32) * _broadcast_scales(
        op, ops.cast(ops.transpose(scales, 0, 1), F32), 1, columns
    )


def scaled_weights(
    op: str, weights: TensorValue, scales: TensorValue, blocks: tuple[int, int] | None = None
) -> TensorValue:
    """Applies the scales of float8 weights; the result is float32. Constant weights are scaled once, at load time.

    Args:
        op: The name of the op, for error messages.
        weights: float8 ``[n, rows, columns]``.
        scales: ``[n, row blocks, column blocks]``, or one scale per weight, ``[n]``.
        blocks: Rows and columns of a block; None: the rows and columns are divided evenly.

    Raises:
        ValueError: A shape does not fit.
        TypeError: The weights are not a float8 tensor.
    """
    if not weights.dtype.is_float8():
        raise TypeError(f"{op}: {weights!r} is no float8 tensor")
    count, rows, columns = (_static(f"{op}: the sizes of the weights", d) for d in weights.shape)
    # one scale per weight
    if scales.rank == 1:
        scales = ops.reshape(scales, (scales.shape[0], 1, 1))
    if scales.rank != 3 or scales.shape[0] != count:
        raise ValueError(
            f"{op}: the weights' scales are {scales!r}, expected [{count}, row blocks, column blocks]"
        )
    spread = [
        _broadcast_scales(
            op,
            _broadcast_scales(op, ops.cast(scales[i], F32), 0, rows, blocks and blocks[0]),
            1,
            columns,
            blocks and blocks[1],
        )
        for i in range(count)
    ]
    return ops.cast(weights, F32) * ops.stack(spread)


def _static(what: str, dim: Dim) -> int:
    if not isinstance(dim, StaticDim):
        raise ValueError(f"{what} are {dim}, expected a number")
    return int(dim)


def _matrices(op: str, *values: TensorValue) -> None:
    for value in values:
        if value.rank != 2:
            raise ValueError(f"{op}: {value!r} has rank {value.rank}, expected 2")


def _factors(op: str, a: TensorValue, b: TensorValue) -> None:
    _matrices(op, a, b)
    for value in (a, b):
        if not value.dtype.is_float8():
            raise TypeError(f"{op}: {value!r} is no float8 tensor")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"{op}: {a!r} and {b!r} differ in their last dimension")


def _one(what: str, scale: TensorValue) -> TensorValue:
    """Converts a scale of one element to float32 of rank 0."""
    if any(dim != 1 for dim in scale.shape):
        raise ValueError(f"{what} is {scale!r}, expected one element")
    return ops.cast(ops.reshape(scale, ()), F32)


def _batch(op: str, value: TensorValue) -> list[TensorValue]:
    if value.rank < 1:
        raise ValueError(f"{op}: {value!r} has no batch axis")
    return [value[i] for i in range(_static(f"{op}: the matrices", value.shape[0]))]


def _greatest(dtype: DType) -> float:
    """The greatest finite number of a float8 type."""
    if not dtype.is_float8():
        raise ValueError(f"{dtype.name} is no float8 type")
    return float(ml_dtypes.finfo(dtype.to_numpy()).max)


def _round_up(x: TensorValue, dtype: DType) -> TensorValue:
    # a cast of larger numbers would give NaN or infinity
    limit = _greatest(dtype)
    return ops.cast(ops.max(ops.min(x, limit), -limit), dtype)


def _product(
    op: str,
    a: TensorValue,
    b: TensorValue,
    a_scales: TensorValue | None,
    b_scales: TensorValue,
    blocks: tuple[int, int] | None = None,
) -> TensorValue:
    """The product of scaled operands, float32 ``[rows, out_dim]``.

    Args:
        op: The name of the op, for error messages.
        a: float8 ``[rows, in_dim]``.
        b: float8 ``[out_dim, in_dim]``.
        a_scales: ``[groups, rows]``; None: the input is not scaled.
        b_scales: The weight's scales.
        blocks: Rows and columns of a block of the weight; None if scales are not per block.
    """
    rows, columns = (_static(f"{op}: the sizes of the weight", dim) for dim in b.shape)
    scales = ops.cast(b_scales, F32)
    # one scale per row
    if scales.rank == 1:
        scales = ops.reshape(scales, (scales.shape[0], 1))
    if scales.rank not in (0, 2):
        raise ValueError(
            f"{op}: the weight's scales are {b_scales!r}, expected a number or a matrix"
        )
    if scales.rank == 2:
        scales = _broadcast_scales(op, scales, 0, rows, blocks and blocks[0])
    # a scale that is constant along the summed axis can be applied to the sum
    by_row = scales.rank == 0 or scales.shape[1] == 1
    if by_row and (a_scales is None or a_scales.shape[0] == 1):
        half = DType.bfloat16
        product = ops.cast(ops.matmul(ops.cast(a, half), ops.cast(b, half).T), F32)
        if a_scales is not None:
            product = product * ops.cast(ops.transpose(a_scales, 0, 1), F32)
        return product * (scales if scales.rank == 0 else ops.transpose(scales, 0, 1))
    x = ops.cast(a, F32)
    if a_scales is not None:
        x = x * _broadcast_scales(op, ops.cast(ops.transpose(a_scales, 0, 1), F32), 1, columns)
    if scales.rank == 2:
        scales = _broadcast_scales(op, scales, 1, columns, blocks and blocks[1])
    return ops.matmul(x, (ops.cast(b, F32) * scales).T)


def _broadcast_scales(
    op: str, scales: TensorValue, axis: int, size: int, block: int | None = None
) -> TensorValue:
    """Broadcasts scales to one per element along an axis, or to one for all.

    Args:
        op: The name of the op, for error messages.
        scales: A matrix of scales.
        axis: The axis.
        size: The number of elements.
        block: The number of elements that share a scale (the last scale may have fewer); None: the elements are divided
            evenly.

    Raises:
        ValueError: The number of scales does not fit.
    """
    count = _static(f"{op}: the scales", scales.shape[axis])
    if count in (1, size):
        return scales
    if block is None and count and size % count == 0:
        block = size // count
    if block is None or -(-size // block) != count:
        by = "" if block is None else f" in blocks of {block}"
        raise ValueError(f"{op}: {count} scales for {size} elements{by}")
    wide = ops.repeat_interleave(scales, block, axis)
    # the last block may have fewer elements
    if count * block == size:
        return wide
    return wide[:size] if axis == 0 else wide[:, :size]


def needs_fp8_fnuz_conversion() -> bool:
    """False: no device of this engine needs the float8 format of CDNA3 GPUs."""
    return False


def normalize_e4m3fn_to_e4m3fnuz(
    weight: TensorValue, weight_scale: TensorValue
) -> tuple[TensorValue, TensorValue]:
    """Reinterprets float8_e4m3fn elements as float8_e4m3fnuz, which halves their values, and doubles the scales.

    Args:
        weight: float8_e4m3fn elements; -0 becomes 0.
        weight_scale: The scales.

    Raises:
        TypeError: The weight has another dtype.
    """
    if weight.dtype is not DType.float8_e4m3fn:
        raise TypeError(
            f"normalize_e4m3fn_to_e4m3fnuz: the weight is {weight!r}, expected float8_e4m3fn"
        )
    # the bias of e4m3fnuz is larger by 1: the same code has half the value
    halved = ops.cast(weight, DType.float32) * 0.5
    return ops.cast(halved, DType.float8_e4m3fnuz), weight_scale * 2.0
