"""Conditions of JSON schemas as alternatives, which grammars hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max.pipelines.structured.schema_arrays import unlike_pattern
from max.pipelines.structured.schema_references import References

_TYPES = ("string", "number", "boolean", "object", "array", "null")
_MOST = 24
_MOST_APART = 6
"""The maximum number of alternatives that exclude each other by their opposites."""
_ANNOTATIONS = frozenset(("description", "title", "$comment", "default", "examples"))
_BOUNDS = {
    "minLength": "string", "maxLength": "string", "pattern": "string", "minimum": "number", "maximum": "number",
    "exclusiveMinimum": "number", "exclusiveMaximum": "number",
}  # fmt: skip
"""Keywords that limit values of one type."""


def _beyond(name: str, value: Any) -> dict[str, Any] | None:
    """The opposite of a bound; no value fits that of a length of zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    match name:
        case "minLength":
            return {"maxLength": int(value) - 1} if value >= 1 else {"enum": []}
        case "maxLength":
            return {"minLength": int(value) + 1}
        case "minimum":
            return {"exclusiveMaximum": value}
        case "maximum":
            return {"exclusiveMinimum": value}
        case "exclusiveMinimum":
            return {"maximum": value}
        case _:
            return {"minimum": value}


class Conditions:
    """Writes conditions as alternatives.

    Args:
        references: The references of the schema.
    """

    def __init__(self, references: References) -> None:
        self._references = references

    def negation(self, schema: Any, base: Mapping[str, Any]) -> dict[str, Any] | None:
        """A schema that fits only values that another does not fit; None where there is none.

        Args:
            schema: The other schema.
            base: The schema of the values, whose properties may list their choices.
        """
        if isinstance(schema, bool):
            return {"enum": []} if schema else {}
        if not isinstance(schema, Mapping):
            return None
        schema = self._references.resolve(schema)
        keys = set(schema) - _ANNOTATIONS
        if keys == {"not"}:
            inner = schema["not"]
            return dict(inner) if isinstance(inner, Mapping) else None
        # values that no member fits
        if keys == {"anyOf"} or keys == {"oneOf"}:
            members = [self.negation(each, base) for each in schema[next(iter(keys))]]
            return None if any(each is None for each in members) else {"allOf": members}
        # values that one member does not fit
        if keys == {"allOf"}:
            return self._any([self.negation(each, base) for each in schema["allOf"]])
        if keys == {"required"}:
            return self._any([{"properties": {name: False}} for name in schema["required"]])
        if keys == {"type"} and isinstance(schema["type"], (str, list)):
            kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
            # no type names the numbers that are no integers
            if "integer" in kinds and "number" not in kinds:
                return None
            return {"type": [each for each in _TYPES if each not in kinds]}
        if keys & _BOUNDS.keys() and keys <= {"type", *_BOUNDS}:
            return self._other_bounds(schema)
        if keys and keys <= {"enum", "const"}:
            return self._other(schema, base)
        if keys and keys <= {"properties", "required", "type"}:
            return self._other_properties(schema, base)
        return None

    def _other_bounds(self, schema: Mapping[str, Any]) -> dict[str, Any] | None:
        """Values beyond the bounds of a schema for one type, or texts that do not fit its pattern.

        Values of other types fit each bound: they are among the others only where the schema names its type.
        """
        bounds = {name: schema[name] for name in schema if name in _BOUNDS}
        kinds = {_BOUNDS[name] for name in bounds}
        # a list of types, or what is no type, is not hashable
        if len(kinds) > 1 or schema.get("type", *kinds) not in tuple(kinds):
            return None
        (kind,) = kinds
        members: list[dict[str, Any] | None] = []
        for name, value in bounds.items():
            if name == "pattern":
                unlike = unlike_pattern(value) if isinstance(value, str) else None
                other = None if unlike is None else {"pattern": unlike}
            else:
                other = _beyond(name, value)
            if other is None:
                return None
            members.append({"type": kind, **other})
        # values of other types do not fit the schema either
        if "type" in schema:
            members.append({"type": [each for each in _TYPES if each != kind]})
        return self._any(members)

    def _any(self, members: list[dict[str, Any] | None]) -> dict[str, Any] | None:
        known = [each for each in members if each is not None]
        if not known or len(known) > _MOST:
            return None
        return known[0] if len(known) == 1 else {"anyOf": known}

    def _other(self, schema: Mapping[str, Any], base: Any) -> dict[str, Any] | None:
        """The other choices of a value, if they are listed."""
        excluded = schema.get("enum", [schema.get("const")])
        own = self._references.resolve(base) if isinstance(base, Mapping) else {}
        if isinstance(own.get("enum"), list):
            return {"enum": [each for each in own["enum"] if each not in excluded]}
        if own.get("type") == "boolean" and excluded in ([True], [False]):
            return {"const": not excluded[0]}
        return None

    def _other_properties(
        self, schema: Mapping[str, Any], base: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Objects with another value of a property; or without one that is required."""
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        own = base.get("properties")
        own = own if isinstance(own, Mapping) else {}
        members: list[dict[str, Any] | None] = [
            {"properties": {name: False}} for name in required if isinstance(name, str)
        ]
        for name, each in properties.items():
            other = self.negation(each, own.get(name) or {})
            if other is None and name not in required:
                return None
            if other is not None:
                members.append({"properties": {name: other}, "required": [name]})
        if "type" in schema and schema["type"] != base.get("type"):
            members.append(self.negation({"type": schema["type"]}, base))
        return self._any(members)

    def apart(
        self, choices: Sequence[Any], schema: Mapping[str, Any]
    ) -> list[dict[str, Any]] | None:
        """Alternatives, each with the opposites of the others; None if one has no opposite, or they are many.

        Args:
            choices: The alternatives.
            schema: The schema around them.
        """
        if not 2 <= len(choices) <= _MOST_APART:
            return None
        base = {name: schema[name] for name in ("type", "properties", "enum") if name in schema}
        opposites = [self.negation(each, base) for each in choices]
        if any(each is None for each in opposites):
            return None
        return [
            {"allOf": [each, *opposites[:number], *opposites[number + 1 :]]}
            for number, each in enumerate(choices)
        ]

    def alternatives(self, schema: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
        """Schemas that hold what conditions of a schema say, and the keywords of those that they do not hold."""
        found: list[dict[str, Any]] = []
        left: list[str] = []
        if "not" in schema:
            other = self.negation(schema["not"], schema)
            found += [other] if other is not None else []
            left += ["not"] if other is None else []
        if "if" in schema and (schema.get("then") is not None or schema.get("else") is not None):
            other = self.negation(schema["if"], schema)
            if other is None:
                left.append("if")
            else:
                then, otherwise = schema.get("then", True), schema.get("else", True)
                found.append({"anyOf": [_both(schema["if"], then), _both(other, otherwise)]})
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            dependencies = schema.get(keyword)
            if not isinstance(dependencies, Mapping):
                continue
            if len(dependencies) > 4:
                left.append(keyword)
                continue
            for name, needed in dependencies.items():
                present: Any = {"required": [name]}
                if isinstance(needed, list):
                    present = {"required": [name, *needed]}
                elif isinstance(needed, Mapping):
                    present = _both(present, needed)
                # the condition is void without the property
                found.append({"anyOf": [{"properties": {name: False}}, present]})
        return found, left


def _both(first: Any, second: Any) -> Any:
    if second is True:
        return first
    return {"allOf": [first, second]} if isinstance(second, Mapping) else {"enum": []}
