"""The kernel IR: one page of grammar.

A kernel is a list of statements over atoms. Every computed value is bound once by `Let`, so the IR needs no expression
trees; variables that change live in slots. Control flow is structured. ``line`` is the line of the kernel's source.

    Atom   = Ref | Const
    Stmt   = Let | Effect | Alloc | Assign | Store | For | While | If | Block | Leave | Parallel | Barrier | Raise
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from max._abi import COUNTER_BYTES, WORD_BYTES
from max._dataclass import dataclass
from max._host.reentry import cached_property
from max.kernel.types import ScalarType, Type


# ***** atoms *****
@dataclass(frozen=True, slots=True, eq=False)
class Ref:
    """A value bound by a `Let`, a loop or a parallel chunk."""

    id: int
    type: Type
    level: int  # nesting depth of the body that binds it


@dataclass(frozen=True, slots=True, eq=False)
class Const:
    """A literal; a vector's value is one number for all lanes or a tuple with one a lane."""

    value: Any
    type: Type


Atom = Ref | Const


# ***** statements *****
@dataclass(frozen=True, slots=True, eq=False)
class Let:
    """``ref = op(args)``; ``spec.OPS`` lists the ops, ``attr`` is its compile-time operand."""

    ref: Ref
    op: str
    args: tuple[Atom, ...]
    attr: Any
    line: int


@dataclass(frozen=True, slots=True, eq=False)
class Effect:
    """An op for its effect only (prefetch, print, assume)."""

    op: str
    args: tuple[Atom, ...]
    attr: Any
    line: int


@dataclass(frozen=True, slots=True, eq=False)
class Alloc:
    """A slot of ``count`` values of ``type`` on the worker's stack."""

    slot: int
    type: Type
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Assign:
    """Writes a slot's element ``index`` (0 for a plain variable)."""

    slot: int
    index: Atom
    value: Atom
    line: int


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Writes ``value`` to memory; with a ``mask``, only its active lanes."""

    pointer: Atom
    value: Atom
    mask: Atom | None
    line: int


@dataclass(frozen=True, slots=True, eq=False)
class For:
    """Counts ``var`` from ``start`` to before ``stop``."""

    var: Ref
    start: Atom
    stop: Atom
    step: int
    body: tuple[Stmt, ...]
    line: int
    max_iterations: int | None = None  # an upper bound of the iterations; None: not known


@dataclass(frozen=True, slots=True, eq=False)
class While:
    """Runs ``head``, then ``body`` as long as ``cond`` (computed by ``head``) holds."""

    head: tuple[Stmt, ...]
    cond: Atom
    body: tuple[Stmt, ...]
    line: int


@dataclass(frozen=True, slots=True, eq=False)
class If:
    """Runs one of two bodies."""

    cond: Atom
    then: tuple[Stmt, ...]
    orelse: tuple[Stmt, ...]
    line: int


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A body that `Leave` can end early.

    An ``outlined`` one becomes a function of its own, which all kernels with an equal body share. Its numbers are by
    ``shift`` higher than those of the first call in a kernel.
    """

    label: int
    body: tuple[Stmt, ...]
    outlined: bool = False
    shift: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Leave:
    """Goes to the end of the enclosing block ``label``."""

    label: int


LONG_SHARE, LONGS, SHORT_SHARE = 4, 3, 4
"""Chunks by default: long ones of 1 / LONG_SHARE of a worker's share, LONGS of them a worker; then ones shorter by
SHORT_SHARE.
"""
MAX_SHARES = COUNTER_BYTES // WORD_BYTES
"""The maximum number of shares of a parallel loop: their counters are on one cache line."""


@dataclass(frozen=True, slots=True, eq=False)
class Parallel:
    """Hands out ``[begin, end)`` chunks of ``[0, total)`` to the workers, from the counter line ``phase``.

    ``grain`` 0 means long chunks first, of a quarter of a worker's share, then for the last quarter of the work short
    ones of a sixteenth: long runs are read fastest, and short ones at the end keep workers from waiting for the last.
    Chunk sizes are multiples of ``multiple``.
    """

    begin: Ref
    end: Ref
    total: Atom
    grain: Atom
    multiple: int
    phase: int
    body: tuple[Stmt, ...]
    line: int


