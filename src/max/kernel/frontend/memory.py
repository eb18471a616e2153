"""Checks of accesses against the memory of a view's tensor (``MAX_KERNEL_CHECK=2``).

A view knows where the memory begins that its pointer was made from, and how long that is; parts and other forms of the
view keep it. Every load and store is compared with it, whatever shape and strides the view claims.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of constants are Any

from __future__ import annotations

from dataclasses import dataclass

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
    """What it is, for errors."""


def check_bytes(fe: Frontend, memory: Memory | None, pointer: Atom, size: int, what: str) -> None:
    """Raises where ``size`` bytes from ``pointer`` on are not all in the memory.

    Args:
        fe: the frontend.
        memory: the memory; None where nothing is checked.
        pointer: the address.
        size: how many bytes are accessed.
        what: ``read`` or ``write``.
    """
    if memory is None or not _first_check(fe, (pointer, size)):
        return
    b = fe.b
    offset = _offset(fe, memory, pointer)
    bad = b.op("uge", (offset, _limit(fe, memory, size)), BOOL)
    _refuse(fe, memory, bad, what, size, offset)


def check_lanes(
    fe: Frontend,
    memory: Memory | None,
    pointer: Atom,
    offsets: Atom,
    size: int,
    mask: Atom | None,
    what: str,
) -> None:
    """Raises where an element of an active lane is not in the memory.

    Args:
        fe: the frontend.
        memory: the memory; None where nothing is checked.
        pointer: the address that the offsets start from.
        offsets: for each lane how many elements on its element is.
        size: the bytes of an element.
        mask: the active lanes; None for all.
        what: ``read`` or ``write``.
    """
    if memory is None or not _first_check(fe, (pointer, offsets, size, mask)):
        return
    b, width = fe.b, offsets.type.width
    lanes, flags = vector(INDEX.dtype, width), vector(BOOL.dtype, width)
    scaled = b.op("mul", (offsets, b.const(size, lanes)), lanes)
    first = splat(fe, _offset(fe, memory, pointer), width)
    places = b.op("add", (first, scaled), lanes)
    outside = b.op("uge", (places, splat(fe, _limit(fe, memory, size), width)), flags)
    if mask is not None:
        outside = b.op("and", (outside, mask), flags)
    # of several, the one that lies furthest back
    shown = b.op("select", (outside, places, b.const(-(1 << 63), lanes)), lanes)
    furthest = b.op("reduce_max", (shown,), INDEX)
    _refuse(fe, memory, b.op("any", (outside,), BOOL), what, size, furthest)


def _first_check(fe: Frontend, key: tuple[object, ...]) -> bool:
    """Whether no check of the same access stands before this one; notes it."""
    if any(key in scope.checked for scope in fe.b.scopes):
        return False
    fe.b.scopes[-1].checked.add(key)
    return True


def _offset(fe: Frontend, memory: Memory, pointer: Atom) -> Atom:
    return fe.b.op("sub", (fe.b.op("address", (pointer,), INDEX), memory.begin), INDEX)


def _limit(fe: Frontend, memory: Memory, size: int) -> Atom:
    """The first offset at which an access of this size does not fit; 0 if it fits nowhere."""
    b = fe.b
    return b.op("max", (b.index(b.add(memory.size, 1 - size)), b.index(0)), INDEX)


def _refuse(fe: Frontend, memory: Memory, bad: Atom, what: str, size: int, offset: Atom) -> None:
    unit = "byte" if size == 1 else "bytes"
    text = f"{memory.name}: {what} of {size} {unit} at byte {{}}, which is outside of its {{}} bytes of memory"
    refuse(fe, bad, "IndexError", text, (offset, memory.size))


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
