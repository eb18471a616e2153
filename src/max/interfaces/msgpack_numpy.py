"""msgpack with NumPy arrays, for messages between processes.

An array becomes ``{"__np__": true, "data": bytes, "shape": [...], "dtype": str}``. With shared
memory a large array becomes ``{"__shm__": true, "name": str, "shape": [...], "dtype": str}``, and the
decoder takes over the block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from max._lazy import lazy_module

if TYPE_CHECKING:
    from multiprocessing import resource_tracker, shared_memory
else:
    resource_tracker = lazy_module("multiprocessing.resource_tracker")
    shared_memory = lazy_module("multiprocessing.shared_memory")


def _msgspec() -> Any:
    """Imports the optional package msgspec."""
    try:
        import msgspec
    except ImportError as error:
        raise ImportError("msgpack needs the package msgspec: pip install msgspec") from error
    return msgspec


@dataclass(frozen=True)
class SharedMemoryArray:
    """An array whose data is in a block of shared memory.

    Args:
        name: The block's name.
        shape: The array's shape.
        dtype: Its element type, in NumPy's notation.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


def _share(array: npt.NDArray[Any]) -> SharedMemoryArray | None:
    """Copies an array into a new shared-memory block; returns None if there is no room for it."""
    try:
        # a block has at least one byte
        block = shared_memory.SharedMemory(create=True, size=max(array.nbytes, 1))
    except OSError:
        return None
    np.ndarray(array.shape, array.dtype, block.buf)[...] = array
    shared = SharedMemoryArray(block.name, array.shape, array.dtype.str)
    # the receiver unlinks the block, so the resource tracker of this process must not
    _untrack(block)
    block.close()
    return shared


def _untrack(block: shared_memory.SharedMemory) -> None:
    """Removes a block from those that the resource tracker unlinks when this process ends."""
    resource_tracker.unregister(f"/{block.name.lstrip('/')}", "shared_memory")


def _unshare(name: str, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    block = shared_memory.SharedMemory(name=name)
    try:
        # a copy, as the block ends here
        array = np.ndarray(shape, np.dtype(dtype), block.buf).copy()
    finally:
        block.close()
        block.unlink()
    return array


class MsgpackNumpyEncoder:
    """Encodes objects to bytes. Created by :func:`msgpack_numpy_encoder`; can be pickled."""

    def __init__(self, use_shared_memory: bool, shared_memory_threshold: int) -> None:
        self._use_shared_memory = use_shared_memory
        self._threshold = shared_memory_threshold
        self._encoder = _msgspec().msgpack.Encoder(enc_hook=self._encode)

    def __call__(self, obj: Any) -> bytes:
        return self._encoder.encode(obj)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return msgpack_numpy_encoder, (self._use_shared_memory, self._threshold)

    def _encode(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray):
            if self._use_shared_memory and obj.nbytes >= self._threshold:
                if (shared := _share(obj)) is not None:
                    obj = shared
            # too small to be shared, or no room is left
            if isinstance(obj, np.ndarray):
                return {
                    "__np__": True,
                    "data": np.ascontiguousarray(obj).tobytes(),
                    "shape": obj.shape,
                    "dtype": obj.dtype.str,
                }
        if isinstance(obj, SharedMemoryArray):
            return {"__shm__": True, "name": obj.name, "shape": obj.shape, "dtype": obj.dtype}
        if isinstance(obj, np.generic):
            return obj.item()
        raise TypeError(f"msgpack: cannot encode {type(obj).__name__}")


class MsgpackNumpyDecoder:
    """Decodes bytes to one type. Created by :func:`msgpack_numpy_decoder`; can be pickled."""

    def __init__(self, type_: Any, copy: bool) -> None:
        self._type, self._copy = type_, copy
        self._decoder = _msgspec().msgpack.Decoder(type=type_, dec_hook=self._decode)

    def __call__(self, data: bytes | bytearray | memoryview) -> Any:
        return self._decoder.decode(data)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return msgpack_numpy_decoder, (self._type, self._copy)

    def _decode(self, type_: Any, obj: Any) -> Any:
        if getattr(type_, "__origin__", type_) is np.ndarray and isinstance(obj, dict):
            shape = tuple(obj["shape"])
            if obj.get("__shm__"):
                return _unshare(obj["name"], shape, obj["dtype"])
            dtype = np.dtype(obj["dtype"])
            if len(obj["data"]) != math.prod(shape) * dtype.itemsize:
                raise ValueError(
                    f"msgpack: {len(obj['data'])} bytes for an array {shape} of {dtype}"
                )
            array = np.frombuffer(obj["data"], dtype).reshape(shape)
            return array.copy() if self._copy else array
        if isinstance(obj, type_):
            return obj
        raise TypeError(f"msgpack: cannot decode {type(obj).__name__} as {type_}")


def msgpack_numpy_encoder(
    use_shared_memory: bool = False, shared_memory_threshold: int = 0
) -> MsgpackNumpyEncoder:
    """Creates an encoder of objects that hold NumPy arrays.

    Args:
        use_shared_memory: Whether arrays go through shared memory instead of through the bytes.
        shared_memory_threshold: The minimum size in bytes of an array that goes through shared memory.

    Returns:
        A callable, object to bytes.
    """
    return MsgpackNumpyEncoder(use_shared_memory, shared_memory_threshold)


def msgpack_numpy_decoder(type_: Any, copy: bool = True) -> MsgpackNumpyDecoder:
    """Creates a decoder of one type that holds NumPy arrays.

    Args:
        type_: The type of the objects.
        copy: Whether arrays own their memory; if not, they are read-only views of the bytes.

    Returns:
        A callable, bytes to object.
    """
    return MsgpackNumpyDecoder(type_, copy)


def msgpack_eq(a: Any, b: Any) -> bool:
    """Whether two objects have the same encoding; for tests.

    Args:
        a: One object.
        b: The other.
    """
    encode = msgpack_numpy_encoder()
    return encode(a) == encode(b)