@dataclass(frozen=True, slots=True, eq=False)
class Barrier:
    """Waits for all workers, and returns where one of them has raised."""

    line: int


@dataclass(frozen=True, slots=True, eq=False)
class Raise:
    """Writes the error record (message number and values) if it is free, and returns from the kernel."""

    message: int
    values: tuple[Atom, ...]
    line: int


Stmt = (
    Let
    | Effect
    | Alloc
    | Assign
    | Store
    | For
    | While
    | If
    | Block
    | Leave
    | Parallel
    | Barrier
    | Raise
)


# ***** kernels *****
@dataclass(frozen=True, slots=True)
class ArgSlot:
    """One 64-bit slot of the argument block.

    Attributes:
        arg: The position among the run-time arguments, variadic ones counted singly.
        name: The name of the parameter.
        kind: ``pointer``, ``dim``, ``stride``, ``scalar``, or ``begin`` or ``end`` of the tensor's memory.
        axis: The axis of a dim or stride, else 0.
        dtype: The element type.
    """

    arg: int
    name: str
    kind: str
    axis: int
    dtype: ScalarType


@dataclass(frozen=True, slots=True)
class Message:
    """The text of a ``raise``, with a placeholder ``{}`` for each value of the error record.

    Attributes:
        exception: The name of the exception.
        text: The text.
        dtypes: The types of the values.
        file: The file of the ``raise``.
        line: Its line.
    """

    exception: str
    text: str
    dtypes: tuple[ScalarType, ...]
    file: str
    line: int

    def format(self, values: Any) -> str:
        """The message with the record's values (64-bit integers; floats as the bits of an f64)."""
        shown: list[float | int] = []
        for bits, dtype in zip(values, self.dtypes, strict=False):
            raw = int(bits) & 0xFFFFFFFFFFFFFFFF
            if dtype.is_float:
                shown.append(_float_from_bits(raw))
            elif dtype.kind == "b":
                shown.append(bool(raw))
            elif dtype.kind == "i":
                shown.append(raw - (1 << 64) if raw >> 63 else raw)
            else:
                shown.append(raw)
        return self.text.format(*shown)


def _float_from_bits(raw: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", raw))[0]


def _word(slot: ArgSlot, x: Any) -> int:
    """The 64-bit word of a slot for an argument."""
    if slot.kind == "scalar":
        raw = np.zeros(8, np.uint8)
        # little-endian: the value is in the low bytes
        raw[: x.dtype.itemsize] = np.atleast_1d(x).view(np.uint8)
        return int(raw.view(np.int64)[0])
    if slot.kind == "dim":
        return int(x.shape[slot.axis])
    if slot.kind == "stride":
        return int(x.strides[slot.axis] // x.itemsize)
    if slot.kind == "pointer":
        return int(x.ctypes.data)
    return int(byte_bounds(x)[slot.kind == "end"])


@dataclass(frozen=True, eq=False)
class KernelIR:
    """A kernel specialized for arguments, compile-time parameters and a target. Equal keys are equal kernels."""

    name: str
    slots: tuple[ArgSlot, ...]
    phases: int
    scratch_bytes: int
    messages: tuple[Message, ...]
    body: tuple[Stmt, ...]
    text: str  # as printed by `max.kernel.ir.printer`
    file: str = ""
    line: int = 0
    origin: Any = None  # the kernel's function, specs and parameters

    @cached_property
    def key(self) -> str:
        """The hash of the printed IR; names and source lines are not part of it."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def words(self, args: Sequence[Any]) -> list[int]:
        """The argument block for NumPy arrays and scalars, which must outlive it.

        Args:
            args: what the slots' ``arg`` count: an array for each view, a NumPy scalar for each scalar.
        """
        return [_word(slot, args[slot.arg]) for slot in self.slots]

    def __str__(self) -> str:
        return self.text

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelIR) and self.key == other.key
