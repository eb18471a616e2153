"""DLPack import and export: all dtypes, read-only memory, protocol versions, lifetime of memory."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from max.driver import CPU, DLPackArray, Tensor, _dlpack
from max.dtype import DType

SHARED = [dtype for dtype in DType if dtype.size_in_bits >= 8]
EACH = pytest.mark.parametrize("dtype", SHARED, ids=lambda d: d.name)


def raw(array: np.ndarray[Any, Any]) -> list[int]:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1).tolist()


@EACH
def test_torch_shares_our_memory(dtype: DType) -> None:
    tensor = Tensor.zeros((3, 4), dtype, CPU(1))
    tensor[1] = 1
    seen = torch.from_dlpack(tensor)
    assert seen.dtype == dtype.to_torch() and tuple(seen.shape) == (3, 4)
    assert seen.data_ptr() == tensor._ptr and seen.is_contiguous()
    strided = torch.from_dlpack(tensor[1:, ::2])
    assert strided.stride() == (4, 2) and strided.data_ptr() == tensor[1:]._ptr
    seen.view(torch.uint8)[2] = 0
    tensor[0, 1] = 1
    assert raw(tensor.to_numpy()) == seen.view(torch.uint8).reshape(-1).tolist()


@EACH
def test_we_share_torchs_memory(dtype: DType) -> None:
    source = torch.arange(24).reshape(4, 6).to(dtype.to_torch())
    for part in (source, source[1:, ::2], source.T, source[:0], source[2, 3]):
        tensor = Tensor.from_dlpack(part)
        assert (tensor.dtype, tensor.shape) == (dtype, tuple(part.shape))
        if part.numel():
            assert tensor._ptr == part.data_ptr()
        expected = part.contiguous().reshape(-1).view(torch.uint8).tolist()
        assert raw(tensor.to_numpy()) == expected
    # float8_e8m0fnu has no zero
    value = int(dtype is DType.float8_e8m0fnu)
    Tensor.from_dlpack(source)[3, 5] = value
    assert source[3, 5].item() == value
    first = source[0, 0].item()
    copied = Tensor.from_dlpack(source, copy=True)
    copied[...] = 1
    assert copied._ptr != source.data_ptr() and source[0, 0].item() == first != 1


@EACH
def test_round_trip_of_numpy(dtype: DType) -> None:
    array = np.arange(24).reshape(4, 6).astype(dtype.to_numpy())
    for part in (array, array[::-1, 1:3], array.T, array[2:2], array[1, 2:3].reshape(())):
        tensor = Tensor.from_dlpack(part)
        assert tensor.dtype is dtype and raw(tensor.to_numpy()) == raw(part)
        assert np.shares_memory(tensor.to_numpy(), part) or not part.size or part.ndim == 0
        again = Tensor.from_dlpack(Foreign(tensor))
        assert again.dtype is dtype and again._ptr == tensor._ptr
        assert raw(again.to_numpy()) == raw(part)
    if array.dtype.isbuiltin == 1:
        tensor = Tensor.from_dlpack(array)
        assert np.shares_memory(np.from_dlpack(tensor), array)


class Foreign:
    """An array of another library that has only the protocol, of a given version."""

    def __init__(self, tensor: Any, versioned: bool = True) -> None:
        self.tensor, self.versioned = tensor, versioned

    def __dlpack__(self, **kwargs: Any) -> Any:
        if self.versioned:
            return self.tensor.__dlpack__(**kwargs)
        if kwargs:
            raise TypeError("unexpected keyword argument")
        return self.tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()


def test_float4_needs_the_padded_flag() -> None:
    tensor = Tensor.zeros((3,), DType.float4_e2m1fn)
    tensor[1] = 1.5
    again = Tensor.from_dlpack(Foreign(tensor))
    assert again.dtype is DType.float4_e2m1fn and again[1].item() == 1.5
    with pytest.raises(BufferError, match="consumer of version 1.0"):
        tensor.__dlpack__()
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(BufferError, match="view it as uint8"):
        Tensor.from_dlpack(packed)


@pytest.mark.parametrize("versioned", [True, False])
def test_old_and_new_producers(versioned: bool) -> None:
    tensor = Tensor.zeros((2, 3), DType.bfloat16)
    again = Tensor.from_dlpack(Foreign(tensor, versioned))
    again[1, 2] = 4
    assert tensor[1, 2].item() == 4


def test_read_only_memory() -> None:
    array = np.arange(3, dtype="f4")
    array.flags.writeable = False
    for tensor in (Tensor.from_dlpack(array), Tensor.from_numpy(array)):
        assert not np.from_dlpack(tensor).flags.writeable
        again = Tensor.from_dlpack(Foreign(tensor))
        again[0] = 1
        assert again[0].item() == 1 and tensor[0].item() == 0
        assert torch.from_dlpack(tensor).tolist() == [0, 1, 2]
        with pytest.raises(BufferError, match="read-only tensor needs a consumer"):
            tensor.__dlpack__()
        assert type(tensor.copy().__dlpack__()).__name__ == "PyCapsule"


def test_copy_argument() -> None:
    odd = np.zeros(17, np.uint8)[1:].view("f8")
    assert Tensor.from_dlpack(odd)._ptr % 8 == 0
    with pytest.raises(BufferError, match="copy=False forbids"):
        Tensor.from_dlpack(odd, copy=False)
    tensor = Tensor.zeros((3,), DType.int8)
    assert Tensor.from_dlpack(tensor)._ptr == tensor._ptr
    assert Tensor.from_dlpack(tensor, copy=True)._ptr != tensor._ptr
    assert Tensor.from_dlpack(torch.zeros(3), copy=False).shape == (3,)
    exported = torch.from_dlpack(tensor, copy=True)
    assert exported.data_ptr() != tensor._ptr


def test_errors() -> None:
    tensor = Tensor.zeros((2,), DType.float32)
    with pytest.raises(TypeError, match="expected an array with __dlpack__, got list"):
        Tensor.from_dlpack([1, 2])
    with pytest.raises(BufferError, match="complex of 64 bits"):
        Tensor.from_dlpack(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(BufferError, match="has no streams"):
        tensor.__dlpack__(stream=1)
    with pytest.raises(BufferError, match="not on DLPack device"):
        tensor.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="used up"):
        capsule = tensor.__dlpack__()
        torch.from_dlpack(capsule)
        _dlpack.Imported(capsule)
    with pytest.raises(TypeError, match="expected a capsule, got int"):
        _dlpack.Imported(3)

    class Elsewhere(Foreign):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    with pytest.raises(BufferError, match="device type 2.*move it to the CPU"):
        Tensor.from_dlpack(Elsewhere(tensor))


def test_protocol_class() -> None:
    for array in (np.zeros(2), torch.zeros(2), Tensor.zeros((2,), DType.int8)):
        assert isinstance(array, DLPackArray)
    assert not isinstance([1], DLPackArray)


def test_consumer_keeps_our_memory() -> None:
    tensor = Tensor.zeros((4,), DType.bfloat16)
    owner = weakref.ref(tensor._owner)
    capsule = tensor.__dlpack__(max_version=(1, 0))
    seen = torch.from_dlpack(tensor)
    view = tensor[1:]
    del tensor
    gc.collect()
    assert owner() is not None
    del view, capsule
    assert owner() is not None
    thread = threading.Thread(target=seen.__class__.zero_, args=(seen,))
    thread.start()
    thread.join()
    del seen, thread
    gc.collect()
    assert owner() is None


def test_array_keeps_the_memory() -> None:
    tensor = Tensor.zeros((4,), DType.bfloat16)
    owner = weakref.ref(tensor._owner)
    array = tensor.to_numpy()[1:]
    del tensor
    assert owner() is not None
    del array
    assert owner() is None


def counted_capsule(calls: list[int], version: tuple[int, int] | None) -> tuple[Any, Any]:
    """A capsule made by the test that counts calls of its deleter."""
    data = (ctypes.c_float * 4)(1, 2, 3, 4)
    sizes = (ctypes.c_int64 * 1)(4)
    fields = _dlpack._Tensor(
        ctypes.addressof(data),
        _dlpack._Device(1, 0),
        1,
        _dlpack._DataType(2, 32, 1),
        sizes,
        None,
        4,
    )
    sizes[0] = 3
    deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(calls.append)
    address = ctypes.cast(deleter, ctypes.c_void_p)
    if version is None:
        managed: Any = _dlpack._Managed(fields, None, address)
    else:
        managed = _dlpack._ManagedVersioned(*version, None, address, 0, fields)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    name = _dlpack._NAME if version is None else _dlpack._NAME_VERSIONED
    return new(ctypes.addressof(managed), name, None), (data, sizes, deleter, managed)


@pytest.mark.parametrize("version", [None, (1, 0), (1, 9)])
def test_deleter_is_called_once(version: tuple[int, int] | None) -> None:
    calls: list[int] = []
    capsule, alive = counted_capsule(calls, version)
    imported = _dlpack.Imported(capsule)
    address = ctypes.addressof(alive[-1])
    tensor = Tensor._wrap(imported.data, imported.dtype, imported.shape, imported.strides, imported)
    del imported, capsule
    part, array = tensor[1:], tensor.to_numpy()
    assert array.tolist() == [2, 3, 4] and tensor.is_contiguous
    del tensor, array
    assert not calls
    del part
    gc.collect()
    assert calls == [address]


def test_newer_major_version_is_left_alone() -> None:
    calls: list[int] = []
    capsule, _alive = counted_capsule(calls, (2, 0))
    with pytest.raises(BufferError, match=r"version 2\.0; version 1 is understood"):
        _dlpack.Imported(capsule)
    assert _dlpack._get_name(capsule) == _dlpack._NAME_VERSIONED and not calls


def test_no_leak_in_either_direction() -> None:
    source = torch.zeros(1 << 18)

    def spin() -> None:
        for _ in range(50):
            torch.from_dlpack(Tensor(DType.float32, (1 << 18,))).add_(1)
            Tensor(DType.float32, (1 << 18,)).__dlpack__(max_version=(1, 1))
            Tensor.from_dlpack(source.clone())

    spin()
    before = psutil.Process().memory_info().rss
    for _ in range(4):
        spin()
    assert psutil.Process().memory_info().rss - before < 20 << 20


def test_tensors_may_outlive_the_interpreter() -> None:
    script = """
import torch
from max.driver import Tensor
from max.dtype import DType
torch.kept = [torch.from_dlpack(Tensor.zeros((3,), DType.bfloat16))]
kept = [Tensor.from_dlpack(torch.zeros(3)), Tensor.zeros((3,), DType.int8).__dlpack__()]
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
