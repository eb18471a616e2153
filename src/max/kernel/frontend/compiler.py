"""Compilation of a kernel's body, with the tables of visitors for each type of node."""

from __future__ import annotations

import ast

from max.kernel.errors import KernelError
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.syntax.expressions import EXPRESSIONS
from max.kernel.frontend.syntax.loops import LOOPS
from max.kernel.frontend.syntax.statements import STATEMENTS
from max.kernel.ir.nodes import Block
from max.kernel.language.source import returns_early
from max.kernel.targets.target import Target

_STATEMENTS = {**STATEMENTS, **LOOPS}


def new_frontend(target: Target, check: int) -> Frontend:
    """The state of a compilation for a target, at a level of ``MAX_KERNEL_CHECK``."""
    return Frontend(target, check, EXPRESSIONS, _STATEMENTS)


def compile_body(fe: Frontend, node: ast.FunctionDef) -> None:
    """Compiles a kernel's body; its parameters must be bound.

    Raises:
        KernelError: The body has errors; the exception has all of them.
    """
    label = fe.b.label() if returns_early(node) else None
    scope = fe.b.open("branch") if label is not None else None
    fe.frame.label = label
    fe.body(node.body)
    if scope is not None and label is not None:
        fe.b.close()
        fe.b.emit(Block(label, tuple(scope.body)))
    if fe.diagnostics:
        raise (fe.error_class if len(fe.diagnostics) == 1 else KernelError)(fe.diagnostics)
