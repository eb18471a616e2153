"""Functions of a module: their slots, their text, and outlined bodies, which become separate functions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

from max._abi import FUNCTION_DIGITS, FUNCTION_PREFIX
from max.kernel.ir.nodes import (
    Alloc,
    Assign,
    Atom,
    Block,
    Const,
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
from max.kernel.lowering.memory import alloc_alignment
from max.kernel.lowering.types import llvm_type
from max.kernel.lowering.writer import Writer
from max.kernel.targets.target import LLVMTarget


def slots_of(w: Writer, body: Iterable[Stmt]) -> list[str]:
    """The allocations of a body's slots, for the start of the function; also collects the outlined bodies."""
    # at the start, as LLVM promotes only those to registers, and one in a loop would grow the stack
    lines: list[str] = []
    for alloc in _allocs(w, body):
        name = w.slots[alloc.slot] = f"%s{alloc.slot}"
        type = llvm_type(alloc.type)
        lines.append(
            f"  {name} = alloca [{max(alloc.count, 1)} x {type}], align {alloc_alignment(alloc)}"
        )
    return lines


def _allocs(w: Writer, body: Iterable[Stmt]) -> Iterable[Alloc]:
    """The slots of a function, without those of outlined blocks, whose uses it records."""
    for s in body:
        kind = s.__class__
        if kind is Alloc:
            yield s  # type: ignore[misc]
        elif kind is If:
            yield from _allocs(w, s.then)  # type: ignore[union-attr]
            yield from _allocs(w, s.orelse)  # type: ignore[union-attr]
        elif kind is While:
            yield from _allocs(w, s.head)  # type: ignore[union-attr]
            yield from _allocs(w, s.body)  # type: ignore[union-attr]
        elif isinstance(s, Block):
            if s.outlined and w.functions is not None:
                uses = _uses(s.body)
                if uses is not None:
                    w.outlined[s.label] = uses
                    continue
            yield from _allocs(w, s.body)
        elif kind in (For, Parallel):
            yield from _allocs(w, s.body)  # type: ignore[union-attr]


def module_text(w: Writer, signature: str, entry: Sequence[str]) -> str:
    """The module of a written function.

    Args:
        w: The writer.
        signature: Result, name and parameters.
        entry: The instructions at the start of the function.
    """
    lines = [
        f'target triple = "{w.target.triple}"',
        *w.globals,
        *w.tile_globals,
        *w.tile_functions.values(),
        f"define {signature} #0 {{",
        "entry:",
        *entry,
        *w.lines,
        "}",
        *(f"declare {declared}" for declared in sorted(w.declarations)),
        _attributes(w.target),
        # polls almost never find an alert
        *(['!0 = !{!"branch_weights", i32 1048576, i32 1}'] if w.polls else []),
    ]
    return "\n".join(lines) + "\n"


def _attributes(target: LLVMTarget) -> str:
    """The attributes of all functions: processor, features and vector width."""
    width = f'"prefer-vector-width"="{target.vector_bits}"'
    features = f'"target-features"="{target.feature_string}"'
    cpu = f'"target-cpu"="{target.cpu}"'
    if target.is_arm64 and target.cpu == "generic":
        # LLVM's default scheduling model is for in-order processors and spills registers
        cpu += ' "tune-cpu"="neoverse-n1"'
    return f"attributes #0 = {{ nounwind {cpu} {features} {width} }}"


def call_outlined(w: Writer, s: Block) -> None:
    """Calls the function of an outlined body, whose code goes to a separate module.

    Its parameters are the outside values that the body uses, in the order of first use. After an interrupt the
    function returns early and its caller continues to its own poll; the results are not used then.
    """
    assert w.functions is not None
    function = w.nested_writer()
    types: list[str] = []
    arguments: list[str] = []
    for used in w.outlined[s.label]:
        name = f"%a{len(types)}"
        if isinstance(used, Ref):
            function.aliases[used.id] = name
            types.append(llvm_type(used.type))
            arguments.append(w.atom(used))
        else:
            function.slots[used] = name
            types.append("ptr")
            arguments.append(w.slots[used])
    slots = slots_of(function, s.body)
    function.body(s.body)
    function.out("ret void")
    # every function gets the context, which polls read
    parameters = [f"{type} %a{n}" for n, type in enumerate(types)] + ["ptr %ctx"]
    text = module_text(function, f"void @{_NAME}({', '.join(parameters)})", slots)
    if s.shift:
        # numbered as in the first call, so that all calls of a kernel share the function
        text = _NUMBERS.sub(lambda found: f"{found[1]}{int(found[2]) - s.shift}", text)
    # named after its text: equal functions of several kernels are one
    name = FUNCTION_PREFIX + hashlib.sha256(text.encode()).hexdigest()[:FUNCTION_DIGITS]
    w.functions[name] = text.replace(f"@{_NAME}(", f"@{name}(", 1)
    types.append("ptr")
    arguments.append("%ctx")
    w.declarations.add(f"void @{name}({', '.join(types)})")
    passed = ", ".join(f"{t} {a}" for t, a in zip(types, arguments, strict=True))
    w.out(f"call void @{name}({passed})")


_NAME = "function"
_NUMBERS = re.compile(r"(%[vs]|leave)(\d+)")
"""Matches the numbers of values, slots and labels; lines and constants have another form."""


class _Uses:
    """The values and slots of enclosing bodies that a body uses, in order of first use."""

    def __init__(self) -> None:
        self.outside: dict[Ref | int, None] = {}
        self._inside: set[Ref | int] = set()

    def _use(self, *used: Atom | int) -> None:
        for x in used:
            if x.__class__ is not Const and x not in self._inside:
                self.outside[x] = None  # type: ignore[index]

    def visit(self, body: Iterable[Stmt]) -> None:
        """Adds the uses of statements.

        Raises:
            _UnsupportedError: The statement is valid only in a kernel.
        """
        inside, use = self._inside, self._use
        for s in body:
            kind = s.__class__
            if kind is Let:
                if s.op == "read":  # type: ignore[union-attr]
                    use(s.attr)  # type: ignore[union-attr]
                elif s.op == "arg":  # type: ignore[union-attr]
                    raise _UnsupportedError
                use(*s.args)  # type: ignore[union-attr]
                inside.add(s.ref)  # type: ignore[union-attr]
            elif kind is Assign:
                use(s.slot, s.index, s.value)  # type: ignore[union-attr]
            elif isinstance(s, Store):
                use(s.pointer, s.value, *([] if s.mask is None else [s.mask]))
            elif isinstance(s, Alloc):
                inside.add(s.slot)
            elif isinstance(s, For):
                use(s.start, s.stop)
                inside.add(s.var)
                self.visit(s.body)
            elif isinstance(s, While):
                self.visit(s.head)
                use(s.cond)
                self.visit(s.body)
            elif isinstance(s, If):
                use(s.cond)
                self.visit(s.then)
                self.visit(s.orelse)
            elif isinstance(s, Block):
                self.visit(s.body)
            elif isinstance(s, Effect) and s.op in _EFFECTS:
                use(*s.args)
            elif not isinstance(s, Leave):
                raise _UnsupportedError


class _UnsupportedError(Exception):
    """A body requires the arguments, workers, error record or matrix tiles of its kernel."""


_EFFECTS = {"scatter", "prefetch", "assume", "brief"}


def _uses(body: Iterable[Stmt]) -> tuple[Ref | int, ...] | None:
    """The values and slots from outside that a body uses; None if it cannot be a function."""
    uses = _Uses()
    try:
        uses.visit(body)
    except _UnsupportedError:
        return None
    return tuple(uses.outside)
