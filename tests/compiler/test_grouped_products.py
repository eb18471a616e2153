"""Packed weights of experts: the launches of products of groups, and their results beside the interpreter's."""

from __future__ import annotations

import numpy as np
import pytest

from max import _interpreter
from max._config import flags
from max.driver import CPU
from max.dtype import DType
from max.dtype.blocks import encode
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.graph.quantization import QuantizationEncoding
from max.nn.moe import run_experts
from tests.tolerance import assert_close

DEVICE = DeviceRef.CPU()
EXPERTS, HIDDEN = 5, 256


class Weights:
    """Constants of random experts, dense or in blocks."""

    def __init__(self, kind: str) -> None:
        self.rng = np.random.default_rng(0)
        self.dense = DType[kind] if kind.startswith(("float", "bfloat")) else None
        self.encoding = None if self.dense else QuantizationEncoding[kind]

    def __call__(self, rows: int, columns: int) -> TensorValue:
        w = (self.rng.standard_normal((EXPERTS, rows, columns)) / 16).astype(np.float32)
        if self.encoding is not None:
            blocks = np.stack([encode(one, self.encoding.value) for one in w])
            return ops.constant(blocks, DType.uint8, DEVICE)
        assert self.dense is not None
        return ops.constant(w.astype(self.dense.to_numpy()), self.dense, DEVICE)


@pytest.mark.parametrize("machine", ["", "avx2,fma"])
@pytest.mark.parametrize("size", [256, 264], ids=["whole strips", "half strips"])
@pytest.mark.parametrize(
    ("kind", "tokens_dtype"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("float16", "float16"),
        ("Q8_0", "float32"),
        ("Q4_K", "float32"),
    ],
)
def test_a_gated_layer(kind: str, tokens_dtype: str, size: int, machine: str) -> None:
    """Gate and up are one launch, whose epilogue multiplies them."""
    weights, dtype = Weights(kind), DType[tokens_dtype]
    if weights.encoding and size % 256:
        pytest.skip("rows of whole blocks only")
    down = 256
    with Graph(
        "g",
        input_types=[
            TensorType(dtype, ("m", HIDDEN), DEVICE),
            TensorType(DType.int64, ("m", 2), DEVICE),
            TensorType(DType.float32, ("m", 2), DEVICE),
        ],
    ) as graph:
        x, chosen, shares = (value.tensor for value in graph.inputs)
        y = run_experts(
            x, chosen, shares, (weights(size, HIDDEN), weights(size, HIDDEN)), weights(down, size),
            gate_up_encoding=weights.encoding, down_encoding=weights.encoding,
        )  # fmt: skip
        graph.output(ops.cast(y, DType.float32))
    with flags.override(MAX_CPU_FEATURES=machine) if machine else flags.override():
        model = InferenceSession(devices=[CPU()]).load(graph)
    products = [name for name in model.kernel_summaries if "grouped_products" in name]
    assert len(products) == 2 and "silu+mul" in products[0] and "silu" not in products[1]
    for rows in (0, 1, 3, 40, 200):
        tokens = weights.rng.standard_normal((rows, HIDDEN)).astype(dtype.to_numpy())
        experts = weights.rng.integers(0, EXPERTS - 1, (rows, 2))
        parts = weights.rng.random((rows, 2)).astype(np.float32)
        (got,) = model.execute(tokens, experts, parts)
        (want,) = _interpreter.run(graph, [tokens, experts, parts])
        if weights.encoding is None:
            assert weights.dense is not None
            assert_close(got.to_numpy(), want, weights.dense.to_numpy(), scale=16)
        else:
            # the rows of both products are rounded to 8 bits
            assert np.abs(got.to_numpy() - want).max(initial=0) <= 0.03 * np.abs(want).max(
                initial=1
            )


def test_weights_of_several_products() -> None:
    """A weight that products of two groups of rows share is packed once, before the first of them; a result with
    another use is stored.
    """
    weights = Weights("float32")
    with Graph(
        "g",
        input_types=[
            TensorType(DType.float32, ("m", HIDDEN), DEVICE),
            TensorType(DType.int64, ("m", 1), DEVICE),
            TensorType(DType.float32, ("m", 1), DEVICE),
        ],
    ) as graph:
        x, chosen, shares = (value.tensor for value in graph.inputs)
        a, b, down = weights(64, HIDDEN), weights(64, HIDDEN), weights(HIDDEN, 64)
        first = run_experts(x, chosen, shares, (a, b), down)
        second = run_experts(first, chosen, shares, (b, a), down)
        outs = run_experts(
            x, chosen, shares, (a, b), down, activation=lambda g, u: ops.max(g, u) - g
        )
        graph.output(second, outs)
    model = InferenceSession(devices=[CPU()]).load(graph)
    rng = np.random.default_rng(1)
    tokens = rng.standard_normal((30, HIDDEN)).astype(np.float32)
    arrays = [tokens, rng.integers(0, EXPERTS, (30, 1)), rng.random((30, 1)).astype(np.float32)]
    for got, want in zip(model.execute(*arrays), _interpreter.run(graph, arrays), strict=True):
        assert_close(got.to_numpy(), want, scale=16)
