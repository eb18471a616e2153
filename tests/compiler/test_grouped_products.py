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
from max.graph.ops.staging.stage import stage_declared
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


Groups = tuple[TensorValue, TensorValue, TensorValue]
GROUPS = [
    TensorType(DType.uint32, ("ends",), DEVICE),
    TensorType(DType.int32, ("groups",), DEVICE),
    TensorType(DType.uint32, (2,), DEVICE),
]


def groups_of(counts: list[int]) -> list[np.ndarray]:
    """The groups of rows of experts 0, 1, …: where they begin, their experts, and statistics."""
    ends = np.cumsum([0, *counts]).astype(np.uint32)
    most = max(counts, default=0)
    return [ends, np.arange(len(counts), dtype=np.int32), np.array([most, len(counts)], np.uint32)]


def product(
    x: TensorValue, w: TensorValue, groups: Groups, dtype: DType | None = None
) -> TensorValue:
    """The product of groups in any dtypes, by default that of `x`, as no layer stages it."""
    out = TensorType(dtype or x.dtype, [x.shape[0], w.shape[1]], DEVICE)
    return stage_declared("grouped_matmul.ragged", [x, w, *groups], {}, [out])[0]


def by_groups(x: np.ndarray, w: np.ndarray, counts: list[int]) -> np.ndarray:
    """The product in float64."""
    ends = np.cumsum(counts)[:-1]
    parts = np.split(x.astype(np.float64), ends) if counts else []
    rows = [part @ one.astype(np.float64).T for part, one in zip(parts, w, strict=True)]
    return np.concatenate(rows) if rows else np.zeros((len(x), w.shape[1]))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def test_pairs_that_interleave() -> None:
    """Two pairs of one gate and one up weight. The gate's activation comes before the up product, whose weight is
    staged after the first products: the launch of a pair stands where its first product was.
    """
    weights = Weights("float32")
    rows = TensorType(DType.float32, ("m", HIDDEN), DEVICE)
    with Graph("g", input_types=[rows, rows, *GROUPS]) as graph:
        x, z, *rest = (value.tensor for value in graph.inputs)
        starts, ids, stats = rest
        gate = weights(64, HIDDEN)
        one = ops.silu(product(x, gate, (starts, ids, stats)))
        other = ops.silu(product(z, gate, (starts, ids, stats)))
        up = weights(64, HIDDEN)
        other = other * product(z, up, (starts, ids, stats))
        one = one * product(x, up, (starts, ids, stats))
        graph.output(one, other)
    model = InferenceSession(devices=[CPU()]).load(graph)
    products = [name for name in model.kernel_summaries if "grouped_products" in name]
    assert len(products) == 2 and all("silu+mul" in name for name in products)
    rng = np.random.default_rng(0)
    a, b = [(rng.standard_normal((EXPERTS, 64, HIDDEN)) / 16).astype(np.float32) for _ in range(2)]
    counts = [3, 0, 7, 1, 5]
    x, z = rng.standard_normal((2, sum(counts), HIDDEN)).astype(np.float32)
    got = model.execute(x, z, *groups_of(counts))
    for y, rows_of in zip(got, (x, z), strict=True):
        want = silu(by_groups(rows_of, a, counts)) * by_groups(rows_of, b, counts)
        assert_close(y.to_numpy(), want.astype(np.float32), scale=16)


def test_products_of_two_dtypes_are_no_pair() -> None:
    weights = Weights("bfloat16")
    with Graph(
        "g", input_types=[TensorType(DType.bfloat16, ("m", HIDDEN), DEVICE), *GROUPS]
    ) as graph:
        x, *rest = (value.tensor for value in graph.inputs)
        starts, ids, stats = rest
        groups = (starts, ids, stats)
        wide = product(x, weights(64, HIDDEN), groups, DType.float32)
        narrow = product(x, weights(64, HIDDEN), groups)
        graph.output(wide * ops.cast(narrow, DType.float32))
    model = InferenceSession(devices=[CPU()]).load(graph)
    assert sum("grouped_products" in name for name in model.kernel_summaries) == 2


@pytest.mark.parametrize(
    ("shape", "rows_dtype", "dtype", "packed"),
    [
        ((5, 32, 32), "float32", "float32", True),
        ((5, 7, 64), "float32", "float32", False),
        ((5, 64, 7), "float32", "float32", False),
        ((5, 64, 64), "float32", "float16", False),
        ((5, 64, 64), "float16", "float32", False),
        ((0, 64, 64), "float32", "float32", False),
        ((1, 64, 64), "float32", "float32", True),
        ((5, 0, 64), "float32", "float32", False),
        ((5, 64, 64), "float8_e4m3fn", "float8_e4m3fn", False),
    ],
)
def test_weights_that_are_packed(
    shape: tuple[int, int, int], rows_dtype: str, dtype: str, packed: bool
) -> None:
    """Those of the rows' dtype that fill panels; the others are multiplied as they are."""
    rng = np.random.default_rng(2)
    w = (rng.standard_normal(shape) / 8).astype(dtype)
    counts = ([4, 0, 9, 2, 1] * shape[0])[: shape[0]]
    x = rng.standard_normal((sum(counts), shape[2])).astype(rows_dtype)
    types = [TensorType(DType[rows_dtype], ("m", shape[2]), DEVICE), *GROUPS]
    with Graph("g", input_types=types) as graph:
        rows, *groups = (value.tensor for value in graph.inputs)
        graph.output(product(rows, ops.constant(w, DType[dtype], DEVICE), tuple(groups)))
    model = InferenceSession(devices=[CPU()]).load(graph)
    assert any("grouped_products" in name for name in model.kernel_summaries) == packed
    (y,) = model.execute(x, *groups_of(counts))
    assert_close(y.to_numpy(), by_groups(x, w, counts).astype(rows_dtype), scale=16)
