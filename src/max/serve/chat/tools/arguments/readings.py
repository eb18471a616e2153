"""Values that stand as texts: of the values that each text may be read as, those that fit the schema together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypeAlias

from max.pipelines.structured.schemas.check import checker_within
from max.serve.chat.tools.arguments.alternatives import argument_schema, says_of_others
from max.serve.chat.tools.values import (
    literal_or,
    resolve_schema,
    typed_value,
    types_of,
)

Readings: TypeAlias = "tuple[Any, ...]"
"""The values as which a text may be read, the likeliest first."""
Fits: TypeAlias = "Callable[[Any, Any], bool]"
_MOST_VARIED = 6
"""The maximum number of members of which all combinations of readings are checked."""
_MOST_TRIED = 64
_DEPTH = 64
_ITEM = "item"
"""The name of an element of a list."""


def text_readings(text: str, schema: Any, root: Mapping[str, Any]) -> Readings:
    """The values as which a text may be read.

    Args:
        text: The text.
        schema: The schema of its value, as far as it is known.
        root: The schema that has its definitions.
    """
    value = typed_value(text, types_of(schema, root))
    other = literal_or(text, text) if isinstance(value, str) and value == text else text
    return (value,) if isinstance(other, str) and other == value else (value, other)


def argument_readings(
    text: str,
    name: str,
    parameters: Mapping[str, Any],
    read: Callable[[str, Any, Mapping[str, Any]], Readings] = text_readings,
) -> Readings:
    """The values as which the text of an argument may be read; one where no other argument can matter.

    Args:
        text: The text.
        name: The argument.
        parameters: The schema of the arguments.
        read: Reads a text, of a schema and the one that has its definitions.
    """
    own = argument_schema(parameters, name)
    alone = not says_of_others(parameters)
    # quotes may be those of a literal
    if alone and types_of(own, parameters) == {"string"} and text.lstrip()[:1] not in ('"', "'"):
        return (text,)
    found = read(text, own, parameters)
    if len(found) == 1 or not alone:
        return found
    return _by_fit(found, name, parameters, parameters, checker_within(parameters))[:1]


def fitting_values(
    members: Sequence[tuple[str, Readings]], schema: Any, root: Mapping[str, Any]
) -> list[Any]:
    """One reading of each member of an object: together they fit its schema, if any of them do.

    Args:
        members: The names of the members and their readings.
        schema: The schema of the object.
        root: The schema that has its definitions.
    """
    if all(len(readings) == 1 for _, readings in members):
        return [readings[0] for _, readings in members]
    names, fits = [name for name, _ in members], checker_within(root)
    by_member = [
        readings if len(readings) == 1 else _by_fit(readings, name, schema, root, fits)
        for name, readings in members
    ]
    for values in _choices(by_member):
        if fits(dict(zip(names, values, strict=True)), schema):
            return list(values)
    return [readings[0] for readings in by_member]


def _choices(by_member: Sequence[Readings]) -> Iterator[Sequence[Any]]:
    """Readings of all members, the likeliest ones first; of many members at most one has another than its first."""
    several = [at for at, readings in enumerate(by_member) if len(readings) > 1]
    if len(several) <= _MOST_VARIED:
        yield from product(*by_member)
        return
    first = [readings[0] for readings in by_member]
    yield first
    for at in several[:_MOST_TRIED]:
        for other in by_member[at][1:]:
            yield [*first[:at], other, *first[at + 1 :]]


def _by_fit(
    readings: Readings, name: str, schema: Any, root: Mapping[str, Any], fits: Fits
) -> Readings:
    """Readings of a member of an object: first those that fit what the schema says of it, on conditions too."""
    always = argument_schema(schema, name, root)
    sometimes = argument_schema(schema, name, root, with_conditions=True)

    def misfits(value: Any) -> tuple[bool, bool]:
        return (
            always is not None and not fits(value, always),
            sometimes is not None and not fits(value, sometimes),
        )

    return tuple(sorted(readings, key=misfits))


def element_readings(
    marks: tuple[str, str, str], text: str, schema: Any, root: Mapping[str, Any], depth: int = 0
) -> Readings:
    """The readings of an element: those of a text, or the object or list of which further elements consist.

    Args:
        marks: What begins the opening mark and the closing mark of an element, and what ends both.
        text: What stands in the element.
        schema: The schema of its value.
        root: The schema that has its definitions.
        depth: The number of elements around it.
    """
    begin, close, end = marks
    types = types_of(schema, root)
    bare = text.strip()
    if depth > _DEPTH or not bare.startswith(begin) or (types and not types & {"object", "array"}):
        return text_readings(text, schema, root)
    found = resolve_schema(schema, root)
    members: list[tuple[str, Readings]] = []
    at = 0
    while at < len(bare):
        name_end = bare.find(end, at + len(begin))
        if name_end < 0 or not bare.startswith(begin, at):
            return text_readings(text, schema, root)
        name = bare[at + len(begin) : name_end]
        inside = name_end + len(end)
        after = _element_end(bare, inside, begin + name + end, close + name + end)
        if after < 0:
            return text_readings(text, schema, root)
        own = argument_schema(found, name, root)
        own = found.get("items") if own is None and name == _ITEM else own
        members.append((name, element_readings(marks, bare[inside:after], own, root, depth + 1)))
        at = after + len(close + name + end)
        while at < len(bare) and bare[at].isspace():
            at += 1
    if types == {"array"} or ("object" not in types and {name for name, _ in members} == {_ITEM}):
        fits, items = checker_within(root), found.get("items")
        return ([min(each, key=lambda value: not fits(value, items)) for _, each in members],)
    values = fitting_values(members, found, root)
    return ({name: value for (name, _), value in zip(members, values, strict=True)},)


def _element_end(text: str, at: int, opening: str, closing: str) -> int:
    """Where the closing mark of an element begins; -1: nowhere. Each character is read a bounded number of times.

    Args:
        text: The text.
        at: Where the content of the element begins.
        opening: The opening mark of elements of its name, which may stand within it.
        closing: Their closing mark.
    """
    level, after = 1, -1
    while True:
        if after < at:
            after = text.find(closing, at)
            if after < 0:
                return -1
        # no further than the closing mark: what follows is searched when its turn comes
        inner = text.find(opening, at, after + len(opening) - 1)
        if inner >= 0:
            level, at = level + 1, inner + 1
            continue
        level -= 1
        if not level:
            return after
        at = after + 1
