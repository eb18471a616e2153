"""Lowered graphs: the launches of one graph or subgraph over its own buffers and symbols, before memory is planned.

A subgraph is lowered once; :mod:`max._compiler.program.flatten` instantiates it for each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

from max._backends.kernel_call import Geometry
from max._compiler.program.code import Check, TensorInfo, WorkCode
from max._dataclass import dataclass
from max.dtype import DType
from max.mlir.sizes import Size

__all__ = [
    "BufferBound",
    "Buffer",
    "CallStep",
    "LimitSlot",
    "HostStep",
    "IfStep",
    "Jump",
    "Launch",
    "Number",
    "Pointer",
    "Slot",
    "Step",
    "LoweredGraph",
    "UnsupportedOpError",
    "WhileStep",
    "callees_of",
    "computed_symbols",
    "mark",
    "symbols_computed_by",
]


class UnsupportedOpError(NotImplementedError):
    """An op, or an op on given types, that the compiler does not support."""


@dataclass(slots=True)
class Buffer:
    """A block of memory, identified by its index in the graph.

    Args:
        kind: ``input`` (of the graph), ``temp``, ``weight``, ``constant``, or ``kept``: written once, at load.
        bytes: The size in bytes.
        name: The name of a weight, without the prefixes of calls, or of a large constant.
        array: The elements of a constant.
        dtype: The dtype of a weight.
        shape: The shape of a weight.
        device: The index of the backend whose memory it is in.
    """

    kind: str
    bytes: Size
    name: str = ""
    array: Any = None
    dtype: DType | None = None
    shape: tuple[Size, ...] = ()
    device: int = 0


@dataclass(frozen=True, slots=True)
class Pointer:
    """A slot with the address of a buffer plus an offset in bytes."""

    buffer: int
    offset: Size = 0


@dataclass(frozen=True, slots=True)
class Number:
    """A slot with a dim or a scalar."""

    value: Size


@dataclass(frozen=True, slots=True)
class LimitSlot:
    """A slot with a row threshold that is known when a program is loaded; see `max._backends.kernel_call.Limit`."""

    name: str
    default: int
    maximum: int
    rows: Size


@dataclass(frozen=True, slots=True)
class BufferBound:
    """The address where a buffer begins, or where it ends; a pointer once the buffer's size is known."""

    buffer: int
    end: bool


Slot = Pointer | Number | LimitSlot


