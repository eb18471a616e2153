"""A second kind of accelerator in this process: a grid of blocks, as GPUs have.

- Launches: each has a grid of blocks of `WORKERS` workers. Workers of one block meet at barriers and share the counters
  of `ctx.parallel`; blocks know nothing of each other. A launch without a geometry is one block.
- Regions: the device has its own writer, whose kernels take a range of rows in each block.
- Loops: the executor carries out branches and loops; the queue alternates the programs of a `ModelLoop`, without jumps.
- Sampling: a block samples a row of logits, and its workers search the row for the greatest one together.
- The host reads and writes some blocks of the memory while programs run, as page-locked memory of a GPU.
- Weights: a pass of the device stores those of products by columns, when a model is loaded.
- Memory and queue are those of `tests.devices.fake`: no processor can read its addresses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from xdsl.ir import Block

from max import kernel as k
from max._backends import Backend, BackendOptions, register_backend
from max._backends.backend import BackendPass, PassPlace, RunsHere, SharedBlock
from max._backends.cpu.kernels.attention.online_softmax import LOG2_E, NEGATIVE_INFINITY
from max._backends.cpu.kernels.generation.logit_rows import Distribution, find_tops, row_in_blocks
from max._backends.cpu.kernels.generation.row_cuts import worker_memory
from max._backends.cpu.kernels.generation.sampling import NO_TOKEN, Choice, drawn_token, uniform
from max._backends.kernel_call import (
    Geometry,
    KernelCall,
    Operand,
    Scalar,
    Workspace,
    operand_views,
    view,
)
from max._backends.kernel_library import KernelLibrary
from max._backends.program import (
    Jump,
    KernelRunError,
    Launch,
    NativeArray,
    Program,
    check_program,
    run_error_class,
)
from max._backends.regions import (
    REDUCTIONS,
    ArgView,
    Leaf,
    Node,
    RegionKernel,
    RegionSpec,
)
from max._compiler.codegen.expressions import combine, identity
from max._compiler.codegen.values import ValueWriter
from max._compiler.mok import MatmulOp
from max._compiler.passes.base import ops_of
from max._compiler.passes.canonicalize import insert_before
from max._compiler.passes.hoist_to_load import weights_only
from max.driver import Accelerator, Device
from max.driver._device import register_accelerators, unregister_accelerators
from max.dtype import DType
from max.mlir import TensorType, build, to_attr
from max.mlir.sizes import product, simplify
from tests.devices.fake import FAKE_KERNELS, FakeDevice, FakeMemory, FakeQueue, FakeTarget

WORKERS = 4
"""Workers of a block."""
ROWS = 3
"""Rows of a region that one block computes."""
MAX_TURNS = 100_000
"""The most instructions of a run: a loop that does not end is an error."""


class GridDevice(FakeDevice):
    """One device."""

    __slots__ = ()

    first_address = 1 << 61

    @property
    def api(self) -> str:
        return "grid"

    @property
    def architecture_name(self) -> str:
        return "grid256"


class GridTarget(FakeTarget):
    """Vectors of 256 bits."""

    @property
    def name(self) -> str:
        return "grid256"

    @property
    def cache_key(self) -> str:
        return "grid256"

    @property
    def vector_bits(self) -> int:
        return 256


# regions -----------------------------------------------------------------------------------------


class RowWriter:
    """Writes the kernel of a region: a block takes `ROWS` rows, a worker one row, in vectors along the last axis."""

    def __init__(self, spec: RegionSpec, target: k.Target) -> None:
        self.spec, self.lines = spec, list[str]()
        self.rank = len(spec.dims)
        self.width = target.width("f32")
        self.leaves = [i for i, value in enumerate(spec.values) if isinstance(value, Leaf)]
        self.values = ValueWriter(spec, self, self.rank - 1, str(self.width))
        self.depth = 1
        self.dims = [
            str(dim) if isinstance(dim, int) else f"n{axis}" for axis, dim in enumerate(spec.dims)
        ]
        self.index = [f"i{axis}" for axis in range(self.rank)]

    def add(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def open(self, text: str) -> None:
        self.add(text)
        self.depth += 1

    def size(self, axis: int) -> str:
        return self.dims[axis]

    def where(self, strides: Sequence[object]) -> str:
        return ", ".join(self.index[axis] for axis, stride in enumerate(strides) if stride != 0)

    def load(self, i: int, leaf: Leaf) -> str:
        name, where = f"a{self.leaves.index(i)}", self.where(leaf.strides)
        if self.values.is_vector(i):
            return f"{name}.load({where}, width={self.width}, mask=m)"
        return f"{name}[{where or '0'}]"

    def walk(self, level: int) -> None:
        """The row values that need `level` reductions, then one walk of the row, for reductions and results."""
        spec, values = self.spec, self.values
        for i, value in enumerate(spec.values):
            reduced = isinstance(value, Node) and value.op in REDUCTIONS
            if not spec.inner[i] and spec.level[i] == level and not reduced:
                values.value(i)
        results = [
            (number, result)
            for number, result in enumerate(spec.results)
            if spec.level[result.value] == level
        ]
        inner = [pair for pair in results if pair[1].strides and pair[1].strides[-1] != 0]
        sums = [
            (i, value)
            for i, value in enumerate(spec.values)
            if isinstance(value, Node) and value.op in REDUCTIONS and spec.level[i] == level + 1
        ]
        names = {i: values.fresh() for i, _ in sums}
        for i, node in sums:
            self.add(f"{names[i]} = k.splat({identity(node.op, node.dtype)}, {self.width})")
        if inner or sums:
            self.open(f"for {self.index[-1]}, m in k.vectors({self.dims[-1]}, {self.width}):")
            values.scope = {}
            for i, node in sums:
                total = combine(node.op, names[i], values.operand(node.args[0], True))
                self.open("if m is None:")
                self.add(f"{names[i]} = {total}")
                self.depth -= 1
                self.open("else:")
                self.add(f"{names[i]} = k.select(m, {total}, {names[i]})")
                self.depth -= 1
            texts = [values.operand(r.value, True, r.dtype) for _, r in inner]
            for (number, result), text in zip(inner, texts, strict=True):
                self.add(f"o{number}.store({self.where(result.strides)}, value={text}, mask=m)")
            values.scope = None
            self.depth -= 1
        for i, node in sums:
            across = {"reduce_sum": "reduce_add"}.get(node.op, node.op)
            values.names[i] = values.fresh()
            self.add(f"{values.names[i]} = k.{across}({names[i]})")
        for number, result in results:
            if (number, result) not in inner:
                text = values.operand(result.value, False, result.dtype)
                self.add(f"o{number}[{self.where(result.strides) or '0'}] = {text}")

    def write(self) -> RegionKernel:
        spec, outer = self.spec, self.rank - 1
        self.add(f"rows = {' * '.join(self.dims[:-1]) or '1'}")
        self.open(f"for r, in ctx.parallel(({ROWS},)):")
        self.add(f"row = block * {ROWS} + r")
        self.open("if row < rows:")
        self.add("rest = row")
        for axis in reversed(range(outer)):
            self.add(f"{self.index[axis]} = rest % {self.dims[axis]}")
            self.add(f"rest = rest // {self.dims[axis]}")
        for level in range(max(spec.level, default=0) + 1):
            self.walk(level)
        scalars = [
            (f"n{axis}", dim) for axis, dim in enumerate(spec.dims) if not isinstance(dim, int)
        ]
        names = [f"o{i}: k.Output" for i in range(len(spec.results))]
        names += [f"a{i}: k.Input" for i in range(len(self.leaves))]
        names += [*[f"{name}: k.i64" for name, _ in scalars], "block: k.i64", "ctx: k.Context"]
        views = [(result.dtype, result.strides) for result in spec.results]
        views += [
            (leaf.dtype, leaf.strides)
            for i in self.leaves
            if isinstance(leaf := spec.values[i], Leaf)
        ]
        args = [
            ArgView.of(spec, dtype, strides, [a for a, s in enumerate(strides) if s != 0])
            for dtype, strides in views
        ]
        blocks = simplify((product(spec.dims[:-1]) + (ROWS - 1)) // ROWS)
        return RegionKernel(
            "\n".join([f"def region({', '.join(names)}):", *self.lines]) + "\n",
            tuple(args),
            # the executor replaces the last one by the number of the block
            (*[dim for _, dim in scalars], 0),
            serial=False,
            geometry=Geometry((blocks,), (WORKERS,)),
        )


def write_rows(spec: RegionSpec, target: k.Target) -> RegionKernel:
    """The kernel of a region; a scalar is a row of one element."""
    if not spec.dims:
        values = tuple(replace(v, strides=(0,)) if isinstance(v, Leaf) else v for v in spec.values)
        results = tuple(replace(r, strides=(0,)) for r in spec.results)
        spec = RegionSpec((1,), False, values, results)
    return RowWriter(spec, target).write()


# a pass ------------------------------------------------------------------------------------------


def store_by_columns(block: Block, runs_here: RunsHere) -> None:
    """Replaces ``x @ w`` by the product with the transpose of a copy ``[N, K]`` of the weight."""
    ops = ops_of(block)
    constant = weights_only(ops)
    for op in ops:
        if op.name != "mo.matmul" or not runs_here(op):
            continue
        x, w = op.operands
        if (
            w not in constant
            or x in constant
            or not isinstance(w.type, TensorType)
            or w.type.rank != 2
        ):
            continue
        turned = w.type.with_shape(w.type.shape[::-1])
        columns = insert_before(op, build("mo.transpose", (w,), {"perm": (1, 0)}, (turned,)))
        by_columns = MatmulOp.create(
            operands=(x, columns),
            result_types=op.result_types,
            attributes={"transpose_b": to_attr(True)},
            location=op.location,
        )
        op.results[0].replace_all_uses_with(insert_before(op, by_columns))
        op.detach()
        op.erase()


# sampling ----------------------------------------------------------------------------------------


class RowParameters(NamedTuple):
    """The logits, and the sampling parameters of each row."""

    logits: k.Input
    temperature: k.Input
    top_k: k.Input
    top_p: k.Input
    min_p: k.Input
    seed: k.Input


@k.inline
def greater_of(row: Any, first: Any, second: Any) -> Any:
    """Of two indices that of the greater logit, the first of equals; an index of -1 is none."""
    best = k.i64(first)
    if second >= 0 and (first < 0 or row[second] > row[k.max(first, 0)]):
        best = k.i64(second)
    return best


@k.kernel
def sample_in_blocks(
    out: k.Output,
    of_workers: k.InOut,
    rows: RowParameters,
    block: k.i64,  # pyright: ignore[reportInvalidTypeForm]
    ctx: k.Context,
) -> None:
    """Samples the row of a block. Its workers find the greatest logits of its parts, and meet; one of them draws."""
    memory = worker_memory(ctx)
    row = rows.logits[block]
    size, parts = row.shape[0], of_workers.shape[1]
    for (part,) in ctx.parallel((parts,)):
        best = k.i64(-1)
        for j in range(size * part // parts, size * (part + 1) // parts):
            if row[j] == row[j]:  # not NaN
                best = greater_of(row, best, k.i64(j))
        of_workers[block, part] = best
    ctx.barrier()
    for _ in ctx.parallel(1):
        best = k.i64(NO_TOKEN)
        for part in range(parts):
            best = greater_of(row, best, of_workers[block, part])
        temperature, count = rows.temperature[block], k.i64(rows.top_k[block])
        if not temperature >= 0:
            raise ValueError(
                "the temperature of row {} is {}, expected 0 or more", block, temperature
            )
        token = best
        if best >= 0 and temperature > 0 and count != 1:
            in_blocks = row_in_blocks(row, None, memory.tops)
            peak = find_tops(in_blocks)
            if peak > NEGATIVE_INFINITY:
                d = Distribution(in_blocks, peak, temperature, LOG2_E / temperature)
                u = uniform(k.u64(rows.seed[block]))
                choice = Choice(count, rows.top_p[block], rows.min_p[block], u)
                token = drawn_token(d, choice, memory)
        out[block] = token


def lower_sample(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.sample.token`: a block for each row."""
    batch = operands[0].shape[0]
    of_workers = Workspace(DType.int64, (batch, WORKERS))
    args = (
        view("result", 0, results[0], static=False),
        view("workspace", 0, of_workers, static=False),
        *operand_views(operands, static=False),
        Scalar(0),  # the executor replaces it by the number of the block
    )
    return KernelCall(
        sample_in_blocks, args, workspaces=(of_workers,), geometry=Geometry((batch,), (WORKERS,))
    )


