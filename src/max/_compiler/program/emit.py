"""Emits launches and their memory plan as a program without addresses or symbol values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from max._abi import BaseLayout
from max._backends.kernel_call import Geometry
from max._compiler.lowering.lowered_graph import Buffer, HostStep, Launch, LimitSlot, Number, Slot
from max._compiler.program.code import (
    ALIGNMENT,
    Check,
    Compiled,
    FixedBuffer,
    GeometryCode,
    HostStepCode,
    KernelInfo,
    LaunchCode,
    LimitCode,
    ProgramCode,
    SlotCode,
    TensorInfo,
    ValueCode,
)
from max._compiler.program.flatten import Flat
from max._compiler.program.memory_plan import Block, MemoryPlan, plan_memory
from max._config import flags
from max._dataclass import dataclass
from max.mlir.sizes import Size, simplify

__all__ = ["emit"]


class _Emitter:
    """Emits one segment of a program."""

    def __init__(
        self,
        flat: Flat,
        labels: Sequence[int],
        plan: MemoryPlan,
        segment: int,
        fixed_table: dict[int, int],
        bases: BaseLayout,
    ) -> None:
        self.labels = labels
        self.buffers = flat.buffers
        self.plan = plan
        self.fixed = fixed_table
        self.code = ProgramCode(segment)
        self.numbers: dict[ValueCode, int] = {}
        # value 0 is 0: the base of constants
        self.value(ValueCode(BaseLayout.NOTHING, -1, 0))
        self.outputs = {buffer: position for position, buffer in enumerate(flat.outputs)}
        self.bases = bases
        self.block_offset: dict[int, int] = {}
        self.block_number: dict[int, int] = {}
        self.place_blocks([block for block in plan.blocks if block.segment <= segment])

    def launch(self, launch: Launch, barrier: bool, start: int) -> None:
        """Adds a launch; `start` is the position of the segment's first one."""
        slots = tuple([self.slot(slot) for slot in launch.slots])
        limit = next(
            (self.limit(i, s) for i, s in enumerate(launch.slots) if type(s) is LimitSlot), None
        )
        code = LaunchCode(
            launch.kernel,
            slots,
            barrier,
            launch.serial,
            launch.name,
            limit=limit,
            staged_op=launch.staged_op,
            check=launch.check,
            work=launch.work,
            geometry=self.geometry(launch.geometry),
        )
        # a jump moves no bytes and counts no operations
        if launch.jump is not None:
            kind, label = launch.jump.kind, launch.jump.label
            # labels count from the start of the program, targets from the start of the segment
            target = len(self.code.launches) + 1 if kind == "next" else self.labels[label] - start
            self.code.launches.append(replace(code, jump=kind, target=target))
            self.code.bytes_moved.append(0)
            self.code.flops.append(0)
            return
        self.code.launches.append(code)
        total: Size = 0
        # a buffer that is read and written counts once
        for buffer in dict.fromkeys((*launch.reads, *launch.writes)):
            total = simplify(total + self.buffers[buffer].bytes)
        self.code.bytes_moved.append(total)
        self.code.flops.append(launch.flops)

    def geometry(self, geometry: Geometry | None) -> GeometryCode | None:
        """The code of a launch's workers."""
        if geometry is None:
            return None
        grid = tuple([self.slot(Number(size)) for size in geometry.grid])
        return GeometryCode(grid, geometry.block, geometry.shared_bytes)

    def host_step(self, step: HostStep, target: int) -> None:
        """Adds a host step; `target` is the segment where the host continues."""
        bounds = tuple([self.slot(pointer) for pointer in step.bounds])
        shape = tuple([self.slot(Number(size)) for size in step.shape])
        self.code.host_steps.append(
            HostStepCode(
                step.rule,
                step.symbols,
                bounds,
                step.dtype,
                shape,
                step.label,
                target,
                tuple([self.buffers[pointer.buffer].device for pointer in step.bounds]),
            )
        )

    def place_blocks(self, blocks: list[Block]) -> None:
        """Assigns offsets to static blocks; symbolic blocks get theirs when the program runs."""
        offsets = [0] * (self.code.segment + 1)  # [segment]: the bytes placed so far in each arena
        for number, block in enumerate(blocks):
            # with guard pages each block is placed apart when the program runs
            if not flags.MAX_GUARD and all(isinstance(size, int) for size in block.sizes):
                self.block_offset[number] = offsets[block.segment]
                longest = max(size for size in block.sizes if isinstance(size, int))
                offsets[block.segment] += -(-longest // ALIGNMENT) * ALIGNMENT
            else:
                self.block_number[number] = len(self.code.blocks)
                self.code.blocks.append((block.segment, tuple(block.sizes)))
        self.code.static_bytes = offsets

    def value(self, value: ValueCode) -> int:
        if value not in self.numbers:
            self.numbers[value] = len(self.code.values)
            self.code.values.append(value)
        return self.numbers[value]

    def limit(self, index: int, slot: LimitSlot) -> LimitCode:
        return LimitCode(index, slot.name, slot.maximum, self.slot(Number(slot.rows)))

    def slot(self, slot: Slot) -> SlotCode:
        """The code of a slot: base, block and offset of a pointer; a constant for a number or a threshold's default."""
        if isinstance(slot, LimitSlot):
            return self.code_of(BaseLayout.NOTHING, slot.default)
        if isinstance(slot, Number):
            return self.code_of(BaseLayout.NOTHING, slot.value)
        buffer = self.buffers[slot.buffer]
        if buffer.kind == "input":
            return self.code_of(self.bases.input(int(buffer.name)), slot.offset)
        if buffer.kind == "output":
            position = self.outputs[slot.buffer]
            return self.code_of(self.bases.output(position), slot.offset)
        if slot.buffer in self.fixed:
            fixed = self.fixed[slot.buffer]
            return self.code_of(BaseLayout.NOTHING, slot.offset, fixed_buffer=fixed)
        block = self.plan.block_of[slot.buffer]
        arena = self.bases.arena(self.plan.blocks[block].segment)
        # the offset of a static block is part of the constant, and so needs no value
        if block in self.block_offset:
            code = self.code_of(arena, slot.offset)
            return SlotCode(code.value, code.addend + self.block_offset[block])
        return self.code_of(arena, slot.offset, self.block_number[block])

    def code_of(self, base: int, size: Size, block: int = -1, fixed_buffer: int = -1) -> SlotCode:
        """The code of a size behind a base, of a block in an arena, or of a fixed buffer."""
        if isinstance(size, int):
            return SlotCode(self.value(ValueCode(base, block, 0)), size, fixed_buffer)
        return SlotCode(self.value(ValueCode(base, block, size)), 0, fixed_buffer)


def _fixed_buffer(buffer: Buffer) -> FixedBuffer:
    """The fixed buffer of a weight, a constant or a result computed once; its size must be static."""
    assert isinstance(buffer.bytes, int), f"{buffer.name} has no static size"
    shape = tuple([dim for dim in buffer.shape if isinstance(dim, int)])
    # a resource of the module is found by its name when a program comes from the disk
    array = None if buffer.kind == "constant" and buffer.name else buffer.array
    return FixedBuffer(
        buffer.kind, buffer.bytes, buffer.name, array, buffer.dtype, shape, buffer.device
    )


@dataclass(frozen=True)
class _LaunchList:
    """The launches of `mok.once`, or those of an execution; see `Flat`."""

    launches: list[Launch]
    host_steps: list[tuple[int, HostStep]]
    checks: Sequence[Check] = ()
    labels: Sequence[int] = ()
    loops: Sequence[tuple[int, int]] = ()


def emit(
    name: str,
    flat: Flat,
    kernels: Sequence[dict[str, KernelInfo]],
    inputs: list[TensorInfo],
    input_names: list[str],
    outputs: list[TensorInfo],
) -> Compiled:
    """Emits the program of a model.

    Args:
        name: The name of the graph.
        flat: Its launches.
        kernels: The kernels of each device.
        inputs: The inputs.
        input_names: Their names.
        outputs: The outputs.
    """
    # all segments share one table of what lives as long as the model
    fixed: dict[int, int] = {}
    table: list[FixedBuffer] = []
    for index, buffer in enumerate(flat.buffers):
        if buffer.kind in ("weight", "constant", "kept"):
            fixed[index] = len(table)
            table.append(_fixed_buffer(buffer))
    symbols = dict.fromkeys(name for info in inputs for dim in info.shape for name in _symbols(dim))
    layout = BaseLayout(len(inputs), len(outputs))
    at_load = _LaunchList(flat.once, flat.once_host_steps)
    once = _segments(flat, at_load, fixed, layout, (), symbols)
    execution = _LaunchList(flat.launches, flat.host_steps, flat.checks, flat.labels, flat.loops)
    parts = _segments(flat, execution, fixed, layout, outputs, symbols)
    # only kernels that a launch uses are compiled and loaded
    used = [set[str]() for _ in kernels]
    for part in (*once, *parts):
        used[part.device].update(launch.kernel for launch in part.launches)
    output_buffers = [
        int(flat.buffers[buffer].name) if flat.buffers[buffer].kind == "input" else -1
        for buffer in flat.outputs
    ]
    return Compiled(
        name=name,
        symbols=tuple(symbols),
        inputs=inputs,
        input_names=input_names,
        outputs=outputs,
        output_buffers=output_buffers,
        once=once,
        main=parts[0],
        later=parts[1:],
        fixed_buffers=table,
        kernels=[
            {key: info for key, info in table.items() if key in keys}
            for table, keys in zip(kernels, used, strict=True)
        ],
        guarded=flags.MAX_GUARD,
    )


def _symbols(*sizes: Size) -> set[str]:
    return {name for size in sizes if not isinstance(size, int) for name in size.symbols}


def _segments(
    flat: Flat,
    sequence: _LaunchList,
    fixed_table: dict[int, int],
    layout: BaseLayout,
    outputs: Sequence[TensorInfo],
    symbols: dict[str, None],
) -> list[ProgramCode]:
    """Emits the segments of a sequence of launches; adds the symbols whose sizes the host reads to `symbols`."""
    launches, host_steps = sequence.launches, sequence.host_steps
    cuts = sorted({position for position, _ in host_steps})
    host_reads = [(at, pointer.buffer) for at, step in host_steps for pointer in step.bounds]
    plan = plan_memory(
        flat.buffers,
        launches,
        cuts,
        host_reads,
        sequence.labels,
        sequence.loops,
        not flags.MAX_GUARD,
    )
    starts, ends = [0, *cuts], [*cuts, len(launches)]
    outputs_left = dict(enumerate(outputs))
    checks_left = list(sequence.checks)
    parts: list[ProgramCode] = []
    for segment, (start, end) in enumerate(zip(starts, ends, strict=True)):
        emitter = _Emitter(flat, sequence.labels, plan, segment, fixed_table, layout)
        code = emitter.code
        if start < end:
            code.device = launches[start].device
        for launch, barrier in zip(launches[start:end], plan.barriers[start:end], strict=True):
            emitter.launch(launch, barrier, start)
        known_symbols = symbols.keys()
        # an output is allocated in the first segment that knows its size
        code.outputs = [
            i for i, info in outputs_left.items() if _symbols(*info.shape) <= known_symbols
        ]
        for index in code.outputs:
            del outputs_left[index]
        code.checks = [
            check
            for check in checks_left
            if _symbols(check.actual, check.required) <= known_symbols
        ]
        checks_left = [check for check in checks_left if check not in code.checks]
        for position, step in host_steps:
            if segment < len(cuts) and position == cuts[segment]:
                target = -1
                if step.target >= 0:
                    target = cuts.index(sequence.labels[step.target]) + 1
                emitter.host_step(step, target)
                # the sizes that the host reads here are known from the next segment on
                symbols.update(dict.fromkeys(filter(None, step.symbols)))
        parts.append(code)
    return parts
