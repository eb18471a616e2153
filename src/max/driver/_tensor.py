"""The definition of :class:`Tensor`."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, cast, overload

import numpy as np

from max._errors import ArgumentError, ForeignTypeError
from max.driver import _dlpack
from max.driver._device import CPU, Device, DeviceStream
from max.driver._indexing import Index, apply_index, contiguous_strides, is_contiguous
from max.driver._memory import (
    ALIGNMENT,
    Array,
    MapMode,
    Memory,
    address,
    array_at,
    map_file,
)
from max.dtype import DType

ShapeLike: TypeAlias = Sequence[int]


def _as_shape(op: str, shape: Any) -> tuple[int, ...]:
    if isinstance(shape, (str, bytes)) or not isinstance(shape, (Sequence, np.ndarray)):
        raise TypeError(f"{op}: expected shape as a sequence of integers, got {shape!r}")
    try:
        sizes = tuple(operator.index(size) for size in cast("Sequence[Any]", shape))
    except TypeError as error:
        raise TypeError(f"{op}: expected shape as integers, got {shape!r}") from error
    if any(size < 0 for size in sizes):
        raise ArgumentError(f"{op}: sizes are not negative, got shape {sizes}")
    return sizes


def _check_dtype(op: str, dtype: object) -> DType:
    if not isinstance(dtype, DType):
        hint = "; the order is dtype, shape, device" if isinstance(dtype, (tuple, list)) else ""
        raise TypeError(f"{op}: expected a DType, got {dtype!r}{hint}")
    return dtype


_HOST = CPU()
HOST_MEMORY = _HOST.memory


def _place(op: str, target: Device | DeviceStream | None) -> tuple[Device, DeviceStream]:
    if target is None:
        return _HOST, _HOST.default_stream
    if isinstance(target, Device):
        return target, target.default_stream
    if isinstance(target, DeviceStream):  # pyright: ignore[reportUnnecessaryIsInstance]
        return target.device, target
    raise TypeError(f"{op}: expected a Device or a DeviceStream, got {type(target).__name__}")


class Tensor:
    """A tensor in the memory of a device; also named ``Buffer``.

    Slices are views of the same memory. Inputs of a model must be contiguous.

    ::

        from max.driver import CPU, Tensor
        from max.dtype import DType

        x = Tensor(DType.float32, [2, 3], CPU())
        x[0, :] = 1.5
        assert x[0].to_numpy().tolist() == [1.5, 1.5, 1.5]

    Args:
        dtype: The element type. A NumPy array in its place, with a device next, is copied there.
        shape: The sizes; a size may be 0.
        device: Where to allocate, the CPU if not given; or a stream.
        pinned: Page-locked memory, for copies to an accelerator. Without one it is ordinary memory.
        stream: The stream that the tensor belongs to; its device is the tensor's.

    The elements are not initialised; :meth:`zeros` gives zeros. Memory is aligned to 64 bytes.

    Raises:
        TypeError: An argument of a wrong type.
        ArgumentError: A negative size.
        MemoryError: There is not enough memory.
    """

    __module__ = "max.driver"
    __slots__ = (
        "__weakref__", "_device", "_dtype", "_owner", "_pinned", "_ptr", "_read_only", "_shape",
        "_stream", "_strides",
    )  # fmt: skip

    _ptr: int
    """Address of the first element."""
    _strides: tuple[int, ...] | None
    """In elements; None when row-major and contiguous."""
    _owner: object
    """Keeps the memory alive."""

    @overload
    def __init__(
        self,
        dtype: DType,
        shape: ShapeLike,
        device: Device | DeviceStream | None = None,
        pinned: bool = False,
    ) -> None: ...
    @overload
    def __init__(
        self, dtype: DType, shape: ShapeLike, *, stream: DeviceStream, pinned: bool = False
    ) -> None: ...
    @overload
    def __init__(self, dtype: Array, shape: Device) -> None: ...
    @overload
    def __init__(self, *, shape: Array, device: Device) -> None: ...
    def __init__(
        self,
        dtype: DType | Array | None = None,
        shape: ShapeLike | Array | Device | None = None,
        device: Device | DeviceStream | None = None,
        pinned: bool = False,
        *,
        stream: DeviceStream | None = None,
    ) -> None:
        if isinstance(dtype, np.ndarray) and (shape is None or isinstance(shape, Device)):
            dtype, shape, device = None, dtype, shape if shape is not None else device
        if device is not None and stream is not None:
            raise TypeError("Tensor: expected a device or a stream, got both")
        target = device if stream is None else stream
        if dtype is None and isinstance(shape, np.ndarray):
            source = Tensor.from_numpy(shape)
            self._allocate(source._dtype, source._shape, target)
            self._write(source.to_numpy())
            return
        if dtype is None or shape is None:
            raise TypeError("Tensor: expected dtype and shape")
        if isinstance(shape, Device):
            raise TypeError("Tensor: expected shape as a sequence of integers, got a device")
        checked = _check_dtype("Tensor", dtype)
        self._allocate(checked, _as_shape("Tensor", shape), target, pinned=pinned)

    def _allocate(
        self,
        dtype: DType,
        shape: tuple[int, ...],
        target: Device | DeviceStream | None,
        *,
        zero: bool = False,
        pinned: bool = False,
    ) -> None:
        device, stream = _place("Tensor", target)
        self._ptr, self._owner = device.memory.allocate("Tensor", dtype, shape, zero)
        self._dtype, self._shape, self._strides = dtype, shape, None
        self._read_only, self._pinned = False, pinned
        self._device, self._stream = device, stream

    @classmethod
    def _empty(cls, dtype: DType, shape: tuple[int, ...], device: Device) -> Tensor:
        """A tensor of a shape that was checked before, for the outputs of each execution."""
        tensor = cls.__new__(cls)
        tensor._ptr, tensor._owner = device.memory.allocate("Tensor", dtype, shape, False)
        tensor._dtype, tensor._shape, tensor._strides = dtype, shape, None
        tensor._read_only = tensor._pinned = False
        tensor._device, tensor._stream = device, device.default_stream
        return tensor

    @classmethod
    def _wrap(
        cls,
        ptr: int,
        dtype: DType,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        owner: object = None,
        target: Device | DeviceStream | None = None,
        read_only: bool = False,
    ) -> Tensor:
        """A tensor on memory that ``owner`` keeps alive.

        Args:
            ptr: The address of the first element.
            dtype: The element type.
            shape: The sizes.
            strides: The strides in elements; None for contiguous.
            owner: Any object that holds the memory.
            target: The device or stream; the CPU if not given.
            read_only: Whether Python refuses to write through it.
        """
        self = cls.__new__(cls)
        if strides is not None and is_contiguous(shape, strides):
            strides = None
        self._ptr, self._dtype, self._shape, self._strides = ptr, dtype, shape, strides
        self._owner, self._read_only, self._pinned = owner, read_only, False
        self._device, self._stream = _place("Tensor", target)
        return self

    def _derive(
        self, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...] | None, offset: int = 0
    ) -> Tensor:
        """A view of this tensor's memory; ``offset`` in elements of this tensor."""
        ptr = self._ptr + offset * self._dtype.size_in_bytes
        view = Tensor._wrap(ptr, dtype, shape, strides, self._owner, self._stream, self._read_only)
        view._pinned = self._pinned
        return view

    # ----- making tensors

    @staticmethod
    def zeros(
        shape: ShapeLike,
        dtype: DType,
        device: Device | DeviceStream | None = None,
        pinned: bool = False,
        *,
        stream: DeviceStream | None = None,
    ) -> Tensor:
        """Allocates a tensor of zeros.

        Args:
            shape: The sizes.
            dtype: The element type.
            device: Where to allocate, the CPU if not given; or a stream.
            pinned: As for the constructor.
            stream: The stream that the tensor belongs to.
        """
        if device is not None and stream is not None:
            raise TypeError("Tensor.zeros: expected a device or a stream, got both")
        tensor = Tensor.__new__(Tensor)
        target = device if stream is None else stream
        sizes = _as_shape("Tensor.zeros", shape)
        checked = _check_dtype("Tensor.zeros", dtype)
        tensor._allocate(checked, sizes, target, zero=True, pinned=pinned)
        return tensor

    @staticmethod
    def scalar(
        value: Any,
        dtype: DType,
        device: Device | DeviceStream | None = None,
        *,
        stream: DeviceStream | None = None,
    ) -> Tensor:
        """Makes a tensor of rank 0 with a value.

        Args:
            value: A Python or NumPy number or bool.
            dtype: The element type; the value is converted.
            device: Where to allocate, the CPU if not given; or a stream.
            stream: The stream that the tensor belongs to.

        Raises:
            OverflowError: An integer that the type cannot hold.
            ValueError: A number that an integer type holds only in part, such as 1.5 or NaN.
        """
        tensor = Tensor.zeros((), dtype, device, stream=stream)
        tensor[()] = value
        return tensor

    @staticmethod
    def from_numpy(arr: Array) -> Tensor:
        """Makes a tensor on the memory of a NumPy array, on the host.

        The data is copied only where the array is not contiguous, or not aligned to its dtype. A
        tensor of a read-only array is read-only.

        Args:
            arr: The array; its dtype may come from ml_dtypes.

        Raises:
            TypeError: ``arr`` is not a NumPy array.
            ForeignTypeError: No DType corresponds to the array's.
        """
        if not isinstance(arr, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Tensor.from_numpy: expected a NumPy array, got {type(arr).__name__}")
        dtype = _dtype_of("Tensor.from_numpy", arr)
        flags = arr.flags
        if not (flags.c_contiguous and flags.aligned):
            arr = arr.copy(order="C")
        return Tensor._wrap(
            address(arr), dtype, arr.shape, owner=arr, read_only=not arr.flags.writeable
        )

    @staticmethod
    def from_dlpack(array: Any, *, copy: bool | None = None) -> Tensor:
        """Makes a tensor on the memory of a DLPack array: NumPy, torch, JAX and others.

        Strides are kept, and so is read-only memory. ml_dtypes arrays are taken too.

        Args:
            array: The array, on the host.
            copy: True always copies, False never does, None copies where it must.

        Raises:
            TypeError: The object is no DLPack array.
            BufferError: A dtype or a device that cannot be shared, or a copy that ``copy=False``
                forbids.
        """
        if isinstance(array, Tensor):
            shared = array
        elif isinstance(array, np.ndarray):
            shared = Tensor._from_strided(cast("Array", array), copy)
        else:
            imported = _dlpack.import_array(array, copy)
            # zero-size tensors may have no address at all
            ptr = imported.data or ALIGNMENT
            shared = Tensor._wrap(
                ptr, imported.dtype, imported.shape, imported.strides, imported,
                read_only=imported.read_only,
            )  # fmt: skip
            if imported.copied:
                return shared
        return shared.copy() if copy else shared

    @staticmethod
    def _from_strided(array: Array, copy: bool | None) -> Tensor:
        dtype, itemsize = _dtype_of("Tensor.from_dlpack", array), array.dtype.itemsize
        if not array.flags.aligned or any(stride % itemsize for stride in array.strides):
            if copy is False:
                raise BufferError(
                    f"from_dlpack: the array's address or strides are no multiples of {itemsize} "
                    f"bytes, the size of {dtype}; copy=False forbids the copy that this needs"
                )
            array = array.copy(order="C")
        strides = tuple(stride // itemsize for stride in array.strides)
        read_only = not array.flags.writeable
        return Tensor._wrap(address(array), dtype, array.shape, strides, array, read_only=read_only)

    @staticmethod
    def mmap(
        filename: os.PathLike[str] | str,
        dtype: DType,
        shape: ShapeLike | int,
        mode: MapMode = "copyonwrite",
        offset: int = 0,
    ) -> Tensor:
        """Makes a tensor on a file's bytes, which are read when they are used.

        Args:
            filename: The file.
            dtype: The element type.
            shape: The sizes; an integer stands for one axis.
            mode: ``copyonwrite`` (writes stay in memory), ``readonly``, ``readwrite`` (writes go
                to the file), or ``write`` (makes or overwrites the file); or as ``numpy.memmap``.
            offset: Where the tensor starts in the file, in bytes.

        Raises:
            ValueError: An unknown mode, or a file that is too short.
            OSError: The file cannot be opened.
        """
        op = "Tensor.mmap"
        sizes = _as_shape(op, (shape,) if isinstance(shape, int) else shape)
        checked = _check_dtype(op, dtype)
        memory, read_only = map_file(op, filename, checked, sizes, mode, offset)
        return Tensor._wrap(memory.ptr, checked, sizes, owner=memory.owner, read_only=read_only)

    # ----- properties

    @property
    def device(self) -> Device:
        """The device that holds the tensor."""
        return self._device

    @property
    def stream(self) -> DeviceStream:
        """The stream that the tensor belongs to."""
        return self._stream

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self._dtype

    @property
    def element_size(self) -> int:
        """The size of an element in bytes."""
        return self._dtype.size_in_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return self._shape

    @property
    def strides(self) -> tuple[int, ...]:
        """The distance between neighbours along each axis, in elements."""
        return contiguous_strides(self._shape) if self._strides is None else self._strides

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self._shape)

    @property
    def num_elements(self) -> int:
        """The number of elements; 1 for rank 0."""
        return math.prod(self._shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in memory one after the other, in row-major order."""
        return self._strides is None

    @property
    def is_host(self) -> bool:
        """Whether the tensor is in host memory, on a CPU device."""
        return self._device.is_host

    @property
    def pinned(self) -> bool:
        """Whether the tensor was allocated with ``pinned``."""
        return self._pinned

    # ----- data in and out

    def to_numpy(self) -> Array:
        """A NumPy array on the same memory; bfloat16 and narrower floats have ml_dtypes' types.

        Raises:
            ValueError: The tensor is not on the host.
        """
        if not self._device.is_host:
            raise ValueError(
                f"Tensor.to_numpy: the tensor is on {self._device.label}:{self._device.id}; use to(CPU())"
            )
        memory = Memory(self._ptr, self._owner)
        return array_at(memory, self._dtype, self._shape, self._strides, self._read_only)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Lets NumPy functions take a tensor of the host."""
        return np.array(self.to_numpy(), dtype=dtype, copy=copy)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule on the same memory.

        Raises:
            BufferError: The consumer wants another device, or the tensor is read-only and the
                consumer's version of DLPack cannot say so.
        """
        own_device = self.__dlpack_device__()
        if stream is not None:
            raise BufferError(
                f"Tensor.__dlpack__: {self._device.label}:{self._device.id} has no streams, got {stream!r}"
            )
        if dl_device is not None and tuple(dl_device) != own_device:
            raise BufferError(
                f"Tensor.__dlpack__: the tensor is on {self._device.label}:{self._device.id}, not on DLPack device "
                f"{tuple(dl_device)}"
            )
        source = self.copy() if copy else self
        return _dlpack.export_array(source.to_numpy(), self._dtype, max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The DLPack device.

        Raises:
            BufferError: The tensor is on a device whose memory DLPack consumers cannot read.
        """
        if not self._device.is_host:
            raise BufferError(
                f"Tensor: {self._device.label}:{self._device.id} shares no memory by DLPack; use to(CPU())"
            )
        return _dlpack.HOST

    def item(self) -> Any:
        """The value of a tensor of one element, as a Python bool, int or float.

        Raises:
            ValueError: The tensor has another number of elements.
        """
        if self.num_elements != 1:
            raise ValueError(
                f"Tensor.item: expected one element, the shape is {self._shape}; index it first"
            )
        value = self._on_host().to_numpy().reshape(()).item()
        return value if isinstance(value, (bool, int, float)) else float(value)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        """A view, by NumPy's basic indexing: integers, slices, ``...`` and ``None``.

        Raises:
            AxisError: Too many indices, or one out of range: an IndexError and a ValueError.
            TypeError: Index arrays and masks.
        """
        offset, shape, strides = apply_index(index, self._shape, self.strides)
        return self._derive(self._dtype, shape, strides, offset)

    def __setitem__(self, index: Index | tuple[Index, ...], value: Any) -> None:
        """Writes a number, array or tensor into a part of the tensor, with broadcasting.

        Raises:
            ValueError: The tensor is read-only, the shapes do not broadcast, or an integer type
                holds a number only in part.
            TypeError: The value is no number, or its dtype does not convert to the tensor's.
        """
        self[index]._write(value)

    def _write(self, value: Any) -> None:
        if self._read_only:
            raise ValueError("Tensor: the memory is read-only; write to a copy()")
        if isinstance(value, Tensor):
            value = value._on_host().to_numpy()
        if not self._device.is_host:
            self._write_through_host(value)
            return
        array = self.to_numpy()
        if isinstance(value, np.generic) and self._dtype.to_numpy().isbuiltin == 1:
            value = cast("Any", value).item()
        if isinstance(value, (np.ndarray, np.generic)):
            given = np.dtype(cast("Any", value).dtype)
            if given != array.dtype and not np.can_cast(given, array.dtype, "same_kind"):
                raise TypeError(
                    f"Tensor: {given} does not convert to {array.dtype}; use astype first"
                )
        elif value is None:
            raise TypeError(f"Tensor: expected a number or an array to write, got {value}")
        elif isinstance(value, float) and not value.is_integer() and self._dtype.is_integral():
            raise ValueError(f"Tensor: {value} is no integer, the tensor is {self._dtype}")
        try:
            array[...] = value
        except ValueError as error:
            raise ValueError(f"Tensor: writing to shape {self._shape}: {error}") from error

    def _span(self) -> tuple[int, int]:
        """Address and length in bytes of the memory from the first element to the last, in the order of addresses."""
        if 0 in self._shape:
            return self._ptr, 0
        size = self._dtype.size_in_bytes
        reach = [(n - 1) * stride for n, stride in zip(self._shape, self.strides, strict=True)]
        low, high = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
        return self._ptr + low * size, (high - low + 1) * size

    def _on_host(self) -> Tensor:
        """The tensor itself if it is on the host, else a copy there."""
        if self._device.is_host:
            return self
        start, nbytes = self._span()
        data = self._device.memory.read(start, nbytes)
        ptr = address(data) + self._ptr - start
        return Tensor._wrap(ptr, self._dtype, self._shape, self._strides, data)

    def _write_through_host(self, value: Any) -> None:
        """Writes to the memory of a device: the elements are converted and spread on the host."""
        staged = (
            self._on_host()
            if self._strides is not None
            else Tensor._empty(self._dtype, self._shape, _HOST)
        )
        staged._write(value)
        start, nbytes = self._span()
        data = HOST_MEMORY.read(staged._span()[0], nbytes)
        self._device.memory.write(start, data)

    def __iter__(self) -> Iterator[Tensor]:
        """The views along the first axis.

        Raises:
            TypeError: The tensor has rank 0.
        """
        if not self._shape:
            raise TypeError("Tensor: a tensor of rank 0 cannot be iterated over")
        return (self[i] for i in range(self._shape[0]))

    # ----- views and copies

    def view(self, dtype: DType, shape: ShapeLike | None = None) -> Tensor:
        """A tensor of another type and shape on the same memory.

        Args:
            dtype: The new element type.
            shape: The new sizes. If not given they stay, and with an element of another size
                the last one changes.

        Raises:
            ValueError: The tensor is not contiguous, the bytes do not come out even, or the
                address is not aligned to the new type.
        """
        new = _check_dtype("Tensor.view", dtype)
        if self._strides is not None:
            raise ValueError(
                f"Tensor.view: the tensor has strides {self._strides}; use contiguous() first"
            )
        nbytes = self.num_elements * self.element_size
        if shape is not None:
            sizes = _as_shape("Tensor.view", shape)
        elif new.size_in_bytes == self.element_size:
            sizes = self._shape
        elif not self._shape or self._shape[-1] * self.element_size % new.size_in_bytes:
            raise ValueError(
                f"Tensor.view: {self._shape} {self._dtype} has no shape as {new} of its own; "
                "give one"
            )
        else:
            last = self._shape[-1] * self.element_size // new.size_in_bytes
            sizes = (*self._shape[:-1], last)
        if math.prod(sizes) * new.size_in_bytes != nbytes:
            raise ValueError(
                f"Tensor.view: {self._shape} {self._dtype} has {nbytes} bytes, {sizes} {new} "
                f"has {math.prod(sizes) * new.size_in_bytes}"
            )
        if self._ptr % new.align:
            raise ValueError(f"Tensor.view: the address is not aligned to {new.align} for {new}")
        return self._derive(new, sizes, None)

    def contiguous(self) -> Tensor:
        """A contiguous copy of the tensor."""
        return self.copy()

    def copy(
        self,
        stream: DeviceStream | Device | None = None,
        device: Device | None = None,
    ) -> Tensor:
        """A deep copy, contiguous and writable.

        Args:
            stream: The stream of the copy, on its device; or a device.
            device: Where to copy to; the same device if not given.
        """
        if stream is not None and device is not None:
            raise TypeError("Tensor.copy: expected a stream or a device, got both")
        target = stream or device or self._stream
        new = Tensor.__new__(Tensor)
        new._allocate(self._dtype, self._shape, target)
        new._write(self)
        return new

    @overload
    def to(self, device: Device | DeviceStream) -> Tensor: ...
    @overload
    def to(self, device: Sequence[Device] | Sequence[DeviceStream]) -> list[Tensor]: ...
    @overload
    def to(self, *, stream: DeviceStream) -> Tensor: ...
    @overload
    def to(self, *, devices: Sequence[Device]) -> list[Tensor]: ...
    @overload
    def to(self, *, streams: Sequence[DeviceStream]) -> list[Tensor]: ...
    def to(
        self,
        device: Device | DeviceStream | Sequence[Device] | Sequence[DeviceStream] | None = None,
        *,
        stream: DeviceStream | None = None,
        devices: Sequence[Device] | None = None,
        streams: Sequence[DeviceStream] | None = None,
    ) -> Tensor | list[Tensor]:
        """The tensor on a device, or a list of it on several; copied only to other devices.

        Args:
            device: A device or a stream, or a sequence of them.
            stream: A stream.
            devices: Devices.
            streams: Streams.
        """
        given = [target for target in (device, stream, devices, streams) if target is not None]
        if len(given) != 1:
            raise TypeError(f"Tensor.to: expected one target, got {len(given)}")
        target = given[0]
        if isinstance(target, (Device, DeviceStream)):
            return self._to(target)
        if not isinstance(target, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Tensor.to: expected devices or streams, got {type(target).__name__}")
        return [self._to(each) for each in target]

    def _to(self, target: Device | DeviceStream) -> Tensor:
        device, stream = _place("Tensor.to", target)
        if device is not self._device:
            return self.copy(stream)
        if stream is self._stream or isinstance(target, Device):
            return self
        moved = self._derive(self._dtype, self._shape, self._strides)
        moved._stream = stream
        return moved

    def inplace_copy_from(self, src: Tensor) -> None:
        """Overwrites this tensor with the contents of another one, of any device.

        Args:
            src: The source: contiguous, of the same dtype and number of elements.

        Raises:
            ValueError: One of them is not contiguous, they differ in size or dtype, or this
                tensor is read-only.
        """
        op = "Tensor.inplace_copy_from"
        if not isinstance(src, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{op}: expected a Tensor, got {type(src).__name__}")
        for name, tensor in (("destination", self), ("source", src)):
            if not tensor.is_contiguous:
                raise ValueError(f"{op}: the {name} has strides {tensor.strides}")
        if src._dtype is not self._dtype or src.num_elements != self.num_elements:
            raise ValueError(
                f"{op}: {src._shape} {src._dtype} does not fit {self._shape} {self._dtype}"
            )
        source = src if src._shape == self._shape else src.view(src._dtype, self._shape)
        self._write(source)

    def __copy__(self) -> Tensor:
        return self._derive(self._dtype, self._shape, self._strides)

    def __deepcopy__(self, memo: object) -> Tensor:
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        data = self._on_host().to_numpy().tobytes()
        return _restore, (data, self._dtype, self._shape, self._device)

    def __repr__(self) -> str:
        return f"max.driver.Tensor({self._dtype}, {self._shape}, {self._stream!r})"


def _dtype_of(op: str, array: Array) -> DType:
    try:
        return DType.from_numpy(array.dtype)
    except ValueError as error:
        raise ForeignTypeError(f"{op}: {str(error).removeprefix('DType.from_numpy: ')}") from error


def _restore(data: bytes, dtype: DType, shape: tuple[int, ...], device: Device) -> Tensor:
    return Tensor.from_numpy(np.frombuffer(data, np.uint8)).view(dtype, shape).copy(device)


Buffer = Tensor
