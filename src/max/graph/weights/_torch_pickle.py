"""An interpreter of the pickles in files of ``torch.save``: builds plain containers, and records of tensors.

A pickle is a program. This module does not run it by Python's unpickler: each instruction is one of a table, it builds
numbers, texts, lists, dicts and tuples, and the names that it may mention are those of another table, whose entries are
functions of this file. No module is imported and no code of the file is executed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple, cast

__all__ = ["Bytes", "PickleError", "StoredTensor", "Storage", "interpret"]

_MOST_INSTRUCTIONS = 2_000_000
"""A file of 60,000 tensors has as many."""
_MOST_SIZE = 2**62
_MOST_RANK = 64


class PickleError(ValueError):
    """A pickle is damaged, or contains what no plain checkpoint does."""


class Bytes:
    """A stream over a buffer; a read beyond the end is an error, and allocates nothing.

    Args:
        buffer: The bytes.
        position: Where the stream begins.
    """

    _LONGEST_LINE = 4096

    def __init__(self, buffer: memoryview, position: int = 0) -> None:
        self.buffer, self.position = buffer, position

    def read(self, count: int) -> bytes:
        """The next bytes.

        Raises:
            PickleError: There are fewer.
        """
        end = self.position + count
        if end > len(self.buffer):
            raise PickleError(f"the pickle is cut off: {count} bytes are to follow")
        data = bytes(self.buffer[self.position : end])
        self.position = end
        return data

    def line(self) -> str:
        """The text up to the next line end; at most a few thousand characters, as lines are names.

        Raises:
            PickleError: There is no line end, or the text is damaged.
        """
        window = bytes(self.buffer[self.position : self.position + self._LONGEST_LINE])
        end = window.find(b"\n")
        if end < 0:
            raise PickleError("the pickle is cut off: a line has no end")
        self.position += end + 1
        return window[:end].decode("utf-8")


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


class _Name(NamedTuple):
    """A name that a pickle may mention, ``torch.FloatStorage`` say, with what a call of it builds."""

    path: str
    call: Callable[..., Any] | None


class _Object:
    """A plain object with a state that is not read: ``torch.Size``, hooks, sets."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind


class _Mark:
    """Where the arguments of the next instruction begin on the stack."""


_MARK = _Mark()

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


# what the names build ----------------------------------------------------------------------------


def _described(value: Any) -> str:
    """A value in a message; containers by their type only, as they may contain themselves."""
    if isinstance(value, (_Name, Storage)):
        return value.path if isinstance(value, _Name) else "a storage"
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
        raise PickleError(f"the {what} of a tensor is no list of sizes: {_described(value)}")
    return tuple(sizes)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> StoredTensor:
    """``_rebuild_tensor`` and ``_rebuild_tensor_v2``, whose further arguments are (requires_grad, hooks, metadata)."""
    dtype = storage.dtype if isinstance(storage, Storage) else ""
    return _tensor_of(dtype, storage, offset, shape, strides, rest[2:3])


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
    return _tensor_of(_dtype(dtype), storage, offset, shape, strides, rest[:1])


def _tensor_of(
    dtype: str, storage: Any, offset: Any, shape: Any, strides: Any, metadata: tuple[Any, ...]
) -> StoredTensor:
    if not isinstance(storage, Storage):
        raise PickleError(f"a tensor views {_described(storage)}, which is no storage")
    sizes, steps = _sizes(shape, "shape"), _sizes(strides, "strides")
    (first,) = _sizes((offset,), "offset")
    if len(sizes) != len(steps):
        raise PickleError(f"a tensor has {len(sizes)} dimensions and {len(steps)} strides")
    bits: Any = metadata[0] if metadata else None
    flags = cast("dict[Any, Any]", bits) if isinstance(bits, dict) else {}
    return StoredTensor(dtype, sizes, steps, first, storage, flags.get("neg") is True)


def _size(value: Any = ()) -> tuple[int, ...]:
    return _sizes(value, "size")


def _dtype(value: Any) -> str:
    name = value.path.removeprefix("torch.") if isinstance(value, _Name) else ""
    if name not in _DTYPE_NAMES:
        raise PickleError(f"{_described(value)} is no element type")
    return _ALIASES.get(name, name)


def _parameter(data: Any, *_: Any) -> Any:
    """A parameter is its tensor."""
    return data


def _of_type(rebuild: Any, kind: Any, arguments: Any, _: Any) -> Any:
    """``_rebuild_from_type_v2``: a tensor of a subclass, or with attributes; the plain tensor is read."""
    if not isinstance(rebuild, _Name) or rebuild.call is None or not isinstance(arguments, tuple):
        raise PickleError(f"a tensor is rebuilt by {_described(rebuild)}")
    plain = isinstance(kind, _Name) and kind.path in (
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
    )
    return rebuild.call(*arguments) if plain else _unread("of another class than torch.Tensor")()


