"""Files of one tensor, as the style ``BINARY_MAX_CHECKPOINT`` of printed tensors writes them.

::

    magic      8 bytes
    version    u32 0, u32 1
    size       u64: bytes of the part until the elements
    label      u32 length, UTF-8
    dtype      u8, the value of the DType
    rank       u8
    sizes      u32 each
    offset     u64: where the elements begin in the file
    elements   row-major

All numbers are little-endian.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from max.driver._tensor import Tensor
from max.dtype import DType

__all__ = ["checkpoint_bytes", "load_max_buffer"]

_MAGIC = b"\x93\xf0\x9f\x94\xa5++\x93"
_VERSION = (0, 1)
_HEAD = struct.Struct("<8sIIQ")


def checkpoint_bytes(label: str, array: npt.NDArray[Any]) -> bytes:
    """The content of a file.

    Args:
        label: The name of the tensor.
        array: Its elements.
    """
    name = label.encode()
    dtype = DType.from_numpy(array.dtype)
    size = 4 + len(name) + 2 + 4 * array.ndim + 8  # label, dtype and rank, sizes, offset
    head = _HEAD.pack(_MAGIC, *_VERSION, size) + struct.pack("<I", len(name)) + name
    shape = struct.pack(f"<BB{array.ndim}I", dtype.value, array.ndim, *array.shape)
    return head + shape + struct.pack("<Q", _HEAD.size + size) + array.tobytes()


def load_max_buffer(path: os.PathLike[str] | str) -> Tensor:
    """Reads a tensor that a model wrote: `ops.print` with the style ``BINARY_MAX_CHECKPOINT``.

    Args:
        path: The file.

    Returns:
        A tensor on the CPU, with the dtype and the shape that the file states.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not such a file, or it is damaged.
    """
    file = Path(path)
    with file.open("rb") as stream:
        present = os.fstat(stream.fileno()).st_size
        head = stream.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            raise ValueError(
                f"load_max_buffer: {file} is not a MAX checkpoint; the style BINARY writes plain elements, which "
                "numpy.fromfile and Tensor.mmap read"
            )
        _, major, minor, size = _HEAD.unpack(head)
        if (major, minor) != _VERSION:
            raise ValueError(f"load_max_buffer: {file} has version {major}.{minor}, expected 0.1")
        try:
            # a damaged size must not ask for more memory than the file has bytes
            dtype, shape, offset = _parse_header(stream.read(min(size, present)))
        except (struct.error, ValueError) as error:
            raise ValueError(f"load_max_buffer: {file} is damaged: {error}") from error
        count = math.prod(shape)
        if offset > present or count * dtype.size_in_bytes > present - offset:
            raise ValueError(
                f"load_max_buffer: {file} has {present} bytes; {dtype.name} {list(shape)} at offset {offset} needs "
                f"{offset + count * dtype.size_in_bytes}"
            )
        stream.seek(offset)
        elements = np.fromfile(stream, np.uint8, count * dtype.size_in_bytes)
    if not count:
        return Tensor.zeros(shape, dtype)
    return Tensor.from_numpy(elements.view(dtype.to_numpy()).reshape(shape))


def _parse_header(text: bytes) -> tuple[DType, tuple[int, ...], int]:
    """Dtype, shape and offset of the elements."""
    (length,) = struct.unpack_from("<I", text)
    code, rank = struct.unpack_from("<BB", text, 4 + length)
    shape = struct.unpack_from(f"<{rank}I", text, 6 + length)
    (offset,) = struct.unpack_from("<Q", text, 6 + length + 4 * rank)
    return DType(code), shape, offset


load_max_tensor = load_max_buffer
"""`load_max_buffer`, by the name that a tensor has in `max.driver`."""
