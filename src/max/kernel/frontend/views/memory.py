"""Checks of accesses against the memory of a view's tensor (``MAX_KERNEL_CHECK=2``).

A view records the memory range of its tensor; slices and reshapes of the view keep it. Every load and store is checked
against that range, independent of the view's shape and strides.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of constants are Any

from __future__ import annotations

from max._dataclass import dataclass
from max.kernel.frontend.conversions import splat
from max.kernel.frontend.raising import refuse
from max.kernel.frontend.state import Frontend
from max.kernel.ir.nodes import Atom
from max.kernel.types import BOOL, INDEX, vector


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """A range of memory: the address of its first byte, and its length in bytes."""

    begin: Atom
    size: Atom
    name: str
    """The name in error messages."""


def check_bytes(fe: Frontend, memory: Memory | None, pointer: Atom, size: int, access: str) -> None:
    """Emits a check that ``size`` bytes from ``pointer`` on are inside the memory.

    Args:
        fe: The frontend.
        memory: The memory; None disables the check.
        pointer: The address.
        size: The number of accessed bytes.
        access: ``read`` or ``write``.
    """
    if memory is None or not _first_check(fe, (pointer, size)):
        return
    b = fe.b
    offset = _offset(fe, memory, pointer)
    # unsigned: an address before the memory has a large offset
    out_of_bounds = b.op("uge", (offset, _limit(fe, memory, size)), BOOL)
    _refuse(fe, memory, out_of_bounds, access, size, offset)


def check_lanes(
    fe: Frontend,
    memory: Memory | None,
    pointer: Atom,
    offsets: Atom,
    size: int,
    mask: Atom | None,
    access: str,
) -> None:
    """Emits a check that the elements of all active lanes are inside the memory.

    Args:
        fe: The frontend.
        memory: The memory; None disables the check.
        pointer: The base address.
        offsets: The offset of each lane, in elements.
        size: The size of an element in bytes.
        mask: The active lanes; None for all.
        access: ``read`` or ``write``.
    """
    if memory is None or not _first_check(fe, (pointer, offsets, size, mask)):
        return
    b, width = fe.b, offsets.type.width
    lanes, flags = vector(INDEX.dtype, width), vector(BOOL.dtype, width)
    scaled = b.op("mul", (offsets, b.const(size, lanes)), lanes)
    first = splat(fe, _offset(fe, memory, pointer), width)
    positions = b.op("add", (first, scaled), lanes)
    outside = b.op("uge", (positions, splat(fe, _limit(fe, memory, size), width)), flags)
    if mask is not None:
        outside = b.op("and", (outside, mask), flags)
    # the message shows the furthest of several violations
    violations = b.op("select", (outside, positions, b.const(-(1 << 63), lanes)), lanes)
    furthest = b.op("reduce_max", (violations,), INDEX)
    _refuse(fe, memory, b.op("any", (outside,), BOOL), access, size, furthest)


def _first_check(fe: Frontend, key: tuple[object, ...]) -> bool:
    """Records a check; returns whether no equal one is already in scope."""
    if any(key in scope.checked for scope in fe.b.scopes):
        return False
    fe.b.scopes[-1].checked.add(key)
    return True


def _offset(fe: Frontend, memory: Memory, pointer: Atom) -> Atom:
    return fe.b.op("sub", (fe.b.op("address", (pointer,), INDEX), memory.begin), INDEX)


def _limit(fe: Frontend, memory: Memory, size: int) -> Atom:
    """The first offset that is out of range for an access of this size; 0 if every offset is."""
    b = fe.b
    return b.op("max", (b.index(b.add(memory.size, 1 - size)), b.index(0)), INDEX)


def _refuse(
    fe: Frontend, memory: Memory, out_of_bounds: Atom, access: str, size: int, offset: Atom
) -> None:
    unit = "byte" if size == 1 else "bytes"
    text = f"{memory.name}: {access} of {size} {unit} at byte {{}}, which is outside of its {{}} bytes of memory"
    refuse(fe, out_of_bounds, "IndexError", text, (offset, memory.size))


def memory_of(begin: Atom, end: Atom, name: str, fe: Frontend) -> Memory:
    """The memory between two addresses."""
    return Memory(begin, fe.b.op("sub", (end, begin), INDEX), name)


def scratch_memory(fe: Frontend, base: Atom, size: int) -> Memory:
    """A part of the worker's scratch memory."""
    return Memory(fe.b.op("address", (base,), INDEX), fe.b.index(size), "scratch")


def chosen_memory(fe: Frontend, cond: Atom, x: Memory | None, y: Memory | None) -> Memory | None:
    """The memory of one of two views."""
    if x is None or y is None:
        return None
    begin, size = (
        fe.b.op("select", (cond, a, c), INDEX) for a, c in ((x.begin, y.begin), (x.size, y.size))
    )
    return Memory(begin, size, f"{x.name} or {y.name}")


__all__ = ["Memory", "check_bytes", "check_lanes", "chosen_memory", "memory_of", "scratch_memory"]
