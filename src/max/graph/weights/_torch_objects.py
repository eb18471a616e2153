"""What the pickles in files of ``torch.save`` may name, and what each name builds: records of tensors and storages.

A name that is not in the table `NAMES` is an error. What cannot be read is built as a record that says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

__all__ = [
    "EARLIER_MODULES",
    "NAMES",
    "Name",
    "PickleError",
    "Storage",
    "StoredTensor",
    "UnreadObject",
    "description",
    "dictionary_key",
    "storage_of",
    "tensor_of",
]

_MOST_SIZE = 2**62
_MOST_RANK = 64


class PickleError(ValueError):
    """A pickle is damaged, or contains what no plain checkpoint does."""


class Storage(NamedTuple):
    """A run of elements in a file, which tensors view.

    Args:
        dtype: The element type by torch's name, such as ``float32``; empty: the storage counts bytes.
        key: Its name in the file.
        location: The device that it was saved from.
        numel: The number of elements.
        first: The index of its first element, if it is a part of another storage.
        total: The number of elements of that storage.
    """

    dtype: str
    key: str
    location: str
    numel: int
    first: int
    total: int


class StoredTensor(NamedTuple):
    """A tensor of a file.

    Args:
        dtype: The element type by torch's name.
        shape: The shape.
        strides: The distances of neighbors in elements, by dimension.
        offset: The index of the first element in its storage.
        storage: The elements.
        negated: Whether the elements are stored with the other sign.
        problem: Why the tensor cannot be read; empty: it can.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage: Storage | None
    negated: bool = False
    problem: str = ""


class Name(NamedTuple):
    """A name that a pickle may mention, ``torch.FloatStorage`` say, with what a call of it builds."""

    path: str
    call: Callable[..., Any] | None


class UnreadObject:
    """A plain object with a state that is not read: ``torch.Size``, hooks, sets."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind


STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "",
    "TypedStorage": "",
}
"""The element types of torch's classes of storages."""

_DTYPE_NAMES = {
    *STORAGE_DTYPES.values(),
    *("complex32", "float", "double", "half", "long", "int", "short", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)),
} - {""}
_ALIASES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
}
_OTHER_NAMES = (
    *("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric"),
    "per_channel_affine_float_qparams",
)


def description(value: Any) -> str:
    """A value in a message; containers by their type only, as they may contain themselves."""
    if isinstance(value, (Name, Storage)):
        return value.path if isinstance(value, Name) else "a storage"
    if isinstance(value, (str, bytes)):
        return repr(value[:60])
    plain = (
        value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**64)
    )
    return repr(value) if plain else f"a value of type {type(value).__name__}"


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    sizes = cast("tuple[Any, ...] | None", value if isinstance(value, (tuple, list)) else None)
    if (
        sizes is None
        or len(sizes) > _MOST_RANK
        or not all(type(n) is int and 0 <= n < _MOST_SIZE for n in sizes)
    ):
        raise PickleError(f"the {what} of a tensor is no list of sizes: {description(value)}")
    return tuple(sizes)


