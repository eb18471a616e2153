"""Accelerators in this process: a kind of device that shares nothing with the CPU.

- Memory: addresses are numbers above 2**60, which no processor can read. Host code that touches one directly ends in a
  segmentation fault; only this file knows the bytes behind them.
- Queue: a thread that runs launches and copies in their order, after the call that queued them has returned.
- Kernels: the kernel language's interpreter runs them. The library has its own matrix product, without an epilogue.
- Weights are not packed.
"""

from __future__ import annotations

import bisect
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import numpy as np
import numpy.typing as npt

from max import kernel as k
from max._backends import Backend, BackendOptions, register_backend
from max._backends.cpu.kernels.library import CPU_KERNELS
from max._backends.cpu.regions.nest import write_region
from max._backends.kernel_call import KernelCall, Operand, product, view
from max._backends.kernel_library import KernelLibrary
from max._backends.program import Jump, NativeArray, Program, run_error_class
from max._backends.regions import RegionKernel, RegionSpec
from max.driver import Accelerator, Device, DeviceStream
from max.driver._device import register_accelerators, unregister_accelerators
from max.driver._memory import DeviceMemory, Memory
from max.dtype import DType

Array = npt.NDArray[Any]
FIRST_ADDRESS = 1 << 60
"""No pointer of x86-64 or arm64 looks like this: reading it is a fault."""
POISON = 0xA5


class FakeQueue:
    """A thread that runs queued actions in order. `synchronize` raises the first error."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.launches: list[str] = []
        """The names of all launches that ran."""
        self._items: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._work, name=f"fake-{name}", daemon=True)
        self.thread.start()

    def put(self, action: Callable[[], None]) -> None:
        """Queues an action and returns immediately. After an error no action runs until `synchronize`."""

        def guarded() -> None:
            if self._error is None:
                try:
                    action()
                except BaseException as error:
                    self._error = error

        self._items.put(guarded)

    def synchronize(self) -> None:
        """Waits until the queue is empty, and raises its first error."""
        if threading.current_thread() is self.thread:
            return
        done = threading.Event()
        self._items.put(done.set)
        done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        while True:
            self._items.get()()


class FakeMemory(DeviceMemory):
    """Blocks of bytes in an address space of its own."""

    def __init__(self, queue: FakeQueue, first: int) -> None:
        self._queue = queue
        self._next = first
        self._blocks: dict[int, Array] = {}
        self._starts: list[int] = []
        self._lock = threading.Lock()
        self.read_bytes = self.written_bytes = 0

    def allocate(self, op: str, dtype: DType, shape: tuple[int, ...], zero: bool) -> Memory:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.size_in_bytes
        block = np.full(nbytes, 0 if zero else POISON, np.uint8)
        owner = _Owner()
        with self._lock:
            start = self._next
            # a gap: an access beyond the end of a block is in no block
            self._next += (nbytes // 4096 + 2) * 4096
            self._blocks[start] = block
            self._starts.append(start)
        # queued launches may still use it
        weakref.finalize(owner, self._queue.put, lambda: self._free(start)).atexit = False
        return Memory(start, owner)

    def _free(self, start: int) -> None:
        with self._lock:
            del self._blocks[start]
            self._starts.remove(start)

    @property
    def used_bytes(self) -> int:
        """Returns the number of bytes in all blocks."""
        with self._lock:
            return sum(block.size for block in self._blocks.values())

    def read(self, ptr: int, nbytes: int) -> Array:
        self._queue.synchronize()
        self.read_bytes += nbytes
        return self.bytes_at(ptr, nbytes).copy()

    def write(self, ptr: int, data: Array) -> None:
        assert data.dtype == np.uint8
        self._queue.synchronize()
        self.written_bytes += data.size
        self.bytes_at(ptr, data.size)[:] = data

    def bytes_at(self, ptr: int, nbytes: int) -> Array:
        """Returns the device's bytes at an address; for this file only."""
        if nbytes == 0:
            return np.zeros(0, np.uint8)
        with self._lock:
            position = bisect.bisect_right(self._starts, ptr) - 1
            start = self._starts[position] if position >= 0 else -1
            block = self._blocks.get(start)
        if block is None or ptr + nbytes > start + block.size:
            raise AssertionError(f"{self._queue.name}: {nbytes} bytes at {ptr:#x} are in no block")
        return block[ptr - start : ptr - start + nbytes]

    def array_at(
        self, ptr: int, dtype: k.ScalarType, shape: tuple[int, ...], strides: tuple[int, ...] | None
    ) -> Array:
        """Returns the array at an address, for the interpreter."""
        if 0 in shape:
            return np.zeros(shape, dtype.numpy)
        steps = strides if strides is not None else _contiguous(shape)
        last = sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        elements = self.bytes_at(ptr, (last + 1) * dtype.size).view(dtype.numpy)
        return np.lib.stride_tricks.as_strided(elements, shape, [s * dtype.size for s in steps])


