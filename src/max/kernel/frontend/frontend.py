"""The frontend: walks a kernel's syntax tree and builds its IR.

It runs the function as Python would, but with values of two kinds: Python values, known at compile time, and atoms, known at
run time. An ``if`` on a Python value compiles one branch; loops over Python sequences unroll; helpers are inlined. It is one
class in layers: `Arithmetic`, `Host`, `Expressions`, `Statements`, `Inlining`, `Loops`.
"""

from __future__ import annotations

import ast

from max.kernel.errors import KernelError
from max.kernel.frontend.loop_statements import Loops
from max.kernel.ir.nodes import Block
from max.kernel.language.source import returns_early


class Frontend(Loops):
    """Compiles one kernel."""

    def run(self, node: ast.FunctionDef) -> None:
        """Compiles the kernel's body; its parameters are bound.

        Raises:
            KernelError: with all errors that were found.
        """
        label = self.b.label() if returns_early(node) else None
        scope = self.b.open("branch") if label is not None else None
        self.frame.label = label
        self.body(node.body)
        if scope is not None and label is not None:
            self.b.close()
            self.b.emit(Block(label, tuple(scope.body)))
        if self.diagnostics:
            raise (self.error_kind if len(self.diagnostics) == 1 else KernelError)(self.diagnostics)
