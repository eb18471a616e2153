"""Templates: the launches of one graph or subgraph over its own buffers and symbols, before memory is planned.

A subgraph is lowered once; :mod:`max._compiler.flatten` instantiates its template for each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from max._compiler.sizes import Size
from max.dtype import DType
from max.mlir.conditions import Condition
from max.mlir.dims import DimExpr

__all__ = [
    "Border",
    "Buffer",
    "CallStep",
    "Check",
    "Chosen",
    "Discover",
    "IfStep",
    "Jump",
    "KernelInfo",
    "Launch",
    "Number",
    "Pointer",
    "Slot",
    "Step",
    "Template",
    "TensorInfo",
    "UnsupportedOpError",
    "WhileStep",
    "mark",
]


class UnsupportedOpError(NotImplementedError):
    """An op, or an op on given types, that the compiler does not support."""


@dataclass(slots=True)
class Buffer:
    """Memory, named by its position in the template.

    Args:
        kind: ``input`` (of the template), ``temp``, ``weight``, ``constant``, or ``kept``: written once, at load.
        bytes: Its size.
        name: Of a weight, without the prefixes of calls.
        array: Of a constant.
        dtype: Of a weight.
        shape: Of a weight.
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
class Chosen:
    """A slot with a limit that is known when a program is loaded; see `max._kernel_library.lowering.Limit`."""

    name: str
    guess: int
    most: int
    rows: Size


@dataclass(frozen=True, slots=True)
class Border:
    """The address where a buffer begins, or where it ends; a pointer once the buffer's size is known."""

    buffer: int
    end: bool


Slot = Pointer | Number | Chosen


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """What a launch needs of a kernel besides its code."""

    key: str
    phases: int
    scratch_bytes: int
    messages: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Jump:
    """A change of the control flow.

    Args:
        kind: ``if_zero``: where the byte that the only slot points to is 0; ``always``; ``back``: to the head of
            a loop, whose kernels find their counters zeroed again; or ``next``: on with what comes next.
        label: The number of the place.
    """

    kind: str
    label: int


@dataclass(frozen=True, slots=True)
class Check:
    """A condition over two sizes, checked at run time: they are equal, or the first is at least the second.

    Args:
        have: The one.
        want: The other.
        message: What is wrong where it does not hold.
        exact: Whether both must be equal.
        site: The number of the staged op that it comes from; -1: none.
    """

    have: Size
    want: Size
    message: str
    exact: bool = True
    site: int = -1

    @property
    def condition(self) -> Condition:
        """What is checked."""
        return Condition(DimExpr.of(self.have), DimExpr.of(self.want), self.message, self.exact)

    def failure(self, have: int, want: int) -> str | None:
        """The message for values that do not fit, else None."""
        # a condition is made for the message only: this runs for each new set of sizes
        if have == want if self.exact else have >= want:
            return None
        return self.condition.text(have, want)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel with its arguments, or a jump, which has no kernel.

    Args:
        kernel: The kernel's key.
        slots: Its arguments.
        reads: Buffers that it reads.
        writes: Buffers that it writes.
        serial: Whether one worker runs it.
        name: What it does, for errors, profiles and `kernel_summaries`.
        in_place: Pairs (written, read) of buffers that may be one.
        parts: Buffers of which it writes a part that no other launch writes.
        jump: Of a jump, where to.
        flops: Its operations on numbers; 0 where it is not known.
        site: The number of the staged op that it comes from; -1: none.
        check: Of a launch that only checks a condition, the condition.
        device: The index of the backend that runs it.
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
    site: int = -1
    check: Check | None = None
    device: int = 0


def mark(writes: Sequence[int], device: int = 0) -> Launch:
    """A launch that does nothing; the buffers that it writes have memory in its segment from here on."""
    jump = Jump("next", -1)
    return Launch("", (), (), tuple(writes), False, "mark", jump=jump, device=device)


@dataclass(frozen=True, slots=True)
class CallStep:
    """The launches of another template, on this one's buffers.

    Args:
        callee: The subgraph's name.
        operands: The buffers of its inputs, with offsets in bytes.
        results: The buffers that its outputs become.
        env: What its symbols stand for here.
        prefix: What is put before the names of its weights.
        reveals: Symbols of the results that the callee finds out, and that are not known here before.
        inherit: Whether symbols that `env` does not have mean in the callee what they mean here.
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
    """One of two calls.

    Args:
        predicate: A byte: where it is not 0 the first is made.
        then: The first.
        otherwise: The second.
    """

    predicate: Pointer
    then: CallStep
    otherwise: CallStep


@dataclass(frozen=True, slots=True)
class WhileStep:
    """Calls again and again.

    Args:
        condition: Writes the predicate.
        predicate: A byte: where it is 0 the loop ends.
        body: Computes the next values of what is carried.
        update: Launches that put them in place of the last ones.
    """

    condition: CallStep
    predicate: Pointer
    body: CallStep
    update: tuple[Launch, ...]


@dataclass(frozen=True, slots=True)
class Discover:
    """Sizes that are known once the launches before it have run: those of a `mo.range`, `mo.slice_dynamic` or `mo.nonzero`.

    Or another step that the host takes between launches: it prints, copies between devices, or, in a branch or loop that the
    host drives, decides where to continue.

    Args:
        rule: ``range``, ``slice``, ``count`` or ``print``; ``copy``; ``if_zero`` or ``jump``.
        symbols: For each axis of the result the symbol that its size gets, or an empty text where it is known.
        bounds: Where start, stop and step are, or the count: the size of the first axis; or
            what is printed, or the predicate; or the source and the target of a copy.
        dtype: Their element type.
        shape: The shape of what is sliced or printed; the number of bytes to copy.
        label: What is printed before it.
        target: The number of the place where the host goes on.
    """

    rule: str
    symbols: tuple[str, ...]
    bounds: tuple[Pointer, ...]
    dtype: DType
    shape: tuple[Size, ...] = ()
    label: str = ""
    target: int = -1


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """An input or output of a template."""

    dtype: DType
    shape: tuple[Size, ...]
    device: tuple[str, int]
    mutable: bool = False


Step = Launch | CallStep | IfStep | WhileStep | Discover


@dataclass(slots=True)
class Template:
    """A compiled graph or subgraph."""

    name: str
    buffers: list[Buffer] = field(default_factory=list[Buffer])
    once: list[Launch | Discover] = field(default_factory=list["Launch | Discover"])
    steps: list[Step] = field(default_factory=list["Step"])
    inputs: list[tuple[int, TensorInfo]] = field(default_factory=list[tuple[int, TensorInfo]])
    outputs: list[tuple[int, TensorInfo]] = field(default_factory=list[tuple[int, TensorInfo]])
    checks: list[Check] = field(default_factory=list[Check])
