"""Traces: the calls of a stretch of a program between two values, kept to predict its next run.

A stretch begins with the first call after a value was computed, and ends where the next one is. When the same line
begins a second stretch, its calls are captured: the op and arguments of each, and the program that computed the value.
From then on `max.experimental.replay.replays` compares calls with the trace instead of looking their signatures up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

from max.experimental.programs.argument_trees import is_mutable
from max.experimental.programs.lazy_values import Call, Cell
from max.experimental.programs.number_patterns import Details, Symbol
from max.experimental.programs.programs import Bound, Compiled, Recording
from max.experimental.programs.signatures import Signature
from max.experimental.programs.value_types import CellType, Kind
from max.experimental.replay.matching import Match, matcher
from max.experimental.replay.specifications import Nested, VaryingLeaf
from max.mlir.conditions import Condition
from max.mlir.dims import DimExpr

__all__ = [
    "Capture",
    "Step",
    "SymbolicProgram",
    "Trace",
    "UserLine",
    "VaryingType",
]


class UserLine(NamedTuple):
    """An instruction of the user's program that called an op."""

    code: CodeType
    instruction: int
    """`f_lasti` of its frame."""
    depth: int
    """The number of frames between it and the recording function."""
    place: tuple[str, int]
    """File and line."""


class VaryingType(NamedTuple):
    """The type of a result with symbols. Equal types of a trace have the same number."""

    number: int
    kind: Kind
    shape: tuple[DimExpr, ...]


class SymbolicProgram(NamedTuple):
    """A program for all sizes and numbers of a trace."""

    compiled: Compiled
    symbols: list[int | float | Symbol]
    """The value of each symbol of the program: a constant, or a symbol of the trace."""

    def bind(self, values: Mapping[str, int | float]) -> Bound:
        """The program with inputs for values of the trace's symbols."""
        symbols = [
            values[f"s{s.number}"] * s.factor + s.offset if isinstance(s, Symbol) else s
            for s in self.symbols
        ]
        return Bound(self.compiled.program, self.compiled.inputs(symbols))


Followed = tuple[
    Callable[..., Any],
    Match,
    tuple[Any, ...],
    Any,
    tuple["CellType | VaryingType", ...],
    "UserLine",
]
"""The part of a step that a replay reads: op, comparison of arguments, its specifications, structure, types, line."""


class Step(NamedTuple):
    """A call of a trace."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    """The specifications of the arguments."""
    keywords: tuple[tuple[str, Any], ...]
    """Names and specifications of keyword arguments."""
    structure: Callable[..., Any] | None
    """The structure that the op returns: None for one tensor, else `list` or `tuple`."""
    types: tuple[CellType | VaryingType, ...]
    """The types of the results."""
    line: UserLine
    signature: Signature
    inputs: tuple[int, ...]
    """The numbers of the values that it reads, in the order of the signature."""
    first: int
    """The number of its first result."""

    def followed_part(self) -> Followed:
        """The part of it that a replay reads."""
        match, specs = matcher(self.args, self.keywords)
        return self.op, match, specs, self.structure, self.types, self.line

    def new_leaves(self) -> list[tuple[int, CellType]]:
        """The tensors in memory that no earlier step reads: their numbers and types. For exact traces."""
        types: list[CellType] = []
        # reversed, so that values are popped in the order of their numbers
        stack = [*[spec for _, spec in reversed(self.keywords)], *reversed(self.args)]
        while stack:
            spec = stack.pop()
            if isinstance(spec, CellType | VaryingLeaf):
                types.append(spec)  # type: ignore[arg-type]
            elif isinstance(spec, Nested):
                stack.extend(reversed(spec.items))
        return list(enumerate(types, self.first - len(types)))


class Trace(NamedTuple):
    """The calls between two values, and the program that computed the second."""

    steps: tuple[Step, ...]
    followed_steps: tuple[Followed, ...]
    """The parts of the steps that a replay reads."""
    targets: list[int]
    """The values that were needed."""
    is_held: list[bool]
    """For each result, in the order of the calls: whether the user's program held a tensor on it at the end."""
    results: list[int]
    """The numbers of the results."""
    leaves: list[int]
    """The value that each input of the program is."""
    shared_leaves: list[tuple[int, int]]
    """Pairs of leaves that must be on the same memory."""
    outputs: list[int]
    """The value that each output of the program is."""
    order: list[int]
    """The step that each call of the program is."""
    program: Bound
    lasting: bool
    """Whether the user's program held tensors that the compiled program does not compute."""
    examples: list[Details]
    """The sizes and numbers of earlier stretches."""
    conditions: list[Condition] = []
    """What has to hold for its symbols."""
    symbolic: SymbolicProgram | None = None
    """For a trace with symbols: its program, in place of `program`."""

    def leaf_types(self) -> list[tuple[int, CellType]]:
        """The tensors in memory that an exact trace reads: their numbers and types, in order of first use."""
        return [leaf for step in self.steps for leaf in step.new_leaves()]