class _Owner:
    """Keeps a block alive."""

    __slots__ = ("__weakref__",)


def _contiguous(shape: Sequence[int]) -> list[int]:
    steps = [1]
    for size in shape[:0:-1]:
        steps.insert(0, steps[0] * size)
    return steps[len(steps) - len(shape) :] if shape else []


class FakeDevice(Accelerator):
    """One device; its id counts all accelerators."""

    __slots__ = ("queue",)

    queue: FakeQueue
    first_address: ClassVar[int] = FIRST_ADDRESS

    @classmethod
    def make(cls, id: int) -> Self:
        """Opens a device."""
        device = cls.__new__(cls)
        device._id = id
        device.queue = FakeQueue(f"gpu:{id}")
        device.memory = FakeMemory(device.queue, cls.first_address + (id << 50))
        device._default_stream = DeviceStream(device)
        return device

    @property
    def api(self) -> str:
        return "fake"

    @property
    def architecture_name(self) -> str:
        return "fake512"

    @property
    def is_compatible(self) -> bool:
        return True

    @property
    def stats(self) -> dict[str, Any]:
        return {"used_memory": cast(FakeMemory, self.memory).used_bytes}

    def synchronize(self) -> None:
        self.queue.synchronize()


class FakeDevices:
    """A provider of several devices."""

    def __init__(self, count: int) -> None:
        self.devices = [FakeDevice.make(id) for id in range(count)]

    def count(self) -> int:
        """Returns the number of devices."""
        return len(self.devices)

    def open(self, index: int, device_memory_limit: int) -> Accelerator:
        """Returns one device."""
        return self.devices[index]


@dataclass(frozen=True)
class FakeTarget(k.Target):
    """A target with vectors of 512 bits for which LLVM has no backend."""

    batch_invariant: bool = False  # type: ignore[assignment]

    @property
    def name(self) -> str:
        return "fake512"

    @property
    def cache_key(self) -> str:
        return "fake512"

    @property
    def vector_bits(self) -> int:
        return 512

    @property
    def registers(self) -> int:
        return 32


@k.kernel
def multiply(
    out: k.Output, a: k.Input, b: k.Input, ctx: k.Context, *, transpose_b: bool = False
) -> None:
    """`out[batch * M, N] = a[batch, M, K] @ b[batch, K, N]`; with `transpose_b`, `b` is `[batch, N, K]`."""
    sums = k.f32 if a.dtype.is_float and a.dtype.bits < 32 else a.dtype
    width = ctx.target.width(sums)
    rows = a.shape[1]
    for batch, row in ctx.parallel((a.shape[0], rows)):
        for column, mask in k.vectors(out.shape[1], width):
            total = k.splat(sums(0), width)
            for i in range(a.shape[2]):
                x = k.splat(k.cast(a[batch, row, i], sums), width)
                if transpose_b:
                    y = b.load(batch, column, i, width=width, mask=mask, axis=1)
                else:
                    y = b.load(batch, i, column, width=width, mask=mask)
                total = total + x * k.cast(y, sums)
            out.store(batch * rows + row, column, value=k.cast(total, out.dtype), mask=mask)


