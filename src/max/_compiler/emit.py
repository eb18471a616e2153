"""From launches and a memory plan to a program that can be kept on disk: no addresses, no sizes of symbols.

A *value* of the program is ``base + block offset + size``: the base is nothing, the arena, an input or an output; the
block is one of the arena's symbolic blocks; the size is an expression over the symbols. Each argument slot is a value
plus a constant, and where it points into memory that is fixed when the model is loaded (weights, constants, what was
computed once), plus that memory's address.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from max._compiler.flatten import Flat
from max._compiler.memory import ALIGNMENT, Block, plan_memory
from max._compiler.sizes import Size, simplify
from max._compiler.template import Buffer, Check, KernelInfo, Launch, Number, Pointer, TensorInfo
from max.dtype import DType

__all__ = ["Compiled", "Fixed", "ProgramCode", "SlotCode", "ValueCode", "emit"]

NO_BASE, ARENA = 0, 1
"""The first bases; after them come the inputs, then the outputs."""


@dataclass(frozen=True, slots=True)
class ValueCode:
    """One entry of the vector of values."""

    base: int
    block: int
    size: Size


@dataclass(frozen=True, slots=True)
class SlotCode:
    """A slot: the number of a value, a constant, and the number of a fixed buffer or -1."""

    value: int
    addend: int
    fixed: int = -1


@dataclass(frozen=True, slots=True)
class LaunchCode:
    """A launch, ready but for addresses."""

    kernel: str
    slots: tuple[SlotCode, ...]
    barrier: bool
    serial: bool
    name: str


@dataclass(slots=True)
class ProgramCode:
    """A list of launches with its values and arena."""

    launches: list[LaunchCode] = field(default_factory=list[LaunchCode])
    values: list[ValueCode] = field(default_factory=list[ValueCode])
    static_bytes: int = 0
    blocks: list[tuple[Size, ...]] = field(default_factory=list[tuple[Size, ...]])
    """The symbolic blocks of the arena, after its static part: each as long as the longest of its sizes."""
    bytes_moved: list[Size] = field(default_factory=list[Size])
    """For each launch the bytes of the buffers that it touches: what tests gate on, and what profiles divide by time."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Memory that stays for the life of a model: a weight, a constant, or what was computed once."""

    kind: str
    bytes: int
    name: str = ""
    array: Any = None
    dtype: DType | None = None
    shape: tuple[int, ...] = ()


@dataclass(slots=True)
class Compiled:
    """All of a compiled model but its weights and the addresses of its code."""

    name: str
    symbols: tuple[str, ...]
    inputs: list[TensorInfo]
    input_names: list[str]
    outputs: list[TensorInfo]
    output_buffers: list[int]
    """For each output -1, or the input that it is."""
    once: ProgramCode
    main: ProgramCode
    fixed: list[Fixed]
    kernels: dict[str, KernelInfo]
    checks: list[Check]


