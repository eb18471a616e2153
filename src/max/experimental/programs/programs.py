"""Programs: recorded calls, compiled and run as one graph.

A program is found by the structure of a recording: the signatures of the calls, in order, and where the tensors
of each come from. A loop that records the same again finds the same program. If only sizes or numbers differ, one
program with symbols serves all (see `Family`, which does the same for the types of one call).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from max import driver
from max._host.reentry import LockLevel, hold_lock, reentrant_lock
from max.experimental.programs.lazy_values import Call, Cell
from max.experimental.programs.number_patterns import Details, Pattern
from max.experimental.programs.packed_weights import Blueprint, Extra, Program
from max.experimental.programs.signatures import EXAMPLES
from max.experimental.programs.staging import Step
from max.graph import Graph
from max.mlir.conditions import Condition, first_unmet

__all__ = [
    "Bound",
    "Compiled",
    "Recording",
    "compiled_programs",
    "execute",
    "program_of",
    "programs_of",
    "relocate",
    "stage_recording",
]

_PROGRAMS = 1024
"""The maximum number of programs with the numbers of their inputs; the oldest are dropped."""
_FAILURES = 2
"""The number of failures to compile a structure with symbols after which it is always specialized."""
_PLACE = "eager"
"""The file in source locations of programs, whose lines are numbers of calls."""
_STAGED_AT = re.compile(r"\(staged at eager:(\d+)\)")


class Recording(NamedTuple):
    """Calls to run, each after those whose results it reads."""

    calls: list[Call]
    leaves: list[Cell]
    """The tensors in memory that they read."""
    inputs: list[tuple[tuple[int, int], ...]]
    """The call and result that each tensor comes from; for leaves -1 and their index."""
    outputs: list[tuple[int, int]]
    """The call and result of each output."""


class Compiled(NamedTuple):
    """A compiled structure."""

    pattern: Pattern
    program: Program
    sizes: list[int]
    scalars: list[int]
    conditions: list[Condition]
    """The conditions on its symbols."""

    def extra(self, details: Details) -> list[Extra] | None:
        """The inputs after the leaves; None if the program is not for these details."""
        values = self.pattern.match(details)
        if values is None:
            return None
        # of all symbols: those of the leaves' sizes have conditions too
        sizes = {f"s{i}": value for i, value in enumerate(values) if isinstance(value, int)}
        return self.inputs(values) if first_unmet(self.conditions, sizes) is None else None

    def inputs(self, values: Sequence[int | float]) -> list[Extra]:
        """The inputs after the leaves, for values of the symbols."""
        return [
            *[PROGRAMS.shape_only_input(int(values[number])) for number in self.sizes],
            *[
                np.array(values[number], self.pattern.dtype(number).to_numpy())
                for number in self.scalars
            ],
        ]


class Bound(NamedTuple):
    """A program with its inputs after the leaves."""

    program: Program
    extra: list[Extra]


class _Structure:
    """The programs of recordings that differ only in sizes and numbers."""

    __slots__ = ("compiled", "examples", "failures")

    def __init__(self) -> None:
        self.examples: list[Details] = []
        self.compiled: list[Compiled] = []
        self.failures = 0


class ProgramTable:
    """The programs of this process, and how many it has compiled or loaded from the disk cache."""

    def __init__(self) -> None:
        self.structures: dict[tuple[Any, ...], _Structure] = {}
        """By what recordings have in common that differ only in sizes and numbers."""
        self.bound: dict[tuple[Any, ...], Bound] = {}
        """By whole recordings, so that a loop finds its program by one look-up; the oldest are dropped first."""
        self.compilations = 0
        self._unread = np.zeros(1 << 16, np.uint8)

    def shape_only_input(self, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A tensor of a given size, whose elements are never read: it binds a symbol."""
        if size > len(self._unread):
            self._unread = np.zeros(max(size, 2 * len(self._unread)), np.uint8)
        return self._unread[:size]


PROGRAMS = ProgramTable()
_lock = reentrant_lock(LockLevel.PROGRAMS)


def compiled_programs() -> int:
    """The number of programs that this process has compiled or loaded from the disk cache."""
    return PROGRAMS.compilations


def program_of(recording: Recording) -> Bound:
    """The program of recorded calls, compiled if it is not kept."""
    calls, leaves, inputs, outputs = recording
    places = [item for source in inputs for pair in source for item in pair]
    key = (
        *[call.signature for call in calls], *[leaf.type for leaf in leaves], *places,
        *[item for pair in outputs for item in pair],
    )  # fmt: skip
    return _cached_program(key, recording, places)


