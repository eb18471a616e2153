"""Conditions of JSON schemas as alternatives, which grammars hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations, product
from math import prod
from typing import Any

from max.pipelines.structured.schemas.merging import BRANCHES, condition_base
from max.pipelines.structured.schemas.objects import join_all_of
from max.pipelines.structured.schemas.opposites import Opposites
from max.pipelines.structured.schemas.references import References

_MOST_APART = 6
"""The maximum number of alternatives that exclude each other by their opposites."""
_MOST_COMPARED = 64
"""The maximum number of alternatives that are compared one by one."""


class Conditions:
    """Writes conditions as alternatives.

    Args:
        references: The references of the schema.
    """

    def __init__(self, references: References) -> None:
        self._opposites = Opposites(references)
        self._references = references

    def apart(
        self, choices: Sequence[Any], schema: Mapping[str, Any], around: Mapping[str, Any]
    ) -> list[dict[str, Any]] | None:
        """Alternatives with the opposites of the others; None if one has no opposite, or they are many.

        Args:
            choices: The alternatives.
            schema: The schema around them.
            around: What each has of that schema, as of :func:`listed_around`.
        """
        if not 2 <= len(choices) <= _MOST_APART:
            return None
        parts = [self._references.resolve(each) for each in choices if isinstance(each, Mapping)]
        if len(parts) < len(choices):
            return None
        made: list[dict[str, Any]] = []
        for number, part in enumerate(parts):
            base = {**condition_base(schema), **condition_base(part)}
            base["additionalProperties"] = part.get("additionalProperties")
            unlike = [
                self._opposites.of(other, base)
                for other in parts[:number] + parts[number + 1 :]
                if not self._opposites.excludes(part, other)
            ]
            if None in unlike:
                return None
            ways = _ways([each for each in unlike if each is not None])
            made += [{**around, "allOf": [choices[number], *each]} for each in ways]
        return made

    def may_overlap(self, choices: Sequence[Any], schema: Mapping[str, Any]) -> bool:
        """Whether a value of an alternative may fit another one too, though objects of the first one get no other
        properties than those that it lists.

        Args:
            choices: The alternatives.
            schema: The schema around them.
        """
        if len(choices) > _MOST_COMPARED:
            return True
        kind = {"type": schema["type"]} if "type" in schema else {}
        parts = [
            join_all_of({**kind, **self._references.resolve(each)}, self._references)
            for each in choices
            if isinstance(each, Mapping)
        ]
        return any(
            # alternatives that stay as they are are compared by the grammar's package
            _may_close(other) and not self._opposites.excludes(other, one, closes=True)
            for one, other in permutations(parts, 2)
        )

    def alternatives(self, schema: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
        """Schemas that hold what conditions of a schema say, and the keywords of those that they do not hold."""
        found: list[dict[str, Any]] = []
        left: list[str] = []
        if "not" in schema:
            other = self._opposites.of(schema["not"], schema)
            found += [other] if other is not None else []
            left += ["not"] if other is None else []
        if "if" in schema and (schema.get("then") is not None or schema.get("else") is not None):
            other = self._opposites.of(schema["if"], schema)
            if other is None:
                left.append("if")
            else:
                then, otherwise = schema.get("then", True), schema.get("else", True)
                found.append({"anyOf": [_both(schema["if"], then), _both(other, otherwise)]})
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            dependencies = schema.get(keyword)
            if not isinstance(dependencies, Mapping):
                continue
            # each doubles the alternatives
            if len(dependencies) > 4:
                left.append(keyword)
                continue
            for name, needed in dependencies.items():
                present: Any = {"required": [name]}
                if isinstance(needed, list):
                    present = {"required": [name, *needed]}
                elif isinstance(needed, Mapping):
                    present = _both(present, needed)
                absent: Any = {"properties": {name: False}}
                # the condition is void without the property
                found.append(absent if needed is False else {"anyOf": [absent, present]})
        return found, left


def listed_around(keywords: Mapping[str, Any]) -> dict[str, Any] | None:
    """What alternatives repeat of an object to have no other properties; None if others may say which it has.

    Args:
        keywords: The keywords of the object.
    """
    if not keywords.keys() <= {"type", "properties", "required"}:
        return None
    found: dict[str, Any] = {}
    if names := keywords.get("properties"):
        # the object around them checks the values
        found["properties"] = dict.fromkeys(names, True)
    if needed := keywords.get("required"):
        found["required"] = needed
    return found


def _ways(opposites: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], ...]]:
    """The ways to fit several opposites: objects without alternatives in them can be closed."""
    ways = [each["anyOf"] if each.keys() == {"anyOf"} else [each] for each in opposites]
    if prod(map(len, ways)) > BRANCHES:
        ways = [[each] for each in opposites]
    return list(product(*ways))


def _may_close(schema: Mapping[str, Any]) -> bool:
    """Whether objects of an alternative, or of schemas in it, may get no other properties than those listed."""
    listed = ("properties", "patternProperties", "allOf", "anyOf", "oneOf")
    return any(schema.get(keyword) is not None for keyword in listed)


def _both(first: Any, second: Any) -> Any:
    if second is True:
        return first
    return {"allOf": [first, second]} if isinstance(second, Mapping) else {"enum": []}
