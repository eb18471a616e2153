"""Runs kernels in plain Python over NumPy arrays: for debuggers, and as the oracle of the compiled code.

The kernel's own function is called, with parameters that behave as in compiled code. Indices are always checked. Floats
may differ in the last bit where compiled code fuses a multiplication with an addition.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any: these functions check their types

from __future__ import annotations

import ast
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from max._host.reentry import reentrant_lock
from max.kernel.errors import KernelTypeError
from max.kernel.ir.nodes import LONG_SHARE, LONGS, MAX_SHARES, SHORT_SHARE
from max.kernel.language import lang, values
from max.kernel.language.parameters import OperandRecord, parameter_annotation
from max.kernel.language.source import Kernel
from max.kernel.language.values import Value
from max.kernel.targets.cpu import host_target
from max.kernel.targets.target import Target
from max.kernel.types import Access, Context, scalar_type

Array = np.ndarray[Any, np.dtype[Any]]


class ArrayView:
    """A tensor view in plain Python."""

    def __init__(self, array: Array, name: str, writable: bool) -> None:
        self.array, self.name, self.writable = array, name, writable
        self.dtype = scalar_type(array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
        return tuple(s // self.array.itemsize for s in self.array.strides)

    @property
    def rank(self) -> int:
        return self.array.ndim

    @property
    def size(self) -> int:
        return self.array.size

    @property
    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    def __repr__(self) -> str:
        return f"<view {self.name}: {self.dtype.name}{list(self.shape)}>"

    def __len__(self) -> int:
        return self.shape[0]

    def _like(self, array: Array) -> ArrayView:
        return ArrayView(array, self.name, self.writable)

    def _indices(self, indices: tuple[Any, ...]) -> tuple[int, ...]:
        if len(indices) == 1 and isinstance(indices[0], tuple):
            indices = indices[0]
        if len(indices) != self.rank:
            raise IndexError(f"{self.name} takes {self.rank} indices, got {len(indices)}")
        return tuple(int(i) for i in indices)

    def _check(self, axis: int, index: int) -> None:
        if not 0 <= index < self.shape[axis]:
            raise IndexError(
                f"{self.name}: index {index} is out of range for axis {axis} of size {self.shape[axis]}"
            )

    def _writable(self) -> None:
        if not self.writable:
            raise TypeError(f"{self.name} is a k.Input and cannot be written")

    def _lanes(
        self, indices: tuple[Any, ...], width: int, mask: Any, axis: int
    ) -> tuple[Any, Array]:
        """The index of the active lanes of an access, checked against the shape, and which lanes are active."""
        at = list(self._indices(indices))
        axis %= self.rank
        active = (
            np.ones(width, bool)
            if mask is None
            else np.broadcast_to(values.value(mask).data, (width,)).copy()
        )
        lanes = at[axis] + np.arange(width)
        for k, i in enumerate(at):
            if k != axis and active.any():
                self._check(k, i)
        for lane in lanes[active]:
            self._check(axis, int(lane))
        index: list[Any] = list(at)
        index[axis] = lanes[active]
        return tuple(index), active

    # ***** elements *****
    def load(
        self,
        *indices: Any,
        width: int | None = None,
        mask: Any = None,
        axis: int = -1,
        other: Any = 0,
    ) -> Value:
        """As `View.load` of the kernel language."""
        if width is None:
            at = self._indices(indices)
            for axis, index in enumerate(at):
                self._check(axis, index)
            return Value(self.array[at], self.dtype)
        index, active = self._lanes(indices, width, mask, axis)
        data = np.broadcast_to(values.convert(other, self.dtype).data, (width,)).copy()
        if active.any():
            data[active] = self.array[index]
        return Value(data, self.dtype)

    def store(self, *indices: Any, value: Any, mask: Any = None, axis: int = -1) -> None:
        """As `View.store` of the kernel language."""
        self._writable()
        value = values.convert(value, self.dtype)
        if not value.is_vector:
            at = self._indices(indices)
            for axis, index in enumerate(at):
                self._check(axis, index)
            self.array[at] = value.data
            return
        index, active = self._lanes(indices, value.width, mask, axis)
        if active.any():
            self.array[index] = value.data[active]

    def gather(self, indices: Any, mask: Any = None, other: Any = 0) -> Value:
        """As `View.gather` of the kernel language."""
        lanes = np.arange(indices.width)
        active = lanes >= 0 if mask is None else values.value(mask).data
        data = np.broadcast_to(values.convert(other, self.dtype).data, (indices.width,)).copy()
        # one by one: the others may have any index
        for lane in lanes[active]:
            self._check(0, int(indices.data[lane]))
            data[lane] = self.array[int(indices.data[lane])]
        return Value(data, self.dtype)

    def scatter(self, indices: Any, value: Any, mask: Any = None) -> None:
        """As `View.scatter` of the kernel language."""
        self._writable()
        data = np.broadcast_to(values.convert(value, self.dtype).data, (indices.width,))
        # in order: for equal indices the last lane's value stays
        for lane in range(indices.width):
            if mask is None or values.value(mask).data[lane]:
                self._check(0, int(indices.data[lane]))
                self.array[int(indices.data[lane])] = data[lane]

    def atomic_add(self, *indices: Any, value: Any) -> Value:
        """As `View.atomic_add` of the kernel language."""
        self._writable()
        at = self._indices(indices)
        with _atomic:
            old = self.load(*at)
            self.array[at] += values.convert(value, self.dtype).data
        return old

    def prefetch(self, *indices: Any, write: bool = False, locality: int = 3) -> None:
        self._indices(indices)

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) == self.rank and not any(isinstance(i, slice) for i in indices):
            return self.load(*indices)
        at: list[Any] = []
        for axis, i in enumerate(indices):
            if isinstance(i, slice):
                start = 0 if i.start is None else int(i.start)
                stop = self.shape[axis] if i.stop is None else int(i.stop)
                at.append(slice(start, stop))
            else:
                self._check(axis, int(i))
                at.append(int(i))
        return self._like(self.array[tuple(at)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.store(*(index if isinstance(index, tuple) else (index,)), value=value)

    # ***** views *****
    def reshape(self, *shape: Any) -> ArrayView:
        if len(shape) == 1 and isinstance(shape[0], tuple):
            shape = shape[0]
        if not self.is_contiguous:
            raise TypeError(f"{self.name}.reshape takes a contiguous view")
        return self._like(self.array.reshape([int(s) for s in shape]))

    def view(self, dtype: Any) -> ArrayView:
        return self._like(self.array.view(scalar_type(dtype).numpy))

    def transpose(self, *axes: Any) -> ArrayView:
        return self._like(
            self.array.transpose(axes[0] if len(axes) == 1 and isinstance(axes[0], tuple) else axes)
        )


# workers are threads
_atomic = reentrant_lock()


class _Launch:
    """The state that the workers of a run share."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.barrier = threading.Barrier(num_workers)
        self.lock = threading.Lock()
        self.counters: dict[tuple[int, int], int] = {}


