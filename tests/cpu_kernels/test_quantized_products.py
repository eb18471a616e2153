"""Products with packed quantized weights on both paths, with elements at their bounds, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from max._backends.cpu.kernels.products.quantized.packed import FORMATS
from max.dtype.blocks import BLOCK_FORMATS, decode
from tests.cpu_kernels.harness import run

COLUMNS, INNER = 35, 512
HALVES_AT = {
    "Q4_0": (0,),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Where the float16 scales of a block begin."""


def blocks_of(encoding: str, rng: np.random.Generator) -> np.ndarray:
    """Random rows of blocks with small scales; some rows have all bits set or clear in their elements."""
    elements, size = BLOCK_FORMATS[encoding]
    blocks = rng.integers(0, 256, (COLUMNS, INNER // elements, size), dtype=np.uint8)
    blocks[0], blocks[1] = 255, 0
    # 128 has no negative byte: magnitudes of Q8_0 reach it
    blocks[2] = 128
    half = np.array([0.01], np.float16).view(np.uint8)
    for at in HALVES_AT[encoding]:
        blocks[..., at : at + 2] = half
    return blocks.reshape(COLUMNS, -1)


@pytest.mark.parametrize("encoding", list(FORMATS))
@pytest.mark.parametrize("machine", ["host", "avx2", "generic"])
@pytest.mark.parametrize("path", ["gemv", "gemm"])
def test_bounds(encoding: str, machine: str, path: str) -> None:
    """Rows of x are integers with a largest one of 127 in each block, so that rounding them changes nothing."""
    rng = np.random.default_rng(len(encoding))
    w = blocks_of(encoding, rng)
    group = FORMATS[encoding].group_bytes(INNER)
    (packed,) = run("mok.pack", [w], [(np.uint8, (2, group))], {"encoding": encoding})
    flat = [(np.float32, (COLUMNS * INNER,))]
    (dense,) = run("mo.dequantize", [w.reshape(-1)], flat, {"encoding": encoding})
    np.testing.assert_array_equal(dense, decode(w, encoding).reshape(-1))
    dense = dense.reshape(COLUMNS, INNER).astype(np.float64)
    attributes = {"encoding": encoding, "columns": COLUMNS, "streamed": False}
    for rows in (1, 2, 3, 4, 7, 11):
        x = rng.integers(-127, 128, (rows, INNER)).astype(np.float32)
        x[0], x[-1] = 127, rng.choice([-127, 127], INNER)
        x[:, ::32] = 127
        (got,) = run(
            "mok.packed_matmul",
            [x, packed],
            [(np.float32, (rows, COLUMNS))],
            attributes,
            machine=machine,
            few=240 if path == "gemv" else 0,
        )
        terms = np.abs(x.astype(np.float64)) @ np.abs(dense).T
        error = np.abs(got - x.astype(np.float64) @ dense.T)
        assert (error <= 1e-6 * terms).all(), (rows, (error / terms).max())


@pytest.mark.parametrize("encoding", ["Q4_K", "Q6_K"])
def test_strips_that_are_read_in_turn(encoding: str) -> None:
    """Two strips and a last one give the bits of the GEMM path, which reads one strip after the other."""
    rng = np.random.default_rng(5)
    w = np.concatenate([blocks_of(encoding, rng) for _ in range(2)])
    shape = (np.uint8, (3, FORMATS[encoding].group_bytes(INNER)))
    (packed,) = run("mok.pack", [w], [shape], {"encoding": encoding})
    attributes = {"encoding": encoding, "columns": len(w), "streamed": True}
    for rows in (1, 6):
        x = rng.standard_normal((rows, INNER)).astype(np.float32)
        gemv, gemm = (
            run(
                "mok.packed_matmul",
                [x, packed],
                [(np.float32, (rows, len(w)))],
                attributes,
                machine="sapphirerapids",
                few=few,
            )[0].copy()
            for few in (240, 0)
        )
        assert np.isfinite(gemm).all() and np.any(gemm)
        np.testing.assert_array_equal(gemv, gemm)
