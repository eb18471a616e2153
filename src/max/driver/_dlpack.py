"""Import and export of DLPack capsules, for every dtype, with ctypes.

Export: NumPy creates the capsule, with unsigned integers for dtypes that it lacks; the dtype in the capsule is then
corrected. The deleter is thus native code, which a consumer may call on any thread, even after the interpreter has
ended.

Import: this module reads the structure in the capsule, and keeps it as long as the memory is used.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from max.dtype import DType


@runtime_checkable
class DLPackArray(Protocol):
    """An array that shares its memory through DLPack: of NumPy, torch, JAX, or a :class:`max.driver.Tensor`."""

    __module__ = "max.driver"

    def __dlpack__(self) -> Any:
        """A PyCapsule with the memory."""
        ...

    def __dlpack_device__(self) -> Any:
        """The pair of device type and device id of the memory."""
        ...


# the structures of dlpack.h ----------------------------------------------------------------------


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


# PYFUNCTYPE holds the GIL during the call, since a deleter may run Python code
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# bits of `_ManagedVersioned.flags`
READ_ONLY = 1
COPIED = 2
SUBBYTE_PADDED = 4

HOST_DEVICES = {1: "cpu", 3: "cuda host", 11: "rocm host"}
"""The device types whose memory the host reads."""
HOST = (1, 0)
"""The device type and id of the CPU."""

_KNOWN_MAJOR = 1
_NAME, _NAME_VERSIONED = b"dltensor", b"dltensor_versioned"
_USED, _USED_VERSIONED = b"used_dltensor", b"used_dltensor_versioned"

# the type codes of floats that differ from that of float16, float32 and float64
_FLOAT_CODES = {
    DType.bfloat16: 4,
    DType.float8_e4m3fn: 10,
    DType.float8_e4m3fnuz: 11,
    DType.float8_e5m2: 12,
    DType.float8_e5m2fnuz: 13,
    DType.float8_e8m0fnu: 14,
    DType.float6_e2m3fn: 15,
    DType.float6_e3m2fn: 16,
    DType.float4_e2m1fn: 17,
}


def _code(dtype: DType) -> int:
    """DLPack's type code of a dtype."""
    if dtype is DType.bool:
        return 6
    if dtype.is_integral():
        return 0 if dtype.is_signed_integral() else 1
    return _FLOAT_CODES.get(dtype, 2)


_TO_DTYPE = {(_code(dtype), dtype.size_in_bits): dtype for dtype in DType}
_CODE_NAMES = {3: "opaque handle", 5: "complex"}

_get_name = ctypes.pythonapi.PyCapsule_GetName
_get_name.restype, _get_name.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_set_name = ctypes.pythonapi.PyCapsule_SetName
_set_name.restype, _set_name.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)


def _structure(capsule: object) -> tuple[Any, bytes]:
    """The managed structure in a fresh capsule, and the capsule's name."""
    if type(capsule).__name__ != "PyCapsule":
        raise TypeError(f"DLPack: expected a capsule, got {type(capsule).__name__}")
    name = _get_name(capsule)
    if name == _NAME_VERSIONED:
        return _ManagedVersioned.from_address(_get_pointer(capsule, name)), name
    if name == _NAME:
        return _Managed.from_address(_get_pointer(capsule, name)), name
    raise BufferError(f"DLPack: the capsule {name!r} is used up, or holds no tensor")


class Imported:
    """A tensor imported from a capsule; calls the producer's deleter when it is freed.

    Attributes:
        data: The address of the first element.
        shape: The sizes.
        strides: The strides in elements; None when contiguous.
        dtype: The element type.
        read_only: Whether the producer forbids writes.
        copied: Whether the producer made a copy.
    """

    __slots__ = (
        "_address", "_deleter", "copied", "data", "dtype", "read_only", "shape", "strides",
    )  # fmt: skip

    def __init__(self, capsule: object) -> None:
        self._deleter = None
        managed, name = _structure(capsule)
        flags = 0
        if isinstance(managed, _ManagedVersioned):
            if managed.major > _KNOWN_MAJOR:
                raise BufferError(
                    f"DLPack: the capsule has version {managed.major}.{managed.minor}; "
                    f"version {_KNOWN_MAJOR} is understood"
                )
            flags = managed.flags
        tensor = managed.tensor
        self.dtype = _dtype(tensor.dtype, flags)
        if tensor.device.type not in HOST_DEVICES:
            raise BufferError(
                f"DLPack: the tensor is on device type {tensor.device.type}, which the host does "
                "not read; move it to the CPU first"
            )
        if tensor.ndim < 0:
            raise BufferError(f"DLPack: the tensor has rank {tensor.ndim}")
        self.shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
        if not tensor.data and all(self.shape):
            raise BufferError(
                f"DLPack: the tensor of shape {list(self.shape)} has no memory; copy it to a dense one first"
            )
        self.strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
        self.data = (tensor.data or 0) + tensor.byte_offset
        self.read_only = bool(flags & READ_ONLY)
        self.copied = bool(flags & COPIED)
        # the tensor is owned from here on: the renamed capsule does not delete it
        _set_name(capsule, _USED_VERSIONED if name == _NAME_VERSIONED else _USED)
        self._address = ctypes.addressof(managed)
        if managed.deleter:
            self._deleter = _Deleter(managed.deleter)

    def __del__(self) -> None:
        if self._deleter is not None:
            self._deleter(self._address)


