"""A kernel that runs in plain Python behind the address of a native function (``MAX_KERNEL_INTERPRET=1``).

The program around it stays as it is: workers call the address with the argument block and their context, and the
function of the kernel runs over arrays in the same memory, under the debugger if there is one.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from max._abi import (
    CONTEXT_BYTES,
    COUNTER_BYTES,
    SCRATCH_ALIGNMENT,
    WORD_BYTES,
    Context,
    ErrorRecord,
    ErrorState,
)
from max._host.reentry import reentrant_lock
from max.kernel.interpreter.interpret import ArrayView, RunContext, arguments, format_error
from max.kernel.ir.nodes import KernelIR
from max.kernel.language import lang
from max.kernel.language.source import Kernel
from max.kernel.language.values import begin_run
from max.kernel.targets.target import Target
from max.kernel.types import ScalarType, TensorSpec, scalar_type

_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_BARRIER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_POLL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
_lock = reentrant_lock()
_entries: list[Any] = []  # native code has their addresses: they stay


class PythonMessage:
    """The message of an exception that a kernel raised in plain Python; it follows the numbered messages."""

    def __init__(self) -> None:
        self.exception, self.text = "RuntimeError", ""

    def format(self, values: Any) -> str:
        """The text that was raised."""
        return self.text


class _Left(Exception):
    """Ends the kernel in this worker, as another one has raised."""


class _NativeContext(RunContext):
    """``ctx`` over the worker's native context."""

    def __init__(self, ctx: int, target: Target) -> None:
        self.pointer = ctx
        self.fields = _words(ctx, CONTEXT_BYTES // WORD_BYTES)
        self.target = target
        self.worker = self._field(Context.WORKER)
        self.num_workers = self._field(Context.WORKERS)
        self.record = _words(self._field(Context.ERROR), ErrorRecord.END)
        self.phase_numbers = itertools.count()
        self.scratch_offset = 0

    def _field(self, field: Context) -> int:
        return int(self.fields[field])

    def _next_chunk(self, phase: int, share: int) -> int:
        """Takes the number of the next chunk of a share; leaves the kernel if the run was interrupted."""
        if self._field(Context.ALERT) and _POLL(self._field(Context.POLL))(self.pointer):
            raise _Left
        counters = self._field(Context.COUNTERS) + COUNTER_BYTES * phase
        counter = _words(counters + WORD_BYTES * share, 1)
        with _lock:
            number = int(counter[0])
            counter[0] = number + 1
        return number

    def _chunks(self, total: int, grain: int, multiple: int) -> Iterator[tuple[int, int]]:
        phase = next(self.phase_numbers)
        yield from self._chunks_of_worker(
            total, grain, multiple, functools.partial(self._next_chunk, phase)
        )

    def barrier(self) -> None:
        _BARRIER(self._field(Context.BARRIER))(self.pointer)
        if self.record[ErrorRecord.STATE] != ErrorState.NONE:
            raise _Left

    def scratch(self, dtype: Any, shape: int | tuple[int, ...]) -> ArrayView:
        dtype = scalar_type(dtype)
        sizes = (shape,) if isinstance(shape, int) else shape
        array = _array(self._field(Context.SCRATCH) + self.scratch_offset, dtype, sizes, None)
        self.scratch_offset += -(-array.nbytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        return ArrayView(array, "scratch", True)


def _words(address: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))


class _Memory:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _array(
    address: int, dtype: ScalarType, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> np.ndarray[Any, np.dtype[Any]]:
    """The array at an address; strides in elements."""
    if 0 in shape or address == 0:
        return np.zeros(shape, dtype.numpy)
    # the array interface has no name for the types of ml_dtypes: take integers of their size
    plain = np.dtype(f"u{dtype.size}")
    interface = {
        "data": (address, False),
        "shape": shape,
        "strides": None if strides is None else tuple(s * dtype.size for s in strides),
        "typestr": plain.str,
        "version": 3,
    }
    return np.asarray(_Memory(interface)).view(dtype.numpy)


def interpreted_entry(ir: KernelIR, target: Target) -> int:
    """The address of a native function that runs the kernel in plain Python.

    Args:
        ir: the kernel, specialized while ``MAX_KERNEL_INTERPRET`` was set.
        target: what ``k.target()`` gives.
    """
    entry = _ENTRY(_Runner(ir, target))
    _entries.append(entry)
    return int(ctypes.cast(entry, ctypes.c_void_p).value or 0)


class _Runner:
    def __init__(self, ir: KernelIR, target: Target) -> None:
        fn, _, self.params = ir.origin
        self.fn: Kernel = fn
        self.ir, self.target = ir, target

    def __call__(self, args: int, ctx: int) -> None:
        context = _NativeContext(ctx, self.target)
        lang.push_target(self.target)
        begin_run()
        try:
            words = _words(args, max(len(self.ir.slots), 1)).tolist()
            views = launch_arguments(self.ir, words, _array)
            positional, keywords = arguments(self.fn, views, dict(self.params), context)
            self.fn(*positional, **keywords)
        except _Left:
            return
        except Exception as error:  # any exception reaches the caller through the error record
            self._report(context, format_error(error))
        except BaseException as error:  # Ctrl-C: it cannot pass through native code
            self._interrupt(context, error)
        finally:
            lang.pop_target()

    def _report(self, context: _NativeContext, error: Exception) -> None:
        """Stores a worker's exception in the error record, unless another worker was first."""
        # `specialize` appends a PythonMessage after the numbered ones
        message = self.ir.messages[-1]
        with _lock:
            if context.record[ErrorRecord.STATE] == ErrorState.NONE:
                message.exception, message.text = type(error).__name__, str(error)  # type: ignore[misc]
                context.record[ErrorRecord.LAUNCH] = context.fields[Context.LAUNCH]
                context.record[ErrorRecord.RAISE] = len(self.ir.messages) - 1
                context.record[ErrorRecord.STATE] = ErrorState.FAILED

    def _interrupt(self, context: _NativeContext, error: BaseException) -> None:
        """Stores an exception that ends the run, such as KeyboardInterrupt, with a reference to it."""
        with _lock:
            if context.record[ErrorRecord.STATE] == ErrorState.NONE:
                # the reference belongs to the caller, which raises the exception again
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))
                context.record[ErrorRecord.VALUES] = id(error)
                context.record[ErrorRecord.STATE] = ErrorState.INTERRUPTED


