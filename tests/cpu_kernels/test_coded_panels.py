"""Coded dense weights: products have the bits of products with plain panels."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from max._backends.cpu.kernels.products.dense.coded import (
    CODED,
    HALVED,
    PLAIN,
    coded_bytes,
)
from max._backends.cpu.kernels.products.dense.panels import panel_elements
from max.dtype import DType
from tests.cpu_kernels.harness import run

BF16 = ml_dtypes.bfloat16
COLUMNS = 70
PANELS = 3


def weights_of(kind: str, rng: np.random.Generator, inner: int) -> np.ndarray:
    """Weights `[COLUMNS, inner]` of f32, of a kind of exponents."""
    shape = (COLUMNS, inner)
    w = rng.standard_normal(shape).astype(np.float32) * 0.02
    if kind == "random":
        w = rng.integers(0, 1 << 32, shape, np.uint32).view(np.float32)
    if kind == "special":
        bits = w.view(np.uint32)
        special = [
            0,
            0x80000000,
            0x00010000,
            0x7F800000,
            0xFF800000,
            0x7FC10000,
            0xFFA50000,
            0x80030001,
        ]
        at = rng.integers(0, w.size, 40)
        bits.reshape(-1)[at] = rng.choice(np.array(special, np.uint32), 40)
    if kind == "outliers":  # a column of large weights
        w[3] *= 1e4
        w[:, 5] *= 1e9
    if kind == "zero":
        w[:] = 0
    if kind == "bfloat16":  # f32 whose lower halves are zero
        w.view(np.uint32)[...] &= 0xFFFF0000
    return w


def as_dtype(w: np.ndarray, dtype: type) -> np.ndarray:
    """The upper halves of f32 as bf16, with the payload of NaN."""
    return w if dtype is np.float32 else (w.view(np.uint32) >> 16).astype(np.uint16).view(BF16)


def panels_of(w: np.ndarray) -> np.ndarray:
    inner = w.shape[1]
    result = [(w.dtype, (PANELS, panel_elements(inner)))]
    return run("mok.pack", [w], result, {"encoding": "rows"})[0]


def coded(panels: np.ndarray, encoding: str, machine: str = "host", workers: int = 2) -> np.ndarray:
    size = coded_bytes(panels.shape[1], DType.from_numpy(panels.dtype))
    result = [(np.uint8, (PANELS, size))]
    attributes = {"encoding": encoding}
    return run("mok.code", [panels], result, attributes, machine=machine, workers=workers)[0]


def kinds(memory: np.ndarray) -> list[tuple[int, int]]:
    """The kind and the number of escapes of each panel."""
    words = memory.reshape(-1)[: PANELS * 32].view(np.int64).reshape(PANELS, 4)[:, 1]
    return [(int(word) % 4, int(word) // 4) for word in words]


@pytest.mark.parametrize("machine", ["host", "avx2", "generic", "tiles host"])
@pytest.mark.parametrize("encoding", ["coded bfloat16", "coded float32", "halved float32"])
@pytest.mark.parametrize("kind", ["normal", "special", "outliers", "random", "zero", "bfloat16"])
def test_equal_bits(kind: str, encoding: str, machine: str) -> None:
    rng = np.random.default_rng([len(kind), len(encoding), len(machine)])
    inner = int(rng.choice([32, 96, 544, 1056]))
    dtype = np.float32 if encoding.endswith("float32") else BF16
    w = as_dtype(weights_of(kind, rng, inner), dtype)
    panels = panels_of(w)
    memory = coded(panels, encoding, machine, int(rng.integers(1, 3)))
    if kind not in ("special", "random"):
        whole = dtype is np.float32 and kind in ("normal", "outliers")
        want = PLAIN if whole else HALVED if "halved" in encoding else CODED
        assert kinds(memory)[2][0] == want
    for rows in (1, 2, 5, 8, 70):
        x = rng.standard_normal((rows, inner)).astype(dtype)
        attributes = {"columns": COLUMNS, "streamed": True}
        result = [(np.float32, (rows, COLUMNS))]
        plain, packed = (
            run(
                "mok.packed_matmul",
                [x, weight],
                result,
                attributes | {"encoding": name},
                machine=machine,
            )[0]
            for weight, name in ((panels, "rows"), (memory, encoding))
        )
        np.testing.assert_array_equal(plain.view(np.uint32), packed.view(np.uint32), f"{rows} rows")


@pytest.mark.parametrize("count", [0, 1, 9, 66, 67])
@pytest.mark.parametrize("machine", ["host", "generic"])
def test_escapes(count: int, machine: str) -> None:
    """Escapes anywhere, also several in a unit and in the last one; with too many a panel is plain."""
    rng = np.random.default_rng(count)
    inner = 1056
    # 16 upper bytes fill the table
    bits = rng.integers(0x3000, 0x4000, (COLUMNS, inner), np.uint16)
    last = np.array([32 * inner - 1, 32 * inner - 2, 32 * inner - 3])
    others = rng.choice(32 * inner - 3, max(count - 3, 0), replace=False)
    at = np.concatenate([last, others])[:count]
    bits.reshape(-1)[at] = rng.integers(0x8000, 0xFFFF, count, np.uint16)
    panels = panels_of(bits.view(BF16))
    memory = coded(panels, "coded bfloat16", machine)
    # at most one for 8 of 528 steps
    assert kinds(memory)[0] == ((CODED, count) if count <= 66 else (PLAIN, 0))
    assert kinds(memory)[1:] == [(CODED, 0)] * 2
    x = rng.standard_normal((2, inner)).astype(BF16)
    result = [(np.float32, (2, COLUMNS))]
    attributes = {"columns": COLUMNS, "streamed": True}
    plain, packed = (
        run(
            "mok.packed_matmul",
            [x, weight],
            result,
            attributes | {"encoding": name},
            machine=machine,
        )[0]
        for weight, name in ((panels, "rows"), (memory, "coded bfloat16"))
    )
    np.testing.assert_array_equal(plain.view(np.uint32), packed.view(np.uint32))
