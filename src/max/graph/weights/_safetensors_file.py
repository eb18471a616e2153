"""A reader and writer of safetensors files: validates the header, and maps the tensors without copying.

Layout: 8 bytes with the header's length, a JSON header with dtype, shape and offsets of each tensor, then the data,
without gaps or overlaps. Every size and offset is checked against the file's size before memory is allocated or mapped.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max.driver import Tensor
from max.dtype import DType

_LENGTH_BYTES = 8
# the limit of the reference implementation
_MAX_HEADER_BYTES = 100_000_000
_MAX_RANK = 64

# name in the file -> bits of an element, and the DType of that layout if there is one
_TYPES: dict[str, tuple[int, DType | None]] = {
    "BOOL": (8, DType.bool),
    "U8": (8, DType.uint8),
    "I8": (8, DType.int8),
    "U16": (16, DType.uint16),
    "I16": (16, DType.int16),
    "U32": (32, DType.uint32),
    "I32": (32, DType.int32),
    "U64": (64, DType.uint64),
    "I64": (64, DType.int64),
    "F8_E4M3": (8, DType.float8_e4m3fn),
    "F8_E4M3FNUZ": (8, DType.float8_e4m3fnuz),
    "F8_E5M2": (8, DType.float8_e5m2),
    "F8_E5M2FNUZ": (8, DType.float8_e5m2fnuz),
    "F8_E8M0": (8, DType.float8_e8m0fnu),
    "F16": (16, DType.float16),
    "BF16": (16, DType.bfloat16),
    "F32": (32, DType.float32),
    "F64": (64, DType.float64),
    # packed, or without a DType: such tensors are listed, but cannot be read
    "F4": (4, None),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "C64": (64, None),
}

STORED_NAMES = {dtype: name for name, (_, dtype) in _TYPES.items() if dtype is not None}
"""The name in the file of each supported dtype."""


class WeightsFileError(ValueError):
    """A weight file is damaged or inconsistent."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        type_name: The safetensors name of the element type.
        shape: The shape.
        begin: The offset of the data from the start of the file in bytes.
        nbytes: The size of the data in bytes.
    """

    type_name: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    @property
    def dtype(self) -> DType | None:
        """The DType of the elements; None if no DType has their layout."""
        return _TYPES[self.type_name][1]


class SafetensorsFile:
    """An open safetensors file.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: The file does not exist.
        WeightsFileError: The file is truncated, inconsistent, or not a safetensors file; the message names the file,
            the tensor and the fault.
    """

    def __init__(self, path: os.PathLike[str] | str) -> None:
        self.path = os.fspath(path)
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = self._header_bytes(file.read(_LENGTH_BYTES), size)
            text = file.read(header)
            if len(text) != header:
                raise self._error(f"the header has {len(text)} of its {header} bytes")
            self.entries, self.metadata = self._parse(text, size - _LENGTH_BYTES - header)
            self._mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(self._mapping, np.uint8)

    def read(self, name: str) -> Tensor:
        """Maps a tensor, read-only. It is copied only if its offset is not aligned to its dtype.

        Raises:
            KeyError: There is no such tensor.
            WeightsFileError: No DType has the layout of its elements, or the file was truncated after it was opened.
        """
        entry = self.entries[name]
        if entry.dtype is None:
            raise self._error(f"elements of type {entry.type_name} cannot be read", name)
        # access to a mapping beyond the file's end is SIGBUS
        size = self._mapping.size()
        if size < entry.begin + entry.nbytes:
            raise self._error(f"the file was cut to {size} bytes after it was opened", name)
        data = self._bytes[entry.begin : entry.begin + entry.nbytes]
        return Tensor.from_numpy(data.view(entry.dtype.to_numpy()).reshape(entry.shape))

    def _error(self, problem: str, tensor: str | None = None) -> WeightsFileError:
        where = self.path if tensor is None else f"{self.path}: tensor {tensor!r}"
        return WeightsFileError(f"{where}: {problem}")

    def _header_bytes(self, prefix: bytes, size: int) -> int:
        if len(prefix) < _LENGTH_BYTES:
            raise self._error(f"not a safetensors file: it has {size} bytes")
        length = int.from_bytes(prefix, "little")
        if length > size - _LENGTH_BYTES or length > _MAX_HEADER_BYTES:
            raise self._error(
                f"the header claims {length} bytes, the file has {size}: it is truncated, or not "
                "a safetensors file"
            )
        return length

    def _parse(self, text: bytes, available: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
        try:
            # pairs instead of dicts at each level, so that duplicate names are detected
            header = json.loads(text.decode("utf-8"), object_pairs_hook=_Pairs)
        except (ValueError, RecursionError) as error:
            raise self._error(f"the header is not JSON: {error}") from error
        if not isinstance(header, _Pairs) or not text.startswith(b"{"):
            raise self._error("the header is not a JSON object")
        entries: dict[str, TensorEntry] = {}
        metadata: dict[str, str] = {}
        seen: set[str] = set()
        for name, value in header:
            if name in seen:
                raise self._error("the header names it twice", name)
            seen.add(name)
            if name == "__metadata__":
                metadata = self._metadata(value)
            else:
                entries[name] = self._entry(name, value, available)
        self._check_places(entries, available, _LENGTH_BYTES + len(text))
        return {
            name: TensorEntry(e.type_name, e.shape, e.begin + _LENGTH_BYTES + len(text), e.nbytes)
            for name, e in entries.items()
        }, metadata

    def _metadata(self, value: Any) -> dict[str, str]:
        if not isinstance(value, _Pairs) or not all(isinstance(v, str) for _, v in value):
            raise self._error("__metadata__ is not a map of texts")
        return dict(value)

    def _entry(self, name: str, value: Any, available: int) -> TensorEntry:
        if not isinstance(value, _Pairs):
            raise self._error("its header entry is not an object", name)
        fields = dict(value)
        if sorted(key for key, _ in value) != ["data_offsets", "dtype", "shape"]:
            keys = ", ".join(key for key, _ in value)
            raise self._error(f"expected dtype, shape and data_offsets, found {keys}", name)
        stored = fields["dtype"]
        if not isinstance(stored, str) or stored not in _TYPES:
            raise self._error(f"unknown dtype {stored!r}; known are {', '.join(_TYPES)}", name)
        shape = self._integers(name, "shape", fields["shape"])
        offsets = self._integers(name, "data_offsets", fields["data_offsets"])
        if len(shape) > _MAX_RANK:
            raise self._error(f"rank {len(shape)} is above {_MAX_RANK}", name)
        # a dimension of 0 must not hide other dimensions that are too large
        if math.prod(size or 1 for size in shape) >= 2**59:
            raise self._error(f"shape {list(shape)} is too large for any array", name)
        if len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._error(f"data_offsets {list(offsets)} is not [begin, end]", name)
        begin, end = offsets
        if end > available:
            raise self._error(
                f"its data ends at byte {end}, the file has {available} bytes of data: it is "
                "truncated",
                name,
            )
        bits = math.prod(shape) * _TYPES[stored][0]
        if bits != 8 * (end - begin):
            raise self._error(
                f"{stored} {list(shape)} needs {bits / 8:.15g} bytes, data_offsets give "
                f"{end - begin}",
                name,
            )
        return TensorEntry(stored, shape, begin, end - begin)

    def _integers(self, name: str, field: str, value: Any) -> tuple[int, ...]:
        text = str(value)[:80]
        sizes = cast("list[Any]", value) if isinstance(value, list) else None
        if sizes is None or not all(type(v) is int and 0 <= v < 2**63 for v in sizes):
            raise self._error(f"{field} is not a list of sizes: {text}", name)
        return tuple(sizes)

    def _check_places(
        self, entries: dict[str, TensorEntry], available: int, data_start: int
    ) -> None:
        """Checks that each byte of data belongs to exactly one tensor."""
        place, before = 0, None
        for name, entry in sorted(
            entries.items(), key=lambda item: (item[1].begin, item[1].nbytes)
        ):
            if entry.begin < place:
                raise self._error(f"its data overlaps that of tensor {before!r}", name)
            if entry.begin > place:
                raise self._error(
                    f"{entry.begin - place} bytes before its data belong to no tensor", name
                )
            place, before = entry.begin + entry.nbytes, name
        if place != available:
            raise self._error(
                f"{available - place} bytes after the last tensor belong to none; the header and "
                f"the data, from byte {data_start} on, do not belong together"
            )


def write_safetensors(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Writes a safetensors file; an existing file is replaced atomically.

    Args:
        path: The file.
        arrays: The tensors by name, C-contiguous. They are stored by decreasing element size, so that all are aligned.

    Raises:
        ValueError: The format cannot hold the dtype of a tensor.
    """
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header: dict[str, dict[str, Any]] = {}
    place = 0
    for name in order:
        array = arrays[name]
        dtype = DType.from_numpy(array.dtype)
        if dtype not in STORED_NAMES:
            raise ValueError(
                f"{path.name}: {name!r} is of {dtype}, which no safetensors file holds"
            )
        end = place + array.nbytes
        entry = {"dtype": STORED_NAMES[dtype], "shape": list(array.shape)}
        header[name] = {**entry, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    # spaces may follow the JSON: with them the data begins at a multiple of 8
    text += b" " * (-len(text) % 8)
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(aside, "wb") as file:
            file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
            for name in order:
                file.write(arrays[name].reshape(-1).view(np.uint8).data)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as a list of pairs; a separate class, to distinguish it from a JSON list."""