def lower_multiply(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The product kernel of fake devices; other targets are an error."""
    assert isinstance(target, FakeTarget)
    x, y = operands
    last = len(x.shape) - 1
    out = view("result", 0, results[0], (range(last), (last,)), static=False)
    if len(y.shape) == 2:
        a = view("operand", 0, x, ((), range(last), (last,)), static=False)
        b = view("operand", 1, y, ((), (0,), (1,)), static=False)
    else:
        batch = range(last - 1)
        a = view("operand", 0, x, (batch, (last - 1,), (last,)), static=False)
        b = view("operand", 1, y, (batch, (last - 1,), (last,)), static=False)
    assert product(a.shape[:1]) is not None
    params = {"transpose_b": bool(attributes.get("transpose_b", False))}
    return KernelCall(multiply, (out, a, b), params)


FAKE_KERNELS = KernelLibrary(
    {
        **{name: f for name, f in CPU_KERNELS.families.items() if "pack" not in name},
        "mo.matmul": lower_multiply,
    }
)


class FakeExecutor:
    """Queues the launches of a program; the queue interprets each kernel."""

    clock_hz = 1e9

    def __init__(self, backend: FakeBackend, program: Program) -> None:
        self.backend = backend
        self.program = program
        self.runs = 0
        self._profiling = False
        self._ticks = np.zeros((len(program.launches), 3), np.int64)

    def run_at(
        self,
        bases: bytes,
        index: NativeArray,
        offsets: NativeArray,
        alone: bool = False,
    ) -> None:
        self.runs += 1
        words = np.frombuffer(bases, np.int64)
        values = (words.take(index.array) + offsets.array).tolist()
        self.backend.queue.put(lambda: self._walk(values))

    def _walk(self, values: list[int]) -> None:
        device = self.backend.fake
        assert threading.current_thread() is device.queue.thread
        memory = cast(FakeMemory, device.memory)
        for number, launch in enumerate(self.program.launches):
            if isinstance(launch, Jump):
                assert launch.kind == "next", "the host drives branches and loops of this device"
                continue
            ir = self.backend.kernels[launch.kernel]
            fn, _, params = ir.origin
            words = [values[value] + addend for value, addend in launch.slots]
            views = k.launch_arguments(ir, words, memory.array_at)
            start = time.perf_counter_ns()
            try:
                k.interpret(fn, views, params, self.backend.num_workers, self.backend.target)
            except AssertionError:
                raise
            except Exception as error:
                name = type(error).__name__
                text = f"{launch.name}: {error}{launch.where}"
                raise run_error_class(name)(text, launch.name, name) from None
            device.queue.launches.append(launch.name)
            self._ticks[number] += (0, time.perf_counter_ns() - start, 1)

    def set_addend(self, launch: int, slot: int, addend: int) -> None:
        raise NotImplementedError("this device measures no row thresholds")

    def set_profiling(self, on: bool) -> None:
        self._profiling = on

    def ticks(self) -> npt.NDArray[np.int64]:
        self.backend.synchronize()
        return self._ticks.copy()

    def log_events(self, room: int) -> None:
        pass

    def events(self) -> npt.NDArray[np.int64]:
        return np.zeros((0, 4), np.int64)


class FakeBackend(Backend):
    """The backend of one fake device."""

    num_workers = 1

    def __init__(self, device: FakeDevice, options: BackendOptions) -> None:
        super().__init__(device, FakeTarget(options.batch_invariant), FAKE_KERNELS)
        self.fake = device
        self.kernels: dict[int, k.KernelIR] = {}

    @property
    def queue(self) -> FakeQueue:
        return self.fake.queue

    @property
    def cache_key(self) -> str | None:
        return None

    def load(self, kernels: Iterable[k.KernelIR]) -> dict[str, int]:
        numbers: dict[str, int] = {}
        for ir in kernels:
            numbers[ir.key] = len(self.kernels) + 1
            self.kernels[numbers[ir.key]] = ir
        return numbers

    def write_region(self, spec: RegionSpec) -> RegionKernel:
        return write_region(spec, self.target)

    def executor(self, program: Program) -> FakeExecutor:
        return FakeExecutor(self, program)


def make_backend(device: Device, options: BackendOptions) -> Backend:
    """The backend of a fake device."""
    assert isinstance(device, FakeDevice)
    return FakeBackend(device, options)


register_backend("fake", make_backend)


@contextmanager
def fake_devices(count: int = 2) -> Iterator[list[FakeDevice]]:
    """Registers devices for a `with` block: ``gpu:0``, ``gpu:1``, …"""
    provider = FakeDevices(count)
    register_accelerators(provider)
    try:
        yield provider.devices
    finally:
        unregister_accelerators(provider)


__all__ = ["FakeBackend", "FakeDevice", "fake_devices"]
