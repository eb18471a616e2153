"""Ops on block-quantized and GPTQ weights."""

from __future__ import annotations

from max.dtype.blocks import BLOCK_FORMATS
from max.graph.ops.movement.shape import reshape
from max.graph.ops.staging.stage import as_tensor, stage
from max.graph.quantization import QuantizationConfig, QuantizationEncoding
from max.graph.value import TensorValue, TensorValueLike

__all__ = ["dequantize", "qmatmul", "quantize"]


def _encoding(op: str, encoding: QuantizationEncoding) -> str:
    """The `mo` attribute of a block encoding.

    Raises:
        TypeError: The argument is not a `QuantizationEncoding`.
        ValueError: It is not a block encoding.
    """
    if not isinstance(encoding, QuantizationEncoding):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{op}: the encoding is {encoding!r}, expected a QuantizationEncoding")
    if not encoding.is_gguf:
        raise ValueError(
            f"{op}: {encoding.value} is not a block encoding; expected {', '.join(BLOCK_FORMATS)}"
        )
    return encoding.value


def dequantize(encoding: QuantizationEncoding, quantized: TensorValue) -> TensorValue:
    """Decodes quantized blocks, as `max.dtype.blocks.decode`.

    Args:
        encoding: Q4_0, Q4_K, Q5_K, Q6_K or Q8_0.
        quantized: uint8 ``[…, bytes]``.

    Returns:
        float32 ``[…, bytes / block_size * elements_per_block]``.

    Raises:
        ValueError: The encoding is not a block encoding, or `bytes` is not a multiple of its block size.
        TypeError: The tensor is not uint8.
    """
    attrs = {"encoding": _encoding("dequantize", encoding)}
    return stage("dequantize", (as_tensor(quantized),), attrs)


def quantize(
    encoding: QuantizationEncoding,
    x: TensorValueLike,
    weights: TensorValueLike | None = None,
) -> TensorValue:
    """Encodes a tensor in quantized blocks (an extension). `max.graph.quantization.quantize` encodes arrays.

    Args:
        encoding: Q4_0, Q4_K, Q5_K, Q6_K or Q8_0.
        x: Floats ``[…, elements]``. A value that is not finite makes its block undefined.
        weights: The weight of each column's squared errors, float32 ``[elements]``, finite and not negative; None: all
            are equal. Scales of all encodings but Q8_0 then minimize the weighted sum.

    Returns:
        uint8 ``[…, elements / elements_per_block * block_size]``. Without weights, blocks of Q4_0 and Q8_0 are equal to
        the ``gguf`` package's; scales of the others are fitted by least squares.

    Raises:
        ValueError: The encoding is not supported, `elements` is not a multiple of its block, or the weights have
            another shape.
        TypeError: The tensor is not of a floating-point type, or the weights are not float32.
    """
    operands = [as_tensor(x)] if weights is None else [as_tensor(x), as_tensor(weights)]
    return stage("quantize", tuple(operands), {"encoding": _encoding("quantize", encoding)})


def qmatmul(
    encoding: QuantizationEncoding,
    config: QuantizationConfig | None,
    lhs: TensorValue,
    *rhs: TensorValue,
) -> TensorValue:
    """``lhs @ W.T`` with a quantized weight W.

    Kernels may quantize `lhs` to 8 bits in blocks of 32 (docs/quantization.md states the error). Sums are accumulated
    in float32 or exactly, and rounded to the dtype of `lhs` once.

    Args:
        encoding: Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, or GPTQ.
        config: The configuration of a GPTQ weight; ignored for block encodings.
        lhs: float32, bfloat16 or float16 ``[…, M, K]``, or ``[K]``.
        rhs: The operands of the weight. For block encodings: uint8 ``[N, bytes]``, rows of K encoded elements. For
            GPTQ, in the layout of its checkpoints: ``qweight`` int32 ``[K * bits / 32, N]``, ``qzeros`` int32
            ``[groups, N * bits / 32]`` (zero points minus 1), ``scales`` float ``[groups, N]``, and with ``desc_act``
            also ``g_idx`` int32 ``[K]``.

    Returns:
        ``[…, M, N]``, or ``[N]`` for a vector, of the dtype of `lhs`.

    Raises:
        ValueError: The number of operands is wrong for the encoding, GPTQ has no config or bits other than 2, 4 and 8,
            or the shapes do not match.
        TypeError: A dtype is not supported.
    """
    x = as_tensor(lhs)
    if x.rank == 0:
        raise ValueError(
            f"qmatmul: the left operand is {x.mlir_type.short}, expected rank 1 or more"
        )
    if x.rank == 1:
        row = qmatmul(encoding, config, reshape(x, [1, *x.shape]), *rhs)
        return reshape(row, row.shape[1:])
    operands = tuple(as_tensor(value) for value in rhs)
    if encoding is QuantizationEncoding.GPTQ:
        return _gptq(config, x, operands)
    attrs = {"encoding": _encoding("qmatmul", encoding)}
    if len(operands) != 1:
        raise ValueError(
            f"qmatmul: {len(operands)} operands after the left one, expected 1: the {encoding.value} weight"
        )
    return stage("qmatmul", (x, operands[0]), attrs)


def _gptq(
    config: QuantizationConfig | None, x: TensorValue, operands: tuple[TensorValue, ...]
) -> TensorValue:
    if config is None or config.quant_method != "gptq":
        raise ValueError(
            f"qmatmul: the config of a GPTQ weight is {config!r}, expected one with quant_method gptq"
        )
    num_operands = 4 if config.desc_act else 3
    if len(operands) != num_operands:
        names = "qweight, qzeros, scales" + (", g_idx" if config.desc_act else "")
        raise ValueError(
            f"qmatmul: {len(operands)} operands after the left one, expected {num_operands} for desc_act "
            f"{config.desc_act}: {names}"
        )
    group = config.group_size
    if group == -1:
        inner = x.mlir_type.shape[-1]
        if not inner.is_static:
            raise ValueError(
                f"qmatmul: group_size is -1 (all inputs), but the last dimension of {x.mlir_type.short} is symbolic"
            )
        group = max(inner.value, 1)
    return stage("qmatmul_gptq", (x, *operands), {"bits": config.bits, "group_size": group})
