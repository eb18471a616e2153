"""Arguments and names of later releases in the graph API and of dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from max.driver import CPU
from max.dtype import DType, finfo
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Dim, Graph, TensorType, ops
from max.mlir import walk

DEVICE = DeviceRef.CPU()


@pytest.mark.parametrize("value", [0, 7, -2.5])
def test_a_buffer_with_a_first_value(value: float) -> None:
    rows = TensorType(DType.float32, ["n", 3], DEVICE)
    with Graph("filled", input_types=[rows]) as graph:
        x = graph.inputs[0].tensor
        buffer = ops.buffer_create(BufferType(DType.float32, x.shape, DEVICE), init_value=value)
        before = buffer[...]
        ops.buffer_store(buffer, x + before)
        graph.output(before, buffer[...])
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    before, after = (t.to_numpy() for t in InferenceSession(devices=[CPU()]).load(graph).execute(x))
    np.testing.assert_array_equal(before, np.full((5, 3), value, np.float32))
    np.testing.assert_array_equal(after, x + np.float32(value))


def test_the_first_value_fits_the_dtype() -> None:
    with Graph("filled"), pytest.raises(ValueError, match="0.5"):
        ops.buffer_create(BufferType(DType.int32, [3], DEVICE), init_value=0.5)


def test_alignment_of_an_external_constant() -> None:
    with Graph("aligned") as graph:
        w = ops.constant_external("w", TensorType(DType.float32, [3], DEVICE), align=64)
        graph.output(w)
    ops_ = [op for op in walk(graph.mlir_op) if op.name == "mo.constant.external"]
    assert [op.attr("align") for op in ops_] == [64]
    with Graph("aligned"), pytest.raises(TypeError):
        ops.constant_external("w", TensorType(DType.float32, [3], DEVICE), align="64")  # pyright: ignore[reportArgumentType]


def test_dims_for_symbols() -> None:
    dim = Dim("a") * 2 + Dim("b") // 3
    assert dim.substitute({"a": 4, "b": 7}) == 10
    assert dim.substitute({"a": "c"}) == Dim("c") * 2 + Dim("b") // 3
    assert dim.substitute({"b": Dim("a") * 3}) == Dim("a") * 3
    assert dim.substitute({}) == dim and Dim(3).substitute({"a": 1}) == 3
    with pytest.raises(TypeError):
        dim.substitute({"a": 0.5})  # pyright: ignore[reportArgumentType]


def test_types() -> None:
    type_ = TensorType(DType.float32, ["a", 3, Dim("b") * 2], DEVICE)
    assert list(type_.parameters) == [Dim("a"), Dim("b")]
    assert list(type_.as_buffer().parameters) == [Dim("a"), Dim("b")]
    assert type_.as_buffer().cast(DType.int8) == BufferType(DType.int8, type_.shape, DEVICE)


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_float()], ids=lambda d: d.name)
def test_limits_of_floats(dtype: DType) -> None:
    limits, numpy = finfo(dtype), dtype.to_numpy()
    want = ml_dtypes.finfo(numpy)
    assert (limits.bits, limits.dtype) == (dtype.size_in_bits, dtype)
    assert (limits.eps, limits.max, limits.min) == (
        float(want.eps),
        float(want.max),
        float(want.min),
    )
    assert limits.tiny == limits.smallest_normal == float(want.smallest_normal)
    one = np.array([1.0], numpy)
    assert float((one + np.array([limits.eps], numpy))[0]) > 1.0


def test_limits_of_integers_are_refused() -> None:
    for bad in (DType.int32, DType.bool, "float32"):
        with pytest.raises(TypeError, match="finfo"):
            finfo(bad)  # pyright: ignore[reportArgumentType]
