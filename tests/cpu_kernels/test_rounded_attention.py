"""Dense attention whose scores and weights are rounded, on several targets, against NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from max.dtype import DType
from tests.cpu_kernels.harness import run
from tests.cpu_kernels.rounded_attention import (
    assert_attended,
    attended,
    picks,
    small_integers,
)

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
MACHINES = ("host", "generic", "tiles host", "invariant host")
SHAPES = [(1, 1), (3, 37), (11, 130), (40, 700), (2, 700), (70, 64)]
"""Sizes whose keys are read in place and packed, in one block of keys and in several."""


def check(
    rng: np.random.Generator,
    machine: str,
    shape: tuple[int, int],
    dtypes: tuple[Any, Any],
    roundings: tuple[Any, ...],
    fills: tuple[float | None, ...] = (),
    columns: bool = False,
) -> None:
    """Runs the kernel for two batch indices and a group of two; `dtypes`: operands and result."""
    (rows, keys), (dtype, result_dtype) = shape, dtypes
    size, width = 16, 40
    operands = [
        small_integers(rng, dtype, 2, 2, rows, size),
        small_integers(rng, dtype, 2, keys, size),
        np.stack([picks(rng, dtype, keys, width) for _ in range(2)]),
    ]
    masks = [
        rng.standard_normal((2, 2, rows, keys)).astype(dtype)
        if fill is None
        else rng.random((2, 2, rows, keys)) > 0.3
        for fill in fills
    ]
    scale = 0.7
    spread = [operands[0], *(x[:, None] for x in operands[1:]), *masks]
    want, slack = attended(spread, scale, fills, roundings)
    if columns:
        operands[1] = np.ascontiguousarray(operands[1].transpose(0, 2, 1))
    attributes = {
        "scale": scale,
        "fills": fills,
        "columns": columns,
        "roundings": tuple(None if x is None else DType.from_numpy(x) for x in roundings),
    }
    result = [(result_dtype, (2, 2, rows, width))]
    (got,) = run("mok.attention", [*operands, *masks], result, attributes, machine=machine)
    assert_attended(got, want, slack)


@pytest.mark.parametrize(
    ("machine", "dtypes", "rounding"),
    [
        *((machine, (BF16, BF16), BF16) for machine in MACHINES),
        ("host", (F32, F32), BF16),
        ("generic", (F16, F32), F16),
    ],
    ids=str,
)
def test_weights(
    machine: str, dtypes: tuple[np.dtype, np.dtype], rounding: np.dtype, rng: np.random.Generator
) -> None:
    for shape in SHAPES:
        check(rng, machine, shape, dtypes, (None, rounding))


@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
def test_scores(shape: tuple[int, int], rng: np.random.Generator) -> None:
    check(rng, "host", shape, (F32, F32), (BF16, None))
    check(rng, "host", shape, (F32, F32), (None, F16, None), (None,), columns=True)
    check(rng, "host", shape, (BF16, BF16), (BF16, BF16, BF16, BF16), (None, -9.0))


def test_more_keys_than_scratch_memory_has_scores_for(rng: np.random.Generator) -> None:
    check(rng, "host", (3, 4500), (F32, F32), (None, BF16))


def test_a_negative_scale_and_rows_without_keys(rng: np.random.Generator) -> None:
    q, keys, values = (rng.standard_normal((1, 1, n, 8)).astype(F32) for n in (20, 600, 600))
    mask = np.zeros((1, 1, 20, 600), F32)
    mask[..., 3, :], mask[..., 4, :590] = -np.inf, -np.inf
    # the sums of products differ in their last bits
    for roundings, slack in (((None, None, BF16), 1e-2), ((None, None, None), 1e-5)):
        want, near = attended((q, keys, values, mask), -0.5, (None,), roundings)
        attributes = {
            "scale": -0.5,
            "fills": (None,),
            "roundings": tuple(None if x is None else DType.bfloat16 for x in roundings),
        }
        operands = [q, keys[:, 0], values[:, 0], mask]
        (got,) = run("mok.attention", operands, [(F32, (1, 1, 20, 8))], attributes)
        assert_attended(got, want, near + slack)
        assert np.isnan(got[0, 0, 3]).all() and not np.isnan(np.delete(got[0, 0], 3, 0)).any()