def _dtype(fields: _DataType, flags: int) -> DType:
    """The DType of a DLPack data type; BufferError where there is none."""
    dtype = _TO_DTYPE.get((fields.code, fields.bits)) if fields.lanes == 1 else None
    if dtype is None or (dtype.size_in_bits < 8 and not flags & SUBBYTE_PADDED):
        name = _CODE_NAMES.get(fields.code, f"type code {fields.code}")
        lanes = f" with {fields.lanes} lanes" if fields.lanes != 1 else ""
        raise BufferError(
            f"DLPack: no DType for {name} of {fields.bits} bits{lanes}; view it as uint8 first"
        )
    return dtype


def import_array(array: DLPackArray, copy: bool | None) -> Imported:
    """Imports an array through its ``__dlpack__``.

    Raises:
        TypeError: The object is not a DLPack array.
        BufferError: The producer cannot export it, or the dtype or the device is not supported.
    """
    # not isinstance: the check of a runtime protocol costs as much as the rest of the import
    if not (hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")):
        raise TypeError(
            f"from_dlpack: expected an array with __dlpack__, got {type(array).__name__}"
        )
    copied = is_negated(array)
    if copied:
        if copy is False:
            raise BufferError(
                "from_dlpack: the memory holds the negated elements (torch's negative bit); copy=False forbids the "
                "required copy"
            )
        array = cast("Any", array).resolve_neg()
    try:
        imported = _import_capsule(array, copy)
    except (RuntimeError, NotImplementedError) as error:
        raise BufferError(
            f"from_dlpack: the {type(array).__name__} has no dense memory that can be shared; convert it to a dense "
            f"tensor first ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error
    imported.copied |= copied
    return imported


def is_negated(array: object) -> bool:
    """Whether memory holds the negated elements of a tensor of torch, which exports it all the same."""
    is_neg: Any = getattr(array, "is_neg", None)
    return is_neg is not None and bool(is_neg())


def _import_capsule(array: DLPackArray, copy: bool | None) -> Imported:
    device_type = array.__dlpack_device__()[0]
    if device_type not in HOST_DEVICES:
        raise BufferError(
            f"from_dlpack: the array is on DLPack device type {int(device_type)}, which the host "
            "does not read; move it to the CPU first"
        )
    # the producer must obey copy=False; for copy=True the caller copies
    producer: Any = array
    copy_argument: dict[str, Any] = {} if copy is not False else {"copy": False}
    try:
        capsule: object = producer.__dlpack__(max_version=(_KNOWN_MAJOR, 1), **copy_argument)
    except TypeError:
        # a producer of DLPack before 1.0, which never copies
        capsule = producer.__dlpack__()
    return Imported(capsule)


def export_array(
    array: np.ndarray[Any, Any], dtype: DType, max_version: tuple[int, int] | None
) -> Any:
    """Exports a host array, which the capsule keeps alive.

    Args:
        array: The memory, in the NumPy dtype of ``dtype``.
        dtype: The element type that the capsule names.
        max_version: The newest DLPack version that the consumer understands.

    Raises:
        BufferError: The consumer's DLPack version cannot express a read-only array, or a dtype
            below a byte.
    """
    versioned = max_version is not None and max_version[0] >= 1
    padded = dtype.size_in_bits < 8
    if not versioned and (padded or not array.flags.writeable):
        kind = f"a {dtype.name} tensor" if padded else "a read-only tensor"
        raise BufferError(f"DLPack: {kind} needs a consumer of version 1.0; copy or view it first")
    # NumPy exports its own dtypes only: others go as unsigned integers, and are corrected below
    if not array.dtype.isbuiltin == 1:
        array = array.view(f"u{array.dtype.itemsize}")
    capsule = array.__dlpack__(max_version=max_version) if versioned else array.__dlpack__()
    managed, _ = _structure(capsule)
    managed.tensor.dtype = _DataType(_code(dtype), dtype.size_in_bits, 1)
    if padded:
        managed.flags |= SUBBYTE_PADDED
    return capsule
