"""The kernel IR as text; a kernel's key is the hash of its text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from max.kernel.ir.nodes import (
    Alloc,
    ArgSlot,
    Assign,
    Atom,
    Barrier,
    Block,
    Effect,
    For,
    If,
    Leave,
    Let,
    Parallel,
    Ref,
    Stmt,
    Store,
    While,
)
from max.kernel.types import ScalarType


def print_kernel(
    body: tuple[Stmt, ...],
    slots: tuple[ArgSlot, ...],
    phases: int,
    scratch_bytes: int,
    target_name: str,
) -> str:
    """The whole kernel, values numbered in the order in which they are bound."""
    args = ", ".join(f"{s.kind}{s.arg}.{s.axis} {s.dtype.name}" for s in slots)
    printer = _Printer()
    printer.block(body, "  ")
    # the target is part of the text: code for one target does not serve another
    head = f"kernel ({args}) phases={phases} scratch={scratch_bytes} target={target_name}"
    return "\n".join([head, *printer.lines, ""])


class _Printer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[int, str] = {}

    def atom(self, a: Atom) -> str:
        if isinstance(a, Ref):
            return self.names[a.id]
        return f"{a.value!r}:{a.type}"

    def bind(self, ref: Ref) -> str:
        # in order of binding: ids may have gaps, and equal kernels have equal texts
        name = self.names[ref.id] = f"%{len(self.names)}"
        return name

    def block(self, body: Iterable[Stmt], pad: str) -> None:
        for stmt in body:
            self.stmt(stmt, pad)

    def stmt(self, s: Stmt, pad: str) -> None:
        """Adds the lines of a statement."""
        out, atom = self.lines.append, self.atom
        if isinstance(s, Let):
            args = ", ".join([atom(a) for a in s.args])
            out(f"{pad}{self.bind(s.ref)} = {s.op}({args}){_attr(s.attr)}: {s.ref.type}")
        elif isinstance(s, Store):
            mask = "" if s.mask is None else f" where {atom(s.mask)}"
            out(f"{pad}store {atom(s.value)} at {atom(s.pointer)}{mask}")
        elif isinstance(s, Assign):
            out(f"{pad}${s.slot}[{atom(s.index)}] := {atom(s.value)}")
        elif isinstance(s, Alloc):
            out(f"{pad}slot ${s.slot}: {s.type} x {s.count}")
        elif isinstance(s, Effect):
            out(f"{pad}{s.op}({', '.join(atom(a) for a in s.args)}){_attr(s.attr)}")
        elif isinstance(s, For):
            start, stop = atom(s.start), atom(s.stop)
            out(f"{pad}for {self.bind(s.var)} = {start} to {stop} step {s.step}:")
            self.block(s.body, pad + "  ")
        elif isinstance(s, If):
            out(f"{pad}if {atom(s.cond)}:")
            self.block(s.then, pad + "  ")
            if s.orelse:
                out(f"{pad}else:")
                self.block(s.orelse, pad + "  ")
        elif isinstance(s, While):
            out(f"{pad}while:")
            self.block(s.head, pad + "  ")
            out(f"{pad}{atom(s.cond)} do:")
            self.block(s.body, pad + "  ")
        elif isinstance(s, Block):
            out(f"{pad}{'outlined' if s.outlined else 'block'} @{s.label}:")
            self.block(s.body, pad + "  ")
        elif isinstance(s, Leave):
            out(f"{pad}leave @{s.label}")
        elif isinstance(s, Parallel):
            total, grain = atom(s.total), atom(s.grain)
            begin, end = self.bind(s.begin), self.bind(s.end)
            out(
                f"{pad}parallel {begin}, {end} of {total} grain {grain} multiple {s.multiple} phase {s.phase}:"
            )
            self.block(s.body, pad + "  ")
        elif isinstance(s, Barrier):
            out(f"{pad}barrier")
        else:
            out(f"{pad}raise {s.message}({', '.join(atom(v) for v in s.values)})")


def _attr(attr: Any) -> str:
    if attr is None:
        return ""
    return f" [{attr.name}]" if isinstance(attr, ScalarType) else f" [{attr}]"
