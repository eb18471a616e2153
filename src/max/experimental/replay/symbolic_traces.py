"""Traces with symbols, made from exact traces that differ only in sizes and numbers.

The details of a trace are the sizes of its leaves in the order of their numbers, and the numbers among the arguments of
its calls. A pattern that covers the details seen so far (`_patterns`) says which are symbols. The trace is staged once
with them, which gives the types of its values as expressions, and the conditions under which its calls are valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from max.experimental.programs import staging
from max.experimental.programs.number_patterns import Details, Pattern, Symbol
from max.experimental.programs.programs import Recording, programs_of
from max.experimental.programs.signatures import EXAMPLES
from max.experimental.programs.value_types import CellType
from max.experimental.replay.specifications import Nested, VaryingLeaf, VaryingNumber, is_number
from max.experimental.replay.traces import Step, SymbolicProgram, Trace, VaryingType

__all__ = ["generalized_trace"]


def _details(trace: Trace) -> Details:
    """The details of an exact trace."""
    return (
        *[size for _, type_ in trace.leaf_types() for size in type_.shape],
        *[number for step in trace.steps for number in step.signature.numbers],
    )


def generalized_trace(old: Trace, new: Trace, recording: Recording) -> Trace | None:
    """The common trace of two stretches that differ only in sizes and numbers.

    Args:
        old: The trace of the earlier stretch; it may have symbols already.
        new: The exact trace of the new stretch.
        recording: The calls that were run for `new`.

    Returns:
        A trace that covers both; `new` with the examples of both while they are few, or if no program with
        symbols is compiled. None if the traces differ in more.
    """
    if not _same_apart_from_sizes(old, new):
        return None
    details = _details(new)
    before = old.examples or [_details(old)]
    examples = [*[example for example in before if example != details], details]
    del examples[: -EXAMPLES - 1]
    exact = new._replace(examples=examples)
    if len(examples) <= EXAMPLES:
        return exact
    pattern = Pattern.covering(examples)
    program = _program(exact, recording, pattern)
    if program is None:
        return exact
    try:
        return _stage_trace(exact, pattern, program)
    except (ValueError, TypeError, IndexError):
        return exact


def _same_apart_from_sizes(old: Trace, new: Trace) -> bool:
    # the fields from `targets` to `order`
    if len(old.steps) != len(new.steps) or old[2:9] != new[2:9]:
        return False
    return all(
        a.signature.family is b.signature.family and a.inputs == b.inputs and a.first == b.first
        for a, b in zip(old.steps, new.steps, strict=True)
    )


def _program(trace: Trace, recording: Recording, pattern: Pattern) -> SymbolicProgram | None:
    """The compiled program for all details of a pattern; None if there is none."""
    starts: dict[int, int] = {}
    end = 0
    for number, type_ in trace.leaf_types():
        starts[number] = end
        end += len(type_.shape)
    number_starts: list[int] = []
    for step in trace.steps:
        number_starts.append(end)
        end += len(step.signature.numbers)
    # the program has the details of its leaves and calls in another order, and only of those that it needs
    order = [
        starts[number] + axis
        for number, leaf in zip(trace.leaves, recording.leaves, strict=True)
        for axis in range(len(leaf.type.shape))
    ]
    for index, call in zip(trace.order, recording.calls, strict=True):
        order += range(number_starts[index], number_starts[index] + len(call.signature.numbers))
    positions = [pattern.positions[index] for index in order]
    for compiled in programs_of(recording):
        bases = compiled.pattern.implied_by(positions)
        if bases is not None:
            return SymbolicProgram(compiled, bases)
    return None


def _stage_trace(trace: Trace, pattern: Pattern, program: SymbolicProgram) -> Trace:
    leaf_types = trace.leaf_types()
    # (-1, i) is leaf i, (step, i) is result i of a step
    sources: dict[int, tuple[int, int]] = {
        number: (-1, index) for index, (number, _) in enumerate(leaf_types)
    }
    steps: list[staging.Step] = []
    for index, step in enumerate(trace.steps):
        inputs = tuple([sources[number] for number in step.inputs])
        signature = step.signature
        steps.append(
            staging.Step(signature.family.arguments, inputs, len(signature.numbers), ("", index))
        )
        sources.update({step.first + i: (index, i) for i in range(len(step.types))})
    staged = staging.stage(steps, [type_.kind for _, type_ in leaf_types], pattern)
    if any(0 in value.mlir_type.shape for values in staged.values for value in values):
        return trace  # bounds of an empty slice are no conditions
    conditions = [condition for condition in staged.conditions() if not condition.always_holds]
    # taken below in the order of `_details`
    positions = iter(pattern.positions)
    varying: dict[int, Any] = {}
    for number, type_ in leaf_types:
        dims = tuple([next(positions) for _ in type_.shape])
        varying[number] = type_
        if any(isinstance(dim, Symbol) for dim in dims):
            varying[number] = VaryingLeaf(type_.kind, dims)
    types: dict[Any, VaryingType] = {}
    new_steps: list[Step] = []
    for step, values in zip(trace.steps, staged.values, strict=True):
        leaves = iter([number for number, _ in step.new_leaves()])
        args = tuple([_specification(spec, positions, leaves, varying) for spec in step.args])
        keywords = tuple(
            [(n, _specification(spec, positions, leaves, varying)) for n, spec in step.keywords]
        )
        results: list[Any] = []
        for value, type_ in zip(values, step.types, strict=True):
            shape = tuple(value.mlir_type.shape)
            if all(dim.is_static for dim in shape):
                results.append(type_)
                continue
            key = (shape, type_.kind)
            results.append(types.setdefault(key, VaryingType(len(types), type_.kind, shape)))
        new_steps.append(step._replace(args=args, keywords=keywords, types=tuple(results)))
    return trace._replace(
        steps=tuple(new_steps),
        followed_steps=tuple([step.followed_part() for step in new_steps]),
        conditions=conditions,
        symbolic=program,
    )


def _specification(
    spec: Any, positions: Iterator[Any], leaves: Iterator[int], varying: dict[int, Any]
) -> Any:
    """A specification with symbols. Takes the next positions of numbers, and the next leaves."""
    if isinstance(spec, Nested):
        items = [_specification(item, positions, leaves, varying) for item in spec.items]
        return Nested(spec.cls, tuple(items))
    if isinstance(spec, CellType):
        return varying[next(leaves)]
    if type(spec) is tuple and is_number(spec[0]):
        position = next(positions)
        if isinstance(position, Symbol):
            return VaryingNumber(position, int if type(spec[0]) is not float else float)
    return spec
