"""The elements of tensors in ONNX models: in the file, without a copy, or in a file beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from max.importers.errors import ModelFileError, Unsupported
from max.importers.onnx.element_types import STORAGE, TEXT, dtype_of, numpy_of

if TYPE_CHECKING:
    import onnx

__all__ = ["array_of"]

Array = npt.NDArray[Any]

_LARGEST_RANK = 64
_INT32 = {2, 3, 4, 5, 9, 17, 18, 19, 20, 24}
"""Types of up to 16 bits, one in each element of `int32_data`; those with 16 bits of a float have bits there."""
_HALVES = {10, 16}  # float16 and bfloat16
_WIDE = {
    1: "float_data",
    6: "int32_data",
    7: "int64_data",
    11: "double_data",
    12: "uint64_data",
    13: "uint64_data",
}
_PACKED = {21: 4, 22: 4, 23: 4, 25: 2, 26: 2}
"""Bits of elements that share bytes, the first in the lowest bits."""


def array_of(
    proto: onnx.TensorProto,
    folder: Path | None,
    file: str,
    large: Mapping[str, Array] | None = None,
) -> Array:
    """The elements of a tensor. Strings are an array of objects; integers of less than 8 bits one of 8 bits.

    Args:
        proto: The tensor.
        folder: The folder that may have external data; None: none has.
        file: The path of the model, for messages.
        large: Bytes of tensors that were read before, by their locations.

    Raises:
        ModelFileError: The tensor is damaged, or its data lies elsewhere.
    """
    shape = tuple(proto.dims)
    where = f"{file}: the tensor {proto.name!r}"
    if len(shape) > _LARGEST_RANK or any(size < 0 for size in shape):
        raise ModelFileError(f"{where} has the shape {list(shape)[:_LARGEST_RANK]}")
    count = math.prod(shape)
    code = proto.data_type
    if code == TEXT:
        strings = [data.decode("utf-8", errors="surrogateescape") for data in proto.string_data]
        array = np.empty(len(strings), object)
        array[:] = strings
    else:
        try:
            array = _numbers(proto, count, code, folder, file, large or {})
        except Unsupported as error:
            raise ModelFileError(f"{where} {error}") from error
    if array.size != count:
        raise ModelFileError(f"{where} has {array.size} elements for the shape {list(shape)}")
    return array.reshape(shape)


def _numbers(
    proto: onnx.TensorProto,
    count: int,
    code: int,
    folder: Path | None,
    file: str,
    large: Mapping[str, Array],
) -> Array:
    dtype = dtype_of(code).to_numpy()
    if proto.data_location == type(proto).EXTERNAL:
        # an initializer that `read_file` took out of the message
        if large and len(proto.external_data) == 1:
            data = large.get(proto.external_data[0].value)
            if data is not None:
                return _elements(data, count, code)
        bits = _PACKED.get(code, dtype.itemsize * 8)
        return _elements(_external(proto, folder, file, -(-count * bits // 8)), count, code)
    if proto.HasField("raw_data"):
        return _elements(np.frombuffer(proto.raw_data, np.uint8), count, code)
    if code in _PACKED:
        # one byte in each integer
        packed = np.array(proto.int32_data, np.int64).astype(np.uint8)
        return _elements(packed, count, code)
    if code in _HALVES:
        # the integers are the bits of the floats
        return np.array(proto.int32_data, np.int64).astype(np.uint16).view(dtype)
    if code in _INT32:
        values = np.array(proto.int32_data, np.int64)
        # codes from 17 on are floats of 8 bits, whose bits these are
        return values.astype(np.uint8).view(dtype) if code >= 17 else values.astype(dtype)
    return np.array(getattr(proto, _WIDE[code]), dtype)


def _elements(data: npt.NDArray[np.uint8], count: int, code: int) -> Array:
    """The elements in bytes as files have them: little-endian."""
    if (bits := _PACKED.get(code)) is not None:
        return _unpack_bits(data, count, code, bits)
    dtype = dtype_of(code).to_numpy()
    if data.size != count * dtype.itemsize:
        raise Unsupported(f"has {data.size} bytes, expected {count * dtype.itemsize}")
    if dtype == np.bool_:
        return data != 0
    return data.view(dtype)


def _unpack_bits(data: npt.NDArray[np.uint8], count: int, code: int, bits: int) -> Array:
    per_byte = 8 // bits
    if data.size != -(-count // per_byte):
        raise Unsupported(f"has {data.size} bytes, expected {-(-count // per_byte)}")
    shifts = np.arange(per_byte, dtype=np.uint8) * bits
    values = ((data[:, None] >> shifts) & ((1 << bits) - 1)).reshape(-1)[:count]  # one row per byte
    if code == 23:
        return values.view(ml_dtypes.float4_e2m1fn)
    narrow = numpy_of(STORAGE[code][0])
    if STORAGE[code][0].startswith("u"):
        return values.astype(narrow)
    signed = values.astype(np.int8)
    # the upper half of the range has the negative numbers
    return np.where(signed >= 1 << (bits - 1), signed - (1 << bits), signed).astype(narrow)


def _external(
    proto: onnx.TensorProto, folder: Path | None, file: str, expected: int
) -> npt.NDArray[np.uint8]:
    """Maps the bytes of a tensor in a file of the model's folder."""
    where = f"{file}: the tensor {proto.name!r}"
    entries = {entry.key: entry.value for entry in proto.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise ModelFileError(
            f"{where} has its data in the file {location!r}; give the path of the model to find it"
        )
    path = _inside(folder, location, where)
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", expected))
    except ValueError as error:
        raise ModelFileError(f"{where}: offset or length is no number") from error
    size = path.stat().st_size
    if offset < 0 or length != expected or offset + length > size:
        raise ModelFileError(
            f"{where} has bytes {offset} to {offset + length} of {location!r}, a file of {size} bytes; "
            f"it needs {expected}"
        )
    if length == 0:
        # nothing cannot be mapped
        return np.zeros(0, np.uint8)
    mapped = np.memmap(path, np.uint8, "r", offset, (length,))
    return np.asarray(mapped)


def _inside(folder: Path, location: str, where: str) -> Path:
    """The file of external data, which must lie in the model's folder.

    Raises:
        ModelFileError: It lies elsewhere, or is no file.
    """
    if not location or Path(location).is_absolute() or "\0" in location:
        raise ModelFileError(
            f"{where} has its data in {location!r}, which is no path in the model's folder"
        )
    path = (folder / location).resolve()
    # the resolved path: a link must not lead outside
    if not path.is_relative_to(folder.resolve()):
        raise ModelFileError(f"{where} has its data in {location!r}, outside of the model's folder")
    if not path.is_file():
        raise ModelFileError(f"{where} has its data in {location!r}, which is no file")
    return path
