"""A reader of the files that ``torch.save`` writes, without torch: checks every size, and maps the tensors.

Newer files are zip archives, whose entries are stored without compression: ``NAME/data.pkl`` describes the tensors, and
``NAME/data/KEY`` has the elements of a storage. Older files are pickles, one after the other, and then the storages.
`max.graph.weights._torch_pickle` interprets the pickles; no code of a file is executed.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
import zipfile
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from max.driver import Tensor
from max.dtype import DType
from max.graph.weights._safetensors_file import STORED_NAMES, TensorEntry, WeightsFileError
from max.graph.weights._torch_objects import PickleError, Storage, StoredTensor
from max.graph.weights._torch_pickle import Bytes, interpret

_MOST_PICKLE_BYTES = 64 * 2**20
_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
# signature, then at byte 26 the lengths of the name and of the extra field, which precede the data
_LOCAL_HEADER = struct.Struct("<4s22xHH")

DTYPES = {
    name: DType[name]
    for name in (
        *("float64", "float32", "float16", "bfloat16", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
"""The dtypes that can be read, by torch's names."""

_OTHER_SIZES = {"complex128": 16, "complex64": 8, "complex32": 4, "qint32": 4}
"""The bytes of an element of other dtypes than those of one byte."""


class _Place(NamedTuple):
    """Where a storage is in a file: the first byte, and the number of bytes."""

    begin: int
    nbytes: int


