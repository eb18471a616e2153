"""Products with weights that are packed at load, and the memory that stays resident."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max._host import host_memory, machine
from max.driver import Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.load import load_time_results
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from tests.tolerance import assert_close

CPU = DeviceRef.CPU()
FLOATS = (DType.float32, DType.bfloat16, DType.float16)


def product(dtype: DType, columns: int, inner: int, by_rows: bool, leading=("m",), threads=2):
    """A model that multiplies by a random weight, and the weight as [K, N]."""
    rng = np.random.default_rng(columns * inner)
    w = rng.standard_normal((columns, inner) if by_rows else (inner, columns))
    w = w.astype(dtype.to_numpy())
    weight = Weight("w", dtype, w.shape, CPU)
    with Graph("g", input_types=[TensorType(dtype, [*leading, inner], CPU)]) as graph:
        x = graph.inputs[0].tensor
        graph.output(ops.matmul(x, ops.transpose(weight, 0, 1) if by_rows else weight))
    model = InferenceSession(num_threads=threads).load(graph, weights_registry={"w": w})
    return model, (w.T if by_rows else w).astype(np.float64)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_products(dtype, by_rows, threads, rng):
    for columns, inner in ((32, 32), (37, 33), (100, 577), (65, 1030), (1100, 70)):
        model, w = product(dtype, columns, inner, by_rows, threads=threads)
        assert model.kernel_summaries == ["packed_matmul"]
        for rows in (0, 1, 2, 3, 4, 7, 8, 9, 12, 13, 16, 17, 23, 24, 25, 50, 253, 530):
            x = rng.standard_normal((rows, inner)).astype(dtype.to_numpy())
            (y,) = model.execute(x)
            y = y.to_numpy()
            assert y.shape == (rows, columns)
            assert_close(y, x.astype(np.float64) @ w, dtype.to_numpy(), scale=4)


PRODUCTS = given(
    dtype=st.sampled_from(FLOATS),
    columns=st.integers(32, 140) | st.integers(480, 700),
    inner=st.integers(32, 700),
    by_rows=st.booleans(),
    rows=st.lists(st.integers(0, 70) | st.integers(200, 400), min_size=1, max_size=3),
)


@PRODUCTS
@settings(max_examples=10, deadline=None)
def test_any_shape(dtype, columns, inner, by_rows, rows):
    model, w = product(dtype, columns, inner, by_rows, ("b", "m"))
    rng = np.random.default_rng(0)
    for count in rows:
        x = rng.standard_normal((2, count, inner)).astype(dtype.to_numpy())
        (y,) = model.execute(x)
        expected = (x.astype(np.float64).reshape(-1, inner) @ w).reshape(2, count, columns)
        assert_close(y.to_numpy(), expected, dtype.to_numpy(), scale=4)


@pytest.mark.long
@PRODUCTS
@settings(max_examples=300, deadline=None)
def test_any_shape_long(**drawn):
    test_any_shape.hypothesis.inner_test(**drawn)


@pytest.mark.parametrize("dtype", FLOATS)
def test_any_number_of_workers(dtype, rng):
    """The number of workers changes the tasks, not the order of summation."""
    for columns, inner in ((70, 34), (600, 1100)):
        one, _ = product(dtype, columns, inner, True, threads=1)
        three, _ = product(dtype, columns, inner, True, threads=3)
        for rows in (9, 40, 301):
            x = rng.standard_normal((rows, inner)).astype(dtype.to_numpy())
            expected = one.execute(x)[0].to_numpy()
            assert three.execute(x)[0].to_numpy().tobytes() == expected.tobytes()


WIDE = DType.int32
INT8_PRODUCTS = {
    "rows": lambda x, w: x.cast(WIDE) @ ops.transpose(w.cast(WIDE), 0, 1),
    "rows, turned first": lambda x, w: x.cast(WIDE) @ ops.transpose(w, 0, 1).cast(WIDE),
    "columns": lambda x, w: x.cast(WIDE) @ w.cast(WIDE),
    "in 8 bits": lambda x, w: x @ w,
    "scaled": lambda x, w: (x.cast(WIDE) @ w.cast(WIDE)).cast(DType.float32) * 0.5 + 1,
    "rounded": lambda x, w: ((x + x).cast(DType.int8).cast(WIDE) @ w.cast(WIDE)) * 2,
}


@pytest.mark.parametrize("way", INT8_PRODUCTS)
def test_int8_products(way, rng):
    """All forms of the product lower to one kernel with exact sums."""
    w = rng.integers(-128, 128, (37, 70)).astype(np.int8)
    stored = w.T if way.startswith("rows") else w
    with Graph("g", input_types=[TensorType(DType.int8, ["b", "m", 37], CPU)]) as graph:
        weight = Weight("w", DType.int8, stored.shape, CPU)
        graph.output(INT8_PRODUCTS[way](graph.inputs[0].tensor, weight))
    registry = {"w": np.ascontiguousarray(stored)}
    model = InferenceSession().load(graph, weights_registry=registry)
    assert sum("packed_matmul" in name for name in model.kernel_summaries) == 1
    for rows in (1, 7, 50):
        x = rng.integers(-128, 128, (2, rows, 37)).astype(np.int8)
        want = x.astype(np.int32) @ w.astype(np.int32)
        if way == "in 8 bits":
            want = want.astype(np.int8)
        if way == "scaled":
            want = want.astype(np.float32) * 0.5 + 1
        if way == "rounded":
            want = (x + x).astype(np.int32) @ w.astype(np.int32) * 2
        (y,) = model.execute(x)
        np.testing.assert_array_equal(y.to_numpy(), want)


@pytest.mark.parametrize("inner", [66, 65])
def test_unaligned_views(inner, rng):
    """Rows of any alignment."""
    model, w = product(DType.bfloat16, 48, inner, True)
    memory = rng.standard_normal(4 + 61 * 66).astype(DType.bfloat16.to_numpy())
    for start in (1, 2, 3):
        for rows in (1, 5, 11, 61):
            x = memory[start : start + rows * inner].reshape(rows, inner)
            (y,) = model.execute(Tensor.from_numpy(x))
            assert_close(y.to_numpy(), x.astype(np.float64) @ w, x.dtype, scale=4)


def test_a_weight_with_several_uses(rng):
    """All products share one packed copy, the gather reads the unpacked rows, and the product has an epilogue."""
    w = rng.standard_normal((64, 48)).astype(np.float32)
    bias = rng.standard_normal(64).astype(np.float32)
    table, offset = Weight("w", DType.float32, w.shape, CPU), Weight("b", DType.float32, (64,), CPU)
    types = [TensorType(DType.int32, ["n"], CPU), TensorType(DType.float32, ["m", 64], CPU)]
    with Graph("g", input_types=types) as graph:
        ids, y = (value.tensor for value in graph.inputs)
        x = ops.gather(table, ids, 0)
        logits = ops.relu(x @ ops.transpose(table, 0, 1) + offset)
        graph.output(logits, (-x) @ ops.transpose(table, 0, 1), y @ table)
    model = InferenceSession().load(graph, weights_registry={"w": w, "b": bias})
    ids = np.array([3, 60, 3, 0], np.int32)
    y = rng.standard_normal((5, 64)).astype(np.float32)
    logits, negative, back = (t.to_numpy() for t in model.execute(ids, y))
    assert_close(logits, np.maximum(w[ids] @ w.T + bias, 0), scale=4)
    assert_close(negative, -w[ids] @ w.T, scale=4)
    assert_close(back, y @ w, scale=4)


@pytest.mark.parametrize("part", [1, 3000, 1 << 30])
def test_packing_in_parts(part, monkeypatch, rng):
    """A reload packs again; the packing program gives equal results whether it runs whole or in parts."""
    monkeypatch.setattr(load_time_results, "PART_BYTES", part)
    ws = [rng.standard_normal((40, 40)).astype(np.float32) for _ in range(6)]
    with Graph("g", input_types=[TensorType(DType.float32, ["m", 40], CPU)]) as graph:
        x = graph.inputs[0].tensor
        weights = [Weight(f"w{i}", DType.float32, (40, 40), CPU) for i in range(len(ws))]
        for i, weight in enumerate(weights):
            # one is computed from two weights before it is packed
            right = ops.transpose(weight, 0, 1)
            x = x @ (right + weights[0] if i == 5 else right)
        graph.output(x)

    def expected(arrays, x):
        for i, w in enumerate(arrays):
            x = x @ (w.T + arrays[0] if i == 5 else w.T)
        return x

    model = InferenceSession().load(graph, weights_registry={f"w{i}": w for i, w in enumerate(ws)})
    x = rng.standard_normal((3, 40)).astype(np.float32)
    assert_close(model.execute(x)[0].to_numpy(), expected(ws, x), scale=16)
    others = [w[::-1].copy() for w in ws]
    model.reload({f"w{i}": w for i, w in enumerate(others)})
    assert_close(model.execute(x)[0].to_numpy(), expected(others, x), scale=16)


def resident(name: str) -> int:
    """Returns the resident bytes of the mapped file of that name."""
    text = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"{re.escape(name)}\n(?:.*\n)*?Rss:\s+(\d+) kB", text)
    return sum(int(one) for one in found) * 1024


@pytest.mark.skipif(not machine.LINUX, reason="reads /proc")
def test_mapped_pages_are_given_back(tmp_path, rng):
    path = tmp_path / "weights.bin"
    size = 1 << 10
    rng.standard_normal((size, size)).astype(np.float32).tofile(path)
    w = np.memmap(path, np.float32, "r", shape=(size, size))
    weight = Weight("w", DType.float32, (size, size), CPU)
    with Graph("g", input_types=[TensorType(DType.float32, ["m", size], CPU)]) as graph:
        graph.output(graph.inputs[0].tensor @ ops.transpose(weight, 0, 1))
    total = float(np.asarray(w, np.float64).sum())
    assert resident(path.name) == w.nbytes
    model = InferenceSession().load(graph, weights_registry={"w": w})
    assert resident(path.name) < 1 << 16
    x = rng.standard_normal((3, size)).astype(np.float32)
    assert_close(model.execute(x)[0].to_numpy(), x @ np.asarray(w).T, scale=8)
    # the file is still readable
    assert float(np.asarray(w, np.float64).sum()) == total


@pytest.mark.skipif(not machine.LINUX, reason="reads /proc")
def test_other_memory_is_never_given_back(tmp_path, rng):
    path = tmp_path / "weights.bin"
    array = rng.standard_normal(1 << 14).astype(np.float32)
    array.tofile(path)
    changed = np.memmap(path, np.float32, "c")
    changed[:] = 1
    mapped = host_memory.MappedFiles()
    for one in (array, changed):
        assert not mapped.give_back(one.ctypes.data, one.nbytes)
    assert (changed == 1).all() and array.any()
    # a range that ends beyond the file
    read = np.memmap(path, np.float32, "r")
    assert not host_memory.MappedFiles().give_back(read.ctypes.data, read.nbytes + (1 << 30))
    assert host_memory.MappedFiles().give_back(read.ctypes.data, read.nbytes)