class _Emitter:
    """Emits one program of a compilation."""

    def __init__(
        self, flat: Flat, launches: list[Launch], fixed: dict[int, int], num_inputs: int
    ) -> None:
        self.buffers = flat.buffers
        self.fixed = fixed
        self.code = ProgramCode()
        self.numbers: dict[ValueCode, int] = {}
        self.value(ValueCode(NO_BASE, -1, 0))
        self.outputs = {buffer: position for position, buffer in enumerate(flat.outputs)}
        self.num_inputs = num_inputs
        self.plan = plan_memory(flat.buffers, launches)
        self.block_offset: dict[int, int] = {}
        self.block_number: dict[int, int] = {}
        self.place_blocks(self.plan.blocks)
        for launch, barrier in zip(launches, self.plan.barriers, strict=True):
            slots = tuple([self.slot(slot) for slot in launch.slots])
            self.code.launches.append(
                LaunchCode(launch.kernel, slots, barrier, launch.serial, launch.name)
            )
            touched = dict.fromkeys((*launch.reads, *launch.writes))
            total: Size = 0
            for buffer in touched:
                total = simplify(total + flat.buffers[buffer].bytes)
            self.code.bytes_moved.append(total)

    def place_blocks(self, blocks: list[Block]) -> None:
        """Static blocks get offsets now, symbolic ones when the program runs."""
        offset = 0
        for number, block in enumerate(blocks):
            if all(isinstance(size, int) for size in block.sizes):
                self.block_offset[number] = offset
                longest = max(size for size in block.sizes if isinstance(size, int))
                offset += -(-longest // ALIGNMENT) * ALIGNMENT
            else:
                self.block_number[number] = len(self.code.blocks)
                self.code.blocks.append(tuple(block.sizes))
        self.code.static_bytes = offset

    def value(self, value: ValueCode) -> int:
        if value not in self.numbers:
            self.numbers[value] = len(self.code.values)
            self.code.values.append(value)
        return self.numbers[value]

    def slot(self, slot: Pointer | Number) -> SlotCode:
        if isinstance(slot, Number):
            return self.code_of(NO_BASE, -1, slot.value, -1)
        buffer = self.buffers[slot.buffer]
        if buffer.kind == "input":
            return self.code_of(2 + int(buffer.name), -1, slot.offset, -1)
        if buffer.kind == "output":
            return self.code_of(
                2 + self.num_inputs + self.outputs[slot.buffer], -1, slot.offset, -1
            )
        if slot.buffer in self.fixed:
            return self.code_of(NO_BASE, -1, slot.offset, self.fixed[slot.buffer])
        block = self.plan.block_of[slot.buffer]
        if block in self.block_offset:
            made = self.code_of(ARENA, -1, slot.offset, -1)
            return SlotCode(made.value, made.addend + self.block_offset[block])
        return self.code_of(ARENA, self.block_number[block], slot.offset, -1)

    def code_of(self, base: int, block: int, size: Size, fixed: int) -> SlotCode:
        if isinstance(size, int):
            return SlotCode(self.value(ValueCode(base, block, 0)), size, fixed)
        return SlotCode(self.value(ValueCode(base, block, size)), 0, fixed)


def _fixed(buffer: Buffer) -> Fixed:
    assert isinstance(buffer.bytes, int), f"{buffer.name} has no static size"
    shape = tuple([dim for dim in buffer.shape if isinstance(dim, int)])
    # a resource of the module is found by its name when a program comes from the disk
    array = None if buffer.kind == "constant" and buffer.name else buffer.array
    return Fixed(buffer.kind, buffer.bytes, buffer.name, array, buffer.dtype, shape)


def emit(
    name: str,
    flat: Flat,
    kernels: dict[str, KernelInfo],
    inputs: list[TensorInfo],
    input_names: list[str],
    outputs: list[TensorInfo],
) -> Compiled:
    """Makes the program.

    Args:
        name: The name of the graph.
        flat: Its launches.
        kernels: What is known of the kernels that they use.
        inputs: The inputs.
        input_names: Their names.
        outputs: The outputs.
    """
    fixed: dict[int, int] = {}
    table: list[Fixed] = []
    for index, buffer in enumerate(flat.buffers):
        if buffer.kind in ("weight", "constant", "kept"):
            fixed[index] = len(table)
            table.append(_fixed(buffer))
    symbols = dict.fromkeys(
        symbol
        for info in inputs
        for dim in info.shape
        if not isinstance(dim, int)
        for symbol in dim.symbols
    )
    once = _Emitter(flat, flat.once, fixed, len(inputs)).code
    main = _Emitter(flat, flat.launches, fixed, len(inputs)).code
    used = {launch.kernel for launch in (*once.launches, *main.launches)}
    output_buffers = [
        int(flat.buffers[buffer].name) if flat.buffers[buffer].kind == "input" else -1
        for buffer in flat.outputs
    ]
    return Compiled(
        name, tuple(symbols), inputs, input_names, outputs, output_buffers, once, main, table,
        {key: info for key, info in kernels.items() if key in used}, flat.checks,
    )  # fmt: skip