def _unread(kind: str) -> Callable[..., StoredTensor]:
    """Builds a tensor of a kind that exists in torch, and cannot be read here."""

    def build(*_: Any) -> StoredTensor:
        return StoredTensor("", (), (), 0, None, problem=f"it is {kind}")

    return build


def _nothing(kind: str) -> Callable[..., _Object]:
    return lambda *_: _Object(kind)


def _dict(*arguments: Any) -> dict[Any, Any]:
    """``OrderedDict()``, or of a list of pairs in old pickles."""
    items: Any = arguments[0] if arguments else []
    built: dict[Any, Any] = {}
    pairs: Any = list(cast("dict[Any, Any]", items).items()) if isinstance(items, dict) else items
    for pair in cast("list[Any]", pairs if isinstance(pairs, list) else [pairs]):
        if not isinstance(pair, (list, tuple)) or len(cast("list[Any]", pair)) != 2:
            raise PickleError(f"a dictionary is built of {_described(pair)}")
        built[_key(pair[0])] = pair[1]
    return built


_NAMES: dict[str, Callable[..., Any] | None] = {
    "collections.OrderedDict": _dict,
    "builtins.dict": _dict,
    "collections.Counter": _dict,
    "builtins.set": _nothing("a set"),
    "builtins.frozenset": _nothing("a set"),
    "builtins.bytearray": _nothing("bytes"),
    "builtins.complex": _nothing("a complex number"),
    "_codecs.encode": _nothing("bytes"),
    "torch.Size": _size,
    "torch.device": _nothing("a device"),
    "torch.serialization._get_layout": _nothing("a layout"),
    "torch.Tensor": _unread("without a storage"),
    "torch.nn.parameter.Parameter": _parameter,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _parameter,
    "torch._utils._rebuild_qtensor": _unread("quantized by torch"),
    "torch._utils._rebuild_sparse_tensor": _unread("sparse"),
    "torch._utils._rebuild_nested_tensor": _unread("nested"),
    "torch._utils._rebuild_meta_tensor_no_storage": _unread("on the device meta, without elements"),
    "torch._utils._rebuild_wrapper_subclass": _unread("of another class than torch.Tensor"),
    **{f"torch.{name}": None for name in (*STORAGE_DTYPES, *_DTYPE_NAMES, *_OTHER_NAMES)},
    **{f"torch.cuda.{name}": None for name in STORAGE_DTYPES},
    "torch.storage.UntypedStorage": None,
    "torch.storage.TypedStorage": None,
}
"""The names that a pickle may mention, and what a call of each builds; None: they are arguments only."""

_EARLIER_MODULES = {"__builtin__": "builtins", "UserDict": "collections"}
"""Modules of Python 2 that are written by protocol 2."""


def _key(value: Any) -> str:
    """A key of a dictionary; numbers and names become texts, whose hashes no file can foresee."""
    if type(value) is str:
        return value
    nested = type(value) is tuple
    parts = cast("tuple[Any, ...]", value) if nested else (value,)
    if len(parts) > 8 or not all(_is_short(part) for part in parts):
        raise PickleError(f"a dictionary has the key {_described(value)}")
    texts = [part.path if isinstance(part, _Name) else str(part) for part in parts]
    return texts[0] if not nested else f"({', '.join(texts)})"


def _is_short(part: Any) -> bool:
    if type(part) in (str, bytes):
        return len(cast("str", part)) <= 200
    return type(part) in (float, bool, type(None), _Name) or (
        type(part) is int and abs(part) < 2**64
    )


def _storage(identity: Any) -> Storage:
    """The storage that a persistent id describes."""
    parts = cast("tuple[Any, ...]", identity if isinstance(identity, tuple) else ())
    parts = tuple(p.decode("ascii", "replace") if isinstance(p, bytes) else p for p in parts)
    fits = len(parts) in (5, 6) and parts[0] == "storage" and isinstance(parts[1], _Name)
    kind = parts[1] if fits else None
    name = kind.path.rpartition(".")[2] if isinstance(kind, _Name) else ""
    if not fits or name not in STORAGE_DTYPES or type(parts[2]) not in (str, int):
        raise PickleError(f"the file refers to {_described(identity)}, which is no storage")
    (numel,) = _sizes((parts[4],), "storage")
    first, size = 0, numel
    if len(parts) == 6 and parts[5] is not None:
        view: Any = parts[5]
        if not isinstance(view, tuple) or len(cast("tuple[Any, ...]", view)) != 3:
            raise PickleError(f"a part of a storage is described by {_described(view)}")
        first, size = _sizes(cast("tuple[Any, ...]", view)[1:], "part of a storage")
    location = parts[3] if type(parts[3]) is str else ""
    return Storage(STORAGE_DTYPES[name], str(parts[2]), location, size, first, numel)


