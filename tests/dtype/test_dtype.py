"""DType against the documented values, NumPy, ml_dtypes and torch."""

from __future__ import annotations

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch

from max.dtype import DType

VALUES = {
    "bool": 1, "float4_e2m1fn": 64, "float6_e2m3fn": 65, "float6_e3m2fn": 66, "float8_e8m0fnu": 73,
    "float8_e4m3fn": 75, "float8_e4m3fnuz": 76, "float8_e5m2": 77,
    "float8_e5m2fnuz": 78, "float16": 79, "bfloat16": 80, "float32": 81, "float64": 82,
    "uint8": 134, "int8": 135, "uint16": 136, "int16": 137, "uint32": 138, "int32": 139,
    "uint64": 140, "int64": 141,
}  # fmt: skip


def test_documented_values() -> None:
    assert {d.name: d.value for d in DType} == VALUES
    assert DType(81) is DType.float32 and DType("bfloat16") is DType.bfloat16
    with pytest.raises(ValueError, match="float31"):
        DType("float31")


@pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.name)
def test_numpy_and_sizes(dtype: DType) -> None:
    numpy = dtype.to_numpy()
    assert DType.from_numpy(numpy) is dtype and DType.from_numpy(numpy.type) is dtype
    assert dtype.size_in_bytes == numpy.itemsize and dtype.align == numpy.alignment
    assert (
        dtype.size_in_bits == ml_dtypes.finfo(numpy).bits
        if dtype.is_float()
        else 8 * numpy.itemsize
    )


@pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.name)
def test_kinds_against_numpy(dtype: DType) -> None:
    numpy = dtype.to_numpy()
    info = ml_dtypes.iinfo(numpy) if numpy.kind in "iu" else None
    assert dtype.is_integral() == (info is not None)
    assert dtype.is_signed_integral() == (numpy.kind == "i")
    assert dtype.is_unsigned_integral() == (numpy.kind == "u")
    assert dtype.is_float() == ("float" in dtype.name)
    assert dtype.is_float8() == dtype.name.startswith("float8")
    assert dtype.is_half() == (dtype.is_float() and dtype.size_in_bits == 16)


@pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.name)
def test_torch(dtype: DType) -> None:
    if dtype.size_in_bits < 8:
        with pytest.raises(ValueError, match="no such dtype"):
            dtype.to_torch()
        return
    found = dtype.to_torch()
    assert found is getattr(torch, dtype.name)
    assert DType.from_torch(found) is dtype
    assert found.itemsize == dtype.size_in_bytes and found.is_floating_point == dtype.is_float()


def test_bad_dtypes() -> None:
    for bad in ("U4", np.complex64, object, "datetime64[s]", [("a", "f4")]):
        with pytest.raises(ValueError, match="unsupported NumPy dtype"):
            DType.from_numpy(bad)
    for bad in ("fl", None):
        with pytest.raises(ValueError, match="is not a NumPy dtype"):
            DType.from_numpy(bad)
    with pytest.raises(ValueError, match="byte order.*astype\\('float32'\\)"):
        DType.from_numpy(np.dtype("f4").newbyteorder())
    with pytest.raises(ValueError, match="complex64"):
        DType.from_torch(torch.complex64)
    with pytest.raises(ValueError, match="not a torch.dtype"):
        DType.from_torch(np.dtype("f4"))
    failed = ImportError("no torch")
    for call in (DType.float32.to_torch, lambda _error: DType.from_torch(torch.int8, _error)):
        with pytest.raises(ImportError) as error:
            call(_error=failed)
        assert error.value is failed


def test_mlir_names_round_trip() -> None:
    for dtype in DType:
        assert DType._from_mlir(dtype._mlir) is dtype
    names = {d: d._mlir for d in (DType.bool, DType.int8, DType.uint64, DType.float8_e4m3fn)}
    assert list(names.values()) == ["bool", "si8", "ui64", "f8e4m3fn"]
    assert (DType.bfloat16._mlir, DType.float32._mlir) == ("bf16", "f32")
    with pytest.raises(ValueError, match="i32.*expected"):
        DType._from_mlir("i32")


def test_members_are_singletons() -> None:
    for dtype in DType:
        assert pickle.loads(pickle.dumps(dtype)) is dtype
        assert copy.deepcopy(dtype) is dtype
        assert {dtype: 1}[DType(dtype.value)] == 1
        assert repr(dtype) == dtype.name
    assert DType.__module__ == "max.dtype"


def test_a_name_that_no_dtype_has() -> None:
    with pytest.raises(
        AttributeError, match="DType has no 'float31'; did you mean 'float32'"
    ) as error:
        _ = DType.float31
    assert error.value.name == "float31"
    assert not hasattr(DType, "_nothing_") and getattr(DType, "float32") is DType["float32"]  # noqa: B009
