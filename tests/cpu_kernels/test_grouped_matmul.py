"""Grouped products, and the order of rows by expert, against NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max import kernel as k
from max._backends.cpu.kernels.products.dense.panels import panel_elements
from max._backends.cpu.kernels.products.quantized import grouped
from max._backends.program import KernelRunError
from max.dtype.blocks import BLOCK_FORMATS, decode, encode
from tests.cpu_kernels.harness import run
from tests.quantized import random_weight, rounded_to_8_bits
from tests.tolerance import assert_close

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def groups_of(sizes: dict[int, int], experts: int) -> list[np.ndarray]:
    """Starts, experts and statistics of groups; `sizes` has the rows of each expert, in order."""
    starts = np.full(experts + 1, sum(sizes.values()))
    starts[: len(sizes)] = np.cumsum([0, *sizes.values()])[:-1]
    ids = np.full(experts, -1)
    ids[: len(sizes)] = list(sizes)
    stats = [max(sizes.values(), default=0), len(sizes)]
    return [starts.astype(np.uint32), ids.astype(np.int32), np.array(stats, np.uint32)]


def reference(x: np.ndarray, w: np.ndarray, sizes: dict[int, int]) -> np.ndarray:
    out, row = np.zeros((len(x), w.shape[1])), 0
    for expert, size in sizes.items():
        if expert >= 0:
            out[row : row + size] = x[row : row + size].astype(np.float64) @ w[expert].T.astype(
                np.float64
            )
        row += size
    return out


@pytest.mark.parametrize("machine", ["host", "avx2", "generic", "invariant host"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_few_rows_and_many(dtype: np.dtype, machine: str) -> None:
    """Groups of one row, several, more than a tile, more than a task; some rows without a group."""
    rng = np.random.default_rng(0)
    sizes = {4: 1, 0: 3, -1: 2, 5: 17, 2: 530, 1: 0}
    x = rng.standard_normal((560, 45)).astype(dtype)
    w = (rng.standard_normal((6, 37, 45)) / 7).astype(dtype)
    # rows without a group and weights of other experts must not be read
    x[sum(sizes.values()) :] = np.nan
    w[3] = np.nan
    (got,) = run(
        "mo.grouped_matmul.ragged",
        [x, w, *groups_of(sizes, 6)],
        [(F32, (560, 37))],
        machine=machine,
    )
    assert_close(got, reference(x, w, sizes).astype(F32), dtype=dtype)


SHAPES = given(
    sizes=st.dictionaries(st.integers(-1, 7), st.integers(0, 40), max_size=8),
    columns=st.sampled_from([1, 3, 16, 31, 64, 65]),
    inner=st.sampled_from([1, 8, 33, 300]),
    workers=st.sampled_from([1, 2, 3]),
    spare=st.integers(0, 3),
)


@SHAPES
@settings(max_examples=15)
def test_shapes(sizes: dict[int, int], columns: int, inner: int, workers: int, spare: int) -> None:
    rng = np.random.default_rng(sum(sizes.values()))
    rows = sum(sizes.values()) + spare
    x = rng.standard_normal((rows, inner)).astype(F32)
    w = rng.standard_normal((8, columns, inner)).astype(F32)
    operands = [x, w, *groups_of(sizes, 8)]
    (got,) = run("mo.grouped_matmul.ragged", operands, [(F32, (rows, columns))], workers=workers)
    assert_close(got, reference(x, w, sizes).astype(F32))


@pytest.mark.long
@SHAPES
@settings(max_examples=300)
def test_shapes_long(**drawn: Any) -> None:
    test_shapes.hypothesis.inner_test(**drawn)


@pytest.mark.parametrize("machine", ["host", "avx2", "tiles host"])
@pytest.mark.parametrize("encoding", ["Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("columns", [64, 70])
def test_quantized(encoding: str, columns: int, machine: str) -> None:
    """Packed weights, whose products round rows to 8 bits, and weights in stored blocks."""
    sizes = {2: 1, 0: 5, -1: 2, 3: 67, 4: 250}
    experts, inner = 5, 2 * max(BLOCK_FORMATS[encoding].elements, 64)
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((327, inner)).astype(F32)
    w = np.stack([random_weight(rng, columns, inner, encoding) for _ in range(experts)])
    decoded = np.stack([decode(rows, encoding) for rows in w])
    shape = [(F32, (len(x), columns))]
    described = groups_of(sizes, experts)
    if machine == "host":
        (exact,) = run(
            "mo.grouped_qmatmul.ragged", [x, w, *described], shape, {"encoding": encoding}
        )
        assert_close(exact, reference(x, decoded, sizes).astype(F32), scale=4.0)
    strips = -(-columns // 32)
    bytes_ = grouped.FORMATS[encoding].group_bytes(inner)
    packed = [
        run("mok.pack", [rows], [(np.uint8, (strips, bytes_))], {"encoding": encoding})[0]
        for rows in w
    ]
    attributes = {"encoding": encoding, "streamed": False, "parts": ((1, 1),)}
    operands = [x, np.concatenate(packed), *described]
    (got,) = run("mok.grouped_products", operands, shape, attributes, machine=machine)
    assert_close(got, reference(rounded_to_8_bits(x), decoded, sizes).astype(F32), scale=4.0)
    other = run("mok.grouped_products", operands, shape, attributes, machine=machine, workers=3)
    np.testing.assert_array_equal(got, other[0])


def packed_experts(w: np.ndarray, other: np.ndarray | None = None) -> np.ndarray:
    """The panels of all experts `[experts, N, K]`; of a pair 16 columns of each weight share a panel."""
    shares = 1 if other is None else 2
    shape = (-(-w.shape[1] * shares // 32), panel_elements(w.shape[2]))
    lanes = 2 if w.dtype.itemsize == 2 else 1
    experts: list[np.ndarray] = []
    for index in range(len(w)):
        panels = np.zeros((shape[0], shape[1] // (32 * lanes), 32, lanes), w.dtype)
        for share, weight in enumerate((w, other)[:shares]):
            attributes = {"encoding": "rows", "shares": shares, "share": share}
            (part,) = run("mok.pack", [weight[index]], [(w.dtype, shape)], attributes)
            columns = slice(share * 32 // shares, (share + 1) * 32 // shares)
            panels[:, :, columns] = part.reshape(panels.shape)[:, :, columns]
        experts.append(panels.reshape(shape))
    return np.concatenate(experts)


@k.inline
def gated_with_bias(part: int, sums: Any, row: Any, col: Any, mask: Any, extra: Any) -> Any:
    gate, up = sums
    return (k.max(gate, 0.0) * up + extra[0].load(col, width=up.width, mask=mask),)


@pytest.mark.parametrize("machine", ["host", "avx2", "generic", "tiles host"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("inner", [45, 290])
def test_packed_dense(dtype: np.dtype, inner: int, machine: str) -> None:
    """Panels of single weights, and of pairs with an epilogue, which rows without a group have too."""
    rng = np.random.default_rng(inner)
    sizes = {4: 1, 0: 3, -1: 300, 5: 17, 2: 530, 1: 0}
    rows, columns = 860, 37
    x = rng.standard_normal((rows, inner)).astype(dtype)
    gate, up = ((rng.standard_normal((6, columns, inner)) / 7).astype(dtype) for _ in range(2))
    # rows without a group and weights of other experts must not be read
    x[sum(sizes.values()) :] = np.nan
    gate[3] = up[3] = np.nan
    groups = groups_of(sizes, 6)
    shape = [(F32, (rows, columns))]
    attributes = {"encoding": "rows", "streamed": False, "parts": ((1, 1),)}
    operands = [x, packed_experts(up), *groups]
    (got,) = run("mok.grouped_products", operands, shape, attributes, machine=machine)
    wants = [reference(x, w, sizes) for w in (gate, up)]
    assert_close(got, wants[1].astype(F32), dtype=dtype)
    (other,) = run("mok.grouped_products", operands, shape, attributes, machine=machine, workers=3)
    np.testing.assert_array_equal(got, other)
    bias = rng.standard_normal(columns).astype(F32)
    (got,) = run(
        "mok.grouped_products",
        [x, packed_experts(gate, up), *groups],
        shape,
        attributes | {"parts": ((2, 1),)},
        machine=machine,
        params={"epilogue": gated_with_bias},
        extra=[bias],
    )
    want = np.maximum(wants[0], 0) * wants[1] + bias
    assert_close(got, want.astype(F32), dtype=dtype, scale=4.0)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64], ids=str)
@settings(max_examples=20)
@given(ids=st.lists(st.integers(0, 9), max_size=50))
def test_order_by_expert(dtype: Any, ids: list[int]) -> None:
    rows = np.array(ids, dtype)
    shapes = [(np.uint32, (len(ids),)), (np.uint32, (11,)), (np.uint32, (len(ids),)),
              (np.int32, (10,)), (np.uint32, (2,))]  # fmt: skip
    order, starts, restored, experts, stats = run("mo.moe.indices", [rows], shapes, {"experts": 10})
    active = sorted(set(ids))
    np.testing.assert_array_equal(order, np.argsort(rows, kind="stable"))
    np.testing.assert_array_equal(order[restored], np.arange(len(ids)))
    np.testing.assert_array_equal(experts, active + [-1] * (10 - len(active)))
    counts = [ids.count(e) for e in active]
    np.testing.assert_array_equal(starts[: len(active) + 1], np.cumsum([0, *counts]))
    np.testing.assert_array_equal(starts[len(active) :], len(ids))
    np.testing.assert_array_equal(stats, [max(counts, default=0), len(active)])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"experts": (1, 6)}, r"expert_ids\[1\] is 6; there are 6"),
        ({"experts": (0, -2)}, r"expert_ids\[0\] is -2"),
        ({"starts": (0, 1)}, r"expert_start_indices\[0\] is 1, expected 0"),
        ({"starts": (1, 8)}, r"expert_start_indices\[2\] is 7 after 8, of 9 rows"),
        ({"starts": (2, 10)}, r"expert_start_indices\[2\] is 10 after 3, of 9 rows"),
        ({"stats": (1, 7)}, "has 7 groups, expert_ids 6"),
    ],
)
@pytest.mark.parametrize("encoding", [None, "Q8_0"])
def test_groups_that_do_not_fit(
    change: dict[str, tuple[int, int]], error: str, encoding: str | None
) -> None:
    starts, experts, stats = groups_of({4: 3, 0: 4}, 6)
    arrays = {"starts": starts, "experts": experts, "stats": stats}
    for name, (index, value) in change.items():
        arrays[name][index] = value
    x, w = np.ones((9, 32), F32), np.ones((6, 8, 32), F32)
    name = "mo.grouped_matmul.ragged" if encoding is None else "mo.grouped_qmatmul.ragged"
    weights = w if encoding is None else np.stack([encode(rows, encoding) for rows in w])
    attributes = {} if encoding is None else {"encoding": encoding}
    with pytest.raises(KernelRunError, match=error):
        run(name, [x, weights, starts, experts, stats], [(F32, (9, 8))], attributes)


@pytest.mark.parametrize("bad", [-1, 4])
def test_experts_out_of_range(bad: int) -> None:
    shapes = [
        (np.uint32, (3,)),
        (np.uint32, (5,)),
        (np.uint32, (3,)),
        (np.int32, (4,)),
        (np.uint32, (2,)),
    ]
    ids = np.array([0, bad, 3], np.int64)
    with pytest.raises(KernelRunError, match=rf"topk_ids\[1\] is {bad}; there are 4 experts"):
        run("mo.moe.indices", [ids], shapes, {"experts": 4})
