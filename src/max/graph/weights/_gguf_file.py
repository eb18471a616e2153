"""A reader of GGUF files: validates metadata and tensor list, and maps the tensors without copying.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian: ``GGUF``, the version, the numbers of
tensors and of metadata values; key and value of each; name, sizes (innermost first), type and offset of each tensor;
padding; the data. Every count and offset is checked against the file's size before memory is allocated or mapped.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max.dtype import DType
from max.dtype.blocks import BLOCK_FORMATS
from max.dtype.file_blocks import FILE_FORMATS
from max.graph.weights._gguf_parts import gguf_parts
from max.graph.weights._safetensors_file import WeightsFileError

__all__ = ["BLOCK_TYPES", "GGUF_TYPE_NUMBERS", "PLAIN_TYPES", "GGUFFile", "GGUFTensor", "open_gguf"]

_VERSIONS = (2, 3)
_MAX_RANK = 8
_DEFAULT_ALIGNMENT = 32
_MAX_NESTING = 4

PLAIN_TYPES = {
    "F16": DType.float16,
    "BF16": DType.bfloat16,
    "F32": DType.float32,
    "F64": DType.float64,
    "I8": DType.int8,
    "I16": DType.int16,
    "I32": DType.int32,
    "I64": DType.int64,
}
"""Types without blocks, whose elements are stored individually."""

BLOCK_TYPES = {**BLOCK_FORMATS, **{name: form.block for name, form in FILE_FORMATS.items()}}
"""The types whose elements are stored in blocks."""

# type numbers of tensors; Q8_1, ggml's type of activations, does not occur in files
_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

GGUF_TYPE_NUMBERS = {name: number for number, name in _TYPES.items()}
"""The type numbers, by name."""

# type numbers of metadata values, and their `struct` codes
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a file.

    Args:
        name: The name.
        type_name: The GGUF name of the type.
        shape: The shape in elements, innermost last.
        begin: The offset of the data from the start of the file in bytes.
        nbytes: The size of the data in bytes; None for unsupported types.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int | None


class _Cursor:
    """Reads consecutive values with bounds checks."""

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self.data, self.path, self.at = data, path, 0

    def fail(self, why: str) -> WeightsFileError:
        return WeightsFileError(f"{self.path}: not a whole GGUF file: {why}")

    def skip(self, count: int) -> int:
        start = self.at
        if count > len(self.data) - start:
            raise self.fail(f"{count} bytes should follow at byte {start} of {len(self.data)}")
        self.at = start + count
        return start

    def scalar(self, code: str) -> Any:
        start = self.skip(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self.data, start)[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.skip(length)
        # tokens of a vocabulary may be incomplete UTF-8 sequences
        return self.data[start : start + length].decode("utf-8", "surrogateescape")

    def value(self, value_type: int, depth: int = 0) -> Any:
        if value_type in _SCALARS:
            return self.scalar(_SCALARS[value_type])
        if value_type == _STRING:
            return self.string()
        if value_type != _ARRAY:
            raise self.fail(f"a metadata value has the unknown type {value_type}")
        if depth == _MAX_NESTING:
            raise self.fail("metadata arrays are nested too deeply")
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            code = "<" + _SCALARS[inner]
            start = self.skip(count * struct.calcsize(code))
            return np.frombuffer(self.data, np.dtype(code), count, start)
        if count > len(self.data) - self.at:
            raise self.fail(f"an array of {count} values should follow at byte {self.at}")
        if inner == _STRING:
            return self.strings(count)
        return [self.value(inner, depth + 1) for _ in range(count)]

    def strings(self, count: int) -> list[str]:
        """Reads an array of strings in one tight loop, because a vocabulary has more than 100,000."""
        data, at, first = self.data, self.at, self.at
        texts: list[bytes] = []
        try:
            for _ in range(count):
                at += 8
                end = at + _LENGTH.unpack_from(data, at - 8)[0]
                texts.append(data[at:end])
                at = end
        except (struct.error, OverflowError):
            at = len(data) + 1
        # slicing beyond the end raises no error: check the position instead
        if at > len(data):
            raise self.fail(f"an array of {count} texts should follow at byte {first}")
        self.at = at
        # decoding one joined text takes a third of the time; tokens may be incomplete UTF-8 sequences
        decoded = b"\0".join(texts).decode("utf-8", "surrogateescape").split("\0")
        if len(decoded) != count:  # a text contains a zero byte, or the array is empty
            return [text.decode("utf-8", "surrogateescape") for text in texts]
        return decoded


class GGUFFile:
    """A GGUF file, mapped into memory; the first part of one in parts has the tensors of all.

    Args:
        path: The file.
        whole: Whether to open the other parts with it.

    Raises:
        WeightsFileError: The file is damaged, of another version, or not a GGUF file; or a part is missing.
    """

    metadata: dict[str, Any]
    """Metadata by key; arrays of numbers are NumPy arrays, other arrays are lists."""
    tensors: dict[str, GGUFTensor]
    """The tensors by name."""

    def __init__(self, path: os.PathLike[str] | str, whole: bool = True) -> None:
        self.path = os.fspath(path)
        # the magic, the version and two counts
        if os.stat(path).st_size < 24:
            raise WeightsFileError(f"{self.path}: not a GGUF file: it is too short")
        with open(path, "rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._data, self.path)
        if self._data[:4] != b"GGUF":
            raise WeightsFileError(f"{self.path}: not a GGUF file: it does not begin with GGUF")
        cursor.skip(4)
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise WeightsFileError(
                f"{self.path}: GGUF version {version}, expected 2 or 3, little-endian"
            )
        tensors, values = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata, self._stored_values = {}, dict[str, tuple[int, int]]()
        # at least the length of the key, and the type of the value
        for _ in range(self._checked_count(cursor, values, 12)):
            key = cursor.string()
            if key in self.metadata:
                raise cursor.fail(f"the metadata has {key!r} twice")
            begin = cursor.at
            self.metadata[key] = cursor.value(cursor.scalar("I"))
            self._stored_values[key] = begin, cursor.at
        # at least the length of the name, rank, type and offset
        entries = [self._entry(cursor) for _ in range(self._checked_count(cursor, tensors, 24))]
        self.tensors = self._placed_tensors(cursor, entries)
        self._holders: dict[str, GGUFFile] = {}  # of the tensors in other parts
        names = gguf_parts(self.path)
        if whole and len(names) > 1 and self._part_count() > 1:
            self._add_parts(names, cursor)

    @property
    def stored_metadata(self) -> dict[str, bytes]:
        """The bytes of the type and the value of each metadata key."""
        return {key: self._data[begin:end] for key, (begin, end) in self._stored_values.items()}

    def _part_count(self) -> int:
        count = self.metadata.get("split.count", 1)
        return count if isinstance(count, int) else 1

    def _add_parts(self, names: list[str], cursor: _Cursor) -> None:
        """Adds the tensors of the other parts."""
        if self._part_count() != len(names):
            raise cursor.fail(
                f"the file is one of {self._part_count()} parts, and its name says {len(names)}"
            )
        for number, name in enumerate(names):
            if not os.path.isfile(name):
                raise WeightsFileError(
                    f"{self.path}: part {number + 1} of {len(names)} is missing: put {os.path.basename(name)} beside it"
                )
            part = self if name == self.path else GGUFFile(name, whole=False)
            if part.metadata.get("split.no", number) != number or part._part_count() != len(names):
                raise WeightsFileError(f"{name}: not part {number + 1} of {len(names)} of {self.path}")  # fmt: skip
            if part is self:
                continue
            if both := sorted(self.tensors.keys() & part.tensors.keys()):
                raise WeightsFileError(f"{name}: the tensor {both[0]!r} is in another part too")
            self.tensors.update(part.tensors)
            self._holders.update(dict.fromkeys(part.tensors, part))
        total = self.metadata.get("split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise WeightsFileError(
                f"{self.path}: the parts have {len(self.tensors)} tensors, expected {total}"
            )

    @staticmethod
    def _checked_count(cursor: _Cursor, count: int, least: int) -> int:
        """Checks that `count` entries of at least `least` bytes fit the rest of the file."""
        if count * least > len(cursor.data) - cursor.at:
            raise cursor.fail(f"{count} entries should follow at byte {cursor.at}")
        return count

    @staticmethod
    def _entry(cursor: _Cursor) -> GGUFTensor:
        name = cursor.string()
        rank = cursor.scalar("I")
        if rank > _MAX_RANK:
            raise cursor.fail(f"tensor {name!r} has rank {rank}")
        # the file has the innermost size first
        shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
        # a size of 0 must not hide others that are too large
        if math.prod(size or 1 for size in shape) >= 2**59:
            raise cursor.fail(f"tensor {name!r}: shape {list(shape)} is too large for any array")
        number, begin = cursor.scalar("I"), cursor.scalar("Q")
        stored = _TYPES.get(number, f"type {number}")
        elements, size = 1, 0
        if stored in PLAIN_TYPES:
            size = PLAIN_TYPES[stored].size_in_bytes
        elif stored in BLOCK_TYPES:
            elements, size = BLOCK_TYPES[stored]
            if not shape or shape[-1] % elements:
                raise cursor.fail(
                    f"tensor {name!r} {list(shape)}: rows of {stored} are multiples of {elements}"
                )
        nbytes = math.prod(shape) // elements * size if size else None
        return GGUFTensor(name, stored, shape, begin, nbytes)

    def _placed_tensors(self, cursor: _Cursor, entries: list[GGUFTensor]) -> dict[str, GGUFTensor]:
        """Computes absolute offsets; checks that tensors are aligned, inside the file, and do not overlap."""
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
            raise cursor.fail(f"general.alignment is {alignment!r}, expected a multiple of 8")
        start = -(-cursor.at // alignment) * alignment
        placed: dict[str, GGUFTensor] = {}
        end, before = start, ""
        for entry in sorted(entries, key=lambda e: e.begin):
            begin = start + entry.begin
            last = begin + (entry.nbytes or 0)
            if entry.name in placed:
                raise cursor.fail(f"there are two tensors {entry.name!r}")
            if entry.begin % alignment or last > len(self._data):
                raise cursor.fail(
                    f"tensor {entry.name!r} is at bytes {begin} to {last} of {len(self._data)}, aligned to {alignment}"
                )
            if entry.nbytes and begin < end:
                raise cursor.fail(f"the tensors {before!r} and {entry.name!r} overlap")
            if entry.nbytes:
                end, before = last, entry.name
            placed[entry.name] = GGUFTensor(
                entry.name, entry.type_name, entry.shape, begin, entry.nbytes
            )
        # in the order of the tensor list, not of the offsets
        return {entry.name: placed[entry.name] for entry in entries}

    def read(self, tensor: GGUFTensor) -> npt.NDArray[Any]:
        """Maps the data of a tensor, read-only: its elements, or uint8 rows of encoded blocks.

        Args:
            tensor: One of `tensors`, of a supported type.

        Raises:
            WeightsFileError: The type is not supported, or the file was truncated after it was opened.
        """
        if (holder := self._holders.get(tensor.name)) is not None:
            return holder.read(tensor)
        if tensor.nbytes is None:
            supported_types = ", ".join((*BLOCK_TYPES, *PLAIN_TYPES))
            raise WeightsFileError(
                f"weight {tensor.name!r}: GGUF type {tensor.type_name} is not known; expected one of {supported_types}"
            )
        # access to a mapping beyond the file's end is SIGBUS
        size = self._data.size()
        if size < tensor.begin + tensor.nbytes:
            raise WeightsFileError(
                f"{self.path}: the file was cut to {size} bytes after it was opened; weight {tensor.name!r} ends at "
                f"byte {tensor.begin + tensor.nbytes}"
            )
        if tensor.type_name in PLAIN_TYPES:
            dtype = PLAIN_TYPES[tensor.type_name].to_numpy()
            count = math.prod(tensor.shape)
            return np.frombuffer(self._data, dtype, count, tensor.begin).reshape(tensor.shape)
        form = BLOCK_TYPES[tensor.type_name]
        shape = (*tensor.shape[:-1], tensor.shape[-1] // form.elements * form.bytes)
        return np.frombuffer(self._data, np.uint8, tensor.nbytes, tensor.begin).reshape(shape)


_Identity = tuple[str, int, int, int, int]


class _OpenFiles:
    """The GGUF files that are open, of which the latest stays open."""

    def __init__(self) -> None:
        self._files: weakref.WeakValueDictionary[_Identity, GGUFFile] = (
            weakref.WeakValueDictionary()
        )
        self._latest: GGUFFile | None = None

    def open(self, path: os.PathLike[str] | str, keep: bool) -> GGUFFile:
        # the first part has the metadata
        first = gguf_parts(os.fspath(path))[0]
        if os.path.isfile(first):
            path = first
        stat = os.stat(path)
        # a file that changed is another one
        identity = (
            os.path.realpath(path), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
        )  # fmt: skip
        file = self._files.get(identity)
        if file is None:
            file = self._files[identity] = GGUFFile(path)
        self._latest = file if keep else None
        return file


_OPEN_FILES = _OpenFiles()


def open_gguf(path: os.PathLike[str] | str, keep: bool = True) -> GGUFFile:
    """Opens a GGUF file; an open file that has not changed is reused.

    Configuration, tokenizer and weights of a model are in one file, which is parsed once this way.

    Args:
        path: The file, or one of its parts.
        keep: Whether to keep the file open until another one is opened, even if the caller drops it.

    Raises:
        WeightsFileError: The file is damaged, of another version, or not a GGUF file.
    """
    return _OPEN_FILES.open(path, keep)
