"""The cases of ops on quantized weights whose results are exact; products are in tests/engine/test_quantized.py."""

from __future__ import annotations

import gguf
import numpy as np

from max.dtype.blocks import BLOCK_FORMATS
from max.graph import ops
from max.graph.quantization import QuantizationEncoding
from tests.ops.case import FLOATS, Array, OpCase


def _dequantize(encoding: str) -> OpCase:
    size = BLOCK_FORMATS[encoding].bytes

    def reference(x: Array) -> Array:
        return gguf.quants.dequantize(x, gguf.GGMLQuantizationType[encoding])

    return OpCase(
        f"dequantize_{encoding}",
        lambda x: ops.dequantize(QuantizationEncoding(encoding), x),
        reference,
        (("a", "b", 3 * size),),
        ("uint8",),
        domain=(0.0, 255.0),
        sizes=(1, 2, 5, 17),
    )


def _quantize(encoding: str) -> OpCase:
    return OpCase(
        f"quantize_{encoding}",
        lambda x: ops.quantize(QuantizationEncoding(encoding), x),
        lambda x: gguf.quants.quantize(x.astype(np.float32), gguf.GGMLQuantizationType[encoding]),
        (("a", "b", 96),),
        FLOATS,
        sizes=(1, 2, 5, 17),
    )


def _rows(encoding: str) -> OpCase:
    size = BLOCK_FORMATS[encoding].bytes

    def reference(x: Array, i: Array) -> Array:
        return gguf.quants.dequantize(x[i], gguf.GGMLQuantizationType[encoding])

    return OpCase(
        f"dequantize_rows_{encoding}",
        lambda x, i: ops.dequantize(QuantizationEncoding(encoding), ops.gather(x, i, 0)),
        reference,
        ((9, 2 * size), ("a",)),
        ("uint8",),
        domain=(0.0, 255.0),
        fixed={1: ("int64", (-9, 8))},
    )


QUANTIZED: tuple[OpCase, ...] = (
    *(_dequantize(encoding) for encoding in BLOCK_FORMATS),
    *(_quantize(encoding) for encoding in ("Q4_0", "Q8_0")),
    _rows("Q6_K"),
)
