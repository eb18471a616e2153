"""Reads an ONNX file without a second copy of its weights.

A parser of protobuf holds the bytes of the file and of the message at once, and each use of a message's bytes is a copy
again. Here the large initializers are arrays of the mapped file; the message says in their place where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["MARK", "read_file"]

Bytes = npt.NDArray[np.uint8]
Place = tuple[int, int]
"""The first byte in the file, and the number of bytes."""

MARK = "\0array "
"""Begins the location of an initializer's data in `read_file`'s arrays; no path has a zero byte."""

_LARGE = 4096
_MAPPED = 1 << 16
"""The least bytes that are mapped: what is read in each run, such as a bias, is seldom as large."""
# numbers of fields in onnx.proto
_GRAPH, _INITIALIZER, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 7, 5, 9, 13, 14
_SIZES = {1: 8, 5: 4}
"""The bytes of values of fixed size, by wire type."""


class _Irregular(Exception):
    """The file is no message that is read here; the parser of the package finds out what is wrong with it."""


def read_file(path: Path) -> tuple[bytes, dict[str, Bytes]]:
    """The message of a file without large initializers, and their bytes by the location that the message has for them.

    Most are mapped, and may begin at any address.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        try:
            places: dict[str, Place | Bytes] = {}
            size = file.seek(0, 2)
            file.seek(0)
            data = b"".join(_model(file, size, places))
            if not places:
                return data, {}
            mapped = np.asarray(np.memmap(file, np.uint8, "r"))
            return data, {
                name: mapped[place[0] : place[0] + place[1]] if isinstance(place, tuple) else place
                for name, place in places.items()
            }
        except _Irregular:
            file.seek(0)
            return file.read(), {}


def _model(file: BufferedReader, end: int, places: dict[str, Place | Bytes]) -> Iterator[bytes]:
    for field, wire in _fields(file, end):
        if field == _GRAPH and wire == 2:
            length = _length(file, end)
            # the graph is shorter without the data, so its length is written anew
            yield _message(field, b"".join(_graph(file, file.tell() + length, places)))
        else:
            yield _copy_field(file, end, field, wire)


def _graph(file: BufferedReader, end: int, places: dict[str, Place | Bytes]) -> Iterator[bytes]:
    for field, wire in _fields(file, end):
        if field == _INITIALIZER and wire == 2:
            length = _length(file, end)
            yield _message(field, b"".join(_tensor(file, file.tell() + length, places)))
        else:
            yield _copy_field(file, end, field, wire)


def _tensor(file: BufferedReader, end: int, places: dict[str, Place | Bytes]) -> Iterator[bytes]:
    place: Place | Bytes | None = None
    for field, wire in _fields(file, end):
        # the tensor would have two places for its data
        if field in (_EXTERNAL_DATA, _DATA_LOCATION) and place is not None:
            raise _Irregular
        if field != _RAW_DATA or wire != 2:
            yield _copy_field(file, end, field, wire)
            continue
        length = _length(file, end)
        if place is not None:
            raise _Irregular
        if length < _LARGE:
            yield _message(field, _read(file, length))
            continue
        if length < _MAPPED:
            place = np.frombuffer(bytearray(_read(file, length)), np.uint8)
        else:
            place = file.tell(), length
            file.seek(length, 1)
    if place is not None:
        location = f"{MARK}{len(places)}"
        places[location] = place
        entry = _message(1, b"location") + _message(2, location.encode())
        yield _message(_EXTERNAL_DATA, entry) + _varint(_DATA_LOCATION << 3) + b"\x01"


def _fields(file: BufferedReader, end: int) -> Iterator[tuple[int, int]]:
    """The numbers and wire types of a message's fields; the caller reads each value."""
    while file.tell() < end:
        key = _number(file, end)
        yield key >> 3, key & 7
    # a value ran over the end of its message
    if file.tell() != end:
        raise _Irregular


def _copy_field(file: BufferedReader, end: int, field: int, wire: int) -> bytes:
    """A field as it is."""
    if wire == 0:
        return _varint(field << 3) + _varint(_number(file, end))
    if wire == 2:
        return _message(field, _read(file, _length(file, end)))
    if wire not in _SIZES or file.tell() + _SIZES[wire] > end:
        raise _Irregular
    return _varint(field << 3 | wire) + _read(file, _SIZES[wire])


def _length(file: BufferedReader, end: int) -> int:
    """The length of a value, which ends within the message."""
    length = _number(file, end)
    if length > end - file.tell():
        raise _Irregular
    return length


def _number(file: BufferedReader, end: int) -> int:
    """A number of up to ten bytes, of seven bits each."""
    value = shift = 0
    while shift < 70 and file.tell() < end:
        (byte,) = _read(file, 1)
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value
        shift += 7
    raise _Irregular


def _read(file: BufferedReader, length: int) -> bytes:
    data = file.read(length)
    if len(data) != length:
        raise _Irregular
    return data


def _message(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
