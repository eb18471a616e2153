"""An interpreter of the pickles in files of ``torch.save``: builds plain containers, and records of tensors.

A pickle is a program. This module does not run it by Python's unpickler: each instruction is one of a table, it builds
numbers, texts, lists, dicts and tuples, and the names that it may mention are those of another table, whose entries are
functions of `max.graph.weights._torch_objects`. No module is imported and no code of the file is executed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, cast

from max.graph.weights._torch_objects import (
    EARLIER_MODULES,
    NAMES,
    Name,
    PickleError,
    Storage,
    StoredTensor,
    UnreadObject,
    description,
    dictionary_key,
    storage_of,
    tensor_of,
)

__all__ = ["Bytes", "interpret"]

_MOST_INSTRUCTIONS = 2_000_000
"""A file of 60,000 tensors has as many."""


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
        # bounded: a damaged file may have no line end for gigabytes
        window = bytes(self.buffer[self.position : self.position + self._LONGEST_LINE])
        end = window.find(b"\n")
        if end < 0:
            raise PickleError("the pickle is cut off: a line has no end")
        self.position += end + 1
        return window[:end].decode("utf-8")


class _Mark:
    """Where the arguments of the next instruction begin on the stack."""


_MARK = _Mark()


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self, on_storage: Callable[[Storage], None] | None = None) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.found = on_storage

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

    def top(self, cls: type[Any]) -> Any:
        if not self.stack or type(self.stack[-1]) is not cls:
            raise PickleError(f"an instruction changes what is no {cls.__name__}")
        return self.stack[-1]

    def name(self, module: Any, name: Any) -> None:
        module = EARLIER_MODULES.get(module, module)
        path = f"{module}.{name}"
        if not isinstance(module, str) or not isinstance(name, str) or path not in NAMES:
            raise PickleError(f"it names {path[:120]}, which no file of plain tensors does")
        self.stack.append(Name(path, NAMES[path]))

    def call(self) -> None:
        function, arguments = self.pop_many(2)
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise PickleError(f"it calls {description(function)}")
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
        if not isinstance(made, (dict, UnreadObject, StoredTensor)):
            raise PickleError(f"an instruction sets the state of {type(made).__name__}")
        if isinstance(made, StoredTensor) and made.storage is None and isinstance(state, tuple):
            # torch.FloatTensor() of the oldest files gets (storage, offset, sizes, strides)
            arguments = cast("tuple[Any, ...]", state)
            made = tensor_of(*arguments) if len(arguments) == 4 else made
        self.stack.append(cast("Any", made))

    def storage(self) -> None:
        storage = storage_of(self.pop())
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
            items[dictionary_key(key)] = value

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
    machine.top(UnreadObject)


def _push_marked(build: Callable[[list[Any]], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(build(machine.pop_marked()))


def _push_tuple(count: int) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(tuple(machine.pop_many(count)))


def _dict_of(values: list[Any]) -> dict[Any, Any]:
    machine = _Machine()
    machine.stack.append({})
    machine.set_items(values)
    return machine.stack[0]


def _unsigned_integer(size: int) -> Callable[[Bytes], int]:
    return lambda stream: int.from_bytes(stream.read(size), "little")


def _signed_integer(stream: Bytes) -> int:
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
    b"J": _signed_integer,
    b"K": _unsigned_integer(1),
    b"M": _unsigned_integer(2),
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
    b"\x80": (_unsigned_integer(1), lambda machine, argument: None),  # the protocol
    b"\x95": (_unsigned_integer(8), lambda machine, argument: None),  # the length of a frame
    b"q": (_unsigned_integer(1), lambda machine, index: machine.remember(index)),
    b"r": (_unsigned_integer(4), lambda machine, index: machine.remember(index)),
    b"h": (_unsigned_integer(1), lambda machine, index: machine.recall(index)),
    b"j": (_unsigned_integer(4), lambda machine, index: machine.recall(index)),
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
    b"t": _push_marked(tuple),
    b"\x85": _push_tuple(1),
    b"\x86": _push_tuple(2),
    b"\x87": _push_tuple(3),
    b"l": _push_marked(list),
    b"d": _push_marked(_dict_of),
    b"\x8f": _pushes(lambda _: UnreadObject("a set")),
    b"\x90": _unreadable_set,
    b"\x91": _push_marked(lambda _: UnreadObject("a set")),
    b"a": lambda machine, _: machine.append_to_list(machine.pop_many(1)),
    b"e": lambda machine, _: machine.append_to_list(machine.pop_marked()),
    b"s": lambda machine, _: machine.set_items(machine.pop_many(2)),
    b"u": lambda machine, _: machine.set_items(machine.pop_marked()),
    # MEMOIZE: the index is the number of values in the memo
    b"\x94": lambda machine, _: machine.remember(len(machine.memo)),
    b"0": lambda machine, _: machine.drop(),
    b"1": lambda machine, _: machine.drop(marked=True),
    b"\x93": lambda machine, _: machine.name(*machine.pop_many(2)),
    b"R": lambda machine, _: machine.call(),
    # NEWOBJ: a class is called as a function is
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


def interpret(stream: Bytes, on_storage: Callable[[Storage], None] | None = None) -> Any:
    """The value that a pickle describes: plain containers, with a `StoredTensor` for each tensor.

    Containers may contain themselves. The stream is after the pickle's last instruction then.

    Args:
        stream: The pickle.
        on_storage: Called with each storage that the pickle refers to.

    Raises:
        PickleError: The pickle is damaged, mentions a name that no plain checkpoint has, or is too long.
    """
    machine = _Machine(on_storage)
    try:
        # no instruction jumps back, so this bounds the work
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
