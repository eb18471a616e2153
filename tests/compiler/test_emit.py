"""Programs without addresses: random launches read what was written last, wherever the program places it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from max._abi import BaseLayout
from max._backends.kernel_call import Geometry
from max._compiler.lowering.lowered_graph import (
    Buffer,
    HostStep,
    Jump,
    Launch,
    LimitSlot,
    Number,
    Pointer,
    mark,
)
from max._compiler.program.code import (
    Check,
    Compiled,
    KernelInfo,
    ProgramCode,
    SlotCode,
    TensorInfo,
    ValueCode,
    WorkCode,
)
from max._compiler.program.emit import emit
from max._compiler.program.flatten import Flat
from max._config import flags
from max.dtype import DType
from max.mlir.dims import DimExpr
from max.mlir.sizes import Size

pytestmark = pytest.mark.any_target

CELL = 8
"""The bytes of the parts of a buffer that a launch is seen to write."""
N = DimExpr.symbol("n")


def number(size: Size, symbols: Mapping[str, int]) -> int:
    return size if isinstance(size, int) else size.evaluate(dict(symbols))


def info(*shape: Size) -> TensorInfo:
    return TensorInfo(DType.float32, tuple(shape), ("cpu", 0))


class Writer:
    """Writes a random flat program: launches in order, and steps of the host that find out sizes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.flat = flat = Flat()
        self.known = ["n"]
        self.inputs, self.outputs = [info(N), info()], list[TensorInfo]()
        flat.buffers += [Buffer("input", N * CELL + 64, str(position)) for position in range(2)]
        flat.buffers += [
            Buffer("weight", 64, "w", dtype=DType.float32, shape=(4, 4)),
            Buffer("constant", 64, "", np.arange(16, dtype=np.float32)),
            Buffer("constant", 64, "large", np.ones(16, np.float32)),
            Buffer("kept", 64),
        ]
        self.written = [2, 3, 4]
        self.launch(flat.once, [5])
        self.written = list(range(len(flat.buffers)))
        for _ in range(self.rng.randint(6, 24)):
            self.step()
        flat.outputs.append(1)
        self.outputs.append(info())

    def size(self) -> Size:
        """Of a buffer: at least 64 bytes, so that all offsets lie in it."""
        if self.rng.random() < 0.5:
            return 64 * self.rng.choice((1, 2, 5))
        return DimExpr.symbol(self.rng.choice(self.known)) * CELL + 64

    def launch(self, launches: list[Launch], writes: Sequence[int]) -> None:
        rng = self.rng
        places = rng.choices(self.written, k=rng.randint(0, 3))
        offsets = [0, CELL * rng.randrange(8)]
        symbolic = launches is self.flat.launches
        slots: list[Any] = []
        for index in places:
            size = self.flat.buffers[index].bytes
            ends = [] if isinstance(size, int) else [size - CELL]
            slots.append(Pointer(index, rng.choice([*offsets, *ends])))
        slots += [Pointer(index) for index in writes]
        dim = DimExpr.symbol(rng.choice(self.known)) if symbolic else 3
        slots += [Number(rng.choice([dim, 5])), LimitSlot("rows", 3, 9, dim)]
        grid = Geometry((dim, 2), (32, 4), 128) if rng.random() < 0.3 else None
        number_of = len(launches)
        launches.append(
            Launch(
                f"k{number_of % 3}", tuple(slots), tuple(places), tuple(writes), rng.random() < 0.5, f"l{number_of}",
                flops=dim * 2, staged_op=number_of, work=WorkCode("region", dim), geometry=grid,
            )
        )  # fmt: skip

    def step(self) -> None:
        rng, flat = self.rng, self.flat
        if rng.random() < 0.15:
            symbol = f"s{len(self.known)}"
            bounds = (Pointer(rng.choice(self.written), CELL * rng.randrange(3)),)
            # sizes that are found out at once do not depend on one another
            here = sum(at == len(flat.launches) for at, _ in flat.host_steps)
            shape = (DimExpr.symbol(rng.choice(self.known[: len(self.known) - here])), 7)
            step = HostStep("count", (symbol, ""), bounds, DType.int64, shape, "label")
            flat.host_steps.append((len(flat.launches), step))
            if rng.random() < 0.3:
                flat.host_steps.append(
                    (len(flat.launches), replace(step, symbols=("", f"t{symbol}")))
                )
            self.known += [
                name
                for _, each in flat.host_steps[-2:]
                for name in each.symbols
                if name and name not in self.known
            ]
            return
        kind = "output" if rng.random() < 0.15 else "temp"
        size = self.size()
        flat.buffers.append(Buffer(kind, size))
        index = len(flat.buffers) - 1
        if kind == "output":
            flat.outputs.append(index)
            self.outputs.append(info(size))
        self.launch(flat.launches, [index])
        self.written.append(index)
        if rng.random() < 0.3:
            sides = (
                DimExpr.symbol(rng.choice(self.known)),
                DimExpr.symbol(rng.choice(self.known)) + 1,
            )
            flat.checks.append(Check(*sides, f"check {len(flat.checks)}"))

    def compiled(self) -> Compiled:
        kernels = {f"k{i}": KernelInfo(f"k{i}", 1, 0, ()) for i in range(9)}
        return emit("graph", self.flat, [kernels], self.inputs, ["x", "y"], self.outputs)