class RunContext:
    """``ctx`` in plain Python."""

    def __init__(self, launch: _Launch, worker: int, target: Target) -> None:
        self._launch = launch
        self._phases = itertools.count()
        self.worker, self.num_workers, self.target = worker, launch.num_workers, target

    def _chunks(self, total: int, grain: int, multiple: int) -> Iterator[tuple[int, int]]:
        """The chunks that this worker takes from the next parallel loop, as (begin, end)."""
        phase, launch = next(self._phases), self._launch

        def next_chunk(share: int) -> int:
            with launch.lock:
                number = launch.counters.get((phase, share), 0)
                launch.counters[phase, share] = number + 1
            return number

        yield from self._chunks_of_worker(total, grain, multiple, next_chunk)

    def _chunks_of_worker(
        self, total: int, grain: int, multiple: int, next_chunk: Callable[[int], int]
    ) -> Iterator[tuple[int, int]]:
        """The chunks that this worker takes, as compiled code cuts them."""
        if total <= 0:
            return
        # as in compiled code: one worker takes all at once
        if self.num_workers == 1:
            yield 0, total
            return
        long_size = grain if grain > 0 else max(total // (LONG_SHARE * self.num_workers), 1)
        short_size = grain if grain > 0 else max(long_size // SHORT_SHARE, 1)
        long_size, short_size = (
            -(-size // multiple) * multiple for size in (long_size, short_size)
        )
        shares = min(self.num_workers, MAX_SHARES)
        share = -(-total // shares)
        share = -(-share // multiple) * multiple
        # its own share first, then those of others
        for turn in range(shares):
            number_of_share = (self.worker + turn) % shares
            first = number_of_share * share
            limit = min(first + share, total)
            while first < limit:
                number = next_chunk(number_of_share)
                # long chunks have the first numbers
                begin = first + min(number, LONGS) * long_size
                begin += max(number - LONGS, 0) * short_size
                if begin >= limit:
                    break
                yield begin, min(begin + (long_size if number < LONGS else short_size), limit)

    def parallel(self, shape: Any, grain: Any = 0) -> Iterator[Any]:
        """All indices of this worker's chunks."""
        sizes = tuple(int(s) for s in shape) if isinstance(shape, tuple) else (int(shape),)
        for begin, end in self._chunks(int(np.prod(sizes)), int(grain), 1):
            for flat in range(begin, end):
                index = tuple(int(i) for i in np.unravel_index(flat, sizes))
                yield index if isinstance(shape, tuple) else index[0]

    def chunks(self, total: Any, grain: Any = 0, multiple: int = 1) -> Iterator[tuple[int, int]]:
        """This worker's ranges."""
        yield from self._chunks(int(total), int(grain), multiple)

    def barrier(self) -> None:
        """Waits for all workers."""
        self._launch.barrier.wait()

    def scratch(self, dtype: Any, shape: int | tuple[int, ...]) -> ArrayView:
        """Memory of this worker."""
        return ArrayView(np.zeros(shape, scalar_type(dtype).numpy), "scratch", True)


def interpret(
    fn: Kernel,
    args: Sequence[Any],
    params: Mapping[str, Any] | None = None,
    num_workers: int = 1,
    target: Target | None = None,
) -> None:
    """Runs a kernel in plain Python. Outputs are written in place.

    Args:
        fn: the kernel.
        args: An array for each view, a number for each scalar, as for ``specialize``.
        params: the values of the keyword-only parameters.
        num_workers: how many workers; more than one run as threads.
        target: what ``k.target()`` gives; this machine by default.

    Raises:
        Exception: what the kernel raises, with its message filled in.
    """
    target = target or host_target()
    launch = _Launch(num_workers)
    errors: list[BaseException] = []

    def work(worker: int) -> None:
        """Runs the kernel as one worker; its exception ends the others at their barrier."""
        positional, keywords = arguments(
            fn, args, dict(params or {}), RunContext(launch, worker, target)
        )
        values.begin_run()
        try:
            fn(*positional, **keywords)
        except threading.BrokenBarrierError:  # another worker has raised
            return
        except Exception as error:  # exceptions of every worker reach the caller
            # or the others would wait at their barrier forever
            launch.barrier.abort()
            errors.append(format_error(error))

    lang.push_target(target)
    try:
        if num_workers == 1:
            work(0)
        else:
            threads = [
                threading.Thread(target=work, args=(n,), name=f"kernel worker {n}", daemon=True)
                for n in range(num_workers)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        lang.pop_target()
    if errors:
        raise errors[0]


def format_error(error: Exception) -> Exception:
    """An error with the values in its message."""
    if len(error.args) > 1 and isinstance(error.args[0], str) and "{}" in error.args[0]:
        error.args = (error.args[0].format(*error.args[1:]),)
    return error


def arguments(
    fn: Kernel, args: Sequence[Any], params: dict[str, Any], ctx: RunContext
) -> tuple[list[Any], dict[str, Any]]:
    """A kernel's positional and keyword arguments in plain Python."""
    a = fn.source.node.args
    waiting = list(args)
    positional: list[Any] = []

    def argument(name: str, annotation: Any) -> Any:
        if not waiting:
            raise KernelTypeError(f"{fn.name} got {len(args)} arguments, and none for {name!r}")
        return _argument(name, waiting.pop(0), annotation)

    for p in (*a.posonlyargs, *a.args):
        annotation = _parameter_annotation(fn, p)
        if annotation is Context:
            positional.append(ctx)
        elif isinstance(annotation, OperandRecord):
            positional.append(annotation.bind(p.arg, argument))
        else:
            positional.append(argument(p.arg, annotation))
    if a.vararg is not None:
        annotation = _parameter_annotation(fn, a.vararg)
        if annotation is Context or isinstance(annotation, OperandRecord):
            raise KernelTypeError(
                f"*{a.vararg.arg} takes views or scalars, not a context or records"
            )
        positional += [
            _argument(f"{a.vararg.arg}[{n}]", x, annotation) for n, x in enumerate(waiting)
        ]
    elif waiting:
        raise KernelTypeError(
            f"{fn.name} takes {len(args) - len(waiting)} arguments, got {len(args)}"
        )
    for p in a.kwonlyargs:
        if _annotation(fn, p) is Context:
            params[p.arg] = ctx
    return positional, params


def _annotation(fn: Kernel, p: ast.arg) -> Any:
    """The value of a parameter's annotation, in the scope of the kernel's definition."""
    node = p.annotation
    if node is None:
        return None
    source = fn.source
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        code = compile(node.value, source.file, "eval")
    else:
        code = compile(ast.Expression(node), source.file, "eval")
    return eval(code, {**source.scope})


def _parameter_annotation(fn: Kernel, p: ast.arg) -> Any:
    if p.annotation is None:
        raise KernelTypeError(
            f"parameter {p.arg} needs an annotation: k.Input, k.Output, k.InOut, k.Context or an element type"
        )
    return parameter_annotation(_annotation(fn, p), p.arg, fn.source.scope)


def _argument(name: str, x: Any, annotation: Any) -> Any:
    if isinstance(annotation, Access):
        if not isinstance(x, np.ndarray):
            raise KernelTypeError(f"{name} is an array, got {x!r}")
        return ArrayView(x, name, annotation.writable)
    return Value(x, annotation)


__all__ = ["ArrayView", "RunContext", "interpret"]
