"""Lowering of ops without a value."""

from __future__ import annotations

from collections.abc import Callable

from max.kernel.ir.nodes import Effect
from max.kernel.lowering.memory import scatter
from max.kernel.lowering.tiles import TILE_EFFECTS
from max.kernel.lowering.types import llvm_type
from max.kernel.lowering.writer import Writer
from max.kernel.types import ScalarType


def lower_effect(w: Writer, s: Effect) -> None:
    """Lowers one effect."""
    lower = EFFECTS.get(s.op)
    if lower is None:
        raise ValueError(f"the kernel IR has no effect {s.op!r}")
    lower(w, s)


def _prefetch(w: Writer, s: Effect) -> None:
    write, locality = s.attr
    w.declarations.add("void @llvm.prefetch.p0(ptr, i32, i32, i32)")
    # the last operand: 1 is the data cache
    w.out(
        f"call void @llvm.prefetch.p0(ptr {w.atom(s.args[0])}, i32 {write}, i32 {locality}, i32 1)"
    )


def _assume(w: Writer, s: Effect) -> None:
    w.declarations.add("void @llvm.assume(i1)")
    w.out(f"call void @llvm.assume(i1 {w.atom(s.args[0])})")


def _brief(w: Writer, s: Effect) -> None:
    """Emits no code: the lowering of the enclosing loop reads the mark."""


def _print(w: Writer, s: Effect) -> None:
    """A call of printf, and a flush."""
    text = ""
    for part in s.attr:
        if isinstance(part, ScalarType):
            text += "%g" if part.is_float else "%lld"
        else:
            text += part.replace("%", "%%")
    data = (text + "\n").encode() + b"\0"
    name = f"@text{len(w.globals)}"
    # 34 and 92 are the quote and the backslash
    escaped = "".join(chr(c) if 32 <= c < 127 and c not in (34, 92) else f"\\{c:02X}" for c in data)
    w.globals.append(f'{name} = private unnamed_addr constant [{len(data)} x i8] c"{escaped}"')
    w.declarations.add("i32 @printf(ptr, ...)")
    w.declarations.add("i32 @fflush(ptr)")
    args = "".join(f", {llvm_type(a.type)} {w.atom(a)}" for a in s.args)
    w.temp(f"call i32 (ptr, ...) @printf(ptr {name}{args})")
    # C's buffer is not Python's: unflushed, the text would come late, or after a crash never
    w.temp("call i32 @fflush(ptr null)")


EFFECTS: dict[str, Callable[[Writer, Effect], None]] = {
    "scatter": scatter,
    "prefetch": _prefetch,
    "assume": _assume,
    "brief": _brief,
    "print": _print,
    **TILE_EFFECTS,
}