GRID_KERNELS = KernelLibrary({**FAKE_KERNELS.families, "mo.sample.token": lower_sample})


# programs ----------------------------------------------------------------------------------------


class GridExecutor:
    """Queues runs of a program; the queue walks its launches and jumps."""

    clock_hz = 1e9

    def __init__(self, backend: GridBackend, program: Program) -> None:
        check_program(program)
        self.backend, self.program = backend, program
        self.runs = 0
        self._ticks = np.zeros((len(program.launches), 3), np.int64)

    def run_at(
        self, bases: bytes, index: NativeArray, offsets: NativeArray, alone: bool = False
    ) -> None:
        assert not alone, "a device without rates always shares its work"
        self.runs += 1
        words = np.frombuffer(bases, np.int64)
        values = (words.take(index.array) + offsets.array).tolist()
        self.backend.queue.put(lambda: self.walk(values))

    def walk(self, values: list[int]) -> None:
        """Runs the program in the queue's thread."""
        launches, memory = self.program.launches, cast(FakeMemory, self.backend.device.memory)
        position = turns = 0
        while position < len(launches):
            turns += 1
            assert turns < MAX_TURNS, f"{self.program} does not end"
            launch = launches[position]
            position += 1
            if isinstance(launch, Jump):
                taken = launch.kind in ("always", "back")
                if launch.kind == "if_zero":
                    ((value, addend),) = launch.slots
                    taken = memory.bytes_at(values[value] + addend, 1)[0] == 0
                position = launch.target if taken else position
                continue
            start = time.perf_counter_ns()
            self._launch(launch, values, memory)
            self.backend.grid_device.queue.launches.append(launch.name)
            self._ticks[position - 1] += (0, time.perf_counter_ns() - start, 1)

    def _launch(self, launch: Launch, values: list[int], memory: FakeMemory) -> None:
        assert threading.current_thread() is self.backend.grid_device.queue.thread
        ir = self.backend.kernels[launch.kernel]
        fn, _, params = ir.origin
        words = [values[value] + addend for value, addend in launch.slots]
        args = k.launch_arguments(ir, words, memory.array_at)
        geometry, workers = launch.geometry, 1 if launch.serial else WORKERS
        blocks = [args]
        if geometry is not None:
            ((value, addend),), (workers,) = geometry.grid, geometry.block
            blocks = [[*args[:-1], number] for number in range(values[value] + addend)]
            # blocks run in any order
            blocks = blocks[::-1]
            self.backend.blocks += len(blocks)
        for block in blocks:
            try:
                k.interpret(fn, block, params, workers, self.backend.target)
            except AssertionError:
                raise
            except Exception as error:
                raise _run_error(launch, error) from None

    def set_addend(self, launch: int, slot: int, addend: int) -> None:
        raise NotImplementedError("this device measures no row thresholds")

    def set_profiling(self, on: bool) -> None:
        pass

    def ticks(self) -> npt.NDArray[np.int64]:
        self.backend.synchronize()
        return self._ticks.copy()

    def log_events(self, room: int) -> None:
        pass

    def events(self) -> npt.NDArray[np.int64]:
        return np.zeros((0, 4), np.int64)