ArrayAt = Callable[
    [int, ScalarType, tuple[int, ...], tuple[int, ...] | None], np.ndarray[Any, np.dtype[Any]]
]
"""Gives the array at an address: dtype, shape, and strides in elements or None for contiguous."""


def launch_arguments(ir: KernelIR, words: Sequence[int], array_at: ArrayAt) -> list[Any]:
    """What `interpret` takes as the arguments of a kernel, from the argument slots of a launch.

    Args:
        ir: The kernel.
        words: The argument slots, in the order of `KernelIR.slots`.
        array_at: Gives the memory behind an address.
    """
    slots = {(s.arg, s.kind, s.axis): int(w) for s, w in zip(ir.slots, words, strict=False)}
    _, specs, _ = ir.origin
    views: list[Any] = []
    for position, spec in enumerate(specs):
        if not isinstance(spec, TensorSpec):
            dtype = scalar_type(spec)
            # a scalar is in the low bytes of its slot
            raw = np.array([slots[position, "scalar", 0]], np.int64).view(np.uint8)
            views.append(raw[: dtype.size].view(dtype.numpy)[0])
            continue
        shape = tuple(
            s if isinstance(s, int) else slots[position, "dim", axis]
            for axis, s in enumerate(spec.shape)
        )
        strides = None
        if spec.strides is not None:
            strides = tuple(
                slots[position, "stride", axis] if s is None else s
                for axis, s in enumerate(spec.strides)
            )
        views.append(array_at(slots[position, "pointer", 0], spec.dtype, shape, strides))
    return views