@hold_lock(_lock)
def _cached_program(key: tuple[Any, ...], recording: Recording, places: list[int]) -> Bound:
    bound = PROGRAMS.bound
    program = bound.get(key)
    if program is None:
        program = _find(recording, places)
        if len(bound) >= _PROGRAMS:
            bound.pop(next(iter(bound)))
        bound[key] = program
    return program


def execute(
    program: Bound, leaves: Sequence[Cell], place: Callable[[int], tuple[str, int]]
) -> list[driver.Tensor]:
    """Runs a program.

    Args:
        program: The program.
        leaves: The tensors in memory that it reads.
        place: Returns file and line of a call by its number, for errors.

    Returns:
        The outputs.
    """
    try:
        return program.program.execute(leaves, program.extra)
    except Exception as error:
        relocate(error, place)
        raise


@hold_lock(_lock)
def programs_of(recording: Recording) -> list[Compiled]:
    """The compiled programs of recordings that differ from this one only in sizes and numbers."""
    places = [item for source in recording.inputs for pair in source for item in pair]
    structure = PROGRAMS.structures.get(_structure_key(recording, places))
    return [] if structure is None else list(structure.compiled)


def _structure_key(recording: Recording, places: list[int]) -> tuple[Any, ...]:
    calls, leaves, _, outputs = recording
    return (
        *[call.signature.family for call in calls], *[leaf.type.kind for leaf in leaves], *places,
        *[item for pair in outputs for item in pair],
    )  # fmt: skip


def _find(recording: Recording, places: list[int]) -> Bound:
    structure_key = _structure_key(recording, places)
    structure = PROGRAMS.structures.setdefault(structure_key, _Structure())
    details = _details(recording)
    for compiled in structure.compiled:
        extra = compiled.extra(details)
        if extra is not None:
            return Bound(compiled.program, extra)
    structure.examples.append(details)
    # the first sets of sizes are specialized: most programs have no more
    compiled = None
    if len(structure.examples) > EXAMPLES and structure.failures < _FAILURES:
        try:
            compiled = _compile(recording, Pattern.covering(structure.examples))
        except (ValueError, TypeError, IndexError):
            structure.failures += 1
    if compiled is None:
        compiled = _compile(recording, Pattern(details))
    if (extra := compiled.extra(details)) is None:
        # these sizes violate a condition on the symbols, such as that of a slice that becomes empty
        compiled = _compile(recording, Pattern(details))
        extra = compiled.inputs([])
    del structure.examples[:-EXAMPLES]
    structure.compiled.insert(0, compiled)
    del structure.compiled[8:]
    return Bound(compiled.program, extra)


def stage_recording(recording: Recording) -> Graph:
    """The graph of recorded calls."""
    return _blueprint(recording, Pattern(_details(recording))).stage().graph


def _details(recording: Recording) -> Details:
    return (
        *[size for leaf in recording.leaves for size in leaf.type.shape],
        *[number for call in recording.calls for number in call.signature.numbers],
    )


def _blueprint(recording: Recording, pattern: Pattern) -> Blueprint:
    calls, leaves, inputs, outputs = recording
    steps = [
        Step(call.signature.family.arguments, source, len(call.signature.numbers), (_PLACE, number))
        for number, (call, source) in enumerate(zip(calls, inputs, strict=True))
    ]
    devices = {leaf.type.device for leaf in leaves}
    devices |= {
        type_.device for call in calls for type_ in call.signature.results if type_ is not None
    }
    return Blueprint(
        steps, [leaf.type.kind for leaf in leaves], pattern, outputs,
        [device.to_device() for device in devices],
    )  # fmt: skip


def _compile(recording: Recording, pattern: Pattern) -> Compiled:
    blueprint = _blueprint(recording, pattern)
    staged = blueprint.stage()
    start = time.perf_counter_ns()
    model = blueprint.load(staged.graph)
    program = Program(blueprint, model, time.perf_counter_ns() - start)
    PROGRAMS.compilations += 1
    conditions = [condition for condition in staged.conditions() if not condition.always_holds]
    return Compiled(pattern, program, staged.sizes, staged.scalars, conditions)


def relocate(error: Exception, place: Callable[[int], tuple[str, int]]) -> None:
    """Replaces the numbers of calls in an error's message by the lines of the user's program."""

    def staged_at(match: re.Match[str]) -> str:
        filename, line = place(int(match[1]))
        return f"(staged at {filename}:{line})"

    error.args = tuple(
        [_STAGED_AT.sub(staged_at, a) if isinstance(a, str) else a for a in error.args]
    )
