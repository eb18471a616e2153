"""Compiled programs as data, without addresses or symbol values: what the disk cache holds, and what the engine links.

A *value* of the program is ``base + block offset + size``: the base is nothing, an arena, an input or an output
(`max._abi.BaseLayout`); the block is one of the arena's symbolic blocks; the size is an expression over the symbols.
An argument slot is a value plus a constant, plus the address of a fixed buffer (a weight, a constant, a result computed
at load) if it points into one.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal, NamedTuple

from max._abi import BaseLayout
from max._dataclass import dataclass
from max.dtype import DType
from max.mlir.conditions import Condition
from max.mlir.dims import DimExpr
from max.mlir.sizes import Size

__all__ = [
    "ALIGNMENT",
    "Check",
    "GeometryCode",
    "LimitCode",
    "Compiled",
    "HostStepCode",
    "FixedBuffer",
    "KernelInfo",
    "LaunchCode",
    "ProgramCode",
    "SlotCode",
    "TensorInfo",
    "ValueCode",
    "WorkCode",
]

ALIGNMENT = 64
"""The alignment of buffers, in bytes."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """An input or output of a graph; `device` is its label and id, a `mutable` one is a buffer."""

    dtype: DType
    shape: tuple[Size, ...]
    device: tuple[str, int]
    mutable: bool = False


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """The properties of a kernel that launches need besides its code."""

    key: str
    phases: int
    scratch_bytes: int
    messages: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """A condition over two sizes, checked at run time: ``actual == required`` if exact, else ``actual >= required``.

    Args:
        actual: The size of an operand.
        required: The required size.
        message: The error message for sizes that do not meet the condition.
        exact: Whether both must be equal.
        staged_op: The number of the staged op with the condition; -1: none.
    """

    actual: Size
    required: Size
    message: str
    exact: bool = True
    staged_op: int = -1

    @property
    def condition(self) -> Condition:
        """The condition as `max.mlir` has it."""
        return Condition(
            DimExpr.of(self.actual), DimExpr.of(self.required), self.message, self.exact
        )

    def failure(self, actual: int, required_value: int) -> str | None:
        """The error message if the values do not meet the condition, else None."""
        # this runs for each new set of sizes: the `Condition` is built only for the message
        if actual == required_value if self.exact else actual >= required_value:
            return None
        return self.condition.text(actual, required_value)


class ValueCode(NamedTuple):
    """One entry of the vector of values."""

    base: int
    block: int
    size: Size


class SlotCode(NamedTuple):
    """A slot: the number of a value, a constant, and the number of a fixed buffer or -1."""

    value: int
    addend: int
    fixed_buffer: int = -1


class WorkCode(NamedTuple):
    """The amount of work of a launch: elements of a `region`, arithmetic operations of a `product`, or bytes of the
    buffers of an `other` kernel of the library.
    """

    kind: Literal["region", "product", "other"]
    amount: Size


class GeometryCode(NamedTuple):
    """The workers of a launch on a device with a grid of blocks; see `max._backends.program.LaunchGeometry`."""

    grid: tuple[SlotCode, ...]
    block: tuple[int, ...]
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class LaunchCode:
    """A launch without addresses. A jump has a kind, and the index of a launch as its target.

    Its `work` is None if it is unknown, or if the result depends on the number of workers.
    """

    kernel: str
    slots: tuple[SlotCode, ...]
    barrier: bool
    serial: bool
    name: str
    jump: str = ""
    target: int = -1
    limit: LimitCode | None = None
    staged_op: int = -1
    check: Check | None = None
    work: WorkCode | None = None
    geometry: GeometryCode | None = None


@dataclass(frozen=True, slots=True)
class LimitCode:
    """A slot with a row threshold, chosen when the program is loaded; see `max._backends.kernel_call.Limit`."""

    slot: int
    name: str
    maximum: int
    rows: SlotCode


@dataclass(frozen=True, slots=True)
class HostStepCode:
    """What the host does after a segment; see `max._compiler.lowering.lowered_graph.HostStep`."""

    rule: str
    symbols: tuple[str, ...]
    bounds: tuple[SlotCode, ...]
    dtype: DType
    shape: tuple[SlotCode, ...]
    label: str = ""
    target: int = -1
    devices: tuple[int, ...] = ()
    """The backend of each bound."""


@dataclass(slots=True)
class ProgramCode:
    """A list of launches with its values and arena: a whole program, or a segment, which ends where the host reads
    sizes.

    Args:
        segment: The index of the segment.
        device: The index of the backend that runs it and holds its arena.
        static_bytes: The length of the static part of each arena up to this segment's.
        blocks: The symbolic blocks of these arenas, each with the number of its arena; a block has the largest of its
            sizes. They follow the static part, in this order.
        bytes_moved: The bytes of the buffers that each launch touches; tests limit them, profiles divide them by time.
        flops: The arithmetic operations of each launch; 0 if unknown.
        outputs: The outputs whose shapes become known in this segment.
        checks: The checks whose sizes become known in this segment.
        host_steps: What the host does after the segment.
    """

    segment: int = 0
    device: int = 0
    launches: list[LaunchCode] = field(default_factory=list[LaunchCode])
    values: list[ValueCode] = field(default_factory=list[ValueCode])
    static_bytes: list[int] = field(default_factory=list[int])
    blocks: list[tuple[int, tuple[Size, ...]]] = field(
        default_factory=list[tuple[int, tuple[Size, ...]]]
    )
    bytes_moved: list[Size] = field(default_factory=list[Size])
    flops: list[Size] = field(default_factory=list[Size])
    outputs: list[int] = field(default_factory=list[int])
    checks: list[Check] = field(default_factory=list[Check])
    host_steps: list[HostStepCode] = field(default_factory=list[HostStepCode])


@dataclass(frozen=True, slots=True)
class FixedBuffer:
    """Memory that lives as long as the model.

    Args:
        kind: ``weight``, ``constant``, or ``kept``: a result computed at load.
        bytes: The size in bytes.
        name: The name of a weight, or of a large constant of the module.
        array: The elements of a small constant.
        dtype: The dtype of a weight.
        shape: The shape of a weight.
        device: The index of the backend whose memory it is in.
    """

    kind: str
    bytes: int
    name: str = ""
    array: Any = None
    dtype: DType | None = None
    shape: tuple[int, ...] = ()
    device: int = 0


@dataclass(slots=True)
class Compiled:
    """A compiled model without weights and code addresses.

    Args:
        name: The name of the graph.
        symbols: The symbols of the inputs' shapes, then those that the host reads.
        inputs: The inputs.
        input_names: Their names.
        outputs: The outputs.
        output_buffers: For each output the input buffer that it is, or -1.
        once: The program that runs when the model is loaded, by segment.
        main: The first segment of the program.
        later: The further segments, each after host steps.
        fixed_buffers: Memory that lives as long as the model.
        kernels: The kernels of each device by key.
        guarded: Whether all memory lies between guard pages; see `max._host.guard`.
    """

    name: str
    symbols: tuple[str, ...]
    inputs: list[TensorInfo]
    input_names: list[str]
    outputs: list[TensorInfo]
    output_buffers: list[int]
    once: list[ProgramCode]
    main: ProgramCode
    later: list[ProgramCode]
    fixed_buffers: list[FixedBuffer]
    kernels: list[dict[str, KernelInfo]]
    guarded: bool = False

    @property
    def bases(self) -> BaseLayout:
        """The order of the addresses that an execution passes."""
        return BaseLayout(len(self.inputs), len(self.outputs))

    @property
    def input_symbols(self) -> tuple[str, ...]:
        """The symbols of the inputs' shapes."""
        parts = (self.main, *self.later)
        read_by_host = {name for part in parts for code in part.host_steps for name in code.symbols}
        return tuple([name for name in self.symbols if name not in read_by_host])
