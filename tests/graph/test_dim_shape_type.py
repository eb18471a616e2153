"""Dimensions, shapes and types of the public API."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from max import driver, mlir
from max.dtype import DType
from max.graph import (
    AlgebraicDim,
    BufferType,
    DeviceKind,
    DeviceRef,
    Dim,
    FilterLayout,
    Graph,
    Shape,
    StaticDim,
    SymbolicDim,
    TensorType,
    Type,
)
from max.graph.dim import POC
from max.graph.type import ConvInputLayout, _ChainType, _OpaqueType

CPU = DeviceRef.CPU()


def test_dim_makes_the_class_that_fits() -> None:
    assert type(Dim(3)) is StaticDim and type(Dim("n")) is SymbolicDim
    assert type(Dim("n") * 2) is AlgebraicDim
    assert type(Dim("n") * 2 - Dim("n")) is SymbolicDim and type(Dim("n") - "n") is StaticDim
    assert Dim(Dim("n")) is Dim("n") and Dim(np.int64(3)) == 3
    assert isinstance(AlgebraicDim(Dim("batch") + 1), Dim)


def test_documented_examples() -> None:
    assert isinstance(Dim("batch") * 5, AlgebraicDim)
    assert str(Dim("batch") * 5) == "batch * 5"
    assert -Dim("x") - 4 == -(Dim("x") + 4)
    assert Dim("a") * 2 + Dim("a") == Dim("a") * 3
    assert repr(Shape([2, 2])) == "[Dim(2), Dim(2)]"
    assert repr(Shape(["n", Dim("n") + 1])) == "[Dim('n'), Dim('n + 1')]"


def test_dim_compares_and_hashes_as_what_it_is() -> None:
    assert Dim(3) == 3 and hash(Dim(3)) == hash(3) and Dim(3) != 4
    assert Dim("n") == "n" and hash(Dim("n")) == hash("n") and Dim("n") != "m"
    assert Dim("n") != 3 and Dim("n") * 2 != "n" and Dim("n") != None  # noqa: E711
    assert {Dim("n") * 2 + 1, 1 + 2 * Dim("n")} == {Dim("n") + 1 + "n"}
    assert StaticDim(2) < 3 <= StaticDim(3) and StaticDim(3) > StaticDim(2) >= 2


def test_dim_operators() -> None:
    n = Dim("n")
    assert 10 - n == -(n - 10) and 12 // Dim(5) == 2 and (n * 4) // 2 == n * 2
    assert 2 * n == n + "n" and "m" * n == n * "m"
    assert int(Dim(7)) == 7 and list(range(Dim(3))) == [0, 1, 2]
    assert [d.name for d in (n * "m" // (n + 1)).parameters] == ["m", "n"]
    assert AlgebraicDim.apply(POC.mul, "n", 2, 3) == n * 6
    assert AlgebraicDim.apply(POC.div, n, 2) == n // 2


def test_dim_errors() -> None:
    with pytest.raises(TypeError, match="dimension n is not static"):
        int(Dim("n"))
    with pytest.raises(TypeError, match=r"2.5 of type float is not a dimension"):
        Dim(2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="True of type bool is not a dimension"):
        Dim(True)
    with pytest.raises(TypeError, match="unsupported operand"):
        Dim("n") + 2.5  # type: ignore[operator]
    with pytest.raises(ValueError, match="'my dim' cannot name a symbolic dimension"):
        Dim("my dim")
    with pytest.raises(ValueError, match="does not fit a signed 64-bit integer"):
        Dim(1 << 63)
    with pytest.raises(TypeError, match="expected an int"):
        StaticDim("n")
    with pytest.raises(TypeError, match="expected the name of a symbol"):
        SymbolicDim(3)
    with pytest.raises(ValueError, match="at least one operand"):
        AlgebraicDim.apply(POC.add)
    with pytest.raises(ZeroDivisionError):
        Dim("n") // 0


@pytest.mark.parametrize("dim", [Dim(3), Dim("n"), Dim("n") // 2 * "m"], ids=str)
def test_dim_copies_and_converts(dim: Dim) -> None:
    for again in (
        Dim.from_mlir(dim.to_mlir()),
        copy.deepcopy(dim),
        pickle.loads(pickle.dumps(dim)),
    ):
        assert again == dim and type(again) is type(dim)
    assert type(dim).from_mlir(dim.to_mlir()) == dim
    converted = AlgebraicDim(dim.to_mlir())
    assert converted == dim and type(converted) is type(dim)


def test_shape_is_a_list() -> None:
    shape = Shape([2, "n", Dim("n") + 1])
    assert shape == [2, "n", Dim("n") + 1] and shape == (2, "n", Dim("n") + 1)
    assert shape != [2, "n"] and not shape == [2, "n", 3]
    assert isinstance(shape[:2], Shape) and shape[:2] + [4] == [2, "n", 4]
    assert [4] + shape[1:] == [4, "n", Dim("n") + 1] and shape[-1] == Dim("n") + 1
    assert shape.rank == 3 and shape.static_dims == [2]
    assert [d.name for d in shape.parameters] == ["n"]
    assert not Shape.is_static(shape) and Shape.is_static(Shape([1, 2]))
    assert Shape.from_mlir(shape.to_mlir()) == shape
    with pytest.raises(TypeError, match="is not a dimension"):
        Shape([None])  # type: ignore[list-item]


def test_devices() -> None:
    assert str(DeviceRef.GPU()) == "gpu:0" and repr(DeviceRef.CPU(id=1)) == "cpu:1"
    assert DeviceRef("gpu", 2) == DeviceRef.GPU(2) != DeviceRef.GPU(1)
    assert len({DeviceRef.CPU(), DeviceRef(DeviceKind.CPU)}) == 1
    assert CPU.is_cpu() and not CPU.is_gpu() and DeviceRef.GPU().is_gpu()
    assert DeviceRef.from_device(driver.CPU()) == CPU and DeviceRef.from_device(CPU) is CPU
    assert CPU.to_device() == driver.CPU()
    assert DeviceRef.from_mlir(DeviceRef.GPU(3).to_mlir()) == DeviceRef.GPU(3)
    assert DeviceKind.from_string("gpu") is DeviceKind.GPU and str(DeviceKind.CPU) == "cpu"
    with pytest.raises(ValueError, match="'tpu' is not a kind of device; expected cpu, gpu"):
        DeviceRef("tpu")
    assert DeviceRef.CPU(-1) == DeviceRef("cpu", -1) == DeviceRef.CPU()
    with pytest.raises(ValueError, match="the id is -2"):
        DeviceRef.CPU(-2)


@pytest.mark.parametrize(
    "type_",
    [
        TensorType(DType.float32, ("batch", 10), CPU),
        TensorType(DType.bfloat16, (), DeviceRef.GPU(1)),
        TensorType(DType.float32, (3, 3, 1, 8), CPU, FilterLayout.RSCF),
        BufferType(DType.uint8, (Dim("n") * 2, 0), CPU),
        _ChainType(),
        _OpaqueType("cache", {"dtype": DType.int8, "n": 2, "on": True}),
    ],
    ids=repr,
)
def test_types_through_mlir(type_: Type) -> None:
    again = Type.from_mlir(type_.to_mlir())
    assert again == type_ and hash(again) == hash(type_) and type(again) is type(type_)
    assert repr(again) == repr(type_)


def test_types() -> None:
    tensor = TensorType(DType.float32, ("n", 4), driver.CPU())
    assert tensor.device == CPU and tensor.rank == 2 and tensor.cast(DType.int8).dtype is DType.int8
    assert TensorType(DType.bool, (3, 4), CPU).num_elements() == 12
    with pytest.raises(RuntimeError, match="no fixed number of elements"):
        tensor.num_elements()
    assert tensor.as_buffer().as_tensor() == tensor and tensor.as_buffer() != tensor
    assert tensor != TensorType(DType.float32, ("m", 4), CPU) and tensor != 3
    for layout in (FilterLayout.QRSCF, ConvInputLayout.NCHW):
        assert type(layout).from_mlir(layout.to_mlir()) is layout


def test_type_errors() -> None:
    with pytest.raises(TypeError, match=r"the dtype is \(2, 3\), expected a DType"):
        TensorType((2, 3), DType.float32, CPU)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="axis 1 has size -1, expected 0 or more"):
        BufferType(DType.float32, (2, -1), CPU)
    with pytest.raises(TypeError, match="not a type of a graph's value"):
        Type.from_mlir(mlir.to_attr(3))


def test_what_is_no_sequence_is_told() -> None:
    device = DeviceRef.CPU()
    with pytest.raises(TypeError, match=r"the shape is 3, expected a sequence of dimensions"):
        TensorType(DType.float32, 3, device)
    with pytest.raises(TypeError, match=r"Graph g: input_types is TensorType.*expected a list"):
        Graph("g", input_types=TensorType(DType.float32, (3,), device))
