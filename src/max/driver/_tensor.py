"""The definition of :class:`Tensor`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np
import numpy.typing as npt

from max._lazy import lazy_module
from max.driver import _dlpack
from max.driver._arguments import (
    ShapeLike,
    as_shape,
    check_dtype,
    dtype_of,
    target_of,
    view_shape,
)
from max.driver._device import Device, DeviceStream
from max.driver._element_access import ElementAccess
from max.driver._memory import (
    ALIGNMENT,
    Array,
    MapMode,
    address,
    map_file,
)
from max.driver._strided_memory import Usage, usage_of
from max.dtype import DType

if TYPE_CHECKING:
    from max import _html
else:
    # for notebooks
    _html = lazy_module("max._html")


class Tensor(ElementAccess):
    """A tensor in the memory of a device; also named ``Buffer``.

    Slices are views of the same memory. Inputs of a model must be contiguous.

    ::

        from max.driver import CPU, Tensor
        from max.dtype import DType

        x = Tensor(DType.float32, [2, 3], CPU())
        x[0, :] = 1.5
        assert x[0].to_numpy().tolist() == [1.5, 1.5, 1.5]

    Args:
        dtype: The element type; or a NumPy array, with a device as second argument, to copy there.
        shape: The sizes; a size may be 0.
        device: The device, by default the CPU; or a stream.
        pinned: Whether memory is page-locked for copies to an accelerator; ignored without one. A :class:`Usage` is
            taken too.
        stream: The stream of the tensor, which determines the device.
        usage: What the memory is for, instead of ``pinned``.

    The elements are uninitialized; :meth:`zeros` sets them. Memory is aligned to 64 bytes.

    Raises:
        TypeError: An argument is of a wrong type.
        ArgumentError: A size is negative.
        MemoryError: There is not enough memory.
    """

    __module__ = "max.driver"
    __slots__ = ()

    @overload
    def __init__(
        self,
        dtype: DType,
        shape: ShapeLike,
        device: Device | DeviceStream | None = None,
        pinned: bool | Usage = False,
        *,
        usage: Usage | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        dtype: DType,
        shape: ShapeLike,
        *,
        stream: DeviceStream,
        pinned: bool | Usage = False,
        usage: Usage | None = None,
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
        pinned: bool | Usage = False,
        *,
        stream: DeviceStream | None = None,
        usage: Usage | None = None,
    ) -> None:
        if isinstance(dtype, np.ndarray) and (shape is None or isinstance(shape, Device)):
            # an array stands for dtype and shape
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
        checked = check_dtype("Tensor", dtype)
        kind = usage_of("Tensor", pinned, usage)
        self._allocate(checked, as_shape("Tensor", shape), target, usage=kind)

    # ----- construction

    @staticmethod
    def zeros(
        shape: ShapeLike,
        dtype: DType,
        device: Device | DeviceStream | None = None,
        pinned: bool | Usage = False,
        *,
        stream: DeviceStream | None = None,
        usage: Usage | None = None,
    ) -> Tensor:
        """Allocates a tensor of zeros.

        Args:
            shape: The sizes.
            dtype: The element type.
            device: Where to allocate, the CPU if not given; or a stream.
            pinned: As for the constructor.
            stream: The stream that the tensor belongs to.
            usage: As for the constructor.
        """
        if device is not None and stream is not None:
            raise TypeError("Tensor.zeros: expected a device or a stream, got both")
        tensor = Tensor.__new__(Tensor)
        target = device if stream is None else stream
        sizes = as_shape("Tensor.zeros", shape)
        checked = check_dtype("Tensor.zeros", dtype)
        kind = usage_of("Tensor.zeros", pinned, usage)
        tensor._allocate(checked, sizes, target, zero=True, usage=kind)
        return tensor

    @staticmethod
    def scalar(
        value: np.generic | float,
        dtype: DType,
        device: Device | DeviceStream | None = None,
        *,
        stream: DeviceStream | None = None,
    ) -> Tensor:
        """Allocates a tensor of rank 0 with a value.

        Args:
            value: A Python or NumPy number or bool.
            dtype: The element type; the value is converted.
            device: Where to allocate, the CPU if not given; or a stream.
            stream: The stream that the tensor belongs to.

        Raises:
            OverflowError: An integer is out of the type's range.
            ValueError: An integer type cannot hold the number, such as 1.5 or NaN.
        """
        tensor = Tensor.zeros((), dtype, device, stream=stream)
        tensor[()] = value
        return tensor

    @staticmethod
    def from_numpy(arr: Array) -> Tensor:
        """Wraps the memory of a NumPy array, on the host.

        The data is copied only if the array is not contiguous or not aligned to its dtype. The tensor of a
        read-only array shares its memory until it is written, and gets a copy then.

        Args:
            arr: The array; its dtype may come from ml_dtypes.

        Raises:
            TypeError: ``arr`` is not a NumPy array.
            ForeignTypeError: No DType corresponds to the array's.
        """
        if not isinstance(arr, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Tensor.from_numpy: expected a NumPy array, got {type(arr).__name__}")
        dtype = dtype_of("Tensor.from_numpy", arr)
        flags = arr.flags
        if not (flags.c_contiguous and flags.aligned):
            arr = arr.copy(order="C")
        return Tensor._wrap(
            address(arr), dtype, arr.shape, owner=arr, read_only=not arr.flags.writeable
        )

    @staticmethod
    def from_dlpack(array: _dlpack.DLPackArray, *, copy: bool | None = None) -> Tensor:
        """Wraps the memory of a DLPack array: NumPy, torch, JAX and others.

        Strides are preserved. Read-only memory is shared until the tensor is written, and copied then. NumPy arrays
        may have dtypes of ml_dtypes.

        Args:
            array: The array, on the host.
            copy: True always copies, False never does, None copies if required.

        Raises:
            TypeError: The object is not a DLPack array.
            BufferError: The dtype or the device cannot be shared, or ``copy=False`` forbids a required copy.
        """
        if isinstance(array, Tensor):
            shared = array
        elif isinstance(array, np.ndarray):
            shared = Tensor._from_strided(cast("Array", array), copy)
        else:
            imported = _dlpack.import_array(array, copy)
            # empty tensors may have a null address
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
        """Wraps a NumPy array of any strides; copies it if its strides are not whole elements."""
        dtype, itemsize = dtype_of("Tensor.from_dlpack", array), array.dtype.itemsize
        if not array.flags.aligned or any(stride % itemsize for stride in array.strides):
            if copy is False:
                raise BufferError(
                    f"from_dlpack: the array's address or strides are not multiples of {itemsize} "
                    f"bytes, the size of {dtype}; copy=False forbids the required copy"
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
        """Maps a file into memory; bytes are read at their first use.

        Args:
            filename: The file.
            dtype: The element type.
            shape: The sizes; an integer means one axis.
            mode: ``copyonwrite`` (writes stay in memory), ``readonly`` (the first write copies the whole tensor),
                ``readwrite`` (writes go to the file), or ``write`` (creates or overwrites the file); or a mode of
                ``numpy.memmap``.
            offset: The offset of the tensor in the file, in bytes.

        Raises:
            ValueError: The mode is unknown, or the file is too short.
            OSError: The file cannot be opened.
        """
        op = "Tensor.mmap"
        sizes = as_shape(op, (shape,) if isinstance(shape, int) else shape)
        checked = check_dtype(op, dtype)
        memory, read_only = map_file(op, filename, checked, sizes, mode, offset)
        return Tensor._wrap(memory.ptr, checked, sizes, owner=memory.owner, read_only=read_only)

    # ----- exchange with other libraries

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        """Converts a tensor on the host for NumPy functions."""
        return np.array(self.to_numpy(), dtype=dtype, copy=copy)

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule on the same memory.

        Raises:
            BufferError: The consumer requires another device, or the tensor is read-only and the consumer's version of
                DLPack cannot express that.
        """
        device = self.__dlpack_device__()
        if stream is not None:
            raise BufferError(
                f"Tensor.__dlpack__: {self._device.label}:{self._device.id} has no streams, got {stream!r}"
            )
        if dl_device is not None and tuple(dl_device) != device:
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

    # ----- views and copies

    def view(self, dtype: DType, shape: ShapeLike | None = None) -> Tensor:
        """A tensor of another type and shape on the same memory.

        Args:
            dtype: The new element type.
            shape: The new sizes. By default those of the tensor; with an element of another size the last one is
                converted.

        Raises:
            ValueError: The tensor is not contiguous, the sizes in bytes differ, or the address is not aligned to the
                new type.
        """
        new = check_dtype("Tensor.view", dtype)
        if self._strides is not None:
            raise ValueError(
                f"Tensor.view: the tensor has strides {self._strides}; use contiguous() first"
            )
        sizes = view_shape(self._dtype, self._shape, new, shape)
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
            device: The target device; by default that of the tensor.
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
        """The tensor on one device, or a list with one per device; copied to other devices only.

        Args:
            device: A device or a stream, or a sequence of them.
            stream: A stream.
            devices: Devices.
            streams: Streams.
        """
        targets = [target for target in (device, stream, devices, streams) if target is not None]
        if len(targets) != 1:
            raise TypeError(f"Tensor.to: expected one target, got {len(targets)}")
        target = targets[0]
        if isinstance(target, (Device, DeviceStream)):
            return self._to(target)
        if not isinstance(target, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Tensor.to: expected devices or streams, got {type(target).__name__}")
        return [self._to(each) for each in target]

    def _to(self, target: Device | DeviceStream) -> Tensor:
        device, stream = target_of("Tensor.to", target)
        if device is not self._device:
            return self.copy(stream)
        if stream is self._stream or isinstance(target, Device):
            return self
        # streams of a device share its memory
        on_stream = self._derive(self._dtype, self._shape, self._strides)
        on_stream._stream = stream
        return on_stream

    def inplace_copy_from(self, src: Tensor) -> None:
        """Overwrites this tensor with the elements of another one, on any device.

        Args:
            src: The source: contiguous, of the same dtype and number of elements.

        Raises:
            ValueError: One of them is not contiguous, they differ in size or dtype, or an array or a loaded model
                reads the memory of a read-only array.
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

    def numpy(self) -> np.ndarray[Any, Any]:
        """The elements as a NumPy array, as `to_numpy`: the name of PyTorch and TensorFlow."""
        return self.to_numpy()

    def _repr_html_(self) -> str:
        caption = f"max.driver.Tensor {list(self._shape)} {self._dtype.name}, {self._stream!r}"
        return _html.array_html(self._on_host().to_numpy(), caption)

    def __repr__(self) -> str:
        return f"max.driver.Tensor({self._dtype}, {self._shape}, {self._stream!r})"


def _restore(data: bytes, dtype: DType, shape: tuple[int, ...], device: Device) -> Tensor:
    return Tensor.from_numpy(np.frombuffer(data, np.uint8)).view(dtype, shape).copy(device)


Buffer = Tensor
