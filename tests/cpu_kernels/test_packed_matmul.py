"""Products with packed dense weights on targets that multiply pairs of bf16, in the interpreter, as few machines have
them.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from max._backends.cpu.kernels.products.dense.gemm import reads_rows_in_place
from max._backends.cpu.kernels.products.dense.packed_matmul import (
    ROW_THRESHOLD,
    default_threshold,
)
from max._backends.cpu.kernels.products.dense.panels import panel_elements
from max.dtype import DType
from max.kernel import CPUTarget
from tests.cpu_kernels.harness import Runner, interpreted, run

BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize("inner", [33, 34, 1])
@pytest.mark.parametrize("rows", [1, 3])
def test_pairs(rows: int, inner: int) -> None:
    """Rows of odd size do not begin at whole pairs: the GEMM path copies them."""
    rng = np.random.default_rng(inner)
    x, w = (rng.standard_normal((n, inner)).astype(BF16) for n in (rows, 35))
    panels = [(BF16, (2, panel_elements(inner)))]
    (weight,) = run("mok.pack", [w], panels, {"encoding": "rows"})
    attributes = {"encoding": "rows", "columns": 35, "streamed": False}
    result = [(np.float32, (rows, 35))]
    (got,) = interpreted("mok.packed_matmul", [x, weight], result, attributes, machine="pairs")
    want = x.astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [33, 70])
def test_copied_rows_of_several_tasks(columns: int) -> None:
    """Rows of f16 are copied once for all panels of a task with one K block; each block of rows has its own copy."""
    rng = np.random.default_rng(columns)
    x, w = (rng.standard_normal((n, 100)).astype(np.float16) for n in (530, columns))
    panels = [(np.float16, (-(-columns // 32), panel_elements(100)))]
    (weight,) = run("mok.pack", [w], panels, {"encoding": "rows"})
    attributes = {"encoding": "rows", "columns": columns, "streamed": False}
    result = [(np.float32, (530, columns))]
    (got,) = run("mok.packed_matmul", [x, weight], result, attributes, workers=1)
    want = x.astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [7, 80, 100, 300])
@pytest.mark.parametrize(
    ("dtype", "inner"),
    [
        (np.float32, 1024),  # rows share the sets of the L1 cache
        (np.float32, 3072),
        (BF16, 2048),
        (np.float16, 1700),  # a last group with fewer K blocks
    ],
)
def test_copied_rows_of_several_k_blocks(rows: int, dtype: type, inner: int) -> None:
    """A copy holds as many K blocks as it has room for, and is made again for other rows and K blocks."""
    rng = np.random.default_rng(rows)
    x, w = (rng.standard_normal((n, inner)).astype(dtype) for n in (rows, 70))
    (weight,) = run("mok.pack", [w], [(dtype, (3, panel_elements(inner)))], {"encoding": "rows"})
    attributes = {"encoding": "rows", "columns": 70, "streamed": False}
    result = [(np.float32, (rows, 70))]
    want = x.astype(np.float64) @ w.astype(np.float64).T
    for workers in (1, 2):
        (got,) = run("mok.packed_matmul", [x, weight], result, attributes, workers=workers)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("encoding", ["rows", "columns"])
@pytest.mark.parametrize("machine", ["host", "avx2", "generic"])
def test_one_kernel_packs_weights_that_share_panels(encoding: str, machine: str) -> None:
    keys = set[str]()
    for outputs, inner in ((16, 8), (45, 77), (129, 600)):
        w = np.random.default_rng(inner).standard_normal((outputs, inner)).astype(np.float32)
        for shares in (1, 2):
            width = 32 // shares
            panels = -(-outputs // width)
            for share in range(shares):
                attributes = {"encoding": encoding, "shares": shares, "share": share}
                operand = w if encoding == "rows" else w.T
                shape = (panels, panel_elements(inner))
                runner = Runner("mok.pack", [operand], [(np.float32, shape)], attributes, machine=machine)  # fmt: skip
                keys.add(runner.ir.key)
                runner.results[0][:] = 7
                got = runner()[0].reshape(panels, -1, 32)
                own = np.zeros(32, bool)
                own[share * width : (share + 1) * width] = True
                # the parts of others are not written
                assert (got[:, :, ~own] == 7).all()
                assert (got[:, inner:, own] == 0).all()
                columns = got[:, :inner, own].transpose(0, 2, 1).reshape(-1, inner)
                np.testing.assert_array_equal(columns[:outputs], w)
                rest = w[-1] if encoding == "rows" else np.zeros(inner)
                assert (columns[outputs:] == rest).all()
    assert len(keys) == 1


def test_rows_that_are_read_in_place() -> None:
    f32, f16, bf16 = DType.float32, DType.float16, DType.bfloat16
    assert reads_rows_in_place(f32, f32, 1000) and not reads_rows_in_place(f32, f32, 1024)
    assert reads_rows_in_place(bf16, bf16, 1024) and not reads_rows_in_place(bf16, bf16, 4096)
    assert not reads_rows_in_place(bf16, bf16, 33) and not reads_rows_in_place(f32, bf16, 33)
    assert reads_rows_in_place(f16, f16, 33) and reads_rows_in_place(f32, f32, "k")
    assert not reads_rows_in_place(bf16, bf16, "k")


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
@pytest.mark.parametrize("inner", [1, 2, 15, 32, 33, 67])
def test_rows_that_take_pieces_of_a_panel(dtype: type, inner: int) -> None:
    """With vectors of 256 bits halves of the columns alternate in pieces; an odd last element has no pair."""
    rng = np.random.default_rng(inner)
    w = rng.standard_normal((35, inner)).astype(dtype)
    panels = [(dtype, (2, panel_elements(inner)))]
    (weight,) = run("mok.pack", [w], panels, {"encoding": "rows"})
    attributes = {"encoding": "rows", "columns": 35, "streamed": False}
    for rows in (3, 4, 7):
        x = rng.standard_normal((rows, inner)).astype(dtype)
        result = [(np.float32, (rows, 35))]
        (got,) = run("mok.packed_matmul", [x, weight], result, attributes, machine="avx2", few=64)
        want = x.astype(np.float64) @ w.astype(np.float64).T
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [BF16, np.float32])
@pytest.mark.parametrize("rows", [9, 12, 31, 64])
def test_both_paths_have_the_same_bits(dtype: type, rows: int) -> None:
    """Passes of eight rows and fewer, and register tiles, whatever the row threshold is."""
    rng = np.random.default_rng(rows)
    x, w = (rng.standard_normal((n, 600)).astype(dtype) for n in (rows, 70))
    panels = [(dtype, (3, panel_elements(600)))]
    (weight,) = run("mok.pack", [w], panels, {"encoding": "rows"})
    attributes = {"encoding": "rows", "columns": 70, "streamed": False}
    result = [(np.float32, (rows, 70))]
    few, many = (
        run("mok.packed_matmul", [x, weight], result, attributes, few=limit)[0] for limit in (64, 0)
    )
    np.testing.assert_array_equal(few, many)
    want = x.astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_allclose(few, want, rtol=1e-4, atol=1e-4)


def test_default_row_thresholds() -> None:
    """Those of Zen 4 are for passes of eight rows, which vectors of 256 bits do not have."""
    wide = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512bf16"})
    zen4, other = (CPUTarget(wide, "x86_64", name) for name in ("znver4", "znver5"))
    narrow = CPUTarget(frozenset({"avx2", "fma"}), "x86_64", "znver4")
    kinds = ("float32", "coded float32", "halved float32", "coded bfloat16", "float16")
    assert [default_threshold(zen4, kind) for kind in kinds] == [64, 64, 16, 12, ROW_THRESHOLD]
    for target in (other, narrow):
        assert {default_threshold(target, kind) for kind in kinds} == {ROW_THRESHOLD}
