"""Schemas as alternatives that have no references and combinations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from max.pipelines.structured.schema_merging import ASSERTIONS, BRANCHES
from max.serve.chat.tools.values import resolve_schema

_COMBINATIONS = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
_GREATER = frozenset(("minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum"))
_LESS = frozenset(("maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum"))
_OBJECT = frozenset(("type", "properties", "required", "additionalProperties"))
_DEPTH = 8
_MOST_SCHEMAS = 500


class _TooManyError(ValueError):
    """A schema is not said by a few alternatives."""


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Schemas of which one fits what a schema fits; None where there would be many.

    They have ``enum`` for ``const``, and ``pattern`` may be a list of patterns that all hold.

    Args:
        schema: The schema.
        root: The schema that has its definitions.
    """
    try:
        return _Reader(root).options(schema, 0)
    except _TooManyError:
        return None


def as_schema(options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The schema of what fits one of some alternatives.

    Args:
        options: The alternatives.
    """
    schemas: list[dict[str, Any]] = []
    for option in options:
        patterns = option.get("pattern")
        plain = {
            key: option[key] for key in option if key != "pattern" or isinstance(patterns, str)
        }
        if isinstance(patterns, list):
            plain["allOf"] = [{"pattern": each} for each in patterns]
        schemas.append(plain)
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


class _Reader:
    """Reads the alternatives of schemas."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._left = root, _MOST_SCHEMAS

    def options(self, schema: Any, depth: int) -> list[dict[str, Any]]:
        """The alternatives of a schema.

        Args:
            schema: The schema.
            depth: The number of schemas around it.
        """
        self._left -= 1
        if isinstance(schema, bool):
            return [{}] if schema else []
        if not isinstance(schema, Mapping) or depth > _DEPTH or self._left < 0:
            raise _TooManyError
        own = {key: schema[key] for key in schema if key in ASSERTIONS and key not in _COMBINATIONS}
        if "const" in own:
            own["enum"] = [own.pop("const")]
        found = [own]
        for group in self._groups(schema, depth):
            if len(found) * len(group) > BRANCHES**2:
                raise _TooManyError
            made = [each for one in found for other in group for each in _join_two(one, other)]
            found = [each for at, each in enumerate(made) if each not in made[:at]]
            if len(found) > BRANCHES:
                raise _TooManyError
        return found

    def _groups(self, schema: Mapping[str, Any], depth: int) -> Iterator[list[dict[str, Any]]]:
        """For each part that a schema combines with its own keywords: the alternatives."""
        if "$ref" in schema:
            yield self.options(resolve_schema({"$ref": schema["$ref"]}, self._root), depth + 1)
        for member in schema.get("allOf") or ():
            yield self.options(member, depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if members := schema.get(keyword):
                yield [option for each in members for option in self.options(each, depth + 1)]


def _join_two(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What fits both of two schemas; empty if nothing does."""
    joined = {**other, **one}
    for key in one.keys() & other.keys():
        own, value = one[key], other[key]
        if own == value:
            continue
        if key == "type":
            kinds = _common_types(_as_list(own), _as_list(value))
            if not kinds:
                return []
            joined[key] = kinds[0] if len(kinds) == 1 else kinds
        elif key == "enum":
            joined[key] = [each for each in own if each in value]
            if not joined[key]:
                return []
        elif key in _GREATER | _LESS:
            joined[key] = max(own, value) if key in _GREATER else min(own, value)
        elif key in ("required", "pattern"):
            joined[key] = list(dict.fromkeys([*_as_list(own), *_as_list(value)]))
        elif key == "additionalProperties":
            joined[key] = _both(own, value)
        elif key != "properties":
            raise _TooManyError
    properties = _joined_properties(one, other)
    if _is_contradictory(joined):
        return []
    return [{**joined, "properties": properties} if properties else joined]


def _is_contradictory(schema: Mapping[str, Any]) -> bool:
    """Whether the limits of a schema of one type exclude each other."""
    kind = schema.get("type")
    for name, own in (("Length", "string"), ("Items", "array"), ("Properties", "object")):
        most = schema.get(f"max{name}")
        if kind == own and most is not None and schema.get(f"min{name}", 0) > most:
            return True
    if kind not in ("integer", "number"):
        return False
    least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    most, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    return (
        (least is not None and most is not None and least > most)
        or (least is not None and below is not None and least >= below)
        or (above is not None and most is not None and above >= most)
        or (above is not None and below is not None and above >= below)
    )


def _common_types(one: list[str], other: list[str]) -> list[str]:
    pairs = [(first, second) for first in one for second in other]
    # an integer is a number
    common = [
        first if first == second else "integer"
        for first, second in pairs
        if first == second or {first, second} == {"integer", "number"}
    ]
    return list(dict.fromkeys(common))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _both(one: Any, other: Any) -> Any:
    """The schema of what fits two schemas."""
    if one is False or other is False:
        return False
    parts = [each for each in (one, other) if each is not True and each != {}]
    if len(parts) == 2 and parts[0] != parts[1]:
        return {"allOf": parts}
    return parts[0] if parts else {}


def _joined_properties(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    listed = [each.get("properties") or {} for each in (one, other)]
    # a schema may say something of the properties that only the other one lists
    more = [each.get("additionalProperties", True) for each in (one, other)]
    return {
        name: _both(listed[0].get(name, more[0]), listed[1].get(name, more[1]))
        for name in {**listed[0], **listed[1]}
    }


def object_alternatives(parameters: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The arguments of a call as alternatives with all their properties, and the keywords that these lack.

    Args:
        parameters: The schema of the arguments.
    """
    options = alternatives(parameters, parameters)
    if options is None:
        names = {name: {} for name, _ in _listed_properties(parameters)}
        return [{"properties": names}], ["all but the names of its arguments"]
    found: list[dict[str, Any]] = []
    lacks: list[str] = []
    for option in options:
        if "object" not in _as_list(option.get("type", "object")):
            continue
        properties: dict[str, Any] = dict(option.get("properties") or {})
        required = option.get("required") or []
        for name in _as_list(required):
            properties.setdefault(name, option.get("additionalProperties", {}))
        properties = {
            name: each for name, each in properties.items() if not _fits_nothing(each, parameters)
        }
        if any(name not in properties for name in _as_list(required)):
            continue
        listed = {"properties": properties} if properties or "properties" in option else {}
        made = {**option, **listed}
        if made not in found:
            found.append(made)
        lacks += [key for key in option if key not in _OBJECT]
    return found or [{}], list(dict.fromkeys(lacks))


def _fits_nothing(schema: Any, root: Mapping[str, Any]) -> bool:
    # schemas that contradict each other come from conditions
    combined = isinstance(schema, Mapping) and "allOf" in schema
    return schema is False or (combined and alternatives(schema, root) == [])


def argument_schema(parameters: Mapping[str, Any], name: str) -> Any:
    """The schema of an argument, in whichever part of the schema of all arguments it is; None if it has none.

    Args:
        parameters: The schema of the arguments.
        name: The argument.
    """
    found = [schema for own, schema in _listed_properties(parameters) if own == name]
    if not found:
        more = parameters.get("additionalProperties")
        return more if isinstance(more, Mapping) else None
    return found[0] if len(found) == 1 else {"anyOf": found}


def _listed_properties(parameters: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The properties that any part of a schema lists, which may be of any form."""
    found: list[tuple[str, Any]] = []
    left: list[Any] = [parameters]
    seen: set[int] = set()
    while left and len(seen) < _MOST_SCHEMAS:
        schema = left.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        properties = schema.get("properties")
        if isinstance(properties, Mapping):
            found += [(name, each) for name, each in properties.items() if each is not False]
        if isinstance(schema.get("$ref"), str):
            left.append(resolve_schema({"$ref": schema["$ref"]}, parameters))
        for keyword in ("allOf", "anyOf", "oneOf"):
            members = schema.get(keyword)
            left += members if isinstance(members, list) else []
    return found