def tensor_of(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> StoredTensor:
    """``_rebuild_tensor`` and ``_rebuild_tensor_v2``, whose further arguments are (requires_grad, hooks, metadata)."""
    dtype = storage.dtype if isinstance(storage, Storage) else ""
    return _checked_tensor(dtype, storage, offset, shape, strides, rest[2:3])


def _tensor_v3(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    grad: Any,
    hooks: Any,
    dtype: Any,
    *rest: Any,
) -> StoredTensor:
    """``_rebuild_tensor_v3``: the storage counts bytes."""
    return _checked_tensor(_dtype(dtype), storage, offset, shape, strides, rest[:1])


def _checked_tensor(
    dtype: str, storage: Any, offset: Any, shape: Any, strides: Any, metadata: tuple[Any, ...]
) -> StoredTensor:
    if not isinstance(storage, Storage):
        raise PickleError(f"a tensor views {description(storage)}, which is no storage")
    sizes, steps = _sizes(shape, "shape"), _sizes(strides, "strides")
    (first,) = _sizes((offset,), "offset")
    if len(sizes) != len(steps):
        raise PickleError(f"a tensor has {len(sizes)} dimensions and {len(steps)} strides")
    # torch writes a dictionary of flags: `neg` marks a view that negates its storage
    bits: Any = metadata[0] if metadata else None
    flags = cast("dict[Any, Any]", bits) if isinstance(bits, dict) else {}
    return StoredTensor(dtype, sizes, steps, first, storage, flags.get("neg") is True)


def _size(value: Any = ()) -> tuple[int, ...]:
    return _sizes(value, "size")


def _dtype(value: Any) -> str:
    name = value.path.removeprefix("torch.") if isinstance(value, Name) else ""
    if name not in _DTYPE_NAMES:
        raise PickleError(f"{description(value)} is no element type")
    return _ALIASES.get(name, name)


def _parameter(data: Any, *_: Any) -> Any:
    """A parameter is its tensor."""
    return data


def _of_type(rebuild: Any, cls: Any, arguments: Any, _: Any) -> Any:
    """``_rebuild_from_type_v2``: a tensor of a subclass, or with attributes; the plain tensor is read."""
    if not isinstance(rebuild, Name) or rebuild.call is None or not isinstance(arguments, tuple):
        raise PickleError(f"a tensor is rebuilt by {description(rebuild)}")
    plain = isinstance(cls, Name) and cls.path in (
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
    )
    return (
        rebuild.call(*arguments)
        if plain
        else _unread_tensor("of another class than torch.Tensor")()
    )


def _unread_tensor(kind: str) -> Callable[..., StoredTensor]:
    """Builds a tensor of a kind that exists in torch, and cannot be read here."""

    def build(*_: Any) -> StoredTensor:
        return StoredTensor("", (), (), 0, None, problem=f"it is {kind}")

    return build


def _unread_object(kind: str) -> Callable[..., UnreadObject]:
    return lambda *_: UnreadObject(kind)


def _dict(*arguments: Any) -> dict[Any, Any]:
    """``OrderedDict()``, or of a list of pairs in old pickles."""
    items: Any = arguments[0] if arguments else []
    built: dict[Any, Any] = {}
    pairs: Any = list(cast("dict[Any, Any]", items).items()) if isinstance(items, dict) else items
    for pair in cast("list[Any]", pairs if isinstance(pairs, list) else [pairs]):
        if not isinstance(pair, (list, tuple)) or len(cast("list[Any]", pair)) != 2:
            raise PickleError(f"a dictionary is built of {description(pair)}")
        built[dictionary_key(pair[0])] = pair[1]
    return built


NAMES: dict[str, Callable[..., Any] | None] = {
    "collections.OrderedDict": _dict,
    "builtins.dict": _dict,
    "collections.Counter": _dict,
    "builtins.set": _unread_object("a set"),
    "builtins.frozenset": _unread_object("a set"),
    "builtins.bytearray": _unread_object("bytes"),
    "builtins.complex": _unread_object("a complex number"),
    "_codecs.encode": _unread_object("bytes"),
    "torch.Size": _size,
    "torch.device": _unread_object("a device"),
    "torch.serialization._get_layout": _unread_object("a layout"),
    "torch.Tensor": _unread_tensor("without a storage"),
    "torch.nn.parameter.Parameter": _parameter,
    "torch._utils._rebuild_tensor": tensor_of,
    "torch._utils._rebuild_tensor_v2": tensor_of,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _parameter,
    "torch._utils._rebuild_qtensor": _unread_tensor("quantized by torch"),
    "torch._utils._rebuild_sparse_tensor": _unread_tensor("sparse"),
    "torch._utils._rebuild_nested_tensor": _unread_tensor("nested"),
    "torch._utils._rebuild_meta_tensor_no_storage": _unread_tensor(
        "on the device meta, without elements"
    ),
    "torch._utils._rebuild_wrapper_subclass": _unread_tensor("of another class than torch.Tensor"),
    **{f"torch.{name}": None for name in (*STORAGE_DTYPES, *_DTYPE_NAMES, *_OTHER_NAMES)},
    **{f"torch.cuda.{name}": None for name in STORAGE_DTYPES},
    "torch.storage.UntypedStorage": None,
    "torch.storage.TypedStorage": None,
}
"""The names that a pickle may mention, and what a call of each builds; None: they are arguments only."""

EARLIER_MODULES = {"__builtin__": "builtins", "UserDict": "collections"}
"""Modules of Python 2 that are written by protocol 2."""


def dictionary_key(value: Any) -> str:
    """A key of a dictionary; numbers and names become texts, whose hashes no file can foresee."""
    if type(value) is str:
        return value
    nested = type(value) is tuple
    parts = cast("tuple[Any, ...]", value) if nested else (value,)
    if len(parts) > 8 or not all(_is_short(part) for part in parts):
        raise PickleError(f"a dictionary has the key {description(value)}")
    texts = [part.path if isinstance(part, Name) else str(part) for part in parts]
    return texts[0] if not nested else f"({', '.join(texts)})"


def _is_short(part: Any) -> bool:
    if type(part) in (str, bytes):
        return len(cast("str", part)) <= 200
    return type(part) in (float, bool, type(None), Name) or (
        type(part) is int and abs(part) < 2**64
    )


def storage_of(identity: Any) -> Storage:
    """The storage that a persistent id describes."""
    parts = cast("tuple[Any, ...]", identity if isinstance(identity, tuple) else ())
    parts = tuple(p.decode("ascii", "replace") if isinstance(p, bytes) else p for p in parts)
    # ("storage", class, key, location, numel), in old files with a view: (key, first, size)
    fits = len(parts) in (5, 6) and parts[0] == "storage" and isinstance(parts[1], Name)
    kind = parts[1] if fits else None
    name = kind.path.rpartition(".")[2] if isinstance(kind, Name) else ""
    if not fits or name not in STORAGE_DTYPES or type(parts[2]) not in (str, int):
        raise PickleError(f"the file refers to {description(identity)}, which is no storage")
    (numel,) = _sizes((parts[4],), "storage")
    first, size = 0, numel
    # a part of another storage, as the format before zip files has them
    if len(parts) == 6 and parts[5] is not None:
        view: Any = parts[5]
        if not isinstance(view, tuple) or len(cast("tuple[Any, ...]", view)) != 3:
            raise PickleError(f"a part of a storage is described by {description(view)}")
        first, size = _sizes(cast("tuple[Any, ...]", view)[1:], "part of a storage")
    location = parts[3] if type(parts[3]) is str else ""
    return Storage(STORAGE_DTYPES[name], str(parts[2]), location, size, first, numel)
