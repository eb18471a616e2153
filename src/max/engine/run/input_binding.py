"""Binding of inputs: converts arguments to tensors, addresses and sizes, with errors that name the input."""

# the fields of tensors are read directly: properties would double the time of an execution
# pyright: reportPrivateUsage=false
from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np

from max._compiler.program.code import TensorInfo
from max._errors import ArgumentError, ForeignTypeError
from max.driver import DLPackArray, Tensor
from max.driver._device import device_named
from max.driver._dlpack import is_negated
from max.driver._memory import NO_CHARS, Array
from max.dtype import DType

__all__ = ["InputBinder", "ModelInput"]

ModelInput = DLPackArray | np.generic | float
"""An input of a model: a tensor, another DLPack array, or a number for rank 0."""

_BoundArrays = tuple[list[int], tuple[int, ...]]
MOST_PAIRS = 64
"""The most pairs of a mutable and another input that generated code compares."""


def _shape_text(shape: Sequence[object]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _end(tensor: Tensor) -> int:
    """The end address of a contiguous tensor."""
    return tensor._ptr + math.prod(tensor._shape) * tensor._dtype.size_in_bytes


class InputBinder:
    """Checks the inputs of a model.

    Args:
        model: The model's name, for messages.
        inputs: The types of the inputs.
        names: Their names.
        symbols: The symbols of their shapes, in the order of the bound sizes.
    """

    def __init__(
        self, model: str, inputs: Sequence[TensorInfo], names: Sequence[str], symbols: Sequence[str]
    ) -> None:
        self.model = model
        self.inputs = list(inputs)
        self.names = list(names)
        self.symbols = tuple(symbols)
        self.dtypes = [info.dtype for info in inputs]
        self.devices = [device_named(*info.device) for info in inputs]
        self.memories = [device.memory for device in self.devices]
        self._bind = self._make_bind()
        self._written = [i for i, info in enumerate(inputs) if info.mutable]
        self._overlap = self._make_overlap() if self._written else None

    def _make_bind(self) -> Callable[[list[tuple[int, ...]]], tuple[int, ...] | None]:
        """A function from shapes to the values of the symbols, or None where a shape does not fit."""
        lines, values = self._bind_lines()
        names = "".join(f"s{i}, " for i in range(len(self.inputs)))
        start = [f"    {names}= shapes"] if names else []
        return self._generated(["def bind(shapes):", *start, *lines, f"    return {values}"])[
            "bind"
        ]

    def _generated(self, lines: Sequence[str], **scope: object) -> dict[str, Any]:
        """The names that lines define; they read the declared shapes as `sizes`."""
        scope["sizes"] = [info.shape for info in self.inputs]
        exec(compile("\n".join(lines), "<bind>", "exec"), scope)
        return scope

    def _bind_lines(self) -> tuple[list[str], str]:
        """Lines that compare the shapes `s0`, `s1`, …, and return None where one does not fit; the symbols' values."""
        lines: list[str] = []
        variables: dict[str, str] = {}
        checks: list[str] = []
        for index, info in enumerate(self.inputs):
            lines.append(f"    if len(s{index}) != {len(info.shape)}: return None")
            for axis, dim in enumerate(info.shape):
                size = f"s{index}[{axis}]"
                if isinstance(dim, int):
                    checks.append(f"{size} != {dim}")
                # a dim that is a symbol alone gives its value, the first time
                elif (name := dim.symbol_name) is not None and name not in variables:
                    variables[name] = f"v{len(variables)}"
                    lines.append(f"    {variables[name]} = {size}")
                else:
                    checks.append(f"{size} != sizes[{index}][{axis}].evaluate(env)")
        # a symbol alone is compared directly; expressions are rare
        checks = [self._direct(check, variables) for check in checks]
        env = ", ".join(f"{name!r}: {variable}" for name, variable in variables.items())
        missing = [name for name in self.symbols if name not in variables]
        if any("env" in check for check in checks):
            lines.append(f"    env = {{{env}}}")
        if checks:
            lines.append(f"    if {' or '.join(checks)}: return None")
        if missing:
            raise ValueError(
                f"{self.model}: the sizes of {', '.join(missing)} do not follow from the inputs; "
                "each symbolic dimension must be a whole dimension of an input"
            )
        return lines, f"({''.join(f'{variables[name]}, ' for name in self.symbols)})"

    def _make_overlap(self) -> Callable[[list[Tensor]], bool]:
        """Generates a function that tests whether a mutable input may share memory with another input."""
        pairs = [
            (m, i)
            for m in self._written
            for i in range(len(self.inputs))
            # inputs of different devices cannot overlap; two buffers are compared once
            if self.memories[i] is self.memories[m]
            and i != m
            and not (self.inputs[i].mutable and i < m)
        ]
        if len(pairs) > MOST_PAIRS:
            return self._overlap_of_many
        lines = ["def overlap(tensors):"]
        lines += [f"    p{i} = tensors[{i}]._ptr" for i in range(len(self.inputs))]
        for m in self._written:
            lines.append(f"    e{m} = p{m} + {self._bytes_text(m)}")
            lines += [
                f"    if p{i} < e{m} and p{i} + {self._bytes_text(i)} > p{m}: return True"
                for written, i in pairs
                if written == m
            ]
        lines.append("    return False")
        scope: dict[str, Any] = {"prod": math.prod}
        exec(compile("\n".join(lines), "<overlap>", "exec"), scope)
        return scope["overlap"]

    def _bytes_text(self, index: int) -> str:
        """The number of bytes of an input, as an expression over `tensors`."""
        info = self.inputs[index]
        if all(isinstance(dim, int) for dim in info.shape):
            return str(math.prod(cast(Any, info.shape)) * info.dtype.size_in_bytes)
        return f"prod(tensors[{index}]._shape) * {info.dtype.size_in_bytes}"

    def _overlap_of_many(self, tensors: list[Tensor]) -> bool:
        """The same for many inputs: sorts the ranges by address, and compares each with its predecessors."""
        for memory in set(self.memories):
            spans = sorted(
                (t._ptr, _end(t), i.mutable)
                for t, i, owner in zip(tensors, self.inputs, self.memories, strict=True)
                if owner is memory
            )
            end = written = 0
            for start, stop, mutable in spans:
                # inputs that are only read may share memory with each other
                if start < (end if mutable else written):
                    return True
                end = max(end, stop)
                written = max(written, stop) if mutable else written
        return False

    def _separate(self, tensors: list[Tensor], may_copy: bool) -> None:
        """Replaces inputs that share memory with a mutable input by copies.

        Raises:
            ValueError: Two mutable inputs share memory, or `may_copy` is false.
        """
        for m in self._written:
            start, stop = tensors[m]._ptr, _end(tensors[m])
            for i, tensor in enumerate(tensors):
                if i == m or self.memories[i] is not self.memories[m]:
                    continue
                if not (tensor._ptr < stop and _end(tensor) > start):
                    continue
                if tensor._ptr == _end(tensor) or start == stop:
                    continue  # an empty tensor has no memory
                if self.inputs[i].mutable:
                    raise ValueError(
                        f"{self.what(m)} and {self.what(i)} share memory, and the model writes to both; "
                        "pass buffers with memory of their own"
                    )
                if not may_copy:
                    raise ValueError(
                        f"{self.what(m)} and {self.what(i)} share memory: repeated executions would read what "
                        "earlier ones wrote; pass a copy of one of them, such as tensor.copy()"
                    )
                tensors[i] = tensor.copy()

    def _direct(self, check: str, variables: dict[str, str]) -> str:
        """A check of a size that is a symbol, without the evaluation of an expression; other checks unchanged."""
        size, _, bound = check.partition(" != ")
        if not bound.startswith("sizes"):
            return check
        index, axis = (
            int(part.split("]")[0]) for part in bound.removeprefix("sizes").split("[")[1:]
        )
        dim = self.inputs[index].shape[axis]
        name = None if isinstance(dim, int) else dim.symbol_name
        return check if name is None else f"{size} != {variables[name]}"

    def bind(
        self, args: Sequence[object], may_copy: bool = True
    ) -> tuple[list[Tensor], tuple[int, ...]]:
        """Converts the inputs to tensors, and binds the symbols.

        An input that shares memory with a mutable input is copied, so that the model reads its elements from before the
        execution.

        Args:
            args: The arguments of the call.
            may_copy: Whether such copies are allowed; not if an execution reads the inputs repeatedly.

        Raises:
            ArgumentError: The number of inputs, a type or a dtype is wrong.
            ValueError: A rank, a size or a device is wrong, sizes disagree, or two mutable inputs share memory.
        """
        if len(args) != len(self.inputs):
            self._wrong_count(args)
        tensors: list[Tensor] = []
        for index, arg in enumerate(args):
            # the fast path: tensors that fit as they are
            if (
                type(arg) is Tensor
                and arg._dtype is self.dtypes[index]
                and arg._strides is None
                and arg._device is self.devices[index]
                and not (self.inputs[index].mutable and arg._read_only)
            ):
                tensors.append(arg)
            else:
                tensors.append(self._convert(index, arg))
        values = self._bind([tensor._shape for tensor in tensors])
        if values is None:
            self._wrong_shape([tensor._shape for tensor in tensors])
            raise AssertionError("a shape that does not fit was not found again")
        if self._overlap is not None and self._overlap(tensors):
            self._separate(tensors, may_copy)
        return tensors, values

    def _dtypes_of_arrays(self) -> list[np.dtype[Any]] | None:
        """NumPy's own dtypes of the inputs; None where an input has none, is written or is on another device."""
        found = [info.dtype.to_numpy() for info in self.inputs]
        plain = all(
            dtype.isbuiltin == 1 and not info.mutable and device.memory.addressable
            for dtype, info, device in zip(found, self.inputs, self.devices, strict=True)
        )
        return found if plain else None

    @cached_property
    def bind_arrays(self) -> Callable[[Sequence[Array]], _BoundArrays | None]:
        """A function from NumPy arrays to their addresses and the symbols, or None where `bind` must see to them.

        It takes arrays that fit as they are; the caller keeps them alive as long as it uses the addresses.
        """
        dtypes = self._dtypes_of_arrays()
        if dtypes is None:
            return lambda arrays: None
        arrays = [f"a{i}" for i in range(len(dtypes))]
        names = "".join(f"{name}, " for name in arrays)
        lines = ["def bind(arrays):", f"    if len(arrays) != {len(arrays)}: return None"]
        lines += [f"    {names}= arrays"] if names else []
        for i, name in enumerate(arrays):
            # carray: contiguous, aligned and writable
            lines += [
                f"    if type({name}) is not ndarray or {name}.dtype is not d{i} or not {name}.flags.carray:",
                "        return None",
                f"    s{i} = {name}.shape",
            ]
        checks, values = self._bind_lines()
        addresses = ", ".join(f"address_of(memory_of({name}))" for name in arrays)
        lines += [*checks, f"    return [{addresses}], {values}"]
        scope = {f"d{i}": dtype for i, dtype in enumerate(dtypes)}
        return self._generated(
            lines, ndarray=np.ndarray, address_of=ctypes.addressof, memory_of=NO_CHARS.from_buffer, **scope
        )["bind"]  # fmt: skip

    def what(self, index: int) -> str:
        """Describes an input for messages: its name and type."""
        info = self.inputs[index]
        kind = "buffer" if info.mutable else "tensor"
        where = "" if info.device == ("cpu", 0) else f" on {info.device[0]}:{info.device[1]}"
        type_ = f"{info.dtype.name}{_shape_text(info.shape)}"
        return f"input {self.names[index]!r} of {self.model} (a {kind} {type_}{where})"

    def _wrong_count(self, args: Sequence[object]) -> None:
        """Raises the error for a wrong number of inputs, with a hint if they are in one list or dictionary."""
        names = ", ".join(
            f"{name}: {info.dtype.name}{_shape_text(info.shape)}"
            for name, info in zip(self.names, self.inputs, strict=True)
        )
        passed = str(len(args))
        argument = args[0] if len(args) == 1 else None
        if isinstance(argument, list | tuple):
            items = cast("Sequence[object]", argument)
            passed = f"one {type(items).__name__} of {len(items)}: give its items one by one, execute(*inputs)"
        elif isinstance(argument, Mapping):
            passed = "a dictionary: give its values one by one, in the order of the inputs"
        raise ArgumentError(f"{self.model} takes {len(self.inputs)} inputs ({names}), got {passed}")

    def _convert(self, index: int, arg: object) -> Tensor:
        """Converts an argument to a tensor.

        Raises:
            ArgumentError: It is not a tensor, or has a wrong dtype.
            ValueError: It is on another device, or read-only memory for a mutable input that cannot be copied.
        """
        info = self.inputs[index]
        if isinstance(arg, (bool, int, float, np.generic)):
            return self._scalar(index, cast("np.generic | float", arg))
        if isinstance(arg, Tensor):
            tensor = arg
            if tensor.device is not self.devices[index]:
                raise ValueError(
                    f"{self.what(index)}: got a tensor on {tensor.device.label}:{tensor.device.id}; move it with "
                    ".to(device) first"
                )
        elif hasattr(arg, "__dlpack__"):
            if info.mutable and is_negated(arg):
                raise ArgumentError(
                    f"{self.what(index)}: its memory holds the negated elements (torch's negative bit), so that it "
                    "cannot be written in place; pass tensor.resolve_neg()"
                )
            try:
                tensor = Tensor.from_dlpack(cast("DLPackArray", arg))
            except (BufferError, ValueError, TypeError) as error:
                raise ForeignTypeError(f"{self.what(index)}: {error}") from error
        else:
            raise ArgumentError(
                f"{self.what(index)}: got {type(arg).__name__}; a Tensor, a NumPy array or another DLPack array fits"
            )
        if tensor._device.memory is not self.memories[index] and not info.mutable:
            tensor = tensor.to(self.devices[index])
        if tensor.dtype is not info.dtype:
            # NumPy's default of float64 is the usual cause
            hint = (
                f"; array.astype({info.dtype.name!r}) fits"
                if isinstance(arg, np.ndarray) and info.dtype.to_numpy().isbuiltin == 1
                else ""
            )
            raise ArgumentError(
                f"{self.what(index)}: got dtype {tensor.dtype.name} (shape {_shape_text(tensor.shape)}){hint}"
            )
        if info.mutable:
            if tensor._device.memory is not self.memories[index]:
                raise ValueError(
                    f"{self.what(index)}: the model writes to it, and an array of the host is a copy there; make a "
                    "tensor on the device, Tensor.from_numpy(array).to(device)"
                )
            if not tensor.is_contiguous:
                raise ValueError(
                    f"{self.what(index)}: the model writes to it, but it is not contiguous"
                )
            try:
                tensor._begin_write()
            except ValueError as error:
                raise ValueError(f"{self.what(index)}: the model writes to it. {error}") from error
            return tensor
        return tensor if tensor.is_contiguous else tensor.contiguous()

    def _scalar(self, index: int, arg: np.generic | float) -> Tensor:
        """A tensor of rank 0 with a number."""
        info = self.inputs[index]
        if info.mutable:
            raise ArgumentError(
                f"{self.what(index)}: the model writes to it, a {type(arg).__name__} cannot change"
            )
        if info.shape:
            raise ValueError(
                f"{self.what(index)}: got the scalar {arg!r}, expected rank {len(info.shape)}"
            )
        name = type(arg).__name__
        # a number fits where its kind can hold it; NumPy's are taken as Python's
        number: object = arg.item() if isinstance(arg, np.generic) else arg
        match number:
            case bool():
                fits = True
            case int():
                fits = info.dtype is not DType.bool
            case _:
                fits = isinstance(number, float) and info.dtype.is_float()
        if not fits:
            raise ArgumentError(f"{self.what(index)}: got {arg!r} ({name})")
        try:
            return Tensor.scalar(cast("float", number), info.dtype, self.devices[index])
        except OverflowError as error:
            raise ValueError(f"{self.what(index)}: {error}") from error

    def _wrong_shape(self, shapes: list[tuple[int, ...]]) -> None:
        """Raises the error for the first shape that does not fit."""
        bound: dict[str, tuple[int, str]] = {}
        for index, (info, shape) in enumerate(zip(self.inputs, shapes, strict=True)):
            if len(shape) != len(info.shape):
                raise ValueError(
                    f"{self.what(index)}: got rank {len(shape)} (shape {_shape_text(shape)}), "
                    f"expected rank {len(info.shape)}"
                )
            for axis, (dim, size) in enumerate(zip(info.shape, shape, strict=True)):
                if isinstance(dim, int):
                    if dim != size:
                        raise ValueError(
                            f"{self.what(index)}: got shape {_shape_text(shape)}; axis {axis} is {size}, expected {dim}"
                        )
                elif (name := dim.symbol_name) is not None and name not in bound:
                    bound[name] = (size, f"axis {axis} of input {self.names[index]!r}")
        for index, (info, shape) in enumerate(zip(self.inputs, shapes, strict=True)):
            for axis, (dim, size) in enumerate(zip(info.shape, shape, strict=True)):
                if isinstance(dim, int):
                    continue
                expected = dim.evaluate({name: value for name, (value, _) in bound.items()})
                if expected != size:
                    origin = ", ".join(
                        f"{name} is {bound[name][0]} by {bound[name][1]}" for name in dim.symbols
                    )
                    raise ValueError(
                        f"{self.what(index)}: got shape {_shape_text(shape)}; axis {axis} is {size}, "
                        f"expected {dim} = {expected} ({origin})"
                    )
