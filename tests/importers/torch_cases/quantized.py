"""Cases of the ops of quantized programs."""

from __future__ import annotations

import torch
import torch.ao.quantization.fx._decomposed

from tests.importers.torch_cases.case import Case, Draw, case

LIMITS = {torch.uint8: (0, 255), torch.int8: (-128, 127), torch.int16: (-32768, 32767)}


def limits(draw: Draw) -> tuple[torch.dtype, int, int]:
    dtype = draw.choice(list(LIMITS))
    low, high = LIMITS[dtype]
    return (dtype, low + 1, high) if draw.bool() else (dtype, low, high)


@case("quantized_decomposed.quantize_per_tensor.default")
def quantize(draw):
    dtype, low, high = limits(draw)
    x = draw.floats(*draw.shape(), low=-20, high=20)
    return Case(
        [x, draw.choice([0.125, 0.1, 0.013]), draw.int(max(low, -50), 50), low, high, dtype]
    )


@case("quantized_decomposed.dequantize_per_tensor.default")
def dequantize(draw):
    dtype, low, high = limits(draw)
    x = draw.ints(*draw.shape(), low=low, high=high, dtype=dtype)
    return Case(
        [x, draw.choice([0.125, 0.1, 0.013]), draw.int(max(low, -50), 50), low, high, dtype]
    )


def channels(draw: Draw, rank: int) -> tuple[tuple[int, ...], int, torch.Tensor, torch.Tensor]:
    shape = tuple(draw.int(1, 5) for _ in range(rank))
    axis = draw.int(0, rank - 1)
    zeros = draw.ints(shape[axis], low=0, high=9)
    dtype = draw.choice([torch.float32, torch.float64])
    return shape, axis, draw.floats(shape[axis], low=0.01, high=0.2, dtype=dtype), zeros


@case("quantized_decomposed.quantize_per_channel.default")
def quantize_channels(draw):
    dtype, low, high = limits(draw)
    shape, axis, scales, zeros = channels(draw, draw.int(1, 4))
    return Case(
        [draw.floats(*shape, low=-9, high=9), scales.float(), zeros, axis, low, high, dtype]
    )


@case("quantized_decomposed.dequantize_per_channel.default")
def dequantize_channels(draw):
    dtype, low, high = limits(draw)
    shape, axis, scales, zeros = channels(draw, draw.int(1, 4))
    x = draw.ints(*shape, low=low, high=high, dtype=dtype)
    return Case([x, scales.float(), zeros if draw.bool() else None, axis, low, high, dtype])