# the instructions --------------------------------------------------------------------------------


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self, found: Callable[[Storage], None] | None = None) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.found = found

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise PickleError("an instruction has too few arguments")
        return self.stack.pop()

    def pop_many(self, count: int) -> list[Any]:
        return [self.pop() for _ in range(count)][::-1]

    def pop_marked(self) -> list[Any]:
        """The values above the last mark, which is removed."""
        stack = self.stack
        at = len(stack) - 1
        while at >= 0 and stack[at] is not _MARK:
            at -= 1
        if at < 0:
            raise PickleError("an instruction has no mark")
        values = stack[at + 1 :]
        del stack[at:]
        return values

    def top(self, kind: type[Any]) -> Any:
        if not self.stack or type(self.stack[-1]) is not kind:
            raise PickleError(f"an instruction changes what is no {kind.__name__}")
        return self.stack[-1]

    def name(self, module: Any, name: Any) -> None:
        module = _EARLIER_MODULES.get(module, module)
        path = f"{module}.{name}"
        if not isinstance(module, str) or not isinstance(name, str) or path not in _NAMES:
            raise PickleError(f"it names {path[:120]}, which no file of plain tensors does")
        self.stack.append(_Name(path, _NAMES[path]))

    def call(self) -> None:
        function, arguments = self.pop_many(2)
        if not isinstance(function, _Name) or not isinstance(arguments, tuple):
            raise PickleError(f"it calls {_described(function)}")
        if function.call is None:
            raise PickleError(f"it calls {function.path}, which is no function")
        try:
            self.stack.append(function.call(*cast("tuple[Any, ...]", arguments)))
        except TypeError as error:
            raise PickleError(f"{function.path} is called with other arguments: {error}") from error

    def build(self) -> None:
        """Sets the state of an object, which is not read: attributes of an OrderedDict say."""
        state = self.pop()
        made = self.pop()
        if not isinstance(made, (dict, _Object, StoredTensor)):
            raise PickleError(f"an instruction sets the state of {type(made).__name__}")
        if isinstance(made, StoredTensor) and made.storage is None and isinstance(state, tuple):
            # torch.FloatTensor() of the oldest files gets (storage, offset, sizes, strides)
            arguments = cast("tuple[Any, ...]", state)
            made = _tensor(*arguments) if len(arguments) == 4 else made
        self.stack.append(cast("Any", made))

    def storage(self) -> None:
        storage = _storage(self.pop())
        if self.found is not None:
            self.found(storage)
        self.stack.append(storage)

    def append_to_list(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise PickleError("a dictionary has a key without a value")
        items: dict[Any, Any] = self.top(dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            items[_key(key)] = value

    def drop(self, *, marked: bool = False) -> None:
        _ = self.pop_marked() if marked else self.pop()

    def remember(self, index: int) -> None:
        if not self.stack or self.stack[-1] is _MARK:
            raise PickleError("an instruction remembers what is not there")
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise PickleError(f"value {index} is not there")
        self.stack.append(self.memo[index])


def _pushes(make: Callable[[Any], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, argument: machine.stack.append(make(argument))


def _unreadable_set(machine: _Machine, _: Any) -> None:
    machine.pop_marked()
    machine.top(_Object)


def _marked(build: Callable[[list[Any]], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(build(machine.pop_marked()))


def _tupled(count: int) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(tuple(machine.pop_many(count)))


def _dict_of(values: list[Any]) -> dict[Any, Any]:
    machine = _Machine()
    machine.stack.append({})
    machine.set_items(values)
    return machine.stack[0]


def _unsigned(size: int) -> Callable[[Bytes], int]:
    return lambda stream: int.from_bytes(stream.read(size), "little")


def _signed(stream: Bytes) -> int:
    return int.from_bytes(stream.read(4), "little", signed=True)


def _float(stream: Bytes) -> float:
    return struct.unpack(">d", stream.read(8))[0]


def _bytes(size: int) -> Callable[[Bytes], bytes]:
    """Bytes after their number, which has `size` bytes."""
    return lambda stream: stream.read(int.from_bytes(stream.read(size), "little"))


def _text(size: int) -> Callable[[Bytes], str]:
    return lambda stream: _bytes(size)(stream).decode("utf-8", "surrogatepass")


def _latin(size: int) -> Callable[[Bytes], str]:
    """A text of Python 2."""
    return lambda stream: _bytes(size)(stream).decode("latin-1")


def _long(size: int) -> Callable[[Bytes], int]:
    return lambda stream: int.from_bytes(_bytes(size)(stream), "little", signed=True)


def _names(stream: Bytes) -> tuple[str, str]:
    return stream.line(), stream.line()


def _none(_: Bytes) -> None:
    return None


_Run = Callable[[_Machine, Any], None]
_LITERALS: dict[bytes, Callable[[Bytes], Any]] = {
    b"J": _signed,
    b"K": _unsigned(1),
    b"M": _unsigned(2),
    b"\x8a": _long(1),
    b"\x8b": _long(4),
    b"G": _float,
    b"X": _text(4),
    b"\x8c": _text(1),
    b"\x8d": _text(8),
    b"B": _bytes(4),
    b"C": _bytes(1),
    b"\x8e": _bytes(8),
    b"T": _latin(4),
    b"U": _latin(1),
}
"""Instructions that push a value, and how it is read."""
_WITH_ARGUMENT: dict[bytes, tuple[Callable[[Bytes], Any], _Run]] = {
    b"\x80": (_unsigned(1), lambda machine, argument: None),  # the protocol
    b"\x95": (_unsigned(8), lambda machine, argument: None),  # the length of a frame
    b"q": (_unsigned(1), lambda machine, index: machine.remember(index)),
    b"r": (_unsigned(4), lambda machine, index: machine.remember(index)),
    b"h": (_unsigned(1), lambda machine, index: machine.recall(index)),
    b"j": (_unsigned(4), lambda machine, index: machine.recall(index)),
    b"c": (_names, lambda machine, names: machine.name(*names)),
    b"\x96": (_bytes(8), lambda machine, value: machine.stack.append(value)),  # a bytearray
}
_WITHOUT_ARGUMENT: dict[bytes, _Run] = {
    b"N": _pushes(lambda _: None),
    b"\x88": _pushes(lambda _: True),
    b"\x89": _pushes(lambda _: False),
    b"]": _pushes(lambda _: []),
    b"}": _pushes(lambda _: {}),
    b")": _pushes(lambda _: ()),
    b"(": _pushes(lambda _: _MARK),
    b"t": _marked(tuple),
    b"\x85": _tupled(1),
    b"\x86": _tupled(2),
    b"\x87": _tupled(3),
    b"l": _marked(list),
    b"d": _marked(_dict_of),
    b"\x8f": _pushes(lambda _: _Object("a set")),
    b"\x90": _unreadable_set,
    b"\x91": _marked(lambda _: _Object("a set")),
    b"a": lambda machine, _: machine.append_to_list(machine.pop_many(1)),
    b"e": lambda machine, _: machine.append_to_list(machine.pop_marked()),
    b"s": lambda machine, _: machine.set_items(machine.pop_many(2)),
    b"u": lambda machine, _: machine.set_items(machine.pop_marked()),
    b"\x94": lambda machine, _: machine.remember(len(machine.memo)),
    b"0": lambda machine, _: machine.drop(),
    b"1": lambda machine, _: machine.drop(marked=True),
    b"\x93": lambda machine, _: machine.name(*machine.pop_many(2)),
    b"R": lambda machine, _: machine.call(),
    b"\x81": lambda machine, _: machine.call(),
    b"b": lambda machine, _: machine.build(),
    b"Q": lambda machine, _: machine.storage(),
}

_INSTRUCTIONS: dict[int, tuple[Callable[[Bytes], Any], _Run]] = {
    **{code[0]: (read, _pushes(lambda value: value)) for code, read in _LITERALS.items()},
    **{code[0]: pair for code, pair in _WITH_ARGUMENT.items()},
    **{code[0]: (_none, run) for code, run in _WITHOUT_ARGUMENT.items()},
}
"""How the argument of each instruction is read, and what it does."""
_STOP = b"."[0]


def interpret(stream: Bytes, found: Callable[[Storage], None] | None = None) -> Any:
    """The value that a pickle describes: plain containers, with a `StoredTensor` for each tensor.

    Containers may contain themselves. The stream is after the pickle's last instruction then.

    Args:
        stream: The pickle.
        found: Called with each storage that the pickle refers to.

    Raises:
        PickleError: The pickle is damaged, mentions a name that no plain checkpoint has, or is too long.
    """
    machine = _Machine(found)
    try:
        for _ in range(_MOST_INSTRUCTIONS):
            code = stream.read(1)[0]
            if code == _STOP:
                value = machine.pop()
                if machine.stack:
                    raise PickleError("values are left over at its end")
                return value
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise PickleError(f"no file of plain tensors has the instruction {bytes([code])!r}")
            read, run = instruction
            run(machine, read(stream))
    except UnicodeDecodeError as error:
        raise PickleError(f"a text is damaged: {error}") from error
    raise PickleError(f"it has over {_MOST_INSTRUCTIONS} instructions")