class TorchFile:
    """An open file of ``torch.save``.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: The file does not exist.
        WeightsFileError: The file is damaged, or contains other objects than tensors and plain containers; the message
            names the file, the tensor and the fault.
    """

    def __init__(self, path: os.PathLike[str] | str) -> None:
        self.path = os.fspath(path)
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                raise self._error("it is empty")
            self._mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            self._bytes = np.frombuffer(self._mapping, np.uint8)
            self._swapped = False
            try:
                if bytes(self._bytes[:4]) == b"PK\3\4":
                    value, self._places = self._open_archive(file)
                else:
                    value, self._places = self._open_pickles()
            except PickleError as error:
                raise self._error(f"cannot be read safely: {error}") from error
        self.tensors = self._state_dict(value)
        """The tensors by name."""

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """The tensors as a safetensors file would list them; those that cannot be read are of the type ``?``."""
        listed: dict[str, TensorEntry] = {}
        for name, tensor in self.tensors.items():
            dtype = DTYPES.get(tensor.dtype)
            stored = "?" if dtype is None else STORED_NAMES[dtype]
            nbytes = math.prod(tensor.shape) * _size_of(tensor.dtype)
            listed[name] = TensorEntry(stored, tensor.shape, 0, nbytes)
        return listed

    def dtype(self, name: str) -> DType:
        """The dtype of a tensor.

        Raises:
            KeyError: There is no such tensor.
            WeightsFileError: The tensor cannot be read.
        """
        tensor = self.tensors[name]
        if tensor.problem or tensor.dtype not in DTYPES:
            problem = tensor.problem or f"its elements are of type {tensor.dtype or 'unknown'}"
            raise self._error(f"{problem}, which cannot be read", name)
        return DTYPES[tensor.dtype]

    def read(self, name: str) -> Tensor:
        """Maps a tensor, read-only; it is copied if its elements are not contiguous, or not aligned to their dtype.

        Raises:
            KeyError: There is no such tensor.
            WeightsFileError: The tensor cannot be read, or does not fit its storage.
        """
        tensor, dtype = self.tensors[name], self.dtype(name)
        assert tensor.storage is not None
        place = self._place(tensor, name)
        if not math.prod(tensor.shape):
            return Tensor.from_numpy(np.empty(tensor.shape, dtype.to_numpy()))
        # as integers: numpy can neither swap nor stride elements of the dtypes of ml_dtypes
        elements = self._range(place).view(f"u{dtype.size_in_bytes}")
        if self._swapped and dtype.size_in_bytes > 1:
            elements = elements.byteswap()
        array = self._view(elements, tensor).view(dtype.to_numpy())
        if tensor.negated:
            array = np.negative(array)
        return Tensor.from_numpy(array)

    def _view(self, elements: npt.NDArray[Any], tensor: StoredTensor) -> npt.NDArray[Any]:
        """The contiguous elements of a tensor, whose strides are within its storage."""
        count, size = math.prod(tensor.shape), elements.itemsize
        run = 1
        for length, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
            if length != 1 and stride != run:
                break
            run *= length
        else:
            return elements[tensor.offset : tensor.offset + count].reshape(tensor.shape)
        return np.ascontiguousarray(
            np.lib.stride_tricks.as_strided(
                elements[tensor.offset :],
                tensor.shape,
                [stride * size for stride in tensor.strides],
                writeable=False,
            )
        )

    def _place(self, tensor: StoredTensor, name: str) -> _Place:
        """The bytes of a tensor's storage, after all its sizes are checked."""
        storage, size = cast("Storage", tensor.storage), _size_of(tensor.dtype)
        unit = _size_of(storage.dtype)
        place = self._places.get(storage.key)
        if storage.location == "meta":
            raise self._error("it is on the device meta, without elements", name)
        if place is None:
            raise self._error(f"its storage {storage.key[:60]!r} is missing", name)
        if place.nbytes < storage.total * unit:
            raise self._error(
                f"its storage has {place.nbytes} bytes, {storage.total * unit} are expected: the file is damaged",
                name,
            )
        if storage.first + storage.numel > storage.total:
            raise self._error("it views a part that exceeds its storage", name)
        available = storage.numel * unit
        if math.prod(tensor.shape):
            last = tensor.offset + sum(
                (length - 1) * stride
                for length, stride in zip(tensor.shape, tensor.strides, strict=True)
            )
            if (last + 1) * size > available:
                raise self._error(
                    f"its last element is number {last}, the storage has {available // size}", name
                )
            nbytes = math.prod(tensor.shape) * size
            # strides of 0 repeat elements: a few bytes may stand for any number
            if nbytes > max(self._mapping.size(), 2**20):
                raise self._error(f"it has {nbytes} bytes, more than the file", name)
        begin = place.begin + storage.first * unit
        # access to a mapping beyond the file's end is SIGBUS
        if self._mapping.size() < begin + available:
            raise self._error("the file was cut off after it was opened", name)
        return _Place(begin, available // size * size)

    def _error(self, problem: str, tensor: str | None = None) -> WeightsFileError:
        where = self.path if tensor is None else f"{self.path}: tensor {tensor[:200]!r}"
        return WeightsFileError(f"{where}: {problem}")

    def _state_dict(self, value: Any) -> dict[str, StoredTensor]:
        """The tensors of the top level, or of ``state_dict`` in it."""
        if isinstance(value, dict):
            outer = cast("dict[str, Any]", value)
            inner: Any = outer.get("state_dict")
            value = cast("Any", inner if isinstance(inner, dict) else outer)
        if not isinstance(value, dict):
            kind = "a tensor" if isinstance(value, StoredTensor) else type(value).__name__
            raise self._error(f"expected a dictionary of tensors, got {kind}")
        named = cast("dict[str, Any]", value)
        tensors = {n: tensor for n, tensor in named.items() if isinstance(tensor, StoredTensor)}
        if not tensors:
            raise self._error("there are no tensors in it")
        return tensors

    # archives ------------------------------------------------------------------------------------

    def _open_archive(self, file: Any) -> tuple[Any, dict[str, _Place]]:
        """The described value of a zip archive, and the places of its storages."""
        try:
            with zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
        # the package raises these for damaged directories
        except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError, EOFError) as error:  # fmt: skip
            raise self._error(f"the zip archive is damaged: {error}") from error
        folders = [i.filename.removesuffix("data.pkl") for i in infos if i.filename.endswith("/data.pkl")]  # fmt: skip
        if len(folders) != 1:
            raise self._error(
                f"it has {len(folders)} entries data.pkl; files of torch.save have one"
            )
        (folder,) = folders
        entries: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            name = info.filename.removeprefix(folder)
            if name in entries:
                raise self._error(f"it has two entries {info.filename[:100]!r}")
            entries[name] = info
        if "constants.pkl" in entries:
            raise self._error("it is a TorchScript program, not a dictionary of tensors")
        pickle = self._entry(entries["data.pkl"])
        if pickle.nbytes > _MOST_PICKLE_BYTES:
            raise self._error(f"its description has {pickle.nbytes} bytes, over {_MOST_PICKLE_BYTES}")  # fmt: skip
        if "byteorder" in entries:
            order = self._entry(entries["byteorder"])
            self._swapped = self._range(order)[:6].tobytes() not in (b"little", b"")
        value = interpret(Bytes(self._range(pickle).data))
        places = {
            name.removeprefix("data/"): self._entry(info)
            for name, info in entries.items()
            if name.startswith("data/") and not name.endswith("/")
        }
        return value, places

    def _range(self, place: _Place) -> npt.NDArray[np.uint8]:
        return self._bytes[place.begin : place.begin + place.nbytes]

    def _entry(self, info: zipfile.ZipInfo) -> _Place:
        """Where the data of an entry is: its local header is read, and its size checked."""
        shown, total = repr(info.filename[:100]), len(self._bytes)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise self._error(f"entry {shown} is compressed; files of torch.save are not")
        if info.flag_bits & 1:
            raise self._error(f"entry {shown} is encrypted")
        begin = info.header_offset
        if not 0 <= begin <= total - 30:
            raise self._error(f"entry {shown} begins beyond the end of the file")
        header = self._bytes[begin : begin + 30].tobytes()
        signature, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        data = begin + len(header) + name_length + extra_length
        if signature != b"PK\3\4" or not data + info.file_size <= total:
            raise self._error(f"entry {shown} is cut off, or has no header")
        return _Place(data, info.file_size)

    # older files -----------------------------------------------------------------------------------

    def _open_pickles(self) -> tuple[Any, dict[str, _Place]]:
        """The described value of a file without an archive, and the places of its storages."""
        stream = Bytes(self._bytes.data)
        with contextlib.suppress(PickleError):
            if interpret(stream) == _MAGIC:
                return self._after_magic(stream)
        raise self._error(
            "it is no file of torch.save: neither a zip archive nor the older form with torch's magic number"
        )

    def _after_magic(self, stream: Bytes) -> tuple[Any, dict[str, _Place]]:
        version, system = interpret(stream), interpret(stream)
        if type(version) is not int or version != _PROTOCOL or not isinstance(system, dict):
            raise self._error("its version is not 1001, the only one of the older form")
        self._swapped = cast("dict[str, Any]", system).get("little_endian") is False
        storages: dict[str, int] = {}
        value = interpret(stream, lambda storage: _note(storages, storage))
        keys: Any = interpret(stream)
        if not isinstance(keys, list):
            raise self._error("it has no list of storages")
        places: dict[str, _Place] = {}
        position, total = stream.position, len(self._bytes)
        for key in cast("list[Any]", keys):
            key = str(key) if type(key) in (str, int) else ""
            if key not in storages or key in places or position + 8 > total:
                raise self._error(f"its list of storages names {key[:60]!r}, which is not there")
            count = int.from_bytes(self._bytes[position : position + 8].tobytes(), "little")
            place = _Place(position + 8, count * storages[key])
            if place.begin + place.nbytes > total:
                raise self._error(f"storage {key[:60]!r} is cut off")
            places[key] = place
            position = place.begin + place.nbytes
        return value, places


def _note(units: dict[str, int], storage: Storage) -> None:
    """Notes the size of a storage's elements; files of the older form do not state it elsewhere."""
    units.setdefault(storage.key, _size_of(storage.dtype))


def _size_of(dtype: str) -> int:
    """The bytes of an element, by torch's name of its type; 1 for storages of bytes."""
    known = DTYPES.get(dtype)
    return known.size_in_bytes if known is not None else _OTHER_SIZES.get(dtype, 1)
