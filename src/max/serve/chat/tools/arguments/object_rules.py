"""Rules of the arguments of an object: those of names that it does not list, and how many there are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeAlias

from max._dataclass import dataclass
from max.serve.chat.tools.arguments.raw_texts import expression, has_texts, whole_pattern
from max.serve.chat.tools.arguments.rule_list import repetition

Part: TypeAlias = "Callable[[bool], str]"
"""Writes an argument, of which it is told whether it is the first."""
_MOST_STATES = 600
"""The maximum number of rules that count."""
_MOST_CROSSED = 3
"""The maximum number of patterns of which a name may fit several."""


@dataclass(frozen=True)
class OtherArguments:
    """Arguments that an object does not list.

    Args:
        names: The terminal of their names.
        schema: The schema of their values.
    """

    names: str
    schema: Any


def is_open(parameters: Mapping[str, Any]) -> bool:
    """Whether an object may have arguments that it does not list.

    Args:
        parameters: The schema of the object, without combinations.
    """
    patterns = parameters.get("patternProperties")
    # an object that lists nothing has any arguments
    more = parameters.get("additionalProperties", "properties" not in parameters)
    return bool(patterns) or more is True or isinstance(more, Mapping)


def other_arguments(
    parameters: Mapping[str, Any], characters: str
) -> tuple[list[OtherArguments], list[str]]:
    """The arguments that an object does not list, and the keywords that these lack.

    Args:
        parameters: The schema of the object, without combinations.
        characters: The pattern of names.
    """
    if not is_open(parameters):
        return [], []
    patterns: Mapping[str, Any] = parameters.get("patternProperties") or {}
    wholes = {pattern: whole_pattern(pattern) for pattern in patterns}
    if None in wholes.values():
        # which of them have another schema is not known, so there are none
        return [], ["patternProperties"]
    listed = [re.escape(name) for name in parameters.get("properties") or ()]
    # `~`: other names are all but the listed ones
    base = [expression(characters), *([f"~{expression('|'.join(listed))}"] if listed else [])]

    def names(fits: Sequence[str]) -> str:
        terms = [
            f"{'' if pattern in fits else '~'}{expression(f'({wholes[pattern]})')}"
            for pattern in patterns
        ]
        return " & ".join([*base, *terms])

    found: list[OtherArguments] = []
    # a name may fit several patterns: then all of their schemas hold
    for count in range(1, len(patterns) + 1 if len(patterns) <= _MOST_CROSSED else 2):
        for chosen in combinations(patterns, count):
            schemas = [patterns[pattern] for pattern in chosen]
            schema = schemas[0] if count == 1 else {"allOf": schemas}
            if schema is not False and has_texts(names(chosen)):
                found.append(OtherArguments(names(chosen), schema))
    more = parameters.get("additionalProperties", not patterns)
    if (more is True or isinstance(more, Mapping)) and (not patterns or has_texts(names(()))):
        found.append(OtherArguments(names(()), more))
    return found, []


def schemas_of_name(parameters: Mapping[str, Any], name: str) -> list[Any]:
    """The schemas that an object has for a property by its name.

    Args:
        parameters: The schema of the object, without combinations.
        name: The name of the property.
    """
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    found = [properties[name]] if name in properties else []
    for pattern, schema in (parameters.get("patternProperties") or {}).items():
        whole = whole_pattern(pattern)
        if whole is not None and has_texts(f"{expression(re.escape(name))} & {expression(whole)}"):
            found.append(schema)
    return found or [parameters.get("additionalProperties", {})]


class CountedArguments:
    """Writes the rules of arguments whose number has limits.

    Args:
        parts: Those that are listed, and whether they must be there.
        other: Any other one; None: there are no others.
        least: The minimum number of all.
        most: The maximum; None: there is none.
        add: Adds a rule and returns its name.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Part, bool]],
        other: Part | None,
        least: int,
        most: int | None,
        add: Callable[[str], str],
    ) -> None:
        self._listed, self._other = parts, other
        self._least, self._most, self._add = least, most, add
        self._known: dict[tuple[int, int], str | None] = {}

    def is_needed(self) -> bool:
        """Whether the limits say more than which arguments must be there."""
        most = None if self._other else len(self._listed)
        return self._least > self._num_required() or (
            self._most is not None and (most is None or most > self._most)
        )

    def lacks(self) -> list[str]:
        """The keywords that the rules do not hold: other arguments may have the same name."""
        distinct = self._num_required() + 1
        return ["minProperties"] if self._other and self._least > distinct else []

    def rule(self) -> str | None:
        """The rule of all; None if there is none, or there would be too many."""
        highest = max(self._least, 1) if self._most is None else self._most
        # a rule for each argument and each count up to the limit
        if min(highest, len(self._listed)) * len(self._listed) > _MOST_STATES:
            return None
        return self._rest(0, 0)

    def _num_required(self) -> int:
        return sum(required for _, required in self._listed)

    def _rest(self, at: int, count: int) -> str | None:
        """What may follow some arguments; None if nothing is right.

        Args:
            at: The number of listed ones before it.
            count: How many of these are there.
        """
        if at == len(self._listed):
            return self._others(count)
        # more than the minimum are the same
        count = count if self._most is not None else min(count, max(self._least, 1))
        if (at, count) in self._known:
            return self._known[at, count]
        part, required = self._listed[at]
        options: list[str] = []
        if self._most is None or count < self._most:
            after = self._rest(at + 1, count + 1)
            options += [] if after is None else [f"{part(count == 0)} {after}"]
        if not required:
            after = self._rest(at + 1, count)
            options += [] if after is None else [after]
        body = " | ".join(filter(None, options))
        if not body:
            made = "" if options else None
        else:
            made = self._add(body if all(options) else f"({body})?")
        self._known[at, count] = made
        return made

    def _others(self, count: int) -> str | None:
        least = max(self._least - count, 0)
        most = None if self._most is None else self._most - count
        if self._other is None or most == 0:
            return None if least else ""
        if most is not None and most < least:
            return None
        if count:
            return repetition(self._other(False), least, most)
        # the first argument of a call is written without a comma
        more = repetition(self._other(False), max(least - 1, 0), None if most is None else most - 1)
        body = f"{self._other(True)} {more}"
        return body if least else f"({body})?"
