"""The state of one kernel's compilation, the first argument of every function of the frontend.

The frontend interprets the function as Python would, over values of two kinds: Python values, known at compile time,
and atoms of the IR, known at run time. `Frontend` is the state of the walk over the syntax tree. The visitors of nodes
are in tables by node type, which ``compiler.py`` assembles, so that files do not import each other in circles.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple, NoReturn

from max._dataclass import dataclass
from max.kernel.errors import Diagnostic, KernelError, KernelSyntaxError, KernelTypeError, Location
from max.kernel.frontend.builder import Builder, Scope
from max.kernel.frontend.values import POISON, SlotVar
from max.kernel.ir.nodes import Atom, Message
from max.kernel.language import mathlib
from max.kernel.language.source import FunctionSource, assigned_names
from max.kernel.targets.target import Target
from max.kernel.types import Type

# how a statement ends: with the next one; at run time (a jump was emitted); or with a jump at compile time
FALLS, DEAD, BREAK, CONTINUE, RETURN = range(5)


class Failure(Exception):
    """An error, propagated to the enclosing statement, which reports it."""

    def __init__(self, diagnostic: Diagnostic, error_class: type[KernelError]) -> None:
        super().__init__(str(diagnostic))
        self.diagnostic = diagnostic
        self.error_class = error_class


class Suppressed(Exception):
    """A consequence of an error that is already reported."""


class NeverReturns(Exception):
    """An inlined call emitted a ``raise`` on every path: the enclosing statement ends there at run time."""


class Retype(Exception):
    """A variable's slot needs another type (None: no slot); its loop is compiled again."""

    def __init__(self, var: SlotVar, type: Type | None, weak: bool) -> None:
        super().__init__(var.name)
        self.var, self.type, self.weak = var, type, weak


