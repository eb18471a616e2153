"""Products with a large K against float64, packed and not: their error does not grow with K."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from max._backends.cpu.kernels.products.dense.panels import panel_elements
from max._backends.cpu.kernels.products.quantized.packed import FORMATS
from max.dtype.blocks import decode, encode
from tests.cpu_kernels.harness import Runner, run
from tests.cpu_kernels.test_guarded import run_guarded

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("size", [4097, 100_001, 10**6])
@pytest.mark.parametrize("equal", [True, False])
def test_the_error_does_not_grow_with_k(size: int, equal: bool, rng: np.random.Generator) -> None:
    """On all paths, packed and not: a few rows, more rows than the GEMV path takes, and a wide B of slices."""
    shapes = [(1, 1), (3, 5), (20, 33), (5, 300)] if size < 10**5 else [(1, 1), (3, 2)]
    if size == 100_001:
        shapes.append((18, 33))
    for m, n in shapes:
        a, b = (
            np.full(s, rng.uniform(0.05, 0.2), np.float32) if equal else rng.random(s, np.float32)
            for s in ((m, size), (n, size))
        )
        want = a.astype(np.float64) @ b.astype(np.float64).T
        result = [(np.float32, (m, n))]
        (weight,) = run(
            "mok.pack",
            [b],
            [(np.float32, (-(-n // 32), panel_elements(size)))],
            {"encoding": "rows"},
        )
        packed = {"encoding": "rows", "columns": n, "streamed": False}
        for got in (
            *run("mo.matmul", [a, b], result, {"transpose_b": True}),
            *run("mo.matmul", [a, b.T.copy()], result),
            *run("mok.packed_matmul", [a, weight], result, packed),
        ):
            # 4096 additions in one accumulator, or a few hundred for each piece and one for each piece
            np.testing.assert_allclose(got, want, rtol=8e-5)


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
@pytest.mark.parametrize("size", [9001, 12_032])
def test_packed_paths_have_equal_sums_of_many(
    dtype: np.dtype, size: int, rng: np.random.Generator
) -> None:
    """The K blocks of the GEMV path are those of the GEMM path, also with an odd last element."""
    x, b = (rng.standard_normal((n, size)).astype(dtype) for n in (40, 37))
    (weight,) = run("mok.pack", [b], [(dtype, (2, panel_elements(size)))], {"encoding": "rows"})
    packed = {"encoding": "rows", "columns": 37, "streamed": False}
    for machine in ("host", "avx2"):

        def product(rows: np.ndarray, machine: str = machine) -> np.ndarray:
            shape = (len(rows), 37)
            return run(
                "mok.packed_matmul", [rows, weight], [(np.float32, shape)], packed, machine=machine
            )[0]

        whole = product(x)
        want = x.astype(np.float64) @ b.astype(np.float64).T
        np.testing.assert_allclose(whole, want, rtol=1e-4, atol=2e-3)
        for count in (1, 3, 8):
            np.testing.assert_array_equal(product(x[:count]), whole[:count])


@pytest.mark.parametrize("machine", ["host", "avx2"])
@pytest.mark.parametrize(
    ("m", "size", "n", "transposed"),
    [(16, 70_001, 5, False), (7, 9000, 300, False), (15, 16_390, 35, True), (18, 4100, 33, True)],
)
def test_pieces_access_no_other_memory(
    m: int, size: int, n: int, transposed: bool, machine: str, rng: np.random.Generator
) -> None:
    a, b = rng.random((m, size), np.float32), rng.random((n, size), np.float32)
    operands = [a, b if transposed else b.T.copy()]
    result = [(np.float32, (m, n))]
    runner = Runner("mo.matmul", operands, result, {"transpose_b": transposed}, machine=machine)
    run_guarded(runner)
    want = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(runner()[0], want, rtol=8e-5)


def off(got: np.ndarray, want: np.ndarray) -> float:
    """The greatest error, relative to a sum of positive products."""
    return float(np.abs(got.astype(np.float64) / want - 1).max())


LONG = 100_000
"""K of products whose factors are all equal: each addition to one accumulator is off in the same direction."""
FOLDED = 2e-5
"""The bound of their error with folded K blocks; one accumulator is off by 1e-4 or more."""


def equal_factors(rng: np.random.Generator, dtype: np.dtype, *shapes: tuple[int, ...]) -> Any:
    """Arrays of one random number each."""
    return [np.full(shape, rng.uniform(0.05, 0.2), dtype) for shape in shapes]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("by_rows", [True, False])
def test_matrix_tiles(packed: bool, by_rows: bool, rng: np.random.Generator) -> None:
    x, w = equal_factors(rng, BF16, (33, LONG), (3, LONG))
    want = x.astype(np.float64) @ w.astype(np.float64).T
    right = w if by_rows else w.T.copy()
    result = [(np.float32, (33, 3))]
    if packed:
        encoding = {"encoding": "rows" if by_rows else "columns"}
        (panels,) = run("mok.pack", [right], [(BF16, (1, panel_elements(LONG)))], encoding)
        attributes = {"encoding": "rows", "columns": 3, "streamed": False}
        (got,) = run("mok.packed_matmul", [x, panels], result, attributes, machine="tiles host")
    else:
        attributes = {"transpose_b": by_rows}
        (got,) = run("mo.matmul", [x, right], result, attributes, machine="tiles host")
    assert off(got, want) < FOLDED


@pytest.mark.parametrize(("rows", "machine"), [(2, "host"), (35, "host"), (35, "tiles host")])
@pytest.mark.parametrize("packed", [True, False])
def test_experts(rows: int, machine: str, packed: bool, rng: np.random.Generator) -> None:
    dtype = BF16 if machine.startswith("tiles") else np.dtype(np.float32)
    x, w = equal_factors(rng, dtype, (rows, LONG), (1, 3, LONG))
    want = x.astype(np.float64) @ w[0].astype(np.float64).T
    group = [
        np.array([0, rows], np.uint32),
        np.array([0], np.int32),
        np.array([rows, 1], np.uint32),
    ]
    result = [(np.float32, (rows, 3))]
    if packed:
        (panels,) = run(
            "mok.pack", [w[0]], [(dtype, (1, panel_elements(LONG)))], {"encoding": "rows"}
        )
        attributes = {"encoding": "rows", "parts": ((1, 3),), "streamed": False}
        (got,) = run(
            "mok.grouped_products", [x, panels, *group], result, attributes, machine=machine
        )
    else:
        (got,) = run("mo.grouped_matmul.ragged", [x, w, *group], result, machine=machine)
    assert off(got, want) < FOLDED


@pytest.mark.parametrize("taps", [1, 2])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("transposed", [True, False])
def test_convolutions(taps: int, padding: int, transposed: bool, rng: np.random.Generator) -> None:
    channels = LONG // taps**2
    x, w = equal_factors(rng, np.dtype(np.float32), (1, 3, 3, channels), (taps, taps, channels, 5))
    size = 3 + taps - 1 - 2 * padding if transposed else 3 - taps + 1 + 2 * padding
    attributes: dict[str, Any] = {
        "stride": (1, 1), "dilation": (1, 1), "padding": (padding,) * 4, "groups": 1,
    }  # fmt: skip
    name = "mo.conv"
    if transposed:
        name = "mo.conv_transpose"
        attributes |= {"output_padding": (0, 0)}
        del attributes["groups"]
    (got,) = run(name, [x, w], [(np.float32, (1, size, size, 5))], attributes)
    # the number of taps that see the image, by position along an axis
    seen = np.pad(np.convolve(np.ones(3), np.ones(taps)), 1)
    begin = 1 + (padding if transposed else taps - 1 - padding)
    inside = seen[begin : begin + size]
    per_tap = float(x.flat[0]) * float(w.flat[0]) * channels
    want = np.outer(inside, inside)[None, :, :, None] * per_tap
    some = np.broadcast_to(want != 0, got.shape)
    assert off(got[some], np.broadcast_to(want, got.shape)[some]) < FOLDED


def test_gptq(rng: np.random.Generator) -> None:
    size = LONG // 32 * 32
    x = np.full((5, size), 0.1, np.float32)
    weight = np.full((size // 8, 16), 0x55555555, np.int32)
    zeros = np.zeros((size // 32, 2), np.int32)
    scales = np.full((size // 32, 16), 0.1, np.float32)
    (got,) = run(
        "mo.qmatmul_gptq",
        [x, weight, zeros, scales],
        [(np.float32, (5, 16))],
        {"bits": 4, "group_size": 32},
    )
    element = float(np.float32(4) * np.float32(0.1))
    assert off(got, np.full((5, 16), size * element * float(np.float32(0.1)))) < FOLDED


@pytest.mark.parametrize("encoding", ["Q8_0", "Q6_K"])
@pytest.mark.parametrize("machine", ["host", "avx2"])
def test_quantized_weights(encoding: str, machine: str, rng: np.random.Generator) -> None:
    """Equal sums on both paths, whose error does not grow with K; one accumulator of Q6_K is off by 4e-4."""
    inner = 10**6 // 256 * 256
    x = np.full((7, inner), 0.1, np.float32)
    blocks = encode(np.full((3, inner), 0.1, np.float32), encoding)
    (packed,) = run(
        "mok.pack",
        [blocks],
        [(np.uint8, (1, FORMATS[encoding].group_bytes(inner)))],
        {"encoding": encoding},
    )
    attributes = {"encoding": encoding, "columns": 3, "streamed": False}
    operands, result = [x, packed], [(np.float32, (7, 3))]
    few, many = (
        Runner("mok.packed_matmul", operands, result, attributes, machine=machine, few=rows)()[0]
        for rows in (64, 0)
    )
    np.testing.assert_array_equal(few, many)
    rounded = 127 * float(np.float32(0.1) / np.float32(127))
    want = rounded * decode(blocks, encoding).astype(np.float64).reshape(3, inner).sum(1)
    assert off(few, np.broadcast_to(want, (7, 3))) < 4e-5
    # random numbers: the panels of both paths are the same
    operands[0] = rng.standard_normal((7, inner)).astype(np.float32)
    few, many = (
        Runner("mok.packed_matmul", operands, result, attributes, machine=machine, few=rows)()[0]
        for rows in (64, 0)
    )
    np.testing.assert_array_equal(few, many)
