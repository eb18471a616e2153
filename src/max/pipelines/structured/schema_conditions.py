"""Conditions of JSON schemas as alternatives, which grammars hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from max.pipelines.structured.schema_arrays import unlike_pattern
from max.pipelines.structured.schema_references import References

_TYPES = ("string", "number", "boolean", "object", "array", "null")
_MOST = 24
_ANNOTATIONS = frozenset(("description", "title", "$comment", "default", "examples"))


class Conditions:
    """Writes conditions as alternatives.

    Args:
        references: The references of the schema.
    """

    def __init__(self, references: References) -> None:
        self._references = references

    def negated(self, schema: Any, base: Mapping[str, Any]) -> dict[str, Any] | None:
        """A schema that fits only values that another does not fit; None where there is none.

        Args:
            schema: The other schema.
            base: The schema of the values, whose properties may list their choices.
        """
        if isinstance(schema, bool):
            return {"enum": []} if schema else {}
        if not isinstance(schema, Mapping):
            return None
        schema = self._references.followed(schema)
        keys = set(schema) - _ANNOTATIONS
        if keys == {"not"}:
            inner = schema["not"]
            return dict(inner) if isinstance(inner, Mapping) else None
        if keys == {"anyOf"} or keys == {"oneOf"}:
            members = [self.negated(each, base) for each in schema[next(iter(keys))]]
            return None if any(each is None for each in members) else {"allOf": members}
        if keys == {"allOf"}:
            return self._any([self.negated(each, base) for each in schema["allOf"]])
        if keys == {"required"}:
            return self._any([{"properties": {name: False}} for name in schema["required"]])
        if keys == {"type"} and isinstance(schema["type"], (str, list)):
            kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
            if "integer" in kinds and "number" not in kinds:
                return None
            return {"type": [each for each in _TYPES if each not in kinds]}
        if "pattern" in keys and keys <= {"pattern", "type"}:
            return self._other_texts(schema)
        if keys and keys <= {"enum", "const"}:
            return self._other(schema, base)
        if keys and keys <= {"properties", "required", "type"}:
            return self._other_properties(schema, base)
        return None

    def _other_texts(self, schema: Mapping[str, Any]) -> dict[str, Any] | None:
        """Texts that do not fit a pattern; values of other types fit each pattern."""
        pattern = schema["pattern"]
        unlike = unlike_pattern(pattern) if isinstance(pattern, str) else None
        if unlike is None or schema.get("type", "string") != "string":
            return None
        texts = {"type": "string", "pattern": unlike}
        if "type" not in schema:
            return texts
        return {"anyOf": [texts, {"type": [kind for kind in _TYPES if kind != "string"]}]}

    def _any(self, members: list[dict[str, Any] | None]) -> dict[str, Any] | None:
        known = [each for each in members if each is not None]
        if not known or len(known) > _MOST:
            return None
        return known[0] if len(known) == 1 else {"anyOf": known}

    def _other(self, schema: Mapping[str, Any], base: Any) -> dict[str, Any] | None:
        """The other choices of a value, if they are listed."""
        excluded = schema.get("enum", [schema.get("const")])
        own = self._references.followed(base) if isinstance(base, Mapping) else {}
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
            other = self.negated(each, own.get(name) or {})
            if other is None and name not in required:
                return None
            if other is not None:
                members.append({"properties": {name: other}, "required": [name]})
        if "type" in schema and schema["type"] != base.get("type"):
            members.append(self.negated({"type": schema["type"]}, base))
        return self._any(members)

    def alternatives(self, schema: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
        """Schemas that hold what conditions of a schema say, and the keywords of those that they do not hold.

        Args:
            schema: The schema.
        """
        found: list[dict[str, Any]] = []
        left: list[str] = []
        if "not" in schema:
            other = self.negated(schema["not"], schema)
            found += [other] if other is not None else []
            left += ["not"] if other is None else []
        if "if" in schema and (schema.get("then") is not None or schema.get("else") is not None):
            other = self.negated(schema["if"], schema)
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
                found.append({"anyOf": [{"properties": {name: False}}, present]})
        return found, left


def _both(first: Any, second: Any) -> Any:
    if second is True:
        return first
    return {"allOf": [first, second]} if isinstance(second, Mapping) else {"enum": []}
