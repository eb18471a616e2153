"""Writes GGUF files: metadata, tensor descriptions, and the tensor data.

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3, little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from max._load_steps import STEPS
from max.graph.weights import GGUF_TYPE_NUMBERS

__all__ = ["GGUFEntry", "write_gguf"]

_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 5, 6, 7, 8, 9, 10


class GGUFEntry(NamedTuple):
    """A tensor to write.

    Args:
        name: The name of the tensor.
        type_name: The GGUF name of its type, such as ``Q4_K``.
        shape: The shape in elements, outermost dimension first.
        nbytes: The bytes of its data.
        data: Returns the data; called when the tensor is written.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    nbytes: int
    data: Callable[[], npt.NDArray[Any]]


def write_gguf(path: Path, metadata: Mapping[str, object], entries: Sequence[GGUFEntry]) -> None:
    """Writes a file under a temporary name, and renames it when it is complete.

    Args:
        path: The file.
        metadata: The values by key: bool, int (uint32), float (float32), str, and lists of one of these (of ints:
            int32); or bytes of a type and a value as files have them.
        entries: The tensors.

    Raises:
        ValueError: The data of a tensor does not have the size of its entry.
        OSError: The file cannot be written.
    """
    head = [b"GGUF", struct.pack("<IQQ", 3, len(entries), len(metadata))]
    head += [_text(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for entry in entries:
        # files list the sizes from the last axis to the first
        sizes = struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *entry.shape[::-1])
        kind = struct.pack("<IQ", GGUF_TYPE_NUMBERS[entry.type_name], offset)
        head.append(_text(entry.name) + sizes + kind)
        offset += _aligned_size(entry.nbytes)
    temporary = path.with_name(f"{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(b"".join(head))
            file.write(bytes(_aligned_size(file.tell()) - file.tell()))
            for number, entry in enumerate(entries):
                STEPS.at("writing tensors", number, len(entries))
                data = np.ascontiguousarray(entry.data())
                if data.nbytes != entry.nbytes:
                    raise ValueError(
                        f"{entry.name}: {data.nbytes} bytes of data, expected {entry.nbytes}"
                    )
                file.write(data.view(np.uint8).data)
                file.write(bytes(_aligned_size(entry.nbytes) - entry.nbytes))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _aligned_size(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    """A metadata value as bytes: type, then contents."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, list):
        items: list[Any] = value
        if items and isinstance(items[0], str):
            return struct.pack("<IIQ", _ARRAY, _STRING, len(items)) + b"".join(map(_text, items))
        if items and isinstance(items[0], float):
            return struct.pack(f"<IIQ{len(items)}f", _ARRAY, _FLOAT32, len(items), *items)
        # an empty list states no type: integers will do
        return struct.pack(f"<IIQ{len(items)}i", _ARRAY, _INT32, len(items), *items)
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return (
            struct.pack("<II", _UINT32, value)
            if value < 2**32
            else struct.pack("<IQ", _UINT64, value)
        )
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    return struct.pack("<I", _STRING) + _text(value)