class GridLoop(GridExecutor):
    """Queues a loop over two programs as one action, which walks them in turn."""

    def __init__(self, backend: GridBackend, body: Program, after: Program) -> None:
        super().__init__(backend, body)
        self._turn = (GridExecutor(backend, body), GridExecutor(backend, after))

    def walk(self, values: list[int]) -> None:
        memory, first = cast(FakeMemory, self.backend.device.memory), self.program.num_values
        *_, address = values
        for _ in range(MAX_TURNS):
            self._turn[0].walk(values[:first])
            self._turn[1].walk(values[first:-1])
            self.backend.turns += 1
            if memory.bytes_at(address, 1)[0] == 0:
                return
        raise AssertionError(f"{self.program} does not end")


def _run_error(launch: Launch, error: Exception) -> KernelRunError:
    name = type(error).__name__
    return run_error_class(name)(f"{launch.name}: {error}{launch.where}", launch.name, name)


class GridBackend(Backend):
    """The backend of one device."""

    runs_jumps = True

    def __init__(self, device: GridDevice, options: BackendOptions) -> None:
        super().__init__(device, GridTarget(options.batch_invariant), GRID_KERNELS)
        self.grid_device = device
        self.kernels: dict[int, k.KernelIR] = {}
        self.blocks = 0
        """The blocks of all launches with a geometry."""
        self.turns = 0
        """The turns of all loops over two programs."""

    @property
    def queue(self) -> FakeQueue:
        return self.grid_device.queue

    @property
    def workers(self) -> int:
        return WORKERS

    @property
    def cache_key(self) -> str | None:
        return None

    def passes(self, place: PassPlace) -> Sequence[BackendPass]:
        return (BackendPass("store-by-columns", store_by_columns),) if place == "weights" else ()

    def write_region(self, spec: RegionSpec) -> RegionKernel:
        return write_rows(spec, self.target)

    def load(self, kernels: Iterable[k.KernelIR]) -> dict[str, int]:
        numbers: dict[str, int] = {}
        for ir in kernels:
            numbers[ir.key] = len(self.kernels) + 1
            self.kernels[numbers[ir.key]] = ir
        return numbers

    def executor(self, program: Program) -> GridExecutor:
        return GridExecutor(self, program)

    def loop(self, body: Program, after: Program) -> GridLoop:
        return GridLoop(self, body, after)

    def share(self, num_bytes: int) -> SharedBlock:
        memory = cast(FakeMemory, self.device.memory)
        block = memory.allocate("shared", DType.uint8, (max(num_bytes, 1),), True)
        return SharedBlock(block.ptr, memory.bytes_at(block.ptr, num_bytes), block.owner)


def make_backend(device: Device, options: BackendOptions) -> Backend:
    """The backend of a device."""
    assert isinstance(device, GridDevice)
    return GridBackend(device, options)


register_backend("grid", make_backend)


class GridDevices:
    """A provider of several devices."""

    def __init__(self, count: int) -> None:
        self.devices = [GridDevice.make(id) for id in range(count)]

    def count(self) -> int:
        return len(self.devices)

    def open(self, index: int, device_memory_limit: int) -> Accelerator:
        return self.devices[index]


@contextmanager
def grid_devices(count: int = 2) -> Iterator[list[GridDevice]]:
    """Registers devices for a `with` block: ``gpu:0``, ``gpu:1``, …"""
    provider = GridDevices(count)
    register_accelerators(provider)
    try:
        yield provider.devices
    finally:
        unregister_accelerators(provider)


__all__ = ["GridBackend", "GridDevice", "GridDevices", "grid_devices"]