@dataclass(frozen=True, slots=True)
class Jump:
    """A change of the control flow.

    Args:
        kind: ``if_zero``: jumps if the byte that the only slot points to is 0; ``always``; ``back``: jumps to the head
            of a loop, and zeroes the counters of the loop's kernels; ``next``: does not jump.
        label: The number of the target label.
    """

    kind: str
    label: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel with its arguments, or a jump, which has no kernel.

    Args:
        kernel: The kernel's key; empty for a jump.
        slots: The arguments.
        reads: The buffers that it reads.
        writes: The buffers that it writes.
        serial: Whether one worker runs it.
        name: The name in errors, profiles and `kernel_summaries`.
        in_place: Pairs (written, read) of buffers that may share memory.
        parts: Buffers of which it writes a part that no other launch writes.
        jump: The jump, or None for a kernel.
        flops: The number of arithmetic operations; 0 if unknown.
        staged_op: The number of the staged op that it computes; -1: none.
        check: The condition, for a launch that only checks one.
        device: The index of the backend that runs it.
        work: What other workers could share; None: it is unknown, or the result depends on the number of workers.
        geometry: The workers, for a device with a grid of blocks.
    """

    kernel: str
    slots: tuple[Slot, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    serial: bool
    name: str
    in_place: tuple[tuple[int, int], ...] = ()
    parts: tuple[int, ...] = ()
    jump: Jump | None = None
    flops: Size = 0
    staged_op: int = -1
    check: Check | None = None
    device: int = 0
    work: WorkCode | None = None
    geometry: Geometry | None = None


def mark(writes: Sequence[int], device: int = 0) -> Launch:
    """A launch without effect: from it on, the buffers in `writes` have memory in its segment."""
    jump = Jump("next", -1)
    return Launch("", (), (), tuple(writes), False, "mark", jump=jump, device=device)


@dataclass(frozen=True, slots=True)
class CallStep:
    """A call: the launches of another graph on buffers of this one.

    Args:
        callee: The name of the subgraph.
        operands: The buffers of its inputs, with offsets in bytes.
        results: The buffers of its outputs.
        env: The size in the caller for each symbol of the callee.
        prefix: The prefix of the names of its weights.
        reveals: The symbols of the results that the callee computes and that the caller did not know before.
        inherit: Whether symbols outside `env` have the same value in the callee as in the caller.
    """

    callee: str
    operands: tuple[Pointer, ...]
    results: tuple[int, ...]
    env: tuple[tuple[str, Size], ...]
    prefix: str
    reveals: tuple[str, ...] = ()
    inherit: bool = False


@dataclass(frozen=True, slots=True)
class IfStep:
    """A branch: one of two calls.

    Args:
        predicate: The address of a byte.
        then: The call if the byte is not 0.
        otherwise: The call if the byte is 0.
    """

    predicate: Pointer
    then: CallStep
    otherwise: CallStep


@dataclass(frozen=True, slots=True)
class WhileStep:
    """A loop.

    Args:
        condition: The call that writes the predicate.
        predicate: The address of a byte; the loop ends if it is 0.
        body: The call that computes the next values of the carried tensors.
        update: The launches that copy them over the last values.
    """

    condition: CallStep
    predicate: Pointer
    body: CallStep
    update: tuple[Launch, ...]


@dataclass(frozen=True, slots=True)
class HostStep:
    """A step of the host between launches.

    The host reads the sizes of the result of a `mo.range`, `mo.slice_dynamic` or `mo.nonzero`, which depend on values
    that the launches before computed. Or it prints, copies between devices, or takes a branch or loop that the host
    drives.

    Args:
        rule: ``range``, ``slice`` or ``count`` (sizes); ``print``; ``copy``; ``if_zero`` or ``jump``.
        symbols: For each axis of the result the symbol of its size; empty if the size is known before.
        bounds: The addresses that the host reads: start, stop and step; the count, which is the size of the first axis;
            the printed tensor; the predicate; or the source and the target of a copy.
        dtype: The element type of the tensors at these addresses.
        shape: The shape of the sliced or printed tensor; for a copy the number of bytes.
        label: The text that is printed before the tensor.
        target: The number of the label where the host continues.
    """

    rule: str
    symbols: tuple[str, ...]
    bounds: tuple[Pointer, ...]
    dtype: DType
    shape: tuple[Size, ...] = ()
    label: str = ""
    target: int = -1


Step = Launch | CallStep | IfStep | WhileStep | HostStep


@dataclass(slots=True)
class LoweredGraph:
    """A compiled graph or subgraph.

    `once` runs when a model is loaded, `steps` at each execution; `inputs` and `outputs` have the buffer of each.
    """

    name: str
    buffers: list[Buffer] = field(default_factory=list[Buffer])
    once: list[Launch | HostStep] = field(default_factory=list["Launch | HostStep"])
    steps: list[Step] = field(default_factory=list["Step"])
    inputs: list[tuple[int, TensorInfo]] = field(default_factory=list[tuple[int, TensorInfo]])
    outputs: list[tuple[int, TensorInfo]] = field(default_factory=list[tuple[int, TensorInfo]])
    checks: list[Check] = field(default_factory=list[Check])


def callees_of(step: Step) -> tuple[str, ...]:
    """The graphs that a step may run."""
    if isinstance(step, CallStep):
        return (step.callee,)
    if isinstance(step, IfStep):
        return (step.then.callee, step.otherwise.callee)
    return (step.condition.callee, step.body.callee) if isinstance(step, WhileStep) else ()


def symbols_computed_by(step: Step) -> tuple[str, ...]:
    """The symbols whose values a step computes at run time."""
    if isinstance(step, HostStep):
        return tuple(filter(None, step.symbols))
    return step.reveals if isinstance(step, CallStep) else ()


def computed_symbols(lowered_graph: LoweredGraph) -> list[str]:
    """The symbols whose values a graph or its callees compute at run time."""
    return [symbol for step in lowered_graph.steps for symbol in symbols_computed_by(step)]
