"""Lowering of a kernel to a module of LLVM IR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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
    Store,
    While,
)
from max.kernel.lowering.contraction import contraction
from max.kernel.lowering.control import lower_block, lower_for, lower_if, lower_leave, lower_while
from max.kernel.lowering.effects import lower_effect
from max.kernel.lowering.functions import module_text, slots_of
from max.kernel.lowering.memory import lower_assign, lower_store
from max.kernel.lowering.ops import lower_let
from max.kernel.lowering.tiles import tile_entry, uses_tiles
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


class Modules(NamedTuple):
    """A kernel as LLVM IR.

    Args:
        text: The module with the function ``k_<key>``.
        functions: The modules of the functions that it calls, by function name.
    """

    text: str
    functions: Mapping[str, str]


def emit_llvm(ir: KernelIR, target: LLVMTarget) -> str:
    """Lowers a kernel to one module of LLVM IR with the function ``k_<key>``.

    Args:
        ir: The kernel.
        target: The target; it must have the features that the kernel was specialized for.
    """
    return _emit(ir, target, Writer(target, STATEMENTS))


def emit_modules(ir: KernelIR, target: LLVMTarget) -> Modules:
    """Like `emit_llvm`, with outlined functions as separate modules; equal functions have equal names."""
    w = Writer(target, STATEMENTS)
    w.functions = {}
    return Modules(_emit(ir, target, w), w.functions)


def _emit(ir: KernelIR, target: LLVMTarget, w: Writer) -> str:
    """The text of a kernel's module."""
    # without the instruction LLVM would call `fma` of the C library
    if target.has_fma:
        w.contraction = contraction(ir.body)
    w.uses_tiles = uses_tiles(ir.body)
    slots = slots_of(w, ir.body)
    w.body(ir.body)
    w.out("ret void")
    # last: the body has collected the raises
    finish_raises(w)
    return module_text(w, f"void @k_{ir.key}(ptr %args, ptr %ctx)", [*slots, *tile_entry(w)])