class _NotTraceableError(Exception):
    """A call that no trace can have."""


class Capture:
    """Collects the calls of a stretch while they are recorded."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._calls: dict[Call, int] = {}
        self._numbers: dict[int, int] = {}
        """The numbers of cells by `id`; `_values` keeps the cells alive."""
        self._values: list[Cell] = []
        self._failed = False

    @staticmethod
    def resumed_capture(
        steps: Sequence[Step], calls: Sequence[Call], values: Sequence[Cell]
    ) -> Capture:
        """A capture that begins with the calls by which a stretch followed a trace.

        Args:
            steps: The steps of these calls, exact.
            calls: Their calls.
            values: Their values.
        """
        capture = Capture()
        capture._steps += steps
        capture._calls.update({call: index for index, call in enumerate(calls)})
        for cell in values:
            capture._number(cell)
        return capture

    def add(
        self,
        call: Call,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: Sequence[Cell],
        line: UserLine,
    ) -> None:
        """Adds a call and its results."""
        if self._failed:
            return
        family = call.signature.family
        try:
            specs = tuple([self._spec(arg) for arg in args])
            keywords = tuple([(name, self._spec(arg)) for name, arg in kwargs.items()])
            # by number: the next run has other cells in the same places
            inputs = tuple([self._numbers[id(cell)] for cell in call.inputs])
        except _NotTraceableError:
            self._failed = True
            return
        first = len(self._values)
        for cell in results:
            self._number(cell)
        types = tuple([cell.type for cell in results])
        self._calls[call] = len(self._steps)
        self._steps.append(
            Step(
                family.arguments.op, specs, keywords, family.structure, types, line, call.signature,
                inputs, first,
            )
        )  # fmt: skip

    def _number(self, cell: Cell) -> None:
        self._numbers[id(cell)] = len(self._values)
        self._values.append(cell)

    def _spec(self, value: Any) -> Any:
        cell: Cell | None = getattr(value, "_cell", None)
        if cell is not None:
            number = self._numbers.get(id(cell))
            if number is not None:
                return number
            self._number(cell)
            return cell.type
        kind = type(value)
        if kind is slice:
            bounds = (value.start, value.stop, value.step)
            return Nested(slice, tuple([self._spec(bound) for bound in bounds]))
        if isinstance(value, list | tuple):
            return Nested(kind, tuple([self._spec(item) for item in value]))
        # its content could change between two runs, and comparing it costs more than recording
        if isinstance(value, Mapping) or is_mutable(value):
            raise _NotTraceableError
        return (value,)

    def finish(
        self,
        targets: Sequence[Cell],
        recording: Recording,
        outputs: Sequence[Cell],
        is_held: Sequence[bool],
        program: Bound,
        last: Callable[[Any], Callable[..., Any]] | None,
    ) -> Trace | None:
        """The trace of the stretch; None if the run had calls or leaves of other stretches.

        Args:
            targets: The values that were needed.
            recording: The calls that were run for them.
            outputs: The cells of its outputs.
            is_held: Whether a tensor is on each result of the calls, in order.
            program: The program that ran.
            last: Replaces the structure of the last call, given its structure; None to keep it.
        """
        # calls of an earlier stretch ran too: the next run may not have them pending
        if self._failed or any(call not in self._calls for call in recording.calls):
            return None
        if last is not None:
            step = self._steps[-1]
            self._steps[-1] = step._replace(structure=last(step.structure))
        results = [
            number
            for step in self._steps
            for number in range(step.first, step.first + len(step.types))
        ]
        numbers = self._numbers
        by_memory: dict[int, int] = {}
        leaves: list[int] = []
        for cell in recording.leaves:
            number = numbers.get(id(cell))
            if number is None:
                return None
            # two tensors on one memory are one input of the program
            by_memory[id(cell.storage)] = number
            leaves.append(number)
        shared: list[tuple[int, int]] = []
        for number, cell in enumerate(self._values):
            other = by_memory.get(id(cell.storage))  # None for results, which have no memory yet
            if other is not None and other != number:
                shared.append((other, number))
        output_numbers = [numbers[id(cell)] for cell in outputs]
        computed = set(output_numbers)
        return Trace(
            tuple(self._steps),
            tuple([step.followed_part() for step in self._steps]),
            [numbers[id(cell)] for cell in targets],
            list(is_held),
            results,
            leaves,
            shared,
            output_numbers,
            [self._calls[call] for call in recording.calls],
            program,
            any(on and n not in computed for on, n in zip(is_held, results, strict=True)),
            [],
        )

    @property
    def calls(self) -> int:
        """The number of recorded calls."""
        return len(self._steps)

    def held_results(self, targets: Sequence[Cell]) -> list[bool]:
        """Whether the program holds a tensor on each result so far, or needs its elements now."""
        needed = {id(cell) for cell in targets}
        return [
            id(cell) in needed
            or ((reference := cell.tensor_reference) is not None and reference() is not None)
            for step in self._steps
            for cell in self._values[step.first : step.first + len(step.types)]
        ]