class Processor:
    """Runs a program over addresses: each cell knows the launch that wrote it, and its place in the buffer."""

    def __init__(self, flat: Flat, compiled: Compiled) -> None:
        self.flat, self.compiled = flat, compiled
        self.memory: dict[int, tuple[object, int]] = {}
        self.last: dict[int, object] = {}
        """What wrote a buffer last, as the launches say."""
        self.symbols = {"n": 60}
        layout = compiled.bases
        self.bases = [0] * layout.count(1 + len(compiled.later))
        self.fixed = [1 << 40 | index << 20 for index in range(len(compiled.fixed_buffers))]
        self.next_address = 1 << 30
        for position in range(len(compiled.inputs)):
            self.bases[layout.input(position)] = self.allocated()
        # inputs and what is fixed have values from the start
        fixed = [i for i, b in enumerate(flat.buffers) if b.kind in ("weight", "constant", "kept")]
        for index, address in zip(fixed, self.fixed, strict=True):
            self.write(index, address, ("fixed", index))
        for index in (0, 1):
            address = self.bases[layout.input(int(flat.buffers[index].name))]
            self.write(index, address, ("input", index))

    def allocated(self) -> int:
        self.next_address += 1 << 20
        return self.next_address

    def write(self, buffer: int, address: int, writer: object) -> None:
        for offset in range(0, number(self.flat.buffers[buffer].bytes, self.symbols), CELL):
            self.memory[address + offset] = writer, offset
        self.last[buffer] = writer

    def value(self, code: ProgramCode, slot: SlotCode) -> int:
        """The number in a slot."""
        value = code.values[slot.value]
        known = {**dict.fromkeys(self.compiled.symbols, 0), **self.symbols}
        ends = list(code.static_bytes)
        starts: list[int] = []
        for segment, sizes in code.blocks:
            starts.append(ends[segment])
            ends[segment] += -(-max(number(size, known) for size in sizes) // 64) * 64
        start = starts[value.block] if value.block >= 0 else 0
        fixed = self.fixed[slot.fixed_buffer] if slot.fixed_buffer >= 0 else 0
        return (
            self.bases[value.base] + start + number(value.size, self.symbols) + slot.addend + fixed
        )

    def read(self, code: ProgramCode, slot: SlotCode, pointer: Pointer) -> None:
        """A slot with an address has what the buffer has there."""
        offset = number(pointer.offset, self.symbols)
        found = self.memory[self.value(code, slot)]
        assert found == (self.last[pointer.buffer], offset)

    def segment(self, code: ProgramCode, launches: Sequence[Launch]) -> None:
        self.bases[self.compiled.bases.arena(code.segment)] = self.allocated()
        assert len(code.static_bytes) == code.segment + 1
        assert code.values[0] == ValueCode(BaseLayout.NOTHING, -1, 0), "value 0 is 0"
        static = [
            b.bytes for b in self.flat.buffers if b.kind == "temp" and isinstance(b.bytes, int)
        ]
        assert code.static_bytes[-1] <= sum(static)
        for position, (launch, given) in enumerate(zip(code.launches, launches, strict=True)):
            assert (
                launch.serial == given.serial
                and launch.name == given.name
                and launch.kernel == given.kernel
            )
            assert (launch.staged_op, launch.work, launch.jump) == (given.staged_op, given.work, "")
            count = len(given.reads)
            for slot, each in zip(launch.slots, given.slots, strict=True):
                if isinstance(each, Number):
                    assert self.value(code, slot) == number(each.value, self.symbols)
                elif isinstance(each, LimitSlot):
                    assert self.value(code, slot) == each.default
            for slot, pointer in zip(launch.slots[:count], given.slots, strict=False):
                assert isinstance(pointer, Pointer)
                self.read(code, slot, pointer)
            for slot, index in zip(launch.slots[count:], given.writes, strict=False):
                assert self.value(code, slot) % 64 == 0
                self.write(index, self.value(code, slot), given.name + str(given.writes))
            assert launch.limit is not None and launch.limit.slot == len(given.slots) - 1
            rows = given.slots[-1]
            assert isinstance(rows, LimitSlot)
            assert (launch.limit.name, launch.limit.maximum) == (rows.name, rows.maximum)
            assert self.value(code, launch.limit.rows) == number(rows.rows, self.symbols)
            if given.geometry is None:
                assert launch.geometry is None
            else:
                assert launch.geometry is not None
                grid = [self.value(code, slot) for slot in launch.geometry.grid]
                assert grid == [number(size, self.symbols) for size in given.geometry.grid]
                assert launch.geometry.block == (32, 4) and launch.geometry.shared_bytes == 128
            moved = sum(
                number(self.flat.buffers[index].bytes, self.symbols)
                for index in {*given.reads, *given.writes}
            )
            assert number(code.bytes_moved[position], self.symbols) == moved
            assert number(code.flops[position], self.symbols) == number(given.flops, self.symbols)

    def run(self) -> None:
        compiled, flat = self.compiled, self.flat
        (once,) = compiled.once
        self.segment(once, flat.once)
        parts = [compiled.main, *compiled.later]
        cuts = sorted({at for at, _ in flat.host_steps})
        assert len(parts) == len(cuts) + 1 and [part.segment for part in parts] == list(
            range(len(parts))
        )
        outputs, checks = list[int](), list[Check]()
        for part, begin, end in zip(parts, [0, *cuts], [*cuts, len(flat.launches)], strict=True):
            needed = {i: shape.shape for i, shape in enumerate(compiled.outputs)}
            known = {i for i, shape in needed.items() if self.is_known(*shape)}
            assert set(part.outputs) == known - set(outputs), (
                "in the first segment that knows the size"
            )
            outputs += part.outputs
            new = [check for check in flat.checks if self.is_known(check.actual, check.required)]
            assert part.checks == [check for check in new if check not in checks]
            checks += part.checks
            for index in part.outputs:
                self.bases[compiled.bases.output(index)] = self.allocated()
            self.segment(part, flat.launches[begin:end])
            steps = [step for at, step in flat.host_steps if at == end and part is not parts[-1]]
            for code, step in zip(part.host_steps, steps, strict=True):
                assert (code.rule, code.symbols, code.dtype) == (
                    step.rule,
                    step.symbols,
                    step.dtype,
                )
                assert (code.label, code.target, code.devices) == ("label", -1, (0,))
                self.read(part, code.bounds[0], step.bounds[0])
                shape = [self.value(part, slot) for slot in code.shape]
                assert shape == [number(size, self.symbols) for size in step.shape]
            for step in steps:
                self.symbols |= {
                    symbol: 10 + 7 * len(self.symbols) for symbol in step.symbols if symbol
                }
        assert len(checks) == len(flat.checks) and sorted(outputs) == list(range(len(outputs)))

    def is_known(self, *sizes: Size) -> bool:
        return all(
            set(size.symbols) <= set(self.symbols) for size in sizes if not isinstance(size, int)
        )


@pytest.mark.parametrize("guarded", [False, True])
def test_launches_read_what_was_written_last(guarded: bool) -> None:
    segments, reused = 0, 0
    for seed in range(100):
        writer = Writer(seed)
        with flags.override(MAX_GUARD=guarded):
            compiled = writer.compiled()
        assert compiled.guarded is guarded and (not guarded or not any(compiled.main.static_bytes))
        Processor(writer.flat, compiled).run()
        segments += len(compiled.later)
        blocks = [sizes for part in (compiled.main, *compiled.later) for _, sizes in part.blocks]
        assert not guarded or all(len(sizes) == 1 for sizes in blocks), (
            "each buffer has guard pages"
        )
        temporary = sum(buffer.kind == "temp" for buffer in writer.flat.buffers)
        reused += temporary > sum(len(sizes) for _, sizes in compiled.main.blocks)
        found = [name for step in writer.flat.host_steps for name in step[1].symbols if name]
        assert compiled.symbols == ("n", *found)
        assert compiled.output_buffers == [*[-1] * (len(writer.outputs) - 1), 1]
        used = {launch.kernel for launch in (*writer.flat.once, *writer.flat.launches)}
        assert set(compiled.kernels[0]) == used
    assert segments > 100 and reused > 20


def test_what_is_fixed() -> None:
    """Weights, constants and what is computed at load; a large constant is found by its name."""
    compiled = Writer(0).compiled()
    weight, small, large, kept = compiled.fixed_buffers
    assert (weight.kind, weight.name, weight.shape, weight.dtype) == (
        "weight",
        "w",
        (4, 4),
        DType.float32,
    )
    assert small.array.tolist() == list(range(16)) and small.name == ""
    assert (large.array, large.name) == (None, "large") and kept.kind == "kept"
    assert [each.bytes for each in compiled.fixed_buffers] == [64] * 4
    assert (compiled.name, compiled.input_names) == ("graph", ["x", "y"])


def jumping(target: int, kind: str = "back") -> Launch:
    return Launch("", (), (), (), False, kind, jump=Jump(kind, target), flops=9)


def test_jumps_count_from_the_begin_of_their_segment() -> None:
    """The host's count from segment to segment; a mark goes on with the launch behind it."""

    def empty() -> Launch:
        return Launch("k", (), (), (), False, "l", flops=3)

    flat = Flat(
        launches=[empty(), empty(), mark(()), empty(), jumping(2), mark(()), empty()],
        labels=[5, 2, 3],
    )
    flat.host_steps = [
        (2, HostStep("jump", (), (), DType.bool, target=0)),
        (5, HostStep("jump", (), (), DType.bool, target=1)),
    ]
    kernels = {"k": KernelInfo("k", 1, 0, ())}
    compiled = emit("g", flat, [kernels, kernels], [], [], [])
    first, second, third = compiled.main, *compiled.later
    assert [launch.jump for launch in second.launches] == ["next", "", "back"]
    assert [launch.target for launch in second.launches] == [1, -1, 1]
    assert (second.flops, second.bytes_moved) == ([0, 3, 0], [0, 0, 0])
    assert [step.target for step in (*first.host_steps, *second.host_steps)] == [2, 1]
    assert not third.host_steps and third.launches[0].target == 1
    assert compiled.kernels == [kernels, {}] and not compiled.once[0].launches


def test_a_segment_runs_on_the_device_of_its_launches() -> None:
    launches = [
        Launch("k", (Pointer(0),), (), (0,), False, "l", device=1),
        Launch("k", (), (), (), False, "l"),
    ]
    flat = Flat([Buffer("temp", 64, device=1)], launches=launches)
    flat.host_steps = [(1, HostStep("print", (), (Pointer(0),), DType.bool))]
    kernels = {"k": KernelInfo("k", 1, 0, ())}
    compiled = emit("g", flat, [kernels, kernels], [], [], [])
    assert (compiled.main.device, compiled.later[0].device) == (1, 0)
    assert compiled.main.host_steps[0].devices == (1,) and compiled.kernels == [kernels, kernels]