class NeedsSlots(Exception):
    """An unrolled loop has a run-time ``break`` or ``continue``; it is compiled again with slots."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop = loop


class Loop:
    """A loop that is being compiled, for ``break`` and ``continue``.

    Args:
        depth: The nesting depth of run-time control flow around it.
        unrolled: Whether its body is compiled once per item.
        slots: Whether its variables are in slots, which run-time jumps require.
    """

    def __init__(self, depth: int, unrolled: bool, slots: bool) -> None:
        self.depth, self.unrolled, self.slots = depth, unrolled, slots
        self.break_label: int | None = None
        self.continue_label: int | None = None


@dataclass(eq=False)
class Frame:
    """A function that is being compiled."""

    source: FunctionSource
    env: dict[str, Any]
    depth: int
    label: int | None = None  # the block that early returns leave
    leaves: bool = False  # whether a return is inside run-time control flow
    in_branch: bool = False  # whether a branch of an expression surrounds the call
    results: list[tuple[Any, Scope]] = field(default_factory=list[Any])
    outer_env: Mapping[str, Any] | None = None  # the environment that a closure was defined in


ExpressionVisitor = Callable[["Frontend", Any], Any]
StatementVisitor = Callable[["Frontend", Any], int]


class Checkpoint(NamedTuple):
    """The state of a compilation, for `Frontend.rollback`."""

    depth: int
    loop_depth: int
    parallel_depth: int
    phases: int
    scratch_bytes: int
    frame: Frame
    lengths: tuple[int, ...]
    """The number of statements in each open body."""
    messages: int
    loops: int
    calls: int
    diagnostics: int
    tail_masks: int


class Frontend:
    """The compilation of one kernel.

    Args:
        target: The processor to compile for.
        check: ``MAX_KERNEL_CHECK``.
        expressions: The functions that evaluate expressions, by the type of their node.
        statements: The functions that compile statements, by the type of their node.
    """

    frame: Frame

    def __init__(
        self,
        target: Target,
        check: int,
        expressions: Mapping[type[ast.AST], ExpressionVisitor],
        statements: Mapping[type[ast.AST], StatementVisitor],
    ) -> None:
        self.target = target
        self.check = check
        self._expressions = expressions
        self._statements = statements
        self.b = Builder()
        self.node: ast.AST = ast.Pass(lineno=1, col_offset=0)  # the location of errors
        self.name = ""  # the kernel's name, for run-time errors
        self.depth = 0  # nesting of run-time control flow
        self.loop_depth = 0
        self.parallel_depth = 0
        self.may_have_left = False  # whether a run-time return, break or continue was emitted
        self.statement_scopes = 0  # open bodies at the start of the current statement
        self.loops: list[Loop] = []
        # the masks of the enclosing vector loops: that of the tail, None for whole vectors
        self.tail_masks: list[Atom | None] = []
        self.calls: list[Location] = []  # the locations of the enclosing inlined calls
        self.diagnostics: list[Diagnostic] = []
        self.error_class: type[KernelError] = KernelError
        self.messages: list[Message] = []
        self.phases = 0
        self.scratch_bytes = 0

    # ***** errors *****
    def location(self, node: ast.AST) -> Location:
        """The source location of a node."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        file = self.frame.source.file
        return Location(file, line, column + 1, linecache.getline(file, line).rstrip("\n"))

    def fail(
        self,
        message: str,
        error_class: type[KernelError] = KernelTypeError,
        node: ast.AST | None = None,
    ) -> NoReturn:
        """Reports an error at ``node``, by default at the current one.

        Raises:
            Failure: Always; the enclosing statement catches and reports it.
        """
        locations = [self.location(node or self.node), *reversed(self.calls)]
        # errors inside of mathlib are shown at its caller
        while len(locations) > 1 and locations[0].file == mathlib.__file__:
            locations.pop(0)
        raise Failure(Diagnostic(message, locations[0], tuple(locations[1:])), error_class)

    def report(self, failure: Failure) -> None:
        """Records an error, once."""
        if not self.diagnostics:
            self.error_class = failure.error_class
        if failure.diagnostic not in self.diagnostics:
            self.diagnostics.append(failure.diagnostic)

    # ***** the walk *****
    def expr(self, node: ast.expr) -> Any:
        """Evaluates an expression."""
        visit = self._expressions.get(node.__class__)
        self.node = node
        if visit is None:
            self.fail(
                f"{type(node).__name__} is not part of the kernel language", KernelSyntaxError
            )
        return visit(self, node)

    def body(self, nodes: Sequence[ast.stmt]) -> int:
        """Compiles statements until one does not fall through; returns how the last one ended.

        A statement with an error is dropped and the names that it assigns are poisoned, so that one compilation reports
        all independent errors.
        """
        for node in nodes:
            self.node = node
            # statements of inlined functions keep the line of the call
            if not self.calls:
                self.b.line = node.lineno
            visit = self._statements.get(node.__class__)
            scopes = self.statement_scopes = len(self.b.scopes)
            depth = self.depth
            loops, parallel, tails = len(self.loops), self.parallel_depth, len(self.tail_masks)
            frame, env, calls = self.frame, self.frame.env, len(self.calls)
            try:
                if visit is None:
                    self.fail(
                        f"'{type(node).__name__.lower()}' is not part of the kernel language",
                        KernelSyntaxError,
                    )
                signal = visit(self, node)
            except NeverReturns:
                signal = DEAD
            except (Failure, Suppressed) as error:
                if isinstance(error, Failure):
                    self.report(error)
                self.b.unwind(scopes)
                del self.loops[loops:], self.calls[calls:], self.tail_masks[tails:]
                self.depth, self.parallel_depth, self.frame, frame.env = depth, parallel, frame, env
                for name in assigned_names([node]):
                    self.frame.env[name] = POISON
                signal = FALLS
            if signal != FALLS:
                return signal
        return FALLS

    @property
    def is_conditional(self) -> bool:
        """Whether a run-time ``if``, a branch of an expression or an earlier jump may skip the current statement."""
        return self.depth > self.loop_depth or self.frame.in_branch or self.may_have_left

    # ***** loops that are compiled again *****
    def checkpoint(self) -> Checkpoint:
        """The current state, for `rollback`."""
        return Checkpoint(
            self.depth,
            self.loop_depth,
            self.parallel_depth,
            self.phases,
            self.scratch_bytes,
            self.frame,
            tuple(len(scope.body) for scope in self.b.scopes),
            len(self.messages),
            len(self.loops),
            len(self.calls),
            len(self.diagnostics),
            len(self.tail_masks),
        )

    def rollback(self, to: Checkpoint) -> None:
        """Restores a state, except the statements of the body that was innermost then."""
        self.b.unwind(len(to.lengths))
        del (
            self.messages[to.messages :],
            self.loops[to.loops :],
            self.calls[to.calls :],
            self.diagnostics[to.diagnostics :],
            self.tail_masks[to.tail_masks :],
        )
        self.depth, self.loop_depth, self.parallel_depth = (
            to.depth,
            to.loop_depth,
            to.parallel_depth,
        )
        self.phases, self.scratch_bytes, self.frame = to.phases, to.scratch_bytes, to.frame

    def active_lanes(self, width: int) -> Atom | None:
        """The mask of the tail that is being compiled, if its vectors have ``width`` lanes."""
        mask = self.tail_masks[-1] if self.tail_masks else None
        return mask if mask is not None and mask.type.width == width else None
