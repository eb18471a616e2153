"""Lowering of a kernel to a module of LLVM IR."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from max.kernel.ir.nodes import (
    Alloc,
    Assign,
    Barrier,
    Block,
    Effect,
    For,
    If,
    KernelIR,
    Leave,
    Let,
    Parallel,
    Raise,
    Stmt,
    Store,
    While,
)
from max.kernel.lowering.contraction import contraction
from max.kernel.lowering.control import lower_block, lower_for, lower_if, lower_leave, lower_while
from max.kernel.lowering.effects import lower_effect
from max.kernel.lowering.memory import alloc_alignment, lower_assign, lower_store
from max.kernel.lowering.ops import lower_let
from max.kernel.lowering.tiles import tile_entry, uses_tiles
from max.kernel.lowering.types import llvm_type
from max.kernel.lowering.workers import (
    finish_raises,
    lower_barrier,
    lower_parallel,
    lower_raise,
)
from max.kernel.lowering.writer import StatementLowering, Writer
from max.kernel.targets.target import LLVMTarget

STATEMENTS: dict[type[Any], StatementLowering] = {
    Let: lower_let,
    Store: lower_store,
    Assign: lower_assign,
    Alloc: lambda w, s: None,  # all slots are allocated at the start of the function
    Effect: lower_effect,
    For: lower_for,
    While: lower_while,
    If: lower_if,
    Block: lower_block,
    Leave: lower_leave,
    Parallel: lower_parallel,
    Barrier: lower_barrier,
    Raise: lower_raise,
}


def emit_llvm(ir: KernelIR, target: LLVMTarget) -> str:
    """Lowers a kernel to LLVM IR with the function ``k_<key>``.

    Args:
        ir: The kernel.
        target: The target; it must have the features that the kernel was specialised for.
    """
    w = Writer(target, STATEMENTS)
    allocs: list[str] = []
    for alloc in _allocs(ir.body):
        name = w.slots[alloc.slot] = f"%s{alloc.slot}"
        type = llvm_type(alloc.type)
        allocs.append(
            f"  {name} = alloca [{max(alloc.count, 1)} x {type}], align {alloc_alignment(alloc)}"
        )
    if target.has_fma:
        w.contraction = contraction(ir.body)
    w.uses_tiles = uses_tiles(ir.body)
    w.body(ir.body)
    w.out("ret void")
    finish_raises(w)
    lines = [
        f'target triple = "{target.triple}"',
        *w.globals,
        *w.tile_globals,
        *w.tile_functions.values(),
        f"define void @k_{ir.key}(ptr %args, ptr %ctx) #0 {{",
        "entry:",
        *allocs,
        *tile_entry(w),
        *w.lines,
        "}",
        *(f"declare {signature}" for signature in sorted(w.declarations)),
        _attributes(target),
        *(['!0 = !{!"branch_weights", i32 1048576, i32 1}'] if w.polls else []),
    ]
    return "\n".join(lines) + "\n"


def _attributes(target: LLVMTarget) -> str:
    width = f'"prefer-vector-width"="{target.vector_bits}"'
    features = f'"target-features"="{target.feature_string}"'
    cpu = f'"target-cpu"="{target.cpu}"'
    if target.is_arm64 and target.cpu == "generic":
        # LLVM's default schedule is for in-order processors, and spills registers
        cpu += ' "tune-cpu"="neoverse-n1"'
    return f"attributes #0 = {{ nounwind {cpu} {features} {width} }}"


def _allocs(body: Iterable[Stmt]) -> Iterable[Alloc]:
    for s in body:
        kind = s.__class__
        if kind is Alloc:
            yield s  # type: ignore[misc]
        elif kind is If:
            yield from _allocs(s.then)  # type: ignore[union-attr]
            yield from _allocs(s.orelse)  # type: ignore[union-attr]
        elif kind is While:
            yield from _allocs(s.head)  # type: ignore[union-attr]
            yield from _allocs(s.body)  # type: ignore[union-attr]
        elif kind in (For, Parallel, Block):
            yield from _allocs(s.body)  # type: ignore[union-attr]
